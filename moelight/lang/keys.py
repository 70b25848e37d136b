"""The blocks and keys of the language: one table of types, ranges, readers and meanings, from which texts are checked,
formatted and explained; and the conversion of written values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moelight.core.errors import did_you_mean
from moelight.experts.policy import ALLOCATIONS, EVICTIONS, FALLBACK, METRICS, MODES, STRATEGIES, Capacity
from moelight.lang.diagnostics import LanguageError
from moelight.lang.syntax import Span, Value

VERSION = 0.7  # of the reference's grammar, of which this grammar is a superset
FOREIGN_BLOCKS = ("hierarchy", "per_layer_hierarchy")
FOREIGN_METRICS = ("utilization_gini", "dead_expert_rate", "cost_per_token", "cold_promotion_rate", "drift")
# A metric of the reference's monitor. Times are in the stats of a run, so this metric is accepted and ignored.
UNMEASURED = "latency"

Place = tuple[str, str]  # block, key


@dataclass(frozen=True, kw_only=True, slots=True)
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
    return Key(kind="int", means=means, rule=rule, swap=swap, readers=readers)


def _above_0(value: float) -> bool:
    return value > 0


def _share(value: float) -> bool:
    return 0 <= value <= 1


def _positive_share(value: float) -> bool:
    return 0 < value <= 1


_STRATEGY = Key(
    kind="word",
    means={
        "none": "nothing is fetched ahead",
        "affinity": "fetch ahead what usually follows the experts just chosen, as learned on the way",
        "history": "fetch ahead what the layer chose most of late",
        "lookahead": "fetch ahead what layers further on chose most of late",
        "previous": "fetch ahead what the layer chose for the tokens before",
        "frequency": "fetch ahead what the layer chooses most on the whole",
        "next_router": "fetch ahead what the next layer's router says of this layer's hidden state",
    },
    choices=STRATEGIES,
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
_OVERLAP = {True: "transfers and computation overlap", False: "transfers hold up computation"}
_PRIORITY = {
    True: "experts with more of the router's weight are served first",
    False: "experts are served in the order of their ids",
}

KEYS: Mapping[str, Mapping[str, Key]] = {
    "cache": {
        "capacity": Key(kind="capacity", swap="capacity"),
        "eviction": Key(kind="eviction", choices=(*EVICTIONS, "fallback"), swap="eviction"),
        "pin": Key(kind="ids"),
        "frequency_decay": Key(
            kind="number",
            means="for lfu, uses fade to {:g} of their weight, again and again",
            swap="frequency_decay",
            rule=("V4", lambda value: 0 < value < 1, "must lie between 0 and 1, neither of them"),
            readers=("lfu",),
        ),
        "freq_threshold": Key(
            kind="number",
            means="for frequency_threshold, the share of recent accesses that lets an expert stay: {:g}",
            rule=("V5", _share, "must lie within 0 and 1"),
            readers=("frequency_threshold",),
        ),
        "freq_window": _count(
            "for frequency_threshold, recent means the last {} accesses", "V6", readers=("frequency_threshold",)
        ),
        "score_ema_alpha": Key(
            kind="number",
            means="for score, the weight of the newest value: {:g}",
            rule=("V7", _positive_share, "must be above 0 and at most 1"),
            readers=("score",),
        ),
        "memory_threshold": Key(kind="number", rule=("V16", _positive_share, "must be above 0 and at most 1")),
        "memory_headroom": Key(kind="number", means="where relief from memory pressure ends: {:.0%} of the budget"),
        "memory_budget_gb": Key(kind="number", means="memory pressure is measured against {:g} GB"),
        "expert_size_gb": Key(
            kind="number",
            means="for memory pressure an expert counts as {:g} GB",
            rule=("V19", _above_0, "must be above 0"),
        ),
        "ttl": _count(
            "an expert leaves when {} accesses have not asked for it",
            "V20",
            more="; without the line, no expert leaves for its age",
        ),
        "warm_pin": _count(
            "after {} accesses the busiest residents are pinned", more="; without the line, nothing is pinned"
        ),
        "profile": Key(kind="text", means="begin with the counts of this file instead of none"),
    },
    "prefetch": {
        "strategy": _STRATEGY,
        "lookahead": _count("for lookahead, {} layers ahead", "V8", readers=("lookahead",)),
        "budget": _count("at most {} experts of a layer are fetched ahead", "V9", swap="prefetch_budget"),
        "affinity_threshold": Key(
            kind="number",
            means="for affinity, only followers with a probability of at least {:g}",
            rule=("V11", _share, "must lie within 0 and 1"),
            readers=("affinity",),
        ),
        "history_window": _count(
            "of late means the last {} batches of a layer", "V12", readers=("history", "lookahead")
        ),
        "predictor": _STRATEGY,
    },
    "schedule": {
        "mode": Key(kind="word", means=_MODE, choices=MODES, swap="schedule_mode"),
        "offload_threshold_ms": Key(
            kind="number",
            means="for hybrid, fetches of up to {:g} ms are always made",
            rule=("V13", _above_0, "must be above 0"),
            readers=("hybrid",),
        ),
        "overlap": Key(kind="bool", means=_OVERLAP),
        "priority_routing": Key(kind="bool", means=_PRIORITY),
    },
    "monitor": {
        "metrics": Key(kind="names", choices=(*METRICS, UNMEASURED)),
        "window": _count("figures are over the last {} accesses"),
        "log_interval": _count("figures are noted every {} accesses"),
    },
    "per_layer": {
        "allocation": Key(kind="word", means=_ALLOCATION, choices=ALLOCATIONS),
        "entropy_window": _count("spread is measured over the last {} batches of a layer", readers=("entropy",)),
        "min_capacity": Key(kind="int", means="no layer has room for fewer than {} experts"),
        "max_capacity": _count("no layer has room for more than {} experts"),
        "rebalance_interval": Key(
            kind="int", means="room moves between layers every {} accesses (0: never)", readers=("entropy",)
        ),
        "total_budget": Key(kind="int", means="room for {} experts in all layers together"),
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


class WrongValueError(ValueError):
    """A value is not of its key's type."""

    def __init__(self, code: str, message: str, span: Span) -> None:
        super().__init__(message)
        self.error = LanguageError(code=code, message=message, span=span)


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


