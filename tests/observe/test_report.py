"""A trace in figures: median passes, rates, shares of the roof, and what was predicted beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.observe.report import Report, report_of
from moelight.observe.trace import About, write_trace
from moelight.observe.trace_reading import read_trace
from tests.observe.traces import ABOUT, one_pass, write_passes


def report(path: Path) -> Report:
    return report_of(read_trace(path))


def test_the_figures_of_equal_passes(tmp_path: Path) -> None:
    found = report(write_passes(tmp_path / "t.json", 5))
    assert (len(found.passes), found.source, found.wall_s) == (5, "measured", 5.0)
    assert found.pass_s == pytest.approx(1.0)
    assert found.predicted_pass_s == 1.25 and found.error == pytest.approx(-0.2)
    h2d, device, cpu = found.lanes
    assert [lane.lane for lane in found.lanes] == ["h2d", "device", "cpu"]
    assert h2d.busy_s == pytest.approx(0.5) and h2d.bytes == 1000 and h2d.share_of_pass == pytest.approx(0.5)
    assert (h2d.predicted_s, h2d.predicted_bytes, h2d.error) == (0.5, 1000, pytest.approx(0.0))
    assert h2d.total_bytes == 5000 and h2d.tasks == 5
    assert h2d.bytes_per_s == pytest.approx(2000) and h2d.share_of_roof == pytest.approx(0.5)
    assert device.predicted_s is None and device.error is None
    assert device.bytes_per_s is None and device.share_of_roof is None
    assert cpu.error == pytest.approx(0.25)


def test_one_slow_pass_does_not_move_the_median(tmp_path: Path) -> None:
    passes, at = [], 0.0
    for send_s in (0.5, 0.5, 9.5, 0.5, 0.5):
        passes.append(one_pass(at, send_s=send_s))
        at = passes[-1].end_s
    write_trace(tmp_path / "t.json", passes, ABOUT)
    found = report(tmp_path / "t.json")
    assert found.pass_s == pytest.approx(1.0) and found.wall_s == pytest.approx(14.0)
    h2d = found.lanes[0]
    assert h2d.busy_s == pytest.approx(0.5) and h2d.total_s == pytest.approx(11.5)
    assert found.busiest.lane == "h2d"


def test_a_pass_lasts_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    """The second one's transfer begins while the first still computes."""
    first, second = one_pass(0.0), one_pass(0.75)
    write_trace(tmp_path / "t.json", [first, second])
    found = report(tmp_path / "t.json")
    assert [figures.length_us for figures in found.passes] == [1_000_000, 750_000]
    assert found.about is None and found.predicted_pass_s is None and found.error is None


def test_a_lane_that_was_predicted_and_did_nothing_is_shown(tmp_path: Path) -> None:
    about = About(version="1", source="simulated", predicted={**ABOUT.predicted, "disk": ABOUT.predicted["h2d"]})
    found = report(write_passes(tmp_path / "t.json", 1, about=about))
    assert found.source == "simulated"
    disk = found.lanes[0]
    assert (disk.lane, disk.busy_s, disk.tasks, disk.error) == ("disk", 0.0, 0, pytest.approx(-1.0))
