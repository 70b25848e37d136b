"""Eviction policies: the order in which resident experts are evicted. A key is ``layer * num_experts + expert``; an
eviction depends only on keys, accesses and scores, while slots, layers and statistics belong to the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from math import inf

import numpy as np
from numpy.typing import NDArray

from moelight.core.errors import ConfigError
from moelight.core.registry import Registry
from moelight.experts.policy import FALLBACK

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionRules:
    """``decay`` of lfu, ``threshold`` and ``window`` (accesses) of frequency_threshold, ``alpha`` of score."""

    decay: float = 0.95
    threshold: float = 0.05
    window: int = 100
    alpha: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionContext:
    """Constructor arguments of an eviction.

    Attributes:
        population: number of keys that can ever be accessed, from ``first`` on; a pool with that capacity never evicts.
        frequency: accesses of each key so far, maintained by the cache (read by slru alone).
        future: keys of each coming batch, for belady.
        experts: keys of a layer (read by reuse alone).
    """

    capacity: int
    population: int
    rules: EvictionRules
    frequency: list[int]
    future: Sequence[Sequence[int]]
    first: int
    experts: int


class Eviction(ABC):
    """The residents of one pool of ``capacity`` slots, in eviction order. Pinned keys are not part of the order; held
    keys (leased, or of the current batch) are skipped.

    Attributes:
        held: keys that may not be evicted.
        gone: evicted keys, which the cache empties.
        uses_scores, uses_frequency: the policy reads scores, or `EvictionContext.frequency`.
        fills_in_order: `admit_all` rejects a key only because all others are held; all keys behind it are rejected too.
        has_begin, has_visit, has_note: the method is not a no-op.
    """

    uses_scores = uses_frequency = fills_in_order = has_begin = has_visit = has_note = False

    def __init__(self, setting: EvictionContext) -> None:
        self.capacity, self.population, self.rules = setting.capacity, setting.population, setting.rules
        self.held: Container[int] = ()
        self.gone: list[int] = []

    @abstractmethod
    def __len__(self) -> int:
        """Number of residents, pinned ones included."""

    def begin(self) -> None:  # noqa: B027
        """Called at the start of an access, before any lookup."""

    def visit(self, first: int, used: BoolArray) -> None:  # noqa: B027
        """Called after `begin`: the batch is of the layer whose lowest key is ``first``; ``used`` bool [experts]."""

    def expect(self, first: int, shares: FloatArray) -> None:  # noqa: B027
        """Set prior use rates, float64 [experts], of the layer whose lowest key is ``first``: shares of its visits."""

    def touch(self, key: int, score: float) -> None:  # noqa: B027
        """Record a hit of ``key``."""

    def note(self, key: int) -> None:  # noqa: B027
        """Record a miss of ``key`` without admitting it."""

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        """Admit the missing ``key``, evicting another one if necessary; False if no key can be evicted or ``key`` ranks
        too low. ``asked``: True for an access, False for a prediction."""
        if asked and self.has_note:
            self.note(key)
        if len(self) >= self.capacity and not self.drop():
            return False
        self.enter(key, score)
        return True

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        """`touch` each of ``keys``, all of them held."""
        for key, score in zip(keys, scores, strict=True):
            self.touch(key, score)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        """`admit` each of ``keys``, all of them held; return which were admitted."""
        if not self.fills_in_order:
            return list(map(self.admit, keys, scores))
        room = max(0, self.capacity - len(self))
        admitted = min(len(keys), room + self.leave(len(keys) - room))
        self.enter_all(keys[:admitted], scores)
        if self.has_note:
            for key in keys[admitted:]:
                self.note(key)
        return [True] * admitted + [False] * (len(keys) - admitted)

    def take(self, keys: Iterable[int]) -> None:
        """Admit ``keys``, one after the other, that were not accessed and are not held. Rejected keys go to `gone`."""
        self.gone += [key for key in keys if not self.admit(key, 1.0, asked=False)]

    @abstractmethod
    def enter(self, key: int, score: float) -> None:
        """Insert ``key`` into a free slot as the newest."""

    def enter_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        """`note` and `enter` each of ``keys``, accesses of one batch; further ``scores`` are ignored."""
        raise NotImplementedError("of policies that fill in order")

    @abstractmethod
    def drop(self) -> bool:
        """Evict the next key into `gone`; return False if all keys are held or pinned."""

    def leave(self, wanted: int) -> int:
        """`drop` up to ``wanted`` keys; return how many were evicted."""
        count = 0
        while count < wanted and self.drop():
            count += 1
        return count

    @abstractmethod
    def remove(self, keys: Collection[int]) -> None:
        """Remove ``keys``, pinned or not, without adding them to `gone`."""

    @abstractmethod
    def pin(self, key: int) -> bool:
        """Take the resident ``key`` out of the order; return False if no further pin is possible."""

    @abstractmethod
    def unpin(self, key: int) -> None:
        """Put the pinned ``key`` back into the order."""

    @abstractmethod
    def order(self) -> list[int]:
        """Return the unpinned residents, the next to be evicted first."""

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents of another eviction, given in eviction order."""
        for key in keys:
            self.enter(key, 1.0)

    def hold(self, keys: Container[int]) -> None:
        """Hold ``keys`` and no others; called again when some of them are no longer to be held."""
        self.held = keys

    def resize(self, capacity: int) -> None:
        """Set the capacity; the surplus is evicted as far as possible."""
        self.capacity = capacity
        self.leave(len(self) - capacity)

    def retune(self, rules: EvictionRules) -> None:
        self.rules = rules


