"""Every builder's schedule, for any small model, placement and pass: valid, and of exactly the bytes there must be."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.schedule import Lane, Schedule, TaskKind
from moelight.hrm import costs
from moelight.hrm.costs import PAGE_ALIGNMENT
from moelight.hrm.placement import moved, place_pages
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES
from moelight.profiles.tensor_list import pages
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import EXPERT_PLACES, Layout, MicroBatchShape, PassShape, layout_of
from moelight.scheduler.requirements import misfit
from tests.scheduler.validate import expected_bytes, validate
from tests.shapes import examples, layouts, micro_batches, models, small_policy
from tests.virtual import VirtualMachine

BUILDERS = SCHEDULES.names()
Chain = tuple[Layout, list[PassShape], list[Schedule]]


@st.composite
def chains(draw: st.DrawFn, builder: str, layout: Layout | None = None) -> Chain:
    """Up to four passes in a row, each carrying in what the one before it fetched; another may follow the last."""
    layout = layout or draw(layouts(builder))
    passes = draw(st.lists(micro_batches(layout), min_size=1, max_size=4))
    shapes: list[PassShape] = []
    schedules: list[Schedule] = []
    prefetched = 0
    for item in passes:
        routed_only = builder in ON_DEMAND_SCHEDULES and not layout.turn_parts and draw(st.booleans())
        ahead = routed_only and draw(st.booleans())
        shapes.append(
            PassShape(
                micro_batches=item,
                prefetched=prefetched,
                wraps=draw(st.booleans()),
                routed_only=routed_only,
                ahead=ahead,
                predict_experts=ahead and draw(st.booleans()),
            )
        )
        schedules.append(SCHEDULES.get(builder)(layout, shapes[-1]))
        prefetched = len(schedules[-1].prefetched_next)
    return layout, shapes, schedules


@pytest.mark.parametrize("builder", BUILDERS)
@examples(50)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_schedules_are_valid_and_move_what_they_must(builder: str, data: st.DataObject, random: Random) -> None:
    """And passes chain whatever the lanes do: in any order of events, over several passes, experts find their pages and
    every value arrives in time."""
    layout, shapes, schedules = data.draw(chains(builder))
    machine = VirtualMachine(layout, random)
    for shape, schedule in zip(shapes, schedules, strict=True):
        validate(schedule, layout, shape)
        assert schedule.builder == builder
        assert {lane: size for lane, size in schedule.lane_bytes().items() if size} == expected_bytes(
            schedule, layout, shape
        )
        check_crossings(layout, shape, schedule)
        check_what_is_carried(layout, shape, schedule)
        assert machine.prefetched == shape.prefetched
        machine.run(schedule, shape)
    check_weights_cross_once_a_pass(layout, shapes, schedules)


def check_weights_cross_once_a_pass(layout: Layout, shapes: list[PassShape], schedules: list[Schedule]) -> None:
    """A chain that ends without another pass moves the streamed pages once per pass: no more for more micro-batches,
    no fewer for pages carried over. One of routed pages names none, and finds those that were carried in."""
    last = replace(shapes[-1], wraps=False)
    schedules = [*schedules[:-1], SCHEDULES.get(schedules[-1].builder)(layout, last)]
    times = {page: dict.fromkeys(TaskKind, 0) for page in layout.streamed}
    for schedule in schedules:
        for task in schedule.tasks:
            if task.page is not None:
                times[task.page][task.kind] += 1
                size = len(layout.parts[task.page.part])
                assert task.bytes == (0 if task.kind is TaskKind.PREFETCHED_PAGE else size)
    full = sum(not shape.routed_only for shape in (*shapes[:-1], last))
    for k, (page, from_disk) in enumerate(zip(layout.streamed, layout.from_disk, strict=True)):
        crossings = {
            kind: count for kind, count in times[page].items() if count and kind is not TaskKind.PREFETCHED_PAGE
        }
        wanted = full + sum(shape.routed_only and k < shape.prefetched for shape in shapes)
        stages = [] if layout.pinned_pages else [TaskKind.STAGE_PAGE]
        steps = [TaskKind.READ_PAGE] if from_disk else stages
        steps += [TaskKind.SEND_PAGE] * layout.pages_cross
        assert crossings == (dict.fromkeys(steps, wanted) if wanted else {})


def crossings(layout: Layout, micro_batch: MicroBatchShape, layer: int) -> list[tuple[Lane, int]]:
    """What one micro-batch sends over the link in one layer, in its own order."""
    model, dtype, n = layout.model, layout.dtype, micro_batch.tokens
    moved: list[tuple[Lane, int]] = []
    if layout.attention == "gpu":
        up, down = micro_batch.context - micro_batch.device_context, n - micro_batch.device_tokens
        if layout.kv_host and up and not micro_batch.prefill_only:
            moved.append((Lane.H2D, up * costs.kv_layer_bytes(model, layout.kv_dtype, layer)))
        if layout.kv_host and down:
            moved.append((Lane.D2H, down * costs.kv_layer_bytes(model, layout.kv_dtype, layer)))
    elif micro_batch.prefill_only:
        moved.append((Lane.D2H, n * costs.kv_layer_bytes(model, dtype, layer)))
    else:
        moved.append((Lane.D2H, costs.qkv_bytes(model, dtype, n, layer)))
        moved.append((Lane.H2D, costs.hidden_bytes(model, dtype, n, layer)))
    some_on_cpu = layout.experts == "host" or any(page.layer == layer for page in layout.computed)
    if model.moe_layers[layer] and some_on_cpu:
        residual = n * model.hidden_size * dtype.itemsize
        moved += [(Lane.D2H, residual + n * 8 * model.router.top_k), (Lane.H2D, residual)]
    return [(lane, size) for lane, size in moved if size]


def check_crossings(layout: Layout, shape: PassShape, schedule: Schedule) -> None:
    """Attention's inputs down and output up, or the context up and new keys and values down; a fresh prompt's keys and
    values down; hidden states both ways, and what chose their experts down, where the CPU computes some. Nothing else,
    and nothing without a link."""
    result: dict[tuple[int, int], list[tuple[Lane, int]]] = {}
    for task in schedule.tasks:
        if not task.kind.moves_page and task.bytes and task.lane is not Lane.EXCHANGE:
            result.setdefault((task.layer, task.micro_batch), []).append((task.lane, task.bytes))
    if not layout.discrete:
        assert not result
        return
    for j, micro_batch in enumerate(shape.micro_batches):
        for layer in range(layout.model.num_layers):
            assert result.get((layer, j), []) == crossings(layout, micro_batch, layer)


def check_what_is_carried(layout: Layout, shape: PassShape, schedule: Schedule) -> None:
    """The whole first layer (or what of it the ring holds) or nothing, and nothing where no pass follows for sure."""
    prefetched = [schedule.tasks[position].page for position in schedule.prefetched_next]
    wraps = shape.wraps and not shape.routed_only and schedule.builder not in ("serial", "flexgen-loop")
    first = layout.layer_pages[0][: layout.ring_slots]
    assert prefetched == ([layout.streamed[k] for k in first] if wraps else [])
    assert schedule.stream_advance == len(layout.streamed)


@st.composite
def uneven(draw: st.DrawFn, builder: str) -> Layout:
    """A pipeline whose residents have changed: any of them are near, so layers stream as many pages as they like, while
    the rings are as large as before."""
    model = draw(models())
    total = len(pages(model))
    places = [("cpu", "gpu", True), ("gpu", "gpu", True), ("cpu", "split", True), ("cpu", "cpu", False)]
    fitting = [
        (attention, ffn, discrete)
        for attention, ffn, discrete in places
        if misfit(builder, discrete=discrete, attention=attention, experts=EXPERT_PLACES[ffn]) is None
    ]
    attention, ffn, discrete = draw(st.sampled_from(fitting))
    resident = draw(st.integers(1, total))
    host = draw(st.integers(0, total - resident)) if discrete else 0
    policy = replace(
        small_policy(model, discrete=discrete, resident=resident, host=host),
        attention_device=attention,
        ffn_device=ffn,
        cpu_experts=draw(st.integers(0, host)) / total if ffn == "split" else 0.0,
        host_pages=draw(st.sampled_from(["staged", "pinned"])),
        residents="learned",
    )
    before = place_pages(model, policy)
    assume(before.streamed)
    order = draw(st.permutations(list(before.tiers)))
    part_bytes = draw(st.sampled_from((1, 2))) * PAGE_ALIGNMENT
    how: dict[str, Any] = {"discrete": discrete, "part_bytes": part_bytes}
    fixed = layout_of(model, policy, FLOAT32, **how)
    after = layout_of(model, policy, FLOAT32, placement=moved(before, frozenset(order[:resident])), **how)
    return replace(after, ring_slots=fixed.ring_slots, pinned_slots=fixed.pinned_slots)


@pytest.mark.parametrize("builder", BUILDERS)
@examples(60)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_layers_of_any_sizes_share_one_ring(builder: str, data: st.DataObject, random: Random) -> None:
    """Where two layers do not fit into it, the second waits until the first has been read; in any order of events."""
    layout = data.draw(uneven(builder))
    _, shapes, schedules = data.draw(chains(builder, layout))
    machine = VirtualMachine(layout, random)
    for shape, schedule in zip(shapes, schedules, strict=True):
        validate(schedule, layout, shape)
        assert machine.prefetched == shape.prefetched
        machine.run(schedule, shape)
