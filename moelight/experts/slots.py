"""Slots, leases, pins and layer budgets of the expert cache, over one or more eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moelight.experts.access import CacheStats, IntArray
from moelight.experts.budgets import Selections, share_out
from moelight.experts.eviction import Eviction, EvictionContext, EvictionRules, eviction_names, make_eviction
from moelight.experts.expiry import Expiry, MemoryPressure
from moelight.experts.policy import PerLayerRules, PrefetchRules
from moelight.experts.prefetch import Prefetcher

_FEW = 12  # keys up to which a loop over them is faster than numpy


class CacheSlots:
    """Slot bookkeeping of `ExpertCache`; the arguments are documented there.

    Invariants: `slot_table` and the pools contain the same keys; a slot is free or holds exactly one key. Each evicted
    key goes through `_drain` once, and `_notify` reports it at the end of the public call that evicted it.
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
        self.predictor = predictor if isinstance(predictor, Prefetcher) else self._prefetcher(predictor)
        self.pressure, self.on_evict = pressure, on_evict
        self.per_layer = per_layer
        self.stats = CacheStats(num_layers, num_experts)
        self.clock = 0
        self._future = [(layer, [layer * num_experts + int(e) for e in ids]) for layer, ids in future]
        self._table = np.full((num_layers, num_experts), -1, np.int32)
        # The same memory by key, and as a memoryview, which is faster for single items.
        self._flat_table = self._table.reshape(-1)
        self._slot_of = self._flat_table.data
        self._free: list[int] = list(range(self.capacity))[::-1]
        self._made = self.capacity  # largest number of slots so far
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
        self._pools: list[Eviction] = []
        self._distinct: list[Eviction] = []
        self._make_pools()
        self.preload = self._preload(list(pins))

    def _prefetcher(self, strategy: str) -> Prefetcher:
        rules = PrefetchRules(strategy=strategy)
        return Prefetcher(rules, num_layers=self.num_layers, num_experts=self.num_experts)

    def _make_pools(self) -> None:
        if self.per_layer is None:
            keys = [keys for _, keys in self._future]
            self._pools = [self._make_pool(self.capacity, 0, self.num_layers, keys)] * self.num_layers
            self._distinct = self._pools[:1]
            return
        if self.per_layer.allocation == "entropy":
            self._selections = Selections(self.num_layers, self.num_experts, self.per_layer.entropy_window)
        self._pools = [
            self._make_pool(int(budget), layer, 1, [keys for at, keys in self._future if at == layer])
            for layer, budget in enumerate(self._shares(self.capacity))
        ]
        self._distinct = self._pools

    def _make_pool(self, capacity: int, layer: int, layers: int, future: Sequence[Sequence[int]]) -> Eviction:
        """Return the eviction pool of ``layers`` layers, beginning with ``layer``."""
        setting = EvictionContext(
            capacity=capacity,
            population=layers * self.num_experts,
            rules=self.rules,
            frequency=self._frequency,
            future=future,
            first=layer * self.num_experts,
            experts=self.num_experts,
        )
        pool = make_eviction(self.eviction, setting)
        pool.hold(self._leases)
        return pool

    def _preload(self, pins: list[int]) -> tuple[tuple[int, int, int], ...]:
        """Admit and pin ``pins`` in every layer; return (layer, expert, slot) of those that fit."""
        found = []
        for layer in range(self.num_layers):
            for expert in dict.fromkeys(pins):
                key, pool = layer * self.num_experts + expert, self._pools[layer]
                if expert >= self.num_experts or len(pool) >= pool.capacity:
                    continue
                pool.enter(key, 1.0)
                if pool.pin(key):
                    self._pinned[key] = None
                    found.append((layer, expert, self._place([key])[0]))
                else:
                    pool.remove(key)
        return tuple(found)

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
    def pinnable(self) -> int:
        """Number of experts that may be pinned, all layers together."""
        return sum(pool.pinnable for pool in self._distinct)

    @property
    def budgets(self) -> list[int]:
        """Slots of each layer, or one number if all layers share them."""
        return [pool.capacity for pool in self._distinct]

    def lease(self, layer: int, ids: Iterable[int]) -> None:
        """Forbid the eviction of ``ids``, resident or not yet resident, until `release`; leases add up."""
        for expert in ids:
            key = self._key(layer, expert)
            self._leases[key] = self._leases.get(key, 0) + 1

    def release(self, layer: int, ids: Iterable[int]) -> None:
        """End one lease of each of ``ids``.

        Raises:
            ValueError: an expert has no lease.
        """
        for expert in ids:
            key = self._key(layer, expert)
            left = self._leases.get(key, 0) - 1
            if left < 0:
                raise ValueError(f"layer {layer}, expert {expert}: no lease to end")
            if left:
                self._leases[key] = left
            else:
                del self._leases[key]
        self._pools[layer].flush()

    def pin(self, layer: int, expert: int) -> bool:
        """Exclude a resident expert from eviction. Return False, without a change, if it is not resident or no further
        pin is possible."""
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
        """Allow the eviction of a pinned expert again; return False if it was not pinned."""
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
        """Assign free slots to ``keys``, which are resident from now on; return the slots."""
        if not keys:
            return []
        slots = self._free[: -len(keys) - 1 : -1]
        del self._free[-len(keys) :]
        if len(keys) < _FEW:
            for key, slot in zip(keys, slots, strict=True):
                self._slot_of[key] = slot
        else:
            self._flat_table[keys] = slots
        return slots

    def _drain(self, pool: Eviction) -> None:
        """Free the slots of all keys that ``pool`` evicted."""
        gone, slot_of = pool.gone, self._slot_of
        if not gone:
            return
        if len(gone) < _FEW:
            for key in gone:
                slot = slot_of[key]
                slot_of[key] = -1
                self._free.append(slot)
                self._left_slots.append(slot)
        else:
            slots = self._flat_table[gone].tolist()
            self._flat_table[gone] = -1
            self._free += slots
            self._left_slots += slots
        self._left += gone
        if self._expiry is not None:
            for key in gone:
                self._expiry.forget(key)
        gone.clear()

    def _remove(self, key: int) -> None:
        """Evict a key for a reason outside its pool."""
        pool = self._pools[key // self.num_experts]
        pool.remove(key)
        pool.gone.append(key)
        self._drain(pool)

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
        """Evict experts until memory use is at the headroom, even below the pressure threshold. Without `pressure`, do
        nothing. Return the evicted (layer, expert), int64 [e, 2]."""
        if self.pressure is not None:
            self.stats.pressed += self._press(self.pressure.beyond_headroom(len(self)))
        return self._notify()

    def _press(self, surplus: int) -> int:
        """Evict up to ``surplus`` keys in the order of the pools, each from the fullest pool; return how many were
        evicted."""
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
            pool.flush()

    def _expire(self, expiry: Expiry) -> None:
        for key in expiry.due(self.clock, self._is_guarded):
            self._remove(key)
            self.stats.expired += 1

    def clear(self) -> IntArray:
        """Evict all experts, pinned or not; counters are kept. Return the evicted (layer, expert), int64 [e, 2].

        Raises:
            ValueError: some experts are leased.
        """
        leased = [key for key in self._leases if self._slot_of[key] >= 0]
        if leased:
            raise ValueError(f"{len(leased)} experts are leased; release them before clear()")
        for pool in self._distinct:
            for key in pool.order():
                self._remove(key)
        for key in self._pinned:
            self._remove(key)
        self._pinned.clear()
        return self._notify()

    def swap(self, eviction: str | Sequence[str] | None = None, rules: EvictionRules | None = None) -> None:
        """Replace the eviction policy or its parameters; residents, pins, leases and counters are kept. The residents
        enter the new policy in the eviction order of the old one. A pin that the new policy cannot hold ends.

        Raises:
            ConfigError: an unknown eviction.
        """
        names = self.eviction if eviction is None else eviction_names(eviction)
        if names == self.eviction:
            self.rules = rules or self.rules
            for pool in self._distinct:
                pool.retune(self.rules)
            return
        old, self.eviction, self.rules = list(self._pools), names, rules or self.rules
        counts = self.stats.hits + self.stats.misses
        self._frequency[:] = counts.reshape(-1).tolist()
        made: dict[int, Eviction] = {}
        for layer, pool in enumerate(old):
            if id(pool) not in made:
                layers = self.num_layers if self.per_layer is None else 1
                fresh = self._make_pool(pool.capacity, layer, layers, ())
                pins = [k for k in self._pinned if old[k // self.num_experts] is pool]
                residents = [*pool.order(), *pins]
                fresh.adopt(residents)
                fresh.hold(residents)  # no resident is evicted for a pin
                for key in pins:
                    if not fresh.pin(key):
                        del self._pinned[key]
                self._release([fresh])
                made[id(pool)] = fresh
            self._pools[layer] = made[id(pool)]
        self._distinct = list(made.values())

    def resize(self, capacity: int) -> IntArray:
        """Set the capacity to ``capacity`` experts. The surplus is evicted in the order of the pools; if the pins
        exceed the capacity, the latest pins end. Return the evicted (layer, expert), int64 [e, 2].

        Raises:
            ValueError: the leased experts do not fit.
            ConfigError: budgets of layers that cannot be met.
        """
        leased = {key for key in self._leases if self._slot_of[key] >= 0}
        if capacity < max(1, len(leased)):
            raise ValueError(f"{capacity=}: {len(leased)} experts are leased")
        capacity = min(capacity, self._table.size)
        self._free[:0] = range(capacity - 1, self._made - 1, -1)
        self._made = max(self._made, capacity)
        if self.per_layer is None:
            for layer, expert in self.pinned[::-1]:
                if len(leased | self._pinned.keys()) <= capacity:
                    break
                self.unpin(layer, expert)
            self._pools[0].resize(capacity)
            self._drain(self._pools[0])
        else:
            self._apply(self._shares(capacity))
        self.capacity = capacity
        return self._notify()

    def rebalance(self) -> None:
        """Redistribute the slots to the layers by the entropy of their recent accesses; only the surplus of shrinking
        layers is evicted. Without layer budgets, do nothing."""
        if self.per_layer is not None:
            self._rebalanced = self.clock
            self._apply(self._shares(self.capacity))

    def _shares(self, total: int) -> IntArray:
        """Return budgets int64 [L] that sum to ``total``. Each layer gets at least as many slots as it has experts that
        may not be evicted."""
        rules = self.per_layer
        if rules is None:
            raise ValueError("no budgets of layers")
        layers, experts = self.num_layers, self.num_experts
        least, most = (np.full(layers, min(each, experts)) for each in (rules.min_capacity, rules.max_capacity))
        for layer, pool in enumerate(self._pools):
            mine = range(layer * experts, (layer + 1) * experts)
            kept = sum(self._slot_of[key] >= 0 and self._is_guarded(key) for key in mine)
            least[layer] = max(least[layer], min(pool.capacity, kept + -(-kept // 3)))  # slru protects three of four
        weights = np.ones(layers) if self._selections is None else self._selections.entropies()
        return share_out(total, weights, least, most)

    def _apply(self, shares: IntArray) -> None:
        """Set new budgets: layers that shrink first, then layers that grow."""
        for layer in np.argsort(shares - [pool.capacity for pool in self._pools], kind="stable").tolist():
            pool = self._pools[layer]
            pool.hold(self._last_batch | self._leases.keys())
            pool.resize(int(shares[layer]))
            self._drain(pool)
        self._release(self._distinct)
