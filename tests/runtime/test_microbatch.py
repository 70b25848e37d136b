"""Packing: rows without padding, each token where its sequence's blocks say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels.gpu.attention import PromptForm
from moelight.runtime.context import Chunk, find_added, find_context
from moelight.runtime.microbatch import pack, require
from tests.shapes import examples

BLOCK = 16
ROOM = torch.zeros(24, dtype=torch.int64)


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[Chunk]:
    """Sequences at any place, generated tokens first, each with blocks of its own."""
    pooled = draw(st.booleans())  # tokens of decoding sequences, of which none has drafts then
    one = st.tuples(st.integers(1, 40), st.just(1) if pooled else st.integers(1, 4), st.just(True))
    prompt = st.tuples(st.integers(0, 40), st.integers(1, 40), st.just(False))
    lengths = draw(st.lists(one | prompt, min_size=1, max_size=6))
    free = draw(st.permutations(range(60)))
    made, taken = [], 0
    for start, count, decodes in sorted(lengths, key=lambda item: (not item[2], item[2] and item[1] > 1)):
        need = -(-(start + count) // BLOCK) + draw(st.integers(0, 2))
        ids = draw(st.lists(st.integers(0, 300), min_size=count, max_size=count))
        blocks = list(free[taken : taken + need])
        taken += need
        samples = count if decodes else draw(st.integers(0, 1))
        position = len(made) * 3 + 1
        ids = [] if decodes and pooled else ids
        made.append(Chunk(token_ids=ids, start=start, blocks=blocks, slot=position, samples=samples, decodes=decodes))
    return made


@examples(80)
@given(given_chunks=chunk_lists())
def test_every_token_is_packed_where_its_sequence_says(given_chunks: list[Chunk]) -> None:
    total = sum(chunk.count for chunk in given_chunks)
    hidden = torch.zeros(total, 8)
    mb = pack(given_chunks, block_size=BLOCK, hidden=hidden, sampled=ROOM, crossing=None, prefill_only=False)
    assert mb.tokens == total
    row, prompts, decoded, sampled = 0, 0, 0, list[int]()
    for chunk in given_chunks:
        for offset in range(chunk.count):
            position = chunk.start + offset
            assert not chunk.token_ids or mb.token_ids[row] == chunk.token_ids[offset]
            assert mb.positions[row] == position
            assert mb.cache_slots[row] == chunk.blocks[position // BLOCK] * BLOCK + position % BLOCK
            row += 1
        if chunk.decodes:
            for offset in range(chunk.count):
                assert mb.block_tables[decoded, : len(chunk.blocks)].tolist() == list(chunk.blocks)
                assert mb.seq_lens[decoded] == chunk.start + offset + 1
                decoded += 1
            assert row == decoded, "generated tokens are the first rows"
        else:
            ends, tables, starts = require(mb.packed)
            assert decoded + int(ends[prompts]) == row - chunk.count and decoded + int(ends[prompts + 1]) == row
            assert starts[prompts] == chunk.start
            assert tables[prompts, : len(chunk.blocks)].tolist() == list(chunk.blocks)
            prompts += 1
        sampled += range(row - chunk.samples, row)
    assert prompts == (0 if mb.packed is None else len(mb.packed[2]))
    assert mb.decoding == decoded
    assert mb.sample_rows.tolist() == sampled
    one_each = all(chunk.samples < 2 for chunk in given_chunks)
    assert mb.sample_places.tolist() == [chunk.slot for chunk in given_chunks if chunk.samples and one_each]
    assert mb.places.tolist() == [chunk.slot for chunk in given_chunks if not chunk.token_ids]
    assert mb.sampled.numel() == len(sampled)
    assert not sampled or mb.sampled.data_ptr() == ROOM.data_ptr()
    assert mb.cache_slots.unique().numel() == total, "no two tokens share a place in the cache"


def test_types_are_those_the_kernels_want() -> None:
    chunk = Chunk(token_ids=[], start=17, blocks=[3, 1], slot=2, samples=True, decodes=True)
    mb = pack([chunk], block_size=BLOCK, hidden=torch.zeros(1, 8), sampled=ROOM, crossing=None, prefill_only=True)
    assert (mb.token_ids.dtype, mb.positions.dtype, mb.cache_slots.dtype) == (torch.int64,) * 3
    assert (mb.block_tables.dtype, mb.seq_lens.dtype) == (torch.int32, torch.int32)
    assert (mb.cache_slots.item(), mb.seq_lens.item()) == (1 * BLOCK + 1, 18)
    assert mb.prefill_only


def test_a_micro_batch_of_prompts_alone_has_no_tables() -> None:
    chunk = Chunk(token_ids=[5, 6], start=0, blocks=[3], slot=0, samples=False, decodes=False)
    mb = pack([chunk], block_size=BLOCK, hidden=torch.zeros(2, 8), sampled=ROOM, crossing=None, prefill_only=False)
    assert mb.decoding == 0
    assert mb.block_tables.shape[0] == 0
    assert mb.sample_rows.numel() == 0


def test_index_tensors_land_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is played by what torch does for it: pinned memory and the copy."""
    one = Chunk(token_ids=[], start=20, blocks=[3, 1], slot=2, samples=True, decodes=True)
    two = Chunk(token_ids=[5, 6, 7], start=15, blocks=[4, 0], slot=1, samples=True, decodes=False)
    mb = pack([one, two], block_size=BLOCK, hidden=torch.zeros(4, 8), sampled=ROOM, crossing=None, prefill_only=False)
    mb.added = find_added(mb.cache_slots, host_slots=2 * BLOCK)
    form = PromptForm(tile_tokens=2, most_tokens=9)
    mb.context = find_context([one, two], block_size=BLOCK, window=None, host_slots=2 * BLOCK, form=form)
    names = ("token_ids", "positions", "places", "sample_rows", "sample_places", "scored_rows", "targets")
    rows = ("host_rows", "host_slots", "device_rows", "device_slots")
    tables = ("table", "sequences", "tiles", "entries")
    owners = ((mb, names), (mb.added, rows), (mb.context.batch, tables))
    before = [getattr(owner, name).clone() for owner, item in owners for name in item]
    moved: list[torch.Tensor] = []
    mb.hidden = SimpleNamespace(device=SimpleNamespace(type="card"))  # type: ignore[assignment]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: moved.append(tensor) or tensor.clone())
    mb.land()
    after = [getattr(owner, name) for owner, item in owners for name in item]
    assert len(moved) == 1
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    position = moved[0].untyped_storage().data_ptr()
    assert (
        mb.context.batch.entries.untyped_storage().data_ptr() == mb.positions.untyped_storage().data_ptr() != position
    )
