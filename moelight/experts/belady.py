"""Belady's eviction, for replay only: it reads the future and is optimal in hits for its number of slots."""

from __future__ import annotations

from collections.abc import Container
from heapq import nsmallest

from moelight.experts.eviction import EvictionContext
from moelight.experts.scored import Entry, Ranked

_NEVER = 1 << 60


class Belady(Ranked):
    """Of the residents and the requested keys, retain those that are used again soonest; the others are evicted or
    bypassed.

    `EvictionContext.future` has the keys of each batch, one access each, in order. A batch is decided as a whole, and
    its own hits can be evicted like any other key. A retained key is an interval between two of its uses; of intervals
    of which at most ``capacity`` may overlap, choosing those that end first maximises their number, and so the sum of
    hits. Keys are never held.

    Ranks are ``(-batch of the next use, key, key)``.
    """

    has_begin = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._batch, self._future = -1, setting.future
        # Batches that use each key, the next one last in the list.
        self._uses: dict[int, list[int]] = {}
        for batch in range(len(setting.future) - 1, -1, -1):
            for key in set(setting.future[batch]):
                self._uses.setdefault(key, []).append(batch)
        self._admitted: set[int] = set()  # missing keys of the batch that are admitted

    def begin(self) -> None:
        self._batch += 1
        if self._batch < len(self._future):
            self._decide(set(self._future[self._batch]))

    def _decide(self, batch: set[int]) -> None:
        """Update the ranks of the hits and choose the missing keys to admit, soonest next use first, while a key with a
        later one can be evicted."""
        for key in batch & self.rank.keys():
            self.enter(key, 1.0)
        missing = sorted(self.entry_of(key, 1.0) for key in batch - self.rank.keys() - self.pinned.keys())[::-1]
        free = self.capacity - len(self)
        leaving = nsmallest(len(missing) - free, self.rank.values())
        ends = [None] * max(0, free) + leaving
        self._admitted = {entry[2] for entry, end in zip(missing, ends, strict=False) if end is None or end < entry}

    def hold(self, keys: Container[int]) -> None:
        pass

    def _next_use(self, key: int) -> int:
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._batch:
            uses.pop()
        return uses[-1] if uses else _NEVER

    def touch(self, key: int, score: float) -> None:
        pass

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if key not in self._admitted:
            return False
        if len(self) >= self.capacity:
            self.drop()
        self.enter(key, score)
        return True

    def entry_of(self, key: int, score: float) -> Entry:
        return (-self._next_use(key), key, key)

    def unpin(self, key: int) -> None:
        del self.pinned[key]
        self.enter(key, 1.0)
