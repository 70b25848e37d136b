"""Traces are read back as they were written, and hostile ones are one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moelight.core.errors import InputError
from moelight.core.schedule import Lane, TaskKind
from moelight.observe import trace as traces
from moelight.observe.trace import FOR_NOTHING, NO_HEADER, NOT_RECORDED, read_trace
from tests.observe.traces import ABOUT, write_passes


def test_what_was_written_is_read(tmp_path: Path) -> None:
    result = read_trace(write_passes(tmp_path / "t.json", 3, tasks=2))
    assert result.about == ABOUT
    bars = result.bars
    assert len(bars) == 12
    assert list(bars.passes) == [0] * 4 + [1] * 4 + [2] * 4
    lanes, kinds = tuple(Lane), tuple(TaskKind)
    assert [lanes[n] for n in bars.lanes[:4]] == [Lane.H2D, Lane.H2D, Lane.CPU, Lane.DEVICE]
    assert [kinds[n] for n in bars.kinds[:4]] == [
        TaskKind.SEND_PAGE,
        TaskKind.SEND_PAGE,
        TaskKind.CPU_ATTENTION,
        TaskKind.POST_ATTENTION,
    ]
    assert list(bars.start_us[:4]) == [0, 250_000, 0, 500_000]
    assert list(bars.length_us[:4]) == [250_000, 250_000, 250_000, 500_000]
    assert list(bars.bytes[:4]) == [500, 500, 0, 0]
    assert list(bars.experts[:4]) == [0, 1, -1, -1]
    assert list(bars.micro_batches[:4]) == [-1, -1, 0, 0]
    send = kinds.index(TaskKind.SEND_PAGE)
    assert list(bars.waited_for[:4]) == [NOT_RECORDED, NOT_RECORDED, FOR_NOTHING, send]
    assert list(bars.until_us[:4]) == [0, 0, 0, 500_000]


def test_a_header_may_be_missing(tmp_path: Path) -> None:
    assert read_trace(write_passes(tmp_path / "t.json", 1, about=None)).about == NO_HEADER


@pytest.mark.parametrize("length", [0, 1, 20, 200, 400, 700, 900, -2, -5])
def test_a_trace_cut_off_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    path = write_passes(tmp_path / "t.json", 2)
    path.write_text(path.read_text()[:length])
    with pytest.raises(InputError, match="cut off") as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}: ") and refused.value.code == "trace_file"


GOOD = {
    "ph": "X",
    "name": "sample",
    "cat": "cpu",
    "ts": 1.0,
    "dur": 2.0,
    "args": {"pass": 0, "layer": 1, "micro_batch": 0, "bytes": 0},
}


def trace(*events: str, end: str = "]}\n") -> str:
    """A trace as it is written: an event a line."""
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(events) + f"\n{end}"


def event(**changed: Any) -> str:
    made = {**GOOD, **changed}
    made["args"] = {**GOOD["args"], **changed.get("args", {})}  # type: ignore[dict-item]
    return trace(json.dumps(made))


def about(**changed: Any) -> str:
    header = {**msgspec.to_builtins(ABOUT), **changed}
    return trace(json.dumps(GOOD), end=f'],\n"otherData": {json.dumps(header)}}}\n')


# What is wrong: the text of the file, and words the line must hold.
HOSTILE = {
    "prose": ("a trace", ["not a trace"]),
    "a list": (json.dumps([GOOD]), ["not a trace"]),
    "another object": ('{"a": 1}', ["not a trace"]),
    "more after the end": (event() + "{", ["not a trace"]),
    "two events in a line": (trace("{} {}"), ["event 0"]),
    "no tasks": (trace(json.dumps({"ph": "M"})), ["holds no tasks"]),
    "an event that is a list": (trace("[]"), ["event 0", "Expected `object`"]),
    "another kind of event": (event(ph="B"), ["event 0", "'B'"]),
    "args that are none": (event().replace('"args": {', '"args": 1, "more": {'), ["event 0", "args"]),
    "an unknown lane": (event(cat="cup"), ["cat", "'cup'", "did you mean 'cpu'"]),
    "an unknown task": (event(name="<script>"), ["name", "<script>"]),
    "time backwards": (event(dur=-1), ["dur"]),
    "time that is text": (event(ts="1"), ["ts"]),
    "time that is true": (event(ts=True), ["ts"]),
    "time without end": (event(dur=float("inf")), ["event 0"]),
    "time beyond all": (event(dur=1e300), ["dur"]),
    "no pass": (event(args={"pass": None}), ["pass"]),
    "a pass below 0": (event(args={"pass": -1}), ["pass"]),
    "a pass beyond all": (event(args={"pass": 1 << 40}), ["pass"]),
    "bytes below 0": (event(args={"bytes": -1}), ["bytes"]),
    "bytes beyond all": (event(args={"bytes": 10**30}), ["bytes"]),
    "a layer in parts": (event(args={"layer": 0.5}), ["layer"]),
    "nested for ever": (trace(json.dumps(GOOD), "[" * 30_000 + "]" * 30_000), ["event 1"]),
    "a number for ever": (trace("9" * 100_000), ["event 0"]),
    "an event for ever": (trace('{"name": "' + "x" * 200_000 + '"}'), ["event 0"]),
    "no UTF-8": (trace(json.dumps(GOOD).replace("sample", "\udce9")), ["event 0"]),
    "waiting for an unknown task": (event(args={"waited_for": "tea"}), ["waited_for", "'tea'"]),
    "waiting without end": (event(args={"waited_for": "embed"}), ["waited_until"]),
    "waiting backwards": (event(args={"waited_for": "embed", "waited_until": -1}), ["waited_until"]),
    "predicted is a list": (about(predicted=[]), ["otherData", "predicted"]),
    "a lane predicted by a word": (about(predicted={"cpu": "long"}), ["predicted"]),
    "an unknown lane predicted": (about(predicted={"gpu": {"busy_s": 1}}), ["otherData", "'gpu'"]),
    "less than nothing predicted": (about(predicted={"cpu": {"busy_s": -1}}), ["predicted", "busy_s"]),
    "a roof below 0": (about(roofs={"cpu": -1}), ["roofs"]),
    "a policy of lists": (about(policy={"model": ["x"]}), ["policy"]),
    "a policy too long": (about(policy={"model": "x" * 5000}), ["policy"]),
    "a policy too deep": (about(policy={"a": {"b": {"c": 1}}}), ["policy"]),
    "notes that are none": (about(notes="why"), ["notes"]),
    "a header that nests for ever": (about(policy="@").replace('"@"', "[" * 100_000), ["otherData"]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_traces_are_one_clear_line(kind: str, tmp_path: Path) -> None:
    path, (text, words) = tmp_path / "t.json", HOSTILE[kind]
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError) as refused:
        read_trace(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 400
    for word in words:
        assert word in message


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_trace(path)


def test_more_tasks_than_memory_is_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_MOST_TASKS", 5)
    with pytest.raises(InputError, match="more than 5 tasks"):
        read_trace(write_passes(tmp_path / "t.json", 2))
