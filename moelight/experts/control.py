"""A policy at work: its cache, its predictor, its pins and profile, and its rules that change them while they run.

Knows what belongs together and in which order; each part knows how. Refuses to know pages: whoever moves them asks
before a layer's batch is computed (`access`, then `ahead`) and says when it is done (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelight.core.errors import ConfigError
from moelight.experts.access import Access, Prefetch
from moelight.experts.adapt import Adapting
from moelight.experts.cache import ExpertCache
from moelight.experts.monitor import Monitor
from moelight.experts.policy import Action, Capacity, ExpertPolicy
from moelight.experts.predict import Floats, Ints
from moelight.experts.prefetch import Prefetcher
from moelight.experts.profile import ActivationProfile, Facts
from moelight.experts.profile_files import load_profile
from moelight.experts.stats import expert_stats
from moelight.experts.triggers import MemoryPressure
from moelight.experts.warm import WarmPin


class ExpertControl:
    """What ``policy`` asks for on a model of ``num_layers`` x ``num_experts`` experts of ``page_bytes`` each.

    Attributes:
        cache, prefetcher, monitor, adapting: the parts.
        warm: None where the policy pins nothing. profile: what it begins with, or None.
        mode: where a missing expert is computed, as the rules last said.
        most_slots: the largest capacity that the policy or any of its rules can ask for.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        *,
        num_layers: int,
        num_experts: int,
        page_bytes: int | None = None,
        active: int | None = None,
        model: Facts | None = None,
    ) -> None:
        """``active``: experts of a token, if known. ``model``: the facts that a profile's fingerprint is made of.

        Raises:
            ConfigError: the policy does not fit the model, or its profile is of another one.
        """
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        self.policy, self._page_bytes = policy, page_bytes
        self.cache = ExpertCache.of(policy, page_bytes=page_bytes, **shape)
        self.prefetcher = Prefetcher(policy.prefetch, **shape)
        self.cache.predictor = self.prefetcher
        self.monitor, self.mode = Monitor(policy.monitor), policy.schedule.mode
        self.adapting = Adapting(policy.adapt, self, self.monitor)
        rules = policy.cache
        self.warm = None if rules.warm_pin is None else WarmPin(rules.warm_pin, active=active)
        self.profile: ActivationProfile | None = None
        if rules.profile is not None:
            self.profile = load_profile(Path(rules.profile), model=model or {}, **shape)
            if self.profile.transitions is not None and self.prefetcher.affinity is not None:
                self.prefetcher.affinity.learned(self.profile.transitions.matrix, self.profile.transitions.times)
        actions = [rule.action.value for rule in policy.adapt if isinstance(rule.action.value, Capacity)]
        self.most_slots = max([self.cache.capacity, *map(self._slots, actions)])
        self._evictions = 0

    def begin(self) -> Iterator[tuple[int, int, int]]:
        """``(layer, expert, slot)`` of what is to be brought in before the first batch: pins, then the profile's
        busiest."""
        yield from self.cache.preload
        if self.profile is None:
            return
        for layer, expert in self.profile.residents(self.cache.capacity).tolist():
            found = self.cache.prefetch(layer, [expert])
            yield from ((layer, expert, int(slot)) for slot in found.slots)

    def access(self, layer: int, ids: ArrayLike, scores: ArrayLike | None = None) -> Access:
        """As `ExpertCache.access`, after the warm pins, if their time has come."""
        cache = self.cache
        if self.warm is not None and self.warm.due(cache.stats.accesses):
            self.warm.fire(
                cache.stats.hits,
                cache.stats.misses,
                cache.slot_table >= 0,
                capacity=cache.capacity,
                pinnable=cache.capacity,  # `pin` refuses what its pool does not protect
                pin=cache.pin,
            )
        found = cache.access(layer, ids, scores)
        if self.profile is not None:
            chosen = np.flatnonzero(found.counts)
            self.profile.record(layer, chosen, found.counts[chosen])
        return found

    def ahead(self, layer: int) -> Iterator[tuple[int, Prefetch]]:
        """``(layer to come, what found room)`` of guesses, now that ``layer`` has chosen."""
        for target, experts in self.prefetcher.ahead(layer, self.cache.slot_table >= 0):
            found = self.cache.prefetch(target, experts.tolist())
            if len(found.ids):
                yield target, found

    def hint(self, layer: int, ids: Ints, mass: Floats) -> None:
        """As `Prefetcher.hint`."""
        self.prefetcher.hint(layer, ids, mass)

    def settle(self, access: Access) -> None:
        """The batch of ``access`` has been computed and holds no lease any more: the rules may act."""
        evictions = self.cache.stats.evictions
        self.adapting.record(len(access.hits), len(access.misses), evictions - self._evictions)
        self._evictions = self.cache.stats.evictions

    def as_dict(self, **stalls: float) -> dict[str, Any]:
        """Everything that is known, for JSON; ``stalls`` in seconds, by what for."""
        cache, stats = self.cache, self.cache.stats
        return expert_stats(
            hits=stats.hits,
            misses=stats.misses,
            policy=self.policy.name,
            cache={
                "capacity": cache.capacity,
                "resident": len(cache),
                "eviction": list(cache.eviction),
                "budgets": [int(budget) for budget in cache.budgets],
                "evictions": stats.evictions,
                "expired": stats.expired,
                "pressed": stats.pressed,
                "bypasses": stats.bypasses,
                "prefetched": stats.prefetched,
            },
            pinned=cache.pinned,
            warm=self.warm,
            prefetcher=self.prefetcher,
            monitor=self.monitor,
            adapting=self.adapting,
            stalls=stalls,
        )

    # ---- what rules do

    def in_force(self, action: Action) -> bool:
        """Whether ``action`` would change nothing."""
        return action.kind == "set" and self._now(action.name) == self._wanted(action)

    def shown(self, action: Action) -> str | None:
        """What is in force in its place."""
        if action.kind != "set":
            return None
        now = self._now(action.name)
        return " | ".join(now) if isinstance(now, tuple) else f"{now}"

    def do(self, action: Action) -> None:
        """Do it; contents and statistics stay.

        Raises:
            ConfigError: there is no room for what is in use.
        """
        cache, value = self.cache, self._wanted(action)
        if action.kind == "rebalance":
            cache.rebalance()
        elif action.kind == "trigger":
            rules = self.policy.cache
            pressure = MemoryPressure(
                threshold=0.0,
                headroom=rules.memory_headroom,
                budget_gb=rules.memory_budget_gb,
                expert_gb=rules.expert_size_gb,
            )
            cache.press(pressure.surplus(len(cache)))
        elif action.name == "eviction":
            cache.swap(eviction=value)
        elif action.name == "capacity":
            try:
                cache.resize(value)
            except ValueError as error:
                raise ConfigError(f"capacity: {error}") from None
        elif action.name == "frequency_decay":
            cache.swap(rules=replace(cache.rules, decay=value))
        elif action.name == "prefetch_strategy":
            self.prefetcher.use(value)
        elif action.name == "prefetch_budget":
            self.prefetcher.allow(value)
        else:
            self.mode = value

    def _now(self, name: str) -> Any:
        return {
            "eviction": self.cache.eviction,
            "capacity": self.cache.capacity,
            "frequency_decay": self.cache.rules.decay,
            "prefetch_strategy": self.prefetcher.rules.strategy,
            "prefetch_budget": self.prefetcher.rules.budget,
            "schedule_mode": self.mode,
        }[name]

    def _wanted(self, action: Action) -> Any:
        value = action.value
        if isinstance(value, Capacity):
            return self._slots(value)
        return (value,) if action.name == "eviction" and isinstance(value, str) else value

    def _slots(self, capacity: Capacity) -> int:
        """Of the whole cache; with budgets of layers, a capacity is one layer's."""
        cache, layers = self.cache, self.policy.per_layer
        if layers is None or layers.total_budget:
            return capacity.slots(cache.num_layers * cache.num_experts, self._page_bytes)
        return cache.num_layers * capacity.slots(cache.num_experts, self._page_bytes)
