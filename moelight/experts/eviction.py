"""Who leaves first: the order among resident experts, one small class a policy.

A key is an integer, ``layer * num_experts + expert``. An eviction knows keys, accesses and scores; it knows nothing of
slots, layers or statistics, which are the cache's. What leaves goes to its list `Eviction.gone`, which the cache
empties. Pinned keys are no part of the order; held ones (leased, or of the batch that is being served) are passed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from moelight.core.registry import Registry

DECAY_EVERY = 100  # accesses, the reference's


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionRules:
    """The numbers evictions go by: ``decay`` of lfu, ``threshold`` and ``window`` (accesses) of frequency_threshold,
    ``alpha`` of score."""

    decay: float = 0.95
    threshold: float = 0.05
    window: int = 100
    alpha: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What an eviction is built from.

    Attributes:
        population: keys that may ever come; who has room for all of them never evicts.
        frequency: accesses of each key so far, kept by the cache (read by slru alone).
        future: keys of each batch to come, for belady.
        first, experts: the lowest key, and keys of a layer (read by reuse alone).
    """

    capacity: int
    population: int
    rules: EvictionRules = field(default_factory=EvictionRules)
    frequency: list[int] = field(default_factory=list)
    future: Sequence[Sequence[int]] = ()
    first: int = 0
    experts: int = 1


class Eviction(ABC):
    """The residents of one pool of ``capacity`` places, in the order they would leave."""

    uses_scores = False
    # It reads `Setting.frequency`, which the cache must then keep.
    uses_frequency = False
    # `begin` does something.
    has_begin = False
    # `visit` does something.
    has_visit = False

    def __init__(self, setting: Setting) -> None:
        self.capacity = setting.capacity
        self.population = setting.population
        self.rules = setting.rules
        self.held: Container[int] = ()
        self.gone: list[int] = []

    @abstractmethod
    def __len__(self) -> int:
        """Residents, pinned ones included."""

    def begin(self) -> None:  # noqa: B027
        """An access begins, nothing has been looked up yet."""

    def visit(self, first: int, used: NDArray[np.bool_]) -> None:  # noqa: B027
        """After `begin`: the batch is of the layer whose lowest key is ``first``; ``used`` bool [experts] of it."""

    def expect(self, first: int, shares: NDArray[np.float64]) -> None:  # noqa: B027
        """What somebody knows before the first access, of the layer whose lowest key is ``first``: the share of visits
        that use each expert, float64 [experts]."""

    @abstractmethod
    def touch(self, key: int, score: float) -> None:
        """An access found ``key``."""

    def note(self, key: int) -> None:  # noqa: B027
        """An access did not find ``key``, and must not bring it in."""

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        """Bring in ``key``, which is missing; someone may leave for it. False: nobody could, or it is not worth it.
        ``asked``: because of an access, not as a guess."""
        if asked:
            self.note(key)
        if len(self) >= self.capacity and not self.drop():
            return False
        self.enter(key, score)
        return True

    @abstractmethod
    def enter(self, key: int, score: float) -> None:
        """``key`` takes a free place as the newest."""

    @abstractmethod
    def drop(self) -> bool:
        """The next to leave goes to `gone`; False where all are held or pinned."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """``key`` leaves, pinned or not, without a word in `gone`."""

    @abstractmethod
    def pin(self, key: int) -> bool:
        """Take the resident ``key`` out of the order; False where there is no room for one more pin."""

    @abstractmethod
    def unpin(self, key: int) -> None:
        """Put the pinned ``key`` back into the order."""

    @abstractmethod
    def order(self) -> list[int]:
        """Unpinned residents, the first to leave first."""

    def adopt(self, keys: Iterable[int]) -> None:
        """Take over residents of another eviction, the first to leave first."""
        for key in keys:
            self.enter(key, 1.0)

    def hold(self, keys: Container[int]) -> None:
        """From now on only ``keys`` must not leave."""
        self.held = keys

    def settle(self) -> None:  # noqa: B027
        """Some keys are no longer held."""

    def resize(self, capacity: int) -> None:
        """From now on ``capacity`` places; the surplus leaves as far as it can."""
        self.capacity = capacity
        while len(self) > capacity and self.drop():
            pass

    def retune(self, rules: EvictionRules) -> None:
        """Other numbers, the same residents."""
        self.rules = rules


class Lru(Eviction):
    """The one whose last access is longest ago leaves. Unpinned, a key counts as just used."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._order: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._order) + len(self._pinned)

    def touch(self, key: int, score: float) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        if len(self._order) + len(self._pinned) >= self.capacity and not self.drop():
            return False
        self._order[key] = None
        return True

    def enter(self, key: int, score: float) -> None:
        self._order[key] = None

    def drop(self) -> bool:
        held = self.held
        for key in self._order:
            if key not in held:
                del self._order[key]
                self.gone.append(key)
                return True
        return False

    def remove(self, key: int) -> None:
        if key in self._pinned:
            self._pinned.remove(key)
        else:
            del self._order[key]

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
    """Residents by rank ``(value, number, key)``, the lowest leaves; a lazy heap finds it.

    Invariant: the heap holds, for each key of `rank`, an entry not above its rank, unless that entry is parked. So a
    rank may rise without touching the heap; who lowers one pushes it. Entries of keys that left are dropped at the top.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.rank: dict[int, Entry] = {}
        self.pinned: dict[int, Entry] = {}
        self.number = 0
        self._heap: list[Entry] = []
        # Entries of held keys that came to the top: back in the heap once those are no longer held.
        self._parked: list[Entry] = []

    def __len__(self) -> int:
        return len(self.rank) + len(self.pinned)

    def push(self, entry: Entry) -> None:
        """The rank of ``entry``'s key is new, or lower than it was."""
        self.rank[entry[2]] = entry
        if len(self._heap) > 2 * len(self.rank) + 64:  # mostly entries of the past
            self._heap = list(self.rank.values())
            heapify(self._heap)
        else:
            heappush(self._heap, entry)

    def lowest(self) -> Entry | None:
        """The top of the heap: the entry of the next to leave."""
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

    def settle(self) -> None:
        if self._parked:
            parked, self._parked = self._parked, []
            for entry in parked:
                if entry[2] in self.held:
                    self._parked.append(entry)
                else:
                    heappush(self._heap, entry)