class Lru(Eviction):
    """Evict the least recently used key. A key that is unpinned counts as just used."""

    fills_in_order = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._order: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._order) + len(self._pinned)

    def touch(self, key: int, score: float) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        order = self._order
        if len(order) + len(self._pinned) >= self.capacity and not self.drop():
            return False
        order[key] = None
        return True

    def take(self, keys: Iterable[int]) -> None:
        # The newest keys are evicted last, so all may enter before the first eviction.
        before = len(self._order)
        self._order.update(dict.fromkeys(keys))
        self.leave(min(len(self._order) - before, len(self) - self.capacity))

    def leave(self, wanted: int) -> int:
        if wanted <= 0:
            return 0
        held, evicted = self.held, []
        for key in self._order:
            if key not in held:
                evicted.append(key)
                if len(evicted) == wanted:
                    break
        for key in evicted:
            del self._order[key]
        self.gone += evicted
        return len(evicted)

    def enter(self, key: int, score: float) -> None:
        self._order[key] = None

    def enter_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        self._order.update(dict.fromkeys(keys))

    def drop(self) -> bool:
        held = self.held
        for key in self._order:
            if key not in held:
                del self._order[key]
                self.gone.append(key)
                return True
        return False

    def remove(self, keys: Collection[int]) -> None:
        order, pinned = self._order, self._pinned
        for key in keys:
            if key in order:
                del order[key]
            else:
                pinned.remove(key)

    def pin(self, key: int) -> bool:
        del self._order[key]
        self._pinned.add(key)
        return True

    def unpin(self, key: int) -> None:
        self._pinned.remove(key)
        self._order[key] = None

    def order(self) -> list[int]:
        return list(self._order)


Entry = tuple[float, int, int]


