"""Writer of a run as a Chrome trace (Perfetto, chrome://tracing): one row per lane, one bar per task.

Times are relative to the first span, so any monotonic clock works. ``trace_reading`` reads the files back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from moelight.core.schedule import Lane, TaskKind
from moelight.core.timeline import Span, Timeline

HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
MOST_BYTES = 1 << 62
_PROCESS = 1
_ROWS = {lane: row for row, lane in enumerate(Lane, start=1)}
_LANES, _KINDS = {lane: str(lane) for lane in Lane}, {kind: str(kind) for kind in TaskKind}
_Text = Annotated[str, Meta(max_length=2000)]
_Plain = _Text | int | float | bool | None


class LaneForecast(Struct, frozen=True, kw_only=True):
    """Prediction for one lane in one steady decode pass: seconds at work and bytes transferred."""

    busy_s: Annotated[float, Meta(ge=0, le=1e15)]
    bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)] = 0


class TraceHeader(Struct, frozen=True, kw_only=True):
    """Header of a trace, its ``otherData``: the run and its prediction. Limits are checked where a trace is read.

    ``source`` is ``measured`` or ``simulated``. ``predicted`` and ``pass_s`` (seconds) describe one steady decode pass,
    and are empty and 0 without a prediction. ``policy`` holds plain values, nested at most once (by tier); ``roofs``
    the maximal bytes per second by lane.
    """

    version: str = msgspec.field(name="moelight")
    source: str = "measured"
    hardware: str = ""
    policy: Annotated[Mapping[str, _Plain | dict[str, _Plain]], Meta(max_length=100)] = {}
    predicted: Mapping[str, LaneForecast] = {}
    pass_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    roofs: Mapping[str, Annotated[float, Meta(ge=0, le=1e18)]] = {}
    notes: Annotated[Mapping[str, _Text], Meta(max_length=100)] = {}


class TraceWriter:
    """Writes a trace pass by pass through ``write``, so that timelines need not be kept; call `finish` at the end."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._rows: set[Lane] = set()
        self._passes = 0
        self._origin_s: float | None = None
        write(HEAD)
        write(_metadata("process_name", 0, {"name": "moelight"}).encode())

    def add(self, timeline: Timeline) -> None:
        """Write the spans of the next pass; time 0 is the start of the earliest span of the first non-empty pass."""
        if self._origin_s is None and timeline.spans:
            self._origin_s = timeline.start_s
        events, used = [], {span.task.lane for span in timeline.spans} - self._rows
        for lane in Lane:
            if lane in used:
                events.append(_metadata("thread_name", _ROWS[lane], {"name": str(lane)}))
                events.append(_metadata("thread_sort_index", _ROWS[lane], {"sort_index": _ROWS[lane]}))
        self._rows |= used
        origin_s = self._origin_s or 0.0
        events += [_bar(span, origin_s=origin_s, pass_number=self._passes) for span in timeline.spans]
        self._write("".join(f",\n{event}" for event in events).encode())
        self._passes += 1

    def finish(self, about: TraceHeader | None = None) -> None:
        """Complete the JSON document, with ``about`` as its header if given."""
        self._write(b"\n]")
        if about is not None:
            self._write(f',\n"otherData": {json.dumps(msgspec.to_builtins(about))}'.encode())
        self._write(b"}\n")


def write_trace(path: Path, timelines: Iterable[Timeline], about: TraceHeader | None = None) -> None:
    """Write a whole trace to ``path``: every span of ``timelines``, one per pass, on one clock."""
    with path.open("wb") as file:
        writer = TraceWriter(file.write)
        for timeline in timelines:
            writer.add(timeline)
        writer.finish(about)


def _metadata(name: str, row: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": _PROCESS, "tid": row, "args": args})


def _bar(span: Span, *, origin_s: float, pass_number: int) -> str:
    """Return one task as JSON, formatted by hand because the engine waits for it. No value needs escaping."""
    task, page = span.task, span.task.page
    layer, expert = (task.layer, "") if page is None else (page.layer, f', "expert": {page.expert}')
    expert += f', "part": {page.part}' if page is not None and page.part else ""
    return (
        f'{{"ph": "X", "name": "{_KINDS[task.kind]}", "cat": "{_LANES[task.lane]}", '
        f'"pid": {_PROCESS}, "tid": {_ROWS[task.lane]}, '
        f'"ts": {_us(span.start_s - origin_s)}, "dur": {_us(span.end_s - span.start_s)}, '
        f'"args": {{"pass": {pass_number}, "layer": {layer}, "micro_batch": {task.micro_batch}, '
        f'"bytes": {span.bytes}{expert}{_waited(span, origin_s)}}}}}'
    )


def _waited(span: Span, origin_s: float) -> str:
    if span.waited_until_s is None:
        return ""
    last = span.waited_for
    if last is None:
        return ', "waited_for": null'
    lane, until = _LANES[last.lane], _us(span.waited_until_s - origin_s)
    return f', "waited_for": "{_KINDS[last.kind]}", "waited_lane": "{lane}", "waited_until": {until}'


def _us(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e6:.3f}"
