"""Rules fire at exactly the access at which a model that goes access by access fires them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.adapt import AdaptRules, Monitor
from moelight.experts.policy import Action, AdaptRule, MonitorRules
from tests.experts.accesses import BUDGET, PRESSURE, Accesses, Panel, adapting, one_by_one, rates

OPERATORS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "!=": operator.ne}


class OneByOne:
    """The rules as they are meant, with every access of every window written down."""

    def __init__(self, rules: list[AdaptRule], window: int) -> None:
        self.rules, self.window, self.panel = rules, window, Panel()
        self.accesses: Accesses = []
        self.streaks, self.last = [0] * len(rules), [-(10**9)] * len(rules)
        self.fired: list[tuple[int, AdaptRule]] = []

    def access(self, access: tuple[bool, int]) -> None:
        self.accesses.append(access)
        now = dict(zip(("hit_rate", "eviction_rate"), rates(self.accesses, self.window), strict=True))
        for index, rule in enumerate(self.rules):
            holds = OPERATORS[rule.op](now[rule.metric], rule.threshold)
            self.streaks[index] = self.streaks[index] + 1 if holds else 0
            rested = len(self.accesses) - self.last[index] >= rule.cooldown
            if self.streaks[index] >= rule.accesses and rested and not self.panel.in_force(rule.action):
                self.last[index] = len(self.accesses)
                self.fired.append((len(self.accesses), rule))
                try:
                    self.panel.do(rule.action)
                except ConfigError:
                    continue


def any_rule(rng: np.random.Generator) -> AdaptRule:
    actions = [
        *(Action(kind="set", name="prefetch_budget", value=value) for value in (2, 4, 8, -1)),
        *(Action(kind="set", name="schedule_mode", value=value) for value in ("hybrid", "gpu_only")),
        Action(kind="trigger", name="memory_pressure"),
        Action(kind="rebalance", name="entropy"),
    ]
    return AdaptRule(
        metric=str(rng.choice(["hit_rate", "eviction_rate"])),
        op=str(rng.choice(list(OPERATORS))),
        threshold=float(rng.choice([0.0, 0.25, 0.5, 1.0])),
        action=actions[rng.integers(len(actions))],
        accesses=int(rng.choice([1, 2, 5, 30])),
        cooldown=int(rng.choice([1, 3, 10, 50])),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_rules_and_batches_against_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rules, window = [any_rule(rng) for _ in range(5)], int(rng.choice([1, 4, 20]))
    panel, slow = Panel(), OneByOne(rules, window)
    fast = AdaptRules(rules, panel, Monitor(MonitorRules(window=window)))
    for _ in range(60):
        liked = rng.choice([0, 6])  # phases of hits
        batch = (int(rng.integers(0, 3 + liked)), int(rng.integers(0, 9 - liked)), int(rng.integers(0, 6)))
        before = len(slow.fired)
        for access in one_by_one(*batch):
            slow.access(access)
        fired = [(item.access, item.rule) for item in fast.record(*batch)]
        assert fired == [
            (at, f"when {r.metric} {r.op} {r.threshold:g} for {r.accesses} accesses") for at, r in slow.fired[before:]
        ]
        assert panel.values == slow.panel.values
    assert panel.done == slow.panel.done
    assert fast.changes == len(slow.panel.done)
    assert fast.failures == len(slow.fired) - len(slow.panel.done)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_a_hundred_accesses_are_a_hundred_whatever_the_batch(size: int) -> None:
    rules = adapting(BUDGET)
    fired = [item.access for _ in range(-(-400 // size)) for item in rules.record(size // 2, size - size // 2, 0)]
    assert fired == [100]


def test_a_trigger_fires_again_after_its_cooldown_and_a_value_in_force_never() -> None:
    trigger, value = adapting(PRESSURE, accesses=10, cooldown=25), adapting(BUDGET, accesses=10, cooldown=25)
    for _ in range(10):
        trigger.record(4, 6, 0)
        value.record(4, 6, 0)
    assert [item.access for item in trigger.log] == [10, 35, 60, 85]
    assert [item.as_dict() for item in value.log] == [
        {
            "access": 10,
            "rule": "when hit_rate >= 0 for 10 accesses",
            "action": "prefetch_budget",
            "from": "4",
            "to": "8",
            "failure": None,
        }
    ]


def test_a_condition_that_breaks_begins_anew() -> None:
    rules = adapting(BUDGET, op="<", threshold=0.5, accesses=12)
    rules.record(0, 11, 0)
    rules.record(12, 0, 0)  # above a half after the eleventh of them: the condition broke at access 22
    assert [item.access for item in rules.log] == [12]
    rules = adapting(BUDGET, op="<", threshold=0.5, accesses=23)
    rules.record(0, 11, 0)
    rules.record(12, 0, 0)
    assert list(rules.log) == []


def test_what_cannot_be_done_is_written_down_and_not_tried_at_every_access() -> None:
    panel = Panel()
    rules = adapting(Action(kind="set", name="prefetch_budget", value=-1), panel, accesses=1, cooldown=50)
    rules.record(0, 120, 0)
    assert [(item.access, item.failure) for item in rules.log] == [
        (at, "a budget of -1 is none") for at in (1, 51, 101)
    ]
    assert (rules.changes, rules.failures, panel.done) == (0, 3, [])
    assert rules.as_dict()["log"][0]["to"] == "4"


def test_accesses_that_are_none_change_nothing() -> None:
    rules = adapting(BUDGET, accesses=1)
    assert rules.record(0, 0, 5) == []
    assert rules.record(1, 0, 0)[0].access == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"accesses": 0}, "accesses must be at least 1, not 0"),
        ({"cooldown": -1}, "cooldown must be at least 0, not -1"),
        ({"metric": "drift"}, "unknown metric 'drift'; known: hit_rate, eviction_rate"),
        ({"op": "=="}, "unknown operator '=='"),
        ({"action": Action(kind="set", name="lfu_decay", value=0.5)}, "unknown action 'lfu_decay'"),
        ({"action": Action(kind="set", name="budget", value=3)}, "unknown action 'budget'"),
        ({"action": Action(kind="trigger", name="foo")}, "unknown action 'foo'; known: memory_pressure"),
        ({"action": Action(kind="sett", name="capacity")}, r"unknown kind of action 'sett' \(did you mean 'set'\?\)"),
    ],
)
def test_a_rule_that_could_do_nothing_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^adapt, when .*: {complaint}"):
        adapting(changes.pop("action", BUDGET), **changes)
