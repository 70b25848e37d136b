"""Warm-pinning: when, what, how much, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.residency import WarmPin

COUNTS = np.array([[1, 2, 3, 0], [0, 0, 0, 0], [9, 0, 7, 8], [2, 2, 2, 0]])
ALL = np.ones_like(COUNTS, dtype=np.bool_)


def fired(
    warm: WarmPin, *, capacity: int, resident: np.ndarray = ALL, refused: tuple[int, int] | None = None
) -> list[tuple[int, int]]:
    """Fire on a cache of which all is a hit; the keys in the order in which they were to be pinned."""
    asked: list[tuple[int, int]] = []

    def pin(*key: int) -> bool:
        asked.append(key)
        return key != refused

    stats = SimpleNamespace(hits=COUNTS, misses=0 * COUNTS)
    warm.fire(SimpleNamespace(stats=stats, slot_table=np.where(resident, 0, -1), capacity=capacity, pin=pin))
    return asked


def test_busy_layers_come_first_and_one_without_accesses_ends_it() -> None:
    result = [(2, 0), (2, 3), (0, 2), (0, 1), (3, 0), (3, 1)]
    assert fired(WarmPin(8, active=2), capacity=15) == result
    assert fired(WarmPin(8, active=2), capacity=7) == result[:3]


def test_only_residents_are_pinned_and_nobody_moves_up_for_the_others() -> None:
    resident = ALL.copy()
    resident[2, 0] = resident[0, 2] = False
    assert fired(WarmPin(8, active=2), capacity=15, resident=resident) == [(2, 3), (0, 1), (3, 0), (3, 1)]


@pytest.mark.parametrize(
    ("active", "capacity", "pinned"),
    [
        (2, 15, [[0, 1], [0, 2], [2, 0], [2, 3], [3, 0], [3, 1]]),
        (None, 15, [[0, 2], [2, 0], [3, 0]]),
        (2, 16, []),  # all experts have room
        (2, 7, [[0, 2], [2, 0], [2, 3]]),  # half the capacity
    ],
)
def test_how_many(active: int | None, capacity: int, pinned: list[list[int]]) -> None:
    warm = WarmPin(8, active=active)
    fired(warm, capacity=capacity)
    assert warm.pinned.tolist() == pinned


def test_once_and_at_the_access_after() -> None:
    warm = WarmPin(8)
    assert [warm.due(accesses) for accesses in (0, 7, 8, 9)] == [False, False, True, True]
    fired(warm, capacity=8)
    assert not warm.due(100)


def test_rates_before_and_after() -> None:
    warm = WarmPin(8, active=1)
    message = warm.as_dict(3, 1)
    assert (message["pre_warm_accesses"], message["pre_warm_hit_rate"], message["post_warm_hit_rate"]) == (4, 0.75, 0.0)
    assert WarmPin(1).as_dict(0, 0)["pre_warm_hit_rate"] == 0.0
    fired(warm, capacity=15, refused=(2, 0))
    message = warm.as_dict(36 + 1, 3)
    assert message == {
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
