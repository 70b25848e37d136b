"""A virtual clock over schedules, with the executor's rules: a lane runs one task at a time, in schedule order; a task
starts when its lane is free and its dependencies are done; a pass begins when the one before is done, except for
prefetched pages. Lanes that touch host memory share its bandwidth."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moelight.core.errors import ScheduleError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline, last_to_end
from moelight.hrm.task_cost import TaskCost

Price = Callable[[Task], TaskCost]
_INLINE = (Lane.CPU, Lane.EXCHANGE)


def simulate_pass(
    schedule: Schedule,
    cost: Price,
    *,
    dram_bytes_per_s: float | None = None,
    start_s: float = 0.0,
    inline: bool = False,
) -> Timeline:
    """Simulate one pass. Pages prefetched by the pass before are in their slots at ``start_s``; the timeline excludes
    the pages prefetched for the next.

    Args:
        cost: seconds of each task alone on the machine, and the bytes of host memory that it touches in them.
        dram_bytes_per_s: shared by max-min fairness among tasks that together need more; None: unlimited.
        inline: the thread that submits tasks runs those of the ``cpu`` lane itself, and waits for other ranks, as the
            engine does without a device. Every other lane has a thread of its own.
    """
    job = [(schedule, cost)]
    return simulate_passes(job, dram_bytes_per_s=dram_bytes_per_s, start_s=start_s, inline=inline)[0]


def simulate_passes(
    passes: Iterable[tuple[Schedule, Price]],
    *,
    dram_bytes_per_s: float | None = None,
    start_s: float = 0.0,
    inline: bool = False,
) -> tuple[Timeline, ...]:
    """`simulate_pass` for passes on one clock, each with its own costs; prefetched pages keep their transfer times."""
    clock = VirtualClock(dram_bytes_per_s=dram_bytes_per_s, start_s=start_s, inline=inline)
    return tuple(clock.run(schedule, cost) for schedule, cost in passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyPass:
    """One of many equal passes in a row. Its ``timeline`` begins before ``began_s`` where pages were prefetched."""

    began_s: float
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds from the end of the pass before to the end of this one."""
        return self.timeline.end_s - self.began_s

    def idle_s(self, lane: Lane) -> float:
        return max(0.0, self.seconds - self.timeline.busy_s().get(lane, 0.0))

    @property
    def binding(self) -> Lane:
        busy = self.timeline.busy_s()
        return max(busy, key=busy.__getitem__)


def steady_pass(
    schedule: Schedule, cost: Price, *, dram_bytes_per_s: float | None = None, inline: bool = False
) -> SteadyPass:
    """The third of three equal passes, or the first if nothing is prefetched. ``schedule`` must start with the pages
    that it prefetches for the next."""
    clock, began_s = VirtualClock(dram_bytes_per_s=dram_bytes_per_s, inline=inline), 0.0
    for _ in range(2 if schedule.prefetched_next else 0):
        began_s = max((ended.ends_s for ended in clock.finish(schedule, cost)), default=0.0)
    return SteadyPass(began_s=began_s, timeline=clock.run(schedule, cost))


class _RunningTask:
    """One task in flight. ``share``: bytes per second of host memory that it needs; ``left_s``: seconds at full speed
    until it is done; ``waits_for``: its dependencies until it begins; ``waited``: the dependency that ended last."""

    __slots__ = ("done", "ends_s", "left_s", "missing", "share", "starts_s", "task", "waited", "waiters", "waits_for")

    def __init__(self, task: Task, cost: TaskCost, dram_bytes_per_s: float | None) -> None:
        self.task, self.left_s, self.share = task, cost.seconds, 0.0
        if dram_bytes_per_s is not None and cost.dram_bytes > 0:
            # A task's rate cannot exceed the bandwidth.
            self.left_s = max(cost.seconds, cost.dram_bytes / dram_bytes_per_s)
            self.share = cost.dram_bytes / self.left_s
        self.missing = 0
        self.waiters: list[_RunningTask] = []
        self.waits_for: list[_RunningTask] = []
        self.waited: tuple[Task | None, float] = (None, FREE)
        self.starts_s = self.ends_s = 0.0
        self.done = False

    def begin(self, now_s: float) -> None:
        """Start the task; drop its dependencies, so that they and their own dependencies can be freed."""
        self.starts_s = now_s
        self.waited = last_to_end((dep.task, dep.ends_s) for dep in self.waits_for)
        self.waits_for = []

    @property
    def span(self) -> Span:
        last, until_s = self.waited
        return Span(task=self.task, start_s=self.starts_s, end_s=self.ends_s, waited_for=last, waited_until_s=until_s)


