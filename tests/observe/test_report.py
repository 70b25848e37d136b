"""A trace in figures: median passes, rates, shares of the roof, and what was predicted beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.core.schedule import Lane, TaskKind
from moelight.core.timeline import Timeline
from moelight.hrm.task_cost import TaskCost
from moelight.observe.bubbles import Bubble, Bubbles
from moelight.observe.report import Report, report_of
from moelight.observe.trace import NO_HEADER, TraceHeader, read_trace
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape
from moelight.scheduler.simulate import simulate_passes
from tests.observe.traces import ABOUT, one_pass, write_passes, write_timelines
from tests.shapes import small_layout


def report(path: Path) -> Report:
    return report_of(read_trace(path))


def test_the_figures_of_equal_passes(tmp_path: Path) -> None:
    result = report(write_passes(tmp_path / "t.json", 5))
    assert (len(result.passes), result.source, result.wall_s) == (5, "measured", 5.0)
    assert result.pass_s == pytest.approx(1.0)
    assert result.predicted_pass_s == 1.25 and result.error == pytest.approx(-0.2)
    h2d, device, cpu = result.lanes
    assert [lane.lane for lane in result.lanes] == ["h2d", "device", "cpu"]
    assert h2d.busy_s == pytest.approx(0.5) and h2d.bytes == 1000 and h2d.busy_share == pytest.approx(0.5)
    assert (h2d.total_s, h2d.idle_s) == (pytest.approx(2.5), pytest.approx(2.5))
    assert (h2d.predicted_s, h2d.predicted_bytes, h2d.error) == (0.5, 1000, pytest.approx(0.0))
    assert h2d.total_bytes == 5000 and h2d.tasks == 5
    assert h2d.bytes_per_s == pytest.approx(2000) and h2d.share_of_roof == pytest.approx(0.5)
    assert device.predicted_s is None and device.error is None
    assert device.bytes_per_s is None and device.share_of_roof is None
    assert cpu.error == pytest.approx(0.25) and cpu.share_of_roof == pytest.approx(0.8)  # of the predicted speed


def test_one_slow_pass_does_not_move_the_median(tmp_path: Path) -> None:
    passes, at = [], 0.0
    for send_s in (0.5, 0.5, 9.5, 0.5, 0.5):
        passes.append(one_pass(at, send_s=send_s))
        at = passes[-1].end_s
    write_timelines(tmp_path / "t.json", passes, ABOUT)
    result = report(tmp_path / "t.json")
    assert result.pass_s == pytest.approx(1.0) and result.wall_s == pytest.approx(14.0)
    h2d = result.lanes[0]
    assert h2d.busy_s == pytest.approx(0.5) and h2d.total_s == pytest.approx(11.5)
    assert result.binding is h2d
    for lane in result.lanes:
        assert lane.total_s + lane.idle_s == pytest.approx(14.0)


def test_the_rest_of_the_binding_lane_by_cause(tmp_path: Path) -> None:
    """The link is as busy as the device, and comes first: half a second of every pass it waits for the device."""
    result = report(write_passes(tmp_path / "t.json", 5))
    assert result.binding.lane == "h2d"
    assert result.bubbles == {
        "not recorded": Bubble(
            seconds=pytest.approx(2.0),
            count=4,
            longest_s=pytest.approx(0.5),
            longest_at_s=pytest.approx(0.5),
            pass_number=1,
            layer=1,
        ),
        "no task left": Bubble(
            seconds=pytest.approx(0.5),
            count=1,
            longest_s=pytest.approx(0.5),
            longest_at_s=pytest.approx(4.5),
            pass_number=-1,
            layer=-1,
        ),
    }
    assert sum(bubble.seconds for bubble in result.bubbles.values()) == pytest.approx(result.binding.idle_s)


def test_the_causes_of_a_simulated_run_survive_the_file(tmp_path: Path) -> None:
    layout, costs = small_layout((True, True, True), experts=3, resident=1, host=4), {TaskKind.SEND_PAGE: 1.0}
    steps, carried = [], 0
    for _ in range(3):
        shape = PassShape(micro_batches=(MicroBatchShape(tokens=4),) * 2, prefetched=carried, wraps=True)
        built = SCHEDULES.get("cgopipe")(layout, shape)
        carried = len(built.prefetched_next)
        steps.append((built, lambda task: TaskCost(seconds=costs.get(task.kind, 0.375))))
    timelines = simulate_passes(steps, inline=True)
    direct = Bubbles()
    for timeline in timelines:
        direct.add(timeline)
    direct.end()
    result = report(write_timelines(tmp_path / "t.json", timelines))
    lost = direct.of(Lane(result.binding.lane))
    assert len(lost) > 2 and set(result.bubbles) == set(lost)
    for cause, bubble in result.bubbles.items():
        assert bubble.seconds == pytest.approx(lost[cause].seconds) and bubble.count == lost[cause].count


def test_passes_keep_their_numbers(tmp_path: Path) -> None:
    """A pass in which nothing ran is not in the file; the one after it is still the third."""
    passes = [one_pass(0.0), Timeline(spans=()), one_pass(3.0)]
    result = report(write_timelines(tmp_path / "t.json", passes))
    assert [figures.number for figures in result.passes] == [0, 2]
    assert result.bubbles["between passes"].pass_number == 2


def test_a_report_as_one_object(tmp_path: Path) -> None:
    result = json.loads(json.dumps(report(write_passes(tmp_path / "t.json", 5)).as_dict()))
    assert list(result) == ["source", "passes", "run_s", "pass_s", "predicted_pass_s", "lanes", "binding", "bubbles"]
    assert (result["passes"], result["run_s"], result["binding"]) == (5, 5.0, "h2d")
    lane = result["lanes"]["h2d"]
    assert lane["busy_s"] + lane["idle_s"] == pytest.approx(5.0) and lane["share_of_roof"] == pytest.approx(0.5)
    assert result["bubbles"]["not recorded"]["share"] == pytest.approx(0.4)


def test_a_pass_lasts_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    """The second one's transfer begins while the first still computes."""
    first, second = one_pass(0.0), one_pass(0.75)
    write_timelines(tmp_path / "t.json", [first, second])
    result = report(tmp_path / "t.json")
    assert [figures.length_us for figures in result.passes] == [1_000_000, 750_000]
    assert result.about == NO_HEADER and result.predicted_pass_s is None and result.error is None


def test_a_lane_that_was_predicted_and_did_nothing_is_shown(tmp_path: Path) -> None:
    about = TraceHeader(version="1", source="simulated", predicted={**ABOUT.predicted, "disk": ABOUT.predicted["h2d"]})
    result = report(write_passes(tmp_path / "t.json", 1, about=about))
    assert result.source == "simulated"
    disk = result.lanes[0]
    assert (disk.lane, disk.busy_s, disk.tasks, disk.error) == ("disk", 0.0, 0, pytest.approx(-1.0))
