"""The one loop that walks a schedule. It knows lanes and tickets, and nothing of what a task does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from moelight.core.errors import MoelightError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.runtime.lanes import LaneRunner, Ticket, Work

Perform = Callable[[Task], Work]


class Executor:
    """Carries out passes. Pages fetched for the next pass stay on their way between two calls of ``run``."""

    def __init__(self, lanes: Mapping[Lane, LaneRunner]) -> None:
        self._lanes = lanes
        self._carried: dict[Page, tuple[Task, Ticket]] = {}
        self._broken = False

    @property
    def carried(self) -> int:
        """How many pages of the next pass are in the ring or on their way."""
        return len(self._carried)

    def run(self, schedule: Schedule, perform: Perform) -> Timeline:
        """Submit every task in order to its lane, wait for all but the carried ones, and say when each ran that found
        something to do.

        ``perform`` turns a task into the work it stands for. Raises what a task raised; no pass can follow one that
        did not finish, because nobody knows what it left in the rings.
        """
        if self._broken:
            raise MoelightError("an earlier pass failed or was interrupted; close this engine and open it anew")
        self._broken = True
        tickets: list[Ticket] = []
        spans: list[tuple[Task, Ticket]] = []
        for task in schedule.tasks:
            if task.kind is TaskKind.CARRIED_PAGE and task.page is not None:
                fetched, ticket = self._carried[task.page]
                spans.append((fetched, ticket))
            else:
                after = [tickets[dep] for dep in task.deps]
                ticket = self._lanes[task.lane].submit(perform(task), after)
                spans.append((task, ticket))
            tickets.append(ticket)
        ahead = set(schedule.carried_out)
        self._carried = {}
        for position in schedule.carried_out:
            task = schedule.tasks[position]
            if task.page is not None:
                self._carried[task.page] = (task, tickets[position])
        done = []
        for position, (task, ticket) in enumerate(spans):
            if position not in ahead:
                ticket.wait()
                if not ticket.skipped:
                    start_s, end_s = ticket.span()
                    done.append(Span(task=task, start_s=start_s, end_s=end_s))
        self._broken = False
        return Timeline(spans=tuple(done))

    def close(self) -> None:
        """Finish what is on its way and stop the lanes."""
        for lane in self._lanes.values():
            lane.close()


def idle_s(timeline: Timeline, began_s: float) -> float:
    """Seconds from ``began_s`` until now in which no lane worked: the walking itself."""
    now = time.perf_counter()
    busy, reached = 0.0, began_s
    for start, end in sorted((span.start_s, span.end_s) for span in timeline.spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return now - began_s - busy
