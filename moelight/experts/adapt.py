"""Windowed metrics of a running cache, and the rules ``when METRIC OP NUMBER for N accesses { ACTION }`` over them,
exact to the access; `Controls` executes the actions."""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moelight.core.errors import ConfigError, UserError, did_you_mean
from moelight.experts.eviction import FloatArray, IntArray
from moelight.experts.policy import ACTION_KEYS, METRICS, OPERATORS, TRIGGERS, Action, AdaptRule, MonitorRules

if TYPE_CHECKING:
    from moelight.experts.residency import Controls

NOTES_KEPT = 1000  # a long job writes millions


class Monitor:
    """``hit_rate`` and ``eviction_rate`` (evictions per access) over the last ``window`` accesses, or over all while
    there are fewer. Every ``log_interval`` accesses, `notes` receives the requested metrics."""

    def __init__(self, rules: MonitorRules | None = None) -> None:
        self.rules = rules or MonitorRules()
        for key in ("window", "log_interval"):
            if getattr(self.rules, key) < 1:
                raise ConfigError(f"monitor: {key} must be at least 1 access, not {getattr(self.rules, key)}")
        for metric in self.rules.metrics:
            _check_known("monitor", "metric", metric, METRICS)
        self.accesses = 0
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)
        # Totals of hits and evictions after each access; the first column is the start of the window.
        self._totals = np.zeros((2, 2 * self.rules.window + 2), dtype=np.int64)
        self._end = 0

    def record(self, hits: int, misses: int, evictions: int) -> dict[str, FloatArray]:
        """Record a batch; return each metric after each access, float64 [hits + misses]. Evictions beyond the misses
        count with the last access; those of a batch without accesses are ignored."""
        n = hits + misses
        if n == 0:
            return {metric: np.zeros(0) for metric in METRICS}
        totals, begin = self._room_for(n), self._end
        new = totals[:, begin + 1 : begin + n + 1]
        places = np.arange(1, n + 1)
        new[0] = totals[0, begin] + np.minimum(places, hits)
        single = min(evictions, misses)
        new[1] = totals[1, begin] + np.maximum(places - (n - single), 0)
        new[1, -1] += evictions - single
        ends = begin + places
        begins = np.maximum(ends - self.rules.window, 0)
        rates = (totals[:, ends] - totals[:, begins]) / (ends - begins)
        self._end += n
        values = dict(zip(METRICS, rates, strict=True))
        self._note(values, n)
        self.accesses += n
        return values

    def now(self) -> dict[str, float]:
        """Each metric after the last access; 0 before any access."""
        begin = max(self._end - self.rules.window, 0)
        inside = self._totals[:, self._end] - self._totals[:, begin]
        return dict(zip(METRICS, (inside / max(1, self._end - begin)).tolist(), strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {"now": self.now(), "notes": list(self.notes)}

    def _room_for(self, n: int) -> IntArray:
        """Return the totals with space for ``n`` more columns; columns before the window may be dropped."""
        if self._end + n < self._totals.shape[1]:
            return self._totals
        retained = min(self._end, self.rules.window)
        old = self._totals[:, self._end - retained : self._end + 1]
        self._totals = np.zeros((2, max(self._totals.shape[1], retained + n + 1)), dtype=np.int64)
        self._totals[:, : retained + 1], self._end = old, retained
        return self._totals

    def _note(self, rates: dict[str, FloatArray], n: int) -> None:
        every = self.rules.log_interval
        for position in range(every - self.accesses % every - 1, n, every):
            values = {metric: float(rates[metric][position]) for metric in self.rules.metrics}
            self.notes.append({"access": self.accesses + position + 1, **values})


def _check_known(where: str, kind: str, word: str, known_names: Sequence[str]) -> None:
    if word not in known_names:
        raise ConfigError(
            f"{where}: unknown {kind} {word!r}{did_you_mean(word, known_names)}; known: {', '.join(known_names)}"
        )


KINDS = ("set", "trigger", "rebalance")
LOG_KEPT = 1000
_COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "!=": operator.ne}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAdaptation:
    """At ``access`` (counted from 1) ``rule`` fired, and ``action`` changed ``before`` to ``now`` or failed."""

    access: int
    rule: str
    action: str
    before: str | None
    now: str | None
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        fields = {"access": self.access, "rule": self.rule, "action": self.action}
        return {**fields, "from": self.before, "to": self.now, "failure": self.failure}


class AdaptRules:
    """The rules of one policy, evaluated at every access, in their order. ``log``: the last `LOG_KEPT` adaptations.

    A rule fires when its condition has held for ``accesses`` consecutive accesses, not again before its cooldown, and
    only if its action changes something (`Controls.in_force`). A change takes effect with the next batch.
    """

    def __init__(self, rules: Sequence[AdaptRule], controls: Controls, monitor: Monitor) -> None:
        """Raises ConfigError for a rule that could never fire, or never do anything."""
        for rule in rules:
            _check(rule)
        self.rules, self.monitor = tuple(rules), monitor
        self.log: deque[ExpertAdaptation] = deque(maxlen=LOG_KEPT)
        self.changes, self.failures = 0, 0
        self._controls = controls
        self._streaks = [0] * len(rules)  # consecutive accesses over which each condition has held
        self._ready_from = [0] * len(rules)  # the first access at which each may fire again

    def record(self, hits: int, misses: int, evictions: int) -> list[ExpertAdaptation]:
        """Record a batch, execute the rules that fire, and return their adaptations."""
        first = self.monitor.accesses + 1
        metrics = self.monitor.record(hits, misses, evictions)
        if hits + misses == 0:
            return []
        ready = [self._ready(index, metrics) for index in range(len(self.rules))]
        return self._fire(ready, first) if any(places.size for places in ready) else []

    def _ready(self, index: int, metrics: dict[str, FloatArray]) -> IntArray:
        """Return the indices in the batch at which the condition of rule ``index`` has held long enough."""
        rule = self.rules[index]
        holds = _COMPARE[rule.op](metrics[rule.metric], rule.threshold)
        places = np.arange(len(holds))
        # Index before the streak of each access; a streak may have begun before the batch, at a negative index.
        broken = np.maximum.accumulate(np.where(holds, -1 - self._streaks[index], places))
        streaks = places - broken
        self._streaks[index] = int(streaks[-1])
        return np.flatnonzero(streaks >= rule.accesses)

    def _fire(self, ready: list[IntArray], first: int) -> list[ExpertAdaptation]:
        """Execute the rules that fire in the batch whose first access is ``first``, ordered by access, then by rule."""
        queue: list[tuple[int, int]] = []
        in_force: set[int] = set()
        done: list[ExpertAdaptation] = []
        for index in range(len(ready)):
            self._queue(queue, ready, index, self._ready_from[index] - first)
        while queue:
            position, index = heapq.heappop(queue)
            rule = self.rules[index]
            if self._controls.in_force(rule.action):
                in_force.add(index)
                continue
            done.append(self._do(rule, first + position))
            cooldown = max(1, rule.cooldown)
            self._ready_from[index] = first + position + cooldown
            self._queue(queue, ready, index, position + cooldown)
            # Actions that changed nothing may now do so: later rules are evaluated again at the same access.
            for other in in_force:
                self._queue(queue, ready, other, position if other > index else position + 1)
            in_force.clear()
        self.log.extend(done)
        return done

    @staticmethod
    def _queue(queue: list[tuple[int, int]], ready: list[IntArray], index: int, start: int) -> None:
        """Queue rule ``index`` at the next index, from ``start`` on, at which it is ready."""
        at = int(np.searchsorted(ready[index], start))
        if at < len(ready[index]):
            heapq.heappush(queue, (int(ready[index][at]), index))

    def _do(self, rule: AdaptRule, access: int) -> ExpertAdaptation:
        action, failure = rule.action, None
        before = self._controls.shown(action)
        try:
            self._controls.do(action)
            self.changes += 1
        except UserError as error:
            failure = str(error)
            self.failures += 1
        now = self._controls.shown(action)
        return ExpertAdaptation(
            access=access, rule=condition_of(rule), action=name_of(action), before=before, now=now, failure=failure
        )

    def as_dict(self) -> dict[str, Any]:
        return {"changes": self.changes, "failures": self.failures, "log": [entry.as_dict() for entry in self.log]}


def condition_of(rule: AdaptRule) -> str:
    """Return the condition as text, such as ``when hit_rate < 0.4 for 100 accesses``."""
    return f"when {rule.metric} {rule.op} {rule.threshold:g} for {rule.accesses} accesses"


def name_of(action: Action) -> str:
    """Return the name of an action: ``capacity``, ``trigger memory_pressure`` or ``rebalance``."""
    return action.name if action.kind == "set" else f"{action.kind} {action.name}".rstrip()


def _check(rule: AdaptRule) -> None:
    action, where = rule.action, condition_of(rule)
    names = {"set": ACTION_KEYS, "trigger": TRIGGERS}.get(action.kind, (action.name,))
    for kind, word, known_names in (
        ("metric", rule.metric, METRICS),
        ("operator", rule.op, OPERATORS),
        ("kind of action", action.kind, KINDS),
        ("action", action.name, names),
    ):
        _check_known(f"adapt, {where}", kind, word, known_names)
    for key, least in (("accesses", 1), ("cooldown", 0)):
        if getattr(rule, key) < least:
            raise ConfigError(f"adapt, {where}: {key} must be at least {least}, not {getattr(rule, key)}")
