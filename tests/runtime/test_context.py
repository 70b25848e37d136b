"""Contexts of the device's attention: every cached token that is seen has one place, beside its sequence's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.paging.kv import put, token_cache
from moelight.profiles.model import AttentionSpec
from moelight.runtime.context import Chunk, find_added, find_context, seen_before
from moelight.runtime.microbatch import pack
from tests.runtime.test_microbatch import BLOCK, chunk_lists
from tests.shapes import examples

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8)


@examples(80)
@given(chunks=chunk_lists(), window=st.none() | st.integers(1, 50), host_blocks=st.integers(0, 60))
def test_a_buffer_filled_by_its_places_holds_what_each_sequence_sees(
    chunks: list[Chunk], window: int | None, host_blocks: int
) -> None:
    """A cache in which every token of every sequence is marked, its first blocks in host memory: copied by runs, and
    gathered by slots."""
    arena = torch.zeros(60 * BLOCK * 64, dtype=torch.uint8)
    cache = token_cache(arena, SPEC, num_layers=1, slots=60 * BLOCK, dtype=torch.float32)
    for number, chunk in enumerate(chunks):
        for position in range(chunk.start + chunk.count):
            slot = chunk.blocks[position // BLOCK] * BLOCK + position % BLOCK
            cache[0][slot] = number * 1000 + position
    host_slots = host_blocks * BLOCK
    found = find_context(chunks, block_size=BLOCK, window=window, device=CPU, host_slots=host_slots)
    on_device = cache[0][host_slots:]
    tokens = sum(chunk.count for chunk in chunks)
    buffer = torch.full((found.tokens + tokens, 2, 1, 8), -1.0)
    if not host_blocks:
        assert found.slots is not None and found.places is None and not found.runs
        assert found.there == found.tokens
        buffer = on_device[found.slots]
    else:
        for place, slot, count in found.runs:
            assert buffer[place : place + count].eq(-1).all(), "no place is filled twice"
            assert slot + count <= host_slots
            buffer[place : place + count] = cache[0][slot : slot + count]
        assert sum(count for _, _, count in found.runs) == found.tokens - found.there
        if found.there:
            assert found.slots is not None and found.places is not None
            assert len(found.slots) == len(found.places) == found.there
            assert buffer[found.places].eq(-1).all(), "no place is filled twice"
            buffer[found.places] = on_device[found.slots]
        else:
            assert found.slots is None and found.places is None
        assert buffer[found.own].eq(-1).all(), "new tokens have places of their own"
        put(buffer, *cache[0][pack_slots(chunks)].unbind(1), found.own)
    row = 0
    for number, (chunk, (first, last, place, cached)) in enumerate(zip(chunks, found.spans, strict=True)):
        count = chunk.count
        assert (first, last, cached) == (row, row + count, seen_before(chunk.start, window))
        seen = number * 1000 + torch.arange(chunk.start - cached, chunk.start + count)
        assert torch.equal(buffer[place : place + cached + count, 1, 0, 7].long(), seen)
        row += count


@examples(80)
@given(chunks=chunk_lists(), host_blocks=st.integers(0, 60))
def test_every_new_token_goes_to_one_side(chunks: list[Chunk], host_blocks: int) -> None:
    slots, host_slots = pack_slots(chunks), host_blocks * BLOCK
    added = find_added(slots, host_slots=host_slots, device=CPU)
    every = torch.arange(len(slots))
    down = every if added.host_rows is None else added.host_rows
    stay = every if added.device_rows is None else added.device_rows
    if added.device_slots is None:
        assert added.there == 0 and len(down) == len(slots)
    else:
        assert added.there == len(stay) > 0
        assert torch.equal(slots[stay] - host_slots, added.device_slots)
        assert torch.equal(torch.cat([down, stay]).sort().values, every)
    assert torch.equal(slots[down], added.host_slots)
    assert bool((added.host_slots < host_slots).all())


def pack_slots(chunks: list[Chunk]) -> torch.Tensor:
    total = sum(chunk.count for chunk in chunks)
    hidden, room = torch.zeros(total, 8), torch.zeros(len(chunks), dtype=torch.int64)
    return pack(chunks, block_size=BLOCK, hidden=hidden, sampled=room, crossing=None, prefill_only=False).cache_slots


def test_blocks_that_follow_each_other_move_in_one_piece() -> None:
    one = Chunk(token_ids=[], start=40, blocks=[4, 5, 6], place=0, samples=True, decodes=True)
    two = Chunk(token_ids=[], start=40, blocks=[1, 9, 2], place=1, samples=True, decodes=True)
    found = find_context([one, two], block_size=BLOCK, window=None, device=CPU, host_slots=60 * BLOCK)
    assert found.runs == ((0, 64, 40), (41, 16, 16), (57, 144, 16), (73, 32, 8))
    assert (found.tokens, found.there) == (80, 0)


def test_a_piece_ends_where_the_devices_blocks_begin() -> None:
    one = Chunk(token_ids=[], start=40, blocks=[4, 5, 6], place=0, samples=True, decodes=True)
    found = find_context([one], block_size=BLOCK, window=None, device=CPU, host_slots=5 * BLOCK)
    assert found.runs == ((0, 64, 16),)
    assert found.slots is not None and found.places is not None
    assert found.slots.tolist() == list(range(24))
    assert found.places.tolist() == list(range(16, 40))


@pytest.mark.parametrize(("start", "window", "seen"), [(9, None, 9), (9, 4, 3), (2, 4, 2), (9, 1, 0), (0, 4, 0)])
def test_a_window_counts_the_new_token(start: int, window: int | None, seen: int) -> None:
    assert seen_before(start, window) == seen
