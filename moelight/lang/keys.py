"""The blocks and keys of the language: one table of types, ranges, readers and meanings, from which texts are checked,
formatted and explained; and the conversion of written values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moelight.core.errors import did_you_mean
from moelight.experts.policy import ALLOCATIONS, EVICTIONS, FALLBACK, METRICS, MODES, STRATEGIES, Capacity
from moelight.lang.diagnostics import LanguageError
from moelight.lang.syntax import Value

VERSION = 0.7  # of the reference's grammar, of which this grammar is a superset
FOREIGN_BLOCKS = ("hierarchy", "per_layer_hierarchy")
FOREIGN_METRICS = ("utilization_gini", "dead_expert_rate", "cost_per_token", "cold_promotion_rate", "drift")
# A metric of the reference's monitor. Times are in the stats of a run, so this metric is accepted and ignored.
UNMEASURED = "latency"

Place = tuple[str, str]  # block, key


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the language.

    Attributes:
        kind: a kind of `typed_value`; ``choices`` for words and names.
        means: the value in words: a format string, or the words of each value; empty where `explain` has a function.
        swap: the name under which rules may change the key, which may then have a second value.
        rule: code, condition and complaint of the rule on the value alone.
        readers: values of the block's selector (`SELECTORS`) for which the key is read; empty: for all.
    """

    kind: str
    means: str | Mapping[Any, str] = ""
    choices: tuple[str, ...] = ()
    swap: str = ""
    rule: tuple[str, Callable[[Any], bool], str] | None = None
    readers: tuple[str, ...] = ()


# The key of a block on which it depends whether other keys of the block are read, and how a warning shows its value.
SELECTORS = {
    "cache": ("eviction", "eviction is {}"),
    "prefetch": ("strategy", "the strategy is {}"),
    "schedule": ("mode", "mode is {}"),
    "per_layer": ("allocation", "uniform budgets never change"),
}


def _count(means: str, code: str = "range", *, more: str = "", swap: str = "", readers: tuple[str, ...] = ()) -> Key:
    rule = (code, lambda value: value >= 1, f"must be at least 1{more}")
    return Key("int", means, rule=rule, swap=swap, readers=readers)


# Conditions and complaints of `Key.rule`.
_ABOVE_0 = (lambda value: value > 0, "must be above 0")
_WITHIN_0_AND_1 = (lambda value: 0 <= value <= 1, "must lie within 0 and 1")
_SHARE = (lambda value: 0 < value <= 1, "must be above 0 and at most 1")
_BETWEEN_0_AND_1 = (lambda value: 0 < value < 1, "must lie between 0 and 1, neither of them")

_STRATEGY = Key(
    "word",
    {
        "none": "nothing is fetched ahead",
        "affinity": "fetch ahead what usually follows the experts just chosen, as learned on the way",
        "history": "fetch ahead what the layer chose most of late",
        "lookahead": "fetch ahead what layers further on chose most of late",
        "previous": "fetch ahead what the layer chose for the tokens before",
        "frequency": "fetch ahead what the layer chooses most on the whole",
        "next_router": "fetch ahead what the next layer's router says of this layer's hidden state",
    },
    STRATEGIES,
    swap="prefetch_strategy",
)
_MODE = {
    "gpu_only": "a missing expert is fetched and computed on the compute device",
    "cpu_fallback": "a missing expert is computed by the processor beside which it lies",
    "hybrid": "a missing expert is fetched, or computed where it lies if that is estimated to be sooner",
}
_ALLOCATION = {
    "uniform": "every layer has a budget of its own, all alike",
    "entropy": "every layer has a budget of its own: layers that spread their tokens over more experts get more",
}
_PRIORITY = {
    True: "experts with more of the router's weight are served first",
    False: "experts are served in the order of their ids",
}