class Lfu(Ranked):
    """The fewest accesses since it came leave, of equals the oldest; every 100th access all counts but those of pinned
    keys shrink by ``decay``.

    Instead of shrinking counts, what one access adds grows (by powers of two it is brought back before it overflows).
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._one = 1.0  # what an access adds now
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

    def enter(self, key: int, score: float) -> None:
        self.number += 1
        self.push((self._one, self.number, key))

    def pin(self, key: int) -> bool:
        count, born, _ = self.rank.pop(key)
        self.pinned[key] = (count / self._one, born, key)
        return True

    def unpin(self, key: int) -> None:
        count, born, _ = self.pinned.pop(key)
        self.push((count * self._one, born, key))


class Score(Ranked):
    """The lowest router score leaves, of equals the oldest: the score it came with, then a moving average of those of
    its accesses. A pinned key's stands still."""

    uses_scores = True

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

    def enter(self, key: int, score: float) -> None:
        self.number += 1
        self.push((score, self.number, key))


EVICTIONS: Registry[type[Eviction]] = Registry(
    "eviction",
    {
        "lru": "moelight.experts.eviction:Lru",
        "lfu": "moelight.experts.eviction:Lfu",
        "slru": "moelight.experts.slru:Slru",
        "score": "moelight.experts.eviction:Score",
        "frequency_threshold": "moelight.experts.frequency:FrequencyThreshold",
        "reuse": "moelight.experts.reuse:Reuse",
        "belady": "moelight.experts.belady:Belady",
    },
)


def make_eviction(names: Sequence[str], setting: Setting) -> Eviction:
    """One name, or two: what the first gives up the second keeps for a while.

    Raises:
        ConfigError: an unknown name.
    """
    if len(names) == 1:
        return EVICTIONS.get(names[0])(setting)
    from moelight.experts.layered import Layered, split

    first, second = split(setting.capacity)
    upper, lower = (EVICTIONS.get(name) for name in names)
    return Layered(setting, upper(replace(setting, capacity=first)), lower(replace(setting, capacity=second)))
