"""Accesses one at a time, and something for rules to change."""

from __future__ import annotations

from typing import Any

from moelight.core.errors import ConfigError
from moelight.experts.adapt import AdaptRules, Monitor
from moelight.experts.policy import Action, AdaptRule

Accesses = list[tuple[bool, int]]


def one_by_one(hits: int, misses: int, evictions: int) -> Accesses:
    """The accesses of a batch as (hit, evictions): room that is free is used first, the rest counts with the last."""
    accesses = [(True, 0)] * hits + [(False, 0)] * misses
    for at in range(1, min(misses, evictions) + 1):
        accesses[-at] = (False, 1)
    if evictions > misses and accesses:
        accesses[-1] = (accesses[-1][0], accesses[-1][1] + evictions - misses)
    return accesses


def rates(accesses: Accesses, window: int) -> tuple[float, float]:
    seen = accesses[-window:]
    return sum(hit for hit, _ in seen) / len(seen), sum(left for _, left in seen) / len(seen)


class Panel:
    """Values by name, and a note of all that was done. A value of -1 cannot be set."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"prefetch_budget": 4, "schedule_mode": "gpu_only"}
        self.done: list[Action] = []

    def in_force(self, action: Action) -> bool:
        return action.kind == "set" and self.values[action.name] == action.value

    def shown(self, action: Action) -> str | None:
        return str(self.values[action.name]) if action.kind == "set" else None

    def do(self, action: Action) -> None:
        if action.value == -1:
            raise ConfigError("a budget of -1 is none")
        self.done.append(action)
        if action.kind == "set":
            self.values[action.name] = action.value


BUDGET = Action(kind="set", name="prefetch_budget", value=8)
PRESSURE = Action(kind="trigger", name="memory_pressure")


def adapting(action: Action, panel: Panel | None = None, **changes: Any) -> AdaptRules:
    rule = {"metric": "hit_rate", "op": ">=", "threshold": 0.0, "accesses": 100, "action": action}
    return AdaptRules([AdaptRule(**(rule | changes))], panel or Panel(), Monitor())
