"""The virtual clock against clocks too simple to be wrong, and against what must hold for any order of work."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ScheduleError
from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import FREE, Timeline
from moelight.hrm.task_cost import TaskCost
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape
from moelight.scheduler.simulate import Price, VirtualClock, simulate_pass, simulate_passes, steady_pass
from tests.shapes import examples, small_layout

Job = tuple[Schedule, tuple[TaskCost, ...]]
LANES = (Lane.STAGE, Lane.H2D, Lane.DEVICE, Lane.CPU)


@st.composite
def jobs(draw: st.DrawFn, *, dram: bool = True) -> Job:
    """Up to 25 tasks on four lanes, each waiting for some of the earlier ones; costs are eighths."""
    tasks, costs = [], []
    for position in range(draw(st.integers(1, 25))):
        deps = draw(st.sets(st.integers(0, position - 1), max_size=3)) if position else set()
        tasks.append(Task(kind=TaskKind.EMBED, lane=draw(st.sampled_from(LANES)), layer=position, deps=tuple(deps)))
        touched = draw(st.integers(0, 40)) if dram else 0
        costs.append(TaskCost(seconds=draw(st.integers(0, 24)) / 8, dram_bytes=float(touched)))
    return Schedule(builder="any", tasks=tuple(tasks)), tuple(costs)


def price(job: Job) -> Price:
    _, costs = job
    return lambda task: costs[task.layer]


def list_schedule(job: Job) -> list[tuple[float, float]]:
    """Start and end of every task, read off the rules: when its lane is free and what it waits for is done."""
    schedule, costs = job
    spans: list[tuple[float, float]] = []
    free: dict[Lane, float] = {}
    for task, cost in zip(schedule.tasks, costs, strict=True):
        start = max([free.get(task.lane, 0.0), *(spans[dep][1] for dep in task.deps)])
        spans.append((start, start + cost.seconds))
        free[task.lane] = spans[-1][1]
    return spans


def fluid(job: Job, dram: int) -> list[Fraction]:
    """The end of every task when lanes share ``dram``, kept as work still to be done, in exact fractions."""
    schedule, costs = job
    left = [Fraction(max(cost.seconds, cost.dram_bytes / dram)).limit_denominator(10**6) for cost in costs]
    share = [
        Fraction(cost.dram_bytes) / work if cost.dram_bytes else Fraction(0)
        for cost, work in zip(costs, left, strict=True)
    ]
    ends: list[Fraction | None] = [None] * len(costs)
    now = Fraction(0)
    while None in ends:
        heads = {}
        for position, task in enumerate(schedule.tasks):
            if ends[position] is None:
                heads.setdefault(task.lane, position)
        busy = [p for p in heads.values() if all(ends[dep] is not None for dep in schedule.tasks[p].deps)]
        speed = fair_speeds({p: share[p] for p in busy}, Fraction(dram))
        step = min(left[p] / speed[p] for p in busy)
        now += step
        for p in busy:
            left[p] -= step * speed[p]
            if left[p] == 0:
                ends[p] = now
    return [end for end in ends if end is not None]


def fair_speeds(shares: dict[int, Fraction], full: Fraction) -> dict[int, Fraction]:
    """Raise everybody's bandwidth together until each has what it wants or there is no more."""
    inputs = dict.fromkeys(shares, Fraction(0))
    while True:
        hungry = [p for p in shares if inputs[p] < shares[p]]
        left = full - sum(inputs.values())
        if not hungry or not left:
            return {p: inputs[p] / share if share else Fraction(1) for p, share in shares.items()}
        more = min(left / len(hungry), *(shares[p] - inputs[p] for p in hungry))
        for p in hungry:
            inputs[p] += more


def longest_chain(job: Job) -> float:
    """The most seconds along any chain of dependencies."""
    schedule, costs = job
    reached: list[float] = []
    for task, cost in zip(schedule.tasks, costs, strict=True):
        reached.append(cost.seconds + max((reached[dep] for dep in task.deps), default=0.0))
    return max(reached)


def ends(timeline: Timeline) -> list[float]:
    return [span.end_s for span in timeline.spans]


@examples(200)
@given(job=jobs(dram=False), start=st.integers(0, 9))
def test_it_is_the_list_schedule(job: Job, start: int) -> None:
    timeline = simulate_pass(job[0], price(job), start_s=start)
    assert [(span.start_s - start, span.end_s - start) for span in timeline.spans] == list_schedule(job)
    assert [span.task for span in timeline.spans] == list(job[0].tasks)


