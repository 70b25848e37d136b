"""What a trace comes to: each lane's seconds and bytes in a typical pass, beside what was predicted; what it reached
of its roof; and what the busiest one waited for while it stood still.

A typical pass is the median over passes, lane by lane: passes that bring prompts, or drain at the end, are few and
pull it little. Refuses to know how a report looks (``report_page``, the command line).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline
from moelight.observe.bubbles import Bubble, Bubbles
from moelight.observe.trace import About
from moelight.observe.trace_reading import FOR_NOTHING, NOT_RECORDED, Recording


@dataclass(frozen=True, kw_only=True, slots=True)
class PassFigures:
    """One pass. Microseconds from the first task of the trace; ``length_us`` runs from the end of the pass before.

    ``busy_us`` and ``bytes`` are by position in `Lane`.
    """

    number: int
    start_us: float
    end_us: float
    length_us: float
    tasks: int
    busy_us: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """One lane: the typical pass (``busy_s``, ``bytes``), the whole run (``total_s`` in work, ``idle_s`` not,
    ``total_bytes``, ``tasks``).

    What is None was not predicted, or is not known: ``roof_bytes_per_s`` is what the lane could move at most.
    """

    lane: str
    busy_s: float
    bytes: float
    total_s: float
    idle_s: float
    total_bytes: int
    tasks: int
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    roof_bytes_per_s: float | None = None

    @property
    def busy_share(self) -> float:
        """The part of the run that the lane was at work."""
        run_s = self.total_s + self.idle_s
        return self.total_s / run_s if run_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes over seconds in work, over the whole run; None where nothing was moved."""
        return self.total_bytes / self.total_s if self.total_bytes and self.total_s > 0 else None

    @property
    def share_of_roof(self) -> float | None:
        """How much of its roof the lane reached while it worked.

        Of a lane that moves nothing, how much of the predicted speed: the ledger's arithmetic at the machine's pace.
        """
        rate, roof = self.bytes_per_s, self.roof_bytes_per_s
        if rate is None:
            return self.predicted_s / self.busy_s if self.predicted_s and self.busy_s > 0 else None
        return rate / roof if roof else None

    @property
    def error(self) -> float | None:
        """Measured over predicted seconds, less one."""
        return self.busy_s / self.predicted_s - 1 if self.predicted_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A trace in figures. ``pass_s`` is the median pass, ``predicted_pass_s`` None where nothing was predicted;
    ``bubbles`` by cause, longest first, what the binding lane lost, on the clock of the trace."""

    about: About | None
    lanes: tuple[LaneReport, ...]
    passes: tuple[PassFigures, ...]
    pass_s: float
    wall_s: float
    predicted_pass_s: float | None
    bubbles: Mapping[str, Bubble]

    @property
    def source(self) -> str:
        """``measured`` or ``simulated``."""
        return "simulated" if self.about is not None and self.about.source == "simulated" else "measured"

    @property
    def binding(self) -> LaneReport:
        """The busiest lane of the run."""
        return _busiest(self.lanes)

    @property
    def error(self) -> float | None:
        """The median pass over the predicted one, less one."""
        return self.pass_s / self.predicted_pass_s - 1 if self.predicted_pass_s else None

    def as_dict(self) -> dict[str, Any]:
        """The object that ``report --json`` writes."""
        return {
            "source": self.source,
            "passes": len(self.passes),
            "run_s": self.wall_s,
            "pass_s": self.pass_s,
            "predicted_pass_s": self.predicted_pass_s,
            "lanes": {
                lane.lane: {
                    "predicted_s": lane.predicted_s,
                    "pass_s": lane.busy_s,
                    "predicted_bytes": lane.predicted_bytes,
                    "pass_bytes": lane.bytes,
                    "busy_s": lane.total_s,
                    "idle_s": lane.idle_s,
                    "busy_share": lane.busy_share,
                    "bytes": lane.total_bytes,
                    "bytes_per_s": lane.bytes_per_s,
                    "roof_bytes_per_s": lane.roof_bytes_per_s,
                    "share_of_roof": lane.share_of_roof,
                    "tasks": lane.tasks,
                }
                for lane in self.lanes
            },
            "binding": self.binding.lane,
            "bubbles": {
                cause: {
                    "seconds": bubble.seconds,
                    "share": bubble.seconds / self.wall_s,
                    "count": bubble.count,
                    "longest_s": bubble.longest_s,
                    "longest_at_s": bubble.longest_at_s,
                    "pass": bubble.pass_number,
                    "layer": bubble.layer,
                }
                for cause, bubble in self.bubbles.items()
            },
        }


def report_of(recording: Recording) -> Report:
    """Add up ``recording``, which has one task at least."""
    passes = _passes(recording)
    about = recording.about
    pass_s = median(figures.length_us for figures in passes) / 1e6
    used = [lane for lane in range(len(Lane)) if any(figures.busy_us[lane] > 0 for figures in passes)]
    tasks = [0] * len(Lane)
    for lane in recording.bars.lanes:
        tasks[lane] += 1
    named = {lane for lane, f in about.predicted.items() if f.busy_s > 0} if about is not None else set()
    shown = [n for n, lane in enumerate(Lane) if n in used or tasks[n] or str(lane) in named]
    wall_s = max(figures.end_us for figures in passes) / 1e6
    lanes = tuple(_lane(n, passes, tasks[n], about, wall_s) for n in shown)
    bubbles = Bubbles()
    for timeline in _timelines(recording):
        bubbles.add(timeline)
    bubbles.end()
    lost = bubbles.of(Lane(_busiest(lanes).lane))
    return Report(
        about=about,
        lanes=lanes,
        passes=passes,
        pass_s=pass_s,
        wall_s=wall_s,
        predicted_pass_s=about.pass_s if about is not None and about.pass_s > 0 else None,
        bubbles={cause: _numbered(bubble, passes) for cause, bubble in lost.items()},
    )


def _numbered(bubble: Bubble, passes: Sequence[PassFigures]) -> Bubble:
    """With the trace's own number of the pass."""
    at = bubble.pass_number
    return bubble if at < 0 else replace(bubble, pass_number=passes[at].number)


