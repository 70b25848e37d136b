"""What makes experts leave although nobody needs their place."""

from __future__ import annotations

import numpy as np

from moelight.experts.cache import MemoryPressure
from tests.experts.test_cache import EXPERTS, make


def test_time_to_live() -> None:
    """Against a scan over all, one access at a time."""
    rng = np.random.default_rng(1)
    heard: list[int] = []
    cache = make(9, ttl=7, on_evict=lambda _, expert, __: heard.append(expert))
    cache.access(0, [[0]])
    cache.pin(0, 0)
    last = {0: 1}
    for now in range(2, 300):
        expert = int(rng.integers(EXPERTS))
        cache.access(0, [[expert]])
        last[expert] = now
        due = [key for key, at in last.items() if key and at <= now - 7]
        assert sorted(heard) == sorted(due)
        heard.clear()
        last = {key: at for key, at in last.items() if key not in due}
        assert np.flatnonzero(cache.slot_table[0] >= 0).tolist() == sorted({*last, 0})
    assert cache.stats.expired == cache.stats.evictions > 0


def test_memory_pressure() -> None:
    heard: list[int] = []
    pressure = MemoryPressure(threshold=0.9, headroom=0.5, budget_gb=10.0, expert_gb=1.0)
    cache = make(18, pressure=pressure, on_evict=lambda _, expert, __: heard.append(expert))
    for expert in range(EXPERTS):
        cache.access(0, [[expert]])
    cache.access(1, [[0], [1]])
    assert not heard
    cache.access(1, [[2]])
    assert heard == [0, 1, 2, 3]
    assert (len(cache), cache.stats.pressed) == (5, 4)
    # A batch is never pressed out by itself.
    result = cache.access(2, [[0], [1], [2], [3], [4], [5]])
    assert (result.slots >= 0).all()
    assert len(cache) == 6
