"""Passes launched behind one another: whatever they share, nobody writes what an earlier pass still reads."""

from __future__ import annotations

import threading
import time
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.schedule import Buffer, Lane, Schedule, Task, TaskKind
from moelight.core.timeline import Timeline
from moelight.runtime.executor import Executor, PassInFlight
from moelight.runtime.lanes import ThreadLane, Work
from moelight.runtime.machine import find_machine, open_lanes
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape
from tests.shapes import examples, layouts, micro_batches, small_layout

# Arenas that every pass uses again; tensors of micro-batches belong to one pass.
SHARED = {"hidden", "qkv_host", "attn_host", "routed_host", "experts_host", "ring", "pinned", "context"}


def places(buffers: tuple[Buffer, ...], layout: Layout, position: int) -> set[tuple[str, int]]:
    """Where they really are, for a pass whose page stream stands at ``position``. What micro-batches share by rows is
    taken as one place."""
    slots = {"ring": layout.ring_slots, "pinned": layout.pinned_slots}
    result = set()
    for buffer in buffers:
        if buffer.space in slots:
            result.add((buffer.space, (position + buffer.index) % slots[buffer.space]))
        elif buffer.space in SHARED:
            result.add((buffer.space, buffer.index if buffer.space == "context" else 0))
    return result


def conflicts(earlier: tuple[Task, int], later: tuple[Task, int], layout: Layout) -> bool:
    (one, at), (two, then) = earlier, later
    read, written = places(one.reads, layout, at), places(one.writes, layout, at)
    new_reads, new = places(two.reads, layout, then), places(two.writes, layout, then)
    return bool(new & (read | written) or new_reads & written)


def check(timelines: list[Timeline], schedules: list[Schedule], layout: Layout) -> None:
    positions = list(accumulate((schedule.stream_advance for schedule in schedules), initial=0))
    original = [{id(task) for task in schedule.tasks} for schedule in schedules]
    for number, timeline in enumerate(timelines[1:], start=1):
        for later in timeline.spans:
            if id(later.task) not in original[number]:
                continue  # fetched by the pass before, under its own schedule
            for earlier in timelines[number - 1].spans:
                if id(earlier.task) not in original[number - 1]:
                    continue
                pair = (earlier.task, positions[number - 1]), (later.task, positions[number])
                if conflicts(*pair, layout):
                    assert earlier.end_s <= later.start_s, f"{later.task.name} beside the earlier {earlier.task.name}"


@pytest.mark.parametrize("schedule", SCHEDULES.names())
@examples(8)
@given(data=st.data())
def test_nothing_is_overwritten_while_an_earlier_pass_needs_it(schedule: str, data: st.DataObject) -> None:
    """Two passes on their way at any time, on threads, with works that take any time."""
    layout = data.draw(layouts(schedule).filter(lambda layout: layout.discrete))
    passes = [data.draw(micro_batches(layout)) for _ in range(3)]
    random = Random(data.draw(st.integers(0, 1 << 20)))

    def perform(task: Task) -> Work:
        slow = random.random() < 0.3
        return lambda: time.sleep(0.001 if slow else 0.0)

    executor = Executor({lane: ThreadLane(str(lane)) for lane in Lane})
    flights, timelines, schedules = list[PassInFlight](), list[Timeline](), list[Schedule]()
    try:
        for number, shapes in enumerate(passes):
            shape = PassShape(micro_batches=shapes, prefetched=executor.prefetched, wraps=number < len(passes) - 1)
            schedules.append(SCHEDULES.get(schedule)(layout, shape))
            flights.append(executor.launch(schedules[-1], perform))
            if len(flights) == 2:
                timelines.append(executor.finish(flights.pop(0)))
        timelines += [executor.finish(in_flight) for in_flight in flights]
    finally:
        executor.close()
    check(timelines, schedules, layout)


def test_a_pass_is_launched_while_the_one_before_is_at_work() -> None:
    """The first cannot end before the second is launched."""
    layout, launched = small_layout(resident=8), threading.Event()
    executor = Executor(open_lanes(find_machine("twin"), "threads"))
    schedule = SCHEDULES.get("cgopipe")(layout, PassShape(micro_batches=(MicroBatchShape(tokens=4),)))

    def work(task: Task) -> None:
        assert task.kind is not TaskKind.SAMPLE or launched.wait(60)

    def perform(task: Task) -> Work:
        return lambda: work(task)

    one = executor.launch(schedule, perform)
    two = executor.launch(schedule, perform)
    launched.set()
    first, second = executor.finish(one), executor.finish(two)
    executor.close()
    assert first.end_s <= second.start_s
