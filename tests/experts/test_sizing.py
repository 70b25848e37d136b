"""Slots by the sizing rule, with each of its statuses."""

from __future__ import annotations

import pytest

from moelight.core.errors import ConfigError
from moelight.core.units import MiB
from moelight.experts.sizing import SlotPlan, Status, plan_slots


def plan(**changes: int) -> SlotPlan:
    sizes = {"layers": 4, "num_experts": 16, "active": 2, "free_bytes": 612 * MiB, "per_expert_bytes": 5 * MiB}
    return plan_slots(**(sizes | changes))


def summary(result: SlotPlan) -> tuple[int, int, int, str]:
    return result.slots, result.recommended, result.budget, result.status.value


def test_statuses() -> None:
    assert summary(plan()) == (20, 16, 20, "OK")
    assert summary(plan(layers=0)) == (0, 0, 0, "EMPTY")
    assert summary(plan(per_expert_bytes=0)) == (64, 16, 64, "UNKNOWN_EXPERT_SIZE")
    assert summary(plan(free_bytes=582 * MiB)) == (14, 16, 14, "BELOW_RECOMMENDED")
    assert summary(plan(free_bytes=516 * MiB)) == (0, 16, 0, "BUDGET_EXHAUSTED")
    assert summary(plan(free_bytes=0)) == (0, 16, 0, "BUDGET_EXHAUSTED")
    assert summary(plan(free_bytes=10_000 * MiB)) == (64, 16, 1897, "OK")
    assert summary(plan(free_bytes=80 * MiB, reserve_bytes=0)) == (16, 16, 16, "OK")


def test_a_batch_needs_what_it_is_expected_to_meet() -> None:
    # 16 (1 - (7/8)^8) = 10.5: eleven experts in each of four layers.
    assert plan(batch=8).recommended == 44
    assert plan(batch=8).status is Status.BELOW_RECOMMENDED
    assert plan(batch=10_000).recommended == 64
    assert plan(active=16).recommended == 64
    assert plan(active=16, batch=3).recommended == 64
    recommended = [plan(batch=batch).recommended for batch in range(1, 60)]
    assert recommended == sorted(recommended)
    assert recommended[:2] == [16, 16]
    with pytest.raises(ConfigError, match="at least 1 token"):
        plan(batch=0)


def test_json() -> None:
    assert plan().as_dict() == {"slots": 20, "recommended_slots": 16, "budget_slots": 20, "status": "OK"}
