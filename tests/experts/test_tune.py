"""The search finds what is fast on a trace that says so, and says the same twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.experts.policy import Capacity, ExpertPolicy
from moelight.experts.replay import Shape, replay_trace
from moelight.experts.timing import MachineCosts
from moelight.experts.tune import share_of, tune_policy
from moelight.lang.check import read
from moelight.lang.format import format_policy
from moelight.profiles.hardware import load_hardware_profile
from tests.experts.test_replay import MODEL, policy
from tests.experts.traces import rows_of, skewed

LAYERS = 4
FEW = replace(MODEL, num_layers=LAYERS, moe_layers=(True,) * LAYERS)
SHAPE = Shape.of(FEW)
LAPTOP, T4 = (MachineCosts(FEW, load_hardware_profile(name)) for name in ("laptop-nvme", "t4"))
ROWS = rows_of((layer, ids) for layer, ids, _ in skewed(12, layers=LAYERS, experts=64, top_k=8))


@pytest.mark.parametrize("experts", [3, 6, 8, 60, 64, 384])
def test_a_share_means_so_many_however_it_is_cut(experts: int) -> None:
    for count in range(1, experts + 1):
        share = share_of(count, experts)
        assert share.slots(experts, None) == count
        for layers in (1, 2, 27, 61):
            assert share.slots(layers * experts, None) == layers * count


def seconds(rows, chosen: ExpertPolicy, machine) -> float:  # type: ignore[no-untyped-def]
    [result] = replay_trace(rows, SHAPE, [chosen], machine)
    assert result.total_s is not None
    return result.total_s


@pytest.mark.thorough
def test_more_memory_is_on_the_front_only_where_it_is_faster() -> None:
    result = tune_policy(ROWS, SHAPE, LAPTOP, most_slots=LAYERS * 20)
    assert [item.outcome.slots for item in result.candidates] == [LAYERS * count for count in (4, 8, 16, 20)]
    times = [item.outcome.total_s or 0.0 for item in result.front]
    assert times == sorted(times, reverse=True) and result.best is result.front[-1]
    assert result == tune_policy(ROWS, SHAPE, LAPTOP, most_slots=LAYERS * 20)
    for item in result.candidates:
        assert seconds(ROWS, item.policy, LAPTOP) == pytest.approx(item.outcome.total_s)
        plain = policy(item.outcome.slots)
        assert item.outcome.total_s is not None and item.outcome.total_s <= seconds(ROWS, plain, LAPTOP)
        reading = read(format_policy(item.policy))
        assert not reading.errors and not reading.warnings and reading.policies == (item.policy,)


def test_beside_a_gpu_misses_may_be_computed_where_they_lie() -> None:
    best = tune_policy(ROWS, SHAPE, T4, most_slots=LAYERS * 4).best
    assert best.policy.schedule.mode == "hybrid" and best.policy.cache.capacity == Capacity(value=6.25, unit="percent")


def test_the_order_that_keeps_the_busy_ones_wins() -> None:
    """One expert of each layer is asked for every other time, among many that come once: lru forgets it."""
    batches = []
    for number in range(24):
        for layer in range(LAYERS):
            batches.append((layer, [0] if number % 2 else [1 + (7 * number + layer) % 63]))
    best = tune_policy(rows_of(batches), SHAPE, LAPTOP, most_slots=LAYERS).best
    assert best.policy.cache.eviction != ("lru",)


def test_nothing_to_search_in() -> None:
    for rows, maximum in (([], None), (ROWS, LAYERS - 1)):
        with pytest.raises(ValueError, match="rows, and room"):
            tune_policy(rows, SHAPE, LAPTOP, most_slots=maximum)
