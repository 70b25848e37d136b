"""Distribution of a slot budget over layers: exact sum, within bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moelight.core.errors import ConfigError
from moelight.experts.access import FloatArray, IntArray

_LEAST_WEIGHT = 1e-9  # of the largest weight; smaller ones count as 0, which keeps the bisection within float64


def share_out(total: int, weights: FloatArray, least: IntArray, most: IntArray) -> IntArray:
    """Distribute ``total`` slots in proportion to ``weights`` float [L], each layer within ``least`` and ``most`` int
    [L]; equally if all weights are 0. The difference of a layer that is cut at a bound goes to the other layers; the
    rounding remainder goes to the largest fractions, ties to the first layers. The sum is exactly ``total``.

    Raises:
        ConfigError: no shares within the bounds have that sum.
    """
    low, high = int(least.sum()), int(most.sum())
    if not low <= total <= high or (least > most).any():
        raise ConfigError(
            f"per_layer: {total} slots cannot be shared out to {len(weights)} layers, which take {low} to {high} "
            "together; change total_budget, min_capacity or max_capacity"
        )
    if not weights.sum() > 0:
        weights = np.ones(len(weights))
    weights = weights / weights.max()
    weights[weights < _LEAST_WEIGHT] = 0.0
    ideal = np.clip(_bounded(total, weights, least, most), least, most)
    shares = np.floor(ideal + 1e-9).astype(np.int64)
    missing = total - int(shares.sum())
    while missing:
        step = 1 if missing > 0 else -1
        room = shares < most if step > 0 else shares > least
        remainders = np.where(room, step * (ideal - shares), -np.inf)
        for layer in np.argsort(-remainders, kind="stable")[: min(abs(missing), int(room.sum()))]:
            shares[layer] += step
            missing -= step
    return shares


def _bounded(total: int, weights: FloatArray, least: IntArray, most: IntArray) -> FloatArray:
    """Return real shares ``clip(a * weights, least, most)`` with the ``a`` that makes their sum ``total``, by
    bisection."""
    positive = weights > 0
    below, above = 0.0, float((most[positive] / weights[positive]).max())
    for _ in range(100):
        middle = (below + above) / 2.0
        if np.clip(middle * weights, least, most).sum() < total:
            below = middle
        else:
            above = middle
    found: FloatArray = np.clip(above * weights, least, most)
    return found


class Selections:
    """The last ``window`` accesses of each layer, and their entropy over its experts."""

    def __init__(self, num_layers: int, num_experts: int, window: int) -> None:
        self._last = np.zeros((num_layers, window), np.int64)
        self._seen = np.zeros(num_layers, np.int64)
        self._experts = num_experts

    def add(self, layer: int, ids: NDArray[np.int64]) -> None:
        window = self._last.shape[1]
        ids = ids[-window:]
        self._last[layer, (self._seen[layer] + np.arange(len(ids))) % window] = ids
        self._seen[layer] += len(ids)

    def entropies(self) -> FloatArray:
        """Entropy of each layer's recent accesses in bits, float [L]; a layer without accesses gets that of a uniform
        spread (1 bit if it has one expert)."""
        found = np.full(len(self._seen), np.log2(max(self._experts, 2)))
        for layer in np.flatnonzero(self._seen):
            counts = np.bincount(self._last[layer, : self._seen[layer]], minlength=self._experts)
            shares = counts[counts > 0] / counts.sum()
            found[layer] = -(shares * np.log2(shares)).sum()
        return found
