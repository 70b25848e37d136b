"""The figures of a run as JSON: rates of something, and none of nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.adapt import AdaptRules, Monitor
from moelight.experts.policy import MonitorRules, PrefetchRules
from moelight.experts.predict import Prefetcher
from moelight.experts.residency import WarmPin, expert_stats, save_stats
from moelight.experts.sizing import plan_slots
from tests.experts.accesses import BUDGET, adapting

HITS = np.array([[6, 0, 1, 0], [0, 0, 0, 0]])
MISSES = np.array([[1, 1, 1, 0], [0, 0, 0, 0]])


def test_every_layer_says_what_it_has_or_that_it_has_nothing() -> None:
    found = expert_stats(hits=HITS, misses=MISSES, policy="mine", stalls={"fetch_s": 0.5}, pinned=[(1, 2), (0, 3)])
    assert found["overall"] == {"accesses": 10, "hits": 7, "misses": 3, "hit_rate": 0.7}
    assert found["layers"] == [
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
    assert found["pinned"] == [{"layer": 0, "expert": 3}, {"layer": 1, "expert": 2}]
    assert found["stalls"] == {"fetch_s": 0.5}
    absent = {"cache", "warm_pin", "predictor", "monitor", "adaptations", "sizing"}
    assert {key for key, value in found.items() if value is None} == absent


def test_before_anything_happens() -> None:
    found = expert_stats(hits=0 * HITS, misses=0 * MISSES)
    assert found["overall"] == {"accesses": 0, "hits": 0, "misses": 0, "hit_rate": 0.0}
    assert [layer["note"] for layer in found["layers"]] == ["no accesses"] * 2


def test_all_of_it_is_json(tmp_path: Path) -> None:
    prefetcher = Prefetcher(PrefetchRules(strategy="previous", budget=2), num_layers=2, num_experts=4)
    for _ in range(2):
        prefetcher.observe(0, np.array([0, 2]), np.array([1, 1]))
        list(prefetcher.ahead(1))
    monitor = Monitor(MonitorRules(log_interval=5))
    rules: AdaptRules = adapting(BUDGET, accesses=3)
    monitor.record(7, 3, 0)
    rules.record(7, 3, 0)
    warm = WarmPin(2, per_layer=1)
    warm.fire(HITS, MISSES, np.ones((2, 4), dtype=np.bool_), capacity=4, pinnable=3, pin=lambda *_: True)
    found = expert_stats(
        hits=HITS,
        misses=MISSES,
        cache={"evictions": 1},
        warm=warm,
        prefetcher=prefetcher,
        monitor=monitor,
        adapting=rules,
        sizing=plan_slots(layers=2, num_experts=4, active=2, free_bytes=0, per_expert_bytes=1),
    )
    path = tmp_path / "stats.json"
    save_stats(found, path)
    said = json.loads(path.read_text())
    assert said == found
    assert said["warm_pin"]["pinned"] == [{"layer": 0, "experts": [0]}]
    assert said["predictor"]["strategy"] == "previous"
    assert said["predictor"]["quality"]["previous"]["useful"] == 2
    assert said["monitor"]["now"]["hit_rate"] == 0.7
    assert [note["access"] for note in said["monitor"]["notes"]] == [5, 10]
    assert said["adaptations"]["log"][0]["to"] == "8"
    assert said["sizing"]["status"] == "BUDGET_EXHAUSTED"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_stats(found, tmp_path / "file" / "stats.json")
