"""One expert policy on one model: cache, predictor, rules, warm pins, counts and metrics. Works on keys and counters;
the caller reports every batch and performs the transfers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.adapt import AdaptRules, Monitor
from moelight.experts.cache import COUNTERS, Access, ExpertCache, MemoryPressure, Prefetch, SlotKinds
from moelight.experts.eviction import FloatArray, IntArray
from moelight.experts.policy import MODES, PRESSURE_THRESHOLD, Action, Capacity, ExpertPolicy, ScheduleRules
from moelight.experts.predict import Transitions, likeliest
from moelight.experts.profile import ActivationProfile
from moelight.experts.sizing import SlotPlan, plan_slots


class WarmPin:
    """Pins once, after ``after`` accesses (hits and misses), in each layer at most ``active`` experts, as many as a
    token chooses (None: one).

    Attributes:
        pinned: pinned (layer, expert) [n, 2], sorted by layer, then id.
        pre_hits, pre_misses: totals at the time of pinning; 0 before.
    """

    def __init__(self, after: int, *, active: int | None = None) -> None:
        if after < 1:
            raise ConfigError(f"warm_pin must be a whole number of at least 1 access, not {after}")
        self.after, self._active = after, active or 1
        self.fired = False
        self.pinned: IntArray = np.zeros((0, 2), dtype=np.int64)
        self.pre_hits, self.pre_misses = 0, 0

    def due(self, accesses: int) -> bool:
        """True if the experts are to be pinned before the access after ``accesses``."""
        return not self.fired and accesses >= self.after

    def fire(self, cache: ExpertCache) -> None:
        """Pin the residents among the most used experts of each layer, the most used layers first, none of layers
        without accesses; at most half of the capacity, and none if all experts fit."""
        hits, misses, resident = cache.stats.hits, cache.stats.misses, cache.slot_table >= 0
        self.fired, self.pre_hits, self.pre_misses = True, int(hits.sum()), int(misses.sum())
        counts = hits + misses
        chosen = [
            (layer, expert)
            for layer in likeliest(counts.sum(axis=1), len(counts)).tolist()
            for expert in likeliest(counts[layer], self._active).tolist()
            if resident[layer, expert]
        ]
        room = cache.capacity // 2 if cache.capacity < counts.size else 0
        pinned = sorted(key for key in chosen[:room] if cache.pin(*key))
        self.pinned = np.array(pinned, dtype=np.int64).reshape(-1, 2)

    def as_dict(self, hits: int, misses: int) -> dict[str, Any]:
        """Hit rates before and after pinning, for these totals, and the pinned experts of each layer."""
        hits_before, before = (self.pre_hits, self.pre_hits + self.pre_misses) if self.fired else (hits, hits + misses)
        after = hits + misses - before
        return {
            "after": self.after,
            "fired": self.fired,
            "pre_warm_accesses": before,
            "pre_warm_hit_rate": hits_before / before if before else 0.0,
            "post_warm_accesses": after,
            "post_warm_hit_rate": (hits - hits_before) / after if after else 0.0,
            "pinned": [
                {"layer": layer, "experts": self.pinned[self.pinned[:, 0] == layer, 1].tolist()}
                for layer in np.unique(self.pinned[:, 0]).tolist()
            ],
        }


FORMAT = "moelight expert stats 1"
TOP = 3  # experts named for each layer


def _layer_stats(layer: int, hits: IntArray, misses: IntArray) -> dict[str, Any]:
    counts = hits + misses
    accesses = int(counts.sum())
    if accesses == 0:
        return {"layer": layer, "accesses": 0, "hit_rate": None, "note": "no accesses"}
    top = likeliest(counts, TOP)
    return {
        "layer": layer,
        "accesses": accesses,
        "hits": int(hits.sum()),
        "misses": int(misses.sum()),
        "hit_rate": float(hits.sum() / accesses),
        "distinct": int((counts > 0).sum()),
        "top": [{"expert": int(expert), "accesses": int(counts[expert])} for expert in top],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MissPlacement:
    """Indices into the array of missing experts.

    Attributes:
        fetched: int64, experts to transfer, in order of transfer.
        computed: int64, experts computed where they are stored; most tokens first.
        link_s: seconds until the last transfer has arrived.
        cpu_s: seconds until the last of the other experts is computed.
    """

    fetched: IntArray
    computed: IntArray
    link_s: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Seconds until the layer can continue; transfers and computation overlap."""
        return max(self.link_s, self.cpu_s)


