"""Contexts of the device's attention: every cached token that is seen is found through its sequence's block table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels.gpu.attention import PromptForm
from moelight.runtime.context import Chunk, Context, find_added, find_context, seen_before, slots_of
from moelight.runtime.microbatch import pack
from tests.runtime.test_microbatch import BLOCK, chunk_lists
from tests.shapes import examples

TILE = 8
FORM = PromptForm(tile_tokens=TILE, most_tokens=1000)


@st.composite
def sharing_lists(draw: st.DrawFn) -> list[Chunk]:
    """Chunks, some of which begin with the blocks that another begins with."""
    chunks = draw(chunk_lists())
    for number in range(1, len(chunks)):
        selected, other = chunks[number], chunks[draw(st.integers(0, number - 1))]
        shared = draw(st.integers(0, min(selected.start, other.start) // BLOCK))
        chunks[number] = replace(selected, blocks=[*other.blocks[:shared], *selected.blocks[shared:]])
    return chunks


def resolved(result: Context, sequence: int, position: int, cache: torch.Tensor, buffer: torch.Tensor) -> int:
    """What the kernels read at a position: the table's format."""
    base = result.batch.sequences.view(-1, 5)[sequence, 4]
    slot = int(result.batch.entries[base + position // BLOCK]) + position % BLOCK
    return int(cache[slot] if slot >= 0 else buffer[slot + (1 << 30)])


@examples(120)
@given(chunks=sharing_lists(), window=st.none() | st.integers(1, 50), host_blocks=st.integers(0, 60))
def test_the_table_leads_to_what_each_sequence_sees(chunks: list[Chunk], window: int | None, host_blocks: int) -> None:
    """A cache in which every slot holds its number, the first blocks in host memory, transferred by runs or pieces."""
    everything, host_slots = torch.arange(60 * BLOCK), host_blocks * BLOCK
    result = find_context(chunks, block_size=BLOCK, window=window, host_slots=host_slots, form=FORM)
    buffer = torch.full((result.tokens,), -1)
    for slot, run, count in result.runs:
        assert buffer[run : run + count].eq(-1).all(), "no place is filled twice"
        assert 0 <= slot <= slot + count <= host_slots
        buffer[run : run + count] = everything[slot : slot + count]
    by_pieces = torch.full_like(buffer, -1)
    for slot, run, count in result.pieces.tolist():
        assert 0 < count <= BLOCK and slot // BLOCK == (slot + count - 1) // BLOCK
        by_pieces[run : run + count] = everything[slot : slot + count]
    assert torch.equal(buffer, by_pieces)
    crossed = buffer[buffer >= 0]
    assert crossed.numel() == crossed.unique().numel() == result.tokens - result.stays
    tokens = row = 0
    for number, (chunk, (first, last, start, lowest)) in enumerate(zip(chunks, result.batch.spans, strict=True)):
        seen = seen_before(chunk.start, window)
        assert (first, last, start, lowest) == (row, row + chunk.count, chunk.start, chunk.start - seen)
        slots = slots_of(chunk, lowest, start, BLOCK).tolist()
        assert [resolved(result, number, at, everything[host_slots:], buffer) for at in range(lowest, start)] == slots
        row, tokens = row + chunk.count, tokens + seen
    assert result.tokens == tokens and result.batch.rows == row
    single = [chunk.decodes and chunk.count == 1 for chunk in chunks]
    assert result.batch.decoding == sum(single), "rows with drafts are computed as prompts are"
    tiles = {tuple(pair) for pair in result.batch.tiles.view(-1, 2).tolist()}
    prompts = [(number, chunk.count) for number, chunk in enumerate(chunks) if not single[number]]
    assert tiles == {(number, first) for number, count in prompts for first in range(0, count, TILE)}
    assert result.batch.tile_count == len(tiles)


@examples(80)
@given(chunks=chunk_lists(), host_blocks=st.integers(0, 60))
def test_every_new_token_goes_to_one_side(chunks: list[Chunk], host_blocks: int) -> None:
    slots, host_slots = pack_slots(chunks), host_blocks * BLOCK
    added = find_added(slots, host_slots=host_slots)
    every = torch.arange(len(slots))
    down = every if added.host_rows is None else added.host_rows
    stay = every if added.device_rows is None else added.device_rows
    if added.device_slots is None:
        assert added.device_count == 0 and len(down) == len(slots)
    else:
        assert added.device_count == len(stay) > 0
        assert torch.equal(slots[stay] - host_slots, added.device_slots)
        assert torch.equal(torch.cat([down, stay]).sort().values, every)
    assert torch.equal(slots[down], added.host_slots)
    assert bool((added.host_slots < host_slots).all())


def pack_slots(chunks: list[Chunk]) -> torch.Tensor:
    total = sum(chunk.count for chunk in chunks)
    hidden, room = torch.zeros(total, 8), torch.zeros(len(chunks), dtype=torch.int64)
    return pack(chunks, block_size=BLOCK, hidden=hidden, sampled=room, crossing=None, prefill_only=False).cache_slots


def decoding(blocks: list[int]) -> Chunk:
    return Chunk(token_ids=[], start=40, blocks=blocks, slot=0, samples=True, decodes=True)


def test_blocks_that_follow_each_other_move_in_one_piece() -> None:
    chunks = [decoding([4, 5, 6]), decoding([7, 9, 3])]
    result = find_context(chunks, block_size=BLOCK, window=None, host_slots=60 * BLOCK, form=FORM)
    assert result.runs == ((48, 0, 8), (64, 8, 40), (112, 48, 16), (144, 64, 16))
    assert (result.tokens, result.stays) == (80, 0)


def test_a_shared_block_moves_once() -> None:
    chunks = [decoding([4, 5, 6]), decoding([4, 5, 8])]
    result = find_context(chunks, block_size=BLOCK, window=None, host_slots=60 * BLOCK, form=FORM)
    assert result.runs == ((64, 0, 40), (128, 40, 8))
    assert (result.tokens, result.stays) == (80, 32)


def test_a_piece_ends_where_the_devices_blocks_begin() -> None:
    result = find_context([decoding([4, 5, 6])], block_size=BLOCK, window=None, host_slots=5 * BLOCK, form=FORM)
    assert result.runs == ((64, 0, 16),)
    assert (result.tokens, result.stays, result.batch.tiers) == (40, 24, (True, True))


@pytest.mark.parametrize(("start", "window", "seen"), [(9, None, 9), (9, 4, 3), (2, 4, 2), (9, 1, 0), (0, 4, 0)])
def test_a_window_counts_the_new_token(start: int, window: int | None, seen: int) -> None:
    assert seen_before(start, window) == seen
