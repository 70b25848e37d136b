"""Proves that a schedule is safe to run on lanes that know nothing of each other.

Checked: dependencies point backwards (so there is no cycle); every micro-batch passes every act of every layer once,
on its lane, with both crossings where there is a link; every page of the stream is brought once and is in its slot
when its layer's experts run; what each task touches and moves is what the ledger says; and every two tasks that
contend for a buffer are ordered, so no slot is overwritten while it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from moelight.core.dtypes import DType
from moelight.core.errors import ScheduleError
from moelight.core.schedule import Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.hrm import costs
from moelight.profiles.model import ModelProfile
from moelight.scheduler.layout import Layout, PassShape

_COMPARED = ("kind", "lane", "slot", "bytes", "reads", "writes")

_Buffers = tuple[Buffer, ...]

# What each act reads and writes of its micro-batch, and what it moves.
_Moves = Callable[[ModelProfile, DType, int], int]
_ACTS: dict[TaskKind, tuple[str | None, str | None, _Moves | None]] = {
    TaskKind.EMBED: (None, "hidden", None),
    TaskKind.PRE_ATTENTION: ("hidden", "qkv", None),
    TaskKind.ATTENTION: ("qkv", "attn", None),
    TaskKind.OFFLOAD_QKV: ("qkv", "qkv_host", costs.qkv_bytes),
    TaskKind.OFFLOAD_KV: ("qkv", "qkv_host", costs.kv_bytes),
    TaskKind.STORE_KV: ("qkv_host", None, None),
    TaskKind.CPU_ATTENTION: ("qkv_host", "attn_host", None),
    TaskKind.LOAD_HIDDEN: ("attn_host", "attn", costs.hidden_bytes),
    TaskKind.POST_ATTENTION: ("attn", "hidden", None),
    TaskKind.SAMPLE: ("hidden", None, None),
}
_HOST_SIDE = {TaskKind.CPU_ATTENTION: Lane.CPU, TaskKind.STORE_KV: Lane.CPU}
_CROSSINGS = {TaskKind.OFFLOAD_QKV: Lane.D2H, TaskKind.OFFLOAD_KV: Lane.D2H, TaskKind.LOAD_HIDDEN: Lane.H2D}


def validate(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Check every invariant of ``schedule`` as a pass of ``shape`` through ``layout``.

    Raises:
        ScheduleError: names the invariant and the tasks that break it.
    """
    order = HappensBefore(schedule)
    _check_acts(schedule, layout, shape)
    _check_pages(schedule, layout, shape)
    _check_cache(schedule)
    _check_buffers(schedule, order)
    _check_bytes(schedule, layout, shape)


class HappensBefore:
    """``a`` before ``b`` if a chain of dependencies and lane orders leads from one to the other (vector clocks)."""

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


