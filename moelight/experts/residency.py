"""One expert policy on one model: cache, predictor, rules, warm pins, counts and metrics. Works on keys and counters;
the caller reports every batch and performs the transfers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.paths import write_whole
from moelight.experts.adapt import AdaptRules, ExpertAdaptation, Monitor
from moelight.experts.cache import Access, ExpertCache, MemoryPressure, Prefetch
from moelight.experts.policy import (
    ACTION_KEYS,
    MODES,
    PRESSURE_THRESHOLD,
    Action,
    Capacity,
    ExpertPolicy,
    ScheduleRules,
)
from moelight.experts.predict import Floats, Ints, Mask, Prefetcher, Transitions, likeliest
from moelight.experts.profile import ActivationProfile
from moelight.experts.sizing import SlotPlan, judge_slots


def busiest_residents(counts: Ints, resident: Mask, *, per_layer: int, budget: int) -> Ints:
    """Return ``(layer, expert)`` [<= budget, 2]: the residents among the ``per_layer`` most used experts of each layer,
    the most used layers first, none of layers without accesses; ``counts``, ``resident``: [L, E]."""
    found: list[tuple[int, int]] = []
    of_layer = counts.sum(axis=1)
    for layer in np.argsort(-of_layer, kind="stable")[: np.count_nonzero(of_layer)].tolist():
        top = likeliest(counts[layer], per_layer)
        found += [(layer, expert) for expert in top[resident[layer, top]].tolist()]
    return np.array(found[: max(0, budget)], dtype=np.int64).reshape(-1, 2)


class WarmPin:
    """Pins once, after ``after`` accesses (hits and misses).

    Attributes:
        pinned: pinned (layer, expert) [n, 2], sorted by layer, then id.
        pre_hits, pre_misses: totals at the time of pinning; 0 before.
    """

    def __init__(self, after: int, *, per_layer: int | None = None, active: int | None = None) -> None:
        """``per_layer``: experts to pin in each layer (0: off); None: ``active``, the experts per token (None: one),
        and none if all experts fit."""
        if after < 1:
            raise ConfigError(f"warm_pin must be a whole number of at least 1 access, not {after}")
        if per_layer is not None and per_layer < 0:
            raise ConfigError(f"warm_pin: at least 0 experts per layer, not {per_layer}")
        self.after = after
        self._per_layer, self._active = per_layer, active
        self.fired = False
        self.pinned: Ints = np.zeros((0, 2), dtype=np.int64)
        self.pre_hits, self.pre_misses = 0, 0

    def due(self, accesses: int) -> bool:
        """True if the experts are to be pinned before the access after ``accesses``."""
        return not self.fired and accesses >= self.after

    def fire(
        self,
        hits: Ints,
        misses: Ints,
        resident: Mask,
        *,
        capacity: int,
        pinnable: int,
        pin: Callable[[int, int], bool],
    ) -> None:
        """Pin at most half of the ``capacity`` and at most ``pinnable`` experts, and record the totals before.

        ``hits``, ``misses`` and ``resident`` are [L, E]; ``pin(layer, expert)`` returns True if it could pin.
        """
        self.fired = True
        self.pre_hits, self.pre_misses = int(hits.sum()), int(misses.sum())
        each = self._per_layer
        if each is None:
            each = 0 if capacity >= hits.size else min(hits.shape[1], self._active or 1)
        chosen = busiest_residents(hits + misses, resident, per_layer=each, budget=min(capacity // 2, pinnable))
        pinned = [key for key in chosen.tolist() if pin(*key)]
        self.pinned = np.array(sorted(pinned), dtype=np.int64).reshape(-1, 2)

    def as_dict(self, hits: int, misses: int) -> dict[str, Any]:
        """Hit rates before and after pinning, for these totals, and the pinned experts of each layer."""
        before, total = self.pre_hits + self.pre_misses, hits + misses
        after = total - before
        overall = hits / total if total else 0.0
        return {
            "after": self.after,
            "fired": self.fired,
            "pre_warm_accesses": before if self.fired else total,
            "pre_warm_hit_rate": (self.pre_hits / before if before else 0.0) if self.fired else overall,
            "post_warm_accesses": after if self.fired else 0,
            "post_warm_hit_rate": (hits - self.pre_hits) / after if self.fired and after else 0.0,
            "pinned": [
                {"layer": layer, "experts": self.pinned[self.pinned[:, 0] == layer, 1].tolist()}
                for layer in np.unique(self.pinned[:, 0]).tolist()
            ],
        }


FORMAT = "moelight expert stats 1"
TOP = 3  # experts named for each layer


def _layer_stats(layer: int, hits: Ints, misses: Ints) -> dict[str, Any]:
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


def expert_stats(
    *,
    hits: Ints,
    misses: Ints,
    policy: str | None = None,
    cache: Mapping[str, Any] | None = None,
    pinned: Sequence[tuple[int, int]] = (),
    warm: WarmPin | None = None,
    prefetcher: Prefetcher | None = None,
    monitor: Monitor | None = None,
    adapting: AdaptRules | None = None,
    sizing: SlotPlan | None = None,
    stalls: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return all statistics of a run for JSON; absent parts are null, a layer without accesses carries a note.

    ``hits``, ``misses``: int64 [L, E]. ``cache``: further fields of the cache. ``pinned``: (layer, expert) of all
    pinned experts. ``stalls``: stall seconds by cause.
    """
    total_hits, total_misses = int(hits.sum()), int(misses.sum())
    accesses = total_hits + total_misses
    return {
        "format": FORMAT,
        "policy": policy,
        "overall": {
            "accesses": accesses,
            "hits": total_hits,
            "misses": total_misses,
            "hit_rate": total_hits / accesses if accesses else 0.0,
        },
        "cache": dict(cache) if cache is not None else None,
        "layers": [_layer_stats(layer, *counts) for layer, counts in enumerate(zip(hits, misses, strict=True))],
        "pinned": [{"layer": int(layer), "expert": int(expert)} for layer, expert in sorted(pinned)],
        "warm_pin": warm.as_dict(total_hits, total_misses) if warm is not None else None,
        "predictor": None
        if prefetcher is None
        else {
            "strategy": prefetcher.rules.strategy,
            "budget": prefetcher.rules.budget,
            "quality": {name: each.as_dict() for name, each in prefetcher.qualities.items() if name != "none"},
        },
        "stalls": dict(stalls) if stalls is not None else None,
        "monitor": {"now": monitor.now(), "notes": list(monitor.notes)} if monitor is not None else None,
        "adaptations": adapting.as_dict() if adapting is not None else None,
        "sizing": sizing.as_dict() if sizing is not None else None,
    }


