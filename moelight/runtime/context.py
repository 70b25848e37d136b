"""Cache slots of tokens, and the packed context of a micro-batch whose attention runs on the device.

In the buffer every sequence has one run: the cached tokens that it still sees, then space for its new tokens. Slots
below ``host_slots`` are in host memory, the others on the device, whose cache counts from there. Depends on indices
only, not on key/value tensors or copies.

Legend: T tokens of the micro-batch, C cached tokens that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Scored tokens of a prompt: the first is scored by row ``row`` of a chunk, the others by the following rows."""

    row: int
    token_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of one sequence, which owns ``blocks`` of the cache.

    ``decodes``: one generated token, computed by the decode kernel. The token is at ``place`` of the token pool, where
    the next one is written too, so ``token_ids`` is empty. Prompt tokens never decode, even in a chunk of one token:
    their result would depend on how the prompt is cut. ``samples``: the last row samples a token. ``targets`` are
    scored.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    place: int
    samples: bool
    decodes: bool
    targets: Targets | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return 1 if self.decodes else len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Context buffer layout of one micro-batch.

    Attributes:
        tokens: C.
        there: cached tokens in the device's cache.
        runs: (place in the buffer, slot in the host's cache, count) of cached tokens that are contiguous in both.
        spans: (first row, last row, place in the buffer, cached tokens) of each sequence.
        own: int64 [T], on the device: places of the new tokens.
        slots: int64, on the device: slots in the device's cache of the cached tokens at ``places``. If the whole cache
            is on the device, slots of all T + C places, and ``places`` is None. None if no cached token is on the
            device.
        places: int64, on the device: places in the buffer that are gathered from the device's cache.
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
    """Destinations of the new keys and values of a micro-batch.

    Attributes:
        there: number of rows kept on the device.
        host_rows: int64, on the device: rows copied to the host; None for every row.
        host_slots: int64, in host memory: slots of those rows in the host's cache.
        device_rows: int64, on the device: rows kept on the device; None for every row.
        device_slots: int64, on the device: slots of those rows in the device's cache; None if there are none.
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
    """Destinations of the rows with cache slots ``slots`` (int64, in host memory)."""
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
    """Contiguous runs of ``slots`` in host memory; a run that continues into the device's slots is cut there."""
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    runs = []
    for first, last in pairwise(bounds):
        count = min(last - first, host_slots - int(slots[first])) if last > first else 0
        if count > 0:
            runs.append((place + first, int(slots[first]), count))
    return runs
