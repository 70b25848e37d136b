"""The one loop: every task once, after what it waits for, on any lanes; carried pages; failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from moelight.core.errors import CheckpointError, MoelightError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline, last_to_end
from moelight.runtime.executor import Executor, Idle, _bursts
from moelight.runtime.lanes import StreamLane
from moelight.runtime.machine import find_machine, open_lanes
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape
from tests.shapes import small_layout

PATIENCE_S = 10.0
LAYOUT = small_layout((True, True, True), experts=3, resident=1, host=4)
DEVICE_ATTENDS = small_layout((True, True, True), experts=3, resident=1, host=4, attention_device="gpu")
MIXED = (MicroBatchShape(tokens=4), MicroBatchShape(tokens=3, prefill_only=True), MicroBatchShape(tokens=1))


def build(*, prefetched: int = 0, wraps: bool = False, builder: str = "cgopipe") -> Schedule:
    layout = DEVICE_ATTENDS if builder == "flexgen" else LAYOUT
    return SCHEDULES.get(builder)(layout, PassShape(micro_batches=MIXED, prefetched=prefetched, wraps=wraps))


def nothing() -> None:
    """Work that is no work."""


@pytest.fixture(params=["auto", "inline", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = Executor(open_lanes(find_machine("twin"), request.param))
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[Executor]:
    made = Executor(open_lanes(find_machine("twin"), "threads"))
    yield made
    made.close()


@pytest.mark.parametrize("builder", ["cgopipe", "flexgen", "module"])
def test_waits_of_host_lanes_for_a_device_are_counted(executor: Executor, builder: str) -> None:
    """One for every dependency of a host's task on a stream's; none where no lane is a stream."""
    schedule, streams = build(builder=builder), (Lane.H2D, Lane.D2H, Lane.DEVICE)
    assert executor.device_waits == 0
    executor.run(schedule, lambda _: nothing)
    waits = [schedule.tasks[dep].lane for task in schedule.tasks if task.lane not in streams for dep in task.deps]
    on_streams = isinstance(executor._lanes[Lane.DEVICE], StreamLane)
    assert executor.device_waits == (sum(lane in streams for lane in waits) if on_streams else 0)
    assert any(lane in streams for lane in waits)


def sent(layer: int, expert: int, *deps: int) -> Task:
    page = Page(layer=layer, expert=expert)
    return Task(kind=TaskKind.SEND_PAGE, lane=Lane.H2D, layer=layer, page=page, deps=deps)


def test_pages_that_wait_for_nothing_new_are_submitted_with_the_first_of_them() -> None:
    compute = Task(kind=TaskKind.POST_ATTENTION, lane=Lane.DEVICE, layer=0)
    tasks = [compute, sent(0, 0, 0), sent(0, 1, 0), sent(0, 2), compute, sent(1, 0, 4), sent(1, 1, 0, 4), sent(1, 2, 4)]
    assert [len(burst) for burst in _bursts(tasks)] == [1, 3, 1, 1, 2]
    assert [task for burst in _bursts(tasks) for task in burst] == tasks


@pytest.mark.parametrize("builder", SCHEDULES.names())
def test_every_task_is_done_once_after_what_it_waits_for(executor: Executor, builder: str) -> None:
    schedule = build(builder=builder)
    ended: dict[int, int] = {}
    lock = threading.Lock()

    def perform(task: Task) -> Callable[[], None]:
        def work() -> None:
            with lock:
                assert all(id(schedule.tasks[dep]) in ended for dep in task.deps)
                assert id(task) not in ended
                ended[id(task)] = len(ended)

        return work

    timeline = executor.run(schedule, perform)
    assert len(ended) == len(schedule.tasks)
    assert [span.task for span in timeline.spans] == list(schedule.tasks)
    for lane in schedule.lanes():
        selected = [task for task in schedule.tasks if task.lane is lane]
        assert [ended[id(task)] for task in selected] == sorted(ended[id(task)] for task in selected)


def test_spans_lie_in_the_order_of_dependencies(executor: Executor) -> None:
    schedule = build()
    began = time.perf_counter()
    timeline = executor.run(schedule, lambda task: lambda: time.sleep(0.0002))
    spans = timeline.spans
    for position, task in enumerate(schedule.tasks):
        for dep in task.deps:
            assert spans[dep].end_s <= spans[position].start_s
    assert began <= timeline.start_s <= timeline.end_s <= time.perf_counter()
    busy = timeline.busy_s()
    assert set(busy) == set(schedule.lanes())
    assert sum(busy.values()) >= 0.0002 * len(schedule.tasks)


def test_carried_pages_are_fetched_once_and_counted_where_they_are_used(executor: Executor) -> None:
    """Three passes: what a pass carries out belongs to the next one's timeline, and is never performed again."""
    performed: list[str] = []
    sent: list[int] = []
    for number, wraps in enumerate((True, True, False)):
        schedule = build(prefetched=executor.prefetched, wraps=wraps)
        timeline = executor.run(schedule, lambda task: lambda: performed.append(task.name))
        assert executor.prefetched == (len(LAYOUT.layer_pages[0]) if wraps else 0)
        assert not any(span.task.kind is TaskKind.PREFETCHED_PAGE for span in timeline.spans)
        sends = [span.task for span in timeline.spans if span.task.kind is TaskKind.SEND_PAGE]
        sent.append(len(sends))
        assert {task.page for task in sends} == set(LAYOUT.streamed), f"pass {number}"
    assert sent == [len(LAYOUT.streamed)] * 3
    assert performed.count("send_page(0:e1)") == 3
    assert not any(name.startswith("prefetched") for name in performed)


