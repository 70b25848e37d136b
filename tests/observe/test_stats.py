"""The figures of a run: their keys are an interface, their sums are exact."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.stats import LaneStats, LaneTotals, Stats


def span(lane: Lane, start_s: float, end_s: float, crossed: int = 0) -> Span:
    return Span(task=Task(kind=TaskKind.READ_PAGE, lane=lane, bytes=crossed), start_s=start_s, end_s=end_s)


def stats(**changed: object) -> Stats:
    values: dict[str, object] = {
        "wall_s": 4.0,
        "load_s": 1.0,
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "passes": 3,
        "peak_rss_bytes": 99,
        "lanes": {Lane.DISK: LaneStats(busy_s=0.5, bytes=7, tasks=2)},
        "python_s": 0.1,
    }
    return Stats(**{**values, **changed})  # type: ignore[arg-type]


def test_the_keys_are_those_of_the_stats_file() -> None:
    written = json.loads(json.dumps(stats().as_dict()))
    assert written == {
        "wall_s": 4.0,
        "load_s": 1.0,
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "tokens_per_s": 5.0,
        "passes": 3,
        "peak_rss_bytes": 99,
        "device_peak_bytes": 0,
        "lanes": {"disk": {"busy_s": 0.5, "bytes": 7, "tasks": 2}},
    }


def test_nothing_ran() -> None:
    assert stats(wall_s=0.0, completion_tokens=0).tokens_per_s == 0.0


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats().passes = 4  # type: ignore[misc]


def test_totals_add_up_over_passes_in_lane_order() -> None:
    totals = LaneTotals((Lane.CPU, Lane.DISK))
    totals.add(Timeline(spans=(span(Lane.DISK, 1.0, 3.0, 100), span(Lane.H2D, 2.0, 2.5, 10))))
    totals.add(Timeline(spans=(span(Lane.DISK, 4.0, 4.25, 1),)))
    totals.add(Timeline(spans=()))
    found = totals.stats()
    assert found == {
        Lane.DISK: LaneStats(busy_s=2.25, bytes=101, tasks=2),
        Lane.H2D: LaneStats(busy_s=0.5, bytes=10, tasks=1),
        Lane.CPU: LaneStats(),
    }
    assert list(found) == [Lane.DISK, Lane.H2D, Lane.CPU]


def test_totals_agree_with_the_timeline() -> None:
    timeline = Timeline(spans=tuple(span(lane, n, n + 0.5 * (n + 1)) for n, lane in enumerate(Lane)))
    totals = LaneTotals()
    totals.add(timeline)
    assert {lane: found.busy_s for lane, found in totals.stats().items()} == timeline.busy_s()
