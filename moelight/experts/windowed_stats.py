"""Windowed metrics of a cache, per access, although accesses arrive in batches.

The accesses of a batch are ordered hits first, then misses; evictions are attributed to the last misses of the batch,
because free slots are used first.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.policy import METRICS, MonitorRules
from moelight.experts.predict import Floats, Ints

NOTES_KEPT = 1000  # a long job writes millions


class Monitor:
    """``hit_rate`` and ``eviction_rate`` (evictions per access) over the last ``window`` accesses, or over all accesses
    while there are fewer. Every ``log_interval`` accesses the requested metrics are noted.

    Attributes:
        accesses: number of accesses so far.
        notes: the last `NOTES_KEPT` notes, each ``{"access": number, metric: value}``.
    """

    def __init__(self, rules: MonitorRules | None = None) -> None:
        """Raises ConfigError: a window or interval below 1, or an unknown metric."""
        self.rules = rules or MonitorRules()
        for key in ("window", "log_interval"):
            if getattr(self.rules, key) < 1:
                raise ConfigError(f"monitor: {key} must be at least 1 access, not {getattr(self.rules, key)}")
        for metric in self.rules.metrics:
            if metric not in METRICS:
                near = did_you_mean(metric, METRICS)
                raise ConfigError(f"monitor: unknown metric {metric!r}{near}; known: {', '.join(METRICS)}")
        self.accesses = 0
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)
        # Totals of hits and evictions after each access; the first column is the start of the window.
        self._totals = np.zeros((2, 2 * self.rules.window + 2), dtype=np.int64)
        self._end = 0

    def record(self, hits: int, misses: int, evictions: int) -> dict[str, Floats]:
        """Record a batch; return each metric after each of its accesses, float64 [hits + misses].

        Evictions beyond the misses (by a trigger, for example) count with the last access. Evictions of a batch without
        accesses cannot be part of a rate and are ignored.
        """
        n = hits + misses
        if n == 0:
            return {metric: np.zeros(0) for metric in METRICS}
        totals, begin = self._room_for(n), self._end
        new = totals[:, begin + 1 : begin + n + 1]
        places = np.arange(1, n + 1)
        new[0] = totals[0, begin] + np.minimum(places, hits)
        single = min(evictions, misses)
        new[1] = totals[1, begin] + np.maximum(places - (n - single), 0)
        new[1, -1] += evictions - single
        ends = begin + places
        begins = np.maximum(ends - self.rules.window, 0)
        rates = (totals[:, ends] - totals[:, begins]) / (ends - begins)
        self._end += n
        found = dict(zip(METRICS, rates, strict=True))
        self._note(found, n)
        self.accesses += n
        return found

    def now(self) -> dict[str, float]:
        """Return each metric after the last access; 0 before any access."""
        begin = max(self._end - self.rules.window, 0)
        inside = self._totals[:, self._end] - self._totals[:, begin]
        return dict(zip(METRICS, (inside / max(1, self._end - begin)).tolist(), strict=True))

    def _room_for(self, n: int) -> Ints:
        """Return the totals with space for ``n`` more columns; columns before the window are dropped if necessary."""
        if self._end + n < self._totals.shape[1]:
            return self._totals
        kept = min(self._end, self.rules.window)
        old = self._totals[:, self._end - kept : self._end + 1]
        self._totals = np.zeros((2, max(self._totals.shape[1], kept + n + 1)), dtype=np.int64)
        self._totals[:, : kept + 1], self._end = old, kept
        return self._totals

    def _note(self, found: dict[str, Floats], n: int) -> None:
        every = self.rules.log_interval
        for place in range(every - self.accesses % every - 1, n, every):
            values = {metric: float(found[metric][place]) for metric in self.rules.metrics}
            self.notes.append({"access": self.accesses + place + 1, **values})
