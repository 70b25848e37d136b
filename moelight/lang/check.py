"""Check a tree against the language: its blocks, keys, types of values, and rules.

One call finds all errors of a text; legal statements without effect become warnings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moelight.core.errors import did_you_mean
from moelight.experts.policy import METRICS, Action, AdaptRule, ExpertPolicy
from moelight.lang import lint
from moelight.lang.adapt_rules import read_condition, read_rule
from moelight.lang.diagnostics import Diagnostic, LanguageError, located
from moelight.lang.keys import (
    BLOCKS,
    FOREIGN_BLOCKS,
    KEYS,
    UNMEASURED,
    UNSUPPORTED,
    VERSION,
    Key,
    WrongValueError,
    typed_value,
)
from moelight.lang.lower import lower
from moelight.lang.parse import parse
from moelight.lang.rules import BrokenRule, Place, broken_rules, swapped
from moelight.lang.syntax import Assignment, Block, Conditional, Name, PolicyNode, PolicyText, Rule, Span

_SHARED = ("prefetch", "strategy")  # two spellings, one place
_EXAMPLE = "policy NAME { cache { capacity = 16 } }"


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
    """The policies of ``text``, and all errors and warnings in the order of the text."""
    tree, found = parse(text)
    policies = _file(tree, found, whole=not found)
    findings = located(found, text)
    errors = tuple(finding for finding in findings if not finding.warning)
    warnings = tuple(finding for finding in findings if finding.warning)
    return CheckedText(text=text, policies=() if errors else tuple(policies), errors=errors, warnings=warnings)


def _file(tree: PolicyText, errors: list[LanguageError], *, whole: bool) -> list[ExpertPolicy]:
    version = tree.version
    if version is not None:
        if not isinstance(version.value, int | float):
            errors.append(LanguageError(code="type", message="version takes a number such as 0.7", span=version.span))
        elif version.value > VERSION:
            message = f"version {version.value:g} is newer than {VERSION}, the newest that is known here"
            errors.append(LanguageError(code="version", message=message, span=version.span))
    if not tree.policies and whole:
        errors.append(LanguageError(code="empty", message=f"there is no policy here; write {_EXAMPLE}", span=(0, 0)))
    names: set[str] = set()
    policies = []
    for node in tree.policies:
        if node.name.text in names:
            message = f"a policy {node.name.text!r} was there before; by its name only the first is found"
            errors.append(LanguageError(code="duplicate_policy", message=message, span=node.name.span, warning=True))
        names.add(node.name.text)
        policies.append(_PolicyReading(errors=errors, whole=whole).policy(node))
    return policies


@dataclass(kw_only=True, slots=True)
class _PolicyReading:
    """The state of the conversion of one policy from tree to object. ``whole``: no part of the text was unreadable."""

    errors: list[LanguageError]
    whole: bool
    values: dict[Place, Any] = field(default_factory=dict)
    spans: dict[Place, Span] = field(default_factory=dict)
    written: dict[Place, Name] = field(default_factory=dict)
    blocks: dict[str, Span] = field(default_factory=dict)
    spoiled: set[Place] = field(default_factory=set)
    seconds: dict[str, tuple[AdaptRule, Span]] = field(default_factory=dict)
    rules: list[tuple[AdaptRule, Span]] = field(default_factory=list)

    def policy(self, node: PolicyNode) -> ExpertPolicy:
        excused = not self.whole
        for block in node.blocks:
            excused |= self._block(block)
        if "cache" not in self.blocks and not excused:
            self._error("missing_block", f"policy {node.name.text} has no block cache", node.name.span)
        # Rules implied by conditional values precede explicit rules, in the order of the keys.
        order = [key.swap for keys in KEYS.values() for key in keys.values()]
        implied = sorted(self.seconds.values(), key=lambda found: order.index(found[0].action.name))
        rules = [*implied, *self.rules]
        sections = [name for name in self.blocks if name in KEYS]
        policy = lower(node.name.text, self.values, blocks=sections, adapt=[rule for rule, _ in rules])
        self._check_rules(policy, rules, node.name.span)
        return policy

    def _error(self, code: str, message: str, span: Span, *, warning: bool = False) -> None:
        self.errors.append(LanguageError(code=code, message=message, span=span, warning=warning))

    def _block(self, block: Block) -> bool:
        """Read the block; return True if it excuses a missing block ``cache``, being perhaps a misspelt one."""
        name = block.name.text
        if block.foreign or name in FOREIGN_BLOCKS:
            self._error("unsupported", f"block {name} of version 1.15 is not supported", block.name.span)
            return True
        if name not in BLOCKS:
            guess = did_you_mean(name.lower(), BLOCKS)
            known = f"known: {', '.join(BLOCKS)}"
            self._error("unknown_block", f"there is no block {name!r}{guess}; {known}", block.name.span)
            return "'cache'" in guess
        if name in self.blocks:
            self._error("duplicate_block", f"block {name} is there twice; put its keys into one", block.name.span)
            return False
        self.blocks[name] = block.name.span
        if not block.items and self.whole:
            what = "a rule such as when hit_rate < 0.4 { eviction = lfu }" if name == "adapt" else "at least one key"
            self._error("empty_block", f"block {name} is empty; write {what} or leave it out", block.name.span)
        excused = not self.whole or not block.items
        for item in block.items:
            if isinstance(item, Rule):
                self._rule(item, name)
            else:
                excused |= self._entry(item, name)
        if name == "cache" and not excused and not {*self.values, *self.spoiled} & {("cache", "capacity")}:
            self._error("missing_key", "cache has no capacity; write how many experts stay", block.name.span)
        return False

    def _rule(self, rule: Rule, block: str) -> None:
        if block != "adapt":
            self._error("adapt", f"a rule stands in the block adapt, not in {block}", rule.condition.metric.span)
            return
        found = read_rule(rule, self.errors, whole=self.whole)
        if found is not None:
            self.rules.append(found)

    def _entry(self, entry: Assignment, block: str) -> bool:
        """Read the entry; return True if it excuses a missing ``capacity``, being perhaps a misspelt one."""
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
        try:
            self._value(entry, keys[name], place)
        except WrongValueError as error:
            self.spoiled.add(place)
            self._error(error.code, str(error), error.span)
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

    def _value(self, entry: Assignment, key: Key, place: Place) -> None:
        given = entry.value
        name = entry.key.text
        if not isinstance(given, Conditional):
            self.values[place] = found = typed_value(name, key, given)
            self.spans[place] = given.span
            if key.kind == "names" and isinstance(found, tuple) and UNMEASURED in found:
                self.values[place] = tuple(word for word in found if word != UNMEASURED) or METRICS[:1]
                message = f"{UNMEASURED} is left out: seconds are in the stats of a run, not in the monitor"
                self._error("pointless", message, given.span, warning=True)
            return
        if not key.swap:
            raise WrongValueError(
                "conditional", f"{name} takes no second value; rules cannot change it", given.second.span
            )
        try:
            self.values[place] = typed_value(name, key, given.first)
            self.spans[place] = given.first.span
        except WrongValueError as error:
            self.spoiled.add(place)
            self._error(error.code, str(error), error.span)
        second: Any = typed_value(name, key, given.second)
        condition = read_condition(given.condition, self.errors)
        if condition is not None:
            metric, operator, threshold = condition
            action = Action(kind="set", name=key.swap, value=second)
            rule = AdaptRule(metric=metric, op=operator, threshold=threshold, action=action, conditional=True)
            self.seconds[key.swap] = (rule, given.second.span)

    # -----------------------------------------------------------------------------------------------------------------
    # Rules and advice

    def _check_rules(self, policy: ExpertPolicy, rules: list[tuple[AdaptRule, Span]], name: Span) -> None:
        broken = broken_rules(policy)
        for found in broken:
            if not self.spoiled.intersection(found.places):
                self._error(found.code, found.message, self._span(found, name))
        unread = list(lint.unread_keys(policy))
        for rule, span in rules:
            self._judge_rule(policy, rule, span, broken)
            for found in unread:
                if not rule.conditional and _changes(rule.action, found.places[0]):
                    self._error(found.code, found.message, span, warning=True)
        written = self.written.keys()
        for found in (*unread, *lint.pointless(policy)):
            if found.places[0] in written and found.places[0] not in self.spoiled:
                span = self.written[found.places[0]].span if found.code == "unread" else self._span(found, name)
                self._error(found.code, found.message, span, warning=True)

    def _judge_rule(self, policy: ExpertPolicy, rule: AdaptRule, span: Span, before: list[BrokenRule]) -> None:
        after = swapped(policy, rule.action)
        said = {(found.code, found.places) for found in before if len(found.places) > 1}
        wrong = False
        for found in broken_rules(after):
            known = (found.code, found.places) in said if len(found.places) > 1 else found in before
            if len(found.places) == 1 and _changes(rule.action, found.places[0]):
                known = False
            if not known and not self._excused(found, rule.action):
                wrong = True
                self._error(found.code, f"after this change {found.message}", span)
        if not wrong:
            for words in filter(None, (lint.never_or_always(rule), lint.pointless_rule(policy, rule))):
                self._error("pointless", words, span, warning=True)

    def _excused(self, found: BrokenRule, action: Action) -> bool:
        return any(place in self.spoiled and not _changes(action, place) for place in found.places)

    def _span(self, found: BrokenRule, name: Span) -> Span:
        for place in found.places:
            if place in self.spans:
                return self.spans[place]
        return self.blocks.get(found.places[0][0], name)


def _changes(action: Action, place: Place) -> bool:
    key = KEYS[place[0]].get(place[1])
    return action.kind == "set" and key is not None and key.swap == action.name
