"""Leaves of a graph on our kernels: linear layers, root-mean-square norms, gated feed-forward layers, and the rotary
embedding that attention calls.

A linear layer is known by its class; all others by their numbers, whatever their classes are called: their own forward
is compared with the kernel's function on random weights. Linear layers that are given one input in turn are one product
if their weights lie together. What is not recognised stays as it is. The result of a row does not depend on the other
rows.

Legend: R rows, H inputs of a module, I intermediate, E experts, k experts a token, D head size.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise, permutations
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moelight.kernels import native
from moelight.kernels.ffn import cpu_expert_ffn
from moelight.kernels.norm import cpu_rms_norm, cpu_rotate, rms_norm, rms_norm_mixed
from moelight.kernels.products import Joined, feed_forward_stored, linear, linear_of_all, parts
from moelight.kernels.reference import rms_norm as plain_norm
from moelight.kernels.reference import rotate as plain_rotation
from moelight.kernels.stored_weight import stored_of
from moelight.models.graph.forwards import calling, undecorated

Forward = Callable[[Tensor], Tensor]
Maker = Callable[[Any], Callable[..., Tensor]]  # of the forward of a module
_WIDTHS = (8, 16)  # H and I of a feed-forward layer on trial
_ACTIVATIONS: Mapping[str, Forward] = {  # of `cpu_expert_ffn`
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_MOST_UNEQUAL = 0.02  # of bfloat16 results of a norm: float32 sums in another order round to another number at times
_SIZES = ("in_features", "out_features", "layer_idx")  # that change no function
FAILURES = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def use_leaf_kernels(module: nn.Module) -> None:
    """Let the leaves of ``module`` compute by our kernels wherever their parameters are when they are called."""
    makers: dict[Any, Callable[[Any], Any] | None] = {}
    rotating: dict[Any, FunctionType | None] = {}
    groups = [group for part in module.modules() for group in _neighbours(part)]
    for part in module.modules():
        if "forward" in vars(part):
            continue  # it has been given another one already
        if type(part).forward is nn.Linear.forward:
            part.forward = _linear_of(part)
            continue
        key = _key(part)
        if key is not None and key not in makers:
            makers[key] = _made_of(part)
        if key is not None and (make := makers[key]) is not None:
            part.forward = make(part)
            continue
        original = type(part).forward
        if original not in rotating:
            rotating[original] = _rotating(original)
        if (ours := rotating[original]) is not None:
            part.forward = MethodType(ours, part)
    for group in groups:
        _InTurn(group)


def _key(part: nn.Module) -> Any:
    """Return a key shared by modules that compute the same; None for a module that cannot be recognised."""
    children = [
        (name, *described(child), getattr(child, "bias", None) is None) for name, child in part.named_children()
    ]
    shapes = [(name, parameter.shape) for name, parameter in part._parameters.items() if parameter is not None]
    alone = [name for name, _ in shapes] == ["weight"] and len(shapes[0][1]) in (1, 2) and not children
    products = sum(type(child).forward is nn.Linear.forward for child in part.children())
    if not alone and (shapes or products not in (2, 3) or _has_other_weights(part)):
        return None
    return described(part), tuple(children), tuple(shapes)


def _made_of(part: Any) -> Callable[[Any], Any] | None:
    if not part._parameters:
        return _feed_forward_of(part)
    return _norm_of(part) if part.weight.ndim == 1 else None


def described(part: nn.Module) -> tuple[Any, ...]:
    """The class of ``part`` and its numbers, texts and functions."""
    plain_types = (bool, int, float, str)
    attributes = [
        (name, value) for name, value in vars(part).items() if isinstance(value, plain_types) or callable(value)
    ]
    return type(part), tuple((name, value) for name, value in attributes if name not in _SIZES)


def _has_other_weights(part: nn.Module) -> bool:
    others = (child for child in part.children() if type(child).forward is not nn.Linear.forward)
    return any(tensor is not None for child in others for tensor in (*child.parameters(), *child.buffers()))


@dataclass(frozen=True, slots=True)
class NormForm:
    """A root-mean-square norm: ``eps`` under its root, ``shift`` of its weight, and whether it is computed in float32
    and rounded ``once``, or as `cpu_rms_norm` rounds."""

    eps: float
    shift: float = 0.0
    once: bool = False

    def weight(self, part: Any) -> Tensor:
        """The factors of the norm ``part``, float32 where it is rounded once."""
        weight = part._parameters["weight"]
        return weight.float() + self.shift if self.once else weight


def norms_of(module: nn.Module) -> dict[Any, NormForm]:
    """The root-mean-square norms within ``module``."""
    makers: dict[Any, Callable[[Any], Any] | None] = {}
    norms = {}
    for part in module.modules():
        if "forward" in vars(part) or list(part._parameters) != ["weight"] or (key := _key(part)) is None:
            continue
        if key not in makers:
            makers[key] = _made_of(part)
        made = makers[key]
        if isinstance(made, partial) and made.func in (_norm_twice, _norm_once):
            norms[part] = NormForm(**made.keywords, once=made.func is _norm_once)
    return norms


def _linear_of(part: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight, bias = part._parameters["weight"], part._parameters["bias"]
        return linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])

    return forward


def _neighbours(part: nn.Module) -> Iterator[list[Any]]:
    """Linear layers without biases and of as many inputs that follow one another among the children of ``part``."""
    for inputs, group in groupby(part.children(), _inputs_without_bias):
        if inputs is not None and len(layers := list(group)) > 1:
            yield layers


def _inputs_without_bias(part: Any) -> int | None:
    """H of a linear layer that has no bias and its own forward; else None."""
    if type(part).forward is not nn.Linear.forward or "forward" in vars(part) or part._parameters["bias"] is not None:
        return None
    return part._parameters["weight"].shape[1]


class _InTurn:
    """The forwards of linear layers, the first of which were given one and the same input in turn at every call so far:
    the next time their products are one, of which each takes its columns."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers, self._own = layers, [layer.forward for layer in layers]
        self._together: int | None = None  # so many share their inputs; None before the first call
        self._seen = 0  # so many were given the last input
        self._input: Callable[[], Tensor | None] = lambda: None
        self._results: Sequence[Tensor] = ()  # of the last input; empty once the last of them was taken
        for number, layer in enumerate(layers):
            layer.forward = self._first if number == 0 else partial(self._later, number)

    def _first(self, x: Tensor) -> Tensor:
        if self._seen:
            self._together = min(self._seen, self._seen if self._together is None else self._together)
        self._input, self._seen, self._results = weakref.ref(x), 1, ()
        count = self._together or 1
        if count == 1 or not native.on_cpu(x):
            return self._own[0](x)
        weights = [layer._parameters["weight"] for layer in self._layers[:count]]
        joined, sizes = as_one_matrix(*weights), [weight.shape[0] for weight in weights]
        if joined is None or sum(sizes) % 2:  # numbers of a row are seen as complex ones by even strides alone
            return self._own[0](x)
        parts = linear_of_all(_rows(x), joined).split(sizes, dim=1)
        self._results = [part.view(*x.shape[:-1], part.shape[1]) for part in parts]
        return self._results[0]

    def _later(self, number: int, x: Tensor) -> Tensor:
        if x is not self._input() or self._seen != number:
            return self._own[number](x)
        self._seen += 1
        if number >= len(self._results):
            return self._own[number](x)
        result = self._results[number]
        if number == len(self._results) - 1:
            self._results = ()
        return result


