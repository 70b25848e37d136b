"""Cache slots of tokens, and the packed context of a micro-batch whose attention runs on the device.

In the buffer a sequence has one run: the cached tokens that it still sees, then space for its new tokens. Slots below
``host_slots`` are in host memory; the device's cache counts from there. Legend: T new tokens, C cached tokens seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of one sequence, which owns ``blocks`` of the cache.

    ``decodes``: one generated token, at ``place`` of the token pool (``token_ids`` is empty), where the next token is
    written too. A prompt token never decodes, not even in a chunk of one: the result would depend on how the prompt is
    cut. ``samples``: the last row samples a token. ``targets``: scored tokens; row ``first_scored`` of the chunk scores
    the first, the following rows the others.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    place: int
    samples: bool
    decodes: bool
    targets: Sequence[int] = ()
    first_scored: int = 0

    @property
    def count(self) -> int:
        return 1 if self.decodes else len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Context buffer layout of one micro-batch; all tensors int64, on the device.

    Attributes:
        tokens: C.
        there: cached tokens in the device's cache.
        runs: (place in the buffer, slot in the host's cache, count) of cached tokens that are contiguous in both.
        spans: (first row, last row, place in the buffer, cached tokens) of each sequence.
        own: places [T] of the new tokens.
        slots: slots in the device's cache of the tokens at ``places``; None: no cached token is on the device.
        places: places that are gathered from the device's cache; None: all T + C.
    """

    tokens: int
    there: int
    runs: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[int, int, int, int], ...]
    own: Tensor
    slots: Tensor | None
    places: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """Destinations of new keys and values; int64, on the device except ``host_slots``. Rows None: all.

    Attributes:
        there: number of rows kept on the device.
        host_slots: slots of ``host_rows`` in the host's cache, in host memory.
        device_slots: slots of ``device_rows`` in the device's cache; None if there are none.
    """

    there: int
    host_rows: Tensor | None
    host_slots: Tensor
    device_rows: Tensor | None
    device_slots: Tensor | None


def seen_before(start: int, window: int | None) -> int:
    """Number of the ``start`` cached tokens that a sequence still sees."""
    return start if window is None else min(start, window - 1)


def find_added(slots: Tensor, *, host_slots: int, device: torch.device) -> Added:
    """``slots`` int64, in host memory: cache slots of the rows."""
    down = slots < host_slots
    if bool(down.all()):
        return Added(there=0, host_rows=None, host_slots=slots, device_rows=None, device_slots=None)
    stay = (slots[~down] - host_slots).to(device)
    some = bool(down.any())
    return Added(
        there=stay.numel(),
        host_rows=down.nonzero().flatten().to(device),
        host_slots=slots[down],
        device_rows=(~down).nonzero().flatten().to(device) if some else None,
        device_slots=stay,
    )


def find_context(
    chunks: Sequence[Chunk], *, block_size: int, window: int | None, device: torch.device, host_slots: int
) -> Context:
    """Context of ``chunks``, whose rows are in the same order."""
    runs: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    own, slots, cached_places = [], [], []
    row = place = tokens = 0
    for chunk in chunks:
        count, cached = chunk.count, seen_before(chunk.start, window)
        mine = slots_of(chunk, chunk.start - cached, chunk.start + count, block_size)
        runs += _runs(place, mine[:cached], host_slots)
        spans.append((row, row + count, place, cached))
        own.append(np.arange(place + cached, place + cached + count, dtype=np.int64))
        slots.append(mine)
        cached_places.append(np.arange(place, place + cached, dtype=np.int64))
        row, place, tokens = row + count, place + cached + count, tokens + cached
    every = np.concatenate(slots)
    places = np.concatenate(cached_places)
    places = places[every[places] >= host_slots]
    gathered = every[places] if host_slots else every
    return Context(
        tokens=tokens,
        there=len(places),
        runs=tuple(runs),
        spans=tuple(spans),
        own=torch.from_numpy(np.concatenate(own)).to(device),
        slots=torch.from_numpy(gathered - host_slots).to(device) if len(gathered) else None,
        places=torch.from_numpy(places).to(device) if host_slots and len(places) else None,
    )


def slots_of(chunk: Chunk, begin: int, end: int, block_size: int) -> np.ndarray:
    """Cache slots int64 [end - begin] of positions ``begin`` to ``end`` of a sequence."""
    where = np.arange(begin, end, dtype=np.int64)
    table = np.asarray(chunk.blocks, dtype=np.int64)
    return table[where // block_size] * block_size + where % block_size


def _runs(place: int, slots: np.ndarray, host_slots: int) -> list[tuple[int, int, int]]:
    """A run that continues into the device's slots is cut there."""
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    runs = []
    for first, last in pairwise(bounds):
        count = min(last - first, host_slots - int(slots[first])) if last > first else 0
        if count > 0:
            runs.append((place + first, int(slots[first]), count))
    return runs
