"""Every builder's schedule, for any small model, placement and pass: valid, and of exactly the bytes there must be."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.schedule import Lane, Schedule, TaskKind
from moelight.hrm import costs
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.validate import expected_bytes, validate
from tests.shapes import examples, layouts, micro_batches
from tests.virtual import VirtualMachine

BUILDERS = SCHEDULES.names()
Chain = tuple[Layout, list[PassShape], list[Schedule]]


@st.composite
def chains(draw: st.DrawFn, builder: str) -> Chain:
    """Up to four passes in a row, each carrying in what the one before it fetched; another may follow the last."""
    layout = draw(layouts())
    passes = draw(st.lists(micro_batches(discrete=layout.discrete), min_size=1, max_size=4))
    shapes: list[PassShape] = []
    schedules: list[Schedule] = []
    carried = 0
    for each in passes:
        shapes.append(PassShape(micro_batches=each, carried=carried, wraps=draw(st.booleans())))
        schedules.append(SCHEDULES.get(builder)(layout, shapes[-1]))
        carried = len(schedules[-1].carried_out)
    return layout, shapes, schedules


@pytest.mark.parametrize("builder", BUILDERS)
@examples(80)
@given(data=st.data())
def test_every_schedule_validates(builder: str, data: st.DataObject) -> None:
    layout, shapes, schedules = data.draw(chains(builder))
    for shape, schedule in zip(shapes, schedules, strict=True):
        validate(schedule, layout, shape)
        assert schedule.builder == builder


@pytest.mark.parametrize("builder", BUILDERS)
@examples(80)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_passes_chain_whatever_the_lanes_do(builder: str, data: st.DataObject, random: Random) -> None:
    """In any order of events, over several passes, experts find their pages and every value arrives in time."""
    layout, shapes, schedules = data.draw(chains(builder))
    machine = VirtualMachine(layout, random)
    for shape, schedule in zip(shapes, schedules, strict=True):
        assert machine.carried == shape.carried
        machine.run(schedule, shape)


@pytest.mark.parametrize("builder", BUILDERS)
@examples(60)
@given(data=st.data())
def test_bytes_are_the_ledgers(builder: str, data: st.DataObject) -> None:
    layout, shapes, schedules = data.draw(chains(builder))
    for shape, schedule in zip(shapes, schedules, strict=True):
        assert {lane: size for lane, size in schedule.lane_bytes().items() if size} == expected_bytes(
            schedule, layout, shape
        )


@pytest.mark.parametrize("builder", BUILDERS)
@examples(60)
@given(data=st.data())
def test_weights_cross_once_a_pass_whatever_rides_in_it(builder: str, data: st.DataObject) -> None:
    """A chain that ends without another pass moves the streamed pages once per pass: no more for more micro-batches,
    no fewer for pages carried over."""
    layout, shapes, schedules = data.draw(chains(builder))
    last = PassShape(micro_batches=shapes[-1].micro_batches, carried=shapes[-1].carried, wraps=False)
    schedules[-1] = SCHEDULES.get(builder)(layout, last)
    times = {page: dict.fromkeys(TaskKind, 0) for page in layout.streamed}
    for schedule in schedules:
        for task in schedule.tasks:
            if task.page is not None:
                times[task.page][task.kind] += 1
                assert task.bytes == (0 if task.kind is TaskKind.CARRIED_PAGE else layout.page_bytes)
    for page, from_disk in zip(layout.streamed, layout.from_disk, strict=True):
        crossings = {kind: count for kind, count in times[page].items() if count and kind is not TaskKind.CARRIED_PAGE}
        steps = [TaskKind.READ_PAGE if from_disk else TaskKind.STAGE_PAGE]
        assert crossings == dict.fromkeys(steps + [TaskKind.SEND_PAGE] * layout.discrete, len(schedules))


@pytest.mark.parametrize("builder", BUILDERS)
@examples(60)
@given(data=st.data())
def test_two_crossings_per_layer_and_micro_batch(builder: str, data: st.DataObject) -> None:
    """Down with q, k and v, up with the output; a fresh prompt's keys and values go down once and nothing comes up."""
    layout, shapes, schedules = data.draw(chains(builder))
    model, dtype = layout.model, layout.dtype
    for shape, schedule in zip(shapes, schedules, strict=True):
        crossings: dict[tuple[int, int], list[tuple[Lane, int]]] = {}
        for task in schedule.tasks:
            if task.page is None and task.bytes:
                crossings.setdefault((task.layer, task.micro_batch), []).append((task.lane, task.bytes))
        if not layout.discrete:
            assert not crossings
            continue
        for j, micro_batch in enumerate(shape.micro_batches):
            n = micro_batch.tokens
            wanted = [(Lane.D2H, costs.qkv_bytes(model, dtype, n)), (Lane.H2D, costs.hidden_bytes(model, dtype, n))]
            if micro_batch.fresh:
                wanted = [(Lane.D2H, costs.kv_bytes(model, dtype, n))]
            for layer in range(model.num_layers):
                assert crossings[layer, j] == wanted


@pytest.mark.parametrize("builder", BUILDERS)
@examples(60)
@given(data=st.data())
def test_only_a_pass_that_wraps_fetches_for_the_next(builder: str, data: st.DataObject) -> None:
    """What is carried is the whole first layer or nothing, and nothing where no pass follows for sure."""
    layout, shapes, schedules = data.draw(chains(builder))
    for shape, schedule in zip(shapes, schedules, strict=True):
        carried = [schedule.tasks[position].page for position in schedule.carried_out]
        wraps = shape.wraps and builder == "cgopipe"
        assert carried == ([layout.streamed[k] for k in layout.layer_pages[0]] if wraps else [])
        assert schedule.stream_advance == len(layout.streamed)
