"""What the validator must catch: every way of breaking a schedule that would give wrong tokens or wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ScheduleError
from moelight.core.policy import Shares
from moelight.core.schedule import Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape
from moelight.scheduler.requirements import misfit
from tests.scheduler.validate import HappensBefore, validate
from tests.shapes import examples, small_layout
from tests.virtual import VirtualMachine

CONTEXT = MicroBatchShape(tokens=3)
FRESH = MicroBatchShape(tokens=5, prefill_only=True)
LAYOUTS = {
    "link": small_layout(experts=5, resident=2, host=4),
    "parts": small_layout(experts=3, resident=1, host=3, in_parts=True),
    "no link": small_layout(discrete=False, resident=2),
    "nothing streamed": small_layout(resident=8),
    "device attends": small_layout(experts=3, resident=1, host=3, attention_device="gpu"),
    "pinned homes": small_layout(experts=5, resident=2, host=5, host_pages="pinned"),
    "device attends at home": small_layout(host=5, attention_device="gpu", kv=Shares(device=1.0)),
    "split": small_layout(experts=5, resident=2, host=6, ffn_device="split", cpu_experts=0.3),
    "experts on the CPU": small_layout((True, False, True), experts=3, resident=3, ffn_device="cpu"),
    "ranks": small_layout((True, False, True), experts=3, resident=2, host=3, ranks=2),
    "ranks, no link": small_layout((True, False, True), experts=3, discrete=False, resident=4, ranks=2),
    "small ring": small_layout(experts=5, resident=2, host=4, ring_pages=3),
    "small ring, no link": small_layout(experts=6, discrete=False, resident=1, ring_pages=8),
}
PAIRS = [
    (kind, builder)
    for kind, layout in LAYOUTS.items()
    for builder in SCHEDULES.names()
    if misfit(
        builder,
        discrete=layout.discrete,
        attention=layout.attention,
        experts=layout.experts,
        small_ring=layout.turn_parts > 0,
    )
    is None
]


def shape_of(layout: Layout) -> PassShape:
    prefetched = min(len(layout.layer_pages[0]), layout.ring_slots)
    batches = (CONTEXT, FRESH, CONTEXT) if layout.discrete else (CONTEXT,) * 3
    if layout.context_crosses:
        batches = (replace(CONTEXT, context=9), FRESH, replace(CONTEXT, context=7, continues=True))
    return PassShape(micro_batches=batches, prefetched=prefetched, wraps=True, whole_layers=not layout.discrete)


def usual(layout: Layout) -> str:
    return "module" if layout.turn_parts else "cgopipe"


def build(layout: Layout, builder: str | None = None) -> Schedule:
    return SCHEDULES.get(builder or usual(layout))(layout, shape_of(layout))


def refused(schedule: Schedule, layout: Layout, match: str | None = None) -> None:
    with pytest.raises(ScheduleError, match=match):
        validate(schedule, layout, shape_of(layout))


def with_task(schedule: Schedule, position: int, **changes: object) -> Schedule:
    tasks = list(schedule.tasks)
    tasks[position] = replace(tasks[position], **changes)  # type: ignore[arg-type]
    return replace(schedule, tasks=tuple(tasks))


def without(schedule: Schedule, position: int) -> Schedule:
    """Drop a task; whoever waited for it waits for what it waited for."""

    def moved(dep: int) -> int:
        return dep - (dep > position)

    gone = schedule.tasks[position]
    tasks = []
    for task in (task for at, task in enumerate(schedule.tasks) if at != position):
        deps = [moved(d) for dep in task.deps for d in (gone.deps if dep == position else (dep,))]
        tasks.append(replace(task, deps=tuple(dict.fromkeys(deps))))
    prefetched_next = tuple(moved(p) for p in schedule.prefetched_next if p != position)
    return replace(schedule, tasks=tuple(tasks), prefetched_next=prefetched_next)


def swapped(schedule: Schedule, position: int) -> Schedule:
    """Exchange a task and the next one."""
    present = {position: position + 1, position + 1: position}
    tasks = [
        replace(task, deps=tuple(present.get(dep, dep) for dep in task.deps))
        for task in (schedule.tasks[present.get(at, at)] for at in range(len(schedule.tasks)))
    ]
    return replace(
        schedule, tasks=tuple(tasks), prefetched_next=tuple(present.get(p, p) for p in schedule.prefetched_next)
    )


def reaches(schedule: Schedule, first: int, last: int) -> bool:
    """Whether ``last`` waits for ``first``, by walking back from it."""
    seen, todo = set(), [last]
    while todo:
        at = todo.pop()
        lane = schedule.tasks[at].lane
        before = [p for p in range(at) if schedule.tasks[p].lane is lane][-1:]
        for earlier in {*schedule.tasks[at].deps, *before} - seen:
            seen.add(earlier)
            todo.append(earlier)
    return first in seen


def test_a_page_whose_home_is_pinned_makes_no_stop() -> None:
    """Where all homes are in host memory there is no staging, no pinned ring, and no schedule that uses them passes."""
    layout = small_layout(experts=5, resident=2, host=8, host_pages="pinned")
    assert layout.pinned_slots == 0
    schedule = build(layout)
    assert Lane.STAGE not in schedule.lanes()
    sent = next(at for at, task in enumerate(schedule.tasks) if task.kind is TaskKind.SEND_PAGE)
    slot = Buffer(space="pinned", index=0)
    refused(with_task(schedule, sent, reads=(slot,)), layout)
    staged = replace(schedule.tasks[sent], kind=TaskKind.STAGE_PAGE, lane=Lane.STAGE, deps=(), reads=(), writes=(slot,))
    shifted = tuple(replace(task, deps=tuple(dep + 1 for dep in task.deps)) for task in schedule.tasks)
    prefetched = tuple(position + 1 for position in schedule.prefetched_next)
    stops = replace(schedule, tasks=(staged, *shifted), prefetched_next=prefetched)
    refused(stops, layout, "crosses from its home|brings its page to no ring|not wanted")


@pytest.mark.parametrize(("kind", "builder"), PAIRS)
def test_the_unbroken_schedules_pass(kind: str, builder: str) -> None:
    validate(build(LAYOUTS[kind], builder), LAYOUTS[kind], shape_of(LAYOUTS[kind]))


@pytest.mark.parametrize("builder", ["cgopipe", "fastdecode", "flexgen", "serial"])
def test_micro_batches_go_through_layers_in_place_in_one_task(builder: str) -> None:
    """A page of one layer is read, which has phases."""
    layout = small_layout((True,) * 4, experts=2, discrete=False, resident=7)
    moving = [layer for layer, pages in enumerate(layout.layer_pages) if pages]
    shape = PassShape(micro_batches=(CONTEXT, CONTEXT), whole_layers=True)
    schedule = SCHEDULES.get(builder)(layout, shape)
    validate(schedule, layout, shape)
    VirtualMachine(layout, Random(0)).run(schedule, shape)
    full = [task for task in schedule.tasks if task.kind is TaskKind.LAYERS]
    covered = sorted((layer, task.micro_batch) for task in full for layer in task.layers or ())
    assert covered == [(layer, j) for layer in range(4) for j in range(2) if layer not in moving]
    assert len(full) < len(covered)
    phases = {(task.layer, task.micro_batch) for task in schedule.tasks if task.kind is TaskKind.CPU_ATTENTION}
    assert phases == {(layer, j) for layer in moving for j in range(2)}


@pytest.mark.parametrize("builder", ["module", "flexgen-loop"])
def test_orders_that_part_attention_and_experts_keep_them_apart(builder: str) -> None:
    layout = small_layout((True, True), experts=2, discrete=False, resident=4)
    shape = PassShape(micro_batches=(CONTEXT,), whole_layers=True)
    schedule = SCHEDULES.get(builder)(layout, shape)
    validate(schedule, layout, shape)
    assert TaskKind.LAYERS not in {task.kind for task in schedule.tasks}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_happens_before_is_what_walking_back_finds(kind: str) -> None:
    schedule = build(LAYOUTS[kind])
    order = HappensBefore(schedule)
    for first in range(len(schedule.tasks)):
        for last in range(first + 1, len(schedule.tasks), 3):
            assert order(first, last) == reaches(schedule, first, last)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_dependency_can_be_spared(kind: str) -> None:
    """CGOPipe's tasks, and those behind a small ring, wait for nothing without need: without any one dependency that
    no other implies, it fails."""
    layout = LAYOUTS[kind]
    schedule, needed = build(layout), 0
    for position, task in enumerate(schedule.tasks):
        for dep in task.deps:
            broken = with_task(schedule, position, deps=tuple(d for d in task.deps if d != dep))
            if not reaches(broken, dep, position):
                needed += 1
                refused(broken, layout, "in no fixed order")
    assert needed > 2


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_missing_or_repeated_task_is_named(kind: str) -> None:
    layout = LAYOUTS[kind]
    schedule = build(layout)
    for position, task in enumerate(schedule.tasks):
        if not layout.pages_cross and position in schedule.prefetched_next[-1:]:
            continue  # a pass may carry fewer pages
        refused(without(schedule, position), layout)
        twice = replace(schedule, tasks=(*schedule.tasks, replace(task, deps=(len(schedule.tasks) - 1,))))
        refused(twice, layout)
        if task.page is None:
            name = task.name.replace("(", r"\(").replace(")", r"\)")
            refused(without(schedule, position), layout, f"misses {name}")
            refused(twice, layout, f"repeats or invents {name}")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_field_of_every_task_counts(kind: str) -> None:
    layout = LAYOUTS[kind]
    schedule = build(layout)
    for position, task in enumerate(schedule.tasks):
        name = task.name.replace("(", r"\(").replace(")", r"\)")
        changes: dict[str, object] = {"bytes": task.bytes + 4}
        changes["lane"] = Lane.STAGE if task.lane is not Lane.STAGE else Lane.DISK
        if task.reads:
            changes["reads"] = task.reads[1:]
        if task.writes:
            changes["writes"] = (replace(task.writes[0], index=task.writes[0].index + 1),)
        if task.page is not None:
            changes["slot"] = task.slot + 1
        if task.experts is not None:
            changes["experts"] = range(task.experts.start, task.experts.stop + 1)
        for field, value in changes.items():
            refused(with_task(schedule, position, **{field: value}), layout, name)


@pytest.mark.parametrize("kind", ["link", "no link"])
def test_pages_of_one_layer_cannot_change_places(kind: str) -> None:
    """The page store finds page k in slot k: the right pages in the wrong slots would be the wrong experts."""
    layout = LAYOUTS[kind]
    schedule = build(layout)
    into_ring = [p for p, task in enumerate(schedule.tasks) if any(b.space == "ring" for b in task.writes)]
    first, second = [p for p in into_ring if schedule.tasks[p].page.layer == 1][:2]  # type: ignore[union-attr]
    one, two = schedule.tasks[first], schedule.tasks[second]
    refused(with_task(with_task(schedule, first, page=two.page), second, page=one.page), layout)
    places = [{"slot": task.slot, "writes": task.writes} for task in (two, one)]
    refused(with_task(with_task(schedule, first, **places[0]), second, **places[1]), layout)


def test_a_slot_is_not_overwritten_while_it_is_read() -> None:
    """The pinned ring: a page fetched into a slot before the slot's last page was sent on."""
    layout = small_layout((True, True, True), experts=5, host=15)
    shape = PassShape(micro_batches=(CONTEXT,) * 4)
    schedule = SCHEDULES.get("cgopipe")(layout, shape)
    late = next(p for p, t in enumerate(schedule.tasks) if t.kind is TaskKind.STAGE_PAGE and t.deps)
    with pytest.raises(ScheduleError, match=r"both touch Buffer\(space='pinned'"):
        validate(with_task(schedule, late, deps=()), layout, shape)


