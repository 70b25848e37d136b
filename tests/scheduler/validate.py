"""Proves that a schedule is safe to run on lanes that are synchronised by dependencies alone.

Checked: dependencies point backwards (so there is no cycle); every micro-batch passes every phase of every layer once,
on its lane, with its crossings where there is a link; experts that run in turns do so in order, each once; every page
of the stream is transferred once, is in its slot when its layer's experts run, and moves after the layer's routers
where only routed pages move; the buffers and bytes of each task match the ledger; and every two tasks that contend for
a buffer are ordered, so no slot is overwritten while it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from moelight.core.errors import ScheduleError
from moelight.core.schedule import AHEAD_KINDS, CHOSEN_KINDS, Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.hrm import costs
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape

ALL = -1
APART = ("module", "flexgen-loop")  # builders that keep attention and experts of a layer apart
_Moves = Callable[[Layout, MicroBatchShape, int], int]


def _qkv(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return costs.qkv_bytes(layout.model, layout.dtype, micro_batch.tokens, layer)


def _kv(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return layout.kv_down_bytes(micro_batch, layer)


def _context(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return layout.context_bytes(micro_batch, layer)


def _attention(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return costs.hidden_bytes(layout.model, layout.dtype, micro_batch.tokens, layer)


def _residual(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return costs.residual_bytes(layout.model, layout.dtype, micro_batch.tokens)


def _summed(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return costs.sent_bytes(layout.model, layout.dtype, micro_batch.tokens)


def _routed(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> int:
    return costs.routed_bytes(layout.model, layout.dtype, micro_batch.tokens)


# For each phase: the micro-batch's buffers that are read and written, and the bytes that are moved over a link.
_PHASES: dict[TaskKind, tuple[tuple[str, ...], tuple[str, ...], _Moves | None]] = {
    TaskKind.EMBED: ((), ("hidden",), None),
    TaskKind.PRE_ATTENTION: (("hidden",), ("qkv",), None),
    TaskKind.LOAD_KV: ((), (), _context),
    TaskKind.ATTENTION: (("qkv",), ("attn",), None),
    TaskKind.OFFLOAD_QKV: (("qkv",), ("qkv_host",), _qkv),
    TaskKind.OFFLOAD_KV: (("qkv",), ("qkv_host",), _kv),
    TaskKind.STORE_KV: (("qkv_host",), (), None),
    TaskKind.CPU_ATTENTION: (("qkv_host",), ("attn_host",), None),
    TaskKind.LOAD_HIDDEN: (("attn_host",), ("attn",), _attention),
    TaskKind.POST_ATTENTION: (("attn",), ("hidden",), None),
    TaskKind.LAYERS: (("hidden",), ("hidden",), None),
    TaskKind.ROUTE: (("attn",), ("hidden", "routed"), None),
    TaskKind.OFFLOAD_HIDDEN: (("routed",), ("routed_host",), _routed),
    TaskKind.CPU_EXPERTS: (("routed_host",), ("experts_host",), None),
    TaskKind.RESIDENT_EXPERTS: (("routed",), ("partial",), None),
    TaskKind.EXPERTS: (("routed",), ("hidden",), None),
    TaskKind.PREDICT_EXPERTS: (("hidden",), (), None),
    TaskKind.LOAD_EXPERTS: (("experts_host",), ("experts",), _residual),
    TaskKind.COMBINE: (("experts",), ("hidden",), None),
    TaskKind.SUM_EXPERTS: (("hidden",), ("hidden",), _summed),
    TaskKind.SAMPLE: (("hidden",), (), None),
}
_LANES = {
    TaskKind.CPU_ATTENTION: Lane.CPU,
    TaskKind.STORE_KV: Lane.CPU,
    TaskKind.CPU_EXPERTS: Lane.CPU,
    TaskKind.SUM_EXPERTS: Lane.EXCHANGE,
    TaskKind.OFFLOAD_QKV: Lane.D2H,
    TaskKind.OFFLOAD_KV: Lane.D2H,
    TaskKind.OFFLOAD_HIDDEN: Lane.D2H,
    TaskKind.LOAD_KV: Lane.H2D,
    TaskKind.LOAD_HIDDEN: Lane.H2D,
    TaskKind.LOAD_EXPERTS: Lane.H2D,
}


_EVERYWHERE = frozenset((TaskKind.SUM_EXPERTS,))  # on a lane of their own without a device, too


def phase_counts(schedule: Schedule, layout: Layout, shape: PassShape) -> Counter[tuple[TaskKind, int, int]]:
    """The required number of each (kind, layer, micro-batch).

    Experts run per micro-batch, or once for all where the schedule has such a task. They are separate from their router
    in the second case, and where only routed pages move.
    """
    full = any(task.kind is TaskKind.EXPERTS and task.micro_batch == ALL for task in schedule.tasks)
    expected: Counter[tuple[TaskKind, int, int]] = Counter()
    for layer in range(layout.model.num_layers):
        apart = layout.model.moe_layers[layer] and (full or shape.routed_only)
        expected[TaskKind.EXPERTS, layer, ALL] += (apart and full) * _turns(layout, shape, layer)
        if apart and shape.routed_only:
            expected.update(_fetches(layout, shape, layer, full=full))
        for j, micro_batch in enumerate(shape.micro_batches):
            together = shape.whole_layers and schedule.builder not in APART
            if together and (layers := whole_layers(layout, layer)) is not None:
                expected[TaskKind.LAYERS, layer, j] += layers.start == layer
                continue
            experts = (TaskKind.ROUTE,) if apart and full else _expert_kinds(layout, layer, apart=apart)
            for kind in (TaskKind.PRE_ATTENTION, *_attention_kinds(layout, micro_batch), *experts):
                expected[kind, layer, j] += 1
            expected[TaskKind.SUM_EXPERTS, layer, j] += is_summed(layout, micro_batch, layer)
    for j, micro_batch in enumerate(shape.micro_batches):
        expected[TaskKind.EMBED, 0, j] += 1
        expected[TaskKind.SAMPLE, layout.model.num_layers - 1, j] += micro_batch.samples
    return +expected


def is_summed(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> bool:
    """True if ranks sum the hidden states of ``micro_batch`` after ``layer``: where a phase or a token follows."""
    follows = micro_batch.samples or layer + 1 < layout.model.num_layers
    return layout.model.ranks > 1 and layout.model.moe_layers[layer] and follows


def whole_layers(layout: Layout, layer: int) -> range | None:
    """The consecutive layers around ``layer`` none of whose pages move; None if its own do, or ranks sum after each."""
    if layout.model.ranks > 1:
        return None
    moving = [index for index, pages in enumerate(layout.layer_pages) if pages]
    if layer in moving:
        return None
    before = [index for index in moving if index < layer]
    after = [index for index in moving if index > layer]
    return range(max(before, default=-1) + 1, min(after, default=layout.model.num_layers))


def _turns(layout: Layout, shape: PassShape, layer: int) -> int:
    """How many tasks the experts of a layer are where they run once over the pass: one, or as many as its pages need
    behind a small ring."""
    pages = len(layout.layer_pages[layer])
    return -(-pages // layout.turn_parts) if layout.turn_parts and pages and not shape.routed_only else 1


def _fetches(layout: Layout, shape: PassShape, layer: int, *, full: bool) -> Iterator[tuple[TaskKind, int, int]]:
    """Extra tasks of an on-demand pass: chosen experts over each lane, prefetches for the next layer with experts, and
    on a CPU the resident experts, which wait for no transfer."""
    micro_batches, coming = range(len(shape.micro_batches)), coming_layer(layout, layer)
    for lane in layout.page_lanes:
        yield TaskKind.SEND_EXPERTS if lane is Lane.H2D else TaskKind.READ_EXPERTS, layer, ALL
    if shape.ahead and coming is not None:
        yield TaskKind.SEND_AHEAD if layout.pages_cross else TaskKind.READ_AHEAD, coming, ALL
        yield from ((TaskKind.PREDICT_EXPERTS, layer, j) for j in micro_batches if shape.predict_experts)
    if not layout.discrete and not full:
        yield from ((TaskKind.RESIDENT_EXPERTS, layer, j) for j in micro_batches)


def coming_layer(layout: Layout, layer: int) -> int | None:
    """The next layer with experts, or None."""
    moe_layers = layout.model.moe_layers
    return next((other for other in range(layer + 1, len(moe_layers)) if moe_layers[other]), None)


def chosen_task(layout: Layout, kind: TaskKind, layer: int) -> Task:
    """The task that transfers chosen or predicted experts of ``layer``, without dependencies."""
    lane = Lane.H2D if kind in (TaskKind.SEND_EXPERTS, TaskKind.SEND_AHEAD) else Lane.DISK
    if kind in AHEAD_KINDS:
        return Task(kind=kind, lane=lane, layer=layer)
    second = lane is not layout.page_lanes[0]
    present = "chosen" if lane is layout.page_lanes[-1] else "chosen_pinned"
    return Task(
        kind=kind,
        lane=lane,
        layer=layer,
        bytes=layout.most_chosen_bytes(layer, lane),
        reads=(Buffer(space="chosen_pinned", index=layer),) if second else (),
        writes=(Buffer(space=present, index=layer),),
    )


def _attention_kinds(layout: Layout, micro_batch: MicroBatchShape) -> tuple[TaskKind, ...]:
    if not layout.discrete:
        return (TaskKind.CPU_ATTENTION,)
    if layout.attention == "cpu" and not micro_batch.prefill_only:
        return (TaskKind.OFFLOAD_QKV, TaskKind.CPU_ATTENTION, TaskKind.LOAD_HIDDEN)
    stored = (TaskKind.OFFLOAD_KV, TaskKind.STORE_KV) if layout.attention == "cpu" or layout.kv_host else ()
    loaded = (TaskKind.LOAD_KV,) if loads_context(layout, micro_batch) else ()
    return (*loaded, TaskKind.ATTENTION, *stored)


def _expert_kinds(layout: Layout, layer: int, *, apart: bool) -> tuple[TaskKind, ...]:
    if not layout.cpu_layers[layer]:
        return (TaskKind.ROUTE, TaskKind.EXPERTS) if apart else (TaskKind.POST_ATTENTION,)
    present = (TaskKind.OFFLOAD_HIDDEN, TaskKind.CPU_EXPERTS, TaskKind.LOAD_EXPERTS, TaskKind.COMBINE)
    return (TaskKind.ROUTE, *present, *((TaskKind.EXPERTS,) if layout.experts == "split" else ()))


def loads_context(layout: Layout, micro_batch: MicroBatchShape) -> bool:
    """True if cached keys and values of ``micro_batch`` cross the link."""
    return layout.context_crosses and not micro_batch.prefill_only and micro_batch.context > 0


def phase(layout: Layout, shape: PassShape, kind: TaskKind, layer: int, j: int, experts: range | None = None) -> Task:
    """The required task, without dependencies; ``experts``: those that it computes, where not all."""
    if kind in CHOSEN_KINDS or kind in AHEAD_KINDS:
        return chosen_task(layout, kind, layer)
    sources, targets, moves = _PHASES[kind]
    if kind is TaskKind.EXPERTS and shape.routed_only and not layout.discrete and j != ALL:
        sources = ("routed", "partial")
    if kind is TaskKind.CPU_ATTENTION and not layout.discrete:
        sources, targets = ("qkv",), ("attn",)
    batches = range(len(shape.micro_batches)) if j == ALL else range(j, j + 1)
    reads, writes = _shared_buffers(layout, shape, kind, layer, j, experts)
    return Task(
        kind=kind,
        lane=_LANES.get(kind, layout.compute) if layout.discrete or kind in _EVERYWHERE else layout.compute,
        layer=layer,
        micro_batch=j,
        layers=whole_layers(layout, layer) if kind is TaskKind.LAYERS else None,
        experts=experts,
        bytes=moves(layout, shape.micro_batches[j], layer) if moves else 0,
        reads=(*(Buffer(space=space, index=i) for space in sources for i in batches), *reads),
        writes=(*(Buffer(space=space, index=i) for space in targets for i in batches), *writes),
    )


def _shared_buffers(
    layout: Layout, shape: PassShape, kind: TaskKind, layer: int, j: int, experts: range | None
) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Buffers that the phase reads and writes besides those of its own micro-batch: ring slots, contexts, the cache."""
    step = layer * len(shape.micro_batches) + j
    if reads_ring(layout, kind) and shape.routed_only:
        return ((Buffer(space="chosen", index=layer),), ()) if layout.model.moe_layers[layer] else ((), ())
    if reads_ring(layout, kind):
        pages = pages_read(layout, layer, experts)
        return tuple(Buffer(space="ring", index=k % layout.ring_slots) for k in pages), ()
    context = (Buffer(space="context", index=step % 2),)
    if kind is TaskKind.ATTENTION and loads_context(layout, shape.micro_batches[j]):
        return context, ()
    if kind is TaskKind.STORE_KV and layout.context_crosses:
        return (), (Buffer(space="cache", index=step),)
    if kind is TaskKind.LOAD_KV:
        earlier = range(step - j, step) if shape.micro_batches[j].continues else range(0)
        return tuple(Buffer(space="cache", index=item) for item in earlier), context
    return (), ()