class Ranked(Eviction):
    """Residents by rank ``(value, number, key)``; the lowest is evicted, found by a lazy heap.

    Invariant: the heap holds, for each key of `rank`, an entry not above its rank, unless that entry is parked. A rank
    may therefore rise without a heap operation; a lowered rank must be pushed. Entries of removed keys are discarded at
    the top.
    """

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self.rank: dict[int, Entry] = {}
        self.pinned: dict[int, Entry] = {}
        self.number = 0
        self._heap: list[Entry] = []
        # Entries of held keys that reached the top; `hold` returns those of other keys to the heap.
        self._parked: list[Entry] = []

    def __len__(self) -> int:
        return len(self.rank) + len(self.pinned)

    @abstractmethod
    def entry_of(self, key: int, score: float) -> Entry:
        """Return the rank with which ``key`` would enter now."""

    def enter(self, key: int, score: float) -> None:
        self.push(self.entry_of(key, score))

    def push(self, entry: Entry) -> None:
        """Set the rank of the key of ``entry``, which is new or lower than before."""
        self.rank[entry[2]] = entry
        if len(self._heap) > 2 * len(self.rank) + 64:  # mostly stale entries
            self._rebuild()
        else:
            heappush(self._heap, entry)

    def push_all(self, entries: Sequence[Entry]) -> None:
        self.rank.update({entry[2]: entry for entry in entries})
        if len(self._heap) + len(entries) > 2 * len(self.rank) + 64:
            self._rebuild()
        else:
            for entry in entries:
                heappush(self._heap, entry)

    def _rebuild(self) -> None:
        self._heap = list(self.rank.values())
        heapify(self._heap)

    def leave(self, wanted: int, max_value: float = inf) -> int:
        """Evict the lowest ``wanted`` keys that are not held and have a value up to ``max_value``; return their
        number."""
        heap, rank, held, parked, gone = self._heap, self.rank, self.held, self._parked, self.gone
        before = len(gone)
        while wanted > 0 and heap:
            top = heap[0]
            now = rank.get(top[2])
            if now is None:
                heappop(heap)
            elif now != top:
                heapreplace(heap, now)
            elif top[2] in held:
                parked.append(heappop(heap))
            elif top[0] > max_value:
                break
            else:
                heappop(heap)
                del rank[top[2]]
                gone.append(top[2])
                wanted -= 1
        return len(gone) - before

    def drop(self) -> bool:
        return self.leave(1) == 1

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if asked and self.has_note:
            self.note(key)
        if len(self.rank) + len(self.pinned) < self.capacity:
            self.push(self.entry_of(key, score))
            return True
        return self.replace_lowest(self.entry_of(key, score))

    def replace_lowest(self, entry: Entry, max_value: float = inf) -> bool:
        """`leave` of one key, for that of ``entry``; return False if there is none."""
        heap, rank, held = self._heap, self.rank, self.held
        while heap:
            top = heap[0]
            now = rank.get(top[2])
            if now is None:
                heappop(heap)
            elif now != top:
                heapreplace(heap, now)
            elif top[2] in held:
                self._parked.append(heappop(heap))
            elif top[0] > max_value:
                break
            else:
                heapreplace(heap, entry)
                del rank[top[2]]
                rank[entry[2]] = entry
                self.gone.append(top[2])
                return True
        return False

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            if self.rank.pop(key, None) is None:
                del self.pinned[key]

    def pin(self, key: int) -> bool:
        self.pinned[key] = self.rank.pop(key)
        return True

    def unpin(self, key: int) -> None:
        self.push(self.pinned.pop(key))

    def order(self) -> list[int]:
        return [key for _, _, key in sorted(self.rank.values())]

    def hold(self, keys: Container[int]) -> None:
        self.held = keys
        parked, self._parked = self._parked, []
        for entry in parked:
            if entry[2] in keys:
                self._parked.append(entry)
            else:
                heappush(self._heap, entry)


class Score(Ranked):
    """Evict the key with the lowest router score: a moving average over the accesses, frozen while pinned. Ranks are
    ``(score, number of the admission, key)``."""

    uses_scores = fills_in_order = True

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (score, self.number, key)

    def enter_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        entering = zip(keys, scores, strict=False)
        self.push_all([(score, at, key) for at, (key, score) in enumerate(entering, self.number + 1)])
        self.number += len(keys)

    def touch(self, key: int, score: float) -> None:
        entry = self.rank.get(key)
        if entry is None:
            return
        alpha, old = self.rules.alpha, entry[0]
        value = alpha * score + (1.0 - alpha) * old
        if value < old:
            self.push((value, entry[1], key))
        else:
            self.rank[key] = (value, entry[1], key)

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        rank, alpha, lowered = self.rank, self.rules.alpha, []
        for key, score in zip(keys, scores, strict=True):
            entry = rank.get(key)
            if entry is not None:
                value = alpha * score + (1.0 - alpha) * entry[0]
                rank[key] = now = (value, entry[1], key)
                if value < entry[0]:
                    lowered.append(now)
        if lowered:
            self.push_all(lowered)


DECAY_EVERY = 100  # accesses, as in the reference implementation


