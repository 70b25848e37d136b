"""Warm-pinning: when, what, how much, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.residency import WarmPin, busiest_residents

COUNTS = np.array([[1, 2, 3, 0], [0, 0, 0, 0], [9, 0, 7, 8], [2, 2, 2, 0]])
ALL = np.ones_like(COUNTS, dtype=np.bool_)


def test_busy_layers_come_first_and_one_without_accesses_ends_it() -> None:
    found = busiest_residents(COUNTS, ALL, per_layer=2, budget=100)
    assert found.tolist() == [[2, 0], [2, 3], [0, 2], [0, 1], [3, 0], [3, 1]]
    assert busiest_residents(COUNTS, ALL, per_layer=2, budget=3).tolist() == [[2, 0], [2, 3], [0, 2]]
    assert busiest_residents(COUNTS, ALL, per_layer=0, budget=3).tolist() == []


def test_only_residents_are_pinned_and_nobody_moves_up_for_the_others() -> None:
    resident = ALL.copy()
    resident[2, 0] = resident[0, 2] = False
    assert busiest_residents(COUNTS, resident, per_layer=2, budget=100).tolist() == [[2, 3], [0, 1], [3, 0], [3, 1]]


def fired(
    warm: WarmPin, *, capacity: int, pinnable: int = 100, refused: tuple[int, int] | None = None
) -> list[list[int]]:
    warm.fire(COUNTS, 0 * COUNTS, ALL, capacity=capacity, pinnable=pinnable, pin=lambda *key: key != refused)
    return warm.pinned.tolist()


@pytest.mark.parametrize(
    ("per_layer", "active", "capacity", "pinnable", "pinned"),
    [
        (None, 2, 15, 100, [[0, 1], [0, 2], [2, 0], [2, 3], [3, 0], [3, 1]]),
        (None, None, 15, 100, [[0, 2], [2, 0], [3, 0]]),
        (None, 2, 16, 100, []),  # all experts have room
        (1, 2, 16, 100, [[0, 2], [2, 0], [3, 0]]),
        (0, 2, 15, 100, []),
        (None, 2, 7, 100, [[0, 2], [2, 0], [2, 3]]),  # half the capacity
        (None, 2, 15, 2, [[2, 0], [2, 3]]),  # as many as can be protected
    ],
)
def test_how_many(
    per_layer: int | None, active: int | None, capacity: int, pinnable: int, pinned: list[list[int]]
) -> None:
    warm = WarmPin(8, per_layer=per_layer, active=active)
    assert fired(warm, capacity=capacity, pinnable=pinnable) == pinned


def test_once_and_at_the_access_after() -> None:
    warm = WarmPin(8)
    assert [warm.due(accesses) for accesses in (0, 7, 8, 9)] == [False, False, True, True]
    fired(warm, capacity=8)
    assert not warm.due(100)


def test_rates_before_and_after() -> None:
    warm = WarmPin(8, active=1)
    said = warm.as_dict(3, 1)
    assert (said["pre_warm_accesses"], said["pre_warm_hit_rate"], said["post_warm_hit_rate"]) == (4, 0.75, 0.0)
    assert WarmPin(1).as_dict(0, 0)["pre_warm_hit_rate"] == 0.0
    assert fired(warm, capacity=15, refused=(2, 0)) == [[0, 2], [3, 0]]
    said = warm.as_dict(36 + 1, 3)
    assert said == {
        "after": 8,
        "fired": True,
        "pre_warm_accesses": 36,
        "pre_warm_hit_rate": 1.0,
        "post_warm_accesses": 4,
        "post_warm_hit_rate": 0.25,
        "pinned": [{"layer": 0, "experts": [2]}, {"layer": 3, "experts": [0]}],
    }


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 access, not 0"):
        WarmPin(0)
    with pytest.raises(ConfigError, match="at least 0 experts per layer"):
        WarmPin(1, per_layer=-1)
