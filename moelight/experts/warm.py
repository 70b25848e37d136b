"""Warm-pinning: once, after enough accesses, pin the most used residents of the most used layers.

Chooses the experts; the cache pins them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moelight.core.errors import ConfigError
from moelight.experts.predict import Ints, likeliest
from moelight.experts.prefetch import Mask


def busiest_residents(counts: Ints, resident: Mask, *, per_layer: int, budget: int) -> Ints:
    """Return ``(layer, expert)`` [<= budget, 2]: the residents among the ``per_layer`` most used experts of each layer.

    Layers are ordered by descending accesses (ties by number), so that the budget goes to the most used layers; layers
    without accesses are excluded. ``counts`` and ``resident`` are [L, E].
    """
    found: list[tuple[int, int]] = []
    of_layer = counts.sum(axis=1)
    for layer in np.argsort(-of_layer, kind="stable"):
        if of_layer[layer] == 0:
            break
        top = likeliest(counts[layer], per_layer)
        found += [(int(layer), int(expert)) for expert in top[resident[layer, top]]]
    return np.array(found[: max(0, budget)], dtype=np.int64).reshape(-1, 2)


class WarmPin:
    """Pins once, after ``after`` accesses (hits and misses).

    Attributes:
        fired: True once the experts have been pinned.
        pinned: pinned (layer, expert) [n, 2], sorted by layer, then id.
        pre_hits, pre_misses: totals at the time of pinning; 0 before.
    """

    def __init__(self, after: int, *, per_layer: int | None = None, active: int | None = None) -> None:
        """Pin ``per_layer`` experts of each layer (0: off). None: as many as a token chooses (``active``), one if that
        is unknown, and none if all experts fit.

        Raises:
            ConfigError: ``after`` is below 1, or ``per_layer`` below 0.
        """
        if after < 1:
            raise ConfigError(f"warm_pin must be a whole number of at least 1 access, not {after}")
        if per_layer is not None and per_layer < 0:
            raise ConfigError(f"warm_pin: at least 0 experts per layer, not {per_layer}")
        self.after = after
        self._per_layer, self._active = per_layer, active
        self.fired = False
        self.pinned: Ints = np.zeros((0, 2), dtype=np.int64)
        self.pre_hits, self.pre_misses = 0, 0

    def due(self, accesses: int) -> bool:
        """Return True if the experts are to be pinned before the access after ``accesses``."""
        return not self.fired and accesses >= self.after

    def fire(
        self,
        hits: Ints,
        misses: Ints,
        resident: Mask,
        *,
        capacity: int,
        pinnable: int,
        pin: Callable[[int, int], bool],
    ) -> None:
        """Pin, and record the totals before. ``hits``, ``misses`` and ``resident`` are [L, E].

        At most half of the ``capacity`` is pinned, and at most ``pinnable`` (protected from eviction);
        ``pin(layer, expert)`` returns True if it could pin.
        """
        self.fired = True
        self.pre_hits, self.pre_misses = int(hits.sum()), int(misses.sum())
        chosen = busiest_residents(
            hits + misses,
            resident,
            per_layer=self._each(capacity, *hits.shape),
            budget=min(capacity // 2, pinnable),
        )
        pinned = [key for key in chosen.tolist() if pin(*key)]
        self.pinned = np.array(sorted(pinned), dtype=np.int64).reshape(-1, 2)

    def _each(self, capacity: int, layers: int, experts: int) -> int:
        if self._per_layer is not None:
            return self._per_layer
        return 0 if capacity >= layers * experts else min(experts, self._active or 1)

    def as_dict(self, hits: int, misses: int) -> dict[str, Any]:
        """Return, for JSON and the current totals, the hit rates before and after pinning and the pinned experts of
        each layer."""
        before, total = self.pre_hits + self.pre_misses, hits + misses
        after = total - before
        overall = hits / total if total else 0.0
        return {
            "after": self.after,
            "fired": self.fired,
            "pre_warm_accesses": before if self.fired else total,
            "pre_warm_hit_rate": (self.pre_hits / before if before else 0.0) if self.fired else overall,
            "post_warm_accesses": after if self.fired else 0,
            "post_warm_hit_rate": (hits - self.pre_hits) / after if self.fired and after else 0.0,
            "pinned": [
                {"layer": layer, "experts": self.pinned[self.pinned[:, 0] == layer, 1].tolist()}
                for layer in np.unique(self.pinned[:, 0]).tolist()
            ],
        }
