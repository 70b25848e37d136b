"""Expert cache: slots, leases, pins, budgets of layers, expiry and counters over an eviction policy. The cache decides
and counts but moves no bytes; the caller transfers pages to the slots that the cache returns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moelight.core.errors import ConfigError
from moelight.experts.eviction import (
    BoolArray,
    Eviction,
    EvictionContext,
    EvictionRules,
    FloatArray,
    IntArray,
    eviction_names,
    make_eviction,
)
from moelight.experts.policy import CacheRules, ExpertPolicy, PerLayerRules, PrefetchRules
from moelight.experts.predict import Prefetcher


@dataclass(frozen=True, slots=True)
class Access:
    """Result of one batch of one layer. Ids ascend; each is in exactly one of `hits`, `misses` and `kept_out`.

    Attributes:
        hits: int64 [n], resident experts, in the slots ``hit_slots`` int64 [n].
        misses: int64 [m]; ``slots`` int64 [m] is the destination slot of each, -1 if it bypasses the cache.
        kept_out: int64 [o], missing experts that the caller excluded from admission.
        evictions: int64 [e, 2], evicted (layer, expert), in order. Their slots may be among ``slots``.
        counts: int64 [num_experts], tokens of each expert.
    """

    layer: int
    hits: IntArray
    hit_slots: IntArray
    misses: IntArray
    slots: IntArray
    kept_out: IntArray
    evictions: IntArray
    counts: IntArray


class Prefetch(NamedTuple):
    """Admitted predictions: ``ids`` int64 [n] into ``slots`` int64 [n]; ``evictions`` int64 [e, 2] made room."""

    ids: IntArray
    slots: IntArray
    evictions: IntArray


class SlotKinds(NamedTuple):
    """Kinds, numbered from 0: of the slots that the experts of each of ``layers`` take, and of each of ``slots``."""

    layers: Sequence[int]
    slots: Sequence[int]


COUNTERS = ("evictions", "expired", "pressed", "bypasses", "prefetched")  # scalar counters of `CacheStats`


class CacheStats:
    """Counters of a cache.

    Attributes:
        hits, misses: int64 [L, E], accesses; one for each distinct id of a batch.
        tokens: int64 [L, E], (token, expert) pairs.
        evictions: all evicted pages, including those ``expired`` by time to live and ``pressed`` by memory pressure.
        bypasses: misses that were not admitted.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.hits = np.zeros((num_layers, num_experts), np.int64)
        self.misses = np.zeros((num_layers, num_experts), np.int64)
        self.tokens = np.zeros((num_layers, num_experts), np.int64)
        self.evictions = self.expired = self.pressed = self.bypasses = self.prefetched = 0

    @property
    def accesses(self) -> int:
        return int(self.hits.sum() + self.misses.sum())

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0 before the first access."""
        accesses = self.accesses
        return int(self.hits.sum()) / accesses if accesses else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPressure:
    """From ``threshold`` of ``budget_gb`` on, experts of ``expert_gb`` each are evicted down to ``headroom``."""

    threshold: float
    headroom: float = 0.7
    budget_gb: float = 16.0
    expert_gb: float = 1.2

    @classmethod
    def of(cls, rules: CacheRules, threshold: float) -> MemoryPressure:
        sizes = {"budget_gb": rules.memory_budget_gb, "expert_gb": rules.expert_size_gb}
        return cls(threshold=threshold, headroom=rules.memory_headroom, **sizes)

    def usage(self, residents: int) -> float:
        return residents * self.expert_gb / self.budget_gb

    def beyond_headroom(self, residents: int) -> int:
        """Number of ``residents`` to evict once the threshold is reached."""
        return sum(self.usage(count) > self.headroom for count in range(1, residents + 1))


class Expiry:
    """Keys by their last access; a key is due ``ttl`` accesses later. The cost is proportional to the due keys."""

    def __init__(self, ttl: int) -> None:
        self.ttl = ttl
        self._last: OrderedDict[int, int] = OrderedDict()

    def touch(self, keys: Iterable[int], clock: int) -> None:
        """Record an access of the resident ``keys``, the last at access number ``clock``."""
        last = self._last
        for key in keys:
            last[key] = clock
            last.move_to_end(key)

    def forget(self, key: int) -> None:
        self._last.pop(key, None)

    def due(self, clock: int, spared: Callable[[int], bool]) -> list[int]:
        """Return the expired keys, the oldest first, without those ``spared``, which remain due."""
        expired = []
        for key, last in self._last.items():
            if last > clock - self.ttl:
                break
            if not spared(key):
                expired.append(key)
        return expired


_FEW = 12  # keys up to which a loop over them is faster than numpy
_LEAST_WEIGHT = 1e-9  # of the largest weight; smaller ones count as 0, which keeps the bisection within float64


def share_out(total: int, weights: FloatArray, least: IntArray, maximum: IntArray) -> IntArray:
    """Distribute exactly ``total`` slots in proportion to ``weights`` float [L] (equally if all are 0), each layer
    within ``least`` and ``maximum`` int [L]; raises ConfigError if that is impossible. What a bound cuts off goes to
    the other layers, the rounding remainder to the largest fractions, ties to the first layers."""
    low, high = int(least.sum()), int(maximum.sum())
    if not low <= total <= high or (least > maximum).any():
        raise ConfigError(
            f"per_layer: {total} slots cannot be shared out to {len(weights)} layers, which take {low} to {high} "
            "together; change total_budget, min_capacity or max_capacity"
        )
    if not weights.sum() > 0:
        weights = np.ones(len(weights))
    weights = weights / weights.max()
    weights[weights < _LEAST_WEIGHT] = 0.0
    # Bisection: the real shares are clip(a * weights, least, most) with the a that makes their sum `total`.
    positive = weights > 0
    below, above = 0.0, float((maximum[positive] / weights[positive]).max())
    for _ in range(100):
        middle = (below + above) / 2.0
        if np.clip(middle * weights, least, maximum).sum() < total:
            below = middle
        else:
            above = middle
    ideal: FloatArray = np.clip(above * weights, least, maximum)
    shares = np.floor(ideal + 1e-9).astype(np.int64)
    while missing := total - int(shares.sum()):
        room = shares < maximum
        remainders = np.where(room, ideal - shares, -np.inf)
        shares[np.argsort(-remainders, kind="stable")[: min(missing, int(room.sum()))]] += 1
    return shares


class Selections:
    """The last ``window`` accesses of each layer, and their entropy over its experts."""

    def __init__(self, num_layers: int, num_experts: int, window: int) -> None:
        self._last: list[deque[int]] = [deque(maxlen=window) for _ in range(num_layers)]
        self._experts = num_experts

    def add(self, layer: int, ids: IntArray) -> None:
        self._last[layer].extend(ids.tolist())

    def entropies(self) -> FloatArray:
        """Entropy of each layer's recent accesses in bits, float [L]; without accesses, that of a uniform spread."""
        result = np.full(len(self._last), np.log2(max(self._experts, 2)))
        for layer, last in enumerate(self._last):
            if last:
                counts = np.bincount(last)
                shares = counts[counts > 0] / len(last)
                result[layer] = -(shares * np.log2(shares)).sum()
        return result


