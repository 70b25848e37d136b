"""Attention of packed prompts on the CPU: right for every shape, and the same however prompts are packed or cut."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelight.kernels import native, reference_prefill
from moelight.kernels.prefill_cpu import cpu_prefill_attention
from tests.kernels.conftest import ISAS
from tests.kernels.paged import TOLERANCE, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One call: packed prompts, perhaps after a context, and how they attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **more: Any) -> Tensor:
        return cpu_prefill_attention(self.q, self.k, self.v, self.cu_seqlens, self.scale, **self.options, **more)

    def truth(self) -> Tensor:
        options = dict(self.options)
        if cache := options.get("cache"):
            options["cache"] = (cache[0].double(), cache[1].double(), *cache[2:])
        if (sinks := options.get("sinks")) is not None:
            options["sinks"] = sinks.double()
        wide = (each.double() for each in (self.q, self.k, self.v))
        return reference_prefill.prefill_attention(*wide, self.cu_seqlens, self.scale, **options)

    def error(self) -> float:
        return relative_error(self.run(), self.truth())


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def prompts(
    lengths: Sequence[int],
    contexts: Sequence[int] | None = None,
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Prompts:
    tokens = sum(lengths)
    if contexts is not None:
        width = max(1, -(-max(contexts, default=0) // block_size))
        blocks = len(lengths) * width + 3
        tables = torch.randperm(blocks)[: len(lengths) * width].view(-1, width).int()
        pages = (torch.randn(blocks, kv_heads, block_size, head_dim).to(dtype) for _ in range(2))
        options["cache"] = (*pages, tables, torch.tensor(contexts, dtype=torch.int32))
    q, k, v = (torch.randn(tokens, heads, head_dim).to(dtype) for heads in (q_heads, kv_heads, kv_heads))
    return Prompts(q=q, k=k, v=v, cu_seqlens=bounds(lengths), scale=head_dim**-0.5, options=options)


@EVERY_DTYPE
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 96, 128, 192, 256])
def test_every_head_size(server, dtype, head_dim):
    call = prompts([1, 33, 70], q_heads=6, head_dim=head_dim, dtype=dtype)
    found = call.run()
    assert found.dtype == dtype
    assert found.shape == call.q.shape
    assert relative_error(found, call.truth()) <= TOLERANCE[dtype]


@EVERY_DTYPE
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 13, 100])
def test_every_group_size(server, dtype, group):
    assert prompts([40, 7, 70], q_heads=2 * group, head_dim=16, dtype=dtype).error() <= TOLERANCE[dtype]


@EVERY_DTYPE
def test_ragged_prompts(server, dtype):
    lengths = (1, 400, 0, 17, 63, 64, 65, 128, 31, 3, 0)
    call = prompts(lengths, q_heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    found, truth = call.run(), call.truth()
    for first, last in itertools.pairwise(call.cu_seqlens.tolist()):
        assert last == first or relative_error(found[first:last], truth[first:last]) <= TOLERANCE[dtype]


@EVERY_DTYPE
@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_prompts_after_their_contexts(server, dtype, block_size):
    call = prompts([30, 1, 70, 0, 12], [100, 64, 0, 9, 131], block_size=block_size, head_dim=24, dtype=dtype)
    assert call.error() <= TOLERANCE[dtype]


@EVERY_DTYPE
@pytest.mark.parametrize("window", [1, 3, 64, 65, 100, 10_000])
def test_windows(server, dtype, window):
    assert prompts([1, 170, 40], window=window, dtype=dtype).error() <= TOLERANCE[dtype]
    assert prompts([20, 99], [150, 70], window=window, dtype=dtype).error() <= TOLERANCE[dtype]


@EVERY_DTYPE
def test_sinks_and_soft_caps(server, dtype):
    sinks = torch.randn(4) * 3
    assert prompts([90, 2], dtype=dtype, sinks=sinks).error() <= TOLERANCE[dtype]
    assert prompts([90, 2], [0, 70], dtype=dtype, sinks=sinks.bfloat16(), window=30).error() <= TOLERANCE[dtype]
    call = prompts([90, 2], dtype=dtype, softcap=2.5)
    assert replace(call, q=call.q * 4).error() <= TOLERANCE[dtype]
    assert prompts([90, 2], [0, 70], dtype=dtype, softcap=50.0, sinks=sinks).error() <= TOLERANCE[dtype]


def test_nothing_to_do(server):
    assert prompts([]).run().shape == (0, 4, 32)
    assert prompts([0, 0], [5, 0]).run().shape == (0, 4, 32)


def test_blocks_before_the_window_and_after_the_context_are_never_looked_at(server):
    call = prompts([10, 3], [100, 40], window=20)
    k_cache, v_cache, tables, lens = call.options["cache"]
    wild = tables.clone()
    wild[0, :5], wild[1, :1], wild[1, 3:] = -1, 2**31 - 1, 10**6
    spoiled = replace(call, options={"window": 20, "cache": (k_cache, v_cache, wild, lens)})
    assert torch.equal(spoiled.run(), call.run())


def test_rows_may_be_strided_and_out_may_be_the_queries(server):
    call = prompts([30, 61], head_dim=40)
    expected = call.run()
    fused = torch.cat((call.q, call.k, call.v), dim=1)
    views = replace(call, q=fused[:, :4], k=fused[:, 4:6], v=fused[:, 6:])
    assert torch.equal(views.run(), expected)
    assert views.run(out=views.q, threads=2) is views.q
    assert torch.equal(fused[:, :4], expected)
    assert torch.equal(fused[:, 4:], torch.cat((call.k, call.v), dim=1))


def test_large_and_tiny_logits_do_not_overflow(server):
    call = prompts([150])
    for scale in (1e4, 1e-20, -50.0):
        assert replace(call, scale=scale).error() <= 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_key_is_not_hidden(server, poison):
    call = prompts([100, 100])
    call.k[80, :, 3] = poison
    found = call.run()
    assert found[80:100].isnan().any()
    assert found[100:].isfinite().all()


def test_one_position_is_its_value_exactly(kind):
    call = prompts([1] * 9, q_heads=8, kv_heads=8, head_dim=256, dtype=kind)
    values = (torch.randn(call.v.shape) * torch.logspace(-9, 4, 256)).to(kind)
    assert torch.equal(replace(call, v=values).run(), values)


def kinds() -> list[tuple[str, torch.dtype, str]]:
    """Every instruction set, dtype and way to multiply bfloat16 that runs here."""
    found = [(isa, dtype, "auto") for isa in ISAS for dtype in DTYPES]
    for products in ("wide", "pairs", "tiles", "imitation") if "avx512" in ISAS else ():
        with contextlib.suppress(ValueError):
            native.module().set_bf16_products(products)
            found.append(("avx512", torch.bfloat16, products))
    if ISAS:
        native.module().set_bf16_products("auto")
    return found


@pytest.fixture(params=kinds(), ids=lambda kind: "-".join(map(str, kind)))
def kind(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype, while an instruction set and a way to multiply are in force."""
    isa, dtype, products = request.param
    native.module().set_isa(isa)
    native.module().set_bf16_products(products)
    yield dtype
    native.module().set_bf16_products("auto")
    native.module().set_isa("auto")


