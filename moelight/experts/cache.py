"""Expert cache: slots, leases, pins and counters over an eviction policy.

The cache decides and counts; it holds and moves no bytes. The caller learns which experts were evicted
(`ExpertCache.on_evict`, `Access.evictions`) and which pages to transfer to which slots (`Access.slots`,
`Prefetch.slots`, `ExpertCache.preload`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import compress, pairwise, repeat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moelight.experts.access import Access, IntArray, Prefetch
from moelight.experts.batches import flat_ids, mass_of
from moelight.experts.eviction import Eviction, EvictionRules
from moelight.experts.expiry import MemoryPressure
from moelight.experts.policy import ExpertPolicy
from moelight.experts.prefetch import Prefetcher
from moelight.experts.slots import CacheSlots

_MANY = 16  # routed tokens per expert from which their count ranks experts as well as summed weights do


class ExpertCache(CacheSlots):
    """Slots for ``capacity`` experts of ``num_layers`` x ``num_experts``, all layers together.

    The distinct ids of a batch are served one after the other, first the resident ones, then the missing ones, each in
    ascending order; no expert of a batch is evicted for another one of it. With two evictions, the residents of the
    first are served before those of the second. A miss that is not admitted is a bypass.

    Args:
        eviction: a name of `EVICTIONS`, two (``("lfu", "lru")`` or ``"lfu | lru"``), or ``fallback``.
        rules: parameters of the evictions.
        predictor: a name of `STRATEGIES` or a `Prefetcher`; observes every batch, queried by `prefetch_ahead`.
        per_layer: each layer has a budget of its own, together ``capacity``.
        pins: experts to pin in every layer, as far as they fit (`preload`).
        ttl: accesses after which an expert without an access is evicted.
        pressure: threshold and headroom of memory pressure.
        future: ``(layer, ids)`` of each coming batch, for ``belady``.
        on_evict: called with (layer, expert, slot) once for each evicted expert, whatever the cause, when the cache is
            consistent again.

    Slots are numbers from 0, below the largest capacity the cache has had.

    Raises:
        ConfigError: an unknown eviction, or budgets that cannot be met.
        ValueError: no slots, layers or experts.
    """

    def access(
        self,
        layer: int,
        ids: ArrayLike,
        scores: ArrayLike | None = None,
        *,
        admit: bool = True,
        keep_out: Collection[int] = (),
    ) -> Access:
        """Serve one batch.

        Args:
            ids: integers [tokens, k]; ``scores`` [tokens, k]: their router weights (None: all 1).
            admit: False: count the batch and refresh its hits, but admit nothing; for passes over whole layers.
            keep_out: experts that are counted like the others, but not admitted if they miss.

        Raises:
            ValueError: ids or scores of a wrong kind, shape or range.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is none of {self.num_layers}")
        flat = flat_ids(ids, self.num_experts)
        counts = np.bincount(flat, minlength=self.num_experts)
        pool, base = self._pools[layer], layer * self.num_experts
        mass = None
        few = flat.size <= _MANY * self.num_experts
        if scores is not None and (pool.uses_scores or (few and self.predictor.is_on)):
            mass = mass_of(scores, flat, np.shape(ids), self.num_experts)
        distinct = counts.nonzero()[0]
        if pool.has_begin:
            pool.begin()
            self._drain(pool)
        if pool.has_visit:
            pool.visit(base, counts > 0)
        before = self._table[layer][distinct]
        found = before >= 0
        hits, missing = distinct[found], distinct[~found]
        keys = (distinct + base).tolist()
        held = set(keys)
        pool.hold(held | self._leases.keys() if self._leases else held)
        if pool.uses_frequency:
            for key in keys:
                self._frequency[key] += 1
        means = mass[distinct] / counts[distinct] if mass is not None and pool.uses_scores else np.ones(len(distinct))
        self._touch(pool, (hits + base).tolist(), means[found].tolist())
        misses, scored, kept_out = missing, means[~found], missing[:0]
        if keep_out:
            out = np.isin(missing, list(keep_out))
            misses, scored, kept_out = missing[~out], scored[~out], missing[out]
            self._pass_by(pool, (kept_out + base).tolist())
        slots = self._bring(pool, (misses + base).tolist(), scored.tolist(), admit) if len(misses) else []
        self._count(layer, hits, missing, counts)
        self._last_batch = held
        self._last_of_layer[layer] = keys
        self._after(layer, distinct)
        pool.hold(self._leases)
        pool.flush()
        if self.predictor.is_on:
            self.predictor.observe(layer, distinct, counts[distinct], None if mass is None else mass[distinct])
        return Access(
            layer=layer,
            hits=hits,
            hit_slots=before[found].astype(np.int64),
            misses=misses,
            slots=np.array(slots, np.int64),
            kept_out=kept_out,
            evictions=self._notify(),
            counts=counts,
        )

    def _touch(self, pool: Eviction, keys: list[int], scores: list[float]) -> None:
        if keys:
            pool.touch_all(keys, scores)
        if pool.gone:
            self._drain(pool)

    def _bring(self, pool: Eviction, keys: list[int], scores: list[float], admit: bool) -> list[int]:
        """Return the slot of each missing key, -1 for a bypass. Slots are assigned after all evictions."""
        if not admit:
            self._pass_by(pool, keys)
            return [-1] * len(keys)
        brought = pool.admit_all(keys, scores)
        self._drain(pool)
        if all(brought):
            return self._place(keys)
        placed = iter(self._place(list(compress(keys, brought))))
        self.stats.bypasses += brought.count(False)
        return [next(placed) if there else -1 for there in brought]

    def _pass_by(self, pool: Eviction, keys: list[int]) -> None:
        """Count missing keys that are not admitted."""
        for key in keys:
            pool.note(key)
        self._drain(pool)
        self.stats.bypasses += len(keys)

    def _count(self, layer: int, hits: IntArray, misses: IntArray, counts: IntArray) -> None:
        stats = self.stats
        stats.hits[layer][hits] += 1
        stats.misses[layer][misses] += 1
        stats.tokens[layer] += counts
        self.clock += len(hits) + len(misses)

    def _after(self, layer: int, distinct: IntArray) -> None:
        """Apply memory pressure, time to live and rebalancing after a batch. None of them evicts an expert of the
        batch."""
        if self.pressure is not None and (surplus := self.pressure.surplus(len(self))):
            self.stats.pressed += self._press(surplus)
        if self._expiry is not None:
            base = layer * self.num_experts
            self._expiry.touch((k for k in (distinct + base).tolist() if self._slot_of[k] >= 0), self.clock)
            self._expire(self._expiry)
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
        """Admit those of ``ids`` that are not resident, in that order, as far as slots allow. Not an access: no expert
        that is leased, pinned, used by the last batch (of any layer or of this one) or just prefetched is evicted for
        it.

        Raises:
            ValueError: an id out of range.
        """
        pool = self._pools[layer]
        held = self._last_batch | set(self._last_of_layer[layer]) | self._leases.keys()
        pool.hold(held)
        found, slots = [], []
        for expert in ids:
            key = self._key(layer, expert)
            if self._slot_of[key] >= 0:
                continue
            brought = pool.admit(key, 1.0, asked=False)
            self._drain(pool)
            if brought:
                held.add(key)
                found.append(int(expert))
                slots += self._place([key])
        self._release([pool])
        if self._expiry is not None:
            self._expiry.touch((layer * self.num_experts + expert for expert in found), self.clock)
        self.stats.prefetched += len(found)
        return Prefetch(np.array(found, np.int64), np.array(slots, np.int64), self._notify())

    def fill(self, keys: ArrayLike) -> IntArray:
        """Admit ``keys``, (layer, expert) int [n, 2], highest priority first, into free slots only; not an access. They
        enter at the end of the eviction order, the first key last of all. Return (layer, expert, slot) of the admitted
        keys, int64 [m, 3].

        Raises:
            ValueError: an expert out of range.
        """
        found = []
        chosen: dict[int, list[int]] = {id(pool): [] for pool in self._distinct}
        for layer, expert in np.asarray(keys, np.int64).reshape(-1, 2).tolist():
            key, pool = self._key(layer, expert), self._pools[layer]
            wanted = chosen[id(pool)]
            if self._slot_of[key] < 0 and len(pool) + len(wanted) < pool.capacity:
                wanted.append(key)
                found.append((layer, expert, self._place([key])[0]))
        for pool in self._distinct:
            wanted = chosen[id(pool)]
            pool.adopt(wanted[::-1])
            if self._expiry is not None:
                self._expiry.touch(wanted, self.clock)
        return np.array(found, np.int64).reshape(-1, 3)

    def prefetch_ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        """Prefetch what the predictor expects of coming layers after ``layer`` was served; return (layer, `Prefetch`)
        pairs of the layers for which something was admitted."""
        if not self.predictor.is_on:
            return []
        predictions = self.predictor.ahead(layer, self._table >= 0)
        found = [(at, self.prefetch(at, ids.tolist())) for at, ids in predictions]
        return [(at, brought) for at, brought in found if brought.ids.size]

    # ---- made from a policy

    @classmethod
    def of(
        cls, policy: ExpertPolicy, *, num_layers: int, num_experts: int, page_bytes: int | None = None
    ) -> ExpertCache:
        """Return the cache that ``policy`` describes, on a model with experts of ``page_bytes`` each.

        Raises:
            ConfigError: a capacity in bytes without ``page_bytes``, or budgets of layers that cannot be met.
        """
        rules = policy.cache
        pressure = None
        if rules.memory_threshold is not None:
            pressure = MemoryPressure(
                threshold=rules.memory_threshold,
                headroom=rules.memory_headroom,
                budget_gb=rules.memory_budget_gb,
                expert_gb=rules.expert_size_gb,
            )
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
            pins=rules.pin,
            ttl=rules.ttl,
            pressure=pressure,
        )

    def expect(self, shares: ArrayLike) -> None:
        """Set prior use rates from a profile: the share of a layer's visits that use each expert, [L, E]. Only
        ``reuse`` uses them, until it has observed enough visits.

        Raises:
            ValueError: another shape.
        """
        given = np.asarray(shares, np.float64)
        if given.shape != self._table.shape:
            raise ValueError(f"shares: expected {list(self._table.shape)}, not {list(given.shape)}")
        for layer, row in enumerate(given):
            self._pools[layer].expect(layer * self.num_experts, row)

    # ---- many accesses of one id

    def access_each(self, layers: ArrayLike, experts: ArrayLike, scores: ArrayLike | None = None) -> NDArray[np.bool_]:
        """Equivalent to one `access` per id, in order: ``experts`` [n] of ``layers`` [n], with ``scores`` [n]. Return
        True for each hit, bool [n]. `on_evict` is called for all evicted experts at the end, in order.

        Raises:
            ValueError: shapes that differ, or a layer or expert out of range.
        """
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
        cuts = [0, len(at)] if self.per_layer is None else [0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), len(at)]
        for begin, end in pairwise(cuts):
            if begin < end:
                run = None if weights is None else weights[begin:end].tolist()
                hit[begin:end] = self._each(self._pools[at[begin]], keys[begin:end].tolist(), run)
        self._count_each(at, keys, hit)
        self._notify()
        return hit

    def _each(self, pool: Eviction, keys: list[int], scores: list[float] | None) -> list[bool]:
        """Serve the accesses of `access_each` in one pool; return which were hits. Counters are updated by the
        caller."""
        touch, admit, gone, slot_of, free = pool.touch, pool.admit, pool.gone, self._slot_of, self._free
        counted, begins, frequency = pool.uses_frequency, pool.has_begin, self._frequency
        left, left_slots = self._left.append, self._left_slots.append
        found: list[bool] = []
        answer = found.append
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
        return found

    def _count_each(self, layers: IntArray, keys: IntArray, hit: NDArray[np.bool_]) -> None:
        stats, size = self.stats, self._table.size
        hits = np.bincount(keys[hit], minlength=size).reshape(self._table.shape)
        misses = np.bincount(keys[~hit], minlength=size).reshape(self._table.shape)
        stats.hits += hits
        stats.misses += misses
        stats.tokens += hits + misses
        self.clock += len(keys)
        for layer, at in zip(*np.unique(layers[::-1], return_index=True), strict=True):
            self._last_of_layer[layer] = [int(keys[len(keys) - 1 - at])]
        if len(keys):
            self._last_batch = {int(keys[-1])}
