"""Traces by hand, small enough to count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moelight.core.schedule import Lane, Page, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline
from moelight.observe.trace import LaneForecast, TraceHeader, write_trace

ABOUT = TraceHeader(
    version="1.2.3",
    source="measured",
    policy={"model": "demo", "batch_size": 8, "micro_batch_size": 4, "weights": {"host": 0.5, "disk": 0.5}},
    hardware="t4",
    predicted={"h2d": LaneForecast(busy_s=0.5, bytes=1000), "cpu": LaneForecast(busy_s=0.2)},
    pass_s=1.25,
    roofs={"h2d": 4000.0},
    notes={"why": "the link binds"},
)


def one_pass(start_s: float, *, send_s: float = 0.5, size: int = 1000, tasks: int = 1) -> Timeline:
    """A transfer (in ``tasks`` pieces, one by one), attention beside it, experts after both: ``send_s`` + 0.5."""
    item = send_s / tasks
    sends = tuple(
        Span(
            task=Task(kind=TaskKind.SEND_PAGE, lane=Lane.H2D, page=Page(layer=1, expert=piece), bytes=size // tasks),
            start_s=start_s + piece * item,
            end_s=start_s + (piece + 1) * item,
        )
        for piece in range(tasks)
    )
    attention = Task(kind=TaskKind.CPU_ATTENTION, lane=Lane.CPU, layer=1, micro_batch=0)
    experts = Task(kind=TaskKind.POST_ATTENTION, lane=Lane.DEVICE, layer=1, micro_batch=0)
    end_s = start_s + send_s
    return Timeline(
        spans=(
            *sends,
            Span(task=attention, start_s=start_s, end_s=start_s + 0.25, waited_until_s=FREE),
            Span(task=experts, start_s=end_s, end_s=end_s + 0.5, waited_for=sends[-1].task, waited_until_s=end_s),
        )
    )


def write_passes(path: Path, passes: int, *, about: TraceHeader | None = ABOUT, tasks: int = 1) -> Path:
    """A trace of ``passes`` passes of one second each."""
    return write_timelines(path, [one_pass(10.0 + number, tasks=tasks) for number in range(passes)], about)


def write_timelines(path: Path, timelines: Iterable[Timeline], about: TraceHeader | None = None) -> Path:
    """A trace of ``timelines``."""
    with path.open("wb") as file:
        write_trace(file.write, timelines, about)
    return path
