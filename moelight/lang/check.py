"""From text to policies: blocks, keys, values and rules of a tree, checked against the language. One call finds all
errors of a text; legal statements without effect become warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moelight.core.errors import did_you_mean
from moelight.experts.policy import (
    ACTION_KEYS,
    METRICS,
    OPERATORS,
    TRIGGERS,
    Action,
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)
from moelight.lang.diagnostics import Diagnostic, LanguageError, located
from moelight.lang.keys import (
    BLOCKS,
    FOREIGN_BLOCKS,
    KEYS,
    SWAPS,
    UNMEASURED,
    UNSUPPORTED,
    VERSION,
    Key,
    Place,
    WrongValueError,
    typed_value,
    word_of,
)
from moelight.lang.parse import parse
from moelight.lang.rules import BrokenRule, broken_rules, pointless, pointless_rule, swapped, unread_keys
from moelight.lang.syntax import Assignment, Block, Command, Condition, Conditional, Name, PolicyNode, Rule, Span, Value

_SECTIONS = {
    "cache": CacheRules,
    "prefetch": PrefetchRules,
    "schedule": ScheduleRules,
    "monitor": MonitorRules,
    "per_layer": PerLayerRules,
}
# Replaces a missing or unreadable capacity: rules about counts do not apply to a share.
_UNKNOWN_CAPACITY = Capacity(value=100.0, unit="percent")
_OLD_NAMES = {"lfu_decay": "frequency_decay"}
# Likely misnomers of actions.
_MISNOMERS = {
    "strategy": "prefetch_strategy",
    "predictor": "prefetch_strategy",
    "budget": "prefetch_budget",
    "mode": "schedule_mode",
}
_VERBS = ("trigger", "rebalance")
_SHARED = ("prefetch", "strategy")  # two spellings, one place
_EXAMPLE = "policy NAME { cache { capacity = 16 } }"

_PlacedRule = tuple[AdaptRule, Span]  # with the span of the value of its action


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedText:
    """A text with its policies (none if there are errors), its errors and its warnings."""

    text: str
    policies: tuple[ExpertPolicy, ...]
    errors: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]

    @property
    def lines(self) -> list[str]:
        """The lines of the text, as diagnostics count them."""
        return self.text.split("\n")


def read(text: str) -> CheckedText:
    """Return the policies of ``text``, and all errors and warnings in the order of the text."""
    tree, found = parse(text)
    whole = not found

    def complain(code: str, message: str, span: Span, *, warning: bool = False) -> None:
        found.append(LanguageError(code=code, message=message, span=span, warning=warning))

    version = tree.version
    if version is not None:
        if not isinstance(version.value, int | float):
            complain("type", "version takes a number such as 0.7", version.span)
        elif version.value > VERSION:
            message = f"version {version.value:g} is newer than {VERSION}, the newest that is known here"
            complain("version", message, version.span)
    if not tree.policies and whole:
        complain("empty", f"there is no policy here; write {_EXAMPLE}", (0, 0))
    names: set[str] = set()
    policies = []
    for node in tree.policies:
        if node.name.text in names:
            message = f"a policy {node.name.text!r} was there before; by its name only the first is found"
            complain("duplicate_policy", message, node.name.span, warning=True)
        names.add(node.name.text)
        policies.append(_PolicyReading(found, whole=whole).policy(node))
    findings = located(found, text)
    errors = tuple(finding for finding in findings if not finding.warning)
    warnings = tuple(finding for finding in findings if finding.warning)
    return CheckedText(text=text, policies=() if errors else tuple(policies), errors=errors, warnings=warnings)


class _PolicyReading:
    """Reads one policy of the tree. ``whole``: all of the text could be parsed, so a missing part is an error."""

    def __init__(self, errors: list[LanguageError], *, whole: bool) -> None:
        self.errors, self.whole = errors, whole
        self.values: dict[Place, Any] = {}
        self.spans: dict[Place, Span] = {}
        self.written: dict[Place, Name] = {}
        self.blocks: dict[str, Span] = {}
        self.spoiled: set[Place] = set()
        self.seconds: dict[str, _PlacedRule] = {}
        self.rules: list[_PlacedRule] = []

    def policy(self, node: PolicyNode) -> ExpertPolicy:
        excused = not self.whole
        for block in node.blocks:
            excused |= self._block(block)
        if "cache" not in self.blocks and not excused:
            self._error("missing_block", f"policy {node.name.text} has no block cache", node.name.span)
        sections: dict[str, dict[str, Any]] = {name: {} for name in self.blocks if name in KEYS}
        for (name, key), value in self.values.items():
            sections[name][key] = value
        sections["cache"] = {"capacity": _UNKNOWN_CAPACITY, **sections.get("cache", {})}
        if sections.get("per_layer", {}).get("total_budget") == 0:
            del sections["per_layer"]["total_budget"]  # the reference's spelling of: not given
        # Rules implied by conditional values precede explicit rules, in the order of the keys.
        rules = [*(self.seconds[name] for name in SWAPS if name in self.seconds), *self.rules]
        made: dict[str, Any] = {name: _SECTIONS[name](**values) for name, values in sections.items()}
        policy = ExpertPolicy(name=node.name.text, adapt=tuple(rule for rule, _ in rules), **made)
        self._check_rules(policy, rules, node.name.span)
        return policy

    def _error(self, code: str, message: str, span: Span, *, warning: bool = False) -> None:
        self.errors.append(LanguageError(code=code, message=message, span=span, warning=warning))

    # ---- blocks and entries

    def _block(self, block: Block) -> bool:
        """Read the block; True if it excuses a missing block ``cache``, being perhaps a misspelt one."""
        name, span = block.name.text, block.name.span
        if name in FOREIGN_BLOCKS:
            self._error("unsupported", f"block {name} of version 1.15 is not supported", span)
            return True
        if name not in BLOCKS:
            guess = did_you_mean(name.lower(), BLOCKS)
            self._error("unknown_block", f"there is no block {name!r}{guess}; known: {', '.join(BLOCKS)}", span)
            return "'cache'" in guess
        if name in self.blocks:
            self._error("duplicate_block", f"block {name} is there twice; put its keys into one", span)
            return False
        self.blocks[name] = span
        if not block.items and self.whole:
            what = "a rule such as when hit_rate < 0.4 { eviction = lfu }" if name == "adapt" else "at least one key"
            self._error("empty_block", f"block {name} is empty; write {what} or leave it out", span)
        excused = not self.whole or not block.items
        for item in block.items:
            if isinstance(item, Assignment):
                excused |= self._entry(item, name)
            elif name == "adapt":
                self._rule(item)
            else:
                message = f"a rule stands in the block adapt, not in {name}"
                self._error("adapt", message, item.condition.metric.span)
        if name == "cache" and not excused and not {*self.values, *self.spoiled} & {("cache", "capacity")}:
            self._error("missing_key", "cache has no capacity; write how many experts stay", span)
        return False

    def _entry(self, entry: Assignment, block: str) -> bool:
        """Read the entry; True if it excuses a missing ``capacity``, being perhaps a misspelt one."""
        name, span = entry.key.text, entry.key.span
        keys = KEYS.get(block, {})
        if name not in keys:
            return self._unknown_key(name, block, span)
        place = _SHARED if name == "predictor" else (block, name)
        if place in self.written:
            if self.written[place].text != name:
                self._error("both_spellings", "strategy and predictor are one key; write one of them", span)
            else:
                self._error("duplicate_key", f"{name} is there twice", span)
            return False
        self.written[place] = entry.key
        if isinstance(entry.value, Conditional):
            self._conditional(name, keys[name], place, entry.value)
        else:
            self._value(name, keys[name], place, entry.value)
        return False

    def _unknown_key(self, name: str, block: str, span: Span) -> bool:
        if block == "adapt":
            self._error("unknown_key", "adapt holds rules: when METRIC < NUMBER for N accesses { ACTION }", span)
            return False
        if name in UNSUPPORTED:
            self._error("unsupported", f"{name} is not supported: {UNSUPPORTED[name]}", span)
            return False
        keys = KEYS[block]
        guess = did_you_mean(name.lower(), keys)
        other = next((where for where, found in KEYS.items() if name in found), None)
        hint = guess or (f"; it belongs to {other}" if other else f"; known: {', '.join(keys)}")
        self._error("unknown_key", f"{block} has no key {name!r}{hint}", span)
        return "'capacity'" in guess

    def _value(self, name: str, key: Key, place: Place, value: Value) -> None:
        found = self._typed(name, key, value)
        if found is None:
            self.spoiled.add(place)
            return
        self.values[place], self.spans[place] = found, value.span
        if key.kind == "names" and UNMEASURED in found:
            self.values[place] = tuple(word for word in found if word != UNMEASURED) or METRICS[:1]
            message = f"{UNMEASURED} is left out: seconds are in the stats of a run, not in the monitor"
            self._error("pointless", message, value.span, warning=True)

    def _conditional(self, name: str, key: Key, place: Place, given: Conditional) -> None:
        if not key.swap:
            self.spoiled.add(place)
            message = f"{name} takes no second value; rules cannot change it"
            self._error("conditional", message, given.second.span)
            return
        self._value(name, key, place, given.first)
        second = self._typed(name, key, given.second)
        if second is None:
            self.spoiled.add(place)
        elif (condition := self._condition(given.condition)) is not None:
            action = Action(kind="set", name=key.swap, value=second)
            self.seconds[key.swap] = (AdaptRule(**condition, action=action, conditional=True), given.second.span)

    def _typed(self, name: str, key: Key, value: Value) -> Any:
        """The value converted to the type of ``key``; None with an error if it is of another type."""
        try:
            return typed_value(name, key, value)
        except WrongValueError as error:
            self.errors.append(error.error)
            return None

    def _word(self, noun: str, choices: tuple[str, ...], word: Name) -> str | None:
        try:
            return word_of(noun, choices, word.as_value)
        except WrongValueError as error:
            self.errors.append(error.error)
            return None

    # ---- rules of the block adapt

    def _rule(self, rule: Rule) -> None:
        condition, accesses, count = self._condition(rule.condition), self._accesses(rule), len(rule.commands)
        if count != 1 and self.whole:
            extra = rule.commands[1].verb.span if count else rule.condition.metric.span
            self._error("adapt", f"a rule has exactly one action, and this one has {count}", extra)
        actions = [self._action(command) for command in rule.commands]
        if count == 1 and condition is not None and accesses is not None and actions[0] is not None:
            found = AdaptRule(**condition, accesses=accesses, action=actions[0])
            self.rules.append((found, rule.commands[0].what.span))

    def _condition(self, condition: Condition) -> dict[str, Any] | None:
        """Metric, operator and threshold of a rule; None if any of them is invalid, with an error for each."""
        found = {
            "metric": self._word("metric", METRICS, condition.metric),
            "op": self._word("comparison", OPERATORS, condition.operator),
            "threshold": self._typed("the threshold", KEYS["cache"]["freq_threshold"], condition.threshold),
        }
        return None if None in found.values() else found

    def _accesses(self, rule: Rule) -> int | None:
        """The accesses over which the condition must hold; 1 if the rule has no number, None with an error."""
        if rule.duration is None:
            return 1
        counted, unit = rule.duration
        if unit.text != "accesses":
            self._error("unknown_value", f"{unit.text!r} is not counted; write for N accesses", unit.span)
        count: int | None = self._typed("for", KEYS["cache"]["ttl"], counted)
        if count == 0:
            message = "for 0 accesses would fire at once, whatever the condition; write at least 1"
            self._error("range", message, counted.span)
        return (count or None) if unit.text == "accesses" else None

    def _action(self, command: Command) -> Action | None:
        verb, span, what = command.verb.text, command.verb.span, command.what
        if isinstance(what, Name):
            if verb not in _VERBS:
                guess = did_you_mean(verb, _VERBS)
                message = f"{verb!r} is no action{guess}; write KEY = VALUE, trigger or rebalance"
                self._error("unknown_key", message, span)
                return None
            if verb == "trigger" and self._word("trigger", TRIGGERS, what) is None:
                return None
            return Action(kind=verb, name=what.text)
        name = _OLD_NAMES.get(verb, verb)
        if name != verb:
            self._error("deprecated", f"{verb} is an old name; write {name}", span, warning=True)
        if name not in ACTION_KEYS:
            near = _MISNOMERS.get(name)
            guess = f" (did you mean {near!r}?)" if near else did_you_mean(name.lower(), ACTION_KEYS)
            self._error("unknown_key", f"rules cannot set {verb!r}{guess}; they set {', '.join(ACTION_KEYS)}", span)
            return None
        block, key = SWAPS[name]
        found = self._typed(name, KEYS[block][key], what)
        return None if found is None else Action(kind="set", name=name, value=found)

    # ---- rules of the language

    def _check_rules(self, policy: ExpertPolicy, rules: Iterable[_PlacedRule], name: Span) -> None:
        broken = broken_rules(policy)
        for found in broken:
            if not self.spoiled.intersection(found.places):
                self._error(found.code, found.message, self._span(found, name))
        unread = list(unread_keys(policy))
        for rule, span in rules:
            self._judge_rule(policy, rule, span, broken)
            for found in unread:
                if not rule.conditional and _changes(rule.action, found.places[0]):
                    self._error(found.code, found.message, span, warning=True)
        for found in (*unread, *pointless(policy)):
            place = found.places[0]
            if place in self.written and place not in self.spoiled:
                span = self.written[place].span if found.code == "unread" else self._span(found, name)
                self._error(found.code, found.message, span, warning=True)

    def _judge_rule(self, policy: ExpertPolicy, rule: AdaptRule, span: Span, before: list[BrokenRule]) -> None:
        said = {(found.code, found.places) for found in before if len(found.places) > 1}
        wrong = False
        for found in broken_rules(swapped(policy, rule.action)):
            changed = [_changes(rule.action, place) for place in found.places]
            known = (found.code, found.places) in said if len(found.places) > 1 else found in before and not changed[0]
            spoiled = any(place in self.spoiled and not own for place, own in zip(found.places, changed, strict=True))
            if not known and not spoiled:
                wrong = True
                self._error(found.code, f"after this change {found.message}", span)
        if not wrong:
            for words in pointless_rule(policy, rule):
                self._error("pointless", words, span, warning=True)

    def _span(self, found: BrokenRule, name: Span) -> Span:
        for place in found.places:
            if place in self.spans:
                return self.spans[place]
        return self.blocks.get(found.places[0][0], name)


def _changes(action: Action, place: Place) -> bool:
    return action.kind == "set" and SWAPS[action.name] == place
