"""Figures of one run: seconds, tokens and bytes, in total and by lane. The caller provides all measurements."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moelight.core.policy import Adaptation
from moelight.core.schedule import Lane
from moelight.core.timeline import Timeline
from moelight.observe.bubbles import Bubbles

_RECENT_PASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStats:
    """One lane over a whole run: seconds at work, bytes transferred, tasks executed.

    ``bubbles_s`` is idle seconds by cause, longest first; during a run, up to the last pass but one.
    """

    busy_s: float = 0.0
    bytes: int = 0
    tasks: int = 0
    bubbles_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> float:
        """Bytes over seconds at work; 0 if nothing was transferred."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The busiest lane and the share of the time that it was at work, 0 to 1."""

    lane: Lane
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStats:
    """Figures of one run.

    Attributes:
        wall_s: from the start of the first pass to the last token.
        load_s: from the start of loading to the first pass.
        python_s: the part of ``wall_s`` in which no lane was at work.
        device_peak_bytes: peak memory of the device's allocator since loading began; 0 without a GPU.
        lanes: the lanes that exist on the machine.
        counts: events by name; ``prefix_cache_queries`` counts the tokens of all prompts begun, ``prefix_cache_hits``
            those found in the prefix cache; ``device_waits`` how often a lane of the host waited for work on a device;
            ``suspensions`` how often a sequence was suspended because the KV cache was full; with speculative decoding
            ``drafted_tokens`` that were verified, ``accepted_tokens`` of them, ``drafted_passes`` with drafts.
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
        """Generated tokens per second of ``wall_s``; 0 if nothing ran."""
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def binding(self) -> Binding | None:
        """The busiest lane and its share of ``wall_s``; None if nothing ran."""
        lane = max(self.lanes, key=lambda name: self.lanes[name].busy_s, default=None)
        return None if lane is None or not self.lanes[lane].busy_s else Binding(lane=lane, share=self._share(lane))

    def _share(self, lane: Lane) -> float:
        return min(1.0, self.lanes[lane].busy_s / self.wall_s) if self.wall_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--stats`` writes."""
        binding = self.binding
        totals = ("wall_s", "load_s", "prompt_tokens", "completion_tokens", "tokens_per_s", "passes")
        return {
            **{name: getattr(self, name) for name in (*totals, "peak_rss_bytes", "device_peak_bytes")},
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
            "binding": binding
            and {
                "lane": str(binding.lane),
                "idle_share": 1.0 - binding.share,
                "bubbles_s": dict(self.lanes[binding.lane].bubbles_s),
            },
            "counts": dict(self.counts),
            "adaptations": [adaptation.as_dict() for adaptation in self.adaptations],
        }


class LaneTotals:
    """Running totals by lane, accumulated pass by pass; timelines need not be kept."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._busy_s = defaultdict(float, dict.fromkeys(lanes, 0.0))
        self._bytes, self._tasks = defaultdict[Lane, int](int), defaultdict[Lane, int](int)
        self._bubbles = Bubbles()
        self._recent: deque[tuple[float, dict[Lane, float]]] = deque(maxlen=_RECENT_PASSES)
        self._ended_s: float | None = None

    def begin(self, at_s: float) -> None:
        """Start a run at ``at_s``; idle time before its first task counts as between passes."""
        self._bubbles.begin(at_s)
        self._recent.clear()
        self._ended_s = at_s

    def end(self, at_s: float) -> None:
        """End the run at ``at_s``; no pass of this run follows."""
        self._bubbles.end(at_s)

    def add(self, timeline: Timeline) -> None:
        """Add the spans of one pass; a lane not given at construction is added with its first span."""
        busy_s = timeline.busy_s()
        for lane, seconds in busy_s.items():
            self._busy_s[lane] += seconds
        crossed, tasks = self._bytes, self._tasks
        for span in timeline.spans:
            crossed[span.task.lane] += span.bytes
            tasks[span.task.lane] += 1
        if busy_s:
            before_s, self._ended_s = self._ended_s, timeline.end_s
            self._recent.append((timeline.end_s - (timeline.start_s if before_s is None else before_s), busy_s))
        self._bubbles.add(timeline)

    @property
    def binding(self) -> Binding | None:
        """The busiest lane of the last `_RECENT_PASSES` passes and its share of their time; None before any pass."""
        busy_s: defaultdict[Lane, float] = defaultdict(float)
        for _, pass_busy in self._recent:
            for lane, seconds in pass_busy.items():
                busy_s[lane] += seconds
        if not busy_s:
            return None
        lane, seconds = max(busy_s.items(), key=lambda item: item[1])
        length_s = sum(length_s for length_s, _ in self._recent)
        return Binding(lane=lane, share=min(1.0, seconds / length_s) if length_s > 0 else 0.0)

    @property
    def busy_s(self) -> Mapping[Lane, float]:
        """Seconds at work so far, by lane."""
        return self._busy_s

    def stats(self) -> dict[Lane, LaneStats]:
        """Return the totals so far, in the order of `Lane`."""
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
