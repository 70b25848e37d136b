"""Evictions that no admission causes: time to live and memory pressure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPressure:
    """From ``threshold`` of ``budget_gb`` on, experts are evicted until ``headroom`` of the budget is used.

    ``expert_gb`` is the size of one expert.
    """

    threshold: float
    headroom: float = 0.7
    budget_gb: float = 16.0
    expert_gb: float = 1.2

    def usage(self, residents: int) -> float:
        """Share of the budget that ``residents`` experts use."""
        return residents * self.expert_gb / self.budget_gb

    def surplus(self, residents: int) -> int:
        """Number of ``residents`` to evict; 0 below the threshold."""
        return self.beyond_headroom(residents) if self.usage(residents) >= self.threshold else 0

    def beyond_headroom(self, residents: int) -> int:
        """Number of ``residents`` that exceed the headroom."""
        kept = residents
        while kept and self.usage(kept) > self.headroom:
            kept -= 1
        return residents - kept


class Expiry:
    """Keys by their last access; keys without an access for ``ttl`` accesses are due. The cost is proportional to the
    due keys; there is no scan."""

    def __init__(self, ttl: int) -> None:
        self.ttl = ttl
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, keys: Iterable[int], clock: int) -> None:
        """Record an access of the resident ``keys``, the last at access number ``clock``."""
        last = self._last
        for key in keys:
            last[key] = clock
            last.move_to_end(key)

    def forget(self, key: int) -> None:
        self._last.pop(key, None)

    def due(self, clock: int, spared: Callable[[int], bool]) -> list[int]:
        """Return expired keys, the oldest first; a key for which ``spared`` is true is due once it no longer is."""
        found = []
        for key, last in self._last.items():
            if last > clock - self.ttl:
                break
            if not spared(key):
                found.append(key)
        return found
