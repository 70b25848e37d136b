"""Segmented LRU: a new expert is on probation, an expert with a second access is protected.

A quarter of the slots is probation. A hit there moves a key to the protected segment; if that segment is full, its
least recently used key returns to probation. Victims are taken from probation only: the key with the fewest accesses so
far, ties broken by least recent use. A victim is chosen before the new key enters, so the newest key is never evicted
in favour of older ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from moelight.experts.eviction import EvictionContext
from moelight.experts.scored import Entry, Ranked


class Slru(Ranked):
    """Segmented LRU eviction.

    `Ranked.rank` is probation, by ``(accesses, moment it entered, key)``. Neither value changes while a key is on
    probation, since an access removes the key or moves it to the head. Pinned keys count as protected and keep their
    position in that segment.
    """

    uses_frequency = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._frequency = setting.frequency
        # Key to the moment of its last use, least recent first; pinned keys are in `pinned`.
        self._protected: OrderedDict[int, int] = OrderedDict()
        self._set_caps()

    def _set_caps(self) -> None:
        """Split the capacity 25/75; a single slot is probation. Probation is unbounded if all keys fit."""
        capacity = self.capacity
        quarter = min(capacity, max(1, capacity // 4))
        self.probation_cap = capacity if capacity >= self.population else quarter
        self.protected_cap = capacity - quarter

    def __len__(self) -> int:
        return len(self.rank) + len(self._protected) + len(self.pinned)

    @property
    def pinnable(self) -> int:
        return self.protected_cap

    @property
    def probation(self) -> list[int]:
        """Keys on probation, least recent first."""
        return [key for _, _, key in sorted(self.rank.values(), key=lambda entry: entry[1])]

    @property
    def protected(self) -> list[int]:
        """Unpinned protected keys, least recent first."""
        return list(self._protected)

    def touch(self, key: int, score: float) -> None:
        self.number += 1
        if key in self._protected:
            self._protected[key] = self.number
            self._protected.move_to_end(key)
        elif key in self.pinned:
            self.pinned[key] = (0.0, self.number, key)
        elif len(self._protected) + len(self.pinned) < self.protected_cap:
            del self.rank[key]
            self._protected[key] = self.number
        elif self._protected:
            del self.rank[key]
            self._demote()
            self._protected[key] = self.number
        else:  # all protected keys are pinned
            self.push((self._frequency[key], self.number, key))

    def _demote(self) -> None:
        """Move the least recently used protected key to the head of probation."""
        key, _ = self._protected.popitem(last=False)
        self.number += 1
        self.push((self._frequency[key], self.number, key))

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        on_probation = len(self.rank)
        if on_probation < self.probation_cap and on_probation + len(self._protected) + len(self.pinned) < self.capacity:
            self.push(self.entry_of(key, score))
            return True
        top = self.lowest()
        if top is None:
            return False
        self.replace(top, self.entry_of(key, score))
        return True

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (self._frequency[key], self.number, key)

    def drop(self) -> bool:
        """Evict one key while shrinking: probation except its newest key, then the least recent protected key, then
        that newest key."""
        newest = max(self.rank.values(), key=lambda entry: entry[1])[2] if self.rank else -1
        older = [entry for entry in self.rank.values() if entry[2] != newest and entry[2] not in self.held]
        if older:
            self.remove(min(older)[2])
            self.gone.append(min(older)[2])
            return True
        for key in self._protected:
            if key not in self.held:
                del self._protected[key]
                self.gone.append(key)
                return True
        return Ranked.drop(self)

    def remove(self, key: int) -> None:
        if self._protected.pop(key, None) is None:
            super().remove(key)

    def pin(self, key: int) -> bool:
        if key in self._protected:
            self.pinned[key] = (0.0, self._protected.pop(key), key)
            return True
        if len(self._protected) + len(self.pinned) >= self.protected_cap:
            if not self._protected:
                return False
            self._demote()
        del self.rank[key]
        self.number += 1
        self.pinned[key] = (0.0, self.number, key)
        return True

    def unpin(self, key: int) -> None:
        _, moment, _ = self.pinned.pop(key)
        places = sorted([*self._protected.items(), (key, moment)], key=lambda place: place[1])
        self._protected = OrderedDict(places)

    def order(self) -> list[int]:
        return [*super().order(), *self._protected]

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents; the last to be evicted become protected, as many as fit."""
        keys = list(keys)
        cut = max(0, len(keys) - max(0, self.protected_cap - len(self.pinned) - len(self._protected)))
        for key in keys[:cut]:
            self.enter(key, 1.0)
        for key in keys[cut:]:
            self.number += 1
            self._protected[key] = self.number

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._set_caps()
        while self._protected and len(self._protected) + len(self.pinned) > self.protected_cap:
            self._demote()
        while (len(self.rank) > self.probation_cap or len(self) > capacity) and Ranked.drop(self):
            pass
        super().resize(capacity)
