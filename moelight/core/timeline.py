"""Timelines of passes, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moelight.core.schedule import Lane, Task

FREE = -math.inf  # end of the last dependency of a task without dependencies


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The execution of one task, waiting excluded, in seconds on one monotonic clock.

    ``waited_for`` is the dependency that ended last, at ``waited_until_s`` (`FREE` without dependencies, None if not
    recorded). ``found_bytes`` is the bytes transferred where they are known only at run time.
    """

    task: Task
    start_s: float
    end_s: float
    waited_for: Task | None = None
    waited_until_s: float | None = None
    found_bytes: int | None = None

    @property
    def bytes(self) -> int:
        return self.task.bytes if self.found_bytes is None else self.found_bytes


def last_to_end(deps: Iterable[tuple[Task, float]]) -> tuple[Task | None, float]:
    """The dependency that ends last and its end: ``waited_for`` and ``waited_until_s`` of the dependent task."""
    last, until_s = None, FREE
    for task, end_s in deps:
        if end_s > until_s:
            last, until_s = task, end_s
    return last, until_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The spans of one pass, in order of completion per lane."""

    spans: tuple[Span, ...]

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self) -> dict[Lane, float]:
        totals: dict[Lane, float] = {}
        for span in self.spans:
            totals[span.task.lane] = totals.get(span.task.lane, 0.0) + span.end_s - span.start_s
        return totals
