"""The paged cache: blocks with one owner each, and a layout in which no two layers, heads or blocks share a byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import DTYPES
from moelight.core.errors import MoelightError
from moelight.hrm.footprint import kv_block_bytes
from moelight.memory.kv import BlockPool, KVCache, TokenCache, put
from tests.shapes import examples, small_model, small_policy


@examples(150)
@given(blocks=st.integers(0, 12), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_block_has_one_owner(blocks: int, steps: list[tuple[bool, int]]) -> None:
    pool = BlockPool(blocks)
    owned: list[list[int]] = []
    for take, n in steps:
        if not take and owned:
            pool.give_back(owned.pop(n % len(owned)))
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
        pool.give_back(blocks_of_one)
    assert sorted(pool.take(blocks)) == list(range(blocks))


def test_the_lowest_blocks_go_first_and_come_back_first() -> None:
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.give_back(first)
    assert pool.take(3) == [0, 1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_two_places_of_the_cache_share_a_byte(dtype: torch.dtype) -> None:
    model = small_model((True, True, True))
    policy = small_policy(model, discrete=False)
    spec, blocks, size = model.attention, 5, policy.kv_block_size
    name = str(dtype).removeprefix("torch.")
    arena = torch.zeros(blocks * kv_block_bytes(model, policy, DTYPES[name]), dtype=torch.uint8)
    cache = KVCache(arena, spec, num_layers=3, blocks=blocks, block_size=size, dtype=dtype)
    parts = [part for layer in range(3) for part in cache.layer(layer)]
    for number, part in enumerate(parts):
        assert part.shape == (blocks, spec.num_kv_heads, size, spec.head_dim)
        assert part.is_contiguous()
        assert part.dtype is dtype
        part.fill_(number + 1)
    assert all(part.eq(number + 1).all() for number, part in enumerate(parts))
    assert arena.view(dtype).ne(0).all(), "every byte of the arena belongs to the cache"
    assert cache.block_size == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_key_and_value_lie_side_by_side(dtype: torch.dtype) -> None:
    """The same bytes as the paged cache; layers and slots share none."""
    model = small_model((True, True, True))
    policy = small_policy(model, discrete=True)
    spec, slots = model.attention, 5 * policy.kv_block_size
    name = str(dtype).removeprefix("torch.")
    arena = torch.zeros(5 * kv_block_bytes(model, policy, DTYPES[name]), dtype=torch.uint8)
    cache = TokenCache(arena, spec, num_layers=3, slots=slots, dtype=dtype)
    for layer in range(3):
        assert cache.layer(layer).shape == (slots, 2, spec.num_kv_heads, spec.head_dim)
        assert cache.layer(layer).is_contiguous()
        cache.layer(layer).fill_(layer + 1)
    assert [float(cache.layer(layer).float().mean()) for layer in range(3)] == [1, 2, 3]
    assert arena.view(dtype).ne(0).all(), "every byte of the arena belongs to the cache"
    k, v = (torch.full((2, spec.num_kv_heads, spec.head_dim), fill, dtype=dtype) for fill in (7, 9))
    put(cache.layer(1), k, v, torch.tensor([40, 3]))
    assert cache.layer(1)[[3, 40], 0].eq(7).all()
    assert cache.layer(1)[[3, 40], 1].eq(9).all()
    assert cache.layer(1).ne(2).sum() == 4 * spec.num_kv_heads * spec.head_dim
