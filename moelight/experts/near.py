"""One expert policy at work in a model: its cache, its guesses, its rules, and what is learned on the way.

The face that an engine talks to, in the model's own layer numbers; layers without experts do not exist below it. Knows
keys, slots and counters; refuses to know bytes, files and devices. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.core.schedule import Page
from moelight.experts.access import Access, FloatArray, IntArray
from moelight.experts.adapt import Adapting
from moelight.experts.cache import ExpertCache
from moelight.experts.control import Control
from moelight.experts.monitor import Monitor
from moelight.experts.policy import Capacity, ExpertPolicy
from moelight.experts.prefetch import Prefetcher
from moelight.experts.profile import ActivationProfile, Facts
from moelight.experts.stats import expert_stats
from moelight.experts.warm import WarmPin

_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What residency must know of a model: ``moe_layers`` says which of its layers have experts; ``facts`` tell it from
    others in profiles."""

    moe_layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    page_bytes: int
    facts: Facts


class Residency:
    """Who is near, as passes go by.

    Attributes:
        table: int32 [layers, experts], the near slot of each expert or -1.
        version: a number that changes with it.
        learns: residents make way for others.
        profile: how often each expert was chosen, and what else is worth knowing another time.
        schedule_mode: where missing experts are computed, as the policy or one of its rules has it.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        model: ModelFacts,
        *,
        resident: Sequence[Page],
        learns: bool = True,
        profile: ActivationProfile | None = None,
    ) -> None:
        """There is room for as many as are ``resident`` at first; they make way for others if it ``learns``.

        ``profile``: what is known of the model's routing; the busiest experts are the first residents then.

        Raises:
            ConfigError: the policy cannot be met.
        """
        self.policy, self.model = policy, model
        self._layers = [layer for layer, moe in enumerate(model.moe_layers) if moe]
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self.prefetcher = Prefetcher(policy.prefetch, num_layers=len(self._layers), num_experts=model.num_experts)
        self.cache = ExpertCache.of(
            _within(policy, max(1, len(resident))), num_layers=len(self._layers), num_experts=model.num_experts
        )
        self.schedule_mode, self.learns = policy.schedule.mode, learns
        self._monitor = Monitor(policy.monitor)
        control = Control(self.cache, self.prefetcher, self, policy.cache, model.page_bytes)
        self._adapting = Adapting(policy.adapt if learns else (), control, self._monitor)
        warm = policy.cache.warm_pin
        self._warm = None if warm is None else WarmPin(warm, active=model.top_k)
        self.profile = profile or self._empty_profile()
        self.table = np.full((len(model.moe_layers), model.num_experts), -1, dtype=np.int32)
        self.version = 0
        self._fill(resident, profile if learns else None)

    @property
    def ahead(self) -> bool:
        """Whether anything is guessed at all."""
        return self.learns and self.prefetcher.rules.strategy != "none"

    @property
    def foresees(self) -> bool:
        """Whether guesses need the routers of layers to come."""
        return self.prefetcher.rules.strategy == "next_router"

    def pages(self) -> frozenset[Page]:
        """Everyone who is near."""
        return frozenset(Page(layer=int(layer), expert=int(e)) for layer, e in np.argwhere(self.table >= 0))

    def choose(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], *, leave: frozenset[int] = frozenset()
    ) -> Access:
        """A small pass routes to ``ids`` int [T, k] of ``layer`` with ``weights`` [T, k]: who of them is near, who
        comes, and where to. ``leave``: missing ones that are computed where they lie, and do not come."""
        self._pin_if_warm()
        row = self._row[layer]
        if leave:
            away = np.isin(ids, list(leave))
            self._count(row, self.cache.access(row, ids[away].reshape(-1, 1), admit=False))
            ids, weights = ids[~away].reshape(-1, 1), weights[~away].reshape(-1, 1)
        found = self.cache.access(row, ids, weights, admit=self.learns)
        self._count(row, found, weights, ids)
        self._follow()
        return found

    def note(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """A pass that streams whole layers routed to ``ids`` [T, k]: counted, and nobody comes or goes."""
        self._pin_if_warm()
        row = self._row[layer]
        self._count(row, self.cache.access(row, ids, weights, admit=False), weights, ids, rules=False)

    def guess(self, layer: int) -> IntArray:
        """Experts of ``layer`` to fetch ahead, the one before having chosen: not near, and likely enough."""
        row, resident = self._row[layer], self.cache.slot_table >= 0
        for target, wanted in self.prefetcher.ahead(row - 1, resident):
            if target == row:
                return wanted
        return _NOTHING

    def hint(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """The router of ``layer`` was asked ahead of time, and would choose ``ids`` [T, k] with ``weights``."""
        mass: FloatArray = np.bincount(ids.ravel(), weights.ravel(), minlength=self.model.num_experts).astype(float)
        chosen = np.flatnonzero(mass)
        self.prefetcher.hint(self._row[layer], chosen, mass[chosen])

    def lease(self, layer: int, ids: IntArray) -> None:
        """Keep ``ids`` of ``layer``, who are near, until `release`."""
        self.cache.lease(self._row[layer], ids.tolist())

    def release(self, layer: int, ids: IntArray) -> None:
        """End one lease of each."""
        self.cache.release(self._row[layer], ids.tolist())

    def stats(self, stalls: dict[str, float] | None = None) -> dict[str, Any]:
        """Everything that is known, for JSON, in the model's layer numbers."""
        shape = self.table.shape
        hits, misses = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        hits[self._layers], misses[self._layers] = self.cache.stats.hits, self.cache.stats.misses
        return expert_stats(
            hits=hits,
            misses=misses,
            policy=self.policy.name,
            cache={"capacity": self.cache.capacity, "residents": len(self.cache), "budgets": self.cache.budgets}
            | {name: getattr(self.cache.stats, name) for name in _COUNTED},
            pinned=[(self._layers[row], expert) for row, expert in self.cache.pinned],
            warm=self._warm,
            prefetcher=self.prefetcher,
            monitor=self._monitor,
            adapting=self._adapting,
            stalls=stalls,
        )

    def _count(
        self,
        row: int,
        found: Access,
        weights: NDArray[Any] | None = None,
        ids: NDArray[Any] | None = None,
        *,
        rules: bool = True,
    ) -> None:
        chosen = np.flatnonzero(found.counts)
        self.profile.record(row, chosen, found.counts[chosen])
        mass: FloatArray | None = None
        if ids is not None and weights is not None and self.ahead:
            every: FloatArray = np.bincount(ids.ravel(), weights.ravel(), minlength=self.model.num_experts).astype(
                float
            )
            mass = every[chosen]
        self.prefetcher.observe(row, chosen, found.counts[chosen], mass)
        if rules:
            self._adapting.record(len(found.hits), len(found.misses), len(found.evictions))

    def _pin_if_warm(self) -> None:
        if self._warm is not None and self._warm.due(self.cache.clock):
            stats, cache = self.cache.stats, self.cache
            self._warm.fire(
                stats.hits,
                stats.misses,
                cache.slot_table >= 0,
                capacity=cache.capacity,
                pinnable=cache.capacity,
                pin=cache.pin,
            )

    def _follow(self) -> None:
        """Take over who is near now."""
        now = self.cache.slot_table
        if not np.array_equal(self.table[self._layers], now):
            self.table[self._layers] = now
            self.version += 1

    def _fill(self, resident: Sequence[Page], profile: ActivationProfile | None) -> None:
        """First residents: pins are there already; the busiest of the profile; those that the placement names; as many
        of each layer as it has room for, and the order of leaving lets in."""
        room = np.asarray(self.cache.budgets) if self.policy.per_layer is not None else self.cache.capacity
        known = [] if profile is None else [(row, expert) for row, expert in profile.residents(room).tolist()]
        named = [(self._row[page.layer], page.expert) for page in resident]
        for row, expert in dict.fromkeys((*known, *named)):
            budget = self.cache.budgets[row] if self.cache.per_layer is not None else self.cache.capacity
            here = self.cache.slot_table[row] if self.cache.per_layer is not None else self.cache.slot_table
            if np.count_nonzero(here >= 0) < budget:
                self.cache.prefetch(row, [expert])
        self.cache.stats.prefetched = self.cache.stats.evictions = 0
        self._follow()

    def _empty_profile(self) -> ActivationProfile:
        return ActivationProfile(
            model=self.model.facts, num_layers=len(self._layers), num_experts=self.model.num_experts
        )


_COUNTED = ("evictions", "expired", "pressed", "bypasses", "prefetched")


def _within(policy: ExpertPolicy, capacity: int) -> ExpertPolicy:
    """``policy`` with so many slots in all."""
    rules = None if policy.per_layer is None else replace(policy.per_layer, total_budget=capacity)
    return replace(policy, cache=replace(policy.cache, capacity=Capacity(value=capacity)), per_layer=rules)