class VirtualClock:
    """Lanes and their queues over consecutive passes. ``now_s`` is the simulated time."""

    def __init__(self, *, dram_bytes_per_s: float | None = None, start_s: float = 0.0, inline: bool = False) -> None:
        self.now_s = start_s
        self._dram, self._inline = dram_bytes_per_s, inline
        self._queues: dict[Lane, deque[_RunningTask]] = {lane: deque() for lane in Lane}
        self._running: dict[Lane, _RunningTask] = {}
        self._prefetched: dict[Page, _RunningTask] = {}

    def run(self, schedule: Schedule, cost: Price) -> Timeline:
        """Run one pass, without the pages prefetched for the next; raises ScheduleError for a deadlock."""
        return Timeline(spans=tuple(ended.span for ended in self.finish(schedule, cost)))

    def finish(self, schedule: Schedule, cost: Price) -> list[_RunningTask]:
        """The tasks of `run`, done."""
        running_tasks = [self._run_task(task, cost) for task in schedule.tasks]
        ahead = set(schedule.prefetched_next)
        awaited = [ended for position, ended in enumerate(running_tasks) if position not in ahead]
        launching = self._launch(schedule, running_tasks)
        inline = next(launching, None)
        for running_task in awaited:
            while inline is not None or not running_task.done:
                self._advance()
                while inline is not None and inline.done:
                    inline = next(launching, None)
        prefetched = [running_tasks[position] for position in schedule.prefetched_next]
        self._prefetched = {ended.task.page: ended for ended in prefetched if ended.task.page is not None}
        return awaited

    def _run_task(self, task: Task, cost: Price) -> _RunningTask:
        if task.kind is not TaskKind.PREFETCHED_PAGE:
            return _RunningTask(task, cost(task), self._dram)
        if task.page in self._prefetched:
            return self._prefetched[task.page]
        instant = _RunningTask(task, TaskCost(seconds=0.0), None)
        instant.starts_s = instant.ends_s = self.now_s
        instant.done = True
        return instant

    def _launch(self, schedule: Schedule, running_tasks: list[_RunningTask]) -> Iterator[_RunningTask]:
        """Queue every task on its lane, in order; yield those that the submitting thread runs itself."""
        for task, running_task in zip(schedule.tasks, running_tasks, strict=True):
            if task.kind is TaskKind.PREFETCHED_PAGE:
                continue
            running_task.waits_for = [running_tasks[dep] for dep in task.deps]
            open_deps = [dep for dep in running_task.waits_for if not dep.done]
            running_task.missing = len(open_deps)
            for dep in open_deps:
                dep.waiters.append(running_task)
            self._queues[task.lane].append(running_task)
            self._start(task.lane)
            if self._inline and task.lane in _INLINE:
                yield running_task

    def _start(self, lane: Lane) -> None:
        queue = self._queues[lane]
        if lane in self._running or not queue or queue[0].missing:
            return
        running_task = queue.popleft()
        running_task.begin(self.now_s)
        self._running[lane] = running_task

    def _advance(self) -> None:
        running = list(self._running.values())
        shares = [task.share for task in running] if self._dram is not None else ()
        soonest, ended = math.inf, None
        if self._dram is None or sum(shares) <= self._dram:  # the common case: every task at full speed
            for task in running:
                if task.left_s < soonest:
                    soonest, ended = task.left_s, task
            for task in running:
                task.left_s -= soonest
        else:
            speeds = _fair_speeds(shares, self._dram)
            for task, speed in zip(running, speeds, strict=True):
                if task.left_s / speed < soonest:
                    soonest, ended = task.left_s / speed, task
            for task, speed in zip(running, speeds, strict=True):
                task.left_s = max(0.0, task.left_s - soonest * speed)
        if ended is None:
            raise ScheduleError("tasks wait for each other for ever")
        self.now_s += soonest
        ended.ends_s = self.now_s
        ended.done = True
        lane = ended.task.lane
        del self._running[lane]
        self._start(lane)
        for waiter in ended.waiters:
            waiter.missing -= 1
            if not waiter.missing:
                self._start(waiter.task.lane)
        ended.waiters = []


def _fair_speeds(shares: Sequence[float], capacity: float) -> list[float]:
    """The fraction of its full speed that each task gets if they need ``shares`` of ``capacity`` (max-min fairness)."""
    speeds, left = [1.0] * len(shares), capacity
    waiting = sorted((share, index) for index, share in enumerate(shares) if share > 0)
    for served, (share, index) in enumerate(waiting):
        granted = min(share, left / (len(waiting) - served))
        speeds[index] = granted / share
        left -= granted
    return speeds
