"""Explain a policy in words, and its memory on a model and a machine, from counts and bytes of the experts alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moelight.core.errors import ConfigError
from moelight.core.units import GB, format_bytes
from moelight.experts.policy import PRESSURE_THRESHOLD, AdaptRule, ExpertPolicy
from moelight.lang.format import OWN_KEYS, condition_text, entries, rule_text, value_text
from moelight.lang.keys import KEYS

_EVICTIONS = {
    "lru": "the expert unused for longest",
    "lfu": "the expert used least often, older uses counting less",
    "slru": "on trial, the expert used least often; whoever is asked for twice is safe for longer",
    "score": "the expert that the router valued least of late",
    "reuse": "the expert least likely to be asked for at its layer's next visit, as learned on the way",
    "frequency_threshold": "experts below their share of recent accesses",
}
_ACTIONS = {
    "eviction": "evict by {}",
    "capacity": "make room for {}",
    "frequency_decay": "let uses fade by {}",
    "prefetch_strategy": "fetch ahead by {}",
    "prefetch_budget": "fetch at most {} ahead",
    "schedule_mode": "schedule misses by {}",
}


def _eviction(policy: ExpertPolicy) -> str:
    first, *second = (_EVICTIONS[name] for name in policy.cache.eviction)
    separator = "; it is kept for a while longer in a second part, which gives up "
    return f"what leaves: {separator.join((first, *second))}"


def _capacity(policy: ExpertPolicy) -> str:
    capacity, layers = policy.cache.capacity, policy.per_layer
    if layers is not None and layers.total_budget is not None:
        return f"replaced by total_budget, {layers.total_budget} experts in all"
    of = {"percent": "of all experts", "slots": "experts", "bytes": "of experts"}[capacity.unit]
    return f"room for {capacity} {of}{'' if layers is None else ' of each layer'}"


def _threshold(policy: ExpertPolicy) -> str:
    cache = policy.cache
    limit = f"above {cache.memory_threshold or 0:.0%} of {cache.memory_budget_gb:g} GB"
    return f"{limit}, experts leave until {cache.memory_headroom:.0%} of it are taken"


# Keys whose meaning is more than `Key.means` of their value.
_FUNCTIONS: Mapping[str, Callable[[ExpertPolicy], str]] = {
    "capacity": _capacity,
    "eviction": _eviction,
    "pin": lambda p: f"{len(p.cache.pin)} experts of every layer are never evicted, as far as there is room",
    "memory_threshold": _threshold,
    "metrics": lambda p: f"figures are kept of {', '.join(p.monitor.metrics if p.monitor else ())}",
}


class Explanation(NamedTuple):
    """One line of a policy and its meaning; ``block`` is empty except on the first line of each block."""

    block: str
    line: str
    words: str


def meanings(policy: ExpertPolicy) -> list[Explanation]:
    """Explain every line of the canonical text, and the defaults of eviction, prefetch and mode."""
    skipped = {("cache", "eviction"), ("prefetch", "strategy"), ("schedule", "mode")}
    seconds = {rule.action.name: rule for rule in policy.adapt if rule.conditional}
    rows = []
    for block, key, text in entries(policy, written=skipped):
        words, second = _words(policy, block, key), seconds.get(KEYS[block][key].swap)
        rows.append((block, f"{key} = {text}", words if second is None else f"{words}; {_change(second)}"))
    rows += [("adapt", rule_text(rule), _change(rule)) for rule in policy.adapt if not rule.conditional]
    before = ("", *(block for block, *_ in rows))
    return [
        Explanation("" if block == last else block, line, words)
        for last, (block, line, words) in zip(before, rows, strict=False)
    ]


def _words(policy: ExpertPolicy, block: str, key: str) -> str:
    if key in _FUNCTIONS:
        return _FUNCTIONS[key](policy)
    value, means = getattr(getattr(policy, block), OWN_KEYS.get(key, key)), KEYS[block][key].means
    return means.format(value) if isinstance(means, str) else means[value]


def _change(rule: AdaptRule) -> str:
    held = "as soon as" if rule.accesses == 1 else f"once for {rule.accesses} accesses in a row"
    change = "move room between layers"
    if rule.action.kind == "set":
        change = _ACTIONS[rule.action.name].format(value_text(rule.action.value))
    elif rule.action.kind == "trigger":
        change = f"watch memory from then on, at {PRESSURE_THRESHOLD:.0%} if no threshold is set"
    return f"{held} {condition_text(rule)}, {change}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """The experts of a model: ``layers`` MoE layers with ``per_layer`` experts each, ``page_bytes`` bytes an expert."""

    layers: int
    per_layer: int
    page_bytes: int

    @property
    def count(self) -> int:
        """Experts of all layers."""
        return self.layers * self.per_layer


def cached_experts(policy: ExpertPolicy, experts: ExpertSizes) -> int:
    """Return the number of experts of the model that fit in the cache."""
    layers, total = policy.per_layer, policy.slots(experts.layers, experts.per_layer, experts.page_bytes)
    if layers is None:
        return total
    least, maximum = (
        min(bound, experts.per_layer) * experts.layers for bound in (layers.min_capacity, layers.max_capacity)
    )
    if not least <= total <= maximum:
        raise ConfigError(
            f"policy {policy.name}: room for {total:,} experts cannot be shared out to {experts.layers} layers, which "
            f"take {least:,} to {maximum:,} together; change capacity, total_budget, min_capacity or max_capacity"
        )
    return total


def memory_words(policy: ExpertPolicy, experts: ExpertSizes, model: str) -> str:
    """Return one sentence on the cache's size in experts and bytes for a model."""
    count, total, page = cached_experts(policy, experts), experts.count, experts.page_bytes
    room = format_bytes(count * page)
    if count == total:
        return f"on {model}: all {count:,} experts have room, {room}"
    return (
        f"on {model}: {count:,} of {total:,} experts ({count / total:.1%}) have room, {room} at {format_bytes(page)} "
        f"each; the other {total - count:,}, {format_bytes((total - count) * page)}, stay in the memory below"
    )


def pressure_words(policy: ExpertPolicy, experts: ExpertSizes) -> str:
    """Return the memory threshold in experts of ``expert_size_gb`` each, or an empty string without a threshold."""
    cache = policy.cache
    if cache.memory_threshold is None:
        return ""
    least = int(cache.memory_threshold * cache.memory_budget_gb / cache.expert_size_gb)
    return (
        f"memory pressure begins above {least:,} experts of {cache.expert_size_gb:g} GB; "
        f"one of this model has {experts.page_bytes / GB:.3g} GB"
    )


def spread(policy: ExpertPolicy, experts: ExpertSizes, capacities: Mapping[str, int]) -> dict[str, int]:
    """Return the experts by tier, fastest first: cached ones in the first tier (``device``, or ``host`` without a GPU),
    the others in the second as far as they fit, and the rest in the last. ``capacities``: bytes by tier."""
    left, counts = experts.count, {}
    tiers = [tier for tier in ("device", "host", "disk") if capacities.get(tier)]
    for tier in tiers:
        room = capacities[tier] // experts.page_bytes if tier != tiers[-1] else left
        counts[tier] = cached_experts(policy, experts) if tier == tiers[0] else min(left, room)
        left -= counts[tier]
    return counts
