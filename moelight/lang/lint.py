"""Warnings about legal parts of a policy without effect: keys that are never read, rules that never change anything."""

from __future__ import annotations

from collections.abc import Iterator

from moelight.experts.policy import AdaptRule, ExpertPolicy
from moelight.lang.rules import BrokenRule, swapped

_MEMORY_KEYS = ("memory_headroom", "memory_budget_gb", "expert_size_gb")
_ENTROPY_KEYS = ("entropy_window", "rebalance_interval")
_READ_BY_EVICTION = {
    "frequency_decay": ("lfu",),
    "freq_threshold": ("frequency_threshold",),
    "freq_window": ("frequency_threshold",),
    "score_ema_alpha": ("score",),
}
_READ_BY_STRATEGY = {
    "lookahead": ("lookahead",),
    "affinity_threshold": ("affinity",),
    "history_window": ("history", "lookahead"),
}


def reached(policy: ExpertPolicy, swap: str, first: tuple[str, ...]) -> set[str]:
    """The values of ``swap`` that may be in force: the ``first`` ones and those that a rule may set."""
    found = set(first)
    for rule in policy.adapt:
        if rule.action.name == swap:
            found.update((rule.action.value,) if isinstance(rule.action.value, str) else _words(rule.action.value))
    return found


def _words(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def unread_keys(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """The keys that no eviction, strategy or mode that the policy has or may switch to reads."""
    evictions = reached(policy, "eviction", policy.cache.eviction)
    strategies = reached(policy, "prefetch_strategy", (policy.prefetch.strategy,))
    modes = reached(policy, "schedule_mode", (policy.schedule.mode,))
    pressed = policy.cache.memory_threshold is not None or any(r.action.kind == "trigger" for r in policy.adapt)
    for key, readers in _READ_BY_EVICTION.items():
        if not evictions & set(readers):
            yield _unread("cache", key, f"eviction = {readers[0]}", f"eviction is {' | '.join(policy.cache.eviction)}")
    if not pressed:
        for key in _MEMORY_KEYS:
            yield _unread("cache", key, "memory_threshold", "there is none")
    for key, users in _READ_BY_STRATEGY.items():
        if not strategies & set(users):
            yield _unread(
                "prefetch", key, f"strategy = {' or '.join(users)}", f"the strategy is {policy.prefetch.strategy}"
            )
    if strategies == {"none"}:
        yield _unread("prefetch", "budget", "a strategy other than none", "the strategy is none")
    if "hybrid" not in modes:
        yield _unread("schedule", "offload_threshold_ms", "mode = hybrid", f"mode is {policy.schedule.mode}")
    if policy.per_layer is not None and policy.per_layer.allocation == "uniform":
        for key in _ENTROPY_KEYS:
            yield _unread("per_layer", key, "allocation = entropy", "uniform budgets never change")


def _unread(block: str, key: str, reader: str, instead: str) -> BrokenRule:
    message = f"{key} is read only by {reader}, and {instead}"
    return BrokenRule(code="unread", message=message, places=((block, key),))


def pointless(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Values that contain duplicates."""
    cache = policy.cache
    if len(set(cache.pin)) < len(cache.pin):
        yield BrokenRule(code="pointless", message="pin names an expert twice", places=(("cache", "pin"),))
    if len(cache.eviction) > 1 and len(set(cache.eviction)) == 1:
        message = f"two layers of the same policy; write eviction = {cache.eviction[0]}"
        yield BrokenRule(code="pointless", message=message, places=(("cache", "eviction"),))
    if policy.monitor is not None and len(set(policy.monitor.metrics)) < len(policy.monitor.metrics):
        yield BrokenRule(code="pointless", message="metrics names one twice", places=(("monitor", "metrics"),))


def pointless_rule(policy: ExpertPolicy, rule: AdaptRule) -> str:
    """The reason why ``rule`` of ``policy`` can never change anything, or an empty string."""
    action = rule.action
    if action.kind == "rebalance":
        if policy.per_layer is None:
            return "there is nothing to rebalance without a per_layer block"
        if policy.per_layer.allocation == "uniform":
            return "uniform budgets are the same after a rebalance"
        return ""
    others = [other.action for other in policy.adapt if other is not rule]
    if any(other.name == action.name for other in others):
        return ""
    if swapped(policy, action) == policy:
        return "the policy says so already, and no other rule changes it"
    return ""


def never_or_always(rule: AdaptRule) -> str:
    """A warning if the condition of ``rule`` never or always holds, or an empty string. Both metrics lie in [0, 1]."""
    op, threshold = rule.op, rule.threshold
    never = (op == "<" and threshold <= 0) or (op == ">" and threshold >= 1) or (op == ">=" and threshold > 1)
    always = (op == "<" and threshold > 1) or (op == "<=" and threshold >= 1) or (op == ">=" and threshold <= 0)
    if never or always:
        words = "never" if never else "always"
        return f"{rule.metric} lies within 0 and 1: {rule.metric} {op} {threshold:g} {words} holds"
    return ""