def _busiest(lanes: Sequence[LaneReport]) -> LaneReport:
    return max(lanes, key=lambda lane: lane.total_s)


def _passes(recording: Recording) -> tuple[PassFigures, ...]:
    bars, width = recording.bars, len(Lane)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    counts: dict[int, int] = {}
    busy: dict[int, list[float]] = {}
    moved: dict[int, list[int]] = {}
    for number, lane, start, length, size in zip(
        bars.passes, bars.lanes, bars.start_us, bars.length_us, bars.bytes, strict=True
    ):
        if number not in counts:
            starts[number], ends[number], counts[number] = start, start + length, 0
            busy[number], moved[number] = [0.0] * width, [0] * width
        starts[number] = min(starts[number], start)
        ends[number] = max(ends[number], start + length)
        counts[number] += 1
        busy[number][lane] += length
        moved[number][lane] += size
    found: list[PassFigures] = []
    for number in sorted(counts):
        before = found[-1].end_us if found else starts[number]
        found.append(
            PassFigures(
                number=number,
                start_us=starts[number],
                end_us=ends[number],
                length_us=max(0.0, ends[number] - before),
                tasks=counts[number],
                busy_us=tuple(busy[number]),
                bytes=tuple(moved[number]),
            )
        )
    return tuple(found)


def _timelines(recording: Recording) -> Iterator[Timeline]:
    """The passes of a trace as they were, as far as bubbles go."""
    bars, lanes, kinds = recording.bars, tuple(Lane), tuple(TaskKind)

    @cache
    def task(kind: int, lane: int, layer: int) -> Task:
        return Task(kind=kinds[kind], lane=lanes[lane], layer=layer)

    def span(i: int) -> Span:
        lane, layer, waited = bars.lanes[i], bars.layers[i], bars.waited_for[i]
        until_s = None if waited == NOT_RECORDED else FREE if waited == FOR_NOTHING else bars.until_us[i] / 1e6
        return Span(
            task=task(bars.kinds[i], lane, layer),
            start_s=bars.start_us[i] / 1e6,
            end_s=(bars.start_us[i] + bars.length_us[i]) / 1e6,
            waited_for=task(waited, lane, layer) if waited >= 0 else None,
            waited_until_s=until_s,
        )

    order = sorted(range(len(bars)), key=bars.passes.__getitem__)
    for _, mine in groupby(order, key=bars.passes.__getitem__):
        yield Timeline(spans=tuple(map(span, mine)))


def _lane(n: int, passes: Sequence[PassFigures], tasks: int, about: About | None, wall_s: float) -> LaneReport:
    name = str(tuple(Lane)[n])
    busy_s = median(figures.busy_us[n] for figures in passes) / 1e6
    total_s = sum(figures.busy_us[n] for figures in passes) / 1e6
    forecast = about.predicted.get(name) if about is not None else None
    return LaneReport(
        lane=name,
        busy_s=busy_s,
        bytes=median(figures.bytes[n] for figures in passes),
        total_s=total_s,
        idle_s=max(0.0, wall_s - total_s),
        total_bytes=sum(figures.bytes[n] for figures in passes),
        tasks=tasks,
        predicted_s=forecast.busy_s if forecast is not None else None,
        predicted_bytes=forecast.bytes if forecast is not None else None,
        roof_bytes_per_s=about.roofs.get(name) if about is not None else None,
    )