KEYS: Mapping[str, Mapping[str, Key]] = {
    "cache": {
        "capacity": Key("capacity", swap="capacity"),
        "eviction": Key("eviction", choices=(*EVICTIONS, "fallback"), swap="eviction"),
        "pin": Key("ids"),
        "frequency_decay": Key(
            "number",
            "for lfu, uses fade to {:g} of their weight, again and again",
            swap="frequency_decay",
            rule=("V4", *_BETWEEN_0_AND_1),
            readers=("lfu",),
        ),
        "freq_threshold": Key(
            "number",
            "for frequency_threshold, the share of recent accesses that lets an expert stay: {:g}",
            rule=("V5", *_WITHIN_0_AND_1),
            readers=("frequency_threshold",),
        ),
        "freq_window": _count(
            "for frequency_threshold, recent means the last {} accesses", "V6", readers=("frequency_threshold",)
        ),
        "score_ema_alpha": Key(
            "number", "for score, the weight of the newest value: {:g}", rule=("V7", *_SHARE), readers=("score",)
        ),
        "memory_threshold": Key("number", rule=("V16", *_SHARE)),
        "memory_headroom": Key("number", "where relief from memory pressure ends: {:.0%} of the budget"),
        "memory_budget_gb": Key("number", "memory pressure is measured against {:g} GB"),
        "expert_size_gb": Key("number", "for memory pressure an expert counts as {:g} GB", rule=("V19", *_ABOVE_0)),
        "ttl": _count(
            "an expert leaves when {} accesses have not asked for it",
            "V20",
            more="; without the line, no expert leaves for its age",
        ),
        "warm_pin": _count(
            "after {} accesses the busiest residents are pinned", more="; without the line, nothing is pinned"
        ),
        "profile": Key("text", "begin with the counts of this file instead of none"),
    },
    "prefetch": {
        "strategy": _STRATEGY,
        "lookahead": _count("for lookahead, {} layers ahead", "V8", readers=("lookahead",)),
        "budget": _count("at most {} experts of a layer are fetched ahead", "V9", swap="prefetch_budget"),
        "affinity_threshold": Key(
            "number",
            "for affinity, only followers with a probability of at least {:g}",
            rule=("V11", *_WITHIN_0_AND_1),
            readers=("affinity",),
        ),
        "history_window": _count(
            "of late means the last {} batches of a layer", "V12", readers=("history", "lookahead")
        ),
        "predictor": _STRATEGY,
    },
    "schedule": {
        "mode": Key("word", _MODE, MODES, swap="schedule_mode"),
        "offload_threshold_ms": Key(
            "number",
            "for hybrid, fetches of up to {:g} ms are always made",
            rule=("V13", *_ABOVE_0),
            readers=("hybrid",),
        ),
        "overlap": Key("bool", {True: "transfers and computation overlap", False: "transfers hold up computation"}),
        "priority_routing": Key("bool", _PRIORITY),
    },
    "monitor": {
        "metrics": Key("names", choices=(*METRICS, UNMEASURED)),
        "window": _count("figures are over the last {} accesses"),
        "log_interval": _count("figures are noted every {} accesses"),
    },
    "per_layer": {
        "allocation": Key("word", _ALLOCATION, ALLOCATIONS),
        "entropy_window": _count("spread is measured over the last {} batches of a layer", readers=("entropy",)),
        "min_capacity": Key("int", "no layer has room for fewer than {} experts"),
        "max_capacity": _count("no layer has room for more than {} experts"),
        "rebalance_interval": Key(
            "int", "room moves between layers every {} accesses (0: never)", readers=("entropy",)
        ),
        "total_budget": Key("int", "room for {} experts in all layers together"),
    },
}
BLOCKS = (*KEYS, "adapt")
SWAPS = {
    key.swap: (block, name)
    for block, keys in KEYS.items()
    for name, key in keys.items()
    if key.swap and name != "predictor"
}
# Keys of the reference that are refused, with the reason.
UNSUPPORTED = {
    "capacity_factor": "a cap on tokens per expert would change the tokens that are generated",
    "belady": "it knows what comes; moelight policy replay compares with it",
}


_WANTED = {
    "capacity": "a count of experts such as 16, a share such as 25% or a size such as 2GiB",
    "eviction": "one word, or two as in lfu | lru",
    "int": "a whole number",
    "number": "a number",
    "bool": "true or false",
    "word": "one word",
    "ids": "a list of expert ids such as [0, 3]",
    "names": "a list of names such as [hit_rate]",
    "text": 'a text in quotes such as "counts.json"',
}


_CAPACITY_UNITS = {"int": "slots", "percent": "percent", "size": "bytes"}


def typed_value(name: str, key: Key, value: Value) -> Any:
    """Return ``value`` as the type of ``key``; raises LanguageError for another type or an unknown word."""
    result: Any = None
    match key.kind, value.kind:
        case _, "signed":
            raise LanguageError("type", f"{name} = {value.text}: numbers of this language carry no sign", value.span)
        case _, "huge":
            raise LanguageError("type", f"{name}: this number is too large", value.span)
        case "capacity", ("int" | "percent" | "size") as unit:
            result = Capacity(value=value.value, unit=_CAPACITY_UNITS[unit])
        case "int", "int":
            result = value.value
        case "text", "text" if value.text.isprintable():
            result = value.text or None
        case "number", "int" | "number":
            result = float(value.value)
        case "bool", "name":
            result = {"true": True, "false": False}.get(value.text)
        case "word", "name":
            result = word_of(f"value of {name}", key.choices, value)
        case "eviction", "name":
            word = word_of(f"value of {name}", key.choices, value)
            result = FALLBACK if word == "fallback" else (word,)
        case "eviction", "layers":
            result = _layers(name, value.value)
        case "ids" | "names", "list" if value.value or key.kind == "ids":
            result = tuple(_part(name, key, part) for part in value.value)
    if result is None:
        quotes = f"; write {value.text} without quotes" if value.kind == "text" and value.text in key.choices else ""
        raise LanguageError("type", f"{name} takes {_WANTED[key.kind]}{quotes}", value.span)
    return result


def _layers(name: str, parts: tuple[Value, ...]) -> tuple[str, ...] | None:
    if len(parts) > 2:
        raise LanguageError("type", f"{name} has at most two layers, as in lfu | lru", parts[2].span)
    if any(part.kind != "name" for part in parts):
        return None
    return tuple(word_of(f"value of {name}", EVICTIONS, part) for part in parts)


def _part(name: str, key: Key, part: Value) -> int | str:
    """A part of a list of names or ids."""
    if part.kind != ("name" if key.kind == "names" else "int"):
        raise LanguageError("type", f"{name} takes {_WANTED[key.kind]}", part.span)
    return word_of(f"value of {name}", key.choices, part) if key.kind == "names" else int(part.value)


def word_of(noun: str, choices: tuple[str, ...], value: Value) -> str:
    """Return a bare word of ``choices``, else raise LanguageError, in which ``noun`` names the choices."""
    word = value.text
    if word in choices:
        return word
    hint = f"known: {', '.join(choices)}"
    if word in UNSUPPORTED:
        raise LanguageError("unsupported", f"{word} is not for running: {UNSUPPORTED[word]}", value.span)
    if word in FOREIGN_METRICS:
        raise LanguageError("unsupported", f"{word} of version 1.15 is not measured here; {hint}", value.span)
    guess = did_you_mean(word.lower(), choices) if word.isidentifier() else ""
    raise LanguageError("unknown_value", f"{word!r} is no {noun}{guess}; {hint}", value.span)
