"""The figures of a run as JSON: rates of something, and none of nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from moelight.experts.policy import AdaptRule, CacheRules, Capacity, ExpertPolicy, MonitorRules, PrefetchRules
from moelight.experts.residency import Residency
from tests.experts.accesses import BUDGET

HITS = np.array([[6, 0, 1, 0], [0, 0, 0, 0]])
MISSES = np.array([[1, 1, 1, 0], [0, 0, 0, 0]])


def counted(hits: np.ndarray = HITS, misses: np.ndarray = MISSES, **blocks: Any) -> Residency:
    """A run without batches, with these counters."""
    cache = blocks.pop("cache", CacheRules(capacity=Capacity(value=8)))
    run = Residency(ExpertPolicy(name="mine", cache=cache, **blocks), num_layers=2, num_experts=4)
    run.cache.stats.hits[:], run.cache.stats.misses[:] = hits, misses
    return run


def test_every_layer_says_what_it_has_or_that_it_has_nothing() -> None:
    run = counted()
    run.cache.fill([(1, 2), (0, 3)])
    assert run.cache.pin(1, 2) and run.cache.pin(0, 3)
    result = run.stats({"fetch_s": 0.5})
    assert result["policy"] == "mine"
    assert result["overall"] == {"accesses": 10, "hits": 7, "misses": 3, "hit_rate": 0.7}
    assert result["layers"] == [
        {
            "layer": 0,
            "accesses": 10,
            "hits": 7,
            "misses": 3,
            "hit_rate": 0.7,
            "distinct": 3,
            "top": [
                {"expert": 0, "accesses": 7},
                {"expert": 2, "accesses": 2},
                {"expert": 1, "accesses": 1},
            ],
        },
        {"layer": 1, "accesses": 0, "hit_rate": None, "note": "no accesses"},
    ]
    assert result["pinned"] == [{"layer": 0, "expert": 3}, {"layer": 1, "expert": 2}]
    assert result["stalls"] == {"fetch_s": 0.5}
    absent = {"warm_pin", "predictor", "monitor", "adaptations", "sizing"}
    assert {key for key, value in result.items() if value is None} == absent


def test_before_anything_happens() -> None:
    result = counted(0 * HITS, 0 * MISSES).stats()
    assert result["overall"] == {"accesses": 0, "hits": 0, "misses": 0, "hit_rate": 0.0}
    assert [layer["note"] for layer in result["layers"]] == ["no accesses"] * 2
    assert result["stalls"] is None


def test_all_of_it_is_json() -> None:
    run = counted(
        cache=CacheRules(capacity=Capacity(value=4), warm_pin=2),
        prefetch=PrefetchRules(strategy="previous", budget=2),
        monitor=MonitorRules(log_interval=5),
        adapt=(AdaptRule(metric="hit_rate", op=">=", threshold=0.0, accesses=3, action=BUDGET),),
    )
    predictor = run.cache.predictor
    for _ in range(2):
        predictor.observe(0, np.array([0, 2]), np.array([1, 1]))
        list(predictor.ahead(1))
    assert run.adapting is not None and run.warm is not None
    run.adapting.record(7, 3, 0)
    run.cache.fill([(0, 0)])
    run.warm.fire(run.cache)
    message = run.stats()
    assert json.loads(json.dumps(message)) == message
    assert message["warm_pin"]["pinned"] == [{"layer": 0, "experts": [0]}]
    assert (message["predictor"]["strategy"], message["predictor"]["budget"]) == ("previous", 8)
    assert message["predictor"]["quality"]["previous"]["useful"] == 2
    assert message["monitor"]["now"]["hit_rate"] == 0.7
    assert [note["access"] for note in message["monitor"]["notes"]] == [5, 10]
    assert message["adaptations"]["log"][0]["to"] == "8"
