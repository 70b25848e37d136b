"""How far guesses are to be trusted: what came of earlier ones like them.

A page that nobody asks for delays those that somebody does, by all its time on the link or the disk: a guess is worth
acting on only if it is likely to come true. How likely that is depends on the model and the predictor, so all guesses
are counted, also those that are not acted on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.experts.access import FloatArray, IntArray

# On recorded routing fetching ahead gains most if guesses are .7 to .8 sure, for pages of a few MB (docs/log.md).
SURE = 0.75
DECAY = 0.995  # of what was counted, at each batch that settles guesses
_KINDS = 64
_MARGIN_STEP = 0.125  # of the logarithm; the last kind is of everything above


class _HitRecord:
    """The share of guesses of each kind that came true."""

    def __init__(self) -> None:
        self._right = np.zeros(_KINDS)
        self._made = np.ones(_KINDS)  # one that was wrong: nobody is trusted unseen

    def chance(self, kinds: IntArray) -> FloatArray:
        """Of guesses of these ``kinds``."""
        return np.asarray(self._right[kinds] / self._made[kinds])

    def flush(self, kinds: IntArray, came_true: NDArray[np.bool_]) -> None:
        """Guesses of these ``kinds`` came true or not."""
        self._right *= DECAY
        self._made *= DECAY
        np.add.at(self._right, kinds, came_true)
        np.add.at(self._made, kinds, 1.0)


class PrefetchConfidence:
    """Guesses that come as lists, the likeliest first: trusted by their place in it."""

    def __init__(self) -> None:
        self._record = _HitRecord()
        self._open: dict[int, IntArray] = {}

    def likely(self, row: int, ids: IntArray) -> IntArray:
        """Of the guesses ``ids`` about ``row`` those that are worth acting on."""
        self._open[row] = ids
        return ids[self._record.chance(_places(ids)) >= SURE]

    def flush(self, row: int, chosen: NDArray[Any]) -> None:
        """``row`` has chosen; what was guessed about it came true or not."""
        ids = self._open.pop(row, None)
        if ids is not None and len(ids):
            self._record.flush(_places(ids), np.isin(ids, chosen))


class PrefetchDecision:
    """Guesses of a layer's own router, asked one layer early: trusted by how clearly it chose, token by token.

    The margin of a choice is the logarithm of its weight over that of the token's least one.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._record = _HitRecord()
        self._open: dict[int, list[tuple[NDArray[Any], IntArray]]] = {}

    def add(self, row: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """The router of ``row`` would choose ``ids`` [T, k] with ``weights`` [T, k] for the next tokens of the pass."""
        least = weights.min(axis=1, keepdims=True)
        margin = np.log(np.maximum(weights, 1e-30) / np.maximum(least, 1e-30))
        kinds = np.minimum(margin / _MARGIN_STEP, _KINDS - 1).astype(np.int64)
        self._open.setdefault(row, []).append((ids, kinds))

    def likely(self, row: int) -> tuple[IntArray, FloatArray]:
        """Experts of ``row`` that are worth fetching, and how likely somebody chooses them."""
        missed = np.ones(self._num_experts)
        for ids, kinds in self._open.get(row, ()):
            np.multiply.at(missed, ids.ravel(), 1.0 - self._record.chance(kinds.ravel()))
        found = np.flatnonzero(1.0 - missed >= SURE)
        return found, 1.0 - missed[found]

    def flush(self, row: int, chosen: NDArray[Any]) -> None:
        """``row`` chose ``chosen`` [T, k] for the tokens that were told of, in their order."""
        first = 0
        for ids, kinds in self._open.pop(row, ()):
            mine = chosen[first : first + len(ids)]
            first += len(ids)
            self._record.flush(kinds.ravel(), (ids[:, :, None] == mine[:, None, :]).any(axis=2).ravel())


def _places(ids: IntArray) -> IntArray:
    return np.minimum(np.arange(len(ids)), _KINDS - 1)
