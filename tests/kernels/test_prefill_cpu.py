"""Attention of packed prompts on the CPU: right for every shape, and the same however prompts are packed or cut."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moelight.kernels import native
from tests.kernels.conftest import ISAS
from tests.kernels.packed import bounds, prompts
from tests.kernels.paged import TOLERANCE, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EVERY_DTYPE
def test_every_head_size(server, dtype):
    for head_dim in [8, 24, 40, 64, 80, 96, 128, 192, 256, 512]:
        call = prompts([1, 33, 70], q_heads=6, head_dim=head_dim, dtype=dtype)
        result = call.run()
        assert result.dtype == dtype
        assert result.shape == call.q.shape
        assert relative_error(result, call.truth()) <= TOLERANCE[dtype]


@EVERY_DTYPE
def test_every_group_size(server, dtype):
    for group in [1, 2, 3, 5, 8, 13, 100]:
        assert prompts([40, 7, 70], q_heads=2 * group, head_dim=16, dtype=dtype).error() <= TOLERANCE[dtype]


@EVERY_DTYPE
def test_ragged_prompts(server, dtype):
    lengths = (1, 400, 0, 17, 63, 64, 65, 128, 31, 3, 0)
    call = prompts(lengths, q_heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    result, truth = call.run(), call.truth()
    for first, last in itertools.pairwise(call.cu_seqlens.tolist()):
        assert last == first or relative_error(result[first:last], truth[first:last]) <= TOLERANCE[dtype]


@EVERY_DTYPE
def test_prompts_after_their_contexts(server, dtype):
    for block_size in [1, 5, 16, 128]:
        call = prompts([30, 1, 70, 0, 12], [100, 64, 0, 9, 131], block_size=block_size, head_dim=24, dtype=dtype)
        assert call.error() <= TOLERANCE[dtype]


@EVERY_DTYPE
@pytest.mark.parametrize("window", [None, 40])
def test_contexts_in_int8(server, dtype, window):
    call = prompts([30, 1, 70], [100, 64, 131], block_size=5, head_dim=24, dtype=dtype, window=window)
    cache = call.options["cache"]
    scales = [pages.float().abs().amax(-1) / 127 for pages in cache[:2]]
    full = [(p.float() / s.unsqueeze(-1)).round().to(torch.int8) for p, s in zip(cache[:2], scales, strict=True)]
    options = call.options | {"cache": (*full, *cache[2:]), "k_scale": scales[0], "v_scale": scales[1]}
    assert replace(call, options=options).error() <= TOLERANCE[dtype]
    wide = [(w.float() * s.unsqueeze(-1)).to(dtype) for w, s in zip(full, scales, strict=True)]
    same = replace(call, options=call.options | {"cache": (*wide, *cache[2:])})
    assert torch.equal(replace(call, options=options).run(), same.run())
    for name, wrong in {
        "k_scale": scales[0].double(),
        "v_scale": scales[1][:, :1],
        "k_cache": call.options["cache"],
    }.items():
        damaged = options | {"cache" if name == "k_cache" else name: wrong}
        with pytest.raises(ValueError, match=f"^{name}: "):
            replace(call, options=damaged).run()
    with pytest.raises(ValueError, match=r"^v_scale: "):
        replace(call, options=options | {"v_scale": None}).run()


@EVERY_DTYPE
def test_windows(server, dtype):
    for window in [1, 3, 64, 65, 100, 10_000]:
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
    result = call.run()
    assert result[80:100].isnan().any()
    assert result[100:].isfinite().all()


def test_one_position_is_its_value_exactly(kind):
    call = prompts([1] * 9, q_heads=8, kv_heads=8, head_dim=256, dtype=kind)
    values = (torch.randn(call.v.shape) * torch.logspace(-9, 4, 256)).to(kind)
    assert torch.equal(replace(call, v=values).run(), values)


def kinds() -> list[tuple[str, torch.dtype, str]]:
    """Every instruction set, dtype and way to multiply bfloat16 that runs here."""
    result = [(isa, dtype, "auto") for isa in ISAS for dtype in DTYPES]
    for products in ("wide", "pairs", "tiles", "emulated") if "avx512" in ISAS else ():
        with contextlib.suppress(ValueError):
            native.extension().set_bf16_products(products)
            result.append(("avx512", torch.bfloat16, products))
    if ISAS:
        native.extension().set_bf16_products("auto")
    return result


@pytest.fixture(params=kinds(), ids=lambda kind: "-".join(map(str, kind)))
def kind(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype, while an instruction set and a way to multiply are in force."""
    isa, dtype, products = request.param
    native.extension().set_isa(isa)
    native.extension().set_bf16_products(products)
    yield dtype
    native.extension().set_bf16_products("auto")
    native.extension().set_isa("auto")


OPTIONS = [{}, {"window": 50}, {"sinks": torch.randn(6), "softcap": 3.0}]


def test_a_prompt_is_the_same_in_any_company(kind):
    for head_dim, options in ((40, OPTIONS[0]), (128, OPTIONS[0]), (40, OPTIONS[1]), (128, OPTIONS[2])):
        lengths = [1, 150, 64, 0, 129, 16, 70]
        call = prompts(lengths, q_heads=6, head_dim=head_dim, dtype=kind, **options)
        together = call.run(threads=2).split(lengths)
        parts = [item.split(lengths) for item in (call.q, call.k, call.v)]
        for order, threads in (*(([s], 1) for s in range(len(lengths))), ([6, 2, 1], 2), ([4, 4, 3, 0], 5)):
            q, k, v = (torch.cat([part[s] for s in order]) for part in parts)
            company = replace(call, q=q, k=k, v=v, cu_seqlens=bounds([lengths[s] for s in order]))
            assert torch.equal(company.run(threads=threads), torch.cat([together[s] for s in order]))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks and cap"])
def test_a_prompt_in_chunks_is_the_prompt_bit_for_bit(kind, options):
    for cuts in [[0, 1, 2, 200], [0, 64, 128, 200], [0, 130, 131, 195, 200], [0, 199, 200]]:
        tokens, block_size = 200, 16
        call = prompts([tokens], q_heads=6, head_dim=40, dtype=kind, **options)
        full = call.run(threads=2)
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
            assert torch.equal(chunk.run(threads=1), full[first:last])
            positions = torch.arange(first, last)
            blocks_at, offsets = table[0, positions // block_size], positions % block_size
            k_cache[blocks_at, :, offsets], v_cache[blocks_at, :, offsets] = call.k[positions], call.v[positions]


def test_every_way_to_multiply(kind):
    for group, head_dim in [(1, 8), (1, 256), (5, 40), (5, 128), (50, 8), (50, 40)]:
        for call in (
            prompts([1, 33, 170], q_heads=2 * group, head_dim=head_dim, dtype=kind),
            prompts([7, 65], [99, 64], q_heads=2 * group, head_dim=head_dim, dtype=kind, window=70, softcap=9.0),
        ):
            assert call.error() <= TOLERANCE[kind]


def test_instruction_sets_agree(isa):
    call = prompts([150, 3], [70, 0], q_heads=8, head_dim=80)
    result = call.run()
    native.extension().set_isa("scalar")
    assert relative_error(result, call.run().double()) <= 1e-6
