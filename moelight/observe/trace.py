"""A run as a Chrome trace: one row per lane, one bar per task. Perfetto and chrome://tracing open it.

Knows the trace format and timelines. Refuses to know which clock the seconds come from: only differences count.
``trace_reading`` reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelight.core.schedule import Lane
from moelight.core.timeline import Span, Timeline

_PROCESS = 1
_ROWS = {lane: row for row, lane in enumerate(Lane, start=1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneForecast:
    """What one steady decode pass was predicted to ask of a lane: seconds in work, and bytes that cross it."""

    busy_s: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a trace says of its run beside the bars: enough to hold the prediction against it.

    Attributes:
        version: moelight's.
        source: ``measured`` or ``simulated``.
        policy: its keys and values, plain.
        hardware: the machine that the prediction is for.
        predicted: by lane, for one steady decode pass; empty where nothing was predicted.
        pass_s: seconds of that pass; 0 where nothing was predicted.
        roofs: bytes per second that each lane could move at most.
        notes: further facts by name, shown as they are.
    """

    version: str
    source: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = ""
    predicted: Mapping[str, LaneForecast] = field(default_factory=dict)
    pass_s: float = 0.0
    roofs: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The trace's ``otherData``."""
        return {
            "moelight": self.version,
            "source": self.source,
            "hardware": self.hardware,
            "policy": dict(self.policy),
            "predicted": {str(lane): {"busy_s": f.busy_s, "bytes": f.bytes} for lane, f in self.predicted.items()},
            "pass_s": self.pass_s,
            "roofs": {str(lane): rate for lane, rate in self.roofs.items()},
            "notes": dict(self.notes),
        }


def write_trace(path: Path, timelines: Sequence[Timeline], about: About | None = None) -> None:
    """Write every span of ``timelines`` (one per pass, on one clock) to ``path``; time 0 is the first span's start.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for piece in trace_text(timelines, about):
            file.write(piece)


def trace_text(timelines: Sequence[Timeline], about: About | None = None) -> Iterator[str]:
    """The text of the trace in pieces, one event each, so that a long run need not be held twice."""
    yield '{"displayTimeUnit": "ms", '
    if about is not None:
        yield f'"otherData": {json.dumps(about.as_dict())},\n'
    yield '"traceEvents": [\n'
    for number, event in enumerate(_events(timelines)):
        yield (",\n" if number else "") + json.dumps(event)
    yield "\n]}\n"


def _events(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": "moelight"})
    used = {span.task.lane for timeline in timelines for span in timeline.spans}
    for lane in Lane:
        if lane in used:
            yield _metadata("thread_name", _ROWS[lane], {"name": str(lane)})
            yield _metadata("thread_sort_index", _ROWS[lane], {"sort_index": _ROWS[lane]})
    origin_s = min((timeline.start_s for timeline in timelines if timeline.spans), default=0.0)
    for number, timeline in enumerate(timelines):
        for span in timeline.spans:
            yield _bar(span, origin_s=origin_s, pass_number=number)


def _metadata(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": row, "args": args}


def _bar(span: Span, *, origin_s: float, pass_number: int) -> dict[str, Any]:
    task = span.task
    args = {"pass": pass_number, "layer": task.layer, "micro_batch": task.micro_batch, "bytes": task.bytes}
    if task.page is not None:
        args |= {"layer": task.page.layer, "expert": task.page.expert}
        args |= {"part": task.page.part} if task.page.part else {}
    return {
        "ph": "X",
        "name": str(task.kind),
        "cat": str(task.lane),
        "pid": _PROCESS,
        "tid": _ROWS[task.lane],
        "ts": round((span.start_s - origin_s) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
        "args": args,
    }
