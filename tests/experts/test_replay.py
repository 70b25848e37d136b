"""Replays against independent slow models, and the clock against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.experts.policy import (
    Action,
    AdaptRule,
    CacheRules,
    Capacity,
    ExpertPolicy,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)
from moelight.experts.replay import Outcome, Replay, Shape, Trace, bound, replay_trace
from moelight.experts.timing import MachineCosts
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from tests.experts import slow
from tests.experts.test_evictions import slow_of
from tests.experts.traces import rows_of, skewed, write_trace
from tests.shapes import examples

LAYERS, EXPERTS = 3, 6
SHAPE = Shape(layers=(0, 1, 2), num_experts=EXPERTS, page_bytes=100, top_k=1)
MODEL = load_model_profile("olmoe-1b-7b")
LAPTOP, T4 = (MachineCosts(MODEL, load_hardware_profile(name)) for name in ("laptop-nvme", "t4"))
UNIFORM = PerLayerRules(allocation="uniform", min_capacity=1)


def policy(slots: int, eviction: str = "lru", **parts: Any) -> ExpertPolicy:
    rules = parts.pop("rules", {})
    cache = CacheRules(capacity=Capacity(value=slots), eviction=tuple(eviction.split("|")), **rules)
    return ExpertPolicy(name=f"{eviction}_{slots}", cache=cache, **parts)


def one(rows: Any, chosen: ExpertPolicy, shape: Shape = SHAPE, machine: MachineCosts | None = None) -> Outcome:
    [result] = replay_trace(rows, shape, [chosen], machine)
    return result


single = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), min_size=1, max_size=60)


@examples(25)
@given(single, st.integers(1, 9), st.sampled_from(["lru", "lfu", "slru", "score", "lfu|lru", "lru|lfu"]))
def test_one_id_at_a_time_hits_as_the_slow_model(accesses: list[tuple[int, int]], slots: int, name: str) -> None:
    result = one(
        rows_of((layer, [expert]) for layer, expert in accesses), policy(slots, name, rules={"frequency_decay": 0.5})
    )
    model = slow_of(name, slots)
    hits = left = 0
    for layer, expert in accesses:
        hit, _, _ = slow.serve(model, [layer * EXPERTS + expert], [1.0])
        hits += len(hit)
        left += len(model.left)
    assert (result.hits, result.misses, result.evictions) == (hits, len(accesses) - hits, left)
    assert result.max_resident <= slots and result.bytes == 100 * result.misses
    assert (result.stall_s, result.tokens_per_s) == (None, None)


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([(), (0,), (1, 3)]),
)
def test_the_bound_is_the_most_that_can_be(
    accesses: list[tuple[int, set[int]]], slots: int, pin: tuple[int, ...]
) -> None:
    rows, shape = rows_of((layer, sorted(ids)) for layer, ids in accesses), Shape(layers=(0, 1), num_experts=4)
    batches = [[layer * 4 + expert for expert in ids] for layer, ids in accesses]
    original = replace(UNIFORM, total_budget=slots)
    chosen = [
        policy(slots, name, rules={"pin": pin}, per_layer=layers)
        for name in ("lru", "slru", "lfu|lru", "reuse")
        for layers in (None, original)
        if layers is None or slots > 1
    ]
    begun = {layer * 4 + expert for item in chosen for layer, expert in Replay(item, shape).begins_with}
    result = bound(rows, shape, slots, policies=chosen)
    assert result.hits == slow.most_hits(batches, slots, begun)
    assert bound(rows, shape, slots).hits == slow.most_hits(batches, slots)
    assert result.max_resident <= slots
    for item in chosen:
        assert one(rows, item, shape).hits <= result.hits


def test_a_hit_may_leave_for_a_miss_of_its_own_batch() -> None:
    """Two places; 0 is there and never comes again, 1 and 2 come with it and again."""
    rows = rows_of([(0, [0, 3]), (0, [0, 1, 2]), (0, [1, 2])])
    assert bound(rows, SHAPE, 2).hits == 3


def test_a_batch_is_its_distinct_ids_with_their_tokens(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [(4, [1, 1, 2, 1]), (9, [3]), (4, [2, 1]), (9, [])])
    trace = Trace(path)
    assert trace.shape == Shape(layers=(4, 9), num_experts=4)
    result = one(trace, policy(8), trace.shape)
    assert (result.accesses, result.hits, result.misses, result.bytes) == (5, 2, 3, None)
    assert result.as_dict()["hit_rate"] == pytest.approx(0.4)


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    for rows, complaint in (
        ([(0, [1]), (16, [1])], "t:2: layer 16 is none of"),
        ([(3, [64])], "t:1: expert 64: .*has 64"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            list(Trace(write_trace(tmp_path / "t", rows), MODEL))
    with pytest.raises(ConfigError, match="no rows with experts"):
        Trace(write_trace(tmp_path / "t", [(0, [])]))


def test_a_policy_that_cannot_be_met_is_named() -> None:
    rules = PerLayerRules(allocation="uniform", min_capacity=4, max_capacity=4, total_budget=3)
    with pytest.raises(ConfigError, match="policy lru_3: "):
        one([], policy(3, per_layer=rules))


def test_rules_of_adapt_are_followed() -> None:
    more = Action(kind="set", name="eviction", value=("lfu",))
    rule = AdaptRule(metric="hit_rate", op="<", threshold=0.9, action=more, accesses=2)
    # lru forgets 0 for 1 and 2, that come once each; lfu does not.
    rows = rows_of((0, [expert]) for expert in (0, 0, 0, 1, 2, 0, 3, 4, 0))
    assert one(rows, policy(2)).hits == 2
    assert one(rows, replace(policy(2), adapt=(rule,))).hits > 2


# ---- seconds


def seconds(machine: MachineCosts, passes: list[list[list[int]]], chosen: ExpertPolicy) -> tuple[float, float, int]:
    """By hand: tokens with their ids, layer by layer, pass by pass, without guesses and with everything fetched."""
    now = stall = 0.0
    near: list[int] = []
    pages = 0
    for layers in passes:
        for layer, ids in enumerate(layers):
            tokens = {expert: ids.count(expert) for expert in ids}
            keys = {expert: layer * 64 + expert for expert in tokens}
            hits = [expert for expert in sorted(tokens) if keys[expert] in near]
            misses = [expert for expert in sorted(tokens) if keys[expert] not in near]
            now += machine.lead_s(layer, len(ids) / 8)
            present = now + len(misses) * machine.fetch_s
            now += sum(float(machine.resident_s(np.array([tokens[expert]]))[0]) for expert in hits)
            stall += max(0.0, present - now)
            now = max(now, present) + sum(float(machine.resident_s(np.array([tokens[expert]]))[0]) for expert in misses)
            pages += len(misses)
            for expert in (*hits, *misses):
                if keys[expert] in near:
                    near.remove(keys[expert])
                near.append(keys[expert])
            near = near[-int(chosen.cache.capacity.value) :]
    return now, stall, pages


@pytest.mark.parametrize("machine", [LAPTOP, T4], ids=["disk", "link"])
def test_seconds_without_guesses(machine: MachineCosts) -> None:
    rng = np.random.default_rng(3)
    passes = [[rng.choice(24, 8, replace=False).tolist() + [0] * 8 for _ in range(16)] for _ in range(6)]
    rows = rows_of((layer, ids) for layers in passes for layer, ids in enumerate(layers))
    chosen = policy(200)
    result = one(rows, chosen, Shape.of(MODEL), machine)
    now, stall, pages = seconds(machine, passes, chosen)
    assert result.total_s == pytest.approx(now) and result.stall_s == pytest.approx(stall)
    assert result.bytes == pages * machine.page_bytes
    assert result.tokens_per_s == pytest.approx(6 * 2 / now)


def again(ids: list[int], times: int) -> Any:
    return rows_of((layer, [i + layer for i in ids]) for _ in range(times) for layer in range(16))


def test_guesses_that_come_true_shorten_the_wait_and_change_no_hit() -> None:
    rows, shape = again([1, 2, 3, 4, 5, 6, 7, 8], 40), Shape.of(MODEL)
    plain = one(rows, policy(16, per_layer=UNIFORM, rules={}), shape, T4)
    few = policy(4, per_layer=UNIFORM)
    alone, ahead = (
        one(rows, replace(few, prefetch=PrefetchRules(strategy=name, budget=8)), shape, T4)
        for name in ("none", "previous")
    )
    assert plain.hits > alone.hits and plain.stall_s is not None
    assert alone.stall_s is not None and ahead.stall_s is not None
    assert ahead.hits == alone.hits and ahead.bytes == alone.bytes
    assert ahead.stall_s < 0.99 * alone.stall_s


def test_what_does_not_overlap_waits_longer() -> None:
    rows, shape = again([1, 2, 3, 4, 5, 6, 7, 8], 4), Shape.of(MODEL)
    both = [one(rows, policy(64, schedule=ScheduleRules(overlap=item)), shape, T4) for item in (True, False)]
    assert both[0].stall_s is not None and both[1].stall_s is not None
    assert both[0].stall_s <= both[1].stall_s and both[0].hits == both[1].hits


def test_where_misses_are_computed() -> None:
    """Beside a GPU only: fewer pages move, and hybrid is not slower than fetching all."""
    trace, shape = (
        rows_of((layer, ids) for layer, ids, _ in skewed(12, layers=16, experts=64, top_k=8)),
        Shape.of(MODEL),
    )
    schedules = [T4.schedule(mode) for mode in ("gpu_only", "hybrid", "cpu_fallback")]
    fetch, hybrid, compute = (one(trace, policy(128, schedule=schedule), shape, T4) for schedule in schedules)
    assert fetch.bytes is not None and hybrid.bytes is not None
    assert compute.bytes == 0 and compute.evictions == 0 and compute.hits > 0 and compute.max_resident == 128
    assert 0 < hybrid.bytes < fetch.bytes and not hybrid.notes
    assert hybrid.total_s is not None and fetch.total_s is not None and hybrid.total_s < fetch.total_s
    on_laptop = one(trace, policy(128, schedule=T4.schedule("cpu_fallback")), shape, LAPTOP)
    assert on_laptop.misses == on_laptop.bytes // LAPTOP.page_bytes  # type: ignore[operator]
    assert "every miss is fetched" in on_laptop.notes[0]


def test_a_machine_without_a_disk_brings_no_expert() -> None:
    laptop = load_hardware_profile("laptop-nvme")
    diskless = replace(laptop, tiers=tuple(tier for tier in laptop.tiers if tier.name != "disk"))
    with pytest.raises(ConfigError, match="no tier 'disk'"):
        MachineCosts(MODEL, diskless)
