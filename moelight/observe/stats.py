"""The figures of one run: seconds, tokens, bytes, and each lane's share of them.

Knows timelines and counts. Refuses to measure anything: whoever runs the passes hands the numbers in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moelight.core.adaptation import Adaptation
from moelight.core.schedule import Lane
from moelight.core.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStats:
    """One lane over a whole run: seconds in work, bytes that crossed it, tasks it carried out."""

    busy_s: float = 0.0
    bytes: int = 0
    tasks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """One run.

    Attributes:
        wall_s: from the start of the first pass to the last token.
        load_s: from the start of loading to the first pass.
        python_s: the interpreter's own share of ``wall_s`` (building and walking schedules, bookkeeping).
        lanes: the lanes that exist on the machine.
        adaptations: changes of policy between passes, a handful at most.
    """

    wall_s: float
    load_s: float
    prompt_tokens: int
    completion_tokens: int
    passes: int
    peak_rss_bytes: int
    lanes: Mapping[Lane, LaneStats]
    python_s: float = 0.0
    adaptations: tuple[Adaptation, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of ``wall_s``; 0 where nothing ran."""
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--stats`` writes."""
        return {
            "wall_s": self.wall_s,
            "load_s": self.load_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_s": self.tokens_per_s,
            "passes": self.passes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "lanes": {
                str(lane): {"busy_s": stats.busy_s, "bytes": stats.bytes, "tasks": stats.tasks}
                for lane, stats in self.lanes.items()
            },
            "adaptations": [each.as_dict() for each in self.adaptations],
        }


class LaneTotals:
    """Adds up timelines pass by pass, so that no timeline need be kept."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._busy_s = dict.fromkeys(lanes, 0.0)
        self._bytes = dict.fromkeys(self._busy_s, 0)
        self._tasks = dict.fromkeys(self._busy_s, 0)

    def add(self, timeline: Timeline) -> None:
        """Count the spans of one pass; a lane not named at construction joins at its first span."""
        busy_s, crossed, tasks = self._busy_s, self._bytes, self._tasks
        for span in timeline.spans:
            lane = span.task.lane
            busy_s[lane] = busy_s.get(lane, 0.0) + span.end_s - span.start_s
            crossed[lane] = crossed.get(lane, 0) + span.task.bytes
            tasks[lane] = tasks.get(lane, 0) + 1

    @property
    def busy_s(self) -> Mapping[Lane, float]:
        """Seconds in work so far, by lane."""
        return self._busy_s

    def stats(self) -> dict[Lane, LaneStats]:
        """The totals so far, in the order of the enumeration."""
        return {
            lane: LaneStats(busy_s=self._busy_s[lane], bytes=self._bytes[lane], tasks=self._tasks[lane])
            for lane in Lane
            if lane in self._busy_s
        }