class Lfu(Ranked):
    """Evict the key with the fewest accesses since its admission. Every `DECAY_EVERY` accesses ``decay`` multiplies the
    counts of unpinned keys; in fact the increment grows, and a power of two rescales it before it overflows. Ranks are
    ``(count, number of the admission, key)``."""

    fills_in_order = has_note = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._one = 1.0  # increment of an access
        self._until_decay = DECAY_EVERY

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (self._one, self.number, key)

    def note(self, key: int) -> None:
        self._until_decay -= 1
        if not self._until_decay:
            self._decay()

    def _decay(self) -> None:
        self._until_decay = DECAY_EVERY
        self._one /= self.rules.decay
        if self._one > 2.0**256:
            self._one *= 2.0**-256
            self.rank = {key: (count * 2.0**-256, born, key) for key, (count, born, _) in self.rank.items()}
            self._rebuild()
            self._parked = []

    def touch(self, key: int, score: float) -> None:
        self._until_decay -= 1
        if not self._until_decay:
            self._decay()
        entry = self.rank.get(key)
        if entry is not None:
            self.rank[key] = (entry[0] + self._one, entry[1], key)
        else:
            count, born, _ = self.pinned[key]
            self.pinned[key] = (count + 1.0, born, key)

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        for key in keys:
            self._until_decay -= 1
            if not self._until_decay:
                self._decay()
            entry = self.rank.get(key)
            if entry is not None:
                self.rank[key] = (entry[0] + self._one, entry[1], key)
            else:
                count, born, _ = self.pinned[key]
                self.pinned[key] = (count + 1.0, born, key)

    def enter_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        entries: list[Entry] = []
        for number, key in enumerate(keys, self.number + 1):
            self._until_decay -= 1
            if not self._until_decay:
                self.push_all(entries)  # before a decay rescales the counts
                entries = []
                self._decay()
            entries.append((self._one, number, key))
        self.push_all(entries)
        self.number += len(keys)

    def pin(self, key: int) -> bool:
        count, born, _ = self.rank.pop(key)
        self.pinned[key] = (count / self._one, born, key)
        return True

    def unpin(self, key: int) -> None:
        count, born, _ = self.pinned.pop(key)
        self.push((count * self._one, born, key))