def test_experts_do_not_run_before_their_page_comes() -> None:
    """Its slot still holds a page of two layers before: every order is fixed, and yet the weights would be wrong."""
    layout = small_layout((True, True, True), host=12)
    shape = PassShape(micro_batches=(CONTEXT,) * 2)
    schedule = SCHEDULES.get("cgopipe")(layout, shape)
    late = next(p for p, t in enumerate(schedule.tasks) if t.name == "send_page(2:e1)")
    send = schedule.tasks[late]
    rest = without(schedule, late)
    staged = next(p for p, t in enumerate(rest.tasks) if t.name == "stage_page(2:e1)")
    broken = replace(rest, tasks=(*rest.tasks, replace(send, deps=(staged, len(rest.tasks) - 1))))
    with pytest.raises(ScheduleError, match=r"post_attention\(2,0\) finds page 0:e1 .* not page 2:e1"):
        validate(broken, layout, shape)


def test_dependencies_point_backwards() -> None:
    layout = LAYOUTS["link"]
    schedule = build(layout)
    for dep in (5, 6, len(schedule.tasks), -1):
        refused(with_task(schedule, 5, deps=(dep,)), layout, "which is not before it")


def test_what_is_carried_is_checked() -> None:
    layout = LAYOUTS["link"]
    schedule = build(layout)
    out = schedule.prefetched_next
    for wrong in ((), out[1:], out[:-1], out[::-1], (*out, 0)):
        refused(replace(schedule, prefetched_next=wrong), layout, "carried_out|bytes")
    for advance in (0, schedule.stream_advance + 1):
        refused(replace(schedule, stream_advance=advance), layout, "advances the stream")
    with pytest.raises(ScheduleError, match="may never come"):
        validate(schedule, layout, replace(shape_of(layout), wraps=False))
    with pytest.raises(ScheduleError):
        validate(schedule, layout, replace(shape_of(layout), prefetched=0))