def _check_acts(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Every act of the pass is there once, and is what its kind, layer and micro-batch say."""
    acts = [task for task in schedule.tasks if task.page is None]
    done = Counter((task.kind, task.layer, task.micro_batch) for task in acts)
    expected: Counter[tuple[TaskKind, int, int]] = Counter()
    for j, micro_batch in enumerate(shape.micro_batches):
        expected[TaskKind.EMBED, 0, j] += 1
        if micro_batch.samples:
            expected[TaskKind.SAMPLE, layout.model.num_layers - 1, j] += 1
        for layer in range(layout.model.num_layers):
            for kind in _kinds(layout, fresh=micro_batch.fresh):
                expected[kind, layer, j] += 1
    if done != expected:
        missing, extra = expected - done, done - expected
        what, which = ("misses", missing) if missing else ("repeats or invents", extra)
        kind, layer, j = next(iter(which))
        raise ScheduleError(f"the pass {what} {kind}({layer},{j})")
    for task in acts:
        _compare(task, _act(layout, shape, task.kind, task.layer, task.micro_batch))


def _kinds(layout: Layout, *, fresh: bool) -> tuple[TaskKind, ...]:
    around = (TaskKind.PRE_ATTENTION, TaskKind.POST_ATTENTION)
    if not layout.discrete:
        return (*around, TaskKind.CPU_ATTENTION)
    if fresh:
        return (*around, TaskKind.ATTENTION, TaskKind.OFFLOAD_KV, TaskKind.STORE_KV)
    return (*around, TaskKind.OFFLOAD_QKV, TaskKind.CPU_ATTENTION, TaskKind.LOAD_HIDDEN)


def _act(layout: Layout, shape: PassShape, kind: TaskKind, layer: int, j: int) -> Task:
    """The act as it must be, dependencies aside."""
    source, target, moves = _ACTS[kind]
    if kind is TaskKind.CPU_ATTENTION and not layout.discrete:
        source, target = "qkv", "attn"
    ring = layout.layer_pages[layer] if kind is TaskKind.POST_ATTENTION else range(0)
    return Task(
        kind=kind,
        lane=_HOST_SIDE.get(kind) or _CROSSINGS.get(kind) or layout.compute,
        layer=layer,
        micro_batch=j,
        bytes=moves(layout.model, layout.dtype, shape.micro_batches[j].tokens) if moves else 0,
        reads=(*_buffers(source, j), *(Buffer(space="ring", index=k % layout.ring_slots) for k in ring)),
        writes=_buffers(target, j),
    )


def _buffers(space: str | None, j: int) -> tuple[Buffer, ...]:
    return () if space is None else (Buffer(space=space, index=j),)


def _check_pages(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Follow which position of the stream each slot holds, as page tasks fill it and experts read it."""
    position = {page: k for k, page in enumerate(layout.streamed)}
    total, held = len(position), dict[Buffer, int]()
    times: Counter[tuple[str, Page]] = Counter()
    arrivals: dict[int, int] = {}
    for number, task in enumerate(schedule.tasks):
        if task.page is not None:
            space = task.writes[0].space if task.writes else ""
            if space not in (("ring", "pinned") if layout.discrete else ("ring",)):
                raise ScheduleError(f"{task.name} brings its page to no ring")
            k = position.get(task.page, total) + times[space, task.page] * total
            if space == "pinned" and k < shape.carried:
                k += total
            times[space, task.page] += 1
            if task.page not in position or k >= 2 * total:
                raise ScheduleError(f"{task.name} brings a page that is not wanted (again)")
            _compare(task, _page_task(layout, shape, k, space))
            for buffer in task.reads:
                if held.get(buffer) != k:
                    raise ScheduleError(f"{task.name} finds {_held(layout, held, buffer)} in {buffer}")
            held.update(dict.fromkeys(task.writes, k))
            if space == "ring":
                arrivals[k] = number
        elif task.kind is TaskKind.POST_ATTENTION:
            for k in layout.layer_pages[task.layer]:
                buffer = Buffer(space="ring", index=k % layout.ring_slots)
                if held.get(buffer) != k:
                    found, wanted = _held(layout, held, buffer), _page_name(layout, k)
                    raise ScheduleError(f"{task.name} finds {found} in {buffer}, not {wanted}")
    _check_carried(schedule, layout, shape, held, arrivals)


def _check_carried(
    schedule: Schedule, layout: Layout, shape: PassShape, held: dict[Buffer, int], arrivals: dict[int, int]
) -> None:
    """What the pass hands to the next one: the stream's first pages, on their way to or in the ring at its end."""
    total = len(layout.streamed)
    ahead = [k for k in sorted(arrivals) if k >= total]
    if schedule.stream_advance != total:
        raise ScheduleError(f"the pass advances the stream by {schedule.stream_advance} pages, not {total}")
    if schedule.carried_out != tuple(arrivals[k] for k in ahead) or ahead != list(range(total, total + len(ahead))):
        raise ScheduleError(f"carried_out {schedule.carried_out} are not the tasks that bring the next pass's pages")
    if ahead and not shape.wraps:
        raise ScheduleError(f"{schedule.tasks[arrivals[ahead[0]]].name} fetches for a pass that may never come")
    for k in ahead:
        if held[Buffer(space="ring", index=k % layout.ring_slots)] != k:
            raise ScheduleError(f"{schedule.tasks[arrivals[k]].name} is overwritten before the next pass")


def _page_task(layout: Layout, shape: PassShape, k: int, space: str) -> Task:
    """The task that brings position ``k`` of the stream into ``space``, dependencies aside."""
    at = k % len(layout.streamed)
    slot = k % (layout.pinned_slots if space == "pinned" else layout.ring_slots)
    pinned: _Buffers = (Buffer(space="pinned", index=k % layout.pinned_slots),) if layout.discrete else ()
    source: _Buffers = ()
    also: _Buffers = ()
    if space == "ring" and k < shape.carried:
        kind, lane, also = TaskKind.CARRIED_PAGE, Lane.H2D if layout.discrete else Lane.DISK, pinned
    elif space == "ring" and layout.discrete:
        kind, lane, source = TaskKind.SEND_PAGE, Lane.H2D, pinned
    else:
        kind, lane = (TaskKind.READ_PAGE, Lane.DISK) if layout.from_disk[at] else (TaskKind.STAGE_PAGE, Lane.STAGE)
    return Task(
        kind=kind,
        lane=lane,
        page=layout.streamed[at],
        slot=slot,
        bytes=0 if kind is TaskKind.CARRIED_PAGE else layout.page_bytes,
        reads=source,
        writes=(Buffer(space=space, index=slot), *also),
    )


def _held(layout: Layout, held: dict[Buffer, int], buffer: Buffer) -> str:
    if buffer not in held:
        return "nothing"
    return _page_name(layout, held[buffer])


def _page_name(layout: Layout, k: int) -> str:
    page = layout.streamed[k % len(layout.streamed)]
    return f"page {page.layer}:e{page.expert}"


def _check_cache(schedule: Schedule) -> None:
    """A prompt may be cut over micro-batches, so within a layer they store and attend in their order."""
    last: dict[int, Task] = {}
    for task in schedule.tasks:
        if task.kind in _HOST_SIDE:
            before = last.get(task.layer)
            if before is not None and before.micro_batch > task.micro_batch:
                raise ScheduleError(f"{task.name} comes after {before.name}, which may need its keys and values")
            last[task.layer] = task


def _compare(task: Task, expected: Task) -> None:
    if replace(task, deps=()) == expected:
        return
    for field in _COMPARED:
        found, wanted = getattr(task, field), getattr(expected, field)
        if found != wanted:
            raise ScheduleError(f"{task.name}: {field} is {found!s}, not {wanted!s}")
    raise ScheduleError(f"{task.name} is not {expected.name}")


def _check_bytes(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    expected = expected_bytes(schedule, layout, shape)
    found = {lane: size for lane, size in schedule.lane_bytes().items() if size}
    if found != expected:
        raise ScheduleError(f"the pass moves {found} bytes, the ledger says {expected}")


def expected_bytes(schedule: Schedule, layout: Layout, shape: PassShape) -> dict[Lane, int]:
    """What the ledger says must cross each lane: every streamed page once, less those carried in, plus those carried
    out; and for each layer and micro-batch its queries, keys, values and attention output."""
    model, dtype, layers = layout.model, layout.dtype, layout.model.num_layers
    total = len(layout.streamed)
    carried_out = len(schedule.carried_out)
    moved = [k % total for k in range(shape.carried, total + carried_out)] if total else []
    from_disk = sum(layout.from_disk[k] for k in moved)
    sizes: Counter[Lane] = Counter()
    sizes[Lane.DISK] += from_disk * layout.page_bytes
    if layout.discrete:
        sizes[Lane.STAGE] += (len(moved) - from_disk) * layout.page_bytes
        sizes[Lane.H2D] += len(moved) * layout.page_bytes
        for micro_batch in shape.micro_batches:
            tokens = micro_batch.tokens
            if micro_batch.fresh:
                sizes[Lane.D2H] += layers * costs.kv_bytes(model, dtype, tokens)
            else:
                sizes[Lane.D2H] += layers * costs.qkv_bytes(model, dtype, tokens)
                sizes[Lane.H2D] += layers * costs.hidden_bytes(model, dtype, tokens)
    return {lane: size for lane, size in sizes.items() if size}