def save_stats(stats: Mapping[str, Any], path: Path) -> None:
    """Write ``stats`` to ``path`` atomically."""
    try:
        write_whole(path, json.dumps(stats, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class MissPlacement:
    """Indices into the array of missing experts.

    Attributes:
        fetched: int64, experts to transfer, in order of transfer.
        computed: int64, experts computed where they are stored; most tokens first.
        link_s: seconds until the last transfer has arrived.
        cpu_s: seconds until the last of the other experts is computed.
    """

    fetched: Ints
    computed: Ints
    link_s: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Seconds until the layer can continue; transfers and computation overlap."""
        return max(self.link_s, self.cpu_s)


def fetch_order(tokens: Ints, *, priority_routing: bool) -> Ints:
    """Return the transfer order of missing experts: as given, or by descending ``tokens`` [n]."""
    return np.argsort(-tokens, kind="stable") if priority_routing else np.arange(len(tokens))


def place_misses(
    tokens: Ints,
    *,
    fetch_s: float,
    cpu_s: Floats,
    fixed_s: float = 0.0,
    mode: str = "gpu_only",
    offload_threshold_s: float = 0.0,
    priority_routing: bool = False,
) -> MissPlacement:
    """Choose for each missing expert to transfer it or to compute it where it is stored.

    ``hybrid`` takes the least time over all subsets: transfers cost the same each, so the experts with the highest
    computation cost are transferred, and one pass over the n + 1 splits finds the best; of equally fast splits, the one
    with the most transfers, because transferred pages may become resident.

    Args:
        tokens: int64 [n], tokens of each missing expert.
        fetch_s: seconds of one page over the link or from the disk; pages are transferred one after the other.
        cpu_s: float64 [n], seconds to compute each expert where it is stored; experts are computed one after the other.
        fixed_s: seconds that the hidden states take to the CPU and back, once, if any expert is computed there.
        mode: ``gpu_only`` transfers all, ``cpu_fallback`` none.
        offload_threshold_s: in ``hybrid``, transfers that take no longer are never avoided.
        priority_routing: the order of transfers, as in `fetch_order`.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown schedule mode {mode!r}{did_you_mean(mode, MODES)}; known: {', '.join(MODES)}")
    if tokens.shape != cpu_s.shape or tokens.ndim != 1:
        raise ValueError(f"tokens {tokens.shape} and cpu_s {cpu_s.shape} must be of one length")
    n = len(tokens)
    dearest = np.lexsort((-tokens, -cpu_s))
    if mode == "cpu_fallback":
        kept = 0
    elif mode == "gpu_only" or fetch_s <= offload_threshold_s:
        kept = n
    else:
        kept = _best_split(cpu_s[dearest], fetch_s, fixed_s)
    fetched, computed = np.sort(dearest[:kept]), dearest[kept:]
    return MissPlacement(
        fetched=fetched[fetch_order(tokens[fetched], priority_routing=priority_routing)],
        computed=computed[fetch_order(tokens[computed], priority_routing=True)],
        link_s=fetch_s * kept,
        cpu_s=fixed_s + float(cpu_s[computed].sum()) if kept < n else 0.0,
    )


def _best_split(descending_s: Floats, fetch_s: float, fixed_s: float) -> int:
    """Return how many of the most expensive experts to transfer, in [0, n]."""
    n = len(descending_s)
    computing = np.zeros(n + 1)
    computing[:n] = fixed_s + np.cumsum(descending_s[::-1])[::-1]
    seconds = np.maximum(fetch_s * np.arange(n + 1), computing)
    return n - int(np.argmin(seconds[::-1]))


Value = tuple[str, ...] | str | float | int


class Controls:
    """The components of one policy, as `adapt.Controlled`. ``schedule`` holds the current schedule rules."""

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
        return action.kind == "set" and self._key(action.name)[1]() == self._meant(action)

    def shown(self, action: Action) -> str | None:
        if action.kind != "set":
            return None
        now = self._key(action.name)[1]()
        return " | ".join(now) if isinstance(now, tuple) else f"{now}"

    def do(self, action: Action) -> None:
        if action.kind == "trigger":
            self._press()
        elif action.kind == "rebalance":
            self._cache.rebalance()
        else:
            self._set(action)

    def _set(self, action: Action) -> None:
        value = self._meant(action)
        kind, _, assign = self._key(action.name)
        if not isinstance(value, kind) or (action.name == "schedule_mode" and value not in MODES):
            raise ConfigError(f"adapt: {action.name} cannot be {value!r}{did_you_mean(str(value), MODES)}")
        assign(value)

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

    def _key(self, name: str) -> tuple[Any, Callable[[], Value], Callable[[Any], None]]:
        if name not in self._keys:
            raise ConfigError(f"adapt: unknown key {name!r}{did_you_mean(name, ACTION_KEYS)}")
        return self._keys[name]

    def _meant(self, action: Action) -> Value | None:
        """Return the value of ``action``; a capacity is in slots of all layers together."""
        if not isinstance(action.value, Capacity):
            return action.value
        cache = self._cache
        return self._policy.slots_of(action.value, cache.num_layers, cache.num_experts, self._page_bytes)

    def _press(self) -> None:
        """Enable memory pressure and evict at once down to the headroom."""
        cache, rules = self._cache, self._policy.cache
        if cache.pressure is None:
            cache.pressure = MemoryPressure(
                threshold=PRESSURE_THRESHOLD,
                headroom=min(rules.memory_headroom, PRESSURE_THRESHOLD),
                budget_gb=rules.memory_budget_gb,
                expert_gb=rules.expert_size_gb,
            )
        cache.relieve()


class Residency:
    """Components of an `ExpertPolicy` as one object.

    Attributes:
        cache: the expert cache, with the predictor of the policy.
        begin_with: int64 [n, 3], (layer, expert, slot) of the experts to load before the first batch: the pins of the
            policy, then the most used experts of ``known``, as far as they fit.
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
        known: ActivationProfile | None = None,
        counted: ActivationProfile | None = None,
        batch: int = 1,
        most_slots: int | None = None,
    ) -> None:
        """Create the components.

        Args:
            active: experts per token.
            page_bytes: size of one expert.
            known: profile of this model to start from.
            batch: tokens of a pass.
            most_slots: largest number of slots that will be allocated (None: no limit).
        """
        self.policy, self.counted = policy, counted
        self.cache = ExpertCache.of(policy, num_layers=num_layers, num_experts=num_experts, page_bytes=page_bytes)
        self._sizing: SlotPlan | None = None  # experts per token not given
        if active is not None:
            self._sizing = judge_slots(
                self.cache.capacity,
                allocated=self.cache.capacity if most_slots is None else most_slots,
                layers=num_layers,
                num_experts=num_experts,
                active=active,
                batch=batch,
            )
        self.controls = Controls(policy, self.cache, page_bytes=page_bytes, most_slots=most_slots)
        self.monitor = Monitor(policy.monitor) if policy.monitor or policy.adapt else None
        self.adapting = AdaptRules(policy.adapt, self.controls, self.monitor) if self.monitor else None
        self._evictions = 0
        after = policy.cache.warm_pin
        self.warm = WarmPin(after, active=active) if after is not None else None
        self.begin_with = np.array(self.cache.preload, dtype=np.int64).reshape(-1, 3)
        if known is None:
            return
        wanted = known.residents(self.cache.capacity if policy.per_layer is None else np.array(self.cache.budgets))
        self.begin_with = np.concatenate([self.begin_with, self.cache.fill(wanted)])
        totals = known.counts.sum(axis=1, keepdims=True)
        if active and totals.all():
            self.cache.expect(known.counts / totals * active)
        if known.transitions is not None:
            self.cache.predictor.know(known.transitions)

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
            stats, capacity = self.cache.stats, self.cache.capacity
            self.warm.fire(
                stats.hits,
                stats.misses,
                self.cache.slot_table >= 0,
                capacity=capacity,
                pinnable=capacity,  # `pin` rejects experts beyond the protected slots
                pin=self.cache.pin,
            )
        found = self.cache.access(layer, ids, scores, admit=admit, keep_out=keep_out)
        if self.counted is not None:
            distinct = np.flatnonzero(found.counts)
            self.counted.record(layer, distinct, found.counts[distinct])
        if self.adapting is not None and rules:
            # Experts evicted by prefetches since the last batch count with this batch.
            misses = len(found.misses) + len(found.kept_out)
            self.adapting.record(len(found.hits), misses, self.cache.stats.evictions - self._evictions)
            self._evictions = self.cache.stats.evictions
        return found

    def ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        return self.cache.prefetch_ahead(layer)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        self.cache.predictor.hint(layer, ids, mass)

    def place(self, tokens: Ints, *, fetch_s: float, cpu_s: Floats, fixed_s: float = 0.0) -> MissPlacement:
        """Place the missing experts of a batch as `place_misses` does, under the current schedule mode."""
        schedule = self.controls.schedule
        return place_misses(
            tokens,
            fetch_s=fetch_s,
            cpu_s=cpu_s,
            fixed_s=fixed_s,
            mode=schedule.mode,
            offload_threshold_s=schedule.offload_threshold_ms / 1e3,
            priority_routing=schedule.priority_routing,
        )

    @property
    def adaptations(self) -> list[ExpertAdaptation]:
        """The last `LOG_KEPT` adaptations."""
        return list(self.adapting.log) if self.adapting is not None else []

    @property
    def transitions(self) -> Transitions | None:
        """A copy of the learned affinities; None without an affinity predictor."""
        learned = self.cache.predictor.affinity
        return None if learned is None else Transitions(matrix=learned.matrix.copy(), times=learned.times.copy())

    def profile(self) -> ActivationProfile | None:
        """Return the counts with the learned affinities, ready to be saved."""
        if self.counted is not None:
            self.counted.transitions = self.transitions
        return self.counted

    def stats(self, stalls: Mapping[str, float] | None = None) -> dict[str, Any]:
        """All statistics of the run, as `expert_stats`."""
        said = self.cache.stats.as_dict()
        shown = ("evictions", "expired", "pressed", "bypasses", "prefetched")
        return expert_stats(
            hits=self.cache.stats.hits,
            misses=self.cache.stats.misses,
            policy=self.policy.name,
            cache={
                "eviction": " | ".join(self.cache.eviction),
                "capacity": self.cache.capacity,
                "budgets": self.cache.budgets if self.policy.per_layer is not None else None,
                "residents": len(self.cache),
                **{key: said[key] for key in shown},
            },
            pinned=self.cache.pinned,
            warm=self.warm,
            prefetcher=self.cache.predictor if self.cache.predictor.qualities.keys() != {"none"} else None,
            monitor=self.monitor,
            adapting=self.adapting,
            sizing=self._sizing,
            stalls=stalls,
        )
