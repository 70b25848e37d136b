"""Check a tree against the language: its blocks, keys, types of values, and rules.

One call finds all errors of a text; legal statements without effect become warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    WrongValueError,
    typed_value,
    word_of,
)
from moelight.lang.parse import parse
from moelight.lang.rules import BrokenRule, Place, broken_rules, swapped
from moelight.lang.syntax import (
    Assignment,
    Block,
    Command,
    Condition,
    Conditional,
    Name,
    PolicyNode,
    PolicyText,
    Rule,
    Span,
    Value,
)

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


# Replaces a missing or unreadable capacity: rules about counts do not apply to a share.
UNKNOWN_CAPACITY = Capacity(value=100.0, unit="percent")


def lower(
    name: str, values: Mapping[Place, Any], *, blocks: Iterable[str] = (), adapt: Iterable[AdaptRule] = ()
) -> ExpertPolicy:
    """The policy of ``values`` by block and key; missing keys take the language's defaults. ``blocks``: those present
    in the text, empty ones included."""
    sections: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    for (block, key), value in values.items():
        sections.setdefault(block, {})["strategy" if key == "predictor" else key] = value
    cache = {"capacity": UNKNOWN_CAPACITY, **sections.get("cache", {})}
    layers = sections.get("per_layer")
    if layers is not None and layers.get("total_budget") == 0:
        layers["total_budget"] = None  # the reference's spelling of: not given
    return ExpertPolicy(
        name=name,
        cache=CacheRules(**cache),
        prefetch=PrefetchRules(**sections.get("prefetch", {})),
        schedule=ScheduleRules(**sections.get("schedule", {})),
        monitor=MonitorRules(**sections["monitor"]) if "monitor" in sections else None,
        per_layer=None if layers is None else PerLayerRules(**layers),
        adapt=tuple(adapt),
    )


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
        unread = list(unread_keys(policy))
        for rule, span in rules:
            self._judge_rule(policy, rule, span, broken)
            for found in unread:
                if not rule.conditional and _changes(rule.action, found.places[0]):
                    self._error(found.code, found.message, span, warning=True)
        written = self.written.keys()
        for found in (*unread, *pointless(policy)):
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
            for words in filter(None, (never_or_always(rule), pointless_rule(policy, rule))):
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
