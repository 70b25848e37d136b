"""From text to policies: blocks, keys, values and rules of a tree, checked against the language. One call finds all
errors of a text; legal statements without effect become warnings. Rules V1 to V20 and our own rules on ranges depend on
the values of policy objects alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from moelight.core.errors import did_you_mean
from moelight.experts.policy import (
    ACTION_KEYS,
    METRICS,
    OPERATORS,
    PRESSURE_THRESHOLD,
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
from moelight.lang.diagnostics import CheckedText, LanguageError, checked
from moelight.lang.keys import (
    BLOCKS,
    FOREIGN_BLOCKS,
    KEYS,
    SELECTORS,
    SWAPS,
    UNMEASURED,
    UNSUPPORTED,
    VERSION,
    Key,
    Place,
    typed_value,
    word_of,
)
from moelight.lang.parse import parse
from moelight.lang.syntax import Assignment, Block, Command, Condition, Conditional, PolicyNode, Rule, Span, Value

T = TypeVar("T")

_SECTIONS = {
    "cache": CacheRules,
    "prefetch": PrefetchRules,
    "schedule": ScheduleRules,
    "monitor": MonitorRules,
    "per_layer": PerLayerRules,
}
# Replaces a missing or unreadable capacity: rules about counts do not apply to a share.
_UNKNOWN_CAPACITY = Capacity(value=100.0, unit="percent")
_CAPACITY = ("cache", "capacity")
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


def read(text: str) -> CheckedText:
    """Return the policies of ``text``, and all errors and warnings in the order of the text."""
    tree, errors = parse(text)
    complete = not errors
    if tree.version is not None:
        version, span = tree.version.value, tree.version.span
        if not isinstance(version, int | float):
            errors.append(LanguageError("type", "version takes a number such as 0.7", span))
        elif version > VERSION:
            message = f"version {version:g} is newer than {VERSION}, the newest that is known here"
            errors.append(LanguageError("version", message, span))
    if not tree.policies and complete:
        message = "there is no policy here; write policy NAME { cache { capacity = 16 } }"
        errors.append(LanguageError("empty", message, (0, 0)))
    names: set[str] = set()
    policies = []
    for node in tree.policies:
        name = node.name.text
        if name in names:
            message = f"a policy {name!r} was there before; by its name only the first is found"
            errors.append(LanguageError("duplicate_policy", message, node.name.span, warning=True))
        names.add(name)
        policies.append(_PolicyReading(errors, complete=complete).policy(node))
    return checked(text, errors, policies)


class _PolicyReading:
    """Reads one policy of the tree. ``complete``: all of the text could be parsed, so a missing part is an error."""

    def __init__(self, errors: list[LanguageError], *, complete: bool) -> None:
        self.errors, self.complete = errors, complete
        self.values: dict[Place, Any] = {}
        self.spans: dict[Place, Span] = {}  # of the values
        self.written: dict[Place, Value] = {}  # the keys, with or without a valid value
        self.blocks: dict[str, Span] = {}
        self.spoiled: set[Place] = set()
        self.misspelt: set[str] = set()  # block or key that is there in a likely misspelling
        # Rules with the spans of their values; those implied by conditional values by the name of their action.
        self.seconds: dict[str, tuple[AdaptRule, Span]] = {}
        self.rules: list[tuple[AdaptRule, Span]] = []

    def policy(self, node: PolicyNode) -> ExpertPolicy:
        for block in node.blocks:
            self._try(self._block, block)
        if self.complete and "cache" not in (*self.blocks, *self.misspelt):
            self._error("missing_block", f"policy {node.name.text} has no block cache", node.name.span)
        sections: dict[str, dict[str, Any]] = {name: {} for name in self.blocks if name in KEYS}
        for (name, key), value in self.values.items():
            sections[name][key] = value
        sections["cache"] = {"capacity": _UNKNOWN_CAPACITY, **sections.get("cache", {})}
        if sections.get("per_layer", {}).get("total_budget") == 0:
            del sections["per_layer"]["total_budget"]  # the reference's spelling of: not given
        # Rules implied by conditional values precede explicit rules, in the order of the keys.
        self.rules = [*(self.seconds[name] for name in SWAPS if name in self.seconds), *self.rules]
        made: dict[str, Any] = {name: _SECTIONS[name](**values) for name, values in sections.items()}
        policy = ExpertPolicy(name=node.name.text, adapt=tuple(rule for rule, _ in self.rules), **made)
        self._check_rules(policy, node.name.span)
        return policy

    def _error(self, code: str, message: str, span: Span, *, warning: bool = False) -> None:
        self.errors.append(LanguageError(code, message, span, warning))

    def _try(self, make: Callable[..., T], *args: Any) -> T | None:
        """``make(*args)``; None if it raises an error, which is recorded."""
        try:
            return make(*args)
        except LanguageError as error:
            self.errors.append(error)
            return None

    # ---- blocks and entries

    def _block(self, block: Block) -> None:
        name, span = block.name.text, block.name.span
        if name in FOREIGN_BLOCKS:
            self.misspelt.add("cache")
            raise LanguageError("unsupported", f"block {name} of version 1.15 is not supported", span)
        if name not in BLOCKS:
            guess = did_you_mean(name.lower(), BLOCKS)
            if "'cache'" in guess:
                self.misspelt.add("cache")
            raise LanguageError("unknown_block", f"there is no block {name!r}{guess}; known: {', '.join(BLOCKS)}", span)
        if name in self.blocks:
            raise LanguageError("duplicate_block", f"block {name} is there twice; put its keys into one", span)
        self.blocks[name] = span
        if not block.items and self.complete:
            expected = (
                "a rule such as when hit_rate < 0.4 { eviction = lfu }" if name == "adapt" else "at least one key"
            )
            raise LanguageError("empty_block", f"block {name} is empty; write {expected} or leave it out", span)
        for item in block.items:
            if isinstance(item, Assignment):
                self._try(self._entry, item, name)
            elif name == "adapt":
                self._rule(item)
            else:
                message = f"a rule stands in the block adapt, not in {name}"
                self._error("adapt", message, item.condition.metric.span)
        if name == "cache" and self.complete and _CAPACITY not in self.written and "capacity" not in self.misspelt:
            self._error("missing_key", "cache has no capacity; write how many experts stay", span)

    def _entry(self, entry: Assignment, block: str) -> None:
        name, span = entry.key.text, entry.key.span
        key = KEYS.get(block, {}).get(name)
        if key is None:
            raise self._unknown_key(name, block, span)
        location = _SHARED if name == "predictor" else (block, name)
        if location in self.written:
            if self.written[location].text != name:
                raise LanguageError("both_spellings", "strategy and predictor are one key; write one of them", span)
            raise LanguageError("duplicate_key", f"{name} is there twice", span)
        self.written[location] = entry.key
        if not isinstance(entry.value, Conditional):
            self._value(name, key, location, entry.value)
        elif key.swap:
            self._value(name, key, location, entry.value.first)
            self._second(name, key, location, entry.value)
        else:
            self.spoiled.add(location)
            message = f"{name} takes no second value; rules cannot change it"
            raise LanguageError("conditional", message, entry.value.second.span)

    def _unknown_key(self, name: str, block: str, span: Span) -> LanguageError:
        if block == "adapt":
            message = "adapt holds rules: when METRIC < NUMBER for N accesses { ACTION }"
            return LanguageError("unknown_key", message, span)
        if name in UNSUPPORTED:
            return LanguageError("unsupported", f"{name} is not supported: {UNSUPPORTED[name]}", span)
        guess = did_you_mean(name.lower(), KEYS[block])
        if "'capacity'" in guess:
            self.misspelt.add("capacity")
        other = next((where for where, keys in KEYS.items() if name in keys), None)
        hint = guess or (f"; it belongs to {other}" if other else f"; known: {', '.join(KEYS[block])}")
        return LanguageError("unknown_key", f"{block} has no key {name!r}{hint}", span)

    def _value(self, name: str, key: Key, location: Place, value: Value) -> None:
        typed = self._try(typed_value, name, key, value)
        if typed is None:
            self.spoiled.add(location)
            return
        self.values[location], self.spans[location] = typed, value.span
        if key.kind == "names" and UNMEASURED in typed:
            self.values[location] = tuple(word for word in typed if word != UNMEASURED) or METRICS[:1]
            message = f"{UNMEASURED} is left out: seconds are in the stats of a run, not in the monitor"
            self._error("pointless", message, value.span, warning=True)

    def _second(self, name: str, key: Key, location: Place, conditional: Conditional) -> None:
        second = self._try(typed_value, name, key, conditional.second)
        if second is None:
            self.spoiled.add(location)
        elif (condition := self._condition(conditional.condition)) is not None:
            action = Action(kind="set", name=key.swap, value=second)
            self.seconds[key.swap] = (AdaptRule(**condition, action=action, conditional=True), conditional.second.span)

    # ---- rules of the block adapt

    def _rule(self, rule: Rule) -> None:
        condition, accesses, count = self._condition(rule.condition), self._accesses(rule), len(rule.actions)
        if count != 1 and self.complete:
            extra = rule.actions[1].verb.span if count else rule.condition.metric.span
            self._error("adapt", f"a rule has exactly one action, and this one has {count}", extra)
        actions = [self._try(self._action, action) for action in rule.actions]
        if count == 1 and condition is not None and accesses is not None and actions[0] is not None:
            adapt_rule = AdaptRule(**condition, accesses=accesses, action=actions[0])
            self.rules.append((adapt_rule, rule.actions[0].target.span))

    def _condition(self, condition: Condition) -> dict[str, Any] | None:
        """Metric, operator and threshold of a rule; None if any of them is invalid, with an error for each."""
        number = KEYS["cache"]["freq_threshold"]
        result = {
            "metric": self._try(word_of, "metric", METRICS, condition.metric),
            "op": self._try(word_of, "comparison", OPERATORS, condition.operator),
            "threshold": self._try(typed_value, "the threshold", number, condition.threshold),
        }
        return None if None in result.values() else result

    def _accesses(self, rule: Rule) -> int | None:
        """The accesses over which the condition must hold; 1 if the rule has no number, None with an error."""
        if rule.number is None or rule.unit is None:
            return 1
        counted = rule.unit.text == "accesses"
        if not counted:
            self._error("unknown_value", f"{rule.unit.text!r} is not counted; write for N accesses", rule.unit.span)
        count: int | None = self._try(typed_value, "for", KEYS["cache"]["ttl"], rule.number)
        if count == 0:
            message = "for 0 accesses would fire at once, whatever the condition; write at least 1"
            self._error("range", message, rule.number.span)
        return (count or None) if counted else None

    def _action(self, action: Command) -> Action:
        verb, span = action.verb.text, action.verb.span
        if not action.assigns:
            if verb not in _VERBS:
                guess = did_you_mean(verb, _VERBS)
                message = f"{verb!r} is no action{guess}; write KEY = VALUE, trigger or rebalance"
                raise LanguageError("unknown_key", message, span)
            name = word_of("trigger", TRIGGERS, action.target) if verb == "trigger" else action.target.text
            return Action(kind=verb, name=name)
        name = _OLD_NAMES.get(verb, verb)
        if name != verb:
            self._error("deprecated", f"{verb} is an old name; write {name}", span, warning=True)
        if name not in ACTION_KEYS:
            near = _MISNOMERS.get(name)
            guess = f" (did you mean {near!r}?)" if near else did_you_mean(name.lower(), ACTION_KEYS)
            message = f"rules cannot set {verb!r}{guess}; they set {', '.join(ACTION_KEYS)}"
            raise LanguageError("unknown_key", message, span)
        block, key = SWAPS[name]
        return Action(kind="set", name=name, value=typed_value(name, KEYS[block][key], action.target))

    # ---- rules of the language

    def _check_rules(self, policy: ExpertPolicy, name: Span) -> None:
        broken = broken_rules(policy)
        for finding in broken:
            if not self.spoiled.intersection(finding.places):
                self._error(finding.code, finding.message, self._span(finding, name))
        unread = list(unread_keys(policy))
        for rule, span in self.rules:
            self._judge_rule(policy, rule, span, broken)
            for finding in unread:
                if not rule.conditional and _changes(rule.action, finding.places[0]):
                    self._error(finding.code, finding.message, span, warning=True)
        for finding in (*unread, *pointless(policy)):
            location = finding.places[0]
            if location in self.written and location not in self.spoiled:
                span = self.written[location].span if finding.code == "unread" else self._span(finding, name)
                self._error(finding.code, finding.message, span, warning=True)

    def _judge_rule(self, policy: ExpertPolicy, rule: AdaptRule, span: Span, before: list[BrokenRule]) -> None:
        reported = {(finding.code, finding.places) for finding in before if len(finding.places) > 1}
        wrong = False
        for finding in broken_rules(swapped(policy, rule.action)):
            locations = [location for location in finding.places if not _changes(rule.action, location)]
            alone = len(finding.places) == 1
            is_reported = (
                (finding in before and bool(locations)) if alone else (finding.code, finding.places) in reported
            )
            if not is_reported and not self.spoiled.intersection(locations):
                wrong = True
                self._error(finding.code, f"after this change {finding.message}", span)
        for words in () if wrong else pointless_rule(policy, rule):
            self._error("pointless", words, span, warning=True)

    def _span(self, finding: BrokenRule, name: Span) -> Span:
        default = self.blocks.get(finding.places[0][0], name)
        return next((self.spans[location] for location in finding.places if location in self.spans), default)


def _changes(action: Action, location: Place) -> bool:
    return action.kind == "set" and SWAPS[action.name] == location


# Rules over values, independent of texts

MOST_SLOTS, MOST_ID = 512, 511

_PIN, _EVICTION = ("cache", "pin"), ("cache", "eviction")
_THRESHOLD, _HEADROOM, _BUDGET_GB = (("cache", f"memory_{key}") for key in ("threshold", "headroom", "budget_gb"))
_STRATEGY, _BUDGET = ("prefetch", "strategy"), ("prefetch", "budget")


class BrokenRule(NamedTuple):
    """A rule that a policy breaks. ``places``: the keys concerned, the most likely culprit first."""

    code: str
    message: str
    places: tuple[Place, ...]


def broken_rules(policy: ExpertPolicy) -> list[BrokenRule]:
    """Return all rules that ``policy`` breaks. To check its ``adapt``, apply this function to each `swapped` policy."""
    broken = []
    for block, keys in KEYS.items():
        for name, key in keys.items():
            value = getattr(getattr(policy, block), name, None)
            if key.rule is not None and value is not None and not key.rule[1](value):
                broken.append(BrokenRule(key.rule[0], f"{name} is {value:g}; it {key.rule[2]}", ((block, name),)))
    return [*broken, *_capacity(policy.cache), *_together(policy)]


def _capacity(cache: CacheRules) -> Iterator[BrokenRule]:
    unit, value, pins = cache.capacity.unit, cache.capacity.value, cache.pin
    if unit == "slots" and not 1 <= value <= MOST_SLOTS:
        more = "" if value < 1 else "; for more, write a share such as 25% or a size such as 2GiB"
        message = f"capacity is {value:g}; a count must lie within 1 and {MOST_SLOTS}{more}"
        yield BrokenRule("V1", message, (_CAPACITY,))
    if unit == "percent" and not 0 < value <= 100:
        message = f"capacity is {value:g}%; a share must be above 0% and at most 100%"
        yield BrokenRule("V1", message, (_CAPACITY,))
    if unit == "bytes" and not value > 0:
        yield BrokenRule("V1", "capacity is no size above 0 bytes that a machine could have", (_CAPACITY,))
    if far := [expert for expert in pins if not 0 <= expert <= MOST_ID]:
        message = f"pin holds {', '.join(map(str, far[:4]))}; expert ids lie within 0 and {MOST_ID}"
        yield BrokenRule("V2", message, (_PIN,))
    if unit == "slots" and len(pins) > value:
        message = f"pin holds {len(pins)} ids, and capacity is {value:g}; all pinned experts must have room"
        yield BrokenRule("V3", message, (_PIN, _CAPACITY))


def _together(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    cache, prefetch, layers = policy.cache, policy.prefetch, policy.per_layer
    if prefetch.strategy != "none" and cache.capacity.unit == "slots" and prefetch.budget > cache.capacity.value:
        message = f"budget is {prefetch.budget}, and capacity is {cache.capacity.value:g}; predictions must have room"
        yield BrokenRule("V10", message, (_BUDGET, _STRATEGY, _CAPACITY))
    if policy.schedule.mode == "hybrid" and not policy.schedule.overlap:
        message = "mode = hybrid computes while experts are fetched: overlap must be true"
        yield BrokenRule("V14", message, (("schedule", "overlap"), ("schedule", "mode")))
    if "score" in cache.eviction and prefetch.strategy == "none":
        yield BrokenRule("V15", "eviction = score needs a prefetch strategy other than none", (_EVICTION, _STRATEGY))
    if (threshold := cache.memory_threshold) is not None and not 0 < cache.memory_headroom <= threshold:
        message = f"memory_headroom is {cache.memory_headroom:g}; it must be above 0 and at most memory_threshold"
        yield BrokenRule("V17", f"{message}, {threshold:g}", (_HEADROOM, _THRESHOLD))
    if threshold is not None and not cache.memory_budget_gb > 0:
        message = f"memory_budget_gb is {cache.memory_budget_gb:g}; it must be above 0"
        yield BrokenRule("V18", message, (_BUDGET_GB, _THRESHOLD))
    if layers is not None and layers.min_capacity > layers.max_capacity:
        message = f"min_capacity is {layers.min_capacity}, above max_capacity, {layers.max_capacity}"
        yield BrokenRule("range", message, (("per_layer", "min_capacity"), ("per_layer", "max_capacity")))


def swapped(policy: ExpertPolicy, action: Action) -> ExpertPolicy:
    """Return ``policy`` after ``action``; ``rebalance`` moves slots between layers and leaves the policy unchanged."""
    if action.kind == "trigger":
        threshold = policy.cache.memory_threshold
        value = PRESSURE_THRESHOLD if threshold is None else threshold
        return replace(policy, cache=replace(policy.cache, memory_threshold=value))
    if action.kind != "set":
        return policy
    block, key = SWAPS[action.name]
    return replace(policy, **{block: replace(getattr(policy, block), **{key: action.value})})


def unread_keys(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Yield the keys that no eviction, strategy, mode or allocation reads that the policy has or may switch to."""
    for block, (selector, shown) in SELECTORS.items():
        section = getattr(policy, block)
        if section is None:
            continue
        now, swap = getattr(section, selector), KEYS[block][selector].swap
        reached = set(_words(now))
        for rule in policy.adapt:
            if swap and rule.action.name == swap:
                reached.update(_words(rule.action.value))
        instead = shown.format(" | ".join(_words(now)))
        for name, key in KEYS[block].items():
            if key.readers and not reached & set(key.readers):
                yield _unread(block, name, f"{selector} = {' or '.join(key.readers)}", instead)
        if block == "prefetch" and reached == {"none"}:
            yield _unread(block, "budget", "a strategy other than none", instead)
    if policy.cache.memory_threshold is None and all(rule.action.kind != "trigger" for rule in policy.adapt):
        for name in ("memory_headroom", "memory_budget_gb", "expert_size_gb"):
            yield _unread("cache", name, "memory_threshold", "there is none")