def test_every_span_says_what_it_waited_for_last(executor: Executor) -> None:
    """In its own pass or, of a page that was fetched ahead and of the first task on a lane, in the one before."""
    before: dict[Page, list[str]] = {}
    ended: set[float] = set()
    for wraps in (True, True, False):
        schedule = build(prefetched=executor.prefetched, wraps=wraps)
        timeline = executor.run(schedule, lambda task: lambda: time.sleep(0.0001))
        listed = [position for position in range(len(schedule.tasks)) if position not in schedule.prefetched_next]
        spans = dict(zip(listed, timeline.spans, strict=True))
        for position, span in spans.items():
            task = schedule.tasks[position]
            assert span.waited_until_s is not None and span.waited_until_s <= span.start_s
            if task.kind is TaskKind.PREFETCHED_PAGE:
                assert task.page is not None and span.waited_for is not None
                assert span.waited_for.name in before[task.page]
            elif span.waited_until_s in ended:
                assert all(spans[dep].end_s < span.waited_until_s for dep in task.deps)
            elif task.deps:
                assert span.waited_until_s == max(spans[dep].end_s for dep in task.deps)
                assert span.waited_for in [spans[dep].task for dep in task.deps]
            else:
                assert (span.waited_for, span.waited_until_s) == (None, FREE)
        ended = {span.end_s for span in timeline.spans}
        before = {
            page: [schedule.tasks[dep].name for dep in schedule.tasks[position].deps]
            for position in schedule.prefetched_next
            if (page := schedule.tasks[position].page) is not None
        }


def test_a_pass_ends_while_its_carried_pages_are_still_on_their_way(threads: Executor) -> None:
    """The next pass's experts wait for them; the pass that sent them does not wait for the last of them."""
    gate, order = threading.Event(), list[str]()
    first = build(wraps=True)
    slow = first.tasks[first.prefetched_next[-1]]

    def perform(task: Task) -> Callable[[], None]:
        def work() -> None:
            if task is slow:
                assert gate.wait(PATIENCE_S)
                order.append("sent")
            if task.kind is TaskKind.POST_ATTENTION and task.layer == 0 and "pass" in order:
                order.append("experts")

        return work

    threads.run(first, perform)
    assert "sent" not in order
    order.append("pass")
    threading.Timer(0.02, gate.set).start()
    threads.run(build(prefetched=threads.prefetched), perform)
    assert order[:3] == ["pass", "sent", "experts"]


