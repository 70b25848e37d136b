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

import numpy as np
from numpy.typing import NDArray

from moelight.core.errors import ConfigError
from moelight.core.registry import Registry
from moelight.experts.policy import FALLBACK


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionRules:
    """The numbers evictions go by: ``decay`` of lfu, ``threshold`` and ``window`` (accesses) of frequency_threshold,
    ``alpha`` of score."""

    decay: float = 0.95
    threshold: float = 0.05
    window: int = 100
    alpha: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionContext:
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
    # It reads `EvictionContext.frequency`, which the cache must then keep.
    uses_frequency = False
    # Who is refused by `admit_all` is refused because all others are held; then everybody behind it is.
    fills_in_order = False
    # `begin` and `note` do something.
    has_begin = False
    # `visit` does something.
    has_visit = False
    has_note = False

    def __init__(self, setting: EvictionContext) -> None:
        self.capacity = setting.capacity
        self.population = setting.population
        self.rules = setting.rules
        self.held: Container[int] = ()
        self.gone: list[int] = []

    @abstractmethod
    def __len__(self) -> int:
        """Residents, pinned ones included."""

    @property
    def pinnable(self) -> int:
        """How many keys may be pinned."""
        return self.capacity

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

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        """`touch` for each of ``keys``, all of them held; what left is in `gone`."""
        for key, score in zip(keys, scores, strict=True):
            self.touch(key, score)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        """`admit` for each of ``keys``, all of them held, and who was brought in."""
        return list(map(self.admit, keys, scores))

    def take(self, keys: Iterable[int]) -> None:
        """Bring in ``keys``, one after the other, that nobody asked for and nobody holds. Who finds no place is in
        `gone` like those who leave."""
        for key in keys:
            if not self.admit(key, 1.0, asked=False):
                self.gone.append(key)

    @abstractmethod
    def enter(self, key: int, score: float) -> None:
        """``key`` takes a free place as the newest."""

    @abstractmethod
    def drop(self) -> bool:
        """The next to leave goes to `gone`; False where all are held or pinned."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """``key`` leaves, pinned or not, without a word in `gone`."""

    def remove_all(self, keys: Iterable[int]) -> None:
        """`remove` for each of ``keys``."""
        for key in keys:
            self.remove(key)

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

    def flush(self) -> None:  # noqa: B027
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

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        order = self._order
        if len(order) + len(self._pinned) >= self.capacity and not self.drop():
            return False
        order[key] = None
        return True

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        room = max(0, self.capacity - len(self._order) - len(self._pinned))
        there = min(len(keys), room + self._leave(len(keys) - room))
        self._order.update(dict.fromkeys(keys[:there]))
        return [True] * there + [False] * (len(keys) - there)

    def take(self, keys: Iterable[int]) -> None:
        # The newest are last to leave, so that all may enter before anybody does.
        before = len(self._order)
        self._order.update(dict.fromkeys(keys))
        self._leave(min(len(self._order) - before, len(self) - self.capacity))

    def _leave(self, wanted: int) -> int:
        """The next ``wanted`` leave, as far as they are not held; how many did."""
        if wanted <= 0:
            return 0
        held, found = self.held, []
        for key in self._order:
            if key not in held:
                found.append(key)
                if len(found) == wanted:
                    break
        for key in found:
            del self._order[key]
        self.gone += found
        return len(found)

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

    def remove_all(self, keys: Iterable[int]) -> None:
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


EVICTIONS: Registry[type[Eviction]] = Registry(
    "eviction",
    {
        "lru": "moelight.experts.eviction:Lru",
        "lfu": "moelight.experts.scored:Lfu",
        "slru": "moelight.experts.slru:Slru",
        "score": "moelight.experts.scored:Score",
        "frequency_threshold": "moelight.experts.frequency:FrequencyThreshold",
        "reuse": "moelight.experts.reuse:Reuse",
        "belady": "moelight.experts.belady:Belady",
    },
)


def eviction_names(eviction: str | Sequence[str]) -> tuple[str, ...]:
    """``"lru"``, ``"lfu | lru"``, ``"fallback"`` or names already apart, as one or two known names.

    Raises:
        ConfigError: an unknown one, or more than two.
    """
    names = tuple(part.strip() for part in eviction.split("|")) if isinstance(eviction, str) else tuple(eviction)
    names = FALLBACK if names == ("fallback",) else names
    for name in names:
        EVICTIONS.get(name)
    if not 1 <= len(names) <= 2:
        raise ConfigError(f"eviction {' | '.join(names)!r}: give one name, or two with a bar between them")
    return names


def make_eviction(names: Sequence[str], setting: EvictionContext) -> Eviction:
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