OPTIONS = [{}, {"window": 50}, {"sinks": torch.randn(6), "softcap": 3.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks and cap"])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_a_prompt_is_the_same_in_any_company(kind, options, head_dim):
    lengths = [1, 300, 64, 0, 129, 16, 200]
    call = prompts(lengths, q_heads=6, head_dim=head_dim, dtype=kind, **options)
    together = call.run(threads=2).split(lengths)
    parts = [each.split(lengths) for each in (call.q, call.k, call.v)]
    for order, threads in (*(([s], 1) for s in range(len(lengths))), ([6, 2, 1], 2), ([4, 4, 3, 0], 5)):
        q, k, v = (torch.cat([each[s] for s in order]) for each in parts)
        company = replace(call, q=q, k=k, v=v, cu_seqlens=bounds([lengths[s] for s in order]))
        assert torch.equal(company.run(threads=threads), torch.cat([together[s] for s in order]))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks and cap"])
@pytest.mark.parametrize("cuts", [[0, 1, 2, 300], [0, 64, 128, 300], [0, 130, 131, 195, 300], [0, 299, 300]], ids=str)
def test_a_prompt_in_chunks_is_the_prompt_bit_for_bit(kind, options, cuts):
    tokens, block_size = 300, 16
    call = prompts([tokens], q_heads=6, head_dim=40, dtype=kind, **options)
    whole = call.run(threads=2)
    blocks = -(-tokens // block_size)
    k_cache, v_cache = torch.zeros(2, blocks + 2, 2, block_size, 40, dtype=kind).unbind()
    table = torch.randperm(blocks + 2)[:blocks].int().unsqueeze(0)
    for first, last in itertools.pairwise(cuts):
        chunk = replace(
            call,
            q=call.q[first:last],
            k=call.k[first:last],
            v=call.v[first:last],
            cu_seqlens=bounds([last - first]),
            options=options | {"cache": (k_cache, v_cache, table, torch.tensor([first], dtype=torch.int32))},
        )
        assert torch.equal(chunk.run(threads=1), whole[first:last])
        for position in range(first, last):
            block, offset = table[0, position // block_size], position % block_size
            k_cache[block, :, offset], v_cache[block, :, offset] = call.k[position], call.v[position]


@pytest.mark.parametrize("head_dim", [8, 40, 128, 256])
@pytest.mark.parametrize("group", [1, 5, 50])
def test_every_way_to_multiply(kind, head_dim, group):
    for call in (
        prompts([1, 33, 170], q_heads=2 * group, head_dim=head_dim, dtype=kind),
        prompts([7, 65], [99, 64], q_heads=2 * group, head_dim=head_dim, dtype=kind, window=70, softcap=9.0),
    ):
        assert call.error() <= TOLERANCE[kind]


def test_instruction_sets_agree(isa):
    call = prompts([150, 3], [70, 0], q_heads=8, head_dim=80)
    found = call.run()
    native.module().set_isa("scalar")
    assert relative_error(found, call.run().double()) <= 1e-6


def entry(index: Any, value: int) -> Any:
    def damage(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return damage


NAMES = ("q", "k", "v", "cu_seqlens", "k_cache", "v_cache", "block_tables", "context_lens", "sinks", "out")
ANY = {
    "missing": lambda _: None,
    "a list": lambda t: t.tolist(),
    "a number": lambda _: 3,
    "numpy": lambda t: t.numpy(),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "a row less": lambda t: t[:-1],
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
}
HEADS = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "another head size": lambda t: torch.cat((t, t), dim=-1),
    "a head size of 12": lambda t: t[..., :12].contiguous(),
    "one head more": lambda t: torch.cat((t, t[:, :1]), dim=1),
    "half precision": lambda t: t.half(),
    "no heads": lambda t: t[:, :0],
    "one row for all": lambda t: t[:1].expand(t.shape),
}
INDICES = [
    ("cu_seqlens", entry(0, 1)),
    ("cu_seqlens", entry(1, 26)),
    ("cu_seqlens", entry(1, -1)),
    ("cu_seqlens", entry(2, 24)),
    ("cu_seqlens", entry(2, 2**31 - 1)),
    ("block_tables", entry((0, 0), -1)),
    ("block_tables", entry((0, 2), 1000)),
    ("context_lens", entry(0, 25)),
    ("context_lens", entry(1, -1)),
    ("window", lambda _: 0),
    ("window", lambda _: 1.5),
    ("softcap", lambda _: 0.0),
    ("softcap", lambda _: float("nan")),
    ("softcap", lambda _: "50"),
    ("scale", lambda _: float("inf")),
    ("threads", lambda _: -1),
]
HARMLESS = {("sinks", "missing"), ("sinks", "float64"), ("sinks", "every other element"), ("out", "missing")}
DAMAGES = [
    *((name, damage) for name in NAMES for what, damage in ANY.items() if (name, what) not in HARMLESS),
    *((name, damage) for name in ("q", "k", "v", "k_cache", "v_cache", "out") for damage in HEADS.values()),
    *INDICES,
]


def arguments() -> dict[str, Any]:
    call = prompts([20, 5], [20, 3], head_dim=16, block_size=8)
    names = ("k_cache", "v_cache", "block_tables", "context_lens")
    found = dict(zip(names, call.options["cache"], strict=True))
    found |= {"q": call.q, "k": call.k, "v": call.v, "cu_seqlens": call.cu_seqlens, "scale": 0.25}
    return found | {
        "sinks": torch.randn(4),
        "out": torch.empty_like(call.q),
        "window": 40,
        "softcap": 9.0,
        "threads": 2,
    }


def attend(given_arguments: dict[str, Any]) -> Tensor:
    rest = dict(given_arguments)
    cache = tuple(rest.pop(name) for name in ("k_cache", "v_cache", "block_tables", "context_lens"))
    return cpu_prefill_attention(**rest, cache=cache)


# A tensor is often only wrong beside another one: which of the two is named is a matter of order.
PARTNERS = {
    "q": {"q", "k", "v", "out", "cu_seqlens"},
    "k": {"k", "v", "q", "k_cache"},
    "k_cache": {"k_cache", "v_cache", "block_tables", "context_lens"},
    "v_cache": {"v_cache"},
    "cu_seqlens": {"cu_seqlens", "block_tables"},
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_the_wrong_argument_is_named(server, name, damage):
    right = arguments()
    with pytest.raises(ValueError, match=r"^\w+: ") as refusal:
        attend(right | {name: damage(right[name])})
    assert str(refusal.value).split(":")[0] in PARTNERS.get(name, {name})


@pytest.mark.parametrize("cache", [(), (1, 2, 3), 5, "four"])
def test_a_cache_is_four_tensors(server, cache):
    call = prompts([3])
    with pytest.raises(ValueError, match=r"^(cache|k_cache): "):
        replace(call, options={"cache": cache}).run()


@FUZZ
@given(data=st.data())
def test_refuses_or_is_right(server, data):
    given_arguments = arguments()
    for name in NAMES:
        like = given_arguments[name]
        if data.draw(st.integers(0, 3), label=f"damage {name}") > 0:
            continue
        shape = [data.draw(st.sampled_from((n, n, n, 0, 1, n + 1))) for n in like.shape]
        dtype = data.draw(st.sampled_from((like.dtype, like.dtype, torch.bfloat16, torch.int64)))
        filling = data.draw(st.sampled_from((0, 0, 1, -1, 7, 2**31 - 1)))
        given_arguments[name] = torch.full(shape, filling).to(dtype)
        if len(shape) > 1 and data.draw(st.integers(0, 3)) == 0:
            given_arguments[name] = given_arguments[name].transpose(0, -1)
    given_arguments["window"] = data.draw(st.sampled_from((None, 1, 4, 2**63, -1)), label="window")
    try:
        found = attend(given_arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in given_arguments
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "module", lambda: None)
        expected = attend(given_arguments | {"out": None})
    assert found.isnan().equal(expected.isnan())
    assert relative_error(found.nan_to_num(), expected.double().nan_to_num()) <= 1e-2
