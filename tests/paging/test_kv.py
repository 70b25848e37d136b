"""The paged cache: blocks with one owner each, and a layout in which no two layers, heads or blocks share a byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import DTYPES, INT8
from moelight.core.errors import MoelightError
from moelight.hrm.footprint import kv_block_bytes
from moelight.kernels.gpu.attention import append_in_torch
from moelight.paging.kv import BlockPool, paged_cache, token_cache
from moelight.runtime.microbatch import require
from tests.shapes import examples, small_model, small_policy


@examples(150)
@given(
    blocks=st.integers(0, 12),
    on_device=st.integers(0, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40),
)
def test_a_block_has_one_owner(blocks: int, on_device: int, steps: list[tuple[bool, int]]) -> None:
    pool = BlockPool(blocks, min(on_device, blocks))
    owned: list[list[int]] = []
    for take, n in steps:
        if not take and owned:
            pool.release(owned.pop(n % len(owned)))
        elif n > pool.free:
            before = pool.free
            with pytest.raises(MoelightError, match=f"{n} KV blocks asked for, {before} are free"):
                pool.take(n)
            assert pool.free == before
        else:
            owned.append(pool.take(n))
            assert len(owned[-1]) == n
        held = [block for blocks_of_one in owned for block in blocks_of_one]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(blocks))
        assert pool.free == blocks - len(held)
    for blocks_of_one in owned:
        pool.release(blocks_of_one)
    assert sorted(pool.take(blocks)) == list(range(blocks))


def on_device_count(pool: BlockPool, blocks: list[int]) -> int:
    return sum(block >= pool.host_blocks for block in blocks)


@examples(150)
@given(blocks=st.integers(1, 400), on_device=st.integers(0, 400), counts=st.lists(st.integers(1, 40), max_size=60))
def test_the_share_on_the_device_is_as_exact_as_whole_blocks_allow(
    blocks: int, on_device: int, counts: list[int]
) -> None:
    """All sequences together, each one, and each one up to any position; whatever order they come in."""
    on_device = min(on_device, blocks)
    share = on_device / blocks
    pool = BlockPool(blocks, on_device)
    held: list[int] = []
    for count in counts:
        if count > pool.free:
            break
        taken = pool.take(count)
        held += taken
        assert abs(on_device_count(pool, held) - share * len(held)) <= 0.5 + 1e-9
        assert abs(on_device_count(pool, taken) - share * count) < 1
        selected = on_device_count(pool, taken) / count
        for position in range(count):
            assert abs(on_device_count(pool, taken[: position + 1]) - selected * (position + 1)) <= 0.5 + 1e-9


@examples(100)
@given(
    on_device=st.integers(0, 60),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=20, max_size=80),
)
def test_the_share_lasts_as_sequences_come_and_go(on_device: int, steps: list[tuple[bool, int]]) -> None:
    """Each sequence stays within a block of its share as long as neither side runs out; every free block can be had."""
    pool, owned = BlockPool(60, on_device), list[list[int]]()
    for take, n in steps:
        if not take and owned:
            pool.release(owned.pop(n % len(owned)))
        elif n <= pool.free:
            on_host, on_its_side = (
                pool.host_blocks - sum(len(item) - on_device_count(pool, item) for item in owned),
                on_device - sum(on_device_count(pool, item) for item in owned),
            )
            owned.append(pool.take(n))
            share = n * on_device / 60
            part = on_device_count(pool, owned[-1])
            if on_its_side >= share + 1 and on_host >= n - share + 1:
                assert abs(part - share) < 1
    pool.take(pool.free)
    assert pool.free == 0


def test_blocks_of_both_sides_lie_evenly_along_a_sequence() -> None:
    pool = BlockPool(12, 4)
    assert pool.take(6) == [0, 8, 1, 2, 9, 3]
    assert pool.take(3) == [4, 10, 5]


def test_one_side_stands_in_where_the_other_has_run_out() -> None:
    pool = BlockPool(8, 4)
    first, second = pool.take(4), pool.take(4)
    pool.release([block for block in first + second if block >= 4])
    assert pool.take(3) == [4, 5, 6]


def test_the_lowest_blocks_go_first_and_come_back_first() -> None:
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.release(first)
    assert pool.take(3) == [0, 1, 5]


@examples(100)
@given(
    on_device=st.integers(0, 9),
    steps=st.lists(st.tuples(st.sampled_from(("take", "share", "give", "forget")), st.integers(0, 50)), max_size=60),
)
def test_a_block_is_free_when_the_last_gives_it_back_and_found_until_it_is_taken(
    on_device: int, steps: list[tuple[str, int]]
) -> None:
    pool, owned, names = BlockPool(9, on_device), list[list[int]](), dict[int, bytes]()
    for number, (step, n) in enumerate(steps):
        if step == "take" and n % 5 <= pool.free:
            taken = pool.take(n % 5)
            owned.append(taken)
            for block in taken:
                assert names.pop(block, None) is None or block not in {item for many in owned[:-1] for item in many}
                key = bytes((number, block))
                if block % 3:
                    assert pool.name(block, key)
                    assert not pool.name(block, key)
                    names[block] = key
        elif step == "share" and names:
            block = sorted(names)[n % len(names)]
            before = pool.free_beside([block])
            pool.share([block])
            assert pool.free == before
            owned.append([block])
        elif step == "give" and owned:
            pool.release(owned.pop(n % len(owned)))
        elif step == "forget" and names:
            block = sorted(names)[n % len(names)]
            pool.forget(block)
            assert pool.find(names.pop(block)) is None
        assert pool.free == 9 - len({block for many in owned for block in many})
        assert all(pool.find(key) == block for block, key in names.items())
    for many in owned:
        pool.release(many)
    pool.forget_all()
    assert all(pool.find(key) is None for key in names.values())
    assert sorted(pool.take(9)) == list(range(9))


def test_of_free_blocks_those_that_nobody_finds_go_first_then_the_oldest() -> None:
    pool = BlockPool(6)
    first, second, third = pool.take(2), pool.take(2), pool.take(1)
    for block in first + second:
        pool.name(block, bytes((block,)))
    pool.release(second)
    pool.release(first)
    pool.release(third)
    assert pool.take(2) == [4, 5]
    assert pool.take(3) == [3, 2, 1], "the last of a sequence first"
    assert [pool.find(bytes((block,))) for block in range(4)] == [0, None, None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_two_places_of_the_cache_share_a_byte(dtype: torch.dtype) -> None:
    model = small_model((True, True, True))
    policy = small_policy(model, discrete=False)
    spec, blocks, size = model.attention, 5, policy.kv_block_size
    name = str(dtype).removeprefix("torch.")
    arena = torch.zeros(blocks * kv_block_bytes(model, policy, DTYPES[name]), dtype=torch.uint8)
    cache = paged_cache(arena, [spec] * 3, blocks=blocks, block_size=size, dtype=DTYPES[name])
    parts = [part for layer in range(3) for part in cache[layer]]
    for number, part in enumerate(parts):
        assert part.shape == (blocks, spec.num_kv_heads, size, spec.head_dim)
        assert part.is_contiguous()
        assert part.dtype is dtype
        part.fill_(number + 1)
    assert all(part.eq(number + 1).all() for number, part in enumerate(parts))
    assert arena.view(dtype).ne(0).all(), "every byte of the arena belongs to the cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_key_and_value_lie_side_by_side(dtype: torch.dtype) -> None:
    """The same bytes as the paged cache; layers and slots share none."""
    model = small_model((True, True, True))
    policy = small_policy(model, discrete=True)
    spec, slots = model.attention, 5 * policy.kv_block_size
    name = str(dtype).removeprefix("torch.")
    arena = torch.zeros(5 * kv_block_bytes(model, policy, DTYPES[name]), dtype=torch.uint8)
    cache = [rows.values for rows in token_cache(arena, [spec] * 3, slots=slots, dtype=DTYPES[name])]
    for layer in range(3):
        assert cache[layer].shape == (slots, 2, spec.num_kv_heads, spec.head_dim)
        assert cache[layer].is_contiguous()
        cache[layer].fill_(layer + 1)
    assert [float(cache[layer].float().mean()) for layer in range(3)] == [1, 2, 3]
    assert arena.view(dtype).ne(0).all(), "every byte of the arena belongs to the cache"
    k, v = (torch.full((2, spec.num_kv_heads, spec.head_dim), fill, dtype=dtype) for fill in (7, 9))
    append_in_torch(k, v, cache[1], torch.tensor([40, 3]))
    assert cache[1][[3, 40], 0].eq(7).all()
    assert cache[1][[3, 40], 1].eq(9).all()
    assert cache[1].ne(2).sum() == 4 * spec.num_kv_heads * spec.head_dim


@pytest.mark.parametrize("paged", [True, False])
def test_codes_and_scales_of_an_int8_cache_share_no_byte(paged: bool) -> None:
    """Every byte that the ledger counts is a code or a part of a scale."""
    model = small_model((True, True, True))
    policy = replace(small_policy(model, discrete=not paged), kv_dtype="int8")
    spec, blocks, size = model.attention, 5, policy.kv_block_size
    arena = torch.zeros(blocks * kv_block_bytes(model, policy, DTYPES["bfloat16"]), dtype=torch.uint8)
    heads = spec.num_kv_heads
    assert arena.numel() == 3 * blocks * size * 2 * heads * (spec.head_dim + 4)
    if paged:
        layers = paged_cache(arena, [spec] * 3, blocks=blocks, block_size=size, dtype=INT8)
        codes, scales = ([part for layer in layers for part in layer[at : at + 2]] for at in (0, 2))
        assert {part.shape for part in codes} == {(blocks, heads, size, spec.head_dim)}
        assert {part.shape for part in scales} == {(blocks, heads, size)}
    else:
        rows = token_cache(arena, [spec] * 3, slots=blocks * size, dtype=INT8)
        codes, scales = [row.values for row in rows], [require(row.scales) for row in rows]
        assert {part.shape for part in codes} == {(blocks * size, 2, heads, spec.head_dim)}
        assert {part.shape for part in scales} == {(blocks * size, 2, heads)}
    for number, (code, scale) in enumerate(zip(codes, scales, strict=True), start=1):
        assert code.dtype is torch.int8 and scale.dtype is torch.float32
        code.fill_(number), scale.view(torch.uint8).fill_(100 + number)
    assert all(code.eq(number).all() for number, code in enumerate(codes, start=1))
    assert all(scale.view(torch.uint8).eq(100 + number).all() for number, scale in enumerate(scales, start=1))
    assert arena.ne(0).all()
