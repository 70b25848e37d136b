"""One policy at work on one model: cache, predictor, rules, warm pins, counts and figures, wired to each other.

Knows keys and counters; whoever moves pages tells it of every batch and does what it answers.
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
from moelight.experts.predict import Floats, Ints, TransitionPredictor
from moelight.experts.profile import ActivationProfile
from moelight.experts.sizing import SlotPlan, judge_slots
from moelight.experts.stats import expert_stats
from moelight.experts.warm import WarmPin
from moelight.experts.windowed_stats import Monitor


class Residency:
    """What `ExpertPolicy` ``policy`` asks for, as one object.

    Attributes:
        cache: who is resident. Its predictor is the policy's.
        begin_with: int64 [n, 3], (layer, expert, slot) of all who are to be brought in before the first batch: the
            policy's pins, then as far as there is room the busiest of ``known``.
        counted: what this run counts into; None: nothing.
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
        """``active``: experts that a token chooses; ``known``: a profile of this model to begin with; ``page_bytes``:
        of one expert; ``batch``: tokens of a pass; ``most_slots``: that will ever be allocated (None: no limit).

        Raises:
            ConfigError: the policy cannot be followed on this model, or says something that is not implemented.
        """
        self.policy, self.counted, self._active = policy, counted, active
        self.cache = ExpertCache.of(policy, num_layers=num_layers, num_experts=num_experts, page_bytes=page_bytes)
        self._sizing: SlotPlan | None = None  # nobody says what a token needs
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
        """Residents and affinities that ``known`` has."""
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
        """Serve one batch, as `ExpertCache.access`; then count it, and do what ``rules`` and warm-pinning call for."""
        if self.warm is not None and self.warm.due(self.cache.clock):
            self._warm_pin(self.warm)
        found = self.cache.access(layer, ids, scores, admit=admit, keep_out=keep_out)
        if self.counted is not None:
            distinct = np.flatnonzero(found.counts)
            self.counted.record(layer, distinct, found.counts[distinct])
        if self.adapting is not None and rules:
            # Those who left for guesses since the last batch count with this one.
            misses = len(found.misses) + len(found.kept_out)
            self.adapting.record(len(found.hits), misses, self.cache.stats.evictions - self._evictions)
            self._evictions = self.cache.stats.evictions
        return found

    def ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        """What to fetch ahead now that ``layer`` has been served, as `ExpertCache.prefetch_ahead`."""
        return self.cache.prefetch_ahead(layer)

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """As `predict.Predictor.hint`."""
        self.cache.predictor.hint(layer, ids, mass)

    def place(self, tokens: Ints, *, fetch_s: float, cpu_s: Floats, fixed_s: float = 0.0) -> MissPlacement:
        """Where the missing experts of a batch are computed, as `place_misses` under the mode that is in force."""
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
        """The last ones."""
        return list(self.adapting.log) if self.adapting is not None else []

    @property
    def transitions(self) -> TransitionPredictor | None:
        """The affinities learned so far, a copy; None where nobody learns them."""
        learned = self.cache.predictor.affinity
        return (
            None if learned is None else TransitionPredictor(matrix=learned.matrix.copy(), times=learned.times.copy())
        )

    def profile(self) -> ActivationProfile | None:
        """What was counted, with the affinities learned, ready to be saved."""
        if self.counted is not None:
            self.counted.transitions = self.transitions
        return self.counted

    def stats(self, stalls: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Everything that is known of the run, as `expert_stats`."""
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
            pinnable=cache.capacity,  # `pin` refuses what has no room among the protected
            pin=cache.pin,
        )