def flat_ids(ids: ArrayLike, num_experts: int) -> IntArray:
    """Return the experts of ``[tokens, k]`` as one int64 row; raises ValueError for another shape, type or range."""
    array = np.asarray(ids)
    if array.ndim != 2:
        raise ValueError(f"ids: expected [tokens, k], not shape {list(array.shape)}")
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"ids: expected integers, not {array.dtype}")
    flat: IntArray = np.ascontiguousarray(array, np.int64).reshape(-1)
    # Viewed as unsigned, negative ids are the largest, so one maximum finds both kinds of error.
    if flat.size and int(flat.view(np.uint64).max()) >= num_experts:
        raise ValueError(f"ids: {int(flat.min())} to {int(flat.max())} are not all among the {num_experts} experts")
    return flat


def mass_of(scores: ArrayLike, flat: IntArray, shape: tuple[int, ...], num_experts: int) -> FloatArray:
    """Return the summed router weight of each expert, float64 [num_experts]; the ids had ``shape``."""
    array: NDArray[np.float64] = np.ascontiguousarray(scores, np.float64)
    if array.shape != shape:
        raise ValueError(f"scores: expected the shape of ids, {list(shape)}, not {list(array.shape)}")
    mass = np.bincount(flat, weights=array.reshape(-1), minlength=num_experts).astype(np.float64, copy=False)
    if not np.isfinite(mass).all():
        raise ValueError("scores: not all are finite numbers")
    return mass


_MANY = 16  # routed tokens per expert from which their count ranks experts as well as summed weights do


