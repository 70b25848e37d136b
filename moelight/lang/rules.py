"""Rules V1 to V20 of the language, our own rules on ranges, and warnings about what has no effect. The rules depend
only on the values of policy objects; the caller maps them to positions in a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moelight.experts.policy import PRESSURE_THRESHOLD, Action, AdaptRule, ExpertPolicy
from moelight.lang.keys import KEYS, SELECTORS, SWAPS, Place

MOST_SLOTS, MOST_ID = 512, 511

_MEMORY_KEYS = ("memory_headroom", "memory_budget_gb", "expert_size_gb")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule that a policy breaks. ``places``: the keys concerned, the most likely culprit first."""

    code: str
    message: str
    places: tuple[Place, ...]


def broken_rules(policy: ExpertPolicy) -> list[BrokenRule]:
    """Return all rules that ``policy`` breaks. To check its ``adapt``, apply this function to each `swapped` policy."""
    found = list(_capacity(policy))
    for block, keys in KEYS.items():
        for name, key in keys.items():
            value = getattr(getattr(policy, block), name, None)
            if key.rule is None or value is None:
                continue
            code, holds, words = key.rule
            if not holds(value):
                found.append(BrokenRule(code=code, message=f"{name} is {value:g}; it {words}", places=((block, name),)))
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
    """Return ``policy`` after ``action``; ``rebalance`` moves slots between layers and leaves the policy unchanged."""
    if action.kind == "trigger":
        threshold = policy.cache.memory_threshold
        kept = PRESSURE_THRESHOLD if threshold is None else threshold
        return replace(policy, cache=replace(policy.cache, memory_threshold=kept))
    if action.kind != "set":
        return policy
    block, key = SWAPS[action.name]
    return replace(policy, **{block: replace(getattr(policy, block), **{key: action.value})})


def unread_keys(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Yield the keys that no eviction, strategy, mode or allocation reads that the policy has or may switch to."""
    for block, (selector, shown) in SELECTORS.items():
        section = getattr(policy, block)
        if section is None:
            continue
        now, swap = getattr(section, selector), KEYS[block][selector].swap
        reached = set(_words(now))
        for rule in policy.adapt:
            if swap and rule.action.name == swap:
                reached.update(_words(rule.action.value))
        instead = shown.format(" | ".join(_words(now)))
        for name, key in KEYS[block].items():
            if key.readers and not reached & set(key.readers):
                yield _unread(block, name, f"{selector} = {' or '.join(key.readers)}", instead)
        if block == "prefetch" and reached == {"none"}:
            yield _unread(block, "budget", "a strategy other than none", instead)
    if policy.cache.memory_threshold is None and all(rule.action.kind != "trigger" for rule in policy.adapt):
        for name in _MEMORY_KEYS:
            yield _unread("cache", name, "memory_threshold", "there is none")


def _words(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def _unread(block: str, key: str, reader: str, instead: str) -> BrokenRule:
    message = f"{key} is read only by {reader}, and {instead}"
    return BrokenRule(code="unread", message=message, places=((block, key),))


def pointless(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Yield the values that contain duplicates."""
    cache = policy.cache
    if len(set(cache.pin)) < len(cache.pin):
        yield BrokenRule(code="pointless", message="pin names an expert twice", places=(("cache", "pin"),))
    if len(cache.eviction) > 1 and len(set(cache.eviction)) == 1:
        message = f"two layers of the same policy; write eviction = {cache.eviction[0]}"
        yield BrokenRule(code="pointless", message=message, places=(("cache", "eviction"),))
    if policy.monitor is not None and len(set(policy.monitor.metrics)) < len(policy.monitor.metrics):
        yield BrokenRule(code="pointless", message="metrics names one twice", places=(("monitor", "metrics"),))


def pointless_rule(policy: ExpertPolicy, rule: AdaptRule) -> Iterator[str]:
    """Yield why ``rule`` of ``policy`` can never change anything, or always does. Both metrics lie in [0, 1]."""
    op, threshold, action, layers = rule.op, rule.threshold, rule.action, policy.per_layer
    never = (op == "<" and threshold <= 0) or (op == ">" and threshold >= 1) or (op == ">=" and threshold > 1)
    always = (op == "<" and threshold > 1) or (op == "<=" and threshold >= 1) or (op == ">=" and threshold <= 0)
    if never or always:
        words = "never" if never else "always"
        yield f"{rule.metric} lies within 0 and 1: {rule.metric} {op} {threshold:g} {words} holds"
    if action.kind == "rebalance":
        if layers is None:
            yield "there is nothing to rebalance without a per_layer block"
        elif layers.allocation == "uniform":
            yield "uniform budgets are the same after a rebalance"
    elif swapped(policy, action) == policy and not any(
        other.action.name == action.name for other in policy.adapt if other is not rule
    ):
        yield "the policy says so already, and no other rule changes it"
