"""CGOPipe's launch order is the paper's Algorithm 1, on passes."""

from __future__ import annotations

import pytest

from moelight.core.schedule import Lane, Schedule, TaskKind
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape
from tests.shapes import small_layout

# 2 layers, 4 micro-batches, 4 pages a layer, in a steady pass: page j of the next layer goes up between the hidden
# states of micro-batches j and j + 1 (W_PinToG), attention and staging (W_CtoPin) run two micro-batches ahead, and the
# last layer brings the first one's pages for the next pass.
ALGORITHM_1 = """
prefetched_page(0:e0) prefetched_page(0:e1) prefetched_page(0:e2) prefetched_page(0:e3)
embed(0,0) pre_attention(0,0) offload_qkv(0,0) cpu_attention(0,0)
embed(0,1) pre_attention(0,1) offload_qkv(0,1) cpu_attention(0,1)
stage_page(1:e0) stage_page(1:e1)

load_hidden(0,0) send_page(1:e0) post_attention(0,0)
    embed(0,2) pre_attention(0,2) offload_qkv(0,2) cpu_attention(0,2) stage_page(1:e2)
load_hidden(0,1) send_page(1:e1) post_attention(0,1)
    embed(0,3) pre_attention(0,3) offload_qkv(0,3) cpu_attention(0,3) stage_page(1:e3)
load_hidden(0,2) send_page(1:e2) post_attention(0,2)
    pre_attention(1,0) offload_qkv(1,0) cpu_attention(1,0) stage_page(0:e0)
load_hidden(0,3) send_page(1:e3) post_attention(0,3)
    pre_attention(1,1) offload_qkv(1,1) cpu_attention(1,1) stage_page(0:e1)

load_hidden(1,0) send_page(0:e0) post_attention(1,0)
    pre_attention(1,2) offload_qkv(1,2) cpu_attention(1,2) stage_page(0:e2) sample(1,0)
load_hidden(1,1) send_page(0:e1) post_attention(1,1)
    pre_attention(1,3) offload_qkv(1,3) cpu_attention(1,3) stage_page(0:e3) sample(1,1)
load_hidden(1,2) send_page(0:e2) post_attention(1,2) sample(1,2)
load_hidden(1,3) send_page(0:e3) post_attention(1,3) sample(1,3)
"""


def build(layout: Layout, n: int, *, prefetched: int = 0, wraps: bool = True, prefill_only: bool = False) -> Schedule:
    shape = PassShape(
        micro_batches=(MicroBatchShape(tokens=4, prefill_only=prefill_only),) * n, prefetched=prefetched, wraps=wraps
    )
    return SCHEDULES.get("cgopipe")(layout, shape)


def names(schedule: Schedule, *kinds: TaskKind) -> list[str]:
    return [task.name for task in schedule.tasks if not kinds or task.kind in kinds]


