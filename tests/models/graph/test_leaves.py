"""Leaves of module graphs on kernels: what is recognised, results beside those of the modules, and rows that do not
depend on the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.kernels import native
from moelight.models.graph import leaves
from moelight.models.graph.leaves import use_leaf_kernels
from moelight.models.graph.self_test import lie_together

HIDDEN, WIDTH = 48, 96
EXPERTS, TOP_K, HEAD = 16, 4, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gated(nn.Module):
    """In the order of names that is furthest from transformers'."""

    def __init__(self, activation: Any = functional.silu, *, bias: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.one = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.other = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.one(x)) * self.other(x))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(HIDDEN, 2 * WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.out(functional.silu(gate) * up)


class Norm(nn.Module):
    def __init__(self, *, shift: float = 0.0, once: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.shift, self.once, self.eps = nn.Parameter(torch.ones(HIDDEN)), shift, once, eps

    def forward(self, x: Tensor) -> Tensor:
        result = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        if self.once:
            return (result * (self.shift + self.weight.float())).to(x.dtype)
        return (self.weight + self.shift) * result.to(x.dtype)


class Centred(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Router(nn.Module):
    def __init__(self, *, normalize: bool = True, rounds: bool = False, sigmoid: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        self.normalize, self.rounds, self.sigmoid = normalize, rounds, sigmoid

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x.reshape(-1, HIDDEN), self.weight)
        likely = logits.float().sigmoid() if self.sigmoid else logits.float().softmax(-1)
        weights, ids = likely.topk(TOP_K, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype) if self.rounds else weights, ids


def turn(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def rotate_backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_halves(q, k, cos, -sin)


class Heads(nn.Module):
    """What attention does before it attends."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, heads * HEAD, bias=False) for heads in (4, 2, 2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (item(x).view(*x.shape[:-1], -1, HEAD).transpose(1, 2) for item in (self.q, self.k, self.v))
        return *rotate_halves(q, k, cos, sin), v


class Backwards(Heads):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (item(x).view(*x.shape[:-1], -1, HEAD).transpose(1, 2) for item in (self.q, self.k, self.v))
        return *rotate_backwards(q, k, cos, sin), v


class Other(nn.Module):
    """A weight that multiplies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("it is never asked")


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    for weight in module.parameters():
        weight.data.normal_(0.0, 0.2)
    return module.to(dtype).requires_grad_(False)


def tokens(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((1, rows, HIDDEN), generator=torch.Generator().manual_seed(rows)).to(dtype)


def kind(module: nn.Module) -> str | None:
    """Which of the forwards of `leaves` it has; None: its own."""
    use_leaf_kernels(module)
    forward = vars(module).get("forward")
    return None if forward is None else getattr(forward, "__qualname__", type(forward).__name__).partition(".")[0]


MODULES = {
    "linear": (lambda: nn.Linear(HIDDEN, WIDTH), "_linear_of"),
    "linear without bias": (lambda: nn.Linear(HIDDEN, WIDTH, bias=False), "_linear_of"),
    "norm": (Norm, "_norm_twice"),
    "norm rounded once": (lambda: Norm(once=True, eps=1e-5), "_norm_once"),
    "norm of 1 + w": (lambda: Norm(shift=1.0, once=True), "_norm_once"),
    "gated": (Gated, "FeedForward"),
    "gated by GELU": (lambda: Gated(nn.GELU(approximate="tanh")), "FeedForward"),
    "joined": (Joined, "FeedForward"),
    "biased": (lambda: Gated(bias=True), None),
    "gated by ReLU": (lambda: Gated(functional.relu), None),
    "norm of 1 + w rounded twice": (lambda: Norm(shift=1.0), None),
    "centred": (Centred, None),
    "layer norm": (lambda: nn.LayerNorm(HIDDEN, bias=False), None),
    "other": (Other, None),
    "router": (Router, None),  # a tie of bfloat16 logits is broken by transformers
    "router of sigmoids": (lambda: Router(sigmoid=True, normalize=False), None),
    "embedding": (lambda: nn.Embedding(EXPERTS, HIDDEN), None),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_leaf_is_recognised_by_its_numbers(name: str) -> None:
    make, expected = MODULES[name]
    assert kind(make()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, (_, expected) in MODULES.items() if expected is not None])
def test_a_leaf_computes_what_its_module_does(name: str, dtype: torch.dtype) -> None:
    module = filled(MODULES[name][0](), dtype)
    lie_together(module)
    x = tokens(70, dtype)
    expected = copy.deepcopy(module).float()(x.float())
    use_leaf_kernels(module)
    result = module(x)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    step = torch.finfo(dtype).eps
    assert (result.float() - expected).abs().max() <= 4 * step * expected.abs().max()


@pytest.mark.skipif(not native.available(), reason="torch rounds up numbers of rows instead")
@pytest.mark.parametrize("name", [name for name, (_, expected) in MODULES.items() if expected is not None])
def test_the_result_of_a_row_does_not_depend_on_the_others(name: str) -> None:
    module = filled(MODULES[name][0](), torch.bfloat16)
    lie_together(module)
    use_leaf_kernels(module)
    x = tokens(65, torch.bfloat16)
    full = module(x)
    for rows in (slice(3, 4), slice(0, 17), slice(60, 65)):
        assert torch.equal(module(x[:, rows]), full[:, rows])


def test_gate_and_up_apart_are_computed_as_two_products() -> None:
    """Their memory is not copied: where they do not lie together the module's own forward runs on linear leaves."""
    module = filled(Gated())
    expected = copy.deepcopy(module)(tokens(5))
    assert leaves.as_one_matrix(module.one.weight, module.other.weight) is None
    use_leaf_kernels(module)
    assert torch.allclose(module(tokens(5)), expected, rtol=1e-4, atol=1e-5)
    lie_together(module)
    both = leaves.as_one_matrix(module.one.weight, module.other.weight)
    assert both is not None
    assert both.data_ptr() == module.one.weight.data_ptr()
    assert torch.equal(both, torch.cat((module.one.weight, module.other.weight)))


def test_rows_with_gaps_and_transposed_are_computed() -> None:
    module = filled(nn.Linear(HIDDEN, WIDTH))
    original = copy.deepcopy(module)
    use_leaf_kernels(module)
    wide = torch.randn(1, 7, 2 * HIDDEN)
    for x in (wide[..., HIDDEN:], wide[..., :HIDDEN].transpose(1, 2).contiguous().transpose(1, 2), tokens(1)[0, 0]):
        assert torch.allclose(module(x), original(x), rtol=1e-4, atol=1e-5)


def test_modules_of_one_class_may_differ() -> None:
    modules = nn.ModuleList((Gated(), Gated(functional.relu), Gated(nn.GELU()), Gated(nn.GELU(approximate="tanh"))))
    use_leaf_kernels(modules)
    assert ["forward" in vars(module) for module in modules] == [True, False, False, True]
    norms = filled(nn.ModuleList((Norm(eps=1e-6), Norm(eps=1.0))))
    original = copy.deepcopy(norms)
    use_leaf_kernels(norms)
    for ours, theirs in zip(norms, original, strict=True):
        assert torch.allclose(ours(tokens(3)), theirs(tokens(3)), atol=1e-6)


def test_a_forward_that_was_replaced_before_stays() -> None:
    module = Gated()
    module.forward = forward = lambda x: x  # type: ignore[method-assign]
    use_leaf_kernels(module)
    assert module.forward is forward


def test_leaves_take_weights_that_are_filled_later() -> None:
    with torch.device("meta"):
        module = Gated()
    use_leaf_kernels(module)
    assert module(torch.empty((1, 3, HIDDEN), device="meta")).shape == (1, 3, HIDDEN)
    for part in module.children():
        part.weight = nn.Parameter(torch.full(part.weight.shape, 0.1), requires_grad=False)
    x = tokens(3)
    inner = x.sum(-1, keepdim=True) * 0.1
    expected = (functional.silu(inner) * inner * 0.1 * WIDTH).expand(x.shape)
    assert torch.allclose(module(x), expected, rtol=1e-4, atol=1e-5)


def angles(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    half = torch.arange(rows)[:, None] * torch.rand(HEAD // 2, generator=torch.Generator().manual_seed(3))
    return half.cos().repeat(1, 2)[None].to(dtype), half.sin().repeat(1, 2)[None].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("together", [False, True])
def test_products_of_one_input_are_one_and_heads_are_rotated(dtype: torch.dtype, together: bool) -> None:
    module = filled(Heads(), dtype)
    if together:
        lie_together(module)
    original = copy.deepcopy(module)
    use_leaf_kernels(module)
    step = torch.finfo(dtype).eps
    for rows in (5, 33, 1, 7):  # the first pass says what the others join
        x, (cos, sin) = tokens(rows, dtype), angles(rows, dtype)
        expected = original(x, cos, sin)
        result = module(x, cos, sin)
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours.float() - theirs.float()).abs().max() <= 4 * step * theirs.float().abs().max()
        shared = len({item.untyped_storage().data_ptr() for item in result[:2]}) == 1
        assert shared == (together and rows != 5)
    x = tokens(9, dtype)
    assert torch.equal(module.k(x), module.k(x.clone()))  # alone, and of another input than the last


def test_a_rotation_of_another_kind_is_left_alone() -> None:
    module = filled(Backwards())
    original = copy.deepcopy(module)
    use_leaf_kernels(module)
    assert "forward" not in vars(module)
    x = tokens(6), *angles(6)
    assert all(torch.allclose(*item, rtol=1e-4, atol=1e-5) for item in zip(module(*x), original(*x), strict=True))


def test_angles_whose_halves_differ_are_turned_by_the_modules_own_function() -> None:
    module = filled(Heads())
    original = copy.deepcopy(module)
    use_leaf_kernels(module)
    cos, sin = angles(6)
    x = tokens(6), cos * torch.arange(HEAD), sin
    assert all(torch.allclose(*item, rtol=1e-4, atol=1e-5) for item in zip(module(*x), original(*x), strict=True))
