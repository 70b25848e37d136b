"""Rules V1 to V20 of the language and our own rules on ranges, over policy objects.

The rules depend only on values; the caller maps them to positions in a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moelight.experts.policy import Action, ExpertPolicy

MOST_SLOTS, MOST_ID = 512, 511
PRESSURE_THRESHOLD = 0.9  # set by `trigger memory_pressure` if the policy has no threshold

Place = tuple[str, str]  # block, key


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule that a policy breaks. ``places``: the keys concerned, the most likely culprit first."""

    code: str
    message: str
    places: tuple[Place, ...]


_Holds = Callable[[Any], bool]
_ALONE: tuple[tuple[str, str, str, _Holds, str], ...] = (
    ("V4", "cache", "frequency_decay", lambda v: 0 < v < 1, "must lie between 0 and 1, neither of them"),
    ("V5", "cache", "freq_threshold", lambda v: 0 <= v <= 1, "must lie within 0 and 1"),
    ("V6", "cache", "freq_window", lambda v: v >= 1, "must be at least 1"),
    ("V7", "cache", "score_ema_alpha", lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    ("V8", "prefetch", "lookahead", lambda v: v >= 1, "must be at least 1"),
    ("V9", "prefetch", "budget", lambda v: v >= 1, "must be at least 1"),
    ("V11", "prefetch", "affinity_threshold", lambda v: 0 <= v <= 1, "must lie within 0 and 1"),
    ("V12", "prefetch", "history_window", lambda v: v >= 1, "must be at least 1"),
    ("V13", "schedule", "offload_threshold_ms", lambda v: v > 0, "must be above 0"),
    ("V16", "cache", "memory_threshold", lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    ("V19", "cache", "expert_size_gb", lambda v: v > 0, "must be above 0"),
    ("V20", "cache", "ttl", lambda v: v >= 1, "must be at least 1; without the line, no expert leaves for its age"),
    ("range", "cache", "warm_pin", lambda v: v >= 1, "must be at least 1; without the line, nothing is pinned"),
    ("range", "monitor", "window", lambda v: v >= 1, "must be at least 1"),
    ("range", "monitor", "log_interval", lambda v: v >= 1, "must be at least 1"),
    ("range", "per_layer", "entropy_window", lambda v: v >= 1, "must be at least 1"),
    ("range", "per_layer", "max_capacity", lambda v: v >= 1, "must be at least 1"),
)


def broken_rules(policy: ExpertPolicy) -> list[BrokenRule]:
    """All rules that ``policy`` breaks. To check its ``adapt``, apply this function to each `swapped` policy."""
    found = list(_capacity(policy))
    for code, block, key, holds, words in _ALONE:
        section = getattr(policy, block)
        value = None if section is None else getattr(section, key)
        if value is not None and not holds(value):
            found.append(BrokenRule(code=code, message=f"{key} is {value:g}; it {words}", places=((block, key),)))
    return [*found, *_together(policy)]


def _capacity(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    capacity, pins = policy.cache.capacity, policy.cache.pin
    place = (("cache", "capacity"),)
    if capacity.unit == "slots" and not 1 <= capacity.value <= MOST_SLOTS:
        more = "" if capacity.value < 1 else "; for more, write a share such as 25% or a size such as 2GiB"
        message = f"capacity is {capacity.value:g}; a count must lie within 1 and {MOST_SLOTS}{more}"
        yield BrokenRule(code="V1", message=message, places=place)
    if capacity.unit == "percent" and not 0 < capacity.value <= 100:
        message = f"capacity is {capacity.value:g}%; a share must be above 0% and at most 100%"
        yield BrokenRule(code="V1", message=message, places=place)
    if capacity.unit == "bytes" and not capacity.value > 0:
        yield BrokenRule(code="V1", message="capacity is no size above 0 bytes that a machine could have", places=place)
    far = [expert for expert in pins if not 0 <= expert <= MOST_ID]
    if far:
        message = f"pin holds {', '.join(map(str, far[:4]))}; expert ids lie within 0 and {MOST_ID}"
        yield BrokenRule(code="V2", message=message, places=(("cache", "pin"),))
    if capacity.unit == "slots" and len(pins) > capacity.value:
        message = f"pin holds {len(pins)} ids, and capacity is {capacity.value:g}; all pinned experts must have room"
        yield BrokenRule(code="V3", message=message, places=(("cache", "pin"), *place))


def _together(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    cache, prefetch, schedule, layers = policy.cache, policy.prefetch, policy.schedule, policy.per_layer
    strategy = ("prefetch", "strategy")
    if prefetch.strategy != "none" and cache.capacity.unit == "slots" and prefetch.budget > cache.capacity.value:
        message = f"budget is {prefetch.budget}, and capacity is {cache.capacity.value:g}; predictions must have room"
        yield BrokenRule(code="V10", message=message, places=(("prefetch", "budget"), strategy, ("cache", "capacity")))
    if schedule.mode == "hybrid" and not schedule.overlap:
        message = "mode = hybrid computes while experts are fetched: overlap must be true"
        yield BrokenRule(code="V14", message=message, places=(("schedule", "overlap"), ("schedule", "mode")))
    if "score" in cache.eviction and prefetch.strategy == "none":
        message = "eviction = score needs a prefetch strategy other than none"
        yield BrokenRule(code="V15", message=message, places=(("cache", "eviction"), strategy))
    if cache.memory_threshold is not None:
        threshold = ("cache", "memory_threshold")
        if not 0 < cache.memory_headroom <= cache.memory_threshold:
            message = (
                f"memory_headroom is {cache.memory_headroom:g}; it must be above 0 and at most memory_threshold, "
                f"{cache.memory_threshold:g}"
            )
            yield BrokenRule(code="V17", message=message, places=(("cache", "memory_headroom"), threshold))
        if not cache.memory_budget_gb > 0:
            message = f"memory_budget_gb is {cache.memory_budget_gb:g}; it must be above 0"
            yield BrokenRule(code="V18", message=message, places=(("cache", "memory_budget_gb"), threshold))
    if layers is not None and layers.min_capacity > layers.max_capacity:
        message = f"min_capacity is {layers.min_capacity}, above max_capacity, {layers.max_capacity}"
        places = (("per_layer", "min_capacity"), ("per_layer", "max_capacity"))
        yield BrokenRule(code="range", message=message, places=places)


def swapped(policy: ExpertPolicy, action: Action) -> ExpertPolicy:
    """``policy`` after ``action``; ``rebalance`` moves slots between layers and leaves the policy unchanged."""
    if action.kind == "trigger":
        threshold = policy.cache.memory_threshold
        kept = PRESSURE_THRESHOLD if threshold is None else threshold
        return replace(policy, cache=replace(policy.cache, memory_threshold=kept))
    value: Any = action.value
    match action.name:
        case "capacity" | "eviction" | "frequency_decay":
            return replace(policy, cache=replace(policy.cache, **{action.name: value}))
        case "prefetch_strategy" | "prefetch_budget":
            key = action.name.removeprefix("prefetch_")
            return replace(policy, prefetch=replace(policy.prefetch, **{key: value}))
        case "schedule_mode":
            return replace(policy, schedule=replace(policy.schedule, mode=value))
    return policy
