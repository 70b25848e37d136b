"""Confidence of predictions, from the observed accuracy of earlier predictions of the same kind.

A page that is prefetched and not used delays other pages by its whole time on the link or the disk, so a prediction is
worth a prefetch only if it is likely to be right. The probability depends on the model and the predictor; all
predictions are counted, including those that are not prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.experts.eviction import FloatArray, IntArray

# On recorded routing, prefetch gains most at a probability of .7 to .8, for pages of a few MB (docs/log.md).
SURE = 0.75
DECAY = 0.995  # of the counts, at each batch that resolves predictions
_KINDS = 64
_MARGIN_STEP = 0.125  # of the logarithm; the last kind includes all larger margins


class _HitRecord:
    """Accuracy of the predictions of each kind."""

    def __init__(self) -> None:
        self._right = np.zeros(_KINDS)
        self._made = np.ones(_KINDS)  # one wrong prediction as prior, so that an unseen kind has no confidence

    def chance(self, kinds: IntArray) -> FloatArray:
        """Return the accuracy of each of ``kinds``."""
        return np.asarray(self._right[kinds] / self._made[kinds])

    def flush(self, kinds: IntArray, came_true: NDArray[np.bool_]) -> None:
        """Record predictions of these ``kinds`` as right or wrong."""
        self._right *= DECAY
        self._made *= DECAY
        np.add.at(self._right, kinds, came_true)
        np.add.at(self._made, kinds, 1.0)


class PrefetchConfidence:
    """Confidence of ranked predictions, the likeliest first, by rank."""

    def __init__(self) -> None:
        self._record = _HitRecord()
        self._open: dict[int, IntArray] = {}

    def likely(self, row: int, ids: IntArray) -> IntArray:
        """Return those of the predicted ``ids`` of layer ``row`` that are worth a prefetch."""
        self._open[row] = ids
        return ids[self._record.chance(_places(ids)) >= SURE]

    def flush(self, row: int, chosen: NDArray[Any]) -> None:
        """Resolve the predictions for ``row``, which has routed to ``chosen``."""
        ids = self._open.pop(row, None)
        if ids is not None and len(ids):
            self._record.flush(_places(ids), np.isin(ids, chosen))


class RouterConfidence:
    """Confidence of predictions of a layer's own router, evaluated one layer early, by the margin of each token's
    choice.

    The margin of a choice is the logarithm of its weight over the smallest chosen weight of the token.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._record = _HitRecord()
        self._open: dict[int, list[tuple[NDArray[Any], IntArray]]] = {}

    def add(self, row: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """Record that the router of ``row`` would choose ``ids`` [T, k] with ``weights`` [T, k] for the next tokens of
        the pass."""
        least = weights.min(axis=1, keepdims=True)
        margin = np.log(np.maximum(weights, 1e-30) / np.maximum(least, 1e-30))
        kinds = np.minimum(margin / _MARGIN_STEP, _KINDS - 1).astype(np.int64)
        self._open.setdefault(row, []).append((ids, kinds))

    def likely(self, row: int) -> tuple[IntArray, FloatArray]:
        """Return the experts of ``row`` that are worth a prefetch, and the probability that any token chooses each."""
        missed = np.ones(self._num_experts)
        for ids, kinds in self._open.get(row, ()):
            np.multiply.at(missed, ids.ravel(), 1.0 - self._record.chance(kinds.ravel()))
        found = np.flatnonzero(1.0 - missed >= SURE)
        return found, 1.0 - missed[found]

    def flush(self, row: int, chosen: NDArray[Any]) -> None:
        """Resolve the predictions for ``row``: it routed the recorded tokens, in their order, to ``chosen`` [T, k]."""
        first = 0
        for ids, kinds in self._open.pop(row, ()):
            mine = chosen[first : first + len(ids)]
            first += len(ids)
            self._record.flush(kinds.ravel(), (ids[:, :, None] == mine[:, None, :]).any(axis=2).ravel())


def _places(ids: IntArray) -> IntArray:
    return np.minimum(np.arange(len(ids)), _KINDS - 1)
