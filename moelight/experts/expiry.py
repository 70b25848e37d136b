"""What makes experts leave although nobody needs their place: time, and memory that runs short."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPressure:
    """From ``threshold`` of ``budget_gb`` on, experts of ``expert_gb`` each leave until ``headroom`` of it is used.

    ``expert_gb`` is of one expert.
    """

    threshold: float
    headroom: float = 0.7
    budget_gb: float = 16.0
    expert_gb: float = 1.2

    def usage(self, residents: int) -> float:
        """Share of the budget."""
        return residents * self.expert_gb / self.budget_gb

    def surplus(self, residents: int) -> int:
        """How many of ``residents`` are to leave."""
        return self.beyond_headroom(residents) if self.usage(residents) >= self.threshold else 0

    def beyond_headroom(self, residents: int) -> int:
        """How many of ``residents`` are more than the headroom has room for."""
        kept = residents
        while kept and self.usage(kept) > self.headroom:
            kept -= 1
        return residents - kept


class Expiry:
    """Keys by their last access; those who had none for ``ttl`` accesses are due. Costs what is due, no scan."""

    def __init__(self, ttl: int) -> None:
        self.ttl = ttl
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, keys: Iterable[int], clock: int) -> None:
        """``keys`` are resident and were accessed, the last of them at access number ``clock``."""
        last = self._last
        for key in keys:
            last[key] = clock
            last.move_to_end(key)

    def forget(self, key: int) -> None:
        self._last.pop(key, None)

    def due(self, clock: int, spared: Callable[[int], bool]) -> list[int]:
        """Keys whose time is over, the oldest first; those who are ``spared`` are due as soon as they no longer are."""
        found = []
        for key, last in self._last.items():
            if last > clock - self.ttl:
                break
            if not spared(key):
                found.append(key)
        return found
