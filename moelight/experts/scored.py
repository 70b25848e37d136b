"""Evictions by a numeric rank: the lowest key is evicted, found by a lazy heap."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from moelight.experts.eviction import Eviction, EvictionContext

DECAY_EVERY = 100  # accesses, as in the reference implementation

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
        # Entries of held keys that reached the top; returned to the heap once the keys are no longer held.
        self._parked: list[Entry] = []

    def __len__(self) -> int:
        return len(self.rank) + len(self.pinned)

    def push(self, entry: Entry) -> None:
        """Set the rank of the key of ``entry``, which is new or lower than before."""
        self.rank[entry[2]] = entry
        if len(self._heap) > 2 * len(self.rank) + 64:  # mostly stale entries
            self._heap = list(self.rank.values())
            heapify(self._heap)
        else:
            heappush(self._heap, entry)

    @abstractmethod
    def entry_of(self, key: int, score: float) -> Entry:
        """Return the rank with which ``key`` would enter now."""

    def enter(self, key: int, score: float) -> None:
        self.push(self.entry_of(key, score))

    def push_all(self, entries: Sequence[Entry]) -> None:
        """`push` each entry."""
        self.rank.update({entry[2]: entry for entry in entries})
        if len(self._heap) + len(entries) > 2 * len(self.rank) + 64:
            self._heap = list(self.rank.values())
            heapify(self._heap)
        else:
            for entry in entries:
                heappush(self._heap, entry)

    def leave(self, wanted: int) -> int:
        """Evict the lowest ``wanted`` keys that are not held; return how many were evicted."""
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
            else:
                heappop(heap)
                del rank[top[2]]
                gone.append(top[2])
                wanted -= 1
        return len(gone) - before

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if asked and self.has_note:
            self.note(key)
        if len(self.rank) + len(self.pinned) < self.capacity:
            self.push(self.entry_of(key, score))
            return True
        top = self.lowest()
        if top is None:
            return False
        entry = self.entry_of(key, score)
        heapreplace(self._heap, entry)
        del self.rank[top[2]]
        self.rank[key] = entry
        self.gone.append(top[2])
        return True

    def replace(self, top: Entry, entry: Entry) -> None:
        """Evict `lowest` and insert a new key in its place."""
        heapreplace(self._heap, entry)
        del self.rank[top[2]]
        self.rank[entry[2]] = entry
        self.gone.append(top[2])

    def lowest(self) -> Entry | None:
        """Return the top of the heap, the entry of the next key to be evicted."""
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
            else:
                return top
        return None

    def drop(self) -> bool:
        entry = self.lowest()
        if entry is None:
            return False
        heappop(self._heap)
        del self.rank[entry[2]]
        self.gone.append(entry[2])
        return True

    def remove(self, key: int) -> None:
        if self.rank.pop(key, None) is None:
            del self.pinned[key]

    def pin(self, key: int) -> bool:
        self.pinned[key] = self.rank.pop(key)
        return True

    def unpin(self, key: int) -> None:
        self.push(self.pinned.pop(key))

    def order(self) -> list[int]:
        return [key for _, _, key in sorted(self.rank.values())]

    def flush(self) -> None:
        if self._parked:
            parked, self._parked = self._parked, []
            for entry in parked:
                if entry[2] in self.held:
                    self._parked.append(entry)
                else:
                    heappush(self._heap, entry)


class Lfu(Ranked):
    """Evict the key with the fewest accesses since its admission, ties broken by age; every 100th access, the counts of
    all unpinned keys are multiplied by ``decay``.

    Instead of decaying the counts, the increment of an access grows; it is rescaled by a power of two before it
    overflows.
    """

    has_note = True
    fills_in_order = True

    def __init__(self, setting: EvictionContext) -> None:
        super().__init__(setting)
        self._one = 1.0  # increment of an access
        self._until_decay = DECAY_EVERY

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
            self._heap = list(self.rank.values())
            heapify(self._heap)
            self._parked = []

    def touch(self, key: int, score: float) -> None:
        self._until_decay -= 1
        if not self._until_decay:
            self._decay()
        entry = self.rank.get(key)
        if entry is None:
            count, born, _ = self.pinned[key]
            self.pinned[key] = (count + 1.0, born, key)
        else:
            self.rank[key] = (entry[0] + self._one, entry[1], key)

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        def add(begin: int, end: int) -> None:
            rank, one = self.rank, self._one
            for key in keys[begin:end]:
                entry = rank.get(key)
                if entry is None:
                    count, born, _ = self.pinned[key]
                    self.pinned[key] = (count + 1.0, born, key)
                else:
                    rank[key] = (entry[0] + one, entry[1], key)

        self._between_decays(len(keys), add)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        room = max(0, self.capacity - len(self))
        there = min(len(keys), room + self.leave(len(keys) - room))

        def come(begin: int, end: int) -> None:
            one, number = self._one, self.number + 1
            self.push_all([(one, at, key) for at, key in enumerate(keys[begin : min(end, there)], number)])
            self.number += max(0, min(end, there) - begin)

        self._between_decays(len(keys), come)
        return [True] * there + [False] * (len(keys) - there)

    def _between_decays(self, accesses: int, act: Callable[[int, int], None]) -> None:
        """Process a number of accesses: call ``act(begin, end)`` for each run of accesses without a decay."""
        at = 0
        while at < accesses:
            end = min(accesses, at + self._until_decay - 1)
            if end > at:
                act(at, end)
                self._until_decay -= end - at
                at = end
            if at < accesses:  # the access at which counts decay is added after the decay
                self._decay()
                self._until_decay += 1

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (self._one, self.number, key)

    def pin(self, key: int) -> bool:
        count, born, _ = self.rank.pop(key)
        self.pinned[key] = (count / self._one, born, key)
        return True

    def unpin(self, key: int) -> None:
        count, born, _ = self.pinned.pop(key)
        self.push((count * self._one, born, key))


class Score(Ranked):
    """Evict the key with the lowest router score, ties broken by age. A score starts with that of the admission and
    follows the accesses as a moving average; the score of a pinned key does not change."""

    uses_scores = True
    fills_in_order = True

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        rank, alpha, lowered = self.rank, self.rules.alpha, []
        for key, score in zip(keys, scores, strict=True):
            entry = rank.get(key)
            if entry is not None:
                old = entry[0]
                value = alpha * score + (1.0 - alpha) * old
                rank[key] = now = (value, entry[1], key)
                if value < old:
                    lowered.append(now)
        self.push_all(lowered)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        room = max(0, self.capacity - len(self))
        there = min(len(keys), room + self.leave(len(keys) - room))
        number = self.number + 1
        coming = zip(keys[:there], scores, strict=False)
        self.push_all([(score, at, key) for at, (key, score) in enumerate(coming, number)])
        self.number += there
        return [True] * there + [False] * (len(keys) - there)

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

    def entry_of(self, key: int, score: float) -> Entry:
        self.number += 1
        return (score, self.number, key)