def test_the_launch_order_is_algorithm_1() -> None:
    schedule = build(small_layout(host=8), 4, prefetched=4)
    assert names(schedule) == ALGORITHM_1.split()
    assert [schedule.tasks[p].name for p in schedule.prefetched_next] == [f"send_page(0:e{e})" for e in range(4)]
    assert [schedule.tasks[p].slot for p in schedule.prefetched_next] == [0, 1, 2, 3]
    assert [task.slot for task in schedule.tasks if task.name.startswith("send_page(1")] == [4, 5, 6, 7]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_layers_pages_are_shared_over_its_micro_batches(n: int) -> None:
    """No transfer of hidden states waits behind more than its share of the next layer's pages."""
    schedule = build(small_layout((True, True, True), experts=5, host=15), n, prefetched=5)
    h2d = [task for task in schedule.tasks if task.lane is Lane.H2D and task.kind is not TaskKind.PREFETCHED_PAGE]
    runs, counts = 0, []
    for task in h2d:
        if task.kind is TaskKind.LOAD_HIDDEN:
            counts.append(runs)
            runs = 0
        else:
            runs += 1
    assert max([*counts, runs]) <= -(-5 // n)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_attention_is_launched_two_micro_batches_ahead(n: int) -> None:
    """Before the experts of a step run, the attention of the next two steps has been launched, so the CPU is never
    idle while the device works; and nothing that waits for it stands before the experts on the launching thread."""
    schedule = build(small_layout((True, True, True), host=12), n)
    order = names(schedule, TaskKind.CPU_ATTENTION, TaskKind.LOAD_HIDDEN, TaskKind.POST_ATTENTION)
    steps = [f"({layer},{j})" for layer in range(3) for j in range(n)]
    for at, step in enumerate(steps[:-1]):
        post = order.index(f"post_attention{step}")
        assert order.index(f"cpu_attention{steps[at + 1]}") < post
        for later in steps[at + 2 :]:
            assert order.index(f"cpu_attention{later}") > post
        assert order.index(f"load_hidden{steps[at + 1]}") > post


def test_without_a_link_pages_are_read_straight_into_the_ring() -> None:
    schedule = build(small_layout(discrete=False, resident=2), 2)
    assert set(schedule.lanes()) == {Lane.DISK, Lane.CPU}
    reads = [task for task in schedule.tasks if task.lane is Lane.DISK]
    assert {task.kind for task in reads} == {TaskKind.READ_PAGE}
    assert all(task.writes[0].space == "ring" and not task.reads for task in reads)


def test_pages_on_disk_and_pages_in_host_memory_come_by_their_own_lanes() -> None:
    layout = small_layout(host=3)
    schedule = build(layout, 2, wraps=False)
    kinds = dict(zip(layout.streamed, layout.from_disk, strict=True))
    for task in schedule.tasks:
        if task.kind in (TaskKind.READ_PAGE, TaskKind.STAGE_PAGE):
            assert task.page is not None
            assert (task.kind is TaskKind.READ_PAGE) == kinds[task.page] == (task.lane is Lane.DISK)
            assert task.writes[0].space == "pinned"


def test_a_fresh_prompt_attends_on_the_device_and_sends_its_keys_and_values_down() -> None:
    schedule = build(small_layout(host=8), 1, prefill_only=True)
    assert names(schedule, TaskKind.ATTENTION) == ["attention(0,0)", "attention(1,0)"]
    assert names(schedule, TaskKind.OFFLOAD_KV) == ["offload_kv(0,0)", "offload_kv(1,0)"]
    assert names(schedule, TaskKind.STORE_KV) == ["store_kv(0,0)", "store_kv(1,0)"]
    assert not names(schedule, TaskKind.OFFLOAD_QKV, TaskKind.CPU_ATTENTION, TaskKind.LOAD_HIDDEN)


def test_serial_never_overlaps() -> None:
    """Each task waits for the one before it."""
    shape = PassShape(micro_batches=(MicroBatchShape(tokens=4), MicroBatchShape(tokens=2, prefill_only=True)))
    schedule = SCHEDULES.get("serial")(small_layout(host=4), shape)
    assert all(position - 1 in task.deps for position, task in enumerate(schedule.tasks) if position)


def test_serial_reads_the_pages_of_a_layer_at_once() -> None:
    """Of which a disk serves several as fast as one; what comes before and behind them overlaps none."""
    schedule = SCHEDULES.get("serial")(
        small_layout(discrete=False), PassShape(micro_batches=(MicroBatchShape(tokens=4),))
    )
    reads = [position for position, task in enumerate(schedule.tasks) if task.lane is Lane.DISK]
    assert len(reads) == 8
    for layer in (reads[:4], reads[4:]):
        first, behind = layer[0], layer[-1] + 1
        assert layer == list(range(first, behind))
        assert {schedule.tasks[position].deps for position in layer} == {(first - 1,) if first else ()}
        assert set(layer) <= set(schedule.tasks[behind].deps)
    others = [position for position in range(1, len(schedule.tasks)) if position not in reads]
    assert all(position - 1 in schedule.tasks[position].deps for position in others)
