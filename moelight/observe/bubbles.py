"""Attribution of the idle time of lanes: each part of the time between two tasks of a lane has one cause.

A lane waits for the last dependency of its next task, then for the launch of the task. The time from the end of all
tasks of a pass to the first task of the next pass, page transfers aside, is between passes, whatever the next task
waited for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

from moelight.core.schedule import Lane, TaskKind
from moelight.core.timeline import Span, Timeline

BETWEEN = "between passes"
LAUNCH = "launch"
DONE = "no task left"
UNRECORDED = "not recorded"

_LEAST_S = 2e-9  # gap between back-to-back tasks that a trace's rounding to nanoseconds may leave
_GAPS_KEPT = 16  # a lane idle for more passes in a row is not the binding lane


@dataclass(kw_only=True, slots=True)
class Bubble:
    """All idle time of one lane with one cause: total seconds, number of pieces, and the longest piece.

    ``pass_number`` and ``layer`` are those of the task that follows the longest piece; -1 if there is none.
    """

    seconds: float = 0.0
    count: int = 0
    longest_s: float = 0.0
    longest_at_s: float = 0.0
    pass_number: int = -1
    layer: int = -1

    def add(self, seconds: float, at_s: float, pass_number: int, layer: int) -> None:
        """Add a piece of ``seconds`` that begins at ``at_s``, before a task of this pass and layer."""
        self.seconds += seconds
        self.count += 1
        if seconds > self.longest_s:
            self.longest_s, self.longest_at_s = seconds, at_s
            self.pass_number, self.layer = pass_number, layer


@cache
def cause_of(waiting: TaskKind, last: TaskKind) -> str:
    """Return the cause of waiting for ``last``: its result or, for a page transfer, the slot that it occupied."""
    if waiting.moves_page and not last.moves_page:
        return f"{last} (ring slot)"
    if last is TaskKind.SEND_PAGE and waiting.moves_page:
        return f"{last} (staging slot)"
    return str(last)


class Bubbles:
    """Idle time by lane and cause, accumulated pass by pass.

    Holds two timelines at most: transfers of pages for the next pass run between the tasks of this pass, and are listed
    with the next.
    """

    def __init__(self) -> None:
        self._found: defaultdict[tuple[Lane, str], Bubble] = defaultdict(Bubble)
        self._passes = 0
        self._begin(None)

    def _begin(self, start_s: float | None) -> None:
        self._pending: list[tuple[float, int, Span]] = []
        self._reached: dict[Lane, float] = {}
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._start_s, self._worked_s, self._end_s = start_s, start_s, float("-inf")

    def begin(self, start_s: float) -> None:
        """Start a run at ``start_s``; without this call a run starts with its first task."""
        self.end()
        self._begin(start_s)

    def add(self, timeline: Timeline) -> None:
        number, horizon_s = self._passes, self._end_s
        self._passes += 1
        if not timeline.spans:
            return
        if self._start_s is None:
            self._start_s = timeline.start_s
        works = [span for span in timeline.spans if not span.task.kind.moves_page]
        if works:  # the pass without its page transfers
            first_s = min(span.start_s for span in works)
            if self._worked_s is not None and first_s - self._worked_s > _LEAST_S:
                self._gaps.append((self._worked_s, first_s))
            self._worked_s = max(span.end_s for span in works)
        self._pending += [(span.start_s, number, span) for span in timeline.spans]
        self._end_s = max(horizon_s, timeline.end_s)
        self._release(horizon_s)

    def end(self, at_s: float | None = None) -> None:
        """End the run at ``at_s`` or, if None, with its last task."""
        self._release(float("inf"))
        last_s = self._end_s if at_s is None else at_s
        for lane, reached_s in self._reached.items():
            if last_s - reached_s > _LEAST_S:
                self._found[lane, DONE].add(last_s - reached_s, reached_s, -1, -1)
        self._begin(None)

    def of(self, lane: Lane) -> Mapping[str, Bubble]:
        """Return the idle time of ``lane`` by cause, longest first, up to the last pass but one or the last `end`."""
        items = [(cause, replace(bubble)) for (theirs, cause), bubble in self._found.items() if theirs is lane]
        return dict(sorted(items, key=lambda item: -item[1].seconds))

    def _release(self, horizon_s: float) -> None:
        """Process all pending spans that began before ``horizon_s``; every span added later begins at or after it."""
        self._pending.sort(key=itemgetter(0))
        reached, run_s, seen = self._reached, self._start_s or 0.0, 0
        for start_s, number, span in self._pending:
            if start_s >= horizon_s:
                break
            seen += 1
            lane = span.task.lane
            reached_s = reached.get(lane, run_s)
            if start_s - reached_s > _LEAST_S:
                self._gap(reached_s, span, number)
            reached[lane] = max(reached_s, span.end_s)
        del self._pending[:seen]

    def _gap(self, from_s: float, span: Span, number: int) -> None:
        """Attribute the idle time of the lane of ``span``, from ``from_s`` to the start of ``span``."""
        pieces: dict[str, list[float]] = {}
        crossed = [gap for gap in self._gaps if gap[1] > from_s and gap[0] < span.start_s]  # usually none
        for between_from_s, between_to_s in crossed:
            start_s, end_s = max(from_s, between_from_s), min(span.start_s, between_to_s)
            _wait(pieces, span, from_s, start_s)
            _add(pieces, BETWEEN, start_s, end_s)
            from_s = end_s
        _wait(pieces, span, from_s, span.start_s)
        task = span.task
        layer = task.layer if task.page is None else task.page.layer
        for cause, (at_s, seconds) in pieces.items():
            self._found[task.lane, cause].add(seconds, at_s, number, layer)


def _wait(pieces: dict[str, list[float]], span: Span, from_s: float, to_s: float) -> None:
    """Attribute the idle time before ``span`` to the dependency it waited for, and the rest to its launch."""
    until_s = span.waited_until_s
    if until_s is None:
        _add(pieces, UNRECORDED, from_s, to_s)
        return
    if span.waited_for is not None and until_s - from_s > _LEAST_S:
        until_s = min(until_s, to_s)
        _add(pieces, cause_of(span.task.kind, span.waited_for.kind), from_s, until_s)
        from_s = until_s
    _add(pieces, LAUNCH, from_s, to_s)


def _add(pieces: dict[str, list[float]], cause: str, from_s: float, to_s: float) -> None:
    if to_s <= from_s:
        return
    pieces.setdefault(cause, [from_s, 0.0])[1] += to_s - from_s
