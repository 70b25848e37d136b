"""A run as a Chrome trace (Perfetto, chrome://tracing), written and read back: one row per lane, one bar per task.

Times are relative to the first span, so any monotonic clock works. Files are read line by line, to bound memory, and
every value is validated.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from moelight.core.errors import InputError, did_you_mean
from moelight.core.schedule import Lane, TaskKind
from moelight.core.small_files import open_regular, read_error_text
from moelight.core.timeline import Span, Timeline

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_MOST_BYTES = 1 << 62
_PROCESS = 1
_ROWS = {lane: row for row, lane in enumerate(Lane, start=1)}
_LANES, _KINDS = {lane: str(lane) for lane in Lane}, {kind: str(kind) for kind in TaskKind}
_LANE_NUMBERS = {name: number for number, name in enumerate(_LANES.values())}
_KIND_NUMBERS = {name: number for number, name in enumerate(_KINDS.values())}
FOR_NOTHING, NOT_RECORDED = -1, -2
_LONGEST_LINE = 1 << 16
_LONGEST_TAIL = 8 << 20
_MOST_TASKS = 30_000_000
_FOREIGN = "not a trace that moelight wrote (generate --trace and simulate --trace write them)"
_CUT_OFF = "cut off before its end; was the run interrupted?"
_Text = Annotated[str, Meta(max_length=2000)]
_Plain = _Text | int | float | bool | None


class LaneForecast(Struct, frozen=True, kw_only=True):
    """Prediction for one lane in one steady decode pass: seconds at work and bytes transferred."""

    busy_s: Annotated[float, Meta(ge=0, le=1e15)]
    bytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)] = 0


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


NO_HEADER = TraceHeader(version="")


class TraceWriter:
    """Writes a trace pass by pass through ``write``, so that timelines need not be kept; call `finish` at the end."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._rows: set[Lane] = set()
        self._passes = 0
        self._origin_s: float | None = None
        write(_HEAD)
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


def write_trace(
    write: Callable[[bytes], object], timelines: Iterable[Timeline], about: TraceHeader | None = None
) -> None:
    """Write a whole trace through ``write``: every span of ``timelines``, one per pass, on one clock."""
    writer = TraceWriter(write)
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
    expert += f', "layers": {len(task.layers)}' if task.layers is not None else ""
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


class TaskColumns:
    """All tasks of a trace as columns, 51 bytes a task.

    ``lanes`` and ``kinds`` hold positions in `Lane` and `TaskKind`. ``waited_for`` holds the kind (its position) of the
    dependency that ended last, at ``until_us``; or `FOR_NOTHING`; or `NOT_RECORDED` in a trace of an older version.
    """

    def __init__(self) -> None:
        self.start_us, self.length_us, self.until_us = array("d"), array("d"), array("d")
        self.waited_for = array("b")
        self.lanes, self.kinds = array("B"), array("B")
        self.passes, self.layers, self.micro_batches, self.experts = (array("i") for _ in range(4))
        self.bytes = array("q")

    def __len__(self) -> int:
        return len(self.lanes)


class Recording(NamedTuple):
    """One trace: its bars, and its header ``about`` (`NO_HEADER` if the trace has none)."""

    bars: TaskColumns
    about: TraceHeader


_Number = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
_Microseconds = Annotated[float, Meta(ge=0, le=1e15)]


class _Arguments(Struct):
    number: Annotated[int, Meta(ge=0, le=1 << 24)] = msgspec.field(name="pass")
    layer: _Number = -1
    micro_batch: _Number = -1
    expert: _Number = -1
    bytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)] = 0
    waited_for: str | UnsetType | None = UNSET
    waited_until: _Microseconds | UnsetType = UNSET


class _TaskEvent(Struct, tag_field="ph", tag="X"):
    name: str
    cat: str
    ts: _Microseconds
    dur: _Microseconds
    args: _Arguments


class _MetadataEvent(Struct, tag_field="ph", tag="M"):
    pass


class _Tail(Struct):
    about: TraceHeader | None = msgspec.field(name="otherData", default=None)


_EVENT = msgspec.json.Decoder(_TaskEvent | _MetadataEvent)


def read_trace(path: Path) -> Recording:
    """Return the recording in the trace file ``path``; raises InputError, which names the fault, if it is invalid."""
    try:
        with open(open_regular(path), "rb") as file:
            return _read(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({read_error_text(error)})", code="trace_file") from None
    except _TraceError as fault:
        raise InputError(f"{path}: {fault}", code="trace_file") from None


class _TraceError(Exception):
    """An error in the content of a trace; the message omits the file name."""


def _read(file: BinaryIO) -> Recording:
    bars, head, number = TaskColumns(), file.readline(len(_HEAD)), 0
    if head != _HEAD:
        raise _TraceError(_CUT_OFF if _HEAD.startswith(head) else _FOREIGN)
    while not (line := file.readline(_LONGEST_LINE)).startswith(b"]"):
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            raise _TraceError(_CUT_OFF)
        try:
            event = _EVENT.decode(line.rstrip(b",\n"))
            if isinstance(event, _TaskEvent):
                _add(bars, event)
        except (ValueError, RecursionError, _TraceError) as error:
            raise _TraceError(f"event {number}: {str(error)[:200]}") from None
        number += 1
    try:
        about = msgspec.json.decode(_HEAD + line + file.read(_LONGEST_TAIL), type=_Tail).about or NO_HEADER
        for lane in (*about.predicted, *about.roofs):
            _position(lane, _LANE_NUMBERS, "a lane")
    except (msgspec.ValidationError, _TraceError) as error:
        raise _TraceError(f"otherData: {str(error)[:200]}") from None
    except (ValueError, RecursionError) as error:
        raise _TraceError(_CUT_OFF if "truncated" in str(error) else _FOREIGN) from None
    if not len(bars):
        raise _TraceError("holds no tasks: nothing ran while it was taken")
    return Recording(bars, about)


def _add(bars: TaskColumns, event: _TaskEvent) -> None:
    if len(bars) >= _MOST_TASKS:
        raise _TraceError(f"holds more than {_MOST_TASKS:,} tasks; trace a shorter run")
    args = event.args
    bars.lanes.append(_position(event.cat, _LANE_NUMBERS, "cat"))
    bars.kinds.append(_position(event.name, _KIND_NUMBERS, "name"))
    bars.start_us.append(event.ts)
    bars.length_us.append(event.dur)
    bars.passes.append(args.number)
    bars.layers.append(args.layer)
    bars.micro_batches.append(args.micro_batch)
    bars.experts.append(args.expert)
    bars.bytes.append(args.bytes)
    until_us = 0.0
    if isinstance(args.waited_for, str):
        bars.waited_for.append(_position(args.waited_for, _KIND_NUMBERS, "waited_for"))
        if isinstance(args.waited_until, UnsetType):
            raise _TraceError("waited_for without waited_until")
        until_us = args.waited_until
    else:
        bars.waited_for.append(FOR_NOTHING if args.waited_for is None else NOT_RECORDED)
    bars.until_us.append(until_us)


def _position(word: str, positions: dict[str, int], label: str) -> int:
    if word not in positions:
        raise _TraceError(f"{label} is {word[:40]!r}, not one that moelight knows{did_you_mean(word[:40], positions)}")
    return positions[word]