def typed_value(name: str, key: Key, value: Value) -> object:
    """Return ``value`` as the type of ``key``; raises WrongValueError for another type or an unknown word."""
    kind = value.kind
    if kind == "signed":
        raise WrongValueError("type", f"{name} = {value.value}: numbers of this language carry no sign", value.span)
    if kind == "huge":
        raise WrongValueError("type", f"{name}: this number is too large", value.span)
    found: object = None
    match key.kind:
        case "capacity":
            if kind in _CAPACITY_UNITS and isinstance(value.value, int | float):
                found = Capacity(value=value.value, unit=_CAPACITY_UNITS[kind])
        case "eviction":
            found = _eviction(name, key, value)
        case "int":
            found = value.value if kind == "int" else None
        case "number":
            found = float(value.value) if isinstance(value.value, int | float) and kind in ("int", "number") else None
        case "bool":
            found = {"true": True, "false": False}.get(str(value.value)) if kind == "name" else None
        case "word":
            found = word_of(f"value of {name}", key.choices, value) if kind == "name" else None
        case "text":
            found = value.value if kind == "text" and value.value and str(value.value).isprintable() else None
        case "ids" | "names":
            found = _listed(name, key, value)
    if found is None:
        quotes = f"; write {value.value} without quotes" if kind == "text" and value.value in key.choices else ""
        raise WrongValueError("type", f"{name} takes {_WANTED[key.kind]}{quotes}", value.span)
    return found


_CAPACITY_UNITS = {"int": "slots", "percent": "percent", "size": "bytes"}


def _eviction(name: str, key: Key, value: Value) -> tuple[str, ...] | None:
    if value.kind == "name":
        word = word_of(f"value of {name}", key.choices, value)
        return FALLBACK if word == "fallback" else (word,)
    if value.kind != "layers" or not isinstance(value.value, tuple):
        return None
    if len(value.value) > 2:
        raise WrongValueError("type", f"{name} has at most two layers, as in lfu | lru", value.value[2].span)
    if any(part.kind != "name" for part in value.value):
        return None
    return tuple(word_of(f"value of {name}", EVICTIONS, part) for part in value.value)


def word_of(noun: str, choices: tuple[str, ...], value: Value) -> str:
    """Return a bare word of ``choices``, else raise WrongValueError, in which ``noun`` names the choices."""
    word = str(value.value)
    if word in choices:
        return word
    known = f"known: {', '.join(choices)}"
    if word in UNSUPPORTED:
        raise WrongValueError("unsupported", f"{word} is not for running: {UNSUPPORTED[word]}", value.span)
    if word in FOREIGN_METRICS:
        raise WrongValueError("unsupported", f"{word} of version 1.15 is not measured here; {known}", value.span)
    guess = did_you_mean(word.lower(), choices) if word.isidentifier() else ""
    raise WrongValueError("unknown_value", f"{word!r} is no {noun}{guess}; {known}", value.span)


def _listed(name: str, key: Key, value: Value) -> tuple[int | str, ...] | None:
    if value.kind != "list" or not isinstance(value.value, tuple) or (key.kind == "names" and not value.value):
        return None
    wanted = "name" if key.kind == "names" else "int"
    found: list[int | str] = []
    for part in value.value:
        if part.kind != wanted or not isinstance(part.value, int | str):
            raise WrongValueError("type", f"{name} takes {_WANTED[key.kind]}", part.span)
        found.append(word_of(f"value of {name}", key.choices, part) if key.kind == "names" else part.value)
    return tuple(found)
