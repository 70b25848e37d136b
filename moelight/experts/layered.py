"""Two-level eviction: keys that the first level evicts are demoted to the second."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moelight.experts.eviction import Eviction, EvictionContext, EvictionRules


def split(capacity: int) -> tuple[int, int]:
    """Slots of the first and the second level: two thirds and the rest; a single slot belongs to the first."""
    first = max(1, 2 * capacity // 3)
    return first, capacity - first


class Layered(Eviction):
    """New keys enter the first level; its victims are demoted to the second, a hit there promotes them back, and only
    victims of the second level are evicted from the cache. If the first level rejects a key (all pinned or held, or not
    frequent enough), the second admits it. Both levels observe all accesses. Pinned keys are in the first level."""

    def __init__(self, setting: EvictionContext, first: Eviction, second: Eviction) -> None:
        super().__init__(setting)
        self.first, self.second = first, second
        self.uses_scores = first.uses_scores or second.uses_scores
        self.uses_frequency = first.uses_frequency or second.uses_frequency
        self.has_begin = first.has_begin or second.has_begin
        self.has_visit = first.has_visit or second.has_visit
        self.has_note = first.has_note or second.has_note
        # Keys that the second level evicts are evicted for good; victims of the first are in its own list until
        # `_demote`.
        second.gone = self.gone
        self._upper: set[int] = set()

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    @property
    def pinnable(self) -> int:
        return self.first.pinnable

    def hold(self, keys: Container[int]) -> None:
        self.first.hold(keys)
        self.second.hold(keys)

    def flush(self) -> None:
        self.first.flush()
        self.second.flush()

    def begin(self) -> None:
        self.first.begin()
        self.second.begin()
        self._demote()

    def visit(self, first: int, used: NDArray[np.bool_]) -> None:
        self.first.visit(first, used)
        self.second.visit(first, used)

    def expect(self, first: int, shares: NDArray[np.float64]) -> None:
        self.first.expect(first, shares)
        self.second.expect(first, shares)

    def _demote(self) -> None:
        demoted = self.first.gone
        if demoted:
            self._upper.difference_update(demoted)
            self.second.take(demoted)
            demoted.clear()

    def touch(self, key: int, score: float) -> None:
        first, second = self.first, self.second
        if key in self._upper:
            first.touch(key, score)
        elif first.admit(key, score):
            second.remove(key)
            self._upper.add(key)
        else:
            second.touch(key, score)
            if first.gone:
                self._demote()
            return
        if self.second.has_note:
            second.note(key)
        if first.gone:
            self._demote()

    @property
    def _in_turn(self) -> bool:
        """True if a batch may go through the first level as a whole and then through the second: neither exceeds its
        share, and the second need not observe accesses that the first serves."""
        first, second = self.first, self.second
        fits = len(first) <= first.capacity and len(second) <= second.capacity
        return fits and first.fills_in_order and second.fills_in_order and not second.has_note

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        """Touch the keys of the first level, then those of the second."""
        pairs = list(zip(keys, scores, strict=True))
        upper = self._upper
        here = [pair for pair in pairs if pair[0] in upper]
        below = [pair for pair in pairs if pair[0] not in upper]
        if not self._in_turn:
            for key, score in (*here, *below):
                self.touch(key, score)
            return
        if here:
            self.first.touch_all(*zip(*here, strict=True))
        if below:
            asked, theirs = zip(*below, strict=True)
            risen = sum(self.first.admit_all(asked, theirs))
            self.second.remove_all(asked[:risen])
            upper.update(asked[:risen])
            self._demote()
            self.second.touch_all(asked[risen:], theirs[risen:])

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        if not self._in_turn or self._is_crowded():
            return super().admit_all(keys, scores)
        there = sum(self.first.admit_all(keys, scores))
        self._upper.update(keys[:there])
        self._demote()
        return [True] * there + self.second.admit_all(keys[there:], scores[there:])

    def note(self, key: int) -> None:
        self.first.note(key)
        self.second.note(key)
        self._demote()

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if self._is_crowded() and not self.drop():
            return False
        if self.first.admit(key, score, asked):
            self._upper.add(key)
            if asked and self.second.has_note:
                self.second.note(key)
            if self.first.gone:
                self._demote()
            return True
        self._demote()
        return self.second.admit(key, score, asked)

    def _is_crowded(self) -> bool:
        """True if the pool is full but one level is not: the other kept more than its share when the capacity
        shrank."""
        first, second = len(self.first), len(self.second)
        return first + second >= self.capacity and (first < self.first.capacity or second < self.second.capacity)

    def enter(self, key: int, score: float) -> None:
        if len(self.first) >= self.first.capacity:
            self.second.enter(key, score)
            return
        self.first.enter(key, score)
        self._upper.add(key)

    def drop(self) -> bool:
        if self.second.drop():
            return True
        dropped = self.first.drop()
        self._upper.difference_update(self.first.gone)
        self.gone.extend(self.first.gone)
        self.first.gone.clear()
        return dropped

    def remove(self, key: int) -> None:
        if key in self._upper:
            self.first.remove(key)
            self._upper.remove(key)
        else:
            self.second.remove(key)

    def pin(self, key: int) -> bool:
        if key not in self._upper:
            if not self.first.admit(key, 1.0, asked=False):
                return False
            self.second.remove(key)
            self._upper.add(key)
            self._demote()
        return self.first.pin(key)

    def unpin(self, key: int) -> None:
        self.first.unpin(key)

    def order(self) -> list[int]:
        return [*self.second.order(), *self.first.order()]

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents; the last to be evicted enter the first level, as many as fit beside its pins."""
        keys = list(keys)
        cut = max(0, len(keys) - max(0, self.first.capacity - len(self.first)))
        self.second.adopt(keys[:cut])
        self.first.adopt(keys[cut:])
        self._upper.update(keys[cut:])

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        first, second = split(capacity)
        self.first.resize(first)
        self.second.resize(second)
        self._demote()
        super().resize(capacity)

    def retune(self, rules: EvictionRules) -> None:
        super().retune(rules)
        self.first.retune(rules)
        self.second.retune(rules)
