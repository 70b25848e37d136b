"""One policy at work: rules on a running cache, warm starts and pins, guesses that bring hits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.cache import ExpertCache
from moelight.experts.eviction import IntArray
from moelight.experts.policy import (
    STRATEGIES,
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
from moelight.experts.profile import ActivationProfile
from moelight.experts.residency import Controls, Residency

LAYERS, EXPERTS, CAPACITY = 3, 8, 9
ALWAYS = {"metric": "hit_rate", "op": ">=", "threshold": 0.0}
ACTIONS = [
    Action(kind="set", name="eviction", value=("lfu",)),
    Action(kind="set", name="eviction", value=("score", "lru")),
    Action(kind="set", name="capacity", value=Capacity(value=5)),
    Action(kind="set", name="capacity", value=Capacity(value=50, unit="percent")),
    Action(kind="set", name="frequency_decay", value=0.5),
    Action(kind="set", name="prefetch_strategy", value="previous"),
    Action(kind="set", name="prefetch_budget", value=2),
    Action(kind="set", name="schedule_mode", value="hybrid"),
    Action(kind="trigger", name="memory_pressure"),
    Action(kind="rebalance", name="entropy"),
]


def policy(*adapt: AdaptRule, cache: dict[str, Any] | None = None, **blocks: Any) -> ExpertPolicy:
    rules = {"capacity": Capacity(value=CAPACITY), "eviction": ("slru",)} | (cache or {})
    return ExpertPolicy(name="mine", cache=CacheRules(**rules), adapt=adapt, **blocks)


def residency(asked: ExpertPolicy, **more: Any) -> Residency:
    return Residency(asked, num_layers=LAYERS, num_experts=EXPERTS, **more)


def batches(seed: int, passes: int = 30) -> Iterator[tuple[int, IntArray, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(seed)
    for _ in range(passes):
        for layer in range(LAYERS):
            ids = np.minimum(rng.geometric(0.3, size=(3, 2)) - 1, EXPERTS - 1)
            yield layer, ids, rng.random(ids.shape)


def residents(cache: ExpertCache) -> set[tuple[int, int]]:
    return set(map(tuple, np.argwhere(cache.slot_table >= 0).tolist()))


@pytest.mark.parametrize("per_layer", [None, PerLayerRules(min_capacity=1, rebalance_interval=10**6, entropy_window=4)])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: f"{action.kind}-{action.name}")
def test_an_action_changes_what_it_says_and_keeps_contents_and_counters(
    action: Action, per_layer: PerLayerRules | None
) -> None:
    asked = policy(cache={"capacity": Capacity(value=3 if per_layer else CAPACITY)}, per_layer=per_layer)
    run, same = residency(asked), residency(asked)
    for batch in batches(1):
        run.access(*batch)
        same.access(*batch)
    before, counted = residents(run.cache), run.cache.stats.hits.copy()
    run.controls.do(action)
    assert run.controls.in_force(action) == (action.kind != "rebalance")
    after = residents(run.cache)
    assert after <= before
    shrinks = action.name in {"capacity", "memory_pressure"} or action.kind == "rebalance"
    assert (after == before) or shrinks
    assert (run.cache.stats.hits == counted).all()
    assert len(run.cache) <= run.cache.capacity
    if per_layer is not None:
        assert len(run.cache.budgets) == LAYERS
        assert sum(run.cache.budgets) == run.cache.capacity
    for layer, ids, scores in batches(2, 3):  # and it goes on
        run.access(layer, ids, scores)
        assert all(run.cache.contains(layer, e) for e in np.unique(ids)) or run.cache.stats.bypasses
    shown = run.controls.shown(action)
    assert (shown is None) == (action.kind != "set")


def test_what_is_in_force_is_spelled_as_the_language_does() -> None:
    run = residency(policy(cache={"eviction": ("lfu", "lru")}))
    shown = {a.name: run.controls.shown(a) for a in ACTIONS if a.kind == "set"}
    assert shown == {
        "eviction": "lfu | lru",
        "capacity": "9",
        "frequency_decay": "0.95",
        "prefetch_strategy": "none",
        "prefetch_budget": "4",
        "schedule_mode": "gpu_only",
    }


def test_capacity_counts_slots_of_a_layer_where_layers_have_budgets() -> None:
    half = Action(kind="set", name="capacity", value=Capacity(value=50, unit="percent"))
    shared, apart = (
        residency(policy()),
        residency(policy(cache={"capacity": Capacity(value=3)}, per_layer=PerLayerRules())),
    )
    for run in (shared, apart):
        run.controls.do(half)
        assert run.cache.capacity == 12
    with pytest.raises(ConfigError, match="depends on the model"):
        shared.controls.do(Action(kind="set", name="capacity", value=Capacity(value=3000, unit="bytes")))
    sized = residency(policy(), page_bytes=1000)
    sized.controls.do(Action(kind="set", name="capacity", value=Capacity(value=3500, unit="bytes")))
    assert sized.cache.capacity == 3


def test_what_cannot_be_done_is_said_and_changes_nothing() -> None:
    run = residency(policy(cache={"eviction": ("lru",)}), most_slots=CAPACITY)

    def room(slots: int) -> Action:
        return Action(kind="set", name="capacity", value=Capacity(value=slots))

    run.access(0, np.array([[0, 1, 2]]))
    run.cache.lease(0, [0, 1, 2])
    for action, complaint in (
        (
            Action(kind="set", name="capacity", value=Capacity(value=2)),
            "2 slots are not possible now .*3 experts are leased",
        ),
        (
            Action(kind="set", name="capacity", value=Capacity(value=12)),
            "12 slots were asked for, but only 9 are allocated",
        ),
        (Action(kind="set", name="eviction", value=("lruu",)), "lruu"),
        (Action(kind="set", name="prefetch_strategy", value="afinity"), "unknown predictor"),
        (Action(kind="set", name="schedule_mode", value="hybird"), r"schedule_mode cannot be 'hybird' \(did you mean"),
        (Action(kind="set", name="prefetch_budget", value="many"), "prefetch_budget cannot be 'many'"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            run.controls.do(action)
    assert (run.cache.capacity, run.cache.eviction, len(run.cache)) == (CAPACITY, ("lru",), 3)
    assert run.controls.schedule.mode == "gpu_only"


def test_memory_pressure_makes_room_at_once_and_watches_from_then_on() -> None:
    memory = {"memory_budget_gb": 10.0, "expert_size_gb": 1.0, "memory_headroom": 0.5, "eviction": ("lru",)}
    run = residency(policy(cache=memory))
    for batch in batches(3):
        run.access(*batch)
    assert len(run.cache) == CAPACITY
    run.controls.do(Action(kind="trigger", name="memory_pressure"))
    assert len(run.cache) == 5
    assert run.cache.stats.pressed == 4
    for batch in batches(3):
        run.access(*batch)
        assert len(run.cache) < 9


@pytest.mark.parametrize(("headroom", "leave"), [(0.7, False), (0.5, True)])
def test_memory_pressure_fires_only_where_it_changes_something(headroom: float, leave: bool) -> None:
    """Nine experts of 1 GB have room. With 16 GB they are within 0.7 of it; within 0.5 there is room for eight, so the
    ninth leaves each time it has come."""
    memory = {"memory_budget_gb": 16.0, "expert_size_gb": 1.0, "memory_headroom": headroom, "eviction": ("lru",)}
    trigger = Action(kind="trigger", name="memory_pressure")
    run = residency(policy(AdaptRule(**ALWAYS, action=trigger, accesses=1, cooldown=7), cache=memory))
    pressed = []
    for batch in batches(40):
        run.access(*batch)
        pressed.append(run.cache.stats.pressed)
    assert run.adapting is not None and run.cache.clock > 300
    assert run.adapting.changes == len(run.adapting.log)
    if leave:
        assert 1 < run.adapting.changes <= 1 + pressed[-1]
    else:
        assert [item.access for item in run.adapting.log] == [1] and not pressed[-1]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: f"{action.kind}-{action.name}")
def test_a_rule_fires_on_the_run_at_its_access(action: Action) -> None:
    run = residency(policy(AdaptRule(**ALWAYS, action=action, accesses=40, cooldown=10**6)))
    assert run.adapting is not None
    accesses = []
    for batch in batches(4):
        run.access(*batch)
        accesses.append(run.cache.clock)
        assert bool(run.adapting.log) == (run.cache.clock >= 40)
    assert [item.access for item in run.adapting.log] == [40]
    assert run.adapting.log[0].failure is None


def test_the_figures_of_a_run_judge_its_room() -> None:
    """Twice the two experts of a token in each of three layers are twelve; eight tokens are expected to meet all."""
    nine = {"slots": 9, "budget_slots": 9, "recommended_slots": 12, "status": "BELOW_RECOMMENDED"}
    assert residency(policy(), active=2).stats()["sizing"] == nine
    assert residency(policy(), active=2, batch=20).stats()["sizing"] == nine | {"recommended_slots": 24}
    more = residency(policy(), active=2, most_slots=12).stats()["sizing"]
    assert more == nine | {"budget_slots": 12, "status": "OK"}
    assert residency(policy(), active=2, most_slots=0).stats()["sizing"]["status"] == "BUDGET_EXHAUSTED"
    assert residency(policy()).stats()["sizing"] is None


def test_without_rules_it_is_the_cache() -> None:
    run, cache = residency(policy()), ExpertCache.of(policy(), num_layers=LAYERS, num_experts=EXPERTS)
    for batch in batches(5):
        selected, its = run.access(*batch), cache.access(*batch)
        assert (selected.hits.tolist(), selected.slots.tolist()) == (its.hits.tolist(), its.slots.tolist())
    assert run.monitor is None
    assert run.adapting is None
    assert run.counted is None


@pytest.mark.parametrize("eviction", [("lru",), ("lfu",), ("slru",), ("score",), ("lfu", "lru")])
@pytest.mark.parametrize("per_layer", [None, PerLayerRules(allocation="uniform", total_budget=10)])
def test_a_profile_fills_the_cache_before_the_first_batch(
    eviction: tuple[str, ...], per_layer: PerLayerRules | None
) -> None:
    known_names = ActivationProfile(model={}, num_layers=LAYERS, num_experts=EXPERTS)
    known_names.add(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)[:, ::-1].copy(), 1)
    capacity = 10 if per_layer is None else 4
    asked = policy(cache={"capacity": Capacity(value=capacity), "eviction": eviction, "pin": (6,)}, per_layer=per_layer)
    run = residency(asked, profile=known_names)
    assert len(run.cache) == 10
    result = run.begin_with.tolist()
    assert [key[:2] for key in result[:3]] == [[0, 6], [1, 6], [2, 6]]
    assert {(layer, expert) for layer, expert, _ in result} == residents(run.cache)
    assert all(run.cache.slot_table[layer, expert] == slot for layer, expert, slot in result)
    assert all(run.cache.contains(layer, expert) for layer in range(LAYERS) for expert in (0, 1))
    assert run.cache.stats.accesses == run.cache.stats.prefetched == run.cache.stats.evictions == 0
    first = run.access(1, np.array([[0, 1]]))
    assert first.hits.tolist() == [0, 1]
    for batch in batches(6):
        run.access(*batch)
        assert len(run.cache) <= 10


def test_warm_pinning_at_the_first_batch_after_enough_accesses() -> None:
    run = residency(policy(cache={"warm_pin": 30}), active=1)
    clocks = []
    for layer, ids, scores in batches(7):
        due = run.cache.clock >= 30
        pre = int(run.cache.stats.hits.sum()), int(run.cache.stats.misses.sum())
        run.access(layer, ids, scores)
        assert run.warm is not None
        assert run.warm.fired == due
        if due and not clocks:
            assert (run.warm.pre_hits, run.warm.pre_misses) == pre
        clocks += [run.cache.clock] if due else []
    assert run.warm is not None
    assert 0 < len(run.warm.pinned) <= LAYERS
    assert run.cache.pinned == sorted(run.cache.pinned, key=run.cache.pinned.index)
    assert sorted(run.cache.pinned) == [tuple(key) for key in run.warm.pinned.tolist()]
    message = run.stats()["warm_pin"]
    assert message["pre_warm_accesses"] + message["post_warm_accesses"] == run.cache.clock


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_guesses_bring_hits_and_never_touch_what_was_just_used(strategy: str) -> None:
    """Each pass chooses what the pass before chose, in a cache that has no room for it all."""
    blocks = {"prefetch": PrefetchRules(strategy=strategy, budget=2, affinity_threshold=0.5)}
    run = residency(policy(cache={"capacity": Capacity(value=5), "eviction": ("lru",)}, **blocks))
    for _ in range(12):
        for layer in range(LAYERS):
            ids = np.array([[layer, layer + 3]])
            run.access(layer, ids)
            after = (layer + 1) % LAYERS
            run.hint(after, np.array([after, after + 3]), np.array([0.6, 0.4]))
            for at, brought in run.ahead(layer):
                assert at == after
                assert all(run.cache.slot_table[at, brought.ids] == brought.slots)
            assert all(run.cache.contains(layer, expert) for expert in (layer, layer + 3))
    quality = run.cache.predictor.quality
    hit_rate = run.cache.stats.hit_rate
    assert hit_rate < 0.5 if strategy == "none" else hit_rate > 0.8
    assert quality.precision == (0.0 if strategy == "none" else 1.0)


def test_what_was_learned_is_saved_and_known_the_next_time() -> None:
    asked = policy(prefetch=PrefetchRules(strategy="affinity"))
    counted = ActivationProfile(model={}, num_layers=LAYERS, num_experts=EXPERTS)
    first = residency(asked, counted=counted)
    for batch in batches(8):
        first.access(*batch)
    saved = counted
    saved.transitions = first.transitions
    assert saved.counts.sum() == first.cache.stats.tokens.sum()
    assert saved.accesses == first.cache.clock
    assert saved.transitions is not None
    later = residency(policy(), profile=saved)  # affinity comes in by a rule, perhaps
    later.cache.predictor.use("affinity")
    result = later.cache.predictor.affinity
    assert result is not None
    assert (result.matrix == saved.transitions.matrix).all()
    foreign = ActivationProfile(model={}, num_layers=LAYERS, num_experts=EXPERTS)
    foreign.transitions = saved.transitions
    with pytest.raises(ConfigError, match="this model needs"):
        Residency(asked, num_layers=LAYERS, num_experts=EXPERTS + 1, profile=None).cache.predictor.know(
            saved.transitions
        )


def test_placement_follows_the_mode_in_force() -> None:
    run = residency(policy(schedule=ScheduleRules(mode="gpu_only", offload_threshold_ms=1.0, priority_routing=True)))
    costs = {"fetch_s": 0.01, "cpu_s": np.array([0.001, 0.5])}
    assert run.place_missing(np.array([1, 9]), **costs).fetched.tolist() == [1, 0]
    run.controls.do(Action(kind="set", name="schedule_mode", value="hybrid"))
    result = run.place_missing(np.array([1, 9]), **costs)
    assert (result.fetched.tolist(), result.computed.tolist()) == ([1], [0])
    assert run.place_missing(np.array([1, 9]), fetch_s=0.0005, cpu_s=costs["cpu_s"]).computed.size == 0


def test_stats_are_json() -> None:
    rule = AdaptRule(**ALWAYS, action=ACTIONS[0], accesses=10)
    asked = policy(
        rule,
        cache={"warm_pin": 20},
        prefetch=PrefetchRules(strategy="history"),
        monitor=MonitorRules(log_interval=10),
        per_layer=PerLayerRules(min_capacity=1, rebalance_interval=20, entropy_window=10, total_budget=9),
    )
    run = residency(asked, active=2)
    for layer, ids, scores in batches(9):
        if layer < 2:
            run.access(layer, ids, scores)
            run.ahead(layer)
    message = run.stats({"fetch_s": 1.5})
    assert json.loads(json.dumps(message)) == message
    assert message["layers"][2]["note"] == "no accesses"
    assert message["cache"]["eviction"] == "lfu"
    assert sum(message["cache"]["budgets"]) == 9
    assert message["predictor"]["quality"]["history"]["issued"] > 0
    assert message["adaptations"]["changes"] == 1
    assert Controls(asked, run.cache).schedule == asked.schedule