def _words(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def _unread(block: str, key: str, reader: str, instead: str) -> BrokenRule:
    return BrokenRule("unread", f"{key} is read only by {reader}, and {instead}", ((block, key),))


def pointless(policy: ExpertPolicy) -> Iterator[BrokenRule]:
    """Yield the values that contain duplicates."""
    pins, eviction, monitor = policy.cache.pin, policy.cache.eviction, policy.monitor
    if len(set(pins)) < len(pins):
        yield BrokenRule("pointless", "pin names an expert twice", (_PIN,))
    if len(set(eviction)) < len(eviction):
        yield BrokenRule("pointless", f"two layers of the same policy; write eviction = {eviction[0]}", (_EVICTION,))
    if monitor is not None and len(set(monitor.metrics)) < len(monitor.metrics):
        yield BrokenRule("pointless", "metrics names one twice", (("monitor", "metrics"),))


def pointless_rule(policy: ExpertPolicy, rule: AdaptRule) -> Iterator[str]:
    """Yield why ``rule`` of ``policy`` can never change anything, or always does. Both metrics lie in [0, 1]."""
    op, threshold, action, layers = rule.op, rule.threshold, rule.action, policy.per_layer
    never = (op == "<" and threshold <= 0) or (op == ">" and threshold >= 1) or (op == ">=" and threshold > 1)
    always = (op == "<" and threshold > 1) or (op == "<=" and threshold >= 1) or (op == ">=" and threshold <= 0)
    if never or always:
        words = "never" if never else "always"
        yield f"{rule.metric} lies within 0 and 1: {rule.metric} {op} {threshold:g} {words} holds"
    if action.kind == "rebalance":
        if layers is None:
            yield "there is nothing to rebalance without a per_layer block"
        elif layers.allocation == "uniform":
            yield "uniform budgets are the same after a rebalance"
    elif swapped(policy, action) == policy and not any(
        other.action.name == action.name for other in policy.adapt if other is not rule
    ):
        yield "the policy says so already, and no other rule changes it"
