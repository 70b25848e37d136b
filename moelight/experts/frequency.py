"""Frequency-threshold eviction: experts are resident while they have a minimum share of the recent accesses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from moelight.experts.eviction import EvictionContext, EvictionRules
from moelight.experts.scored import Entry, Ranked


class FrequencyThreshold(Ranked):
    """After each access, keys with less than ``threshold`` of the last ``window`` accesses are evicted. If the
    remaining keys exceed the capacity, those with the fewest accesses are evicted, ties broken by least recent use. A
    key needs the same share to be admitted.

    A held key below the threshold is evicted at the start of the first access at which it is no longer held, before any
    lookup. Ranks are ``(accesses in the window, moment of the last, key)``; an access changes the ranks of two keys.
    """

    has_begin = True
    has_note = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._last: deque[int] = deque()
        self._counts: dict[int, int] = {}
        self._need = 0  # the fewest accesses that reach the threshold

    def begin(self) -> None:
        if self._heap and self._heap[0][0] < self._need:
            self._leave_rare()

    def note(self, key: int) -> None:
        self._advance(key)
        self._leave_rare()

    def _advance(self, key: int) -> int:
        """Record one access; return the accesses of ``key`` in the window."""
        last, counts = self._last, self._counts
        self.number += 1
        last.append(key)
        count = counts.get(key, 0) + 1
        counts[key] = count
        if len(last) > self.rules.window:
            self._forget(key)
            return counts[key]
        self._find_need()
        return count

    def _find_need(self) -> None:
        while self._need / len(self._last) < self.rules.threshold:
            self._need += 1

    def _forget(self, current: int) -> None:
        """Remove the oldest access from the window."""
        old = self._last.popleft()
        left = self._counts[old] - 1
        if left:
            self._counts[old] = left
        else:
            del self._counts[old]
        if old != current and old in self.rank:
            self.push((left, self.rank[old][1], old))

    def _leave_rare(self) -> None:
        """Evict all keys below the threshold. A key above it before its own access is also above it afterwards."""
        while (entry := self.lowest()) is not None and entry[0] < self._need:
            self.drop()

    def touch(self, key: int, score: float) -> None:
        count = self._advance(key)
        if key in self.rank:
            self.rank[key] = (count, self.number, key)
        self._leave_rare()

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if asked:
            self.note(key)
        count = self._counts.get(key, 0)
        if count < self._need:
            return False
        if len(self) >= self.capacity:
            entry = self.lowest()
            if entry is None or entry[0] > count:
                return False
            self.replace(entry, (count, self.number, key))
        else:
            self.push((count, self.number, key))
        return True

    def entry_of(self, key: int, score: float) -> Entry:
        return (self._counts.get(key, 0), self.number, key)

    def unpin(self, key: int) -> None:
        _, moment, _ = self.pinned.pop(key)
        self.push((self._counts.get(key, 0), moment, key))

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents as if each had been accessed once."""
        for key in keys:
            self._advance(key)
            self.enter(key, 1.0)

    def retune(self, rules: EvictionRules) -> None:
        super().retune(rules)
        while len(self._last) > rules.window:
            self._forget(-1)
        self._need = 0
        if self._last:
            self._find_need()