def test_reading_goes_on_while_experts_run(threads: Executor) -> None:
    """Pages of the next layer are on their way while this layer's experts are at work."""
    schedule, reading = build(), threading.Event()

    def perform(task: Task) -> Callable[[], None]:
        if task.page is not None and task.page.layer == 1 and task.lane is not Lane.H2D:
            return reading.set
        if task.kind is TaskKind.POST_ATTENTION and (task.layer, task.micro_batch) == (0, 0):
            return lambda: None if reading.wait(PATIENCE_S) else pytest.fail("nothing was read")
        return nothing

    threads.run(schedule, perform)


@pytest.mark.parametrize("kind", [TaskKind.READ_PAGE, TaskKind.SEND_PAGE, TaskKind.CPU_ATTENTION, TaskKind.SAMPLE])
def test_a_failure_comes_out_as_itself_and_no_pass_follows(executor: Executor, kind: TaskKind) -> None:
    error, done = CheckpointError("model.safetensors: tensor 'x' ends early"), list[str]()

    def perform(task: Task) -> Callable[[], None]:
        def work() -> None:
            if task.kind is kind:
                raise error
            done.append(task.name)

        return work

    with pytest.raises(CheckpointError) as caught:
        executor.run(build(wraps=True), perform)
    assert caught.value is error
    count = len(done)
    with pytest.raises(MoelightError, match="open it anew"):
        executor.run(build(), lambda task: lambda: done.append("again"))
    executor.close()
    assert "again" not in done[count:]


def test_nothing_that_depends_on_a_failed_read_runs(executor: Executor) -> None:
    done: list[str] = []

    def perform(task: Task) -> Callable[[], None]:
        def work() -> None:
            if task.page is not None and task.page.layer == 1:
                raise OSError("disk")
            done.append(task.name)

        return work

    with pytest.raises(OSError, match="disk"):
        executor.run(build(), perform)
    executor.close()
    assert not any(name.startswith(("post_attention(1", "post_attention(2", "sample")) for name in done)


def test_after_an_interruption_the_rings_are_not_trusted(threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller waits: no lane failed, but the position in the page stream is lost."""
    schedule = build(wraps=True)
    broken = replace(schedule, prefetched_next=(len(schedule.tasks),))
    with pytest.raises(IndexError):
        threads.run(broken, lambda task: nothing)
    with pytest.raises(MoelightError, match="open it anew"):
        threads.run(build(), lambda task: nothing)


def test_idle_time_is_what_no_lane_worked() -> None:
    """Over passes that overlap: the second began before the first had ended."""
    task = Task(kind=TaskKind.EMBED, lane=Lane.CPU)

    def timeline(*spans: tuple[float, float]) -> Timeline:
        return Timeline(spans=tuple(Span(task=task, start_s=start, end_s=end) for start, end in spans))

    idle = Idle(10.0)
    assert idle.until(10.5) == pytest.approx(0.5)
    idle.add(timeline((10.1, 10.3), (10.2, 10.4), (10.7, 10.8), (10.25, 10.28)))
    assert idle.until(11.0) == pytest.approx(0.1 + 0.3 + 0.2)
    idle.add(timeline((10.75, 10.9), (11.0, 11.5)))
    assert idle.until(11.5) == pytest.approx(0.1 + 0.3 + 0.1)
    assert idle.until(11.6) == pytest.approx(0.6)


def test_the_last_of_what_was_waited_for() -> None:
    tasks = [Task(kind=kind, lane=Lane.CPU) for kind in (TaskKind.EMBED, TaskKind.SAMPLE, TaskKind.ROUTE)]
    assert last_to_end(zip(tasks, (1.0, 3.0, 2.0), strict=True)) == (tasks[1], 3.0)
    assert last_to_end([]) == (None, FREE)
