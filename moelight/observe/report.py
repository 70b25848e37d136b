"""Figures of a trace: lanes in the median pass beside the prediction and their roofs, and the busiest lane's idle time.

The median is taken lane by lane; the few passes with prompts, and those at the end, change it little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline
from moelight.observe.bubbles import Bubble, Bubbles
from moelight.observe.trace import FOR_NOTHING, NOT_RECORDED, Recording, TraceHeader


@dataclass(kw_only=True, slots=True)
class PassFigures:
    """Figures of one pass, in microseconds from the first task of the trace.

    ``length_us`` counts from the end of the pass before. ``busy_us`` and ``bytes`` are indexed by position in `Lane`.
    """

    number: int
    start_us: float
    end_us: float
    length_us: float = 0.0
    tasks: int = 0
    busy_us: list[float] = field(default_factory=lambda: [0.0] * len(Lane))
    bytes: list[int] = field(default_factory=lambda: [0] * len(Lane))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """Figures of one lane: ``busy_s`` and ``bytes`` are medians over passes; other measurements cover the whole run.

    ``roof_bytes_per_s`` is the maximal bandwidth of the lane. Predictions and roof are None if unknown.
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
        """Share of the run that the lane was at work, 0 to 1."""
        run_s = self.total_s + self.idle_s
        return self.total_s / run_s if run_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes over seconds at work, over the whole run; None if the lane moved nothing."""
        return self.total_bytes / self.total_s if self.total_bytes and self.total_s > 0 else None

    @property
    def share_of_roof(self) -> float | None:
        """Share of its roof that the lane reached at work; of its predicted speed, if the lane moves nothing."""
        rate, roof = self.bytes_per_s, self.roof_bytes_per_s
        if rate is None:
            return self.predicted_s / self.busy_s if self.predicted_s and self.busy_s > 0 else None
        return rate / roof if roof else None

    @property
    def error(self) -> float | None:
        """Measured over predicted seconds, less one; None without a prediction."""
        return self.busy_s / self.predicted_s - 1 if self.predicted_s else None

    @property
    def far_off(self) -> bool:
        """True if the prediction is off by more than a quarter; reports mark such lanes."""
        return self.error is not None and abs(self.error) > 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Figures of a trace; ``pass_s`` is the length of the median pass.

    ``bubbles`` is the idle time of the binding lane by cause, longest first, on the clock of the trace.
    """

    about: TraceHeader
    lanes: tuple[LaneReport, ...]
    passes: tuple[PassFigures, ...]
    pass_s: float
    wall_s: float
    predicted_pass_s: float | None
    bubbles: Mapping[str, Bubble]

    @property
    def source(self) -> str:
        return "simulated" if self.about.source == "simulated" else "measured"

    @property
    def binding(self) -> LaneReport:
        """The busiest lane of the run."""
        return _busiest(self.lanes)

    @property
    def error(self) -> float | None:
        """Median over predicted pass length, less one; None without a prediction."""
        return self.pass_s / self.predicted_pass_s - 1 if self.predicted_pass_s else None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``report --json`` prints."""
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
    """Return the report of ``recording``, which must hold at least one task."""
    passes, about = _passes(recording), recording.about
    tasks = Counter(recording.bars.lanes)
    named = {lane for lane, forecast in about.predicted.items() if forecast.busy_s > 0}
    wall_s = max(figures.end_us for figures in passes) / 1e6
    shown = [n for n, lane in enumerate(Lane) if tasks[n] or str(lane) in named]
    lanes = tuple(_lane(n, passes, tasks[n], about, wall_s) for n in shown)
    bubbles = Bubbles()
    for timeline in _timelines(recording):
        bubbles.add(timeline)
    bubbles.end()
    lost = bubbles.of(Lane(_busiest(lanes).lane))
    for bubble in lost.values():
        if bubble.pass_number >= 0:  # the position of the pass; its number in the trace may be another
            bubble.pass_number = passes[bubble.pass_number].number
    return Report(
        about=about,
        lanes=lanes,
        passes=passes,
        pass_s=median(figures.length_us for figures in passes) / 1e6,
        wall_s=wall_s,
        predicted_pass_s=about.pass_s or None,
        bubbles=lost,
    )


def _busiest(lanes: Sequence[LaneReport]) -> LaneReport:
    return max(lanes, key=lambda lane: lane.total_s)


def _passes(recording: Recording) -> tuple[PassFigures, ...]:
    bars = recording.bars
    by_number: dict[int, PassFigures] = {}
    columns = zip(bars.passes, bars.lanes, bars.start_us, bars.length_us, bars.bytes, strict=True)
    for number, lane, start_us, length_us, size in columns:
        figures = by_number.get(number)
        if figures is None:
            figures = by_number[number] = PassFigures(number=number, start_us=start_us, end_us=start_us)
        figures.start_us = min(figures.start_us, start_us)
        figures.end_us = max(figures.end_us, start_us + length_us)
        figures.tasks += 1
        figures.busy_us[lane] += length_us
        figures.bytes[lane] += size
    passes = tuple(by_number[number] for number in sorted(by_number))
    before_us = passes[0].start_us
    for figures in passes:
        figures.length_us, before_us = max(0.0, figures.end_us - before_us), figures.end_us
    return passes


def _timelines(recording: Recording) -> Iterator[Timeline]:
    """Yield the passes of a trace as timelines with the fields that `Bubbles` reads."""
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
    for _, pass_bars in groupby(order, key=bars.passes.__getitem__):
        yield Timeline(spans=tuple(map(span, pass_bars)))


def _lane(n: int, passes: Sequence[PassFigures], tasks: int, about: TraceHeader, wall_s: float) -> LaneReport:
    name = str(tuple(Lane)[n])
    total_s = sum(figures.busy_us[n] for figures in passes) / 1e6
    forecast = about.predicted.get(name)
    return LaneReport(
        lane=name,
        busy_s=median(figures.busy_us[n] for figures in passes) / 1e6,
        bytes=median(figures.bytes[n] for figures in passes),
        total_s=total_s,
        idle_s=max(0.0, wall_s - total_s),
        total_bytes=sum(figures.bytes[n] for figures in passes),
        tasks=tasks,
        predicted_s=None if forecast is None else forecast.busy_s,
        predicted_bytes=None if forecast is None else forecast.bytes,
        roof_bytes_per_s=about.roofs.get(name),
    )