def place_misses(
    tokens: IntArray, schedule: ScheduleRules, *, fetch_s: float, cpu_s: FloatArray, fixed_s: float = 0.0
) -> MissPlacement:
    """Choose for each missing expert to transfer it or to compute it where it is stored.

    ``gpu_only`` transfers all, ``cpu_fallback`` none. ``hybrid`` takes the least time over all subsets: transfers cost
    the same each, so the experts with the highest computation cost are transferred, and one pass over the n + 1 splits
    finds the best; of equally fast splits, the one with the most transfers, because transferred pages may become
    resident. Transfers are made in the order of ``tokens``' items, with ``priority_routing`` by descending tokens.

    Args:
        tokens: int64 [n], tokens of each missing expert.
        fetch_s: seconds of one page over the link or from the disk; pages are transferred one after the other.
        cpu_s: float64 [n], seconds to compute each expert where it is stored; experts are computed one after the other.
        fixed_s: seconds that the hidden states take to the CPU and back, once, if any expert is computed there.
    """
    mode, n = schedule.mode, len(tokens)
    if mode not in MODES:
        raise ConfigError(f"unknown schedule mode {mode!r}{did_you_mean(mode, MODES)}; known: {', '.join(MODES)}")
    if tokens.shape != cpu_s.shape or tokens.ndim != 1:
        raise ValueError(f"tokens {tokens.shape} and cpu_s {cpu_s.shape} must be of one length")
    dearest = np.lexsort((-tokens, -cpu_s))
    if mode == "cpu_fallback":
        split = 0
    elif mode == "gpu_only" or fetch_s <= schedule.offload_threshold_ms / 1e3:
        split = n
    else:
        split = _best_split(cpu_s[dearest], fetch_s, fixed_s)
    fetched, computed = np.sort(dearest[:split]), dearest[split:]
    if schedule.priority_routing:
        fetched = fetched[np.argsort(-tokens[fetched], kind="stable")]
    return MissPlacement(
        fetched=fetched,
        computed=computed[np.argsort(-tokens[computed], kind="stable")],
        link_s=fetch_s * split,
        cpu_s=fixed_s + float(cpu_s[computed].sum()) if split < n else 0.0,
    )


def _best_split(descending_s: FloatArray, fetch_s: float, fixed_s: float) -> int:
    """Return how many of the most expensive experts to transfer, in [0, n]."""
    n = len(descending_s)
    computing = np.zeros(n + 1)
    computing[:n] = fixed_s + np.cumsum(descending_s[::-1])[::-1]
    seconds = np.maximum(fetch_s * np.arange(n + 1), computing)
    return n - int(np.argmin(seconds[::-1]))


Value = tuple[str, ...] | str | float | int