class ExpertCache:
    """Slots for ``capacity`` experts of ``num_layers`` x ``num_experts``, all layers of a kind together.

    The distinct ids of a batch are served in ascending order, resident ones before missing ones (with two evictions,
    residents of the first before those of the second); no expert of a batch is evicted for another one of it. A miss
    that is not admitted is a bypass.

    Args:
        eviction: a name of `EVICTIONS`, two (``("lfu", "lru")`` or ``"lfu | lru"``), or ``fallback``.
        rules: parameters of the evictions.
        predictor: a name of `STRATEGIES` or a `Prefetcher`; observes every batch, queried by `prefetch_ahead`.
        per_layer: each layer has a budget of its own, together ``capacity``.
        kinds: of layers and their slots; None: any expert fits any slot.
        pins: experts to pin in every layer, as far as they fit (`preload`).
        ttl: accesses after which an expert without an access is evicted.
        pressure: threshold and headroom of memory pressure.
        future: ``(layer, ids)`` of each coming batch, for ``belady``.
        on_evict: called with (layer, expert, slot) for each evicted expert, whatever the cause, at the end of the
            public call that evicted it.

    Invariants: `slot_table` and the pools contain the same keys; a slot, numbered from 0 below the largest capacity so
    far, is free or holds exactly one key; each evicted key goes through `_drain` once.
    """

    def __init__(
        self,
        *,
        capacity: int,
        num_layers: int,
        num_experts: int,
        eviction: str | Sequence[str] = "slru",
        rules: EvictionRules | None = None,
        predictor: str | Prefetcher = "none",
        per_layer: PerLayerRules | None = None,
        kinds: SlotKinds | None = None,
        pins: Iterable[int] = (),
        ttl: int | None = None,
        pressure: MemoryPressure | None = None,
        future: Sequence[tuple[int, Iterable[int]]] = (),
        on_evict: Callable[[int, int, int], None] | None = None,
    ) -> None:
        if min(capacity, num_layers, num_experts) < 1:
            raise ValueError(f"{capacity=}, {num_layers=} and {num_experts=} must be positive")
        self.num_layers, self.num_experts = num_layers, num_experts
        self.capacity = min(capacity, num_layers * num_experts)
        self.eviction = eviction_names(eviction)
        self.rules = rules or EvictionRules()
        if isinstance(predictor, str):
            rules_of = PrefetchRules(strategy=predictor)
            predictor = Prefetcher(rules_of, num_layers=num_layers, num_experts=num_experts)
        self.predictor = predictor
        self.pressure, self.on_evict, self.per_layer = pressure, on_evict, per_layer
        self.stats = CacheStats(num_layers, num_experts)
        self.clock = 0
        self._table = np.full((num_layers, num_experts), -1, np.int32)
        # The same memory by key, and as a memoryview, which is faster for single items.
        self._flat_table = self._table.reshape(-1)
        self._slot_of = self._flat_table.data
        self._kinds = [0] * num_layers if kinds is None else list(kinds.layers)
        slots = np.array([0] * self.capacity if kinds is None else kinds.slots, dtype=np.int64)
        # The free slots of each kind, and the largest number of its slots so far.
        self._free: list[list[int]] = [
            np.flatnonzero(slots == kind)[::-1].tolist() for kind in range(max(self._kinds) + 1)
        ]
        self._made = [len(free) for free in self._free]
        self._leases: dict[int, int] = {}
        self._pinned: dict[int, None] = {}
        self._frequency = [0] * (num_layers * num_experts)
        # Keys evicted since the last public call began, with their slots.
        self._left: list[int] = []
        self._left_slots: list[int] = []
        self._expiry = Expiry(ttl) if ttl else None
        self._last_batch: set[int] = set()
        self._last_of_layer: list[list[int]] = [[] for _ in range(num_layers)]
        self._selections: Selections | None = None
        self._rebalanced = 0
        keys = [(layer, [layer * num_experts + int(e) for e in ids]) for layer, ids in future]
        self._pools: list[Eviction] = []  # of each layer
        self._distinct: list[Eviction] = []  # one for all layers of a kind, or one for each
        if per_layer is not None and per_layer.allocation == "entropy":
            self._selections = Selections(num_layers, num_experts, per_layer.entropy_window)
        self._use(self._first_pools(keys))
        self.preload = self._preload(list(pins))

    def _first_pools(self, future: Sequence[tuple[int, Sequence[int]]]) -> list[Eviction]:
        """The pools of all slots; ``future``: layer and keys of each coming batch."""
        by_kind = self.per_layer is None
        shares = self._by_kind(self.capacity) if by_kind else self._shares(self.capacity).tolist()
        pool_of: Sequence[int] = self._kinds if by_kind else range(self.num_layers)
        return [
            self._pool(share, index, [keys for layer, keys in future if pool_of[layer] == index])
            for index, share in enumerate(shares)
        ]

    def _use(self, pools: list[Eviction]) -> None:
        self._distinct = pools
        self._pools = pools if self.per_layer is not None else [pools[kind] for kind in self._kinds]

    def _pool(self, capacity: int, index: int, future: Sequence[Sequence[int]] = ()) -> Eviction:
        setting = EvictionContext(
            capacity=capacity,
            population=self.num_experts if self.per_layer is not None else self._flat_table.size,
            rules=self.rules,
            frequency=self._frequency,
            future=future,
            first=index * self.num_experts if self.per_layer is not None else 0,
            experts=self.num_experts,
        )
        pool = make_eviction(self.eviction, setting)
        pool.hold(self._leases)
        return pool

    def _preload(self, pins: list[int]) -> tuple[tuple[int, int, int], ...]:
        """Admit and pin ``pins`` in every layer; return (layer, expert, slot) of those that fit."""
        preloaded = []
        for layer in range(self.num_layers):
            for expert in dict.fromkeys(pins):
                key, pool = layer * self.num_experts + expert, self._pools[layer]
                if expert >= self.num_experts or len(pool) >= pool.capacity:
                    continue
                pool.enter(key, 1.0)
                if pool.pin(key):
                    self._pinned[key] = None
                    preloaded.append((layer, expert, self._place([key])[0]))
                else:
                    pool.remove((key,))
        return tuple(preloaded)

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._distinct)

    def contains(self, layer: int, expert: int) -> bool:
        return bool(self._table[layer, expert] >= 0)

    @property
    def slot_table(self) -> NDArray[np.int32]:
        """int32 [L, E]: the slot of each expert, -1 if it is not resident. A read-only view."""
        view: NDArray[np.int32] = self._table.view()
        view.flags.writeable = False
        return view

    @property
    def pinned(self) -> list[tuple[int, int]]:
        """(layer, expert) of all pins, in the order in which they were made."""
        return [divmod(key, self.num_experts) for key in self._pinned]

    @property
    def budgets(self) -> list[int]:
        """Slots of each layer, or of each kind of layers that share them."""
        return [pool.capacity for pool in self._distinct]

    def lease(self, layer: int, ids: Iterable[int]) -> None:
        """Forbid the eviction of ``ids``, resident or not yet resident, until `release`; leases add up."""
        for expert in ids:
            key = self._key(layer, expert)
            self._leases[key] = self._leases.get(key, 0) + 1

    def release(self, layer: int, ids: Iterable[int]) -> None:
        """End one lease of each of ``ids``; raises ValueError if an expert has none."""
        for expert in ids:
            key = self._key(layer, expert)
            left = self._leases.get(key, 0) - 1
            if left < 0:
                raise ValueError(f"layer {layer}, expert {expert}: no lease to end")
            if left:
                self._leases[key] = left
            else:
                del self._leases[key]
        self._pools[layer].hold(self._leases)

    def pin(self, layer: int, expert: int) -> bool:
        """Exclude a resident expert from eviction; False if it is not resident or no further pin is possible."""
        key = self._key(layer, expert)
        if key in self._pinned:
            return True
        pool = self._pools[layer]
        pinned = bool(self._slot_of[key] >= 0 and pool.pin(key))
        if pinned:
            self._pinned[key] = None
        self._drain(pool)
        self._notify()
        return pinned

    def unpin(self, layer: int, expert: int) -> bool:
        """Allow the eviction of a pinned expert again; False if it was not pinned."""
        key = self._key(layer, expert)
        if key not in self._pinned:
            return False
        del self._pinned[key]
        self._pools[layer].unpin(key)
        if self._expiry is not None:
            self._expiry.touch([key], self.clock)
        return True

    def _key(self, layer: int, expert: int) -> int:
        if not (0 <= layer < self.num_layers and 0 <= expert < self.num_experts):
            raise ValueError(f"layer {layer}, expert {expert}: not of {self.num_layers} x {self.num_experts}")
        return layer * self.num_experts + int(expert)

    def _is_guarded(self, key: int) -> bool:
        return key in self._pinned or key in self._leases or key in self._last_batch

    def _place(self, keys: list[int]) -> list[int]:
        """Assign free slots to ``keys`` of one layer, which are resident from now on; return the slots."""
        if not keys:
            return []
        free = self._free_for(keys[0])
        slots = free[: -len(keys) - 1 : -1]
        del free[-len(keys) :]
        if len(keys) < _FEW:
            for key, slot in zip(keys, slots, strict=True):
                self._slot_of[key] = slot
        else:
            self._flat_table[keys] = slots
        return slots

    def _free_for(self, key: int) -> list[int]:
        """The free slots that ``key`` fits."""
        return self._free[self._kinds[key // self.num_experts]]

    def _drain(self, pool: Eviction) -> None:
        """Free the slots of all keys that ``pool`` evicted."""
        gone, slot_of = pool.gone, self._slot_of
        if not gone:
            return
        free = self._free_for(gone[0])
        if len(gone) < _FEW:
            for key in gone:
                slot = slot_of[key]
                slot_of[key] = -1
                free.append(slot)
                self._left_slots.append(slot)
        else:
            slots = self._flat_table[gone].tolist()
            self._flat_table[gone] = -1
            free += slots
            self._left_slots += slots
        self._left += gone
        if self._expiry is not None:
            for key in gone:
                self._expiry.forget(key)
        gone.clear()

    def _remove(self, keys: Collection[int]) -> int:
        """Evict ``keys`` for a reason outside their pools; return their number."""
        for key in keys:
            pool = self._pools[key // self.num_experts]
            pool.remove((key,))
            pool.gone.append(key)
            self._drain(pool)
        return len(keys)

    def _notify(self) -> IntArray:
        """Call `on_evict` for all evicted keys; return their (layer, expert), int64 [e, 2]."""
        left, slots = self._left, self._left_slots
        self._left, self._left_slots = [], []
        self.stats.evictions += len(left)
        if self.on_evict is not None:
            for key, slot in zip(left, slots, strict=True):
                self.on_evict(*divmod(key, self.num_experts), slot)
        pairs = np.empty((len(left), 2), np.int64)
        if left:
            np.divmod(left, self.num_experts, pairs[:, 0], pairs[:, 1])
        return pairs

    def relieve(self) -> IntArray:
        """Evict experts down to the headroom of `pressure`, even below its threshold; return them, int64 [e, 2]."""
        if self.pressure is not None:
            self.stats.pressed += self._press(self.pressure.beyond_headroom(len(self)))
        return self._notify()

    def _press(self, surplus: int) -> int:
        """Evict up to ``surplus`` keys in the order of the pools, each from the fullest pool; return their number."""
        pools, left = list(self._distinct), 0
        for pool in pools:
            pool.hold(self._last_batch | self._leases.keys())
        while pools and left < surplus:
            pool = max(pools, key=len)
            if pool.drop():
                self._drain(pool)
                left += 1
            else:
                pools.remove(pool)
        self._release(self._distinct)
        return left

    def _release(self, pools: Iterable[Eviction]) -> None:
        """Reduce the held keys to the leased ones."""
        for pool in pools:
            pool.hold(self._leases)

    def clear(self) -> IntArray:
        """Evict all experts, pinned or not, but keep the counters; return the evicted (layer, expert), int64 [e, 2].
        Raises ValueError if an expert is leased."""
        leased = [key for key in self._leases if self._slot_of[key] >= 0]
        if leased:
            raise ValueError(f"{len(leased)} experts are leased; release them before clear()")
        for pool in self._distinct:
            self._remove(pool.order())
        self._remove(self._pinned)
        self._pinned.clear()
        return self._notify()

    def swap(self, eviction: str | Sequence[str] | None = None, rules: EvictionRules | None = None) -> None:
        """Replace the eviction policy or its parameters. The residents enter the new policy in the eviction order of
        the old one; leases and counters are kept, and pins unless the new policy cannot hold them."""
        names = self.eviction if eviction is None else eviction_names(eviction)
        self.rules = rules or self.rules
        if names == self.eviction:
            for pool in self._distinct:
                pool.retune(self.rules)
            return
        self.eviction = names
        self._frequency[:] = (self.stats.hits + self.stats.misses).reshape(-1).tolist()
        made = []
        for index, pool in enumerate(self._distinct):
            fresh = self._pool(pool.capacity, index)
            pins = [key for key in self._pinned if self._pools[key // self.num_experts] is pool]
            residents = [*pool.order(), *pins]
            fresh.adopt(residents)
            fresh.hold(residents)  # no resident is evicted for a pin
            for key in pins:
                if not fresh.pin(key):
                    del self._pinned[key]
            made.append(fresh)
        self._release(made)
        self._use(made)

    def resize(self, capacity: int) -> IntArray:
        """Set the capacity to ``capacity`` experts; return the evicted (layer, expert), int64 [e, 2]. If the pins
        exceed the capacity, the latest pins end; raises ValueError if the leased experts do not fit, ConfigError if the
        layers' budgets cannot be met."""
        leased = {key for key in self._leases if self._slot_of[key] >= 0}
        if capacity < max(1, len(leased)):
            raise ValueError(f"{capacity=}: {len(leased)} experts are leased")
        if len(self._made) > 1:  # no slot of a kind is added
            capacity = min(capacity, sum(self._made))
        capacity = min(capacity, self._table.size)
        self._free[0][:0] = range(capacity - 1, sum(self._made) - 1, -1)
        self._made[0] += max(0, capacity - sum(self._made))
        if self.per_layer is None:
            for kind, share in enumerate(self._by_kind(capacity)):
                self._resize(kind, share, leased)
        else:
            self._apply(self._shares(capacity))
        self.capacity = capacity
        return self._notify()

    def _resize(self, kind: int, capacity: int, leased: Collection[int]) -> None:
        """`resize` the pool of one kind; ``leased``: resident keys of any kind."""
        for layer, expert in self.pinned[::-1]:
            guarded = {key for key in {*leased, *self._pinned} if self._kinds[key // self.num_experts] == kind}
            if len(guarded) <= capacity:
                break
            if self._kinds[layer] == kind:
                self.unpin(layer, expert)
        self._distinct[kind].resize(capacity)
        self._drain(self._distinct[kind])

    def _by_kind(self, total: int) -> list[int]:
        """The slots of each kind, ``total`` in all: in proportion to their numbers, with room for leased experts."""
        if len(self._made) == 1:
            return [total]
        made = np.array(self._made)
        leased = [self._kinds[key // self.num_experts] for key in self._leases if self._slot_of[key] >= 0]
        least = np.bincount(np.array(leased, np.int64), minlength=len(made))
        shares: list[int] = share_out(total, made.astype(float), least, made).tolist()
        return shares

    def rebalance(self) -> None:
        """If layers have budgets, redistribute the slots by the entropy of the layers' recent accesses."""
        if self.per_layer is not None:
            self._rebalanced = self.clock
            self._apply(self._shares(self.capacity))

    def _shares(self, total: int) -> IntArray:
        """Budgets int64 [L] that sum to ``total``, those of a kind to its slots, each with room for the layer's pinned
        and leased experts."""
        rules = self.per_layer
        if rules is None:
            raise ValueError("no budgets of layers")
        layers, experts = self.num_layers, self.num_experts
        least, maximum = (np.full(layers, min(bound, experts)) for bound in (rules.min_capacity, rules.max_capacity))
        for layer, pool in enumerate(self._pools):
            layer_keys = range(layer * experts, (layer + 1) * experts)
            guarded = sum(self._slot_of[key] >= 0 and self._is_guarded(key) for key in layer_keys)
            least[layer] = max(
                least[layer], min(pool.capacity, guarded + -(-guarded // 3))
            )  # slru protects three of four
        weights = np.ones(layers) if self._selections is None else self._selections.entropies()
        shares, kinds = np.zeros(layers, np.int64), np.array(self._kinds)
        for kind, slots in enumerate(self._by_kind(total)):
            rows = kinds == kind
            shares[rows] = share_out(slots, weights[rows], least[rows], maximum[rows])
        return shares

    def _apply(self, shares: IntArray) -> None:
        """Set new budgets: layers that shrink first, then layers that grow."""
        for layer in np.argsort(shares - [pool.capacity for pool in self._pools], kind="stable").tolist():
            pool = self._pools[layer]
            pool.hold(self._last_batch | self._leases.keys())
            pool.resize(int(shares[layer]))
            self._drain(pool)
        self._release(self._distinct)

    # ---- accesses

    def access(
        self,
        layer: int,
        ids: ArrayLike,
        scores: ArrayLike | None = None,
        *,
        admit: bool = True,
        keep_out: Collection[int] = (),
    ) -> Access:
        """Serve one batch of integer ``ids`` [tokens, k] with router weights ``scores`` [tokens, k] (None: all 1);
        raises ValueError for a wrong type, shape or range.

        Without ``admit``, as for passes over whole layers, the batch is counted and its hits are refreshed, but no miss
        is admitted; the experts to ``keep_out`` are counted, but not admitted if they miss.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is none of {self.num_layers}")
        base = layer * self.num_experts
        flat, pool = flat_ids(ids, self.num_experts), self._pools[layer]
        counts = np.bincount(flat, minlength=self.num_experts)
        mass, few = None, flat.size <= _MANY * self.num_experts
        if scores is not None and (pool.uses_scores or (few and self.predictor.is_on)):
            mass = mass_of(scores, flat, np.shape(ids), self.num_experts)
        distinct = counts.nonzero()[0]
        if pool.has_begin:
            pool.begin()
            self._drain(pool)
        if pool.has_visit:
            pool.visit(base, counts > 0)
        before = self._table[layer][distinct]
        present = before >= 0
        hits, missing = distinct[present], distinct[~present]
        keys = (distinct + base).tolist()
        held = set(keys)
        pool.hold(held | self._leases.keys() if self._leases else held)
        if pool.uses_frequency:
            for key in keys:
                self._frequency[key] += 1
        means = mass[distinct] / counts[distinct] if mass is not None and pool.uses_scores else np.ones(len(distinct))
        if len(hits):
            pool.touch_all((hits + base).tolist(), means[present].tolist())
            self._drain(pool)
        misses, scored, kept_out = missing, means[~present], missing[:0]
        if keep_out:
            out = np.isin(missing, list(keep_out))
            misses, scored, kept_out = missing[~out], scored[~out], missing[out]
            self._pass_by(pool, (kept_out + base).tolist())
        slots = self._bring(pool, (misses + base).tolist(), scored.tolist(), admit) if len(misses) else []
        self.stats.hits[layer][hits] += 1
        self.stats.misses[layer][missing] += 1
        self.stats.tokens[layer] += counts
        self.clock += len(keys)
        self._last_batch, self._last_of_layer[layer] = held, keys
        self._after(layer, distinct)
        pool.hold(self._leases)
        if self.predictor.is_on:
            self.predictor.observe(layer, distinct, counts[distinct], None if mass is None else mass[distinct])
        hit_slots, brought, evicted = before[present].astype(np.int64), np.array(slots, np.int64), self._notify()
        return Access(layer, hits, hit_slots, misses, brought, kept_out, evicted, counts)

    def _bring(self, pool: Eviction, keys: list[int], scores: list[float], admit: bool) -> list[int]:
        """Return the slot of each missing key, -1 for a bypass. Slots are assigned after all evictions."""
        if not (admit and pool.capacity):
            self._pass_by(pool, keys)
            return [-1] * len(keys)
        brought = pool.admit_all(keys, scores)
        self._drain(pool)
        if all(brought):
            return self._place(keys)
        placed = iter(self._place(list(compress(keys, brought))))
        self.stats.bypasses += brought.count(False)
        return [next(placed) if admitted else -1 for admitted in brought]

    def _pass_by(self, pool: Eviction, keys: list[int]) -> None:
        """Count missing keys that are not admitted."""
        for key in keys:
            pool.note(key)
        self._drain(pool)
        self.stats.bypasses += len(keys)

    def _after(self, layer: int, distinct: IntArray) -> None:
        """Apply memory pressure, time to live and rebalancing after a batch, none of whose experts is evicted."""
        if self.pressure is not None and self.pressure.usage(len(self)) >= self.pressure.threshold:
            self.stats.pressed += self._press(self.pressure.beyond_headroom(len(self)))
        if self._expiry is not None:
            base = layer * self.num_experts
            self._expiry.touch((k for k in (distinct + base).tolist() if self._slot_of[k] >= 0), self.clock)
            self.stats.expired += self._remove(self._expiry.due(self.clock, self._is_guarded))
        if self._selections is not None and self.per_layer is not None:
            self._selections.add(layer, distinct)
            waited = self.clock - self._rebalanced
            if waited >= self.per_layer.rebalance_interval and self.clock > self.per_layer.entropy_window:
                self.rebalance()

    @property
    def relief(self) -> int:
        """Number of experts that `relieve` would evict now."""
        surplus = 0 if self.pressure is None else self.pressure.beyond_headroom(len(self))
        if not surplus:
            return 0
        residents = np.flatnonzero(self._flat_table >= 0).tolist()
        return min(surplus, sum(not self._is_guarded(key) for key in residents))

    # ---- predictions

    def prefetch(self, layer: int, ids: Iterable[int]) -> Prefetch:
        """Admit the missing ones of ``ids``, in that order, as far as slots allow; not an access. No expert that is
        leased, pinned, used by the last batch (of any layer or of this one) or just prefetched is evicted for it."""
        pool = self._pools[layer]
        held = self._last_batch | set(self._last_of_layer[layer]) | self._leases.keys()
        pool.hold(held)
        loaded, slots = [], []
        for expert in ids:
            key = self._key(layer, expert)
            if self._slot_of[key] >= 0 or not pool.capacity:
                continue
            brought = pool.admit(key, 1.0, asked=False)
            self._drain(pool)
            if brought:
                held.add(key)
                loaded.append(int(expert))
                slots += self._place([key])
        self._release([pool])
        if self._expiry is not None:
            self._expiry.touch((layer * self.num_experts + expert for expert in loaded), self.clock)
        self.stats.prefetched += len(loaded)
        return Prefetch(np.array(loaded, np.int64), np.array(slots, np.int64), self._notify())

    def fill(self, keys: ArrayLike) -> IntArray:
        """Admit ``keys``, (layer, expert) int [n, 2], highest priority first, into free slots only; not an access. The
        first key is evicted last. Return (layer, expert, slot) of the admitted keys, int64 [m, 3]."""
        filled = []
        chosen: dict[Eviction, list[int]] = {pool: [] for pool in self._distinct}
        for layer, expert in np.asarray(keys, np.int64).reshape(-1, 2).tolist():
            key, pool = self._key(layer, expert), self._pools[layer]
            if self._slot_of[key] < 0 and len(pool) + len(chosen[pool]) < pool.capacity:
                chosen[pool].append(key)
                filled.append((layer, expert, *self._place([key])))
        for pool, wanted in chosen.items():
            pool.adopt(wanted[::-1])
            if self._expiry is not None:
                self._expiry.touch(wanted, self.clock)
        return np.array(filled, np.int64).reshape(-1, 3)

    def prefetch_ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        """Prefetch what the predictor expects after ``layer`` was served; return (layer, `Prefetch`), none empty."""
        if not self.predictor.is_on:
            return []
        predictions = self.predictor.ahead(layer, self._table >= 0)
        prefetches = [(at, self.prefetch(at, ids.tolist())) for at, ids in predictions]
        return [(at, brought) for at, brought in prefetches if brought.ids.size]

    # ---- made from a policy

    @classmethod
    def of(
        cls,
        policy: ExpertPolicy,
        *,
        num_layers: int,
        num_experts: int,
        page_bytes: int | None = None,
        kinds: SlotKinds | None = None,
    ) -> ExpertCache:
        """Return the cache that ``policy`` describes; a capacity in bytes needs ``page_bytes`` of one expert."""
        rules = policy.cache
        return cls(
            capacity=policy.slots(num_layers, num_experts, page_bytes),
            num_layers=num_layers,
            num_experts=num_experts,
            eviction=rules.eviction,
            rules=EvictionRules(
                decay=rules.frequency_decay,
                threshold=rules.freq_threshold,
                window=rules.freq_window,
                alpha=rules.score_ema_alpha,
            ),
            predictor=Prefetcher(policy.prefetch, num_layers=num_layers, num_experts=num_experts),
            per_layer=policy.per_layer,
            kinds=kinds,
            pins=rules.pin,
            ttl=rules.ttl,
            pressure=None if rules.memory_threshold is None else MemoryPressure.of(rules, rules.memory_threshold),
        )

    def expect(self, shares: ArrayLike) -> None:
        """Set prior use rates, [L, E]: the share of a layer's visits that use each expert (read by ``reuse`` alone)."""
        array = np.asarray(shares, np.float64)
        if array.shape != self._table.shape:
            raise ValueError(f"shares: expected {list(self._table.shape)}, not {list(array.shape)}")
        for layer, row in enumerate(array):
            self._pools[layer].expect(layer * self.num_experts, row)

    # ---- many accesses of one id

    def access_each(self, layers: ArrayLike, experts: ArrayLike, scores: ArrayLike | None = None) -> BoolArray:
        """Equivalent to one `access` per id, in order: ``experts`` [n] of ``layers`` [n], with ``scores`` [n]; return
        bool [n], True for a hit. `on_evict` is called for all evicted experts at the end, in order."""
        at = flat_ids(np.reshape(layers, (-1, 1)), self.num_layers)
        which = flat_ids(np.reshape(experts, (-1, 1)), self.num_experts)
        weights = None if scores is None else np.ascontiguousarray(scores, np.float64).reshape(-1)
        if len(at) != len(which) or (weights is not None and len(weights) != len(at)):
            raise ValueError(f"{len(at)} layers, {len(which)} experts and their scores are not equally many")
        hit = np.zeros(len(at), np.bool_)
        each_alone = self.pressure is not None or self._expiry is not None or self._selections is not None
        if each_alone or self.predictor.is_on or self._distinct[0].has_visit:
            for i in range(len(at)):
                score = None if weights is None else weights[i : i + 1, None]
                hit[i] = len(self.access(int(at[i]), which[i : i + 1, None], score).hits)
            return hit
        keys = at * self.num_experts + which
        # Runs of consecutive accesses to the same pool.
        cuts = [0, len(at)] if len(self._distinct) == 1 else [0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), len(at)]
        for begin, end in pairwise(cuts):
            if begin < end:
                run = None if weights is None else weights[begin:end].tolist()
                hit[begin:end] = self._each(self._pools[at[begin]], keys[begin:end].tolist(), run)
        shape, size = self._table.shape, self._table.size
        hits, misses = (np.bincount(some, minlength=size).reshape(shape) for some in (keys[hit], keys[~hit]))
        self.stats.hits += hits
        self.stats.misses += misses
        self.stats.tokens += hits + misses
        self.clock += len(keys)
        for layer, last in zip(*np.unique(at[::-1], return_index=True), strict=True):
            self._last_of_layer[layer] = [int(keys[len(keys) - 1 - last])]
        self._last_batch = set(keys[-1:].tolist()) or self._last_batch
        self._notify()
        return hit

    def _each(self, pool: Eviction, keys: list[int], scores: list[float] | None) -> list[bool]:
        """Serve the accesses of `access_each` in one pool; return which were hits. The caller updates the counters."""
        touch, admit, gone, slot_of, free = pool.touch, pool.admit, pool.gone, self._slot_of, self._free_for(keys[0])
        counted, begins, frequency = pool.uses_frequency, pool.has_begin, self._frequency
        left, left_slots = self._left.append, self._left_slots.append
        answers: list[bool] = []
        answer = answers.append
        for key, score in zip(keys, repeat(1.0) if scores is None else scores, strict=False):
            if counted:
                frequency[key] += 1
            if begins:
                pool.begin()
                if gone:
                    self._drain(pool)
            if slot_of[key] >= 0:
                answer(True)
                touch(key, score)
                if gone:
                    self._drain(pool)
                continue
            answer(False)
            if not admit(key, score):
                self.stats.bypasses += 1
            elif len(gone) == 1:  # the usual case of `_drain` and `_place`
                old = gone.pop()
                slot_of[key] = slot = slot_of[old]
                slot_of[old] = -1
                left(old)
                left_slots(slot)
                continue
            else:
                self._drain(pool)
                slot_of[key] = free.pop()
            if gone:
                self._drain(pool)
        return answers
