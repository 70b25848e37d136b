"""What the ``adapt`` rules of a policy change in a running cache. Contents and statistics survive all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from moelight.core.errors import ConfigError
from moelight.experts.cache import ExpertCache
from moelight.experts.policy import Action, CacheRules, Capacity
from moelight.experts.prefetch import Prefetcher
from moelight.experts.triggers import MemoryPressure

# The share of memory that the reference takes where a rule triggers memory pressure and the policy names none.
PRESSED_FROM = 0.9


class HasMode(Protocol):
    """Whoever decides where missing experts are computed."""

    schedule_mode: str


class Control:
    """`moelight.experts.adapt.Controlled` over a cache, its guesses and where misses are computed."""

    def __init__(
        self, cache: ExpertCache, prefetcher: Prefetcher, mode: HasMode, rules: CacheRules, page_bytes: int | None
    ) -> None:
        self._cache, self._prefetcher, self._mode, self._rules = cache, prefetcher, mode, rules
        self._page_bytes, self._most = page_bytes, cache.capacity

    def in_force(self, action: Action) -> bool:
        return action.kind == "set" and self._now(action.name) == self._wanted(action)

    def shown(self, action: Action) -> str | None:
        if action.kind != "set":
            return None
        now = self._now(action.name)
        return " | ".join(now) if isinstance(now, tuple) else str(now)

    def do(self, action: Action) -> None:
        if action.kind == "trigger":
            self._press()
        elif action.kind == "rebalance":
            self._cache.rebalance()
        else:
            self._set(action)

    def _now(self, name: str) -> object:
        rules = self._prefetcher.rules
        return {
            "eviction": self._cache.eviction,
            "capacity": self._cache.capacity,
            "frequency_decay": self._cache.rules.decay,
            "prefetch_strategy": rules.strategy,
            "prefetch_budget": rules.budget,
            "schedule_mode": self._mode.schedule_mode,
        }[name]

    def _wanted(self, action: Action) -> object:
        if isinstance(action.value, Capacity):
            experts = self._cache.num_layers * self._cache.num_experts
            return action.value.slots(experts, self._page_bytes)
        return action.value

    def _set(self, action: Action) -> None:
        value = self._wanted(action)
        if action.name == "eviction" and isinstance(value, tuple):
            self._cache.swap(value)
        elif action.name == "capacity" and isinstance(value, int):
            if value > self._most:
                raise ConfigError(f"capacity {value}: memory was taken for {self._most} experts, and no more")
            self._cache.resize(value)
        elif action.name == "frequency_decay" and isinstance(value, float):
            self._cache.swap(rules=replace(self._cache.rules, decay=value))
        elif action.name == "prefetch_strategy":
            self._prefetcher.use(str(value))
        elif action.name == "prefetch_budget" and isinstance(value, int):
            self._prefetcher.allow(value)
        else:
            self._mode.schedule_mode = str(value)

    def _press(self) -> None:
        """From now on experts leave where memory is short, by the numbers of the policy."""
        rules = self._rules
        if self._cache.pressure is None:
            self._cache.pressure = MemoryPressure(
                threshold=PRESSED_FROM,
                headroom=min(rules.memory_headroom, PRESSED_FROM),
                budget_gb=rules.memory_budget_gb,
                expert_gb=rules.expert_size_gb,
            )
