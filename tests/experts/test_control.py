"""A policy at work: what its rules do to a running cache, and what it begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.control import ExpertControl
from moelight.experts.policy import (
    Action,
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
)
from moelight.experts.profile import ActivationProfile
from moelight.experts.profile_files import save_profile

SHAPE = {"num_layers": 3, "num_experts": 8}


def control(*actions: Action, **fields: Any) -> ExpertControl:
    rules = tuple(AdaptRule(metric="hit_rate", op=">=", threshold=0.0, action=action, cooldown=0) for action in actions)
    cache = fields.pop("cache", CacheRules(capacity=Capacity(value=4)))
    return ExpertControl(
        ExpertPolicy(name="p", cache=cache, adapt=rules, monitor=MonitorRules(window=4), **fields), **SHAPE
    )


def batch(running: ExpertControl, layer: int, *ids: int) -> None:
    running.settle(running.access(layer, np.array([ids])))


def setting(name: str, value: Any) -> Action:
    return Action(kind="set", name=name, value=value)


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        (setting("eviction", ("lfu", "lru")), "lfu | lru"),
        (setting("eviction", "score"), "score"),
        (setting("capacity", Capacity(value=50, unit="percent")), "12"),
        (setting("frequency_decay", 0.5), "0.5"),
        (setting("prefetch_strategy", "history"), "history"),
        (setting("prefetch_budget", 2), "2"),
        (setting("schedule_mode", "hybrid"), "hybrid"),
    ],
)
def test_a_rule_sets_a_value_once_and_residents_stay(action: Action, shown: str) -> None:
    running = control(action)
    for _ in range(3):
        batch(running, 0, 1, 2)
    assert running.shown(action) == shown
    assert running.in_force(action)
    assert running.adapting.changes == 1
    assert running.cache.contains(0, 1)
    assert running.cache.contains(0, 2)


def test_room_for_every_capacity_that_a_rule_may_ask_for_is_known_before() -> None:
    running = control(setting("capacity", Capacity(value=9)), setting("capacity", Capacity(value=2)))
    assert running.most_slots == 9
    even = PerLayerRules(allocation="uniform", min_capacity=1)
    assert control(setting("capacity", Capacity(value=5)), per_layer=even).most_slots == 15


def test_a_capacity_that_what_is_in_use_exceeds_is_a_failure_that_is_noted() -> None:
    running = control(setting("capacity", Capacity(value=1)))
    found = running.access(0, np.array([[1, 2]]))
    running.cache.lease(0, [1, 2])
    running.settle(found)
    assert running.adapting.failures == 1
    assert running.cache.capacity == 4
    assert "leased" in running.as_dict()["adaptations"]["log"][0]["failure"]


def test_memory_pressure_makes_residents_leave() -> None:
    tight = CacheRules(capacity=Capacity(value=8), memory_budget_gb=4.0, expert_size_gb=1.0, memory_headroom=0.5)
    running = control(Action(kind="trigger", name="memory_pressure"), cache=tight)
    batch(running, 0, 0, 1, 2, 3, 4)
    batch(running, 1, 0)
    assert len(running.cache) == 2


def test_pins_warm_pins_and_guesses() -> None:
    rules = CacheRules(capacity=Capacity(value=8), pin=(5,), warm_pin=6)
    running = control(cache=rules, prefetch=PrefetchRules(strategy="history", budget=1))
    assert sorted((layer, expert) for layer, expert, _ in running.begin()) == [(0, 5), (1, 5), (2, 5)]
    for _ in range(6):
        batch(running, 0, 1)
    batch(running, 0, 1)
    assert (0, 1) in running.cache.pinned
    batch(running, 1, 2)
    assert [(layer, found.ids.tolist()) for layer, found in running.ahead(0)] == []  # it is there
    assert running.as_dict(link=0.5)["stalls"] == {"link": 0.5}


def test_it_begins_with_a_profile_s_busiest_and_refuses_another_model_s(tmp_path: Path) -> None:
    counted = ActivationProfile(model={"name": "m"}, **SHAPE)
    for layer in range(3):
        counted.record(layer, np.array([layer, 7]), np.array([9, 3]))
    save_profile(counted, tmp_path / "p.json")
    policy = ExpertPolicy(
        name="p", cache=CacheRules(capacity=Capacity(value=3), eviction=("lru",), profile=str(tmp_path / "p.json"))
    )
    running = ExpertControl(policy, model={"name": "m"}, **SHAPE)
    assert sorted((layer, expert) for layer, expert, _ in running.begin()) == [(0, 0), (1, 1), (2, 2)]
    batch(running, 0, 4)
    assert running.profile is not None
    assert running.profile.counts[0, 4] == 1
    with pytest.raises(ConfigError, match="another model"):
        ExpertControl(policy, model={"name": "n"}, **SHAPE)
