"""What the lanes of a run did, out of its timelines: how long each was busy, and how fast its bytes came.

Knows timelines only as spans with a lane, a start, an end and bytes, and keeps no more of them than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moelight.core.timeline import Span

Work = tuple[float, float, int]  # start, end, bytes


@dataclass(kw_only=True)
class Watched:
    """The passes of one run, as they came.

    Attributes:
        tokens: new tokens of each pass.
        lanes: for each pass, the work of every lane.
        ends: when each pass ended, on the spans' clock; ``began`` is when the first one began.
    """

    began: float
    tokens: list[int] = field(default_factory=list)
    lanes: list[dict[str, list[Work]]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, spans: Iterable[Span], tokens: int, now: float) -> None:
        """One pass more, which ended ``now`` and gave so many tokens."""
        lanes: dict[str, list[Work]] = {}
        for span in spans:
            lanes.setdefault(str(span.task.lane), []).append((span.start_s, span.end_s, span.task.bytes))
        self.lanes.append(lanes)
        self.tokens.append(tokens)
        self.ends.append(now)

    def steady(self, sequences: int) -> range:
        """The longest run of passes in which ``sequences`` sequences decode and no prompt rides along: those that give
        a token to each of them right after a pass that did so too."""
        best = range(0)
        start = 0
        for number in range(1, len(self.tokens) + 1):
            full = number < len(self.tokens) and self.tokens[number] == sequences == self.tokens[number - 1]
            if not full:
                if number - start - 1 > len(best):
                    best = range(start + 1, number)
                start = number
        return best

    def figures(self, passes: range) -> dict[str, dict[str, float]]:
        """Of every lane over ``passes``: `busy_share` of the time from the first's beginning to the last's end, bytes
        for each second of that time and of its busy part. Empty where there are no passes."""
        if not passes:
            return {}
        start, end = self._start(passes.start), self.ends[passes[-1]]
        names = sorted({name for lanes in self.lanes for name in lanes})
        return {name: self._lane(name, start, end) for name in names}

    def seconds(self, passes: range) -> float:
        """From the first's beginning to the last's end."""
        return self.ends[passes[-1]] - self._start(passes.start) if passes else 0.0

    def _start(self, number: int) -> float:
        return self.ends[number - 1] if number else self.began

    def _lane(self, name: str, start: float, end: float) -> dict[str, float]:
        work = [item for lanes in self.lanes for item in lanes.get(name, ())]
        inside = [(max(a, start), min(b, end), size * _share(a, b, start, end)) for a, b, size in work]
        inside = [item for item in inside if item[1] > item[0] or (item[2] and start <= item[0] <= end)]
        busy, moved = covered((a, b) for a, b, _ in inside), sum(size for _, _, size in inside)
        return {
            "busy_share": busy / (end - start),
            "bytes": moved,
            "bytes_per_s": moved / (end - start),
            "busy_bytes_per_s": moved / busy if busy else 0.0,
        }


def binding(lanes: dict[str, dict[str, float]]) -> str:
    """The lane that is busy most."""
    return max(lanes, key=lambda name: lanes[name]["busy_share"])


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``intervals``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _share(start: float, end: float, first: float, last: float) -> float:
    """How much of a span lies between ``first`` and ``last``; its bytes are taken to come evenly."""
    if end <= start:
        return 1.0 if first <= start < last else 0.0
    return max(0.0, min(end, last) - max(start, first)) / (end - start)
