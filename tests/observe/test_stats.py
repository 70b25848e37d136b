"""The figures of a run: their keys are an interface, their sums are exact."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moelight.core.policy import Adaptation
from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.stats import Binding, LaneStats, LaneTotals, RunStats


def span(lane: Lane, start_s: float, end_s: float, crossed: int = 0) -> Span:
    return Span(task=Task(kind=TaskKind.READ_PAGE, lane=lane, bytes=crossed), start_s=start_s, end_s=end_s)


CHANGE = Adaptation(
    after_pass=9, before={"batch_size": 2}, now={"batch_size": 4}, reason="so it is", predicted_gain=0.5
)


def stats(**changed: object) -> RunStats:
    values: dict[str, object] = {
        "wall_s": 4.0,
        "load_s": 1.0,
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "passes": 3,
        "peak_rss_bytes": 99,
        "lanes": {
            Lane.DISK: LaneStats(busy_s=0.5, bytes=7, tasks=2),
            Lane.CPU: LaneStats(busy_s=3.0, tasks=5, bubbles_s={"read_page": 0.75, "launch": 0.25}),
        },
        "python_s": 0.1,
        "counts": {"things": 3},
        "adaptations": (CHANGE,),
    }
    return RunStats(**{**values, **changed})  # type: ignore[arg-type]


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
        "lanes": {
            "disk": {"busy_s": 0.5, "busy_share": 0.125, "bytes": 7, "bytes_per_s": 14.0, "tasks": 2},
            "cpu": {"busy_s": 3.0, "busy_share": 0.75, "bytes": 0, "bytes_per_s": 0.0, "tasks": 5},
        },
        "binding": {"lane": "cpu", "idle_share": 0.25, "bubbles_s": {"read_page": 0.75, "launch": 0.25}},
        "counts": {"things": 3},
        "adaptations": [
            {"pass": 9, "from": {"batch_size": 2}, "to": {"batch_size": 4}, "reason": "so it is", "predicted_gain": 0.5}
        ],
    }


def test_nothing_ran() -> None:
    result = stats(wall_s=0.0, completion_tokens=0, lanes={Lane.CPU: LaneStats()})
    assert result.tokens_per_s == 0.0 and result.binding is None
    assert result.as_dict()["lanes"]["cpu"]["busy_share"] == 0.0 and result.as_dict()["binding"] is None
    assert stats(lanes={}).binding is None


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats().passes = 4  # type: ignore[misc]


def test_totals_add_up_over_passes_in_lane_order() -> None:
    totals = LaneTotals((Lane.CPU, Lane.DISK))
    totals.add(Timeline(spans=(span(Lane.DISK, 1.0, 3.0, 100), span(Lane.H2D, 2.0, 2.5, 10))))
    totals.add(Timeline(spans=(span(Lane.DISK, 4.0, 4.25, 1),)))
    totals.add(Timeline(spans=()))
    result = totals.stats()
    assert {lane: dataclasses.replace(selected, bubbles_s={}) for lane, selected in result.items()} == {
        Lane.DISK: LaneStats(busy_s=2.25, bytes=101, tasks=2),
        Lane.H2D: LaneStats(busy_s=0.5, bytes=10, tasks=1),
        Lane.CPU: LaneStats(),
    }
    assert list(result) == [Lane.DISK, Lane.H2D, Lane.CPU]


def test_work_and_bubbles_of_a_run_make_its_wall_time() -> None:
    totals = LaneTotals((Lane.CPU, Lane.DISK))
    for began_s in (10.0, 50.0):  # two calls of the engine, with a pause that is nobody's
        totals.begin(began_s)
        totals.add(
            Timeline(spans=(span(Lane.DISK, began_s + 1, began_s + 3), span(Lane.DISK, began_s + 4, began_s + 6)))
        )
        totals.add(Timeline(spans=(span(Lane.DISK, began_s + 6, began_s + 9),)))
        totals.end(began_s + 10)
    disk = totals.stats()[Lane.DISK]
    assert disk.bubbles_s == {"not recorded": 4.0, "no task left": 2.0}
    assert disk.busy_s + sum(disk.bubbles_s.values()) == 20.0


def test_the_lane_that_binds_now_is_that_of_the_last_passes() -> None:
    totals = LaneTotals((Lane.CPU, Lane.DISK))
    assert totals.binding is None
    for n in range(4):
        totals.add(
            Timeline(spans=(span(Lane.DISK, n, n + 0.75), span(Lane.CPU, n, n + 0.5), span(Lane.CPU, n + 0.75, n + 1)))
        )
    assert totals.binding == Binding(lane=Lane.DISK, share=pytest.approx(0.75))
    for n in range(4, 20):
        totals.add(Timeline(spans=(span(Lane.DISK, n, n + 0.25), span(Lane.CPU, n + 0.1, n + 1))))
    assert totals.binding == Binding(lane=Lane.CPU, share=pytest.approx(0.9))
    totals.begin(100.0)
    assert totals.binding is None
    totals.add(Timeline(spans=(span(Lane.DISK, 101.0, 102.0),)))
    assert totals.binding == Binding(lane=Lane.DISK, share=pytest.approx(0.5))


def test_totals_agree_with_the_timeline() -> None:
    timeline = Timeline(spans=tuple(span(lane, n, n + 0.5 * (n + 1)) for n, lane in enumerate(Lane)))
    totals = LaneTotals()
    totals.add(timeline)
    assert {lane: stat.busy_s for lane, stat in totals.stats().items()} == timeline.busy_s()
