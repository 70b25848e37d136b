"""The one loop that walks a schedule. It knows lanes and tickets, and nothing of what a task does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from moelight.core.errors import MoelightError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import Span, Timeline, last_to_end
from moelight.runtime.lanes import LaneRunner, Ticket, Work

Perform = Callable[[Task], Work]
Submitted = tuple[Task, Ticket, Sequence[tuple[Task, Ticket]]]  # and what it waits for


class Executor:
    """Carries out passes. Pages fetched for the next pass stay on their way between two calls of ``run``."""

    def __init__(self, lanes: Mapping[Lane, LaneRunner]) -> None:
        self._lanes = lanes
        self._carried: dict[Page, Submitted] = {}
        self._broken = False

    @property
    def carried(self) -> int:
        """How many pages of the next pass are in the ring or on their way."""
        return len(self._carried)

    def run(self, schedule: Schedule, perform: Perform) -> Timeline:
        """Submit every task in order to its lane, wait for all but the carried ones, and say when each ran.

        ``perform`` turns a task into the work it stands for. Raises what a task raised; no pass can follow one that
        did not finish, because nobody knows what it left in the rings.
        """
        if self._broken:
            raise MoelightError("an earlier pass failed or was interrupted; close this engine and open it anew")
        self._broken = True
        submitted: list[Submitted] = []
        for task in schedule.tasks:
            if task.kind is TaskKind.CARRIED_PAGE and task.page is not None:
                submitted.append(self._carried[task.page])
            else:
                after = [submitted[dep][:2] for dep in task.deps]
                ticket = self._lanes[task.lane].submit(perform(task), [earlier for _, earlier in after])
                submitted.append((task, ticket, after))
        ahead = set(schedule.carried_out)
        self._carried = {}
        for position in schedule.carried_out:
            page = schedule.tasks[position].page
            if page is not None:
                self._carried[page] = submitted[position]
        timeline = _timeline([each for position, each in enumerate(submitted) if position not in ahead])
        self._broken = False
        return timeline

    def close(self) -> None:
        """Finish what is on its way and stop the lanes."""
        for lane in self._lanes.values():
            lane.close()


def _timeline(submitted: Sequence[Submitted]) -> Timeline:
    """Wait for every task, and say when it ran and what it waited for last."""
    done: dict[Ticket, tuple[float, float]] = {}  # a device is asked once for each

    def span(ticket: Ticket) -> tuple[float, float]:
        if ticket not in done:
            ticket.wait()
            done[ticket] = ticket.span()
        return done[ticket]

    spans = []
    for task, ticket, after in submitted:
        start_s, end_s = span(ticket)
        last, until_s = last_to_end((dep, span(earlier)[1]) for dep, earlier in after)
        spans.append(Span(task=task, start_s=start_s, end_s=end_s, waited_for=last, waited_until_s=until_s))
    return Timeline(spans=tuple(spans))


def idle_s(timeline: Timeline, began_s: float) -> float:
    """Seconds from ``began_s`` until now in which no lane worked: the walking itself."""
    now = time.perf_counter()
    busy, reached = 0.0, began_s
    for start, end in sorted((span.start_s, span.end_s) for span in timeline.spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return now - began_s - busy
