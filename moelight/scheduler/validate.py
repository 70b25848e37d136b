"""Proves that a schedule is safe to run on lanes that are synchronised by dependencies alone.

Checked: dependencies point backwards (so there is no cycle); every micro-batch passes every phase of every layer once,
on its lane, with its crossings where there is a link; every page of the stream is transferred once, is in its slot when
its layer's experts run, and moves after the layer's routers where only routed pages move; the buffers and bytes of each
task match the ledger; and every two tasks that contend for a buffer are ordered, so no slot is overwritten while it is
read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from moelight.core.errors import ScheduleError
from moelight.core.schedule import CHOSEN_KINDS, Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.scheduler import expected
from moelight.scheduler.layout import Layout, PassShape

_COMPARED = ("kind", "lane", "slot", "bytes", "reads", "writes")


def validate(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Check every invariant of ``schedule`` as a pass of ``shape`` through ``layout``.

    Raises:
        ScheduleError: names the invariant and the tasks that break it.
    """
    order = HappensBefore(schedule)
    _check_phases(schedule, layout, shape)
    _check_pages(schedule, layout, shape)
    _check_routed(schedule, shape, order)
    _check_cache(schedule, layout)
    _check_buffers(schedule, order)
    _check_bytes(schedule, layout, shape)


class HappensBefore:
    """``a`` is before ``b`` if a chain of dependencies and lane orders leads from one to the other (vector clocks)."""

    def __init__(self, schedule: Schedule) -> None:
        self._clocks: list[dict[Lane, int]] = []
        self._tasks = schedule.tasks
        lane_tail: dict[Lane, dict[Lane, int]] = {}
        for position, task in enumerate(schedule.tasks):
            clock = dict(lane_tail.get(task.lane, {}))
            for dep in task.deps:
                if not 0 <= dep < position:
                    raise ScheduleError(f"task {position} {task.name} waits for task {dep}, which is not before it")
                for lane, last in self._clocks[dep].items():
                    clock[lane] = max(clock.get(lane, -1), last)
            clock[task.lane] = position
            self._clocks.append(clock)
            lane_tail[task.lane] = clock

    def __call__(self, first: int, second: int) -> bool:
        return self._clocks[second].get(self._tasks[first].lane, -1) >= first


def _check_buffers(schedule: Schedule, order: HappensBefore) -> None:
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    for position, task in enumerate(schedule.tasks):
        for buffer in task.reads:
            if buffer not in writer:
                raise ScheduleError(f"{task.name} reads {buffer} before anything wrote it")
            _require(schedule, order, writer[buffer], position, buffer)
        for buffer in task.writes:
            for earlier in (*readers.get(buffer, ()), *([writer[buffer]] if buffer in writer else ())):
                _require(schedule, order, earlier, position, buffer)
        for buffer in task.reads:
            readers.setdefault(buffer, []).append(position)
        for buffer in task.writes:
            writer[buffer] = position
            readers[buffer] = []


def _require(schedule: Schedule, order: HappensBefore, first: int, second: int, buffer: Buffer) -> None:
    if first != second and not order(first, second):
        raise ScheduleError(
            f"{schedule.tasks[first].name} and {schedule.tasks[second].name} both touch {buffer} in no fixed order"
        )


