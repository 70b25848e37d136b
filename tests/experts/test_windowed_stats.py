"""Windowed metrics against a list of accesses, one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.adapt import NOTES_KEPT, Monitor
from moelight.experts.policy import MonitorRules
from tests.experts.accesses import Accesses, one_by_one, rates


@pytest.mark.parametrize(("window", "interval"), [(1, 1), (7, 3), (50, 10), (1000, 64)])
def test_rates_and_notes_at_every_access(window: int, interval: int) -> None:
    rng = np.random.default_rng(window)
    monitor = Monitor(MonitorRules(metrics=("eviction_rate", "hit_rate"), window=window, log_interval=interval))
    assert monitor.now() == {"hit_rate": 0.0, "eviction_rate": 0.0}
    accesses: Accesses = []
    notes = []
    for _ in range(120):
        batch = (int(rng.integers(0, 9)), int(rng.integers(0, 20)), int(rng.integers(0, 22)))
        result = monitor.record(*batch)
        for at, access in enumerate(one_by_one(*batch)):
            accesses.append(access)
            hit_rate, eviction_rate = rates(accesses, window)
            assert (result["hit_rate"][at], result["eviction_rate"][at]) == (hit_rate, eviction_rate)
            if len(accesses) % interval == 0:
                notes.append({"access": len(accesses), "eviction_rate": eviction_rate, "hit_rate": hit_rate})
        assert tuple(monitor.now().values()) == rates(accesses, window)
        assert monitor.accesses == len(accesses)
    assert list(monitor.notes) == notes[-NOTES_KEPT:]


def test_one_batch_may_be_longer_than_many_windows() -> None:
    monitor = Monitor(MonitorRules(window=2))
    assert monitor.record(300, 0, 0)["hit_rate"].tolist() == [1.0] * 300
    assert monitor.record(0, 3, 0)["hit_rate"].tolist() == [0.5, 0.0, 0.0]


def test_a_batch_of_nothing_is_none() -> None:
    monitor = Monitor()
    assert monitor.record(0, 0, 2)["hit_rate"].size == 0
    assert (monitor.accesses, monitor.now()["eviction_rate"]) == (0, 0.0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="window must be at least 1 access, not 0"):
        Monitor(MonitorRules(window=0))
    with pytest.raises(ConfigError, match="log_interval must be at least 1 access, not 0"):
        Monitor(MonitorRules(log_interval=0))
    with pytest.raises(ConfigError, match=r"unknown metric 'hitrate' \(did you mean 'hit_rate'\?\)"):
        Monitor(MonitorRules(metrics=("hitrate",)))