@examples(200)
@given(job=jobs(), dram=st.integers(1, 60))
def test_lanes_share_host_memory_as_fluid_does(job: Job, dram: int) -> None:
    result = ends(simulate_pass(job[0], price(job), dram_bytes_per_s=dram))
    assert result == pytest.approx([float(end) for end in fluid(job, dram)], abs=1e-4)


@examples(200)
@given(job=jobs(), dram=st.integers(1, 60), inline=st.booleans())
def test_the_bounds_that_hold_for_any_order(job: Job, dram: int, inline: bool) -> None:
    """No less than any lane's work, any chain, or all bytes at full rate; and with work at hand something is done."""
    schedule, costs = job
    end = simulate_pass(schedule, price(job), dram_bytes_per_s=dram, inline=inline).end_s + 1e-9
    for lane in schedule.lanes():
        assert end >= sum(cost.seconds for task, cost in zip(schedule.tasks, costs, strict=True) if task.lane is lane)
    assert end >= longest_chain(job)
    touched = sum(cost.dram_bytes for cost in costs)
    assert end >= touched / dram
    assert end <= sum(cost.seconds for cost in costs) + touched / dram + 2e-9


@examples(200)
@given(job=jobs(), dram=st.integers(1, 60))
def test_contention_and_computing_inline_only_delay(job: Job, dram: int) -> None:
    """Every task ends no sooner than alone; and where there is enough for all lanes at once, exactly as alone."""
    alone = ends(simulate_pass(job[0], price(job)))
    shared = ends(simulate_pass(job[0], price(job), dram_bytes_per_s=dram))
    beside = ends(simulate_pass(job[0], price(job), inline=True))
    assert all(late >= soon - 1e-9 for late, soon in zip(shared, alone, strict=True))
    assert all(late >= soon for late, soon in zip(beside, alone, strict=True))
    plenty = 1.0 + sum(cost.dram_bytes / max(cost.seconds, 1e-3) for cost in job[1])
    if all(cost.seconds for cost in job[1]):
        assert ends(simulate_pass(job[0], price(job), dram_bytes_per_s=plenty)) == pytest.approx(alone, abs=1e-9)


@examples(200)
@given(job=jobs(), dram=st.integers(1, 60), more=st.integers(1, 60))
def test_more_bandwidth_is_never_later(job: Job, dram: int, more: int) -> None:
    less = simulate_pass(job[0], price(job), dram_bytes_per_s=dram).end_s
    assert simulate_pass(job[0], price(job), dram_bytes_per_s=dram + more).end_s <= less + 1e-9


def test_without_a_device_the_submitting_thread_computes() -> None:
    order = [Lane.DISK, Lane.CPU, Lane.DISK, Lane.CPU]
    schedule = Schedule(builder="any", tasks=tuple(Task(kind=TaskKind.EMBED, lane=lane) for lane in order))
    timeline = simulate_pass(schedule, lambda task: TaskCost(seconds=1.0), inline=True)
    assert [span.start_s for span in timeline.spans] == [0.0, 0.0, 1.0, 1.0]


def cgopipe(n: int, *, prefetched: int) -> Schedule:
    shape = PassShape(micro_batches=(MicroBatchShape(tokens=4),) * n, prefetched=prefetched, wraps=True)
    return SCHEDULES.get("cgopipe")(small_layout((True, True, True), host=12), shape)


def paged(task: Task) -> TaskCost:
    """Pages take long, everything else a little."""
    return TaskCost(seconds=4.0 if task.kind is TaskKind.SEND_PAGE else 0.25)