def pages_read(layout: Layout, layer: int, experts: range | None) -> list[int]:
    """Stream positions of the pages of ``layer`` that hold ``experts`` (None: all)."""
    return [k for k in layout.layer_pages[layer] if experts is None or layout.streamed[k].expert in experts]


def reads_ring(layout: Layout, kind: TaskKind) -> bool:
    """True if phases of this kind read the streamed pages of their layer."""
    if kind is TaskKind.CPU_EXPERTS:
        return layout.experts == "host"
    return kind in (TaskKind.POST_ATTENTION, TaskKind.EXPERTS)


def appends(layout: Layout, kind: TaskKind) -> bool:
    """True if phases of this kind add keys and values to a cache."""
    if kind is TaskKind.ATTENTION:
        return layout.attention == "gpu"
    return kind in (TaskKind.CPU_ATTENTION, TaskKind.STORE_KV)


def page_task(layout: Layout, shape: PassShape, k: int, space: str) -> Task:
    """The task that transfers position ``k`` of the stream into ``space``, without dependencies."""
    at, crosses = k % len(layout.streamed), layout.pages_cross
    slot = k % (layout.pinned_slots if space == "pinned" else layout.ring_slots)
    pinned = (Buffer(space="pinned", index=k % layout.pinned_slots),) if layout.stops(k) else ()
    source: tuple[Buffer, ...] = ()
    also: tuple[Buffer, ...] = ()
    if space == "ring" and k < shape.prefetched:
        kind, lane, also = TaskKind.PREFETCHED_PAGE, Lane.H2D if crosses else Lane.DISK, pinned
    elif space == "ring" and crosses:
        kind, lane, source = TaskKind.SEND_PAGE, Lane.H2D, pinned
    else:
        kind, lane = (TaskKind.READ_PAGE, Lane.DISK) if layout.from_disk[at] else (TaskKind.STAGE_PAGE, Lane.STAGE)
    return Task(
        kind=kind,
        lane=lane,
        page=layout.streamed[at],
        slot=slot,
        bytes=0 if kind is TaskKind.PREFETCHED_PAGE else layout.bytes_at(k),
        reads=source,
        writes=(Buffer(space=space, index=slot), *also),
    )


