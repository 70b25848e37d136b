"""Packing: rows without padding, each token where its sequence's blocks say, crossings that do not overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.runtime.microbatch import Chunk, Crossing, pack
from tests.shapes import examples

BLOCK = 16


@st.composite
def chunks(draw: st.DrawFn) -> list[Chunk]:
    """Sequences at any place of their prompts, single tokens first, each with blocks of its own."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6))
    free = draw(st.permutations(range(60)))
    made, taken = [], 0
    for start, count in sorted(lengths, key=lambda each: each[1] > 1):
        need = -(-(start + count) // BLOCK) + draw(st.integers(0, 2))
        ids = draw(st.lists(st.integers(0, 300), min_size=count, max_size=count))
        blocks = list(free[taken : taken + need])
        taken += need
        made.append(Chunk(token_ids=ids, start=start, blocks=blocks, samples=draw(st.booleans())))
    return made


@examples(80)
@given(given_chunks=chunks())
def test_every_token_is_packed_where_its_sequence_says(given_chunks: list[Chunk]) -> None:
    total = sum(len(chunk.token_ids) for chunk in given_chunks)
    mb = pack(given_chunks, block_size=BLOCK, hidden=torch.zeros(total, 8), crossing=None, fresh=False)
    assert mb.tokens == total
    row, prompts, singles, sampled = 0, iter(mb.prompts), 0, []
    for chunk in given_chunks:
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.start + offset
            assert mb.token_ids[row] == token
            assert mb.positions[row] == position
            assert mb.cache_slots[row] == chunk.blocks[position // BLOCK] * BLOCK + position % BLOCK
            row += 1
        if len(chunk.token_ids) == 1:
            assert mb.block_tables[singles, : len(chunk.blocks)].tolist() == list(chunk.blocks)
            assert mb.seq_lens[singles] == chunk.start + 1
            assert row - 1 == singles, "single tokens are the first rows"
            singles += 1
        else:
            first, last, start, table = next(prompts)
            assert (first, last, start) == (row - len(chunk.token_ids), row, chunk.start)
            assert table.tolist() == list(chunk.blocks)
        if chunk.samples:
            sampled.append(row - 1)
    assert next(prompts, None) is None
    assert mb.decoding == singles
    assert mb.sample_rows.tolist() == sampled
    assert mb.cache_slots.unique().numel() == total, "no two tokens share a place in the cache"


def test_types_are_those_the_kernels_want() -> None:
    chunk = Chunk(token_ids=[5], start=17, blocks=[3, 1], samples=True)
    mb = pack([chunk], block_size=BLOCK, hidden=torch.zeros(1, 8), crossing=None, fresh=True)
    assert (mb.token_ids.dtype, mb.positions.dtype, mb.cache_slots.dtype) == (torch.int64,) * 3
    assert (mb.block_tables.dtype, mb.seq_lens.dtype) == (torch.int32, torch.int32)
    assert (mb.cache_slots.item(), mb.seq_lens.item()) == (1 * BLOCK + 1, 18)
    assert mb.fresh


def test_a_micro_batch_of_prompts_alone_has_no_tables() -> None:
    chunk = Chunk(token_ids=[5, 6], start=0, blocks=[3], samples=False)
    mb = pack([chunk], block_size=BLOCK, hidden=torch.zeros(2, 8), crossing=None, fresh=False)
    assert mb.decoding == 0
    assert mb.block_tables.shape[0] == 0
    assert mb.sample_rows.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_what_crosses_fits_and_arrives_unchanged(dtype: torch.dtype, tokens: int) -> None:
    """q, k and v go down side by side, the output comes up beside them; the share is used to its last byte."""
    q, k, v = (torch.randn(tokens, heads, 4).to(dtype) for heads in (6, 2, 2))
    size = dtype.itemsize
    up_bytes = tokens * 6 * 4 * size
    share = torch.zeros(up_bytes + tokens * 10 * 4 * size, dtype=torch.uint8)
    crossing = Crossing(share, up_bytes, dtype)
    up = crossing.up(q.shape)
    up.fill_(9)
    landed = crossing.down(q, k, v)
    assert all(torch.equal(there, part) for there, part in zip(landed, (q, k, v), strict=True))
    assert up.eq(9).all()
    q.zero_()
    assert landed[0].ne(0).any(), "what landed is a copy"
    everything = torch.cat([part.reshape(-1) for part in (*landed, up)])
    assert torch.equal(everything, share.view(dtype))


def test_keys_and_values_alone_cross_too() -> None:
    q, k, v = (torch.randn(3, heads, 4) for heads in (6, 2, 2))
    crossing = Crossing(torch.zeros(3 * 16 * 4 * 4, dtype=torch.uint8), 3 * 6 * 4 * 4, torch.float32)
    landed = crossing.down(q[:0], k, v)
    assert landed[0].shape == (0, 6, 4)
    assert torch.equal(landed[1], k)
    assert torch.equal(landed[2], v)