def test_pages_are_carried_from_pass_to_pass() -> None:
    first, then = cgopipe(4, prefetched=0), cgopipe(4, prefetched=4)
    timelines = simulate_passes([(first, paged), (then, paged), (then, paged)])
    for before, after in pairwise(timelines):
        prefetched = [
            span for span in after.spans if span.task.kind is TaskKind.SEND_PAGE and span.task.page.layer == 0
        ]  # type: ignore[union-attr]
        assert len(prefetched) == 4
        sent = [span for span in before.spans if span.task.kind is TaskKind.SEND_PAGE]
        assert prefetched[0].start_s >= max(span.end_s for span in sent)
        assert prefetched[-1].end_s > before.end_s  # still on its way when the next pass began
        original = [span.start_s for span in after.spans if span not in prefetched]
        assert min(original) >= before.end_s
    # The link never rests: a pass takes what its twelve pages and hidden states take.
    assert timelines[2].end_s - timelines[1].end_s == pytest.approx(12 * 4.0 + 12 * 0.25)
    steady = steady_pass(then, paged)
    assert steady.seconds == pytest.approx(51.0)
    assert steady.binding is Lane.H2D
    assert steady.idle_s(Lane.H2D) == pytest.approx(0.0)
    assert steady.idle_s(Lane.CPU) == pytest.approx(51.0 - 12 * 0.25)
    assert steady.idle_s(Lane.DISK) == steady.seconds


def test_every_task_says_what_it_waited_for_last() -> None:
    """In its own pass or, of a page that was fetched ahead, in the one before."""
    schedules = [cgopipe(4, prefetched=0), cgopipe(4, prefetched=4), cgopipe(4, prefetched=4)]
    before: dict[Page, list[Task]] = {}
    for schedule, timeline in zip(
        schedules, simulate_passes([(schedule, paged) for schedule in schedules]), strict=True
    ):
        listed = [position for position in range(len(schedule.tasks)) if position not in schedule.prefetched_next]
        spans = dict(zip(listed, timeline.spans, strict=True))
        for position, span in spans.items():
            task = schedule.tasks[position]
            assert span.waited_until_s is not None and span.waited_until_s <= span.start_s
            if task.kind is TaskKind.PREFETCHED_PAGE and before:
                assert span.waited_for is not None and span.waited_for.kind is not TaskKind.PREFETCHED_PAGE
                assert task.page is not None and span.waited_for in before[task.page]
            elif task.deps:
                assert span.waited_until_s == max(spans[dep].end_s for dep in task.deps)
                assert span.waited_for in [spans[dep].task for dep in task.deps]
            else:
                assert (span.waited_for, span.waited_until_s) == (None, FREE)
        before = {
            page: [schedule.tasks[dep] for dep in schedule.tasks[position].deps]
            for position in schedule.prefetched_next
            if (page := schedule.tasks[position].page) is not None
        }


def test_a_schedule_that_carries_nothing_is_steady_at_once() -> None:
    schedule = SCHEDULES.get("serial")(small_layout(host=8), PassShape(micro_batches=(MicroBatchShape(tokens=4),) * 2))
    *_, before, last = simulate_passes([(schedule, paged)] * 3)
    assert steady_pass(schedule, paged).seconds == pytest.approx(last.end_s - before.end_s)


def test_pages_carried_in_are_there_when_a_pass_is_simulated_alone() -> None:
    schedule = cgopipe(4, prefetched=4)
    timeline = simulate_pass(schedule, paged, start_s=7.0)
    prefetched = [span for span in timeline.spans if span.task.kind is TaskKind.PREFETCHED_PAGE]
    assert [(span.start_s, span.end_s) for span in prefetched] == [(7.0, 7.0)] * 4
    assert len(timeline.spans) == len(schedule.tasks) - 4
    assert timeline.end_s < simulate_pass(cgopipe(4, prefetched=0), paged, start_s=7.0).end_s


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    tasks = tuple(
        Task(kind=TaskKind.EMBED, lane=lane, deps=deps) for lane, deps in ((Lane.CPU, (1,)), (Lane.H2D, (0,)))
    )
    with pytest.raises(ScheduleError, match="for ever"):
        simulate_pass(Schedule(builder="any", tasks=tasks), lambda task: TaskCost(seconds=1.0))


def test_a_pass_takes_one_step_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small_layout((True,) * 32, host=128)
    shape = PassShape(micro_batches=(MicroBatchShape(tokens=4),) * 16, prefetched=4, wraps=True)
    schedule, steps, advance = SCHEDULES.get("cgopipe")(layout, shape), [0], VirtualClock._advance

    def counted(self: VirtualClock) -> None:
        steps[0] += 1
        advance(self)

    monkeypatch.setattr(VirtualClock, "_advance", counted)
    simulate_pass(schedule, lambda task: TaskCost(seconds=0.1, dram_bytes=5.0), dram_bytes_per_s=100.0)
    assert 2_000 < steps[0] <= len(schedule.tasks)