class Controls:
    """The state that the rules of one policy may change; contents and statistics of the cache survive every action.
    ``schedule`` holds the current schedule rules."""

    def __init__(
        self, policy: ExpertPolicy, cache: ExpertCache, *, page_bytes: int | None = None, most_slots: int | None = None
    ) -> None:
        """``page_bytes`` of one expert, for capacities in bytes; ``most_slots``: allocated slots (None: no limit)."""
        self.schedule: ScheduleRules = policy.schedule
        self._policy, self._cache = policy, cache
        self._page_bytes, self._most_slots = page_bytes, most_slots
        # Kind of a value, the value now, and its setter.
        self._keys: Mapping[str, tuple[Any, Callable[[], Value], Callable[[Any], None]]] = {
            "eviction": (tuple, lambda: cache.eviction, cache.swap),
            "capacity": (int, lambda: cache.capacity, self._resize),
            "frequency_decay": (int | float, lambda: cache.rules.decay, self._swap_decay),
            "prefetch_strategy": (str, lambda: cache.predictor.rules.strategy, cache.predictor.use),
            "prefetch_budget": (int, lambda: cache.predictor.rules.budget, cache.predictor.allow),
            "schedule_mode": (str, lambda: self.schedule.mode, self._use_mode),
        }

    def in_force(self, action: Action) -> bool:
        """True if ``action`` sets the current value, or relieves watched memory pressure and would evict no page."""
        if action.kind == "trigger":
            return self._cache.pressure is not None and not self._cache.relief
        return action.kind == "set" and self._keys[action.name][1]() == self._meant(action)

    def shown(self, action: Action) -> str | None:
        """Return the current value of the key of ``action``, in the syntax of the language; None for a trigger."""
        if action.kind != "set":
            return None
        now = self._keys[action.name][1]()
        return " | ".join(now) if isinstance(now, tuple) else f"{now}"

    def do(self, action: Action) -> None:
        """Execute ``action``; raises UserError if it is not possible, and nothing has changed then."""
        if action.kind == "trigger":
            self._press()
        elif action.kind == "rebalance":
            self._cache.rebalance()
        else:
            value, (kind, _, assign) = self._meant(action), self._keys[action.name]
            if not isinstance(value, kind) or (action.name == "schedule_mode" and value not in MODES):
                raise ConfigError(f"adapt: {action.name} cannot be {value!r}{did_you_mean(str(value), MODES)}")
            assign(value)

    def _meant(self, action: Action) -> Value | None:
        """Return the value of ``action``; a capacity is in slots of all layers together."""
        if not isinstance(action.value, Capacity):
            return action.value
        cache = self._cache
        return self._policy.slots_of(action.value, cache.num_layers, cache.num_experts, self._page_bytes)

    def _swap_decay(self, decay: float) -> None:
        self._cache.swap(rules=replace(self._cache.rules, decay=float(decay)))

    def _use_mode(self, mode: str) -> None:
        self.schedule = replace(self.schedule, mode=mode)

    def _resize(self, slots: int) -> None:
        if self._most_slots is not None and slots > self._most_slots:
            raise ConfigError(f"capacity: {slots} slots were asked for, but only {self._most_slots} are allocated")
        try:
            self._cache.resize(slots)
        except ValueError as error:
            raise ConfigError(f"capacity: {slots} slots are not possible now ({error})") from None

    def _press(self) -> None:
        """Enable memory pressure and evict at once down to the headroom."""
        if self._cache.pressure is None:
            rules = self._policy.cache
            headroom = min(rules.memory_headroom, PRESSURE_THRESHOLD)
            self._cache.pressure = MemoryPressure.of(replace(rules, memory_headroom=headroom), PRESSURE_THRESHOLD)
        self._cache.relieve()


