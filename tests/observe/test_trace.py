"""The trace file as Perfetto reads it: one row per lane, bars in microseconds, metadata first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.core.schedule import Lane, Page, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.observe.trace import About, LaneForecast, trace_text, write_trace

PASSES = (
    Timeline(
        spans=(
            Span(
                task=Task(kind=TaskKind.READ_PAGE, lane=Lane.DISK, page=Page(layer=2, expert=5), bytes=64),
                start_s=100.5,
                end_s=100.75,
            ),
            Span(
                task=Task(kind=TaskKind.CPU_ATTENTION, lane=Lane.CPU, layer=1, micro_batch=3),
                start_s=100.25,
                end_s=101.0,
            ),
        )
    ),
    Timeline(
        spans=(Span(task=Task(kind=TaskKind.SAMPLE, lane=Lane.CPU, micro_batch=0), start_s=102.0, end_s=102.000001),)
    ),
)


@pytest.fixture
def events(tmp_path: Path) -> list[dict]:  # type: ignore[type-arg]
    path = tmp_path / "trace.json"
    write_trace(path, PASSES)
    trace = json.loads(path.read_text())
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
    assert page == {"pass": 0, "layer": 2, "micro_batch": -1, "bytes": 64, "expert": 5}
    assert attention == {"pass": 0, "layer": 1, "micro_batch": 3, "bytes": 0}
    assert sample["pass"] == 1


def test_bars_of_one_row_do_not_overlap(events: list[dict]) -> None:  # type: ignore[type-arg]
    rows: dict[int, float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert event["ts"] >= rows.get(event["tid"], 0.0)
        rows[event["tid"]] = event["ts"] + event["dur"]


def test_an_empty_run_is_a_trace_too() -> None:
    events = json.loads("".join(trace_text([])))["traceEvents"]
    assert [event["ph"] for event in events] == ["M"]


ABOUT = About(
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
    data = json.loads("".join(trace_text(PASSES, ABOUT)))["otherData"]
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
    assert set(json.loads("".join(trace_text(PASSES)))) == {"displayTimeUnit", "traceEvents"}
