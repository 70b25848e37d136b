"""The faces of CPU attention: right for every dtype, instruction set and odd shape, and the same in any company."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from moelight.kernels import native, reference
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from tests.kernels.paged import TOLERANCE, paged, relative_error
from tests.kernels.stored import LANES, serving

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RAGGED = (1, 5000, 0, 17, 512, 513, 1024, 2049, 31, 3)


@pytest.fixture(params=[*LANES, "torch"])
def server(request, monkeypatch):
    """Who serves the faces of `attention.py` during the test."""
    with serving(request.param, monkeypatch):
        yield request.param


@pytest.fixture(params=LANES or [pytest.param("none", marks=pytest.mark.skip(reason="the extension is not built"))])
def isa(request, monkeypatch):
    """An instruction set of the extension, in force during the test."""
    with serving(request.param, monkeypatch):
        yield request.param


def truth(call, window=None):
    return reference.gqa_decode(*call.double().arguments, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size(server, dtype):
    for head_dim in [8, 24, 40, 64, 80, 96, 128, 192, 256, 512]:
        call = paged([1, 33, 200], q_heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
        out = cpu_gqa_decode(*call.arguments)
        assert out.dtype == dtype
        assert out.shape == call.q.shape
        assert relative_error(out, truth(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_group_size(server, dtype):
    for group in [1, 2, 3, 4, 5, 8, 13]:
        call = paged([40, 7, 70], q_heads=2 * group, kv_heads=2, dtype=dtype)
        assert relative_error(cpu_gqa_decode(*call.arguments), truth(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths_from_none_to_five_thousand(server, dtype):
    call = paged(RAGGED, q_heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    out, expected = cpu_gqa_decode(*call.arguments), truth(call)
    for row in range(len(RAGGED)):
        assert relative_error(out[row], expected[row]) <= TOLERANCE[dtype]
    assert not out[RAGGED.index(0)].any()


def test_windows_and_block_sizes(server):
    for block_size, window in [(16, 1), (16, 3), (16, 100), (32, 513), (64, 511), (64, 57), (128, 100_000)]:
        call = paged([1, 99, 700, 1300], head_dim=16, block_size=block_size)
        out = cpu_gqa_decode(*call.arguments, window=window)
        assert relative_error(out, truth(call, window)) <= 1e-5


def test_blocks_before_the_window_and_after_the_end_are_never_looked_at(server):
    call = paged([40, 70], block_size=16)
    tables = call.block_tables.clone()
    tables[0, 3:] = -1
    tables[1, :3] = 1_000_000
    assert torch.equal(
        cpu_gqa_decode(*replace(call, block_tables=tables).arguments, window=20),
        cpu_gqa_decode(*call.arguments, window=20),
    )


def test_empty_batch(server):
    call = paged([])
    assert cpu_gqa_decode(*call.arguments).shape == call.q.shape


def test_rows_may_be_strided_and_out_may_be_the_queries(server):
    call = paged([30, 60], q_heads=4, kv_heads=2, head_dim=40)
    expected = cpu_gqa_decode(*call.arguments)
    fused = torch.zeros(2, 8, 40)
    fused[:, :4] = call.q
    kv = torch.stack((call.k_cache, call.v_cache), dim=1)
    tables = torch.cat((call.block_tables, call.block_tables), dim=1)
    views = replace(
        call,
        q=fused[:, :4],
        k_cache=kv[:, 0],
        v_cache=kv[:, 1],
        block_tables=tables[:, : call.block_tables.shape[1]],
    )
    out = torch.empty(2, 5, 40)[:, :4]
    assert cpu_gqa_decode(*views.arguments, out=out) is out
    assert torch.equal(out, expected)
    assert cpu_gqa_decode(*views.arguments, out=views.q) is views.q
    assert torch.equal(fused[:, :4], expected)
    assert not fused[:, 4:].any()


def test_large_and_tiny_logits_do_not_overflow(server):
    call = paged([900], head_dim=32)
    for scale in (1e4, 1e-20, -50.0):
        scaled = replace(call, scale=scale)
        assert relative_error(cpu_gqa_decode(*scaled.arguments), truth(scaled)) <= 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_key_is_not_hidden(server, poison):
    call = paged([50, 50], head_dim=16)
    call.k_cache[call.block_tables[0, 0], :, 3] = poison
    out = cpu_gqa_decode(*call.arguments)
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_to_nearest_even(isa, dtype):
    """With one position the output is that position's value: exact, whatever the instruction set."""
    call = paged([1, 1], q_heads=8, kv_heads=8, head_dim=256, dtype=dtype)
    values = torch.randn(call.v_cache.shape) * torch.logspace(-9, 4, 256)
    call.v_cache.copy_(values.to(dtype))
    rows = call.v_cache[call.block_tables[:, 0].long(), :, 0]
    assert torch.equal(cpu_gqa_decode(*call.arguments), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_is_the_same_in_any_company(isa, dtype):
    lengths = [1, 700, 2000, 0, 513, 16, 1200, 90]
    call = paged(lengths, q_heads=6, kv_heads=2, head_dim=40, dtype=dtype)
    together = cpu_gqa_decode(*call.arguments, threads=2)
    for row in range(len(lengths)):
        assert torch.equal(cpu_gqa_decode(*call.rows([row]).arguments, threads=1)[0], together[row])
    for threads, order in ((1, [3, 1, 4, 0]), (2, [7, 6, 5, 4, 3, 2, 1]), (5, [2, 2, 2])):
        company = call.rows(order)
        assert torch.equal(cpu_gqa_decode(*company.arguments, threads=threads), together[order])


def test_instruction_sets_agree(isa):
    call = paged([700, 3], q_heads=8, kv_heads=2, head_dim=80)
    result = cpu_gqa_decode(*call.arguments)
    native.extension().set_isa("scalar")
    assert relative_error(result, cpu_gqa_decode(*call.arguments).double()) <= 1e-6


def test_callers_may_come_from_many_python_threads(isa):
    calls = [paged([300 + i, 1000], seed=i) for i in range(4)]
    expected = [cpu_gqa_decode(*call.arguments, threads=1) for call in calls]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(cpu_gqa_decode(*calls[i].arguments, threads=2), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_pool_survives_a_fork(isa):
    call = paged([600, 900])
    expected = cpu_gqa_decode(*call.arguments, threads=2)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(cpu_gqa_decode(*call.arguments, threads=2), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(cpu_gqa_decode(*call.arguments, threads=2), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_writes_its_slots_and_nothing_else(server, dtype):
    for tokens in [0, 1, 7, 300]:
        call = paged([200, 200], kv_heads=3, head_dim=24, dtype=dtype)
        k_cache, v_cache = call.k_cache.clone(), call.v_cache.clone()
        slots = torch.randperm(k_cache.shape[0] * 16)[:tokens]
        fused = torch.randn(len(slots), 6, 24).to(dtype)
        k_new, v_new = fused[:, :3], fused[:, 3:]
        cpu_kv_append(k_cache, v_cache, k_new, v_new, slots)
        expected_k, expected_v = call.k_cache.clone(), call.v_cache.clone()
        expected_k[slots // 16, :, slots % 16] = k_new
        expected_v[slots // 16, :, slots % 16] = v_new
        assert torch.equal(k_cache, expected_k)
        assert torch.equal(v_cache, expected_v)


def test_append_keeps_the_later_of_two_tokens_for_one_slot(server):
    call = paged([200] * 40, kv_heads=4, head_dim=128)
    new = torch.randn(2000, 4, 128)
    slots = torch.arange(2000) % 7
    cpu_kv_append(call.k_cache, call.v_cache, new, -new, slots, threads=4)
    for slot in range(7):
        last = max(range(slot, 2000, 7))
        assert torch.equal(call.k_cache[0, :, slot], new[last])
        assert torch.equal(call.v_cache[0, :, slot], -new[last])


EVERYTHING = {"window": 300, "softcap": 3.0}


def some_sinks(heads, seed=3):
    return 2 * torch.randn(heads, generator=torch.Generator().manual_seed(seed))


def quantised(call, dtype):
    """The call with its float32 caches in int8, and the scales that go with them."""
    (k, k_scale), (v, v_scale) = reference.quantise(call.k_cache), reference.quantise(call.v_cache)
    return replace(call, q=call.q.to(dtype), k_cache=k, v_cache=v), {"k_scale": k_scale, "v_scale": v_scale}


def int8_truth(call, scales, **options):
    double = replace(call, q=call.q.double())
    return reference.gqa_decode(*double.arguments, **{name: s.double() for name, s in scales.items()}, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": some_sinks(6)}, EVERYTHING], ids=str)
def test_the_twin_is_the_formula(options):
    call = paged([1, 45, 0, 500], q_heads=6, kv_heads=2, head_dim=24)
    result = reference.gqa_decode(*call.double().arguments, **options)
    for b, length in enumerate(call.seq_lens.tolist()):
        seen = slice(max(0, length - options.get("window", length)), length)
        for h in range(6):
            keys, values = (
                cache[call.block_tables[b].long(), h // 3].flatten(0, 1)[seen].double()
                for cache in (call.k_cache, call.v_cache)
            )
            scores = call.scale * keys @ call.q[b, h].double()
            if cap := options.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            weights = scores.exp()
            total = weights.sum() + (options["sinks"][h].double().exp() if "sinks" in options else 0)
            expected = weights @ values / total if length else torch.zeros(24)
            assert relative_error(result[b, h], expected.double()) <= 1e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(server, dtype):
    for head_dim in [40, 64, 128]:
        call = paged([1, 33, 0, 600], q_heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
        for shift in (0, -40, 8):
            sinks = some_sinks(6) + shift
            expected = reference.gqa_decode(*call.double().arguments, sinks=sinks.double())
            assert relative_error(cpu_gqa_decode(*call.arguments, sinks=sinks), expected) <= TOLERANCE[dtype]


def test_a_sink_that_is_no_logit_is_no_sink(server):
    call = paged([33, 600])
    sinks = torch.full((4,), float("-inf"))
    assert torch.equal(cpu_gqa_decode(*call.arguments, sinks=sinks), cpu_gqa_decode(*call.arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(server, dtype):
    more = {"window": 100, "sinks": some_sinks(6)}
    for softcap, others in ((0.5, {}), (5, more), (30.0, {}), (1000.0, more)):
        call = replace(paged([1, 33, 0, 600], q_heads=6, kv_heads=2, head_dim=80, dtype=dtype), scale=0.5)
        options = {"softcap": softcap, **others}
        expected = reference.gqa_decode(*call.double().arguments, **options)
        assert relative_error(cpu_gqa_decode(*call.arguments, **options), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_every_head_size(server, dtype):
    for head_dim in [8, 24, 40, 64, 80, 96, 128, 192, 256, 512]:
        call, scales = quantised(paged([1, 33, 0, 200], q_heads=6, kv_heads=2, head_dim=head_dim), dtype)
        out = cpu_gqa_decode(*call.arguments, **scales)
        assert out.dtype == dtype
        assert relative_error(out, int8_truth(call, scales)) <= TOLERANCE[dtype]


def test_int8_ragged_with_everything(server):
    for block_size in [16, 32, 64, 128]:
        call, scales = quantised(
            paged(RAGGED, q_heads=5, kv_heads=1, head_dim=16, block_size=block_size), torch.float32
        )
        options = EVERYTHING | {"sinks": some_sinks(5)}
        out, expected = cpu_gqa_decode(*call.arguments, **scales, **options), int8_truth(call, scales, **options)
        for row in range(len(RAGGED)):
            assert relative_error(out[row], expected[row]) <= 1e-5


def test_int8_is_near_what_was_quantised(server):
    call = paged([700, 90], head_dim=64)
    small, scales = quantised(call, torch.float32)
    assert relative_error(cpu_gqa_decode(*small.arguments, **scales), truth(call)) <= 2e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_append_quantises_as_the_twin_does(server, dtype):
    rows = torch.randn(6, 2, 40) * torch.logspace(-20, 4, 6).view(6, 1, 1)
    rows[0], rows[1, 0, 3], rows[2, 0, 3], rows[3, 1, 0] = 0, float("nan"), float("inf"), 0.5
    rows[4] = 1e-44
    rows = rows.to(dtype)
    caches = [torch.full((3, 2, 16, 40), 77, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((3, 2, 16), -1.0) for _ in range(2)]
    slots = torch.tensor([0, 5, 40, 3, 16, 33])
    cpu_kv_append(*caches, rows, -rows, slots, k_scale=scales[0], v_scale=scales[1])
    for cache, scale, new in zip(caches, scales, (rows, -rows), strict=True):
        codes, steps = reference.quantise(new)
        assert torch.equal(cache[slots // 16, :, slots % 16], codes)
        torch.testing.assert_close(scale[slots // 16, :, slots % 16], steps, rtol=0, atol=0, equal_nan=True)
        untouched = torch.ones(48, dtype=torch.bool)
        untouched[slots] = False
        assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 77).all()
        assert (scale.transpose(1, 2).flatten(0, 1)[untouched] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_does_not_hide_a_poisoned_row(server, dtype):
    for name in ["k_scale", "v_scale"]:
        call, scales = quantised(paged([50, 50], head_dim=16), dtype)
        scales[name][call.block_tables[0, 1], :, 3] = float("nan")
        out = cpu_gqa_decode(*call.arguments, **scales)
        assert out[0].isnan().any()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_append_is_append_then_decode(server, dtype, int8):
    call, scales = paged([1, 17, 0, 600, 512], q_heads=6, kv_heads=3, head_dim=40, dtype=dtype), {}
    if int8:
        call, scales = quantised(replace(call, k_cache=call.k_cache.float(), v_cache=call.v_cache.float()), dtype)
    fused = torch.randn(5, 6, 40).to(dtype)
    k_new, v_new = fused[:, :3], fused[:, 3:]
    before = {"k_cache": call.k_cache, "v_cache": call.v_cache} | scales
    by_hand = {name: tensor.clone() for name, tensor in before.items()}
    live = [0, 1, 3, 4]
    last = call.seq_lens[live] - 1
    slots = call.block_tables[live, last // 16].long() * 16 + last % 16
    hand_scales = {name: by_hand[name] for name in scales}
    cpu_kv_append(by_hand["k_cache"], by_hand["v_cache"], k_new[live], v_new[live], slots, **hand_scales)
    copy = replace(call, k_cache=by_hand["k_cache"], v_cache=by_hand["v_cache"])
    expected = cpu_gqa_decode(*copy.arguments, **hand_scales, window=50)
    out = cpu_gqa_decode(*call.arguments, **scales, window=50, k_new=k_new, v_new=v_new, threads=2)
    assert torch.equal(out, expected)
    for name, tensor in before.items():
        assert torch.equal(tensor, by_hand[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_int8_sequence_is_the_same_in_any_company(isa, dtype):
    lengths = [1, 700, 2000, 0, 513, 16, 1200, 90]
    call, scales = quantised(paged(lengths, q_heads=6, kv_heads=2, head_dim=40), dtype)
    options = scales | EVERYTHING | {"sinks": some_sinks(6)}
    together = cpu_gqa_decode(*call.arguments, **options, threads=2)
    for row in range(len(lengths)):
        assert torch.equal(cpu_gqa_decode(*call.rows([row]).arguments, **options, threads=1)[0], together[row])
    for threads, order in ((1, [3, 1, 4, 0]), (2, [7, 6, 5, 4, 3, 2, 1]), (5, [2, 2, 2])):
        company = call.rows(order)
        assert torch.equal(cpu_gqa_decode(*company.arguments, **options, threads=threads), together[order])
