"""The executor: one loop that submits a schedule's tasks to lanes. Does not depend on what a task does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moelight.core.errors import MoelightError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import Span, Timeline, last_to_end
from moelight.runtime.lanes import LaneRunner, Ticket, Work

Perform = Callable[[Task], Work]
Submitted = tuple[Task, Ticket, Sequence[tuple[Task, Ticket]]]  # the task, its ticket, its dependencies
# Lanes that share memory with a lane, as (other lane, True: its tasks that move pages, False: its other tasks).
_MEETS: Mapping[Lane, tuple[tuple[Lane, bool], ...]] = {
    Lane.DISK: ((Lane.H2D, True), (Lane.STAGE, True), (Lane.CPU, False)),  # the pinned ring; the ring beside the CPU
    Lane.STAGE: ((Lane.H2D, True), (Lane.DISK, True)),  # the pinned ring
    Lane.H2D: ((Lane.DEVICE, False), (Lane.CPU, False)),  # the ring, buffers of contexts; the cache, the crossing arena
    Lane.D2H: ((Lane.DEVICE, False), (Lane.CPU, False)),  # tensors of micro-batches; the crossing arena
    Lane.DEVICE: ((Lane.H2D, False), (Lane.D2H, False), (Lane.EXCHANGE, False)),  # tensors of micro-batches
    Lane.CPU: ((Lane.H2D, False), (Lane.D2H, False), (Lane.EXCHANGE, False)),  # the crossing arena; hidden states
    Lane.EXCHANGE: ((Lane.DEVICE, False), (Lane.CPU, False)),  # hidden states
}


@dataclass(frozen=True, slots=True)
class PassInFlight:
    """A launched pass: its tasks in schedule order, except those that prefetch pages for the next pass."""

    submitted: tuple[Submitted, ...]


class Executor:
    """Runs passes; pages prefetched for the next pass may still be in transfer when a pass ends.

    A pass may be launched while the previous one runs in the same arenas. The order of a lane protects memory that only
    this lane touches. Where two lanes share memory, the first task of each waits for the last task of the previous pass
    on the other (`_MEETS`), so no pass overwrites what an earlier pass still reads.
    """

    def __init__(self, lanes: Mapping[Lane, LaneRunner], timed: Callable[[Task, Work], Work] | None = None) -> None:
        """``timed`` gives the work of a task the time that it takes on a card (`runtime.twin`)."""
        self._lanes, self._timed = lanes, timed
        self._prefetched: dict[Page, Submitted] = {}
        self._last: dict[tuple[Lane, bool], tuple[Task, Ticket]] = {}
        self.broken = False

    @property
    def prefetched(self) -> int:
        """Number of pages of the next pass that are in the ring or in transfer."""
        return len(self._prefetched)

    @property
    def device_waits(self) -> int:
        """Return how often the thread of a lane waited for a device, in all passes."""
        return sum(lane.device_waits for lane in self._lanes.values())

    def run(self, schedule: Schedule, perform: Perform) -> Timeline:
        return self.finish(self.launch(schedule, perform))

    def launch(self, schedule: Schedule, perform: Perform) -> PassInFlight:
        """Submit every task in order to its lane; ``perform`` maps a task to its work. Raises the error of a task that
        ran inline; no pass can follow then, because the contents of the rings are undefined."""
        self._begin()
        submitted: list[Submitted] = []
        begun: set[Lane] = set()
        for burst in _bursts(schedule.tasks):
            first = burst[0]
            if first.kind is TaskKind.PREFETCHED_PAGE and first.page is not None:
                submitted.append(self._prefetched[first.page])
                continue
            after = [submitted[dep][:2] for dep in first.deps]
            if first.lane not in begun:
                begun.add(first.lane)
                after += [self._last[other] for other in _MEETS[first.lane] if other in self._last]
            works = [perform(task) if self._timed is None else self._timed(task, perform(task)) for task in burst]
            tickets = self._lanes[first.lane].submit_burst(works, [earlier for _, earlier in after])
            submitted += [(task, ticket, after) for task, ticket in zip(burst, tickets, strict=True)]
        self._prefetched = {}
        for position in schedule.prefetched_next:
            page = schedule.tasks[position].page
            if page is not None:
                self._prefetched[page] = submitted[position]
        ahead = set(schedule.prefetched_next)
        in_flight = PassInFlight(tuple(ticket for position, ticket in enumerate(submitted) if position not in ahead))
        self._last |= {(task.lane, task.kind.moves_page): (task, ticket) for task, ticket, _ in in_flight.submitted}
        self.broken = False
        return in_flight

    def finish(self, in_flight: PassInFlight) -> Timeline:
        """Wait for ``in_flight``; return when each task ran and what it waited for last. Raises the error of a task."""
        self._begin()
        for _, ticket, _ in reversed(in_flight.submitted):  # last task of a lane first: its others are done then
            ticket.wait()
        self.broken = False
        return _timeline(in_flight.submitted)

    def wait(self) -> None:
        """Wait for everything launched except prefetches for the next pass. Raises the error of a task."""
        self._begin()
        for _, ticket in self._last.values():
            ticket.wait()
        self.broken = False

    def _begin(self) -> None:
        if self.broken:
            raise MoelightError("an earlier pass failed or was interrupted; close this engine and open it anew")
        self.broken = True

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


def _bursts(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """``tasks`` in order; pages that follow each other over the link and wait for nothing else than the first of them
    are submitted at once, because a page may take less time on the link than its submission."""
    burst: list[Task] = []
    for task in tasks:
        sent = task.kind is TaskKind.SEND_PAGE
        if burst and not (sent and burst[0].kind is TaskKind.SEND_PAGE and set(task.deps) <= set(burst[0].deps)):
            yield burst
            burst = []
        burst.append(task)
    if burst:
        yield burst


def _timeline(submitted: Sequence[Submitted]) -> Timeline:
    done: dict[Ticket, tuple[float, float]] = {}  # each device event is queried once

    def span(ticket: Ticket) -> tuple[float, float]:
        if ticket not in done:
            done[ticket] = ticket.span()
        return done[ticket]

    spans = []
    for task, ticket, after in submitted:
        if ticket.skipped:
            continue
        start_s, end_s = span(ticket)
        last, until_s = last_to_end((dep, span(earlier)[1]) for dep, earlier in after)
        spans.append(
            Span(
                task=task,
                start_s=start_s,
                end_s=end_s,
                waited_for=last,
                waited_until_s=until_s,
                found_bytes=ticket.found_bytes,
            )
        )
    return Timeline(spans=tuple(spans))


class Idle:
    """Sums the seconds, from ``began_s`` to the end of the last timeline, in which no lane worked."""

    def __init__(self, began_s: float) -> None:
        self.seconds = 0.0
        self._reached = began_s

    def add(self, timeline: Timeline) -> None:
        """Timelines are added in the order of passes."""
        for start, end in sorted((span.start_s, span.end_s) for span in timeline.spans):
            self.seconds += max(0.0, start - self._reached)
            self._reached = max(self._reached, end)

    def until(self, now_s: float) -> float:
        """Idle seconds up to ``now_s``, including those since the last task."""
        return self.seconds + max(0.0, now_s - self._reached)
