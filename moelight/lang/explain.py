"""Explain a policy in words, and the memory that it takes on a model and a machine.

Depends only on counts and bytes of a model's experts; `moelight policy replay` estimates speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moelight.core.errors import ConfigError
from moelight.core.units import GB, format_bytes
from moelight.experts.policy import AdaptRule, ExpertPolicy
from moelight.lang.format import condition_text, entries, rule_text, value_text
from moelight.lang.keys import KEYS
from moelight.lang.rules import PRESSURE_THRESHOLD, Place

_EVICTIONS = {
    "lru": "the expert unused for longest",
    "lfu": "the expert used least often, older uses counting less",
    "slru": "on trial, the expert used least often; whoever is asked for twice is safe for longer",
    "score": "the expert that the router valued least of late",
    "reuse": "the expert least likely to be asked for at its layer's next visit, as learned on the way",
    "frequency_threshold": "experts below their share of recent accesses",
}
_STRATEGIES = {
    "none": "nothing is fetched ahead",
    "affinity": "fetch ahead what usually follows the experts just chosen, as learned on the way",
    "history": "fetch ahead what the layer chose most of late",
    "lookahead": "fetch ahead what layers further on chose most of late",
    "previous": "fetch ahead what the layer chose for the tokens before",
    "frequency": "fetch ahead what the layer chooses most on the whole",
    "next_router": "fetch ahead what the next layer's router says of this layer's hidden state",
}
_MODES = {
    "gpu_only": "a missing expert is fetched and computed on the compute device",
    "cpu_fallback": "a missing expert is computed by the processor beside which it lies",
    "hybrid": "a missing expert is fetched, or computed where it lies if that is estimated to be sooner",
}
_ALLOCATIONS = {
    "uniform": "every layer has a budget of its own, all alike",
    "entropy": "every layer has a budget of its own: layers that spread their tokens over more experts get more",
}
_OVERLAP = {True: "transfers and computation overlap", False: "transfers hold up computation"}
_PRIORITY = {
    True: "experts with more of the router's weight are served first",
    False: "experts are served in the order of their ids",
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
    first, *second = policy.cache.eviction
    words = f"what leaves: {_EVICTIONS[first]}"
    return (
        f"{words}; it is kept for a while longer in a second part, which gives up {_EVICTIONS[second[0]]}"
        if second
        else words
    )


def _capacity(policy: ExpertPolicy) -> str:
    capacity = policy.cache.capacity
    layers = policy.per_layer
    if layers is not None and layers.total_budget is not None:
        return f"replaced by total_budget, {layers.total_budget} experts in all"
    where = "" if layers is None else " of each layer"
    if capacity.unit == "percent":
        return f"room for {capacity} of all experts{where}"
    return f"room for {capacity} {'experts' if capacity.unit == 'slots' else 'of experts'}{where}"


def _threshold(policy: ExpertPolicy) -> str:
    cache = policy.cache
    limit = f"above {cache.memory_threshold or 0:.0%} of {cache.memory_budget_gb:g} GB"
    return f"{limit}, experts leave until {cache.memory_headroom:.0%} of it are taken"


# By block and key: a format string for the value, or a function that returns the words.
_KEYS: Mapping[Place, str | Callable[[ExpertPolicy], str]] = {
    ("cache", "capacity"): _capacity,
    ("cache", "eviction"): _eviction,
    ("cache", "pin"): lambda p: f"{len(p.cache.pin)} experts of every layer are never evicted, as far as there is room",
    ("cache", "frequency_decay"): "for lfu, uses fade to {:g} of their weight, again and again",
    ("cache", "freq_threshold"): "for frequency_threshold, the share of recent accesses that lets an expert stay: {:g}",
    ("cache", "freq_window"): "for frequency_threshold, recent means the last {} accesses",
    ("cache", "score_ema_alpha"): "for score, the weight of the newest value: {:g}",
    ("cache", "memory_threshold"): _threshold,
    ("cache", "memory_headroom"): "where relief from memory pressure ends: {:.0%} of the budget",
    ("cache", "memory_budget_gb"): "memory pressure is measured against {:g} GB",
    ("cache", "expert_size_gb"): "for memory pressure an expert counts as {:g} GB",
    ("cache", "ttl"): "an expert leaves when {} accesses have not asked for it",
    ("cache", "warm_pin"): "after {} accesses the busiest residents are pinned",
    ("cache", "profile"): "begin with the counts of this file instead of none",
    ("prefetch", "strategy"): lambda p: _STRATEGIES[p.prefetch.strategy],
    ("prefetch", "predictor"): lambda p: _STRATEGIES[p.prefetch.strategy],
    ("prefetch", "lookahead"): "for lookahead, {} layers ahead",
    ("prefetch", "budget"): "at most {} experts of a layer are fetched ahead",
    ("prefetch", "affinity_threshold"): "for affinity, only followers with a probability of at least {:g}",
    ("prefetch", "history_window"): "of late means the last {} batches of a layer",
    ("schedule", "mode"): lambda p: _MODES[p.schedule.mode],
    ("schedule", "offload_threshold_ms"): "for hybrid, fetches of up to {:g} ms are always made",
    ("schedule", "overlap"): lambda p: _OVERLAP[p.schedule.overlap],
    ("schedule", "priority_routing"): lambda p: _PRIORITY[p.schedule.priority_routing],
    ("monitor", "metrics"): lambda p: f"figures are kept of {', '.join(p.monitor.metrics if p.monitor else ())}",
    ("monitor", "window"): "figures are over the last {} accesses",
    ("monitor", "log_interval"): "figures are noted every {} accesses",
    ("per_layer", "allocation"): lambda p: _ALLOCATIONS[p.per_layer.allocation if p.per_layer else "uniform"],
    ("per_layer", "entropy_window"): "spread is measured over the last {} batches of a layer",
    ("per_layer", "min_capacity"): "no layer has room for fewer than {} experts",
    ("per_layer", "max_capacity"): "no layer has room for more than {} experts",
    ("per_layer", "rebalance_interval"): "room moves between layers every {} accesses (0: never)",
    ("per_layer", "total_budget"): "room for {} experts in all layers together",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One line of a policy and its meaning; ``block`` is empty except on the first line of each block."""

    block: str
    line: str
    words: str


