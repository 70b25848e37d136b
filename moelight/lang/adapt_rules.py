"""Convert rules of the block ``adapt`` and conditions of second values from tree to object."""

from __future__ import annotations

from typing import Any

from moelight.core.errors import did_you_mean
from moelight.experts.policy import ACTION_KEYS, METRICS, OPERATORS, TRIGGERS, Action, AdaptRule
from moelight.lang.diagnostics import LanguageError
from moelight.lang.keys import KEYS, SWAPS, WrongValueError, typed_value, word_of
from moelight.lang.syntax import Command, Condition, Name, Rule, Span, Value

_OLD_NAMES = {"lfu_decay": "frequency_decay"}
# Likely misnomers of actions.
_MISNOMERS = {
    "strategy": "prefetch_strategy",
    "predictor": "prefetch_strategy",
    "budget": "prefetch_budget",
    "mode": "schedule_mode",
}
_VERBS = ("trigger", "rebalance")


def read_condition(condition: Condition, errors: list[LanguageError]) -> tuple[str, str, float] | None:
    """Metric, operator and threshold; None if any of them is invalid, with an error appended for each."""
    before = len(errors)
    threshold: Any = None
    metric, operator = condition.metric, condition.operator
    for attempt in (
        lambda: word_of("metric", METRICS, _as_value(metric)),
        lambda: word_of("comparison", OPERATORS, _as_value(operator)),
    ):
        _try(attempt, errors)
    threshold = _try(lambda: typed_value("the threshold", KEYS["cache"]["freq_threshold"], condition.threshold), errors)
    if len(errors) > before:
        return None
    return metric.text, operator.text, threshold


def read_rule(rule: Rule, errors: list[LanguageError], *, whole: bool) -> tuple[AdaptRule, Span] | None:
    """The rule and the span of its action's value; None if the rule is invalid, with errors appended. ``whole``: no
    part of the text was unreadable, so that a rule without an action is an error."""
    condition = read_condition(rule.condition, errors)
    accesses = _accesses(rule, errors)
    if len(rule.commands) != 1:
        if whole:
            extra = rule.commands[1].verb.span if rule.commands else rule.condition.metric.span
            message = f"a rule has exactly one action, and this one has {len(rule.commands)}"
            errors.append(LanguageError(code="adapt", message=message, span=extra))
        for command in rule.commands:
            _action(command, errors)
        return None
    command = rule.commands[0]
    action = _action(command, errors)
    if condition is None or accesses is None or action is None:
        return None
    metric, operator, threshold = condition
    found = AdaptRule(metric=metric, op=operator, threshold=threshold, accesses=accesses, action=action)
    return found, (command.value.span if command.value is not None else (command.what or command.verb).span)


def _as_value(name: Name) -> Value:
    return Value("name", name.text, name.span)


def _try(attempt: Any, errors: list[LanguageError]) -> Any:
    try:
        return attempt()
    except WrongValueError as error:
        errors.append(LanguageError(code=error.code, message=str(error), span=error.span))
        return None


def _accesses(rule: Rule, errors: list[LanguageError]) -> int | None:
    """The number of consecutive accesses over which the condition must hold; 1 if the rule has none."""
    if rule.count is None or rule.unit is None:
        return 1
    if rule.unit.text != "accesses":
        message = f"{rule.unit.text!r} is not counted; write for N accesses"
        errors.append(LanguageError(code="unknown_value", message=message, span=rule.unit.span))
    counted = rule.count
    count = _try(lambda: typed_value("for", KEYS["cache"]["ttl"], counted), errors)
    if count == 0:
        message = "for 0 accesses would fire at once, whatever the condition; write at least 1"
        errors.append(LanguageError(code="range", message=message, span=counted.span))
        return None
    return count if rule.unit.text == "accesses" and isinstance(count, int) else None


def _action(command: Command, errors: list[LanguageError]) -> Action | None:
    verb, span = command.verb.text, command.verb.span
    if command.value is not None:
        return _setting(verb, span, command.value, errors)
    what = command.what
    if verb not in _VERBS or what is None:
        message = f"{verb!r} is no action{did_you_mean(verb, _VERBS)}; write KEY = VALUE, trigger or rebalance"
        errors.append(LanguageError(code="unknown_key", message=message, span=span))
        return None
    if verb == "trigger" and _try(lambda: word_of("trigger", TRIGGERS, _as_value(what)), errors) is None:
        return None
    return Action(kind=verb, name=what.text)


def _setting(verb: str, span: Span, value: Value, errors: list[LanguageError]) -> Action | None:
    name = _OLD_NAMES.get(verb, verb)
    if name != verb:
        message = f"{verb} is an old name; write {name}"
        errors.append(LanguageError(code="deprecated", message=message, span=span, warning=True))
    if name not in ACTION_KEYS:
        near = _MISNOMERS.get(name)
        guess = f" (did you mean {near!r}?)" if near else did_you_mean(name.lower(), ACTION_KEYS)
        message = f"rules cannot set {verb!r}{guess}; they set {', '.join(ACTION_KEYS)}"
        errors.append(LanguageError(code="unknown_key", message=message, span=span))
        return None
    block, key = SWAPS[name]
    found = _try(lambda: typed_value(name, KEYS[block][key], value), errors)
    return None if found is None else Action(kind="set", name=name, value=found)
