"""Where tokens lie in the cache; and where a micro-batch's context lies packed when the device attends.

In the buffer every sequence has one run: its cached tokens that it still sees, then room for its own new ones. Slots
below ``host_slots`` are in host memory, the others on the device, whose own cache counts from there. Knows places only;
refuses to know tensors of keys and values, and who copies them.

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
    """Tokens of a prompt that are scored, by row ``row`` of a chunk and the following ones."""

    row: int
    token_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + count`` of one sequence, which owns ``blocks`` of the cache.

    ``decodes``: one generated token, served by the decode kernel. It lies at ``place`` of the pool of tokens, where the
    next one goes too, so it has no ``token_ids`` here. A prompt's tokens never are, even where a cut leaves one alone:
    its numbers would depend on the cut. ``targets`` are scored.
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
        """Its rows."""
        return 1 if self.decodes else len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The places of one micro-batch.

    Attributes:
        tokens: C; ``there``: those of them in the device's cache.
        runs: (place in the buffer, slot in the host's cache, how many): cached tokens that follow each other in both.
        spans: (first row, last row, place in the buffer, cached tokens) of each sequence.
        own: int64 [T], on the device: places of the new tokens.
        slots: int64, on the device: slots in the device's cache of the places in ``places``, cached tokens only; of
            all T + C places where the whole cache is there, and ``places`` is None then. None where nothing is there.
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
    """Where the new keys and values of a micro-batch go.

    Attributes:
        there: rows that stay on the device.
        host_rows: int64, on the device: the rows that go down; None for every row. ``host_slots``: int64, in host
            memory, their slots in the host's cache.
        device_rows: int64, on the device: the rows that stay; None for every row. ``device_slots``: int64, on the
            device, their slots in the device's cache; None where no row stays.
    """

    there: int
    host_rows: Tensor | None
    host_slots: Tensor
    device_rows: Tensor | None
    device_slots: Tensor | None


def seen_before(start: int, window: int | None) -> int:
    """How many of ``start`` cached tokens a sequence still sees."""
    return start if window is None else min(start, window - 1)


def find_added(slots: Tensor, *, host_slots: int, device: torch.device) -> Added:
    """Which of the rows with cache slots ``slots`` (int64, in host memory) go where."""
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
    """The places of ``chunks`` in their order as rows."""
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
    """int64 [end - begin]: the cache slots of positions ``begin`` to ``end`` of a sequence."""
    where = np.arange(begin, end, dtype=np.int64)
    table = np.asarray(chunk.blocks, dtype=np.int64)
    return table[where // block_size] * block_size + where % block_size


def _runs(place: int, slots: np.ndarray, host_slots: int) -> list[tuple[int, int, int]]:
    """What of ``slots`` is in host memory; slots that go on into the device's are cut there."""
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    runs = []
    for first, last in pairwise(bounds):
        count = min(last - first, host_slots - int(slots[first])) if last > first else 0
        if count > 0:
            runs.append((place + first, int(slots[first]), count))
    return runs
