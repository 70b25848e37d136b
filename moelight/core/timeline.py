"""What happened, or would happen, and when. Simulated and measured passes share it."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.schedule import Lane, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One task's time in work, waiting excluded. Seconds on one monotonic clock."""

    task: Task
    start_s: float
    end_s: float


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
