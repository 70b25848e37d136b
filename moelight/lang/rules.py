"""Rules V1 to V20 of the language, our own rules on ranges, and warnings about what has no effect. The rules depend
only on the values of policy objects; the caller maps them to positions in a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from moelight.experts.policy import PRESSURE_THRESHOLD, Action, AdaptRule, CacheRules, ExpertPolicy
from moelight.lang.keys import KEYS, SELECTORS, SWAPS, Place

MOST_SLOTS, MOST_ID = 512, 511

_CAPACITY, _PIN, _EVICTION = ("cache", "capacity"), ("cache", "pin"), ("cache", "eviction")
_THRESHOLD, _HEADROOM, _BUDGET_GB = (("cache", f"memory_{key}") for key in ("threshold", "headroom", "budget_gb"))
_STRATEGY, _BUDGET = ("prefetch", "strategy"), ("prefetch", "budget")


class BrokenRule(NamedTuple):
    """A rule that a policy breaks. ``places``: the keys concerned, the most likely culprit first."""

    code: str
    message: str
    places: tuple[Place, ...]


def broken_rules(policy: ExpertPolicy) -> list[BrokenRule]:
    """Return all rules that ``policy`` breaks. To check its ``adapt``, apply this function to each `swapped` policy."""
    found = []
    for block, keys in KEYS.items():
        for name, key in keys.items():
            value = getattr(getattr(policy, block), name, None)
            if key.rule is not None and value is not None and not key.rule[1](value):
                found.append(BrokenRule(key.rule[0], f"{name} is {value:g}; it {key.rule[2]}", ((block, name),)))
    return [*found, *_capacity(policy.cache), *_together(policy)]


def _capacity(cache: CacheRules) -> Iterator[BrokenRule]:
    unit, value, pins = cache.capacity.unit, cache.capacity.value, cache.pin
    if unit == "slots" and not 1 <= value <= MOST_SLOTS:
        more = "" if value < 1 else "; for more, write a share such as 25% or a size such as 2GiB"
        message = f"capacity is {value:g}; a count must lie within 1 and {MOST_SLOTS}{more}"
        yield BrokenRule("V1", message, (_CAPACITY,))
    if unit == "percent" and not 0 < value <= 100:
        message = f"capacity is {value:g}%; a share must be above 0% and at most 100%"
        yield BrokenRule("V1", message, (_CAPACITY,))
    if unit == "bytes" and not value > 0:
        yield BrokenRule("V1", "capacity is no size above 0 bytes that a machine could have", (_CAPACITY,))
    if far := [expert for expert in pins if not 0 <= expert <= MOST_ID]:
        message = f"pin holds {', '.join(map(str, far[:4]))}; expert ids lie within 0 and {MOST_ID}"
        yield BrokenRule("V2", message, (_PIN,))
    if unit == "slots" and len(pins) > value:
        message = f"pin holds {len(pins)} ids, and capacity is {value:g}; all pinned experts must have room"
        yield BrokenRule("V3", message, (_PIN, _CAPACITY))


def _together(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    cache, prefetch, layers = policy.cache, policy.prefetch, policy.per_layer
    if prefetch.strategy != "none" and cache.capacity.unit == "slots" and prefetch.budget > cache.capacity.value:
        message = f"budget is {prefetch.budget}, and capacity is {cache.capacity.value:g}; predictions must have room"
        yield BrokenRule("V10", message, (_BUDGET, _STRATEGY, _CAPACITY))
    if policy.schedule.mode == "hybrid" and not policy.schedule.overlap:
        message = "mode = hybrid computes while experts are fetched: overlap must be true"
        yield BrokenRule("V14", message, (("schedule", "overlap"), ("schedule", "mode")))
    if "score" in cache.eviction and prefetch.strategy == "none":
        yield BrokenRule("V15", "eviction = score needs a prefetch strategy other than none", (_EVICTION, _STRATEGY))
    if (most := cache.memory_threshold) is not None and not 0 < cache.memory_headroom <= most:
        message = f"memory_headroom is {cache.memory_headroom:g}; it must be above 0 and at most memory_threshold"
        yield BrokenRule("V17", f"{message}, {most:g}", (_HEADROOM, _THRESHOLD))
    if most is not None and not cache.memory_budget_gb > 0:
        message = f"memory_budget_gb is {cache.memory_budget_gb:g}; it must be above 0"
        yield BrokenRule("V18", message, (_BUDGET_GB, _THRESHOLD))
    if layers is not None and layers.min_capacity > layers.max_capacity:
        message = f"min_capacity is {layers.min_capacity}, above max_capacity, {layers.max_capacity}"
        yield BrokenRule("range", message, (("per_layer", "min_capacity"), ("per_layer", "max_capacity")))


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
        for name in ("memory_headroom", "memory_budget_gb", "expert_size_gb"):
            yield _unread("cache", name, "memory_threshold", "there is none")


def _words(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def _unread(block: str, key: str, reader: str, instead: str) -> BrokenRule:
    return BrokenRule("unread", f"{key} is read only by {reader}, and {instead}", ((block, key),))


def pointless(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Yield the values that contain duplicates."""
    pins, eviction, monitor = policy.cache.pin, policy.cache.eviction, policy.monitor
    if len(set(pins)) < len(pins):
        yield BrokenRule("pointless", "pin names an expert twice", (_PIN,))
    if len(set(eviction)) < len(eviction):
        yield BrokenRule("pointless", f"two layers of the same policy; write eviction = {eviction[0]}", (_EVICTION,))
    if monitor is not None and len(set(monitor.metrics)) < len(monitor.metrics):
        yield BrokenRule("pointless", "metrics names one twice", (("monitor", "metrics"),))


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
