"""Evictions as their descriptions read: lists, scans, no cleverness, nothing of the package.

Each keeps ``left``, who left in order. A key that is in ``leased`` does not leave; an access of one id has no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations


class SlowLru:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.left = capacity, []
        self.keys: list[int] = []  # least recent first

    def residents(self) -> list[int]:
        return self.keys

    def begin(self, leased: Collection[int]) -> None:
        pass

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def elsewhere(self, key: int, leased: Collection[int]) -> None:
        """The level above served an access."""

    def victim(self, leased: Collection[int]) -> int | None:
        return next((key for key in self.keys if key not in leased), None)

    def make_room(self, leased: Collection[int]) -> bool:
        if len(self.residents()) < self.capacity:
            return True
        victim = self.victim(leased)
        if victim is None:
            return False
        self.discard(victim)
        self.left.append(victim)
        return True

    def miss(self, key: int, score: float, leased: Collection[int]) -> bool:
        if not self.make_room(leased):
            return False
        self.insert(key, score)
        return True

    def demoted(self, key: int, leased: Collection[int]) -> bool:
        """It comes from above, nobody asked for it."""
        if not self.make_room(leased):
            return False
        self.insert(key, 1.0)
        return True

    def insert(self, key: int, score: float) -> None:
        self.keys.append(key)

    def discard(self, key: int) -> None:
        self.keys.remove(key)


class SlowLfu(SlowLru):
    def __init__(self, capacity: int, decay: float) -> None:
        super().__init__(capacity)
        self.decay, self.accesses = decay, 0
        self.counts: dict[int, float] = {}  # oldest first

    def residents(self) -> list[int]:
        return list(self.counts)

    def elsewhere(self, key: int, leased: Collection[int]) -> None:
        self.step()

    def step(self) -> None:
        self.accesses += 1
        if self.accesses % 100 == 0:
            for key in self.counts:
                self.counts[key] *= self.decay

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        self.step()
        self.counts[key] += 1

    def miss(self, key: int, score: float, leased: Collection[int]) -> bool:
        self.step()
        return super().miss(key, score, leased)

    def victim(self, leased: Collection[int]) -> int | None:
        return min((key for key in self.counts if key not in leased), key=lambda key: self.counts[key], default=None)

    def insert(self, key: int, score: float) -> None:
        self.counts[key] = 1.0

    def discard(self, key: int) -> None:
        del self.counts[key]


class SlowScore(SlowLfu):
    """Scores instead of counts."""

    def __init__(self, capacity: int, alpha: float) -> None:
        super().__init__(capacity, 1.0)
        self.alpha = alpha

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        self.counts[key] = self.alpha * score + (1 - self.alpha) * self.counts[key]

    def insert(self, key: int, score: float) -> None:
        self.counts[key] = score


class SlowSlru(SlowLru):
    """Lists run from most to least recent, as in the description."""

    def __init__(self, capacity: int, population: int) -> None:
        super().__init__(capacity)
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.frequency: Counter[int] = Counter()
        self.probation_cap = max(1, capacity // 4)
        self.protected_cap = capacity - self.probation_cap
        self.holds_all = capacity >= population

    def residents(self) -> list[int]:
        return self.probation + self.protected

    def counted(self, key: int) -> None:
        self.frequency[key] += 1

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        if key in self.protected:
            self.protected.remove(key)
            self.protected.insert(0, key)
            return
        self.probation.remove(key)
        if not self.protected_cap:
            self.probation.insert(0, key)
            return
        if len(self.protected) >= self.protected_cap:
            self.probation.insert(0, self.protected.pop())
        self.protected.insert(0, key)

    def miss(self, key: int, score: float, leased: Collection[int]) -> bool:
        self.probation.insert(0, key)
        if len(self.probation) <= self.probation_cap or self.holds_all:
            return True
        candidates = [other for other in self.probation[1:] if other not in leased]
        if not candidates:
            self.probation.remove(key)
            return False
        fewest = min(self.frequency[other] for other in candidates)
        victim = [other for other in candidates if self.frequency[other] == fewest][-1]
        self.probation.remove(victim)
        self.left.append(victim)
        return True

    def demoted(self, key: int, leased: Collection[int]) -> bool:
        return self.miss(key, 1.0, leased)

    def discard(self, key: int) -> None:
        (self.probation if key in self.probation else self.protected).remove(key)


class SlowFrequencyThreshold(SlowLru):
    def __init__(self, capacity: int, threshold: float, window: int) -> None:
        super().__init__(capacity)
        self.threshold, self.window = threshold, window
        self.history: list[int] = []
        self.last_access: dict[int, int] = {}
        self.accesses = 0

    def share(self, key: int) -> float:
        return self.history.count(key) / len(self.history) if self.history else 0.0

    def record(self, key: int) -> None:
        self.accesses += 1
        self.last_access[key] = self.accesses
        self.history = [*self.history, key][-self.window :]

    def refresh(self, spared: Collection[int]) -> None:
        def rank(key: int) -> tuple[float, int]:
            return self.share(key), self.last_access.get(key, 0)

        for key in sorted(self.keys, key=rank):
            if self.share(key) < self.threshold and key not in spared:
                self.keys.remove(key)
                self.left.append(key)

    def begin(self, leased: Collection[int]) -> None:
        self.refresh(leased)

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        self.record(key)
        self.refresh(leased)

    def elsewhere(self, key: int, leased: Collection[int]) -> None:
        self.record(key)
        self.refresh(leased)

    def miss(self, key: int, score: float, leased: Collection[int]) -> bool:
        self.record(key)
        self.refresh(leased)
        return self.demoted(key, leased)

    def demoted(self, key: int, leased: Collection[int]) -> bool:
        if self.share(key) < self.threshold:
            return False
        if len(self.keys) >= self.capacity:
            others = [other for other in self.keys if other not in leased]
            victim = min(others, key=lambda other: (self.share(other), self.last_access[other]), default=None)
            if victim is None or self.share(victim) > self.share(key):
                return False
            self.keys.remove(victim)
            self.left.append(victim)
        self.keys.append(key)
        self.last_access[key] = self.accesses
        return True


class SlowLayered:
    """Two of the above."""

    def __init__(self, first: SlowLru, second: SlowLru) -> None:
        self.first, self.second, self.left = first, second, []

    def residents(self) -> list[int]:
        return [*self.first.residents(), *self.second.residents()]

    def begin(self, leased: Collection[int]) -> None:
        self.first.begin(leased)
        self.second.begin(leased)
        self.demote(leased)

    def counted(self, key: int) -> None:
        for level in (self.first, self.second):
            if isinstance(level, SlowSlru):
                level.counted(key)

    def demote(self, leased: Collection[int]) -> None:
        self.left += self.second.left
        self.second.left.clear()
        for key in self.first.left:
            retained = self.second.demoted(key, leased)
            self.left += self.second.left if retained else [key]
            self.second.left.clear()
        self.first.left.clear()

    def hit(self, key: int, score: float, leased: Collection[int]) -> None:
        if key in self.first.residents():
            self.first.hit(key, score, leased)
            self.second.elsewhere(key, leased)
        elif self.first.miss(key, score, leased):
            self.second.discard(key)
            self.second.elsewhere(key, leased)
        else:
            self.second.hit(key, score, leased)
        self.demote(leased)

    def miss(self, key: int, score: float, leased: Collection[int]) -> bool:
        brought = self.first.miss(key, score, leased)
        if brought:
            self.second.elsewhere(key, leased)
        self.demote(leased)
        if not brought:
            brought = self.second.miss(key, score, leased)
            self.demote(leased)
        return brought


Slow = SlowLru | SlowLayered


def serve(slow: Slow, keys: Sequence[int], scores: Sequence[float]) -> tuple[list[int], list[int], list[bool]]:
    """One batch of ``keys`` with the mean score of each: hits, misses, and which of these were brought in."""
    slow.left.clear()
    slow.begin(())
    leased = set(keys)
    score_of = dict(zip(keys, scores, strict=True))
    hits = sorted(leased & set(slow.residents()))
    misses = sorted(leased - set(hits))
    if isinstance(slow, SlowSlru | SlowLayered):
        for key in leased:
            slow.counted(key)
    upper = set(slow.first.residents()) if isinstance(slow, SlowLayered) else leased
    for key in sorted(hits, key=lambda key: (key not in upper, key)):
        slow.hit(key, score_of[key], leased)
    return hits, misses, [slow.miss(key, score_of[key], leased) for key in misses]


def most_hits(batches: Sequence[Collection[int]], capacity: int, begin: Collection[int] = ()) -> int:
    """The most hits that anybody finds with ``capacity`` places, by trying all contents there can be after each batch:
    any of those that were there and those of the batch. Before the first, any of ``begin``."""
    best = {frozenset(some): 0 for some in _choices(begin, capacity)}
    for batch in batches:
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            result = hits + len(held & set(batch))
            for some in _choices(held | set(batch), capacity):
                contents = frozenset(some)
                following[contents] = max(following.get(contents, 0), result)
        best = following
    return max(best.values())


def _choices(keys: Collection[int], maximum: int) -> Iterator[tuple[int, ...]]:
    for size in range(min(len(keys), maximum) + 1):
        yield from combinations(sorted(keys), size)