def expected_bytes(schedule: Schedule, layout: Layout, shape: PassShape) -> dict[Lane, int]:
    """Bytes that must cross each lane, by the ledger.

    Every streamed page once, less those prefetched by the pass before, plus those prefetched for the next pass (where
    only routed pages move, at most every page); and for each layer and micro-batch the transfers of attention and of
    the CPU's experts, in both directions.
    """
    layers, total = layout.model.num_layers, 0 if shape.routed_only else len(layout.streamed)
    moved = [k % total for k in range(shape.prefetched, total + len(schedule.prefetched_next))] if total else []
    from_disk = sum(layout.bytes_at(k) for k in moved if layout.from_disk[k])
    sizes: Counter[Lane] = Counter()
    sizes[Lane.DISK] += from_disk
    for lane in layout.page_lanes if shape.routed_only else ():
        sizes[lane] += sum(layout.most_chosen_bytes(layer, lane) for layer in range(layers))
    if layout.pages_cross:
        stages = (k for k in moved if layout.stops(k) and not layout.from_disk[k])
        sizes[Lane.STAGE] += sum(layout.bytes_at(k) for k in stages)
        sizes[Lane.H2D] += sum(layout.bytes_at(k) for k in moved)
    for micro_batch in shape.micro_batches if layout.discrete else ():
        for layer in range(layers):
            sizes[Lane.D2H] += layout.cpu_layers[layer] * _routed(layout, micro_batch, layer)
            sizes[Lane.H2D] += layout.cpu_layers[layer] * _residual(layout, micro_batch, layer)
            if micro_batch.prefill_only or layout.attention == "gpu":
                sizes[Lane.D2H] += _kv(layout, micro_batch, layer)
                if loads_context(layout, micro_batch):
                    sizes[Lane.H2D] += _context(layout, micro_batch, layer)
            else:
                sizes[Lane.D2H] += _qkv(layout, micro_batch, layer)
                sizes[Lane.H2D] += _attention(layout, micro_batch, layer)
    for micro_batch in shape.micro_batches:
        sums = sum(is_summed(layout, micro_batch, layer) for layer in range(layers))
        sizes[Lane.EXCHANGE] += sums * _summed(layout, micro_batch, 0)
    return {lane: size for lane, size in sizes.items() if size}


