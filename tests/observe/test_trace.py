"""The trace file as Perfetto reads it: one row per lane, bars in microseconds, metadata first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moelight.core.schedule import Lane, Page, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline
from moelight.observe.trace import LaneForecast, TraceHeader, TraceWriter
from tests.observe.traces import write_timelines

PASSES = (
    Timeline(
        spans=(
            Span(
                task=Task(kind=TaskKind.READ_PAGE, lane=Lane.DISK, page=Page(layer=2, expert=5), bytes=64),
                start_s=100.5,
                end_s=100.75,
                waited_for=Task(kind=TaskKind.POST_ATTENTION, lane=Lane.CPU, layer=0),
                waited_until_s=100.375,
            ),
            Span(
                task=Task(kind=TaskKind.CPU_ATTENTION, lane=Lane.CPU, layer=1, micro_batch=3),
                start_s=100.25,
                end_s=101.0,
                waited_until_s=FREE,
            ),
        )
    ),
    Timeline(
        spans=(Span(task=Task(kind=TaskKind.SAMPLE, lane=Lane.CPU, micro_batch=0), start_s=102.0, end_s=102.000001),)
    ),
)


@pytest.fixture
def events(tmp_path: Path) -> list[dict]:  # type: ignore[type-arg]
    trace = json.loads(write_timelines(tmp_path / "trace.json", PASSES).read_text())
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]  # type: ignore[no-any-return]


def test_one_named_row_per_lane_in_lane_order(events: list[dict]) -> None:  # type: ignore[type-arg]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values()) == ["disk", "cpu"]
    assert sorted(rows) == list(rows)
    assert {event["tid"] for event in events if event["ph"] == "X"} == set(rows)
    assert {event["cat"] for event in events if event["ph"] == "X"} == set(rows.values())


def test_bars_are_microseconds_from_the_first_span(events: list[dict]) -> None:  # type: ignore[type-arg]
    bars = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert bars == [
        ("read_page", 250_000.0, 250_000.0),
        ("cpu_attention", 0.0, 750_000.0),
        ("sample", 1_750_000.0, 1.0),
    ]


def test_what_a_bar_tells(events: list[dict]) -> None:  # type: ignore[type-arg]
    page, attention, sample = (event["args"] for event in events if event["ph"] == "X")
    waited = {"waited_for": "post_attention", "waited_lane": "cpu", "waited_until": 125_000.0}
    assert page == {"pass": 0, "layer": 2, "micro_batch": -1, "bytes": 64, "expert": 5, **waited}
    assert attention == {"pass": 0, "layer": 1, "micro_batch": 3, "bytes": 0, "waited_for": None}
    assert sample["pass"] == 1 and "waited_for" not in sample


def test_bars_of_one_row_do_not_overlap(events: list[dict]) -> None:  # type: ignore[type-arg]
    rows: dict[int, float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert event["ts"] >= rows.get(event["tid"], 0.0)
        rows[event["tid"]] = event["ts"] + event["dur"]


def written(passes: Sequence[Timeline], about: TraceHeader | None = None) -> dict[str, Any]:
    pieces: list[bytes] = []
    writer = TraceWriter(pieces.append)
    for timeline in passes:
        writer.add(timeline)
    writer.finish(about)
    return json.loads(b"".join(pieces))  # type: ignore[no-any-return]


def test_an_empty_run_is_a_trace_too() -> None:
    assert [event["ph"] for event in written([])["traceEvents"]] == ["M"]


def test_every_pass_is_written_as_it_comes() -> None:
    """And none is kept: what is written after it does not depend on it but for its number."""
    pieces: list[bytes] = []
    writer = TraceWriter(pieces.append)
    writer.add(Timeline(spans=()))
    for number, timeline in enumerate(PASSES):
        before = len(pieces)
        writer.add(timeline)
        assert b"".join(pieces[before:]).count(b'"ph": "X"') == len(timeline.spans), number
    assert not any(isinstance(held, Timeline | tuple | list) for held in vars(writer).values())
    writer.finish()
    events = json.loads(b"".join(pieces))["traceEvents"]
    assert [event["args"]["pass"] for event in events if event["ph"] == "X"] == [1, 1, 2]


def test_a_row_is_named_when_it_is_first_used() -> None:
    late = Timeline(spans=(Span(task=Task(kind=TaskKind.SAMPLE, lane=Lane.DEVICE), start_s=103.0, end_s=104.0),))
    events = written([*PASSES, late])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    orders = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert names == ["disk", "cpu", "device"] and orders == {1: 1, 6: 6, 5: 5}


ABOUT = TraceHeader(
    version="1.2.3",
    source="measured",
    policy={"model": "demo", "weights": {"host": 1.0}},
    hardware="t4",
    predicted={"h2d": LaneForecast(busy_s=0.5, bytes=64), "cpu": LaneForecast(busy_s=0.25)},
    pass_s=0.75,
    roofs={"h2d": 1e9},
    notes={"why": "the link binds"},
)


def test_what_a_trace_says_of_its_run() -> None:
    data = written(PASSES, ABOUT)["otherData"]
    assert data == {
        "moelight": "1.2.3",
        "source": "measured",
        "hardware": "t4",
        "policy": {"model": "demo", "weights": {"host": 1.0}},
        "predicted": {"h2d": {"busy_s": 0.5, "bytes": 64}, "cpu": {"busy_s": 0.25, "bytes": 0}},
        "pass_s": 0.75,
        "roofs": {"h2d": 1e9},
        "notes": {"why": "the link binds"},
    }


def test_saying_nothing_leaves_the_words_out() -> None:
    assert set(written(PASSES)) == {"displayTimeUnit", "traceEvents"}
