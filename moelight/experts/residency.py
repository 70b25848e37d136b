"""One expert policy on one model: cache, predictor, rules, warm pins, counts and metrics.

Works on keys and counters; the caller reports every batch and performs the transfers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelight.experts.access import Access, Prefetch
from moelight.experts.adapt import AdaptRules, ExpertAdaptation
from moelight.experts.cache import ExpertCache
from moelight.experts.controls import Controls
from moelight.experts.placement import MissPlacement, place_misses
from moelight.experts.policy import ExpertPolicy
from moelight.experts.predict import Floats, Ints, Transitions
from moelight.experts.profile import ActivationProfile
from moelight.experts.sizing import SlotPlan, judge_slots
from moelight.experts.stats import expert_stats
from moelight.experts.warm import WarmPin
from moelight.experts.windowed_stats import Monitor


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

        Raises:
            ConfigError: the policy cannot be applied to this model, or uses something that is not implemented.
        """
        self.policy, self.counted, self._active = policy, counted, active
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
        if known is not None:
            self._start_from(known)

    def _start_from(self, known: ActivationProfile) -> None:
        """Take residents, use rates and affinities from ``known``."""
        layers = self.policy.per_layer
        wanted = known.residents(self.cache.capacity if layers is None else np.array(self.cache.budgets))
        self.begin_with = np.concatenate([self.begin_with, self.cache.fill(wanted)])
        counts = known.counts
        totals = counts.sum(axis=1, keepdims=True)
        if self._active and totals.all():
            self.cache.expect(counts / totals * self._active)
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
            self._warm_pin(self.warm)
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
        """Prefetch after ``layer`` was served, as `ExpertCache.prefetch_ahead`."""
        return self.cache.prefetch_ahead(layer)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """As `predict.Predictor.hint`."""
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
        """The most recent adaptations."""
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
        """Return all statistics of the run, as `expert_stats`."""
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

    def _warm_pin(self, warm: WarmPin) -> None:
        stats, cache = self.cache.stats, self.cache
        warm.fire(
            stats.hits,
            stats.misses,
            cache.slot_table >= 0,
            capacity=cache.capacity,
            pinnable=cache.capacity,  # `pin` rejects experts beyond the protected slots
            pin=cache.pin,
        )