def _rows(x: Tensor) -> Tensor:
    """x [..., H] -> [R, H], without gaps in a row."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _norm_of(part: Any) -> Maker | None:
    """Return a factory of forwards for norms like ``part``, if it is an RMS norm."""
    generator = torch.Generator().manual_seed(0)
    size = part.weight.shape[0]
    weight = torch.rand(size, generator=generator, dtype=torch.float32) + 0.5
    x = torch.randn((4, size), generator=generator) * torch.tensor((1e-3, 0.03, 1.0, 30.0)).unsqueeze(1)
    epsilons = {value for value in vars(part).values() if isinstance(value, float)}
    if (expected := tried(part, {"weight": weight}, {}, x)) is None:
        return _gated_norm_of(part, weight, x, epsilons)
    for shift in (0.0, 1.0):
        for eps in epsilons:
            if torch.allclose(plain_norm(x, weight + shift, eps), expected, rtol=1e-5, atol=0):
                half, narrow = weight.bfloat16(), x.bfloat16()
                theirs = tried(part, {"weight": half}, {}, narrow)
                return None if theirs is None else _rounding(shift, eps, half, narrow, theirs)
    return None


def _gated_norm_of(part: Any, weight: Tensor, x: Tensor, epsilons: set[float]) -> Maker | None:
    """Return a factory of forwards for norms like ``part``, if it is an RMS norm gated by SiLU of a second input."""
    gate = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = tried(part, {"weight": weight}, {}, x, gate)
    for eps in epsilons if expected is not None else ():
        if torch.allclose(plain_norm(x, weight, eps, gate=gate), expected, rtol=1e-5, atol=0):
            half, narrow, by = weight.bfloat16(), x.bfloat16(), gate.bfloat16()
            theirs, ours = tried(part, {"weight": half}, {}, narrow, by), plain_norm(narrow, half, eps, gate=by)
            near = theirs is not None and theirs.dtype == ours.dtype and _unequal(ours, theirs) <= _MOST_UNEQUAL
            return partial(_norm_gated, eps=eps) if near else None
    return None


def _rounding(shift: float, eps: float, weight: Tensor, x: Tensor, expected: Tensor) -> Maker | None:
    """Whether bfloat16 results are rounded once, or before they are multiplied by the weight too."""
    once = plain_norm(x.float(), weight.float() + shift, eps).to(x.dtype)
    if expected.dtype != x.dtype:
        return None
    if _unequal(once, expected) <= _MOST_UNEQUAL:
        return partial(_norm_once, shift=shift, eps=eps)
    if not shift and _unequal(plain_norm(x, weight, eps), expected) <= _MOST_UNEQUAL:
        return partial(_norm_twice, eps=eps)
    return None


def _unequal(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def _norm_once(part: Any, shift: float, eps: float) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight = part._parameters["weight"]
        if x.is_meta:
            return torch.empty_like(x)
        weight = weight.float() + shift if shift else weight
        return rms_norm_mixed(_rows(x), weight, eps, x.dtype).view(x.shape)

    return forward


def _norm_twice(part: Any, eps: float) -> Forward:
    original = part.forward

    def forward(x: Tensor) -> Tensor:
        weight = part._parameters["weight"]
        if x.is_meta or weight.dtype != x.dtype:
            return original(x)
        if x.ndim == 4 and x.shape[0] == 1 and native.on_cpu(x) and x[0, 0].is_contiguous():  # heads of one product
            return cpu_rms_norm(x[0], weight, eps)[None]
        return rms_norm(_rows(x), weight, eps).view(x.shape)

    return forward


def _norm_gated(part: Any, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    original = part.forward

    def forward(x: Tensor, gate: Tensor) -> Tensor:
        weight = part._parameters["weight"]
        if not native.on_cpu(x) or not native.available() or weight.dtype != x.dtype or gate.dtype != x.dtype:
            return original(x, gate)
        return cpu_rms_norm(_rows(x), weight, eps, gate=_rows(gate)).view(x.shape)

    return forward


def _feed_forward_of(part: Any) -> Maker | None:
    """Return a factory of forwards for feed-forward layers like ``part``, if it is gated and has no biases."""
    products = [name for name, child in part._modules.items() if type(child).forward is nn.Linear.forward]
    if any(part._modules[name].bias is not None for name in products):
        return None
    generator = torch.Generator().manual_seed(0)
    hidden, width = _WIDTHS
    gate_up = torch.randn((2 * width, hidden), generator=generator)
    down, x = torch.randn((hidden, width), generator=generator), torch.randn((4, hidden), generator=generator)
    gate, up = gate_up.split(width)
    inward = (gate, up) if len(products) == 3 else (gate_up,)
    for names in permutations(products):
        weights = dict(zip(names, (*inward, down), strict=True))
        output = tried(part, {}, {name: product_of(weight) for name, weight in weights.items()}, x)
        for activation, of in _ACTIVATIONS.items():
            expected = functional.linear(of(functional.linear(x, gate)) * functional.linear(x, up), down)
            if (
                output is not None
                and output.shape == x.shape
                and torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
            ):
                return partial(FeedForward, names=names, activation=activation)
    return None


def product_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of ``weight`` [out, in] and ``bias`` [out]."""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class FeedForward:
    """The forward of a gated feed-forward layer without biases."""

    def __init__(self, part: Any, names: tuple[str, ...], activation: str) -> None:
        """``names``: of gate, up and down, or of both and down."""
        self._original, self._products = part.forward, [part._modules[name] for name in names]
        self.activation = activation

    @property
    def weights(self) -> tuple[list[Tensor], Tensor]:
        """Those of gate and up, or one of both, and that of down."""
        *inward, down = [product._parameters["weight"] for product in self._products]
        return inward, down

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        inward, down = self.weights
        if not native.on_cpu(x) or not native.available() or down.dtype != x.dtype:
            return self._original(x)
        stored = stored_of((*inward, down))
        if len(stored) > len(inward):
            result = feed_forward_stored(_rows(x), stored[:-1], stored[-1], activation=self.activation)
            return self._original(x) if result is None else result.view(x.shape)
        gate_up = inward[0] if len(inward) == 1 else as_one_matrix(*inward)
        if stored or not isinstance(gate_up, Tensor):
            return self._original(x)
        rows = _rows(x)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for start, count in parts(0, len(rows)):
            some, offsets = slice(start, start + count), torch.tensor((0, count), dtype=torch.int32)
            cpu_expert_ffn(rows[some], (gate_up,), (down,), offsets, activation=self.activation, out=out[some])
        return out.view(x.shape)


