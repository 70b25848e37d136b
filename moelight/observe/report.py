"""What a trace comes to: each lane's seconds and bytes in a typical pass, beside what was predicted.

A typical pass is the median over passes, lane by lane: passes that bring prompts, or drain at the end, are few and
pull it little. Refuses to know how a report looks (``report_page``, the command line).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from moelight.core.schedule import Lane
from moelight.observe.trace import About
from moelight.observe.trace_reading import Recording


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
    """One lane: the typical pass (``busy_s``, ``bytes``), the whole run (``total_s``, ``total_bytes``, ``tasks``).

    What is None was not predicted, or is not known: ``roof_bytes_per_s`` is what the lane could move at most.
    """

    lane: str
    busy_s: float
    bytes: float
    share_of_pass: float
    total_s: float
    total_bytes: int
    tasks: int
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    roof_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes over seconds in work, over the whole run; None where nothing was moved."""
        return self.total_bytes / self.total_s if self.total_bytes and self.total_s > 0 else None

    @property
    def share_of_roof(self) -> float | None:
        """How much of its roof the lane reached while it worked."""
        rate, roof = self.bytes_per_s, self.roof_bytes_per_s
        return None if rate is None or not roof else rate / roof

    @property
    def error(self) -> float | None:
        """Measured over predicted seconds, less one."""
        return self.busy_s / self.predicted_s - 1 if self.predicted_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A trace in figures. ``pass_s`` is the median pass, ``predicted_pass_s`` None where nothing was predicted."""

    about: About | None
    lanes: tuple[LaneReport, ...]
    passes: tuple[PassFigures, ...]
    pass_s: float
    wall_s: float
    predicted_pass_s: float | None

    @property
    def source(self) -> str:
        """``measured`` or ``simulated``."""
        return "simulated" if self.about is not None and self.about.source == "simulated" else "measured"

    @property
    def busiest(self) -> LaneReport:
        """The lane with the least rest in the typical pass."""
        return max(self.lanes, key=lambda lane: lane.busy_s)

    @property
    def error(self) -> float | None:
        """The median pass over the predicted one, less one."""
        return self.pass_s / self.predicted_pass_s - 1 if self.predicted_pass_s else None


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
    return Report(
        about=about,
        lanes=tuple(_lane(n, passes, tasks[n], about, pass_s) for n in shown),
        passes=passes,
        pass_s=pass_s,
        wall_s=max(figures.end_us for figures in passes) / 1e6,
        predicted_pass_s=about.pass_s if about is not None and about.pass_s > 0 else None,
    )


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


def _lane(n: int, passes: Sequence[PassFigures], tasks: int, about: About | None, pass_s: float) -> LaneReport:
    name = str(tuple(Lane)[n])
    busy_s = median(figures.busy_us[n] for figures in passes) / 1e6
    forecast = about.predicted.get(name) if about is not None else None
    return LaneReport(
        lane=name,
        busy_s=busy_s,
        bytes=median(figures.bytes[n] for figures in passes),
        share_of_pass=busy_s / pass_s if pass_s > 0 else 0.0,
        total_s=sum(figures.busy_us[n] for figures in passes) / 1e6,
        total_bytes=sum(figures.bytes[n] for figures in passes),
        tasks=tasks,
        predicted_s=forecast.busy_s if forecast is not None else None,
        predicted_bytes=forecast.bytes if forecast is not None else None,
        roof_bytes_per_s=about.roofs.get(name) if about is not None else None,
    )