def meanings(policy: ExpertPolicy) -> list[Explanation]:
    """Explanations of every line of the canonical text, and of the defaults of eviction, prefetch and mode."""
    said = {("cache", "eviction"), ("prefetch", "strategy"), ("schedule", "mode")}
    found: list[Explanation] = []
    last = ""
    seconds = {rule.action.name: rule for rule in policy.adapt if rule.conditional}
    for block, key, text in entries(policy, written=said):
        words = _words(policy, block, key)
        swap = seconds.get(KEYS[block][key].swap)
        if swap is not None:
            words += f"; {_change(swap)}"
        found.append(Explanation(block="" if block == last else block, line=f"{key} = {text}", words=words))
        last = block
    for index, rule in enumerate(rule for rule in policy.adapt if not rule.conditional):
        found.append(Explanation(block="adapt" if index == 0 else "", line=rule_text(rule), words=_change(rule)))
    return found


def _words(policy: ExpertPolicy, block: str, key: str) -> str:
    words = _KEYS[block, key]
    return words(policy) if callable(words) else words.format(getattr(getattr(policy, block), key))


def _change(rule: AdaptRule) -> str:
    held = "as soon as" if rule.accesses == 1 else f"once for {rule.accesses} accesses in a row"
    action = rule.action
    if action.kind == "set":
        what = _ACTIONS[action.name].format(value_text(action.value))
    elif action.kind == "trigger":
        what = f"watch memory from then on, at {PRESSURE_THRESHOLD:.0%} if no threshold is set"
    else:
        what = "move room between layers"
    return f"{held} {condition_text(rule)}, {what}"


# ---------------------------------------------------------------------------------------------------------------------
# Memory


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
    """The number of experts of the model that the cache holds.

    Raises:
        ConfigError: the capacity is smaller than one expert, or the layers' budgets cannot be met.
    """
    layers, total = policy.per_layer, policy.slots(experts.layers, experts.per_layer, experts.page_bytes)
    if layers is None:
        return total
    least, most = (
        min(bound, experts.per_layer) * experts.layers for bound in (layers.min_capacity, layers.max_capacity)
    )
    if not least <= total <= most:
        raise ConfigError(
            f"policy {policy.name}: room for {total:,} experts cannot be shared out to {experts.layers} layers, which "
            f"take {least:,} to {most:,} together; change capacity, total_budget, min_capacity or max_capacity"
        )
    return total


def memory_words(policy: ExpertPolicy, experts: ExpertSizes, model: str) -> str:
    """One sentence on the cache's size in experts and bytes for a model."""
    count = cached_experts(policy, experts)
    share = count / experts.count
    if count == experts.count:
        return f"on {model}: all {count:,} experts have room, {format_bytes(count * experts.page_bytes)}"
    return (
        f"on {model}: {count:,} of {experts.count:,} experts ({share:.1%}) have room, "
        f"{format_bytes(count * experts.page_bytes)} at {format_bytes(experts.page_bytes)} each; "
        f"the other {experts.count - count:,}, {format_bytes((experts.count - count) * experts.page_bytes)}, "
        "stay in the memory below"
    )


def pressure_words(policy: ExpertPolicy, experts: ExpertSizes) -> str:
    """The memory threshold in experts of the policy's own ``expert_size_gb``, or an empty string if there is none."""
    cache = policy.cache
    if cache.memory_threshold is None:
        return ""
    least = int(cache.memory_threshold * cache.memory_budget_gb / cache.expert_size_gb)
    real = experts.page_bytes / GB
    return (
        f"memory pressure begins above {least:,} experts of {cache.expert_size_gb:g} GB; "
        f"one of this model has {real:.3g} GB"
    )


def spread(policy: ExpertPolicy, experts: ExpertSizes, capacities: Mapping[str, int]) -> dict[str, int]:
    """Experts by tier, fastest first: cached ones in the first tier (``device``, or ``host`` without a GPU), the others
    in the second as far as they fit, and the rest in the last. ``capacities``: bytes by tier."""
    tiers = [tier for tier in ("device", "host", "disk") if capacities.get(tier)]
    found = {tiers[0]: cached_experts(policy, experts)}
    left = experts.count - found[tiers[0]]
    for tier in tiers[1:-1]:
        found[tier] = min(left, capacities[tier] // experts.page_bytes)
        left -= found[tier]
    if len(tiers) > 1:
        found[tiers[-1]] = left
    return found