class FrequencyThreshold(Ranked):
    """After each access, keys with less than ``threshold`` of the last ``window`` accesses are evicted; if the others
    exceed the capacity, those with the fewest accesses, least recent first. A key needs the same share to be admitted.

    A held key below the threshold is evicted at the start of the first access at which it is no longer held, before any
    lookup. Ranks are ``(accesses in the window, moment of the last, key)``; an access changes the ranks of two keys.
    """

    has_begin = has_note = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._last: deque[int] = deque()
        self._counts: defaultdict[int, int] = defaultdict(int)  # accesses of each key among the last
        self._need = 0  # the fewest accesses that reach the threshold

    def begin(self) -> None:
        """Evict all keys below the threshold. A key above it before its own access is also above it afterwards."""
        if self._heap and self._heap[0][0] < self._need:
            self.leave(len(self.rank), self._need - 1)

    def note(self, key: int) -> None:
        self._advance(key)
        self.begin()

    def _advance(self, key: int) -> None:
        """Record one access."""
        last = self._last
        self.number += 1
        last.append(key)
        self._counts[key] += 1
        if len(last) > self.rules.window:
            self._forget()
        else:
            self._find_need()

    def _forget(self) -> None:
        """Remove the oldest access from the window."""
        old = self._last.popleft()
        left = self._counts[old] = self._counts[old] - 1
        if old in self.rank:
            self.push((left, self.rank[old][1], old))

    def _find_need(self) -> None:
        """Update the fewest accesses that reach the threshold, which depend on the number of those in the window."""
        while self._need / len(self._last) < self.rules.threshold:
            self._need += 1

    def touch(self, key: int, score: float) -> None:
        self._advance(key)
        if key in self.rank:
            self.rank[key] = (self._counts[key], self.number, key)
        self.begin()

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if asked:
            self.note(key)
        entry = self.entry_of(key, score)
        if entry[0] < self._need:
            return False
        if len(self.rank) + len(self.pinned) >= self.capacity:
            return self.replace_lowest(entry, entry[0])
        self.push(entry)
        return True

    def entry_of(self, key: int, score: float) -> Entry:
        return (self._counts[key], self.number, key)

    def unpin(self, key: int) -> None:
        _, moment, _ = self.pinned.pop(key)
        self.push((self._counts[key], moment, key))

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents as if each had been accessed once."""
        for key in keys:
            self._advance(key)
            self.enter(key, 1.0)

    def retune(self, rules: EvictionRules) -> None:
        super().retune(rules)
        while len(self._last) > rules.window:
            self._forget()
        self._need = 0
        if self._last:
            self._find_need()


class Slru(Ranked):
    """Segmented LRU. `Ranked.rank` is probation, by ``(accesses, moment it entered, key)``, which never change there:
    an access removes the key or moves it to the head. Pinned keys count as protected and keep their position."""

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

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (self._frequency[key], self.number, key)

    def touch(self, key: int, score: float) -> None:
        self.number += 1
        if key in self._protected:
            self._protected[key] = self.number
            self._protected.move_to_end(key)
        elif key in self.pinned:
            self.pinned[key] = (0.0, self.number, key)
        elif self._protected or len(self.pinned) < self.protected_cap:
            del self.rank[key]
            if len(self._protected) + len(self.pinned) >= self.protected_cap:
                self._demote()
            self._protected[key] = self.number
        else:  # all protected keys are pinned
            self.push((self._frequency[key], self.number, key))

    def _demote(self) -> None:
        """Move the least recently used protected key to the head of probation."""
        self.enter(self._protected.popitem(last=False)[0], 1.0)

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        on_probation = len(self.rank)
        if on_probation < self.probation_cap and on_probation + len(self._protected) + len(self.pinned) < self.capacity:
            self.push(self.entry_of(key, score))
            return True
        return self.replace_lowest(self.entry_of(key, score))

    def drop(self) -> bool:
        """Evict one key: probation except its newest key, then the least recent protected key, then that newest key."""
        newest = max(self.rank.values(), key=lambda entry: entry[1], default=None)
        older = [entry for entry in self.rank.values() if entry != newest and entry[2] not in self.held]
        victims = (key for key in self._protected if key not in self.held)
        key = min(older)[2] if older else next(victims, None)
        if key is None:
            return super().drop()
        self.remove((key,))
        self.gone.append(key)
        return True

    def remove(self, keys: Collection[int]) -> None:
        super().remove([key for key in keys if self._protected.pop(key, None) is None])

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
        self._protected[key] = self.pinned.pop(key)[1]
        self._protected = OrderedDict(sorted(self._protected.items(), key=lambda item: item[1]))

    def order(self) -> list[int]:
        return [*super().order(), *self._protected]

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents; the last to be evicted become protected, as many as fit."""
        keys = list(keys)
        cut = max(0, len(keys) - max(0, self.protected_cap - len(self.pinned) - len(self._protected)))
        super().adopt(keys[:cut])
        for key in keys[cut:]:
            self.number += 1
            self._protected[key] = self.number

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._set_caps()
        while self._protected and len(self._protected) + len(self.pinned) > self.protected_cap:
            self._demote()
        self.leave(max(len(self.rank) - self.probation_cap, len(self) - capacity))
        while len(self) > capacity and self.drop():
            pass


# Approximate windows, in visits, of the shares of use: short windows follow changing tasks, long ones separate rare
# experts where nothing changes. The weight of each is learned (docs/log.md).
HORIZONS = (16, 128, 1024)
RATE = 0.3  # learning rate of the first step; AdaGrad shortens later steps
FIRST_SHARE = 0.1  # of an expert without observations
EXPECTED_VISITS = 64  # weight of profile shares, in visits; more gains on mixed work, loses on one task (docs/log.md)
_LEAST_STEPS = np.array([[1.0 / horizon] for horizon in HORIZONS])
_WEIGHTS = (0.0, *(1.0 / len(HORIZONS) for _ in HORIZONS), 0.5)