def as_one_matrix(*matrices: Tensor) -> Joined | None:
    """matrices [I, H], of any I, as one view [sum of I, H], if they lie so; those that are kept as they are stored as
    they are."""
    stored = stored_of(matrices)
    if stored:
        return stored if len(stored) == len(matrices) else None
    for one, other in pairwise(matrices):
        if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or one.dtype != other.dtype:
            return None
        if other.storage_offset() != one.storage_offset() + one.numel():
            return None
    inputs = matrices[0].shape[1]
    return matrices[0].as_strided((sum(map(len, matrices)), inputs), (inputs, 1))


def _rotating(forward: Any) -> FunctionType | None:
    """``forward`` of a module with the rotary embedding of our kernel in place of the function that it calls,
    if that is one of halves; the function itself stays what it is."""
    if not isinstance(original := undecorated(forward), FunctionType):
        return None
    for name in original.__code__.co_names:
        function = original.__globals__.get(name)
        if isinstance(function, FunctionType) and _rotates_halves(function):
            return calling(original, {name: _rotation(function)})
    return None


def _rotates_halves(function: FunctionType) -> bool:
    """Whether it rotates q [1, Hq, T, D] and k [1, Hkv, T, D] by cos and sin [1, T, D] as `cpu_rotate` does."""
    taken = list(inspect.signature(function).parameters.values())
    if len(taken) < 4 or any(parameter.default is inspect.Parameter.empty for parameter in taken[4:]):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn((1, heads, 3, 8), generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn((1, 3, 4), generator=generator).repeat(1, 1, 2) for _ in range(2))
    try:
        with torch.inference_mode():
            output = function(q, k, cos, sin)
    except FAILURES:
        return False
    if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(tensor, Tensor) for tensor in output):
        return False
    expected = [plain_rotation(tensor[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for tensor in (q, k)]
    same = zip(output, expected, strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in same)


def _rotation(original: FunctionType) -> Callable[..., Any]:
    """``original`` on our kernel where it serves what is given."""
    halves: weakref.ref[Tensor] | None = None  # the last cosines that repeat in their second half, as their sines do

    def rotate(*arguments: Any, **named: Any) -> Any:
        nonlocal halves
        heads = None if named or len(arguments) != 4 else _heads(*arguments)
        if heads is None:
            return original(*arguments, **named)
        q, k, cos, sin = arguments
        if halves is None or cos is not halves():
            if not all(torch.equal(*tensor.chunk(2, dim=-1)) for tensor in (cos, sin)):
                return original(q, k, cos, sin)
            halves = weakref.ref(cos)
        rotated = [cpu_rotate(head, cos[0], sin[0]).transpose(0, 1)[None] for head in heads]
        if len(rotated) == 2:
            return rotated[0], rotated[1]
        split = rotated[0].split((q.shape[1], k.shape[1]), dim=1)
        return split[0], split[1]

    return rotate


def _heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor] | None:
    """Return the heads of q [1, Hq, T, D] and k [1, Hkv, T, D] by token [T, heads, D], as one tensor where they are
    adjacent; None if our kernel does not serve them."""
    tensors = (q, k, cos, sin)
    if not native.on_cpu(q) or (q.ndim, k.ndim, cos.ndim) != (4, 4, 3) or len({one.dtype for one in tensors}) > 1:
        return None
    tokens, size = q.shape[2:]
    if len(q) != 1 or len(k) != 1 or cos.shape != (1, tokens, size) or sin.shape != cos.shape or size % 2:
        return None
    heads = [one[0].transpose(0, 1) for one in (q, k)]
    plain = all(one.shape[::2] == (tokens, size) and one[0].is_contiguous() for one in heads)
    if not plain or not cos.is_contiguous() or not sin.is_contiguous():
        return None
    first, second = heads
    count = first.shape[1] + second.shape[1]
    step = first.stride(0) if tokens > 1 else count * size  # a single token has any
    near = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    follows = near and second.storage_offset() == first.storage_offset() + first[0].numel()
    if follows and (tokens == 1 or second.stride(0) == step) and step >= count * size:
        return [first.as_strided((tokens, count, size), (step, size, 1))]
    return heads


def tried(
    part: nn.Module,
    weights: Mapping[str, Tensor],
    children: Mapping[str, nn.Module],
    *x: Tensor,
    kind: type = Tensor,
) -> Any:
    """The module's own forward of ``x`` with other parameters and children; None if it does not compute so, or its
    result is not of ``kind``."""
    trial = copy.copy(part)
    parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    trial.__dict__.update(_parameters=parameters, _modules={**part._modules, **children})
    try:
        with torch.inference_mode():
            output = type(part).forward(trial, *x)
    except FAILURES:
        return None
    return output if isinstance(output, kind) else None
