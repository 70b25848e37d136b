"""Controls of a running cache for adaptation rules: eviction, capacity, predictor and schedule mode.

All changes are made in place: residents, pins, leases, counters and learned predictor state are kept.
"""

from __future__ import annotations

from dataclasses import replace

from moelight.core.errors import ConfigError, did_you_mean
from moelight.experts.cache import ExpertCache
from moelight.experts.expiry import MemoryPressure
from moelight.experts.policy import ACTION_KEYS, MODES, Action, Capacity, ExpertPolicy, ScheduleRules

Value = tuple[str, ...] | str | float | int
PRESSURE_THRESHOLD = 0.9  # of the memory budget, if the policy gives none: the default of the language


class Controls:
    """The components of one policy, as `adapt.Controlled`. ``schedule`` holds the current schedule rules."""

    def __init__(
        self, policy: ExpertPolicy, cache: ExpertCache, *, page_bytes: int | None = None, most_slots: int | None = None
    ) -> None:
        """``page_bytes``: size of one expert, for capacities in bytes; ``most_slots``: allocated slots (None: no
        limit)."""
        self.schedule: ScheduleRules = policy.schedule
        self._policy, self._cache = policy, cache
        self._page_bytes, self._most_slots = page_bytes, most_slots

    def in_force(self, action: Action) -> bool:
        """Return True if ``action`` sets the current value, or relieves memory pressure that is watched and would evict
        nothing. Rebalancing always may change something."""
        if action.kind == "trigger":
            return self._cache.pressure is not None and not self._cache.relief
        return action.kind == "set" and self._now(action.name) == self._meant(action)

    def shown(self, action: Action) -> str | None:
        """Return the current value in the syntax of the language."""
        if action.kind != "set":
            return None
        now = self._now(action.name)
        return " | ".join(now) if isinstance(now, tuple) else f"{now}"

    def do(self, action: Action) -> None:
        """Execute ``action``.

        Raises:
            ConfigError: the action is not possible; nothing has changed.
        """
        if action.kind == "trigger":
            self._press()
        elif action.kind == "rebalance":
            self._cache.rebalance()
        else:
            self._set(action)

    def _set(self, action: Action) -> None:
        name, value, cache = action.name, self._meant(action), self._cache
        if name == "eviction" and isinstance(value, tuple):
            cache.swap(value)
        elif name == "capacity" and isinstance(value, int):
            self._resize(value)
        elif name == "frequency_decay" and isinstance(value, (int, float)):
            cache.swap(rules=replace(cache.rules, decay=float(value)))
        elif name == "prefetch_strategy" and isinstance(value, str):
            self._cache.predictor.use(value)
        elif name == "prefetch_budget" and isinstance(value, int):
            self._cache.predictor.allow(value)
        elif name == "schedule_mode" and value in MODES:
            self.schedule = replace(self.schedule, mode=str(value))
        else:
            raise ConfigError(f"adapt: {name} cannot be {value!r}{did_you_mean(str(value), MODES)}")

    def _resize(self, slots: int) -> None:
        if self._most_slots is not None and slots > self._most_slots:
            raise ConfigError(f"capacity: {slots} slots were asked for, but only {self._most_slots} are allocated")
        try:
            self._cache.resize(slots)
        except ValueError as error:
            raise ConfigError(f"capacity: {slots} slots are not possible now ({error})") from None

    def _now(self, name: str) -> Value:
        values: dict[str, Value] = {
            "eviction": self._cache.eviction,
            "capacity": self._cache.capacity,
            "frequency_decay": self._cache.rules.decay,
            "prefetch_strategy": self._cache.predictor.rules.strategy,
            "prefetch_budget": self._cache.predictor.rules.budget,
            "schedule_mode": self.schedule.mode,
        }
        if name not in values:
            raise ConfigError(f"adapt: unknown key {name!r}{did_you_mean(name, ACTION_KEYS)}")
        return values[name]

    def _meant(self, action: Action) -> Value | None:
        """Return the value of ``action`` in the form of `_now`: a capacity is in slots of all layers together."""
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