class Reuse(Eviction):
    """Eviction by use probabilities that are learned online, from the accesses alone.

    A visit is one batch of one layer. Before each visit, the probability that an expert is used is
    ``sigmoid(w0 + sum of w_h * logit(share_h) + w * last)``, where ``share_h`` is the share of about the last ``h``
    visits of the layer that used it (for each ``h`` of `HORIZONS`), and ``last`` is 1 if the last visit did. The
    weights of a layer are updated by one step of logistic regression per visit. A miss is admitted only if its
    probability is above that of its victim; otherwise every visit would evict the experts that the coming layers need.

    Works best with one budget per layer. Arrays over keys have one item for each of the ``population`` keys from
    ``EvictionContext.first`` on; H is the number of horizons, E the number of experts of a layer.
    """

    has_visit = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._first, self._experts = setting.first, setting.experts
        layers = self.population // self._experts
        self._shares = np.full((layers, len(HORIZONS), self._experts), FIRST_SHARE)
        # [layers, H + 1, E]: logits of the shares, then 1 for experts that the last visit used.
        self._features = np.zeros((layers, len(HORIZONS) + 1, self._experts))
        # Logit of each probability, the eviction order.
        self._chance = np.zeros(self.population)
        self._weights = np.tile(_WEIGHTS, (layers, 1))  # [layers, 1 + H + 1], the bias first
        self._squares = np.full_like(self._weights, 1e-3)
        self._visits = [0] * layers
        self._here, self._pinned = np.zeros(self.population, np.bool_), np.zeros(self.population, np.bool_)
        self._count = 0
        # Admission time of each key; of equal probabilities, as in layers without visits, the oldest key is evicted.
        self._entered = np.zeros(self.population, np.int64)
        self._number = 0
        self._visited = slice(0, 0)
        self._used = np.zeros(0, np.bool_)  # experts of the visited layer that the last visit used
        # Least logit for admission at this visit, so that likelier experts of the batch get the slots. None: not
        # computed yet, likewise for the queue.
        self._bar: float | None = None
        # Unpinned residents that are not held, the next to be evicted last.
        self._queue: list[int] | None = None

    def __len__(self) -> int:
        return self._count

    def visit(self, first: int, used: BoolArray) -> None:
        if self.capacity >= self.population:
            return
        start = first - self._first
        self._visited, self._used = slice(start, start + self._experts), used
        layer = start // self._experts
        now = used.astype(np.float64)
        if self._visits[layer]:
            self._learn(layer, now)
        self._visits[layer] += 1
        shares = self._shares[layer]
        shares += (now - shares) * np.maximum(_LEAST_STEPS, 1.0 / (self._visits[layer] + 2))
        self._features[layer, -1] = now
        self._judge(layer)

    def expect(self, first: int, shares: FloatArray) -> None:
        layer = (first - self._first) // self._experts
        self._shares[layer] = np.clip(shares, 0.0, 1.0)
        self._visits[layer] = EXPECTED_VISITS
        self._judge(layer)

    def _part(self, layer: int) -> slice:
        return slice(layer * self._experts, (layer + 1) * self._experts)

    def _judge(self, layer: int) -> None:
        """Compute the probabilities of one layer from its shares and its last visit."""
        shares, features, chance = self._shares[layer], self._features[layer], self._chance[self._part(layer)]
        # Offset by 0.01 from 0 and 1, whose logits are infinite.
        np.log((shares + 0.01) / (1.01 - shares), out=features[:-1])
        bias, *weights = self._weights[layer].tolist()
        # Not a matrix product: experts with equal features must get bitwise equal probabilities.
        chance.fill(bias)
        for weight, feature in zip(weights, features, strict=True):
            chance += weight * feature
        self._queue = self._bar = None

    def _learn(self, layer: int, used: FloatArray) -> None:
        """Update the weights of ``layer`` by one step, from the error of its last probabilities."""
        missed = used - 1.0 / (1.0 + np.exp(-self._chance[self._part(layer)]))
        slopes = np.concatenate([[missed.sum()], self._features[layer] @ missed]) / self._experts
        self._squares[layer] += slopes * slopes
        self._weights[layer] += RATE * slopes / np.sqrt(self._squares[layer])

    def _find_bar(self) -> float:
        """The lowest probability kept when all evictable residents and all missing experts are ranked together."""
        part, used = self._visited, self._used
        leaving = self._here & ~self._pinned
        missing = used & ~self._here[part]
        leaving[part] &= ~used
        rivals = np.concatenate([self._chance[leaving], self._chance[part][missing]])
        places = self.capacity - self._count + int(np.count_nonzero(leaving))
        if places <= 0:
            return inf
        return -inf if len(rivals) <= places else float(np.partition(rivals, -places)[-places])

    def hold(self, keys: Container[int]) -> None:
        self.held, self._queue = keys, None

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        chance = self._chance[key - self._first]
        if asked:
            if self._bar is None:
                self._bar = self._find_bar()
            if chance < self._bar:
                return False
        if self._count >= self.capacity:
            queue = self._leaving()
            if not queue or self._chance[queue[-1] - self._first] >= chance:
                return False
            self.drop()
        self.enter(key, score)
        return True

    def enter(self, key: int, score: float) -> None:
        self._number += 1
        self._here[key - self._first], self._entered[key - self._first] = True, self._number
        self._count += 1
        if key not in self.held:
            self._queue = None

    def _leaving(self) -> list[int]:
        if self._queue is None:
            self._queue = [key for key in self.order()[::-1] if key not in self.held]
        return self._queue

    def drop(self) -> bool:
        queue = self._leaving()
        if not queue:
            return False
        key = queue.pop()
        self._here[key - self._first] = False
        self._count -= 1
        self.gone.append(key)
        return True

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            self._here[key - self._first] = self._pinned[key - self._first] = False
            self._count -= 1
        self._queue = None

    def pin(self, key: int) -> bool:
        self._pinned[key - self._first], self._queue = True, None
        return True

    def unpin(self, key: int) -> None:
        self._pinned[key - self._first], self._queue = False, None

    def order(self) -> list[int]:
        candidates = np.flatnonzero(self._here & ~self._pinned)
        ranked: list[int] = (
            candidates[np.lexsort((self._entered[candidates], self._chance[candidates]))] + self._first
        ).tolist()
        return ranked