def test_a_page_nobody_wants_is_refused() -> None:
    layout = LAYOUTS["link"]
    schedule = build(layout)
    stranger = Page(layer=9, expert=0)
    task = Task(kind=TaskKind.READ_PAGE, lane=Lane.DISK, page=stranger, writes=(Buffer(space="pinned", index=0),))
    refused(replace(schedule, tasks=(*schedule.tasks, task)), layout, "not wanted")
    refused(replace(schedule, tasks=(*schedule.tasks, replace(task, writes=()))), layout, "no ring")


def test_micro_batches_fill_the_cache_in_order() -> None:
    """A prompt may be cut over micro-batches 0 and 1, so 1 must not attend first."""
    layout = LAYOUTS["no link"]
    shape = PassShape(micro_batches=(CONTEXT, CONTEXT))
    schedule = SCHEDULES.get("cgopipe")(layout, shape)
    renamed = replace(schedule, tasks=tuple(_other(task) for task in schedule.tasks))
    with pytest.raises(ScheduleError, match="may need its keys and values"):
        validate(renamed, layout, shape)


def _other(task: Task) -> Task:
    """The same task of the other of two micro-batches."""
    if task.page is not None:
        return task

    def renamed(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(b if b.space == "ring" else replace(b, index=1 - b.index) for b in buffers)

    return replace(task, micro_batch=1 - task.micro_batch, reads=renamed(task.reads), writes=renamed(task.writes))


MUTATIONS: dict[str, Callable[[Schedule, int, Random], Schedule]] = {
    "swap": lambda schedule, p, _: swapped(schedule, min(p, len(schedule.tasks) - 2)),
    "forget": lambda schedule, p, random: with_task(
        schedule, p, deps=tuple(random.sample(schedule.tasks[p].deps, len(schedule.tasks[p].deps) // 2))
    ),
    "drop": lambda schedule, p, _: without(schedule, p),
    "redirect": lambda schedule, p, random: with_task(
        schedule, p, writes=tuple(replace(b, index=random.randrange(10)) for b in schedule.tasks[p].writes)
    ),
    "exchange pages": lambda schedule, p, random: with_task(
        schedule, p, page=schedule.tasks[p].page and random.choice([t.page for t in schedule.tasks if t.page])
    ),
}


@examples(400)
@given(
    pair=st.sampled_from([pair for pair in PAIRS if pair[0] != "nothing streamed"]),
    mutation=st.sampled_from(sorted(MUTATIONS)),
    where=st.floats(0, 1, exclude_max=True),
    random=st.randoms(use_true_random=False),
)
def test_what_the_validator_lets_through_runs(
    pair: tuple[str, str], mutation: str, where: float, random: Random
) -> None:
    """However a schedule is broken: either it is refused, or it works in any order of events."""
    kind, builder = pair
    layout = LAYOUTS[kind]
    shape = shape_of(layout)
    schedule = build(layout, builder)
    broken = MUTATIONS[mutation](schedule, int(where * len(schedule.tasks)), random)
    try:
        validate(broken, layout, shape)
    except ScheduleError:
        return
    first = PassShape(micro_batches=shape.micro_batches, wraps=True)
    for _ in range(3):
        machine = VirtualMachine(layout, random)
        machine.run(SCHEDULES.get(usual(layout))(layout, first), first)
        machine.run(broken, shape)
