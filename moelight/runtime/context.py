"""Cache slots of tokens, and what a micro-batch attends to on the device: blocks on the device in place, others
transferred to a buffer.

Slots below ``host_slots`` are in host memory; the device's cache counts from there. Legend: T new tokens, C cached
tokens seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from moelight.kernels.device import Device
from moelight.kernels.gpu.attention import PromptForm, RaggedBatch, in_buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of one sequence, which owns ``blocks`` of the cache, and in that of layers
    with a window, if they have one of their own, ``window_blocks`` from its block ``window_first`` on.

    ``decodes``: one generated token, at ``slot`` of the token pool (``token_ids`` is empty), where the next token is
    written too; or, in ``token_ids``, the newest token and the drafts after it. A prompt token never decodes, not even
    in a chunk of one: the result would depend on how the prompt is cut. ``samples``: so many last rows sample a token
    each. ``targets``: scored tokens; row ``first_scored`` of the chunk scores the first, the following rows the others.
    ``pooled``: rows of the chunk whose final hidden states are pooled. ``reaches``: the length of the sequence, if its
    other chunks go beyond this one.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    slot: int
    samples: int
    decodes: bool
    targets: Sequence[int] = ()
    first_scored: int = 0
    reaches: int = 0
    pooled: range = range(0)
    window_blocks: Sequence[int] = ()
    window_first: int = 0

    @property
    def length(self) -> int:
        return max(self.reaches, self.start + self.count)

    @property
    def count(self) -> int:
        return max(1, len(self.token_ids)) if self.decodes else len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class Context:
    """The cached context of a micro-batch on the device: its sequences and the blocks of their cached tokens.

    Blocks in the host's cache are transferred to a buffer, each once, whatever sequences share it.

    Attributes:
        tokens: C.
        stays: cached tokens that do not cross: on the device already, or transferred for another sequence.
        pieces: int32 [blocks, 3], in host memory: slot in the host's cache, place in the buffer, and count of the
            cached tokens of each block that crosses, slots and places ascending.
        runs: the same, merged where contiguous in the host's cache.
        batch: all sequences; `MicroBatch.land` transfers its table.
    """

    tokens: int
    stays: int
    pieces: Tensor
    runs: tuple[tuple[int, int, int], ...]
    batch: RaggedBatch
    _landed: Tensor | None = None

    def pieces_on(self, device: torch.device) -> Tensor:
        """``pieces`` on ``device``, copied at the first call without waiting, on the stream of all calls."""
        if self._landed is None:
            self._landed = Device(device).landed(self.pieces)
        return self._landed


@dataclass(kw_only=True, slots=True)
class Added:
    """Destinations of new keys and values; int64, moved to the device by `MicroBatch.land` except ``host_slots``. Rows
    None: all.

    Attributes:
        device_count: number of rows kept on the device.
        host_slots: slots of ``host_rows`` in the host's cache, in host memory.
        device_slots: slots of ``device_rows`` in the device's cache; None if there are none.
    """

    device_count: int
    host_rows: Tensor | None
    host_slots: Tensor
    device_rows: Tensor | None
    device_slots: Tensor | None


def seen_before(start: int, window: int | None) -> int:
    """Number of the ``start`` cached tokens that a sequence still sees."""
    return start if window is None else min(start, window - 1)


def find_added(slots: Tensor, *, host_slots: int) -> Added:
    """``slots`` int64, in host memory: cache slots of the rows."""
    down = slots < host_slots
    if bool(down.all()):
        return Added(device_count=0, host_rows=None, host_slots=slots, device_rows=None, device_slots=None)
    stay = slots[~down] - host_slots
    some = bool(down.any())
    return Added(
        device_count=stay.numel(),
        host_rows=down.nonzero().flatten(),
        host_slots=slots[down],
        device_rows=(~down).nonzero().flatten() if some else None,
        device_slots=stay,
    )


def find_context(
    chunks: Sequence[Chunk], *, block_size: int, window: int | None, host_slots: int, form: PromptForm
) -> Context:
    """Context of ``chunks``, whose rows are in the same order, decoding ones first, those of one row before. ``form``:
    of prompts, and of rows with drafts."""
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lowest = np.array([chunk.start - seen_before(chunk.start, window) for chunk in chunks], dtype=np.int64)
    first = lowest // block_size
    counts = np.where(lowest < starts, -(-starts // block_size) - first, 0)
    cuts = zip(chunks, first.tolist(), (first + counts).tolist(), strict=True)
    blocks = np.fromiter(chain.from_iterable(chunk.blocks[a:b] for chunk, a, b in cuts), np.int64, int(counts.sum()))
    owner = np.repeat(np.arange(len(chunks)), counts)
    position = (np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - first, counts)) * block_size
    begins, ends = np.maximum(lowest[owner] - position, 0), np.minimum(starts[owner] - position, block_size)
    entries, crossing = blocks * block_size - host_slots, blocks * block_size < host_slots
    crossed, at = np.unique(blocks[crossing], return_inverse=True)
    begin, end = np.full(len(crossed), block_size), np.zeros(len(crossed), dtype=np.int64)
    np.minimum.at(begin, at, begins[crossing])
    np.maximum.at(end, at, ends[crossing])
    places = np.cumsum(end - begin) - (end - begin)
    entries[crossing] = in_buffer(places - begin)[at]
    pieces = np.stack((crossed * block_size + begin, places, end - begin), axis=1)
    tokens = int((starts - lowest).sum())
    return Context(
        tokens=tokens,
        stays=tokens - int((end - begin).sum()),
        pieces=torch.from_numpy(pieces.astype(np.int32)),
        runs=_runs(pieces),
        batch=RaggedBatch(
            [chunk.count for chunk in chunks],
            starts,
            lowest,
            entries,
            decoding=sum(chunk.decodes and chunk.count == 1 for chunk in chunks),
            block_size=block_size,
            form=form,
        ),
    )


def slots_of(chunk: Chunk, begin: int, end: int, block_size: int) -> np.ndarray:
    """Cache slots int64 [end - begin] of positions ``begin`` to ``end`` of a sequence."""
    where = np.arange(begin, end, dtype=np.int64)
    table = np.asarray(chunk.blocks, dtype=np.int64)
    return table[where // block_size] * block_size + where % block_size


def _runs(pieces: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """``pieces`` merged where one follows another in the host's cache; in the buffer each follows the one before."""
    slot, _, count = pieces.T
    first = np.flatnonzero(np.r_[True, slot[1:] != slot[:-1] + count[:-1]]) if len(pieces) else slot
    sums = np.add.reduceat(count, first) if len(first) else first
    return tuple(zip(slot[first].tolist(), pieces[first, 1].tolist(), sums.tolist(), strict=True))
