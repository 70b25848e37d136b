"""Eviction policies: the order in which resident experts are evicted.

A key is an integer, ``layer * num_experts + expert``. An eviction depends only on keys, accesses and scores; slots,
layers and statistics belong to the cache. Evicted keys are appended to `Eviction.gone`, which the cache empties. Pinned
keys are not part of the order; held keys (leased, or of the current batch) are skipped.
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
    """Parameters of the evictions: ``decay`` of lfu, ``threshold`` and ``window`` (accesses) of frequency_threshold,
    ``alpha`` of score."""

    decay: float = 0.95
    threshold: float = 0.05
    window: int = 100
    alpha: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionContext:
    """Constructor arguments of an eviction.

    Attributes:
        population: number of keys that can ever be accessed; a pool with that capacity never evicts.
        frequency: accesses of each key so far, maintained by the cache (read by slru alone).
        future: keys of each coming batch, for belady.
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
    """The residents of one pool of ``capacity`` slots, in eviction order."""

    uses_scores = False
    # True if the policy reads `EvictionContext.frequency`, which the cache must then maintain.
    uses_frequency = False
    # True if `admit_all` rejects a key only because all other keys are held; all keys behind it are then rejected too.
    fills_in_order = False
    # True if `begin` is not a no-op.
    has_begin = False
    # True if `visit` is not a no-op.
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
        """Number of residents, pinned ones included."""

    @property
    def pinnable(self) -> int:
        """Number of keys that may be pinned."""
        return self.capacity

    def begin(self) -> None:  # noqa: B027
        """Called at the start of an access, before any lookup."""

    def visit(self, first: int, used: NDArray[np.bool_]) -> None:  # noqa: B027
        """Called after `begin`: the batch is of the layer whose lowest key is ``first``; ``used`` bool [experts] marks
        its experts."""

    def expect(self, first: int, shares: NDArray[np.float64]) -> None:  # noqa: B027
        """Set prior use rates of the layer whose lowest key is ``first``: the share of visits that use each expert,
        float64 [experts]."""

    @abstractmethod
    def touch(self, key: int, score: float) -> None:
        """Record a hit of ``key``."""

    def note(self, key: int) -> None:  # noqa: B027
        """Record a miss of ``key`` without admitting it."""

    def admit(self, key: int, score: float, asked: bool = True) -> bool:
        """Admit the missing ``key``, evicting another one if necessary. Return False if nothing can be evicted or the
        key ranks too low. ``asked``: True for an access, False for a prediction."""
        if asked:
            self.note(key)
        if len(self) >= self.capacity and not self.drop():
            return False
        self.enter(key, score)
        return True

    def touch_all(self, keys: Sequence[int], scores: Sequence[float]) -> None:
        """`touch` each of ``keys``, all of them held; evicted keys are in `gone`."""
        for key, score in zip(keys, scores, strict=True):
            self.touch(key, score)

    def admit_all(self, keys: Sequence[int], scores: Sequence[float]) -> list[bool]:
        """`admit` each of ``keys``, all of them held; return which were admitted."""
        return list(map(self.admit, keys, scores))

    def take(self, keys: Iterable[int]) -> None:
        """Admit ``keys``, one after the other, that were not accessed and are not held. Rejected keys go to `gone` like
        evicted ones."""
        for key in keys:
            if not self.admit(key, 1.0, asked=False):
                self.gone.append(key)

    @abstractmethod
    def enter(self, key: int, score: float) -> None:
        """Insert ``key`` into a free slot as the newest."""

    @abstractmethod
    def drop(self) -> bool:
        """Evict the next key into `gone`; return False if all keys are held or pinned."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """Remove ``key``, pinned or not, without adding it to `gone`."""

    def remove_all(self, keys: Iterable[int]) -> None:
        """`remove` for each of ``keys``."""
        for key in keys:
            self.remove(key)

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
        """Set the keys that may not be evicted to exactly ``keys``."""
        self.held = keys

    def flush(self) -> None:  # noqa: B027
        """Called when some keys are no longer held."""

    def resize(self, capacity: int) -> None:
        """Set the capacity; the surplus is evicted as far as possible."""
        self.capacity = capacity
        while len(self) > capacity and self.drop():
            pass

    def retune(self, rules: EvictionRules) -> None:
        """Set other parameters; the residents are kept."""
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
        # The newest keys are evicted last, so all may enter before the first eviction.
        before = len(self._order)
        self._order.update(dict.fromkeys(keys))
        self._leave(min(len(self._order) - before, len(self) - self.capacity))

    def _leave(self, wanted: int) -> int:
        """Evict the next ``wanted`` keys that are not held; return how many were evicted."""
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
    """Return ``"lru"``, ``"lfu | lru"``, ``"fallback"`` or a sequence of names as one or two known names.

    Raises:
        ConfigError: an unknown name, or more than two.
    """
    names = tuple(part.strip() for part in eviction.split("|")) if isinstance(eviction, str) else tuple(eviction)
    names = FALLBACK if names == ("fallback",) else names
    for name in names:
        EVICTIONS.get(name)
    if not 1 <= len(names) <= 2:
        raise ConfigError(f"eviction {' | '.join(names)!r}: give one name, or two with a bar between them")
    return names


def make_eviction(names: Sequence[str], setting: EvictionContext) -> Eviction:
    """Return the eviction of one name, or of two: the second retains what the first evicts.

    Raises:
        ConfigError: an unknown name.
    """
    if len(names) == 1:
        return EVICTIONS.get(names[0])(setting)
    from moelight.experts.layered import Layered, split

    first, second = split(setting.capacity)
    upper, lower = (EVICTIONS.get(name) for name in names)
    return Layered(setting, upper(replace(setting, capacity=first)), lower(replace(setting, capacity=second)))