_NEVER = 1 << 60


class Belady(Ranked):
    """Belady's algorithm: of the resident and requested keys, retain those that are used again soonest; evict or bypass
    the others.

    A batch of `EvictionContext.future` is decided as a whole, and its own hits can be evicted too; keys are never held.
    A retained key is an interval between two of its uses; of intervals of which at most ``capacity`` may overlap,
    choosing those that end first maximises their number, and so the hits. Ranks are
    ``(-batch of the next use, key, key)``.
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
        """Update the ranks of the hits; admit misses, soonest next use first, while a later key can be evicted."""
        self._batch += 1
        if self._batch >= len(self._future):
            return
        batch = set(self._future[self._batch])
        for key in batch & self.rank.keys():
            self.enter(key, 1.0)
        missing = sorted(self.entry_of(key, 1.0) for key in batch - self.rank.keys() - self.pinned.keys())[::-1]
        free = self.capacity - len(self)
        leaving = nsmallest(len(missing) - free, self.rank.values())
        ends = [None] * max(0, free) + leaving
        self._admitted = {entry[2] for entry, end in zip(missing, ends, strict=False) if end is None or end < entry}

    def hold(self, keys: Container[int]) -> None:
        pass

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        return key in self._admitted and super().admit(key, score, asked)

    def entry_of(self, key: int, score: float) -> Entry:
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._batch:
            uses.pop()
        return (-(uses[-1] if uses else _NEVER), key, key)

    def unpin(self, key: int) -> None:
        del self.pinned[key]
        self.enter(key, 1.0)


def split(capacity: int) -> tuple[int, int]:
    """Slots of the first and the second level: two thirds and the rest; a single slot belongs to the first."""
    first = max(1, 2 * capacity // 3)
    return first, capacity - first


class Layered(Eviction):
    """Two levels: new keys enter the first, its victims are demoted to the second, a hit there promotes them back, and
    only victims of the second are evicted from the cache. The second admits a key that the first rejects. Both levels
    observe all accesses; pinned keys are in the first."""

    def __init__(self, setting: EvictionContext, first: type[Eviction], second: type[Eviction]) -> None:
        super().__init__(setting)
        upper, lower = split(setting.capacity)
        self.first, self.second = first(replace(setting, capacity=upper)), second(replace(setting, capacity=lower))
        self._levels = self.first, self.second
        for flag in ("uses_scores", "uses_frequency", "has_begin", "has_visit", "has_note"):
            setattr(self, flag, any(getattr(level, flag) for level in self._levels))
        # Keys that the second level evicts are evicted for good; victims of the first are in its own list until
        # `_demote`.
        self.second.gone = self.gone
        self._upper: set[int] = set()

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def hold(self, keys: Container[int]) -> None:
        for level in self._levels:
            level.hold(keys)

    def begin(self) -> None:
        for level in self._levels:
            level.begin()
        self._demote()

    def visit(self, first: int, used: BoolArray) -> None:
        for level in self._levels:
            level.visit(first, used)

    def expect(self, first: int, shares: FloatArray) -> None:
        for level in self._levels:
            level.expect(first, shares)

    def note(self, key: int) -> None:
        for level in self._levels:
            level.note(key)
        self._demote()

    def retune(self, rules: EvictionRules) -> None:
        for level in self._levels:
            level.retune(rules)

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
            second.remove((key,))
            self._upper.add(key)
        else:
            second.touch(key, score)
            self._demote()
            return
        if second.has_note:
            second.note(key)
        if first.gone:
            self._demote()

    @property
    def _in_turn(self) -> bool:
        """True if a batch may go through the first level as a whole, then the second: neither level exceeds its share,
        and the second need not observe accesses that the first serves."""
        fits = all(len(level) <= level.capacity and level.fills_in_order for level in self._levels)
        return fits and not self.second.has_note

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        pairs, upper = list(zip(keys, scores, strict=True)), self._upper
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
            self.second.remove(asked[:risen])
            upper.update(asked[:risen])
            self._demote()
            self.second.touch_all(asked[risen:], theirs[risen:])

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if self._is_crowded() and not self.drop():
            return False
        admitted = self.first.admit(key, score, asked)
        if admitted:
            self._upper.add(key)
            if asked and self.second.has_note:
                self.second.note(key)
        if self.first.gone:
            self._demote()
        return admitted or self.second.admit(key, score, asked)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        if not self._in_turn or self._is_crowded():
            return super().admit_all(keys, scores)
        admitted = sum(self.first.admit_all(keys, scores))
        self._upper.update(keys[:admitted])
        self._demote()
        return [True] * admitted + self.second.admit_all(keys[admitted:], scores[admitted:])

    def _is_crowded(self) -> bool:
        """True if the pool is full but one level is not: the other exceeds its share since the capacity shrank."""
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

    def remove(self, keys: Collection[int]) -> None:
        upper = self._upper.intersection(keys)
        self.second.remove([key for key in keys if key not in upper])
        self.first.remove(upper)
        self._upper -= upper

    def pin(self, key: int) -> bool:
        if key not in self._upper:
            if not self.first.admit(key, 1.0, asked=False):
                return False
            self.second.remove((key,))
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
        for level, share in zip(self._levels, split(capacity), strict=True):
            level.resize(share)
        self._demote()
        super().resize(capacity)


EVICTIONS: Registry[type[Eviction]] = Registry(
    "eviction",
    {
        "lru": "moelight.experts.eviction:Lru",
        "lfu": "moelight.experts.eviction:Lfu",
        "slru": "moelight.experts.eviction:Slru",
        "score": "moelight.experts.eviction:Score",
        "frequency_threshold": "moelight.experts.eviction:FrequencyThreshold",
        "reuse": "moelight.experts.eviction:Reuse",
        "belady": "moelight.experts.eviction:Belady",
    },
)


def eviction_names(eviction: str | Sequence[str]) -> tuple[str, ...]:
    """Return ``"lru"``, ``"lfu | lru"``, ``"fallback"`` or a sequence of names as one or two known names."""
    names = tuple(part.strip() for part in eviction.split("|")) if isinstance(eviction, str) else tuple(eviction)
    names = FALLBACK if names == ("fallback",) else names
    for name in names:
        EVICTIONS.get(name)
    if not 1 <= len(names) <= 2:
        raise ConfigError(f"eviction {' | '.join(names)!r}: give one name, or two with a bar between them")
    return names


def make_eviction(names: Sequence[str], setting: EvictionContext) -> Eviction:
    """Return the eviction of one name, or of two: the second retains what the first evicts."""
    kinds = [EVICTIONS.get(name) for name in names]
    return kinds[0](setting) if len(kinds) == 1 else Layered(setting, *kinds)
