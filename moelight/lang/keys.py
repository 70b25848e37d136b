"""The blocks and keys of the language with their types: one table for checks, formatting and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moelight.core.errors import did_you_mean
from moelight.experts.policy import ALLOCATIONS, EVICTIONS, FALLBACK, METRICS, MODES, STRATEGIES, Capacity
from moelight.lang.syntax import Span, Value

VERSION = 0.7  # of the reference's grammar, of which this grammar is a superset
FOREIGN_BLOCKS = ("hierarchy", "per_layer_hierarchy")
FOREIGN_METRICS = ("utilization_gini", "dead_expert_rate", "cost_per_token", "cold_promotion_rate", "drift")
# A metric of the reference's monitor. Times are in the stats of a run, so this metric is accepted and ignored.
UNMEASURED = "latency"
MONITOR_METRICS = (*METRICS, UNMEASURED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """The type of a key: a ``kind`` of `typed_value`, and ``choices`` for words and names. ``swap``: the name under
    which rules may change the key, which may then have a second value."""

    kind: str
    choices: tuple[str, ...] = ()
    swap: str = ""


_INT, _NUMBER, _BOOL = Key(kind="int"), Key(kind="number"), Key(kind="bool")
_STRATEGY = Key(kind="word", choices=STRATEGIES, swap="prefetch_strategy")

KEYS: Mapping[str, Mapping[str, Key]] = {
    "cache": {
        "capacity": Key(kind="capacity", swap="capacity"),
        "eviction": Key(kind="eviction", choices=(*EVICTIONS, "fallback"), swap="eviction"),
        "pin": Key(kind="ids"),
        "frequency_decay": Key(kind="number", swap="frequency_decay"),
        "freq_threshold": _NUMBER,
        "freq_window": _INT,
        "score_ema_alpha": _NUMBER,
        "memory_threshold": _NUMBER,
        "memory_headroom": _NUMBER,
        "memory_budget_gb": _NUMBER,
        "expert_size_gb": _NUMBER,
        "ttl": _INT,
        "warm_pin": _INT,
        "profile": Key(kind="text"),
    },
    "prefetch": {
        "strategy": _STRATEGY,
        "lookahead": _INT,
        "budget": Key(kind="int", swap="prefetch_budget"),
        "affinity_threshold": _NUMBER,
        "history_window": _INT,
        "predictor": _STRATEGY,
    },
    "schedule": {
        "mode": Key(kind="word", choices=MODES, swap="schedule_mode"),
        "offload_threshold_ms": _NUMBER,
        "overlap": _BOOL,
        "priority_routing": _BOOL,
    },
    "monitor": {"metrics": Key(kind="names", choices=MONITOR_METRICS), "window": _INT, "log_interval": _INT},
    "per_layer": {
        "allocation": Key(kind="word", choices=ALLOCATIONS),
        "entropy_window": _INT,
        "min_capacity": _INT,
        "max_capacity": _INT,
        "rebalance_interval": _INT,
        "total_budget": _INT,
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
        self.code = code
        self.span = span


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
    """``value`` converted to the type of ``key`` in policy objects.

    Raises:
        WrongValueError: ``value`` is of another type, or an unknown word.
    """
    kind = value.kind
    if kind == "signed":
        raise WrongValueError("type", f"{name} = {value.value}: numbers of this language carry no sign", value.span)
    if kind == "huge":
        raise WrongValueError("type", f"{name}: this number is too large", value.span)
    found: object = None
    match key.kind:
        case "capacity":
            found = _capacity(value)
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
        raise WrongValueError("type", f"{name} takes {_WANTED[key.kind]}{_quotes(key, value)}", value.span)
    return found


def _quotes(key: Key, value: Value) -> str:
    if value.kind == "text" and value.value in key.choices:
        return f"; write {value.value} without quotes"
    return ""


def _capacity(value: Value) -> Capacity | None:
    unit = {"int": "slots", "percent": "percent", "size": "bytes"}.get(value.kind)
    return None if unit is None or not isinstance(value.value, int | float) else Capacity(value=value.value, unit=unit)


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
    """A bare word that must be one of ``choices``; ``noun`` names the choices in the error.

    Raises:
        WrongValueError: the word is not one of ``choices``.
    """
    word = str(value.value)
    if word in choices:
        return word
    if word in UNSUPPORTED:
        raise WrongValueError("unsupported", f"{word} is not for running: {UNSUPPORTED[word]}", value.span)
    if word in FOREIGN_METRICS:
        raise WrongValueError(
            "unsupported", f"{word} of version 1.15 is not measured here; {_known(choices)}", value.span
        )
    guess = did_you_mean(word.lower(), choices) if word.isidentifier() else ""
    message = f"{word!r} is no {noun}{guess}; {_known(choices)}"
    raise WrongValueError("unknown_value", message, value.span)


def _known(choices: tuple[str, ...]) -> str:
    return f"known: {', '.join(choices)}"


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
