"""Idle time by cause: small runs by hand, and what must hold of any run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
from moelight.core.timeline import FREE, Span, Timeline
from moelight.hrm.task_cost import TaskCost
from moelight.observe import bubbles as room
from moelight.observe.bubbles import BETWEEN, DONE, LAUNCH, UNRECORDED, Bubble, Bubbles, cause_of
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape
from moelight.scheduler.simulate import simulate_passes
from tests.shapes import examples, small_layout

ATTENTION = Task(kind=TaskKind.CPU_ATTENTION, lane=Lane.CPU, layer=1)
EXPERTS = Task(kind=TaskKind.POST_ATTENTION, lane=Lane.CPU, layer=1)
PAGE = Task(kind=TaskKind.READ_PAGE, lane=Lane.DISK, page=Page(layer=2, expert=0))


def span(task: Task, start_s: float, end_s: float, last: Task | None = None, until_s: float | None = FREE) -> Span:
    return Span(task=task, start_s=start_s, end_s=end_s, waited_for=last, waited_until_s=until_s)


def seconds(result: Bubbles, lane: Lane) -> dict[str, float]:
    return {cause: bubble.seconds for cause, bubble in result.of(lane).items()}


def added(*passes: tuple[Span, ...], start_s: float | None = None, end_s: float | None = None) -> Bubbles:
    result = Bubbles()
    if start_s is not None:
        result.begin(start_s)
    for spans in passes:
        result.add(Timeline(spans=spans))
    result.end(end_s)
    return result


def test_a_wait_is_its_last_dependency_and_then_its_launch() -> None:
    result = added((span(PAGE, 0, 1), span(EXPERTS, 0, 3), span(PAGE, 3.25, 5, EXPERTS, 3.0)))
    assert seconds(result, Lane.DISK) == {"post_attention (ring slot)": 2.0, LAUNCH: 0.25}
    assert seconds(result, Lane.CPU) == {DONE: 2.0}


def test_what_was_ready_in_time_only_had_to_be_launched() -> None:
    result = added((span(ATTENTION, 0, 2, None), span(EXPERTS, 2.5, 3, PAGE, 1.5), span(ATTENTION, 4, 5)))
    assert seconds(result, Lane.CPU) == {LAUNCH: 1.5}
    assert result.of(Lane.CPU)[LAUNCH].count == 2


def test_the_longest_is_remembered_with_its_place() -> None:
    first = (span(EXPERTS, 0, 1), span(EXPERTS, 1.5, 2))
    later = (span(dataclasses.replace(EXPERTS, layer=7), 4, 5, PAGE, 3.5), span(EXPERTS, 5.25, 6, PAGE, 5.25))
    result = added(first, later)
    assert result.of(Lane.CPU) == {
        BETWEEN: Bubble(seconds=2.0, count=1, longest_s=2.0, longest_at_s=2.0, pass_number=1, layer=7),
        LAUNCH: Bubble(seconds=0.5, count=1, longest_s=0.5, longest_at_s=1.0, pass_number=0, layer=1),
        "read_page": Bubble(seconds=0.25, count=1, longest_s=0.25, longest_at_s=5.0, pass_number=1, layer=1),
    }


def test_between_passes_nothing_can_be_launched() -> None:
    """The disk waits from 1 for a slot that is free at 2; the pass ends at 3, and the next begins its work at 5."""
    first = (span(PAGE, 0, 1), span(EXPERTS, 0, 3))
    later = (span(PAGE, 5.5, 6, EXPERTS, 2.0), span(EXPERTS, 5, 7))
    result = added(first, later)
    assert seconds(result, Lane.DISK) == {BETWEEN: 2.0, LAUNCH: 1.5, "post_attention (ring slot)": 1.0, DONE: 1.0}
    assert seconds(result, Lane.CPU) == {BETWEEN: 2.0}


def test_pages_fetched_ahead_fill_the_pass_before_theirs() -> None:
    """Between two tasks of the first pass the link brings a page that is listed with the second."""
    hidden = Task(kind=TaskKind.LOAD_HIDDEN, lane=Lane.H2D)
    page = Task(kind=TaskKind.SEND_PAGE, lane=Lane.H2D, page=Page(layer=0, expert=0))
    first = (span(hidden, 0, 1), span(hidden, 3, 4), span(EXPERTS, 0, 4))
    result = added(first, (span(page, 1, 3), span(hidden, 4, 5), span(EXPERTS, 4, 5)))
    assert seconds(result, Lane.H2D) == {} == seconds(result, Lane.CPU)


def test_where_nobody_noted_the_wait_nobody_guesses() -> None:
    result = added((span(EXPERTS, 0, 1), span(EXPERTS, 2, 3, None, None)), (span(EXPERTS, 5, 6, None, None),))
    assert seconds(result, Lane.CPU) == {BETWEEN: 2.0, UNRECORDED: 1.0}


def test_a_run_may_begin_before_its_first_task_and_end_after_its_last() -> None:
    result = added((span(EXPERTS, 12, 13),), start_s=10.0, end_s=13.5)
    assert seconds(result, Lane.CPU) == {BETWEEN: 2.0, DONE: 0.5}
    result.begin(100.0)
    result.add(Timeline(spans=(span(EXPERTS, 101, 102),)))
    assert seconds(result, Lane.CPU) == {BETWEEN: 2.0, DONE: 0.5}  # not looked at before the next pass
    result.end(102.0)
    assert seconds(result, Lane.CPU) == {BETWEEN: 3.0, DONE: 0.5}  # and nothing from 13.5 to 100


def test_empty_passes_and_runs_leave_nothing() -> None:
    result = added((), (span(EXPERTS, 0, 1),), ())
    result.end()
    assert [dict(result.of(lane)) for lane in Lane] == [{}] * len(Lane)


@pytest.mark.parametrize(
    ("waiting", "last", "cause"),
    [
        (TaskKind.SEND_PAGE, TaskKind.READ_PAGE, "read_page"),
        (TaskKind.SEND_PAGE, TaskKind.EXPERTS, "experts (ring slot)"),
        (TaskKind.READ_PAGE, TaskKind.SEND_PAGE, "send_page (staging slot)"),
        (TaskKind.POST_ATTENTION, TaskKind.SEND_PAGE, "send_page"),
        (TaskKind.LOAD_HIDDEN, TaskKind.CPU_ATTENTION, "cpu_attention"),
    ],
)
def test_a_page_may_wait_for_room(waiting: TaskKind, last: TaskKind, cause: str) -> None:
    assert cause_of(waiting, last) == cause


@st.composite
def runs(draw: st.DrawFn) -> list[Timeline]:
    """Passes of any order of work on the virtual clock, its pages carried, its tasks of random length, the host slow
    now and then."""
    layout = small_layout((True, True, True), experts=3, resident=1, host=4)
    builder = draw(st.sampled_from(["cgopipe", "serial", "fastdecode", "flexgen-c", "module"]))
    batches = (MicroBatchShape(tokens=4),) * draw(st.integers(1, 3))
    costs = draw(st.lists(st.integers(0, 9), min_size=len(TaskKind), max_size=len(TaskKind)))
    weight = dict(zip(TaskKind, costs, strict=True))
    steps, carried = [], 0
    for _ in range(draw(st.integers(1, 4))):
        built: Schedule = SCHEDULES.get(builder)(
            layout, PassShape(micro_batches=batches, prefetched=carried, wraps=True)
        )
        carried = len(built.prefetched_next)
        steps.append((built, lambda task: TaskCost(seconds=weight[task.kind] / 8)))
    return list(simulate_passes(steps, inline=draw(st.booleans())))


@examples(150)
@given(timelines=runs())
def test_work_and_rest_make_the_run(timelines: list[Timeline]) -> None:
    result = Bubbles()
    for timeline in timelines:
        result.add(timeline)
    result.end()
    begin_s, end_s = timelines[0].start_s, max(timeline.end_s for timeline in timelines)
    spans = [span for timeline in timelines for span in timeline.spans]
    for lane in {span.task.lane for span in spans}:
        busy_s = sum(span.end_s - span.start_s for span in spans if span.task.lane is lane)
        causes = result.of(lane)
        assert busy_s + sum(bubble.seconds for bubble in causes.values()) == pytest.approx(end_s - begin_s)
        assert list(causes) == sorted(causes, key=lambda cause: -causes[cause].seconds)
        waits = {cause_of(s.task.kind, s.waited_for.kind) for s in spans if s.task.lane is lane and s.waited_for}
        assert set(causes) <= waits | {BETWEEN, LAUNCH, DONE}
        for bubble in causes.values():
            assert 0 < bubble.longest_s <= bubble.seconds <= bubble.count * bubble.longest_s + 1e-9
            assert begin_s <= bubble.longest_at_s <= end_s - bubble.longest_s + 1e-9
            assert bubble.pass_number < len(timelines)


def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    """A lane that works once in a run, and causes that come again and again."""
    result = Bubbles()
    for n in range(500):
        tasks = [span(EXPERTS, n, n + 0.5), span(PAGE, n + 0.25, n + 0.75, EXPERTS, n + 0.125)]
        if not n:
            tasks.append(span(Task(kind=TaskKind.SEND_PAGE, lane=Lane.H2D), 0, 0.25))
        result.add(Timeline(spans=tuple(tasks)))
        assert len(result._pending) <= 4 and len(result._gaps) <= room._GAPS_KEPT
    result.end()
    assert result.of(Lane.CPU)[BETWEEN].count == 499
    assert result.of(Lane.H2D)[DONE].seconds == pytest.approx(499.5)
    assert len(result._found) == 6