def _check_phases(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Check that every phase of the pass is present once, with the fields that its kind, layer and micro-batch
    require."""
    cost_model = [task for task in schedule.tasks if task.page is None]
    done = Counter((task.kind, task.layer, task.micro_batch) for task in cost_model)
    wanted = expected.phase_counts(schedule, layout, shape)
    if done != wanted:
        missing, extra = wanted - done, done - wanted
        what, which = ("misses", missing) if missing else ("repeats or invents", extra)
        kind, layer, j = next(iter(which))
        raise ScheduleError(f"the pass {what} {kind}({layer},{j})")
    for task in cost_model:
        _compare(task, expected.phase(layout, shape, task.kind, task.layer, task.micro_batch))


def _check_pages(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Track the stream position that each slot holds, as page tasks fill it and experts read it."""
    position = {page: k for k, page in enumerate(layout.streamed)}
    total, held = len(position), dict[Buffer, int]()
    times: Counter[tuple[str, Page]] = Counter()
    arrivals: dict[int, int] = {}
    for number, task in enumerate(schedule.tasks):
        if task.page is not None:
            space = task.writes[0].space if task.writes else ""
            if space not in (("ring", "pinned") if layout.pages_cross else ("ring",)):
                raise ScheduleError(f"{task.name} brings its page to no ring")
            k = position.get(task.page, total) + times[space, task.page] * total
            if space == "pinned" and k < shape.prefetched:
                k += total
            times[space, task.page] += 1
            if task.page not in position or k >= 2 * total:
                raise ScheduleError(f"{task.name} brings a page that is not wanted (again)")
            if space == "pinned" and not layout.stops(k):
                raise ScheduleError(f"{task.name} stops a page that crosses from its home")
            _compare(task, expected.page_task(layout, shape, k, space))
            for buffer in task.reads:
                if held.get(buffer) != k:
                    raise ScheduleError(f"{task.name} finds {_held(layout, held, buffer)} in {buffer}")
            held.update(dict.fromkeys(task.writes, k))
            if space == "ring":
                arrivals[k] = number
        elif expected.reads_ring(layout, task.kind) and not shape.routed_only:
            for k in layout.layer_pages[task.layer]:
                buffer = Buffer(space="ring", index=k % layout.ring_slots)
                if held.get(buffer) != k:
                    found, wanted = _held(layout, held, buffer), _page_name(layout, k)
                    raise ScheduleError(f"{task.name} finds {found} in {buffer}, not {wanted}")
    _check_prefetched(schedule, layout, shape, held, arrivals)


def _check_prefetched(
    schedule: Schedule, layout: Layout, shape: PassShape, held: dict[Buffer, int], arrivals: dict[int, int]
) -> None:
    """Check the prefetches for the next pass: the stream's first pages, in the ring or in flight to it at the end."""
    total = len(layout.streamed)
    ahead = [k for k in sorted(arrivals) if k >= total]
    if schedule.stream_advance != total:
        raise ScheduleError(f"the pass advances the stream by {schedule.stream_advance} pages, not {total}")
    if schedule.prefetched_next != tuple(arrivals[k] for k in ahead) or ahead != list(range(total, total + len(ahead))):
        raise ScheduleError(
            f"carried_out {schedule.prefetched_next} are not the tasks that bring the next pass's pages"
        )
    if ahead and (not shape.wraps or shape.routed_only):
        raise ScheduleError(f"{schedule.tasks[arrivals[ahead[0]]].name} fetches for a pass that may never come")
    for k in ahead:
        if held[Buffer(space="ring", index=k % layout.ring_slots)] != k:
            raise ScheduleError(f"{schedule.tasks[arrivals[k]].name} is overwritten before the next pass")


def _check_routed(schedule: Schedule, shape: PassShape, order: HappensBefore) -> None:
    """Where only routed pages move, check that they do so after every micro-batch has chosen its experts of the layer,
    and into slots that no expert of an earlier layer still reads."""
    routers: dict[int, list[int]] = {}
    readers: list[int] = []
    for position, task in enumerate(schedule.tasks if shape.routed_only else ()):
        if task.kind is TaskKind.ROUTE:
            routers.setdefault(task.layer, []).append(position)
        elif task.kind in (TaskKind.EXPERTS, TaskKind.RESIDENT_EXPERTS):
            readers.append(position)
        elif task.kind in CHOSEN_KINDS or task.kind is TaskKind.OFFLOAD_HIDDEN:
            done = [each for each in routers.get(task.layer, ()) if order(each, position)]
            if len(done) < len(shape.micro_batches):
                raise ScheduleError(f"{task.name} moves before every router of its layer has chosen")
            if task.kind in CHOSEN_KINDS and not all(order(each, position) for each in readers):
                raise ScheduleError(f"{task.name} moves while experts of an earlier layer still read")
        elif task.page is not None and task.kind is not TaskKind.PREFETCHED_PAGE:
            raise ScheduleError(f"{task.name} names a page before anybody chose it")


def _held(layout: Layout, held: dict[Buffer, int], buffer: Buffer) -> str:
    if buffer not in held:
        return "nothing"
    return _page_name(layout, held[buffer])


def _page_name(layout: Layout, k: int) -> str:
    page = layout.streamed[k % len(layout.streamed)]
    return f"page {page.layer}:e{page.expert}"


def _check_cache(schedule: Schedule, layout: Layout) -> None:
    """Check that micro-batches store and attend in their order within a layer, since a prompt may be cut over
    several."""
    last: dict[tuple[Lane, int], Task] = {}
    for task in schedule.tasks:
        if expected.appends(layout, task.kind):
            before = last.get((task.lane, task.layer))
            if before is not None and before.micro_batch > task.micro_batch:
                raise ScheduleError(f"{task.name} comes after {before.name}, which may need its keys and values")
            last[task.lane, task.layer] = task


def _compare(task: Task, wanted: Task) -> None:
    if replace(task, deps=()) == wanted:
        return
    for field in _COMPARED:
        found, right = getattr(task, field), getattr(wanted, field)
        if found != right:
            raise ScheduleError(f"{task.name}: {field} is {found!s}, not {right!s}")
    raise ScheduleError(f"{task.name} is not {wanted.name}")


def _check_bytes(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    wanted = expected.expected_bytes(schedule, layout, shape)
    found = {lane: size for lane, size in schedule.lane_bytes().items() if size}
    if found != wanted:
        raise ScheduleError(f"the pass moves {found} bytes, the ledger says {wanted}")
