"""What happened, or would happen, and when. Simulated and measured passes share it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moelight.core.schedule import Lane, Task

FREE = -math.inf  # when the last dependency of a task that has none ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One task's time in work, waiting excluded. Seconds on one monotonic clock.

    ``waited_for`` is the dependency that ended last, at ``waited_until_s``. A task without any waited for None until
    `FREE`; where nobody noted it, ``waited_until_s`` is None. ``found_bytes`` is what it moved where only its running
    could tell.
    """

    task: Task
    start_s: float
    end_s: float
    waited_for: Task | None = None
    waited_until_s: float | None = None
    found_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """What crossed the lane."""
        return self.task.bytes if self.found_bytes is None else self.found_bytes


def last_to_end(deps: Iterable[tuple[Task, float]]) -> tuple[Task | None, float]:
    """Of dependencies and their ends the last: ``waited_for`` and ``waited_until_s`` of the task that has them."""
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
        """When the first task began."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last task ended."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self) -> dict[Lane, float]:
        """Seconds each lane spent in work."""
        totals: dict[Lane, float] = {}
        for span in self.spans:
            totals[span.task.lane] = totals.get(span.task.lane, 0.0) + span.end_s - span.start_s
        return totals
