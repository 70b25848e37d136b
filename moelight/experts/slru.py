"""Segmented LRU: new experts are on probation, those that are asked for again are protected.

A quarter of the places are probation. A hit there moves a key to the protected; where those are full, their least
recent goes back to probation. Only probation is left: by the fewest accesses so far, of equals the least recent. The
newest never leaves in favour of older ones: victims are chosen before it enters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from moelight.experts.eviction import EvictionContext
from moelight.experts.scored import Entry, Ranked


class Slru(Ranked):
    """`Ranked.rank` is probation, by ``(accesses, moment it entered, key)``: neither changes while a key is there,
    since an access takes it out or to the head. Pinned keys count as protected and keep their place among them."""

    uses_frequency = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._frequency = setting.frequency
        # Key to the moment of its last use, least recent first; pinned ones are in `pinned`.
        self._protected: OrderedDict[int, int] = OrderedDict()
        self._set_caps()

    def _set_caps(self) -> None:
        """25/75, of one place all on probation; where all keys have room, nobody has to leave."""
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
        else:  # all that is protected is pinned
            self.push((self._frequency[key], self.number, key))

    def _demote(self) -> None:
        """The least recent of the protected goes to the head of probation."""
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
        """For shrinking: probation but for its newest, then the least recent of the protected, then that newest."""
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
        """The last to leave become protected, as many as have room there."""
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