_COMPARED = ("kind", "lane", "layers", "slot", "bytes", "reads", "writes")


def validate(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Check every invariant of ``schedule`` as a pass of ``shape`` through ``layout``.

    Raises:
        ScheduleError: names the invariant and the tasks that break it.
    """
    order = HappensBefore(schedule)
    _check_phases(schedule, layout, shape)
    _check_turns(schedule, layout, shape)
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
    wanted = phase_counts(schedule, layout, shape)
    if done != wanted:
        missing, extra = wanted - done, done - wanted
        label, which = ("misses", missing) if missing else ("repeats or invents", extra)
        kind, layer, j = next(iter(which))
        raise ScheduleError(f"the pass {label} {kind}({layer},{j})")
    for task in cost_model:
        _compare(task, phase(layout, shape, task.kind, task.layer, task.micro_batch, task.experts))


def _check_turns(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    """Check that the turns of a layer compute its experts in the order of their numbers, each once, and that a turn
    reads no more pages than `Layout.turn_parts`, so that the ring has room for others meanwhile."""
    every, done, last = layout.model.experts.num_experts, dict[int, int](), dict[int, Task]()
    for task in schedule.tasks:
        if task.experts is None:
            continue
        if task.experts.start != done.get(task.layer, 0) or not task.experts or task.micro_batch != ALL:
            raise ScheduleError(f"{task.name} computes experts {task.experts} out of turn")
        if len(pages_read(layout, task.layer, task.experts)) > layout.turn_parts:
            raise ScheduleError(f"{task.name} reads more pages than a turn")
        done[task.layer], last[task.layer] = task.experts.stop, task
    for layer, stop in done.items():
        if stop != every:
            raise ScheduleError(f"{last[layer].name} is the last turn, and ends with expert {stop} of {every}")


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
            _compare(task, page_task(layout, shape, k, space))
            for buffer in task.reads:
                if held.get(buffer) != k:
                    raise ScheduleError(f"{task.name} finds {_held(layout, held, buffer)} in {buffer}")
            held.update(dict.fromkeys(task.writes, k))
            if space == "ring":
                arrivals[k] = number
        elif reads_ring(layout, task.kind) and not shape.routed_only:
            for k in pages_read(layout, task.layer, task.experts):
                buffer = Buffer(space="ring", index=k % layout.ring_slots)
                if held.get(buffer) != k:
                    result, wanted = _held(layout, held, buffer), _page_name(layout, k)
                    raise ScheduleError(f"{task.name} finds {result} in {buffer}, not {wanted}")
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
            done = [item for item in routers.get(task.layer, ()) if order(item, position)]
            if len(done) < len(shape.micro_batches):
                raise ScheduleError(f"{task.name} moves before every router of its layer has chosen")
            if task.kind in CHOSEN_KINDS and not all(order(reader, position) for reader in readers):
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
        if appends(layout, task.kind):
            before = last.get((task.lane, task.layer))
            if before is not None and before.micro_batch > task.micro_batch:
                raise ScheduleError(f"{task.name} comes after {before.name}, which may need its keys and values")
            last[task.lane, task.layer] = task


def _compare(task: Task, wanted: Task) -> None:
    if replace(task, deps=()) == wanted:
        return
    for field in _COMPARED:
        result, right = getattr(task, field), getattr(wanted, field)
        if result != right:
            raise ScheduleError(f"{task.name}: {field} is {result!s}, not {right!s}")
    raise ScheduleError(f"{task.name} is not {wanted.name}")


def _check_bytes(schedule: Schedule, layout: Layout, shape: PassShape) -> None:
    wanted = expected_bytes(schedule, layout, shape)
    result = {lane: size for lane, size in schedule.lane_bytes().items() if size}
    if result != wanted:
        raise ScheduleError(f"the pass moves {result} bytes, the ledger says {wanted}")
