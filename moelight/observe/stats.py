"""The figures of one run: seconds, tokens, bytes, and each lane's share of them.

Knows timelines and counts. Refuses to measure anything: whoever runs the passes hands the numbers in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moelight.core.adaptation import Adaptation
from moelight.core.schedule import Lane
from moelight.core.timeline import Timeline
from moelight.observe.bubbles import Bubbles

_RECENT_PASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStats:
    """One lane over a whole run: seconds in work, bytes that crossed it, tasks it carried out; ``bubbles_s``: seconds
    of rest by cause, longest first, up to the last pass but one while the run goes on."""

    busy_s: float = 0.0
    bytes: int = 0
    tasks: int = 0
    bubbles_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> float:
        """Bytes over seconds in work; 0 where nothing was moved."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The busiest lane, and the share of the time that it was at work."""

    lane: Lane
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStats:
    """One run.

    Attributes:
        wall_s: from the start of the first pass to the last token.
        load_s: from the start of loading to the first pass.
        python_s: the part of ``wall_s`` in which no lane worked: launching, bookkeeping, packing that nothing hides.
        device_peak_bytes: the most that the device's allocator took since loading began; 0 without a GPU.
        lanes: the lanes that exist on the machine.
        counts: events worth counting, by name: ``prefix_cache_queries`` are the tokens of all prompts that were begun,
            ``prefix_cache_hits`` those of them that an earlier one had computed.
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
    counts: Mapping[str, int] = field(default_factory=dict)
    device_peak_bytes: int = 0
    adaptations: tuple[Adaptation, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of ``wall_s``; 0 where nothing ran."""
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def binding(self) -> Binding | None:
        """The lane that was busiest, and its share of ``wall_s``; None where nothing ran."""
        lane = max(self.lanes, key=lambda each: self.lanes[each].busy_s, default=None)
        return None if lane is None or not self.lanes[lane].busy_s else Binding(lane=lane, share=self._share(lane))

    def _share(self, lane: Lane) -> float:
        return min(1.0, self.lanes[lane].busy_s / self.wall_s) if self.wall_s > 0 else 0.0

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
            "device_peak_bytes": self.device_peak_bytes,
            "lanes": {
                str(lane): {
                    "busy_s": stats.busy_s,
                    "busy_share": self._share(lane),
                    "bytes": stats.bytes,
                    "bytes_per_s": stats.bytes_per_s,
                    "tasks": stats.tasks,
                }
                for lane, stats in self.lanes.items()
            },
            "binding": self._binding_as_dict(),
            "counts": dict(self.counts),
            "adaptations": [each.as_dict() for each in self.adaptations],
        }

    def _binding_as_dict(self) -> dict[str, Any] | None:
        binding = self.binding
        if binding is None:
            return None
        bubbles_s = dict(self.lanes[binding.lane].bubbles_s)
        return {"lane": str(binding.lane), "idle_share": 1.0 - binding.share, "bubbles_s": bubbles_s}


class LaneTotals:
    """Adds up timelines pass by pass, so that only those of the last passes need be kept."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._busy_s = dict.fromkeys(lanes, 0.0)
        self._bytes = dict.fromkeys(self._busy_s, 0)
        self._tasks = dict.fromkeys(self._busy_s, 0)
        self._bubbles = Bubbles()
        self._recent: deque[tuple[float, dict[Lane, float]]] = deque(maxlen=_RECENT_PASSES)
        self._ended_s: float | None = None

    def begin(self, at_s: float) -> None:
        """A run begins; what comes before its first task is the host's."""
        self._bubbles.begin(at_s)
        self._recent.clear()
        self._ended_s = at_s

    def end(self, at_s: float) -> None:
        """No pass of this run follows."""
        self._bubbles.end(at_s)

    def add(self, timeline: Timeline) -> None:
        """Count the spans of one pass; a lane not named at construction joins at its first span."""
        mine = timeline.busy_s()
        for lane, seconds in mine.items():
            self._busy_s[lane] = self._busy_s.get(lane, 0.0) + seconds
        crossed, tasks = self._bytes, self._tasks
        for span in timeline.spans:
            task = span.task
            crossed[task.lane] = crossed.get(task.lane, 0) + span.bytes
            tasks[task.lane] = tasks.get(task.lane, 0) + 1
        if mine:
            before_s, self._ended_s = self._ended_s, timeline.end_s
            self._recent.append((timeline.end_s - (timeline.start_s if before_s is None else before_s), mine))
        self._bubbles.add(timeline)

    @property
    def binding(self) -> Binding | None:
        """The busiest lane of the last few passes, and its share of them; None before the first."""
        busy_s: dict[Lane, float] = {}
        for _, mine in self._recent:
            for lane, seconds in mine.items():
                busy_s[lane] = busy_s.get(lane, 0.0) + seconds
        if not busy_s:
            return None
        lane, seconds = max(busy_s.items(), key=lambda each: each[1])
        length_s = sum(length_s for length_s, _ in self._recent)
        return Binding(lane=lane, share=min(1.0, seconds / length_s) if length_s > 0 else 0.0)

    @property
    def busy_s(self) -> Mapping[Lane, float]:
        """Seconds in work so far, by lane."""
        return self._busy_s

    def stats(self) -> dict[Lane, LaneStats]:
        """The totals so far, in the order of the enumeration."""
        return {
            lane: LaneStats(
                busy_s=self._busy_s[lane],
                bytes=self._bytes[lane],
                tasks=self._tasks[lane],
                bubbles_s={cause: bubble.seconds for cause, bubble in self._bubbles.of(lane).items()},
            )
            for lane in Lane
            if lane in self._busy_s
        }
