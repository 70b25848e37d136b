"""Gangs: threads of their own, on cores of their own, that leave everything else as it was."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moelight.kernels import native
from moelight.kernels.copies import copy_pages
from moelight.kernels.ffn import cpu_linear
from moelight.kernels.threads import ThreadTeam
from tests.process import TASKS, affinities, threads_end

compiled = pytest.mark.skipif(not native.available(), reason=native.reason())
linux = pytest.mark.skipif(not TASKS.is_dir(), reason="no /proc/self/task")


def allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def tasks() -> set[int]:
    return set(affinities())


def work(threads: int) -> None:
    """Enough pieces for every thread that may take one, and all of them right. Nothing of torch computes: its threads
    do not outlive a fork."""
    source = np.arange(1 << 20, dtype=np.int32).view(np.uint8)
    into = np.zeros_like(source)
    copy_pages(torch.from_numpy(into), torch.from_numpy(source), threads=threads)
    assert np.array_equal(into, source)


@pytest.fixture
def before() -> Iterator[set[int]]:
    """The threads there were; and this thread's processors are the same afterwards."""
    selected = allowed()
    work(1)
    yield tasks()
    assert allowed() == selected


@compiled
@linux
@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
def test_a_gang_has_as_many_threads_as_it_says(before: set[int], wanted: int) -> None:
    team = ThreadTeam(wanted)
    assert not tasks() - before  # none is born before it is wanted
    with team.working():
        for _ in range(3):
            work(8)
        assert len(tasks() - before) == wanted - 1
    team.close()
    assert threads_end(before)


@compiled
@linux
def test_threads_are_bound_to_their_places_and_the_caller_is_not(before: set[int]) -> None:
    places = [[processor] for processor in (allowed() * 2)[:2]]
    team = ThreadTeam(2, places)
    with team.working():
        for _ in range(20):
            work(2)
            time.sleep(0.001)
        bound = {frozenset(selected) for task, selected in affinities().items() if task not in before}
    assert bound and bound <= {frozenset(position) for position in places}
    team.close()


@compiled
@linux
def test_a_place_that_is_not_there_fails_nothing(before: set[int]) -> None:
    team = ThreadTeam(3, [[700], [1000, 5000], [allowed()[0]]])
    with team.working():
        work(3)
    assert tasks() - before
    team.close()


@compiled
@linux
def test_cores_that_are_taken_away_fail_nothing(before: set[int]) -> None:
    selected = os.sched_getaffinity(0)
    team = ThreadTeam(2, [[processor] for processor in (allowed() * 2)[:2]])
    try:
        with team.working():
            work(2)
            for task in tasks() - before | {0}:
                os.sched_setaffinity(task, {min(selected)})
            work(2)
    finally:
        os.sched_setaffinity(0, selected)
    team.close()


@compiled
@linux
def test_a_closed_gang_works_on_its_caller_alone(before: set[int]) -> None:
    team = ThreadTeam(3)
    team.close()
    with team.working():
        work(3)
    assert not tasks() - before
    team.close()


@compiled
@linux
def test_a_gang_that_is_let_go_of_ends_its_threads(before: set[int]) -> None:
    team = ThreadTeam(3)
    with team.working():
        work(3)
    assert tasks() - before
    del team
    assert threads_end(before)


@compiled
@linux
def test_gangs_nest_and_the_outer_one_comes_back(before: set[int]) -> None:
    outer, inner = ThreadTeam(2), ThreadTeam(3)
    with outer.working():
        work(8)
        present = tasks()
        with pytest.raises(RuntimeError, match="stop"), inner.working():
            work(8)
            assert len(tasks() - present) == 2
            raise RuntimeError("stop")
        inner.close()
        work(8)
        assert threads_end(present)
    outer.close()


@compiled
def test_results_do_not_depend_on_the_gang() -> None:
    x, weight = torch.randn(37, 256), torch.randn(512, 256)
    alone = cpu_linear(x, weight, threads=1)
    for threads in (1, 2, 3):
        team = ThreadTeam(threads, [[0]] * threads)
        with team.working():
            assert torch.equal(cpu_linear(x, weight, threads=4), alone)
        team.close()


@compiled
def test_callers_on_gangs_and_without_work_at_once() -> None:
    shared, original = ThreadTeam(2), ThreadTeam(3)
    failures: list[BaseException] = []

    def call(team: ThreadTeam | None) -> None:
        try:
            for _ in range(30):
                if team is None:
                    work(2)
                else:
                    with team.working():
                        work(3)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    callers = [threading.Thread(target=call, args=(team,)) for team in (shared, shared, original, None, None)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not failures and not any(caller.is_alive() for caller in callers)
    shared.close()
    original.close()


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_starts_threads_anew() -> None:
    team = ThreadTeam(2)
    with team.working():
        work(2)
        child = os.fork()
        if child == 0:
            try:
                work(2)
                team.close()
                del team
                os._exit(0)
            finally:
                os._exit(1)
        work(2)
    assert os.waitpid(child, 0)[1] == 0
    team.close()


@linux
def test_a_thread_that_settles_stays_on_the_places() -> None:
    selected, seen = allowed(), []
    team = ThreadTeam(1, [[selected[-1]]])

    def settle() -> None:
        team.settle()
        seen.append(os.sched_getaffinity(0))
        ThreadTeam(1, [[1000]]).settle()  # not there: nothing changes
        ThreadTeam(2).settle()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()
    assert seen == [{selected[-1]}] * 2
    assert allowed() == selected


@pytest.mark.parametrize("threads", [0, -1])
def test_too_few_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads: must be a positive integer"):
        ThreadTeam(threads)


@pytest.mark.parametrize("places", [[[0]], [[0], []], [[0], [-1]], [[0], [1], [2]]])
def test_wrong_places_are_refused(places: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="places: "):
        ThreadTeam(2, places)


@compiled
@pytest.mark.parametrize(("threads", "places"), [(2, [[0]]), (2, [[0], []]), (1, [[-1]]), (1, [[1 << 20]]), (0, [])])
def test_the_extension_refuses_what_the_face_would(threads: int, places: list[list[int]]) -> None:
    extension = native.extension()
    assert extension is not None
    with pytest.raises(ValueError, match=r"places: |threads: "):
        extension.make_team(threads, places)


def test_without_the_extension_a_gang_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    team = ThreadTeam(2, [[0], [1]])
    with team.working():
        work(2)
    team.close()
