"""Where tokens lie in the cache; and where a micro-batch's context lies packed when the device attends.

In the buffer every sequence has one run: its cached tokens that it still sees, then room for its own new ones. Knows
places only; refuses to know tensors of keys and values, and who copies them.

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
class Chunk:
    """Tokens ``start`` to ``start + count`` of one sequence, which owns ``blocks`` of the cache.

    ``decodes``: one generated token, served by the decode kernel. It lies at ``place`` of the pool of tokens, where the
    next one goes too, so it has no ``token_ids`` here. A prompt's tokens never are, even where a cut leaves one alone:
    its numbers would depend on the cut.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    place: int
    samples: bool
    decodes: bool

    @property
    def count(self) -> int:
        """Its rows."""
        return 1 if self.decodes else len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The places of one micro-batch.

    Attributes:
        tokens: C.
        runs: (place in the buffer, slot in the cache, how many): cached tokens that follow each other in both.
        spans: (first row, last row, place in the buffer, cached tokens) of each sequence.
        own: int64 [T], on the device: places of the new tokens.
        slots: int64 [T + C], on the device: the cache slot of each place; None where contexts are brought from host
            memory.
    """

    tokens: int
    runs: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[int, int, int, int], ...]
    own: Tensor
    slots: Tensor | None


def seen_before(start: int, window: int | None) -> int:
    """How many of ``start`` cached tokens a sequence still sees."""
    return start if window is None else min(start, window - 1)


def find_context(
    chunks: Sequence[Chunk], *, block_size: int, window: int | None, device: torch.device, cached_there: bool
) -> Context:
    """The places of ``chunks`` in their order as rows. ``cached_there``: the cache is in the device's memory too."""
    runs: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    own, slots = [], []
    row = place = tokens = 0
    for chunk in chunks:
        count, cached = chunk.count, seen_before(chunk.start, window)
        mine = slots_of(chunk, chunk.start - cached, chunk.start + count, block_size)
        runs += _runs(place, mine[:cached])
        spans.append((row, row + count, place, cached))
        own.append(np.arange(place + cached, place + cached + count, dtype=np.int64))
        slots.append(mine)
        row, place, tokens = row + count, place + cached + count, tokens + cached
    return Context(
        tokens=tokens,
        runs=tuple(runs),
        spans=tuple(spans),
        own=torch.from_numpy(np.concatenate(own)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device) if cached_there else None,
    )


def slots_of(chunk: Chunk, begin: int, end: int, block_size: int) -> np.ndarray:
    """int64 [end - begin]: the cache slots of positions ``begin`` to ``end`` of a sequence."""
    where = np.arange(begin, end, dtype=np.int64)
    table = np.asarray(chunk.blocks, dtype=np.int64)
    return table[where // block_size] * block_size + where % block_size


def _runs(place: int, slots: np.ndarray) -> list[tuple[int, int, int]]:
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(place + first, int(slots[first]), last - first) for first, last in pairwise(bounds) if last > first]