class Residency:
    """Components of an `ExpertPolicy` as one object.

    Attributes:
        cache: the expert cache, with the predictor of the policy.
        begin_with: int64 [n, 3], (layer, expert, slot) of the experts to load before the first batch: the pins of the
            policy, then the most used experts of ``profile``, as far as they fit.
        counted: profile into which this run counts; None: nothing is counted.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        *,
        num_layers: int,
        num_experts: int,
        active: int | None = None,
        page_bytes: int | None = None,
        profile: ActivationProfile | None = None,
        counted: ActivationProfile | None = None,
        batch: int = 1,
        most_slots: int | None = None,
        kinds: SlotKinds | None = None,
    ) -> None:
        """Create the components.

        Args:
            active: experts per token.
            page_bytes: size of one expert.
            profile: profile of this model to start from.
            batch: tokens of a pass.
            most_slots: largest number of slots that will be allocated (None: no limit).
            kinds: of layers and their slots; None: any expert fits any slot.
        """
        self.policy, self.counted = policy, counted
        self.cache = ExpertCache.of(
            policy, num_layers=num_layers, num_experts=num_experts, page_bytes=page_bytes, kinds=kinds
        )
        self._sizing: SlotPlan | None = None  # experts per token not given
        if active is not None:
            slots = self.cache.capacity
            plan = plan_slots(
                layers=num_layers,
                num_experts=num_experts,
                active=active,
                free_bytes=slots if most_slots is None else most_slots,
                per_expert_bytes=1,
                reserve_bytes=0,
                batch=batch,
            )
            self._sizing = replace(plan, slots=min(slots, plan.slots))
        self.controls = Controls(policy, self.cache, page_bytes=page_bytes, most_slots=most_slots)
        self.monitor = Monitor(policy.monitor) if policy.monitor or policy.adapt else None
        self.adapting = AdaptRules(policy.adapt, self.controls, self.monitor) if self.monitor else None
        self._evictions = 0
        after = policy.cache.warm_pin
        self.warm = WarmPin(after, active=active) if after is not None else None
        self.begin_with = np.array(self.cache.preload, dtype=np.int64).reshape(-1, 3)
        if profile is None:
            return
        max_residents = self.cache.capacity if kinds is None else num_layers * num_experts
        wanted = profile.residents(max_residents if policy.per_layer is None else np.array(self.cache.budgets))
        self.begin_with = np.concatenate([self.begin_with, self.cache.fill(wanted)])
        totals = profile.counts.sum(axis=1, keepdims=True)
        if active and totals.all():
            self.cache.expect(profile.counts / totals * active)
        if profile.transitions is not None:
            self.cache.predictor.know(profile.transitions)

    def access(
        self,
        layer: int,
        ids: ArrayLike,
        scores: ArrayLike | None = None,
        *,
        admit: bool = True,
        keep_out: Collection[int] = (),
        rules: bool = True,
    ) -> Access:
        """Serve one batch as `ExpertCache.access`, count it, and apply the adaptation ``rules`` and warm-pinning."""
        if self.warm is not None and self.warm.due(self.cache.clock):
            self.warm.fire(self.cache)
        outcome = self.cache.access(layer, ids, scores, admit=admit, keep_out=keep_out)
        if self.counted is not None:
            distinct = np.flatnonzero(outcome.counts)
            self.counted.record(layer, distinct, outcome.counts[distinct])
        if self.adapting is not None and rules:
            # Experts evicted by prefetches since the last batch count with this batch.
            misses = len(outcome.misses) + len(outcome.kept_out)
            self.adapting.record(len(outcome.hits), misses, self.cache.stats.evictions - self._evictions)
            self._evictions = self.cache.stats.evictions
        return outcome

    def ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        return self.cache.prefetch_ahead(layer)

    def hint(self, layer: int, ids: IntArray, mass: FloatArray) -> None:
        self.cache.predictor.hint(layer, ids, mass)

    def place_missing(
        self, tokens: IntArray, *, fetch_s: float, cpu_s: FloatArray, fixed_s: float = 0.0
    ) -> MissPlacement:
        """Place the missing experts of a batch by `place_misses`, under the current schedule rules."""
        return place_misses(tokens, self.controls.schedule, fetch_s=fetch_s, cpu_s=cpu_s, fixed_s=fixed_s)

    @property
    def transitions(self) -> Transitions | None:
        """A copy of the learned affinities; None without an affinity predictor."""
        learned = self.cache.predictor.affinity
        return None if learned is None else Transitions(matrix=learned.matrix.copy(), times=learned.times.copy())

    def stats(self, stalls: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return all statistics of the run for JSON, with the ``stalls`` in seconds by cause; absent parts are null, a
        layer without accesses carries a note."""
        cache, counters, predictor = self.cache, self.cache.stats, self.cache.predictor
        hits, misses = int(counters.hits.sum()), int(counters.misses.sum())
        qualities = {name: quality.as_dict() for name, quality in predictor.qualities.items() if name != "none"}
        predicted = {"strategy": predictor.rules.strategy, "budget": predictor.rules.budget, "quality": qualities}
        of_layers = zip(counters.hits, counters.misses, strict=True)
        return {
            "format": FORMAT,
            "policy": self.policy.name,
            "overall": {"accesses": hits + misses, "hits": hits, "misses": misses, "hit_rate": counters.hit_rate},
            "cache": {
                "eviction": " | ".join(cache.eviction),
                "capacity": cache.capacity,
                "budgets": cache.budgets if self.policy.per_layer is not None else None,
                "residents": len(cache),
                **{name: getattr(counters, name) for name in COUNTERS},
            },
            "layers": [_layer_stats(layer, *counts) for layer, counts in enumerate(of_layers)],
            "pinned": [{"layer": layer, "expert": expert} for layer, expert in sorted(cache.pinned)],
            "warm_pin": self.warm.as_dict(hits, misses) if self.warm is not None else None,
            "predictor": predicted if qualities else None,
            "stalls": dict(stalls) if stalls is not None else None,
            "monitor": self.monitor.as_dict() if self.monitor is not None else None,
            "adaptations": self.adapting.as_dict() if self.adapting is not None else None,
            "sizing": self._sizing.as_dict() if self._sizing is not None else None,
        }
