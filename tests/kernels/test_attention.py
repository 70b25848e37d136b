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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RAGGED = (1, 5000, 0, 17, 512, 513, 1024, 2049, 31, 3)


def truth(call, window=None):
    return reference.gqa_decode(*call.double().arguments, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 96, 128, 192, 256])
def test_every_head_size(server, dtype, head_dim):
    call = paged([1, 33, 200], q_heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
    out = cpu_gqa_decode(*call.arguments)
    assert out.dtype == dtype
    assert out.shape == call.q.shape
    assert relative_error(out, truth(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 13])
def test_every_group_size(server, dtype, group):
    call = paged([40, 7, 70], q_heads=2 * group, kv_heads=2, dtype=dtype)
    assert relative_error(cpu_gqa_decode(*call.arguments), truth(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths_from_none_to_five_thousand(server, dtype):
    call = paged(RAGGED, q_heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    out, expected = cpu_gqa_decode(*call.arguments), truth(call)
    for row in range(len(RAGGED)):
        assert relative_error(out[row], expected[row]) <= TOLERANCE[dtype]
    assert not out[RAGGED.index(0)].any()


@pytest.mark.parametrize(
    ("block_size", "window"), [(1, 100), (5, 3), (5, 511), (16, 1), (16, 100), (32, 513), (128, 100_000)]
)
def test_windows_and_block_sizes(server, block_size, window):
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
    found = cpu_gqa_decode(*call.arguments)
    native.module().set_isa("scalar")
    assert relative_error(found, cpu_gqa_decode(*call.arguments).double()) <= 1e-6


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
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_append_writes_its_slots_and_nothing_else(server, dtype, tokens):
    call = paged([200, 200], kv_heads=3, head_dim=24, block_size=5, dtype=dtype)
    k_cache, v_cache = call.k_cache.clone(), call.v_cache.clone()
    slots = torch.randperm(k_cache.shape[0] * 5)[:tokens]
    tokens = len(slots)
    fused = torch.randn(tokens, 6, 24).to(dtype)
    k_new, v_new = fused[:, :3], fused[:, 3:]
    cpu_kv_append(k_cache, v_cache, k_new, v_new, slots)
    expected_k, expected_v = call.k_cache.clone(), call.v_cache.clone()
    expected_k[slots // 5, :, slots % 5] = k_new
    expected_v[slots // 5, :, slots % 5] = v_new
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
