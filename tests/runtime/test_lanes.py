"""Lanes of every kind: one thing at a time, in order; nothing before what it waits for; failures reach everyone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from moelight.core.errors import CheckpointError, MoelightError
from moelight.core.schedule import Lane
from moelight.kernels.threads import ThreadTeam
from moelight.runtime import lanes as lanes_module
from moelight.runtime import machine as machine_room
from moelight.runtime.lanes import (
    SKIPPED,
    InlineLane,
    LaneRunner,
    MovedBytes,
    PendingLane,
    StreamLane,
    StreamTicket,
    ThreadLane,
)
from moelight.runtime.machine import Machine, find_machine, open_lanes
from moelight.runtime.topology import Demands, share_cores
from moelight.runtime.twin import EmulatedEvent, EmulatedStream
from tests.runtime.machines import topology

PATIENCE_S = 10.0
KINDS: dict[str, Callable[[], LaneRunner]] = {
    "inline": InlineLane,
    "thread": lambda: ThreadLane("test"),
    "pending": lambda: PendingLane("test"),
    "stream": lambda: StreamLane("test", EmulatedStream(), EmulatedEvent),
}
TWIN = Machine(device=torch.device("cpu"), discrete=True, twin=True)
PLAIN = Machine(device=torch.device("cpu"), discrete=False)


@pytest.fixture(params=KINDS)
def lane(request: pytest.FixtureRequest) -> Iterator[LaneRunner]:
    made = KINDS[request.param]()
    yield made
    made.close()


@pytest.fixture
def thread() -> Iterator[ThreadLane]:
    made = ThreadLane("other")
    yield made
    made.close()


def fail(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_work_is_done_in_the_order_given(lane: LaneRunner) -> None:
    done: list[int] = []
    tickets = [lane.submit(lambda n=n: done.append(n), ()) for n in range(200)]  # type: ignore[misc]
    tickets[-1].wait()
    assert done == list(range(200))
    spans = [ticket.span() for ticket in tickets]
    assert all(start <= end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_work_waits_for_other_lanes(first: str, second: str) -> None:
    one, two = KINDS[first](), KINDS[second]()
    seen: list[str] = []

    def slow() -> None:
        time.sleep(0.02)
        seen.append("first")

    earlier = one.submit(slow, ())
    later = two.submit(lambda: seen.append("second"), (earlier,))
    later.wait()
    assert seen == ["first", "second"]
    assert earlier.span()[1] <= later.span()[0]
    one.close()
    two.close()


class Later:
    """Work that ends when it is told to, or with ``error``."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.over, self.error = threading.Event(), threading.Event(), error

    def begin(self) -> Later:
        self.begun.set()
        return self

    def wait(self) -> None:
        assert self.over.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", ["inline", "thread", "pending"])
def test_a_ticket_waits_for_work_that_goes_on_by_itself(kind: str) -> None:
    lane, later = KINDS[kind](), Later()
    threading.Timer(0.05, later.over.set).start()
    ticket = lane.submit(later.begin, ())
    ticket.wait()
    start, end = ticket.span()
    assert later.over.is_set()
    assert end - start >= 0.04
    lane.close()


def test_a_pending_lane_begins_work_before_the_last_has_ended_and_ends_it_in_order() -> None:
    lane, first, second = PendingLane("test"), Later(), Later()
    tickets = [lane.submit(first.begin, ()), lane.submit(second.begin, ())]
    assert second.begun.wait(PATIENCE_S)
    second.over.set()
    time.sleep(0.02)
    first.over.set()
    tickets[1].wait()
    tickets[0].wait()
    (_, first_end), (second_start, second_end) = (ticket.span() for ticket in tickets)
    assert first_end <= second_start <= second_end
    lane.close()


def test_what_a_pending_lane_began_after_a_failure_fails_too() -> None:
    lane, first, second = PendingLane("test"), Later(CheckpointError("torn")), Later()
    tickets = [lane.submit(first.begin, ()), lane.submit(second.begin, ())]
    assert second.begun.wait(PATIENCE_S)
    second.over.set()
    first.over.set()
    for ticket in tickets:
        with pytest.raises(CheckpointError, match="torn"):
            ticket.wait()
    with pytest.raises(CheckpointError, match="torn"):
        lane.submit(lambda: None, ()).wait()
    lane.close()


def test_a_ticket_says_that_its_work_found_nothing_to_do(lane: LaneRunner) -> None:
    idle, busy = lane.submit(lambda: SKIPPED, ()), lane.submit(lambda: None, ())
    idle.wait()
    busy.wait()
    assert (idle.skipped, busy.skipped) == (True, False)


def test_a_ticket_says_what_a_work_found_to_move(lane: LaneRunner) -> None:
    tickets = [
        lane.submit(lambda: MovedBytes(40), ()),
        lane.submit(lambda: MovedBytes(0), ()),
        lane.submit(lambda: None, ()),
    ]
    for ticket in tickets:
        ticket.wait()
    assert [ticket.found_bytes for ticket in tickets] == [40, 0, None]
    assert not any(ticket.skipped for ticket in tickets)


@pytest.mark.parametrize("kind", ["inline", "thread", "pending"])
def test_a_ticket_waits_for_the_rest_of_what_is_moved(kind: str) -> None:
    """Or fails with it."""
    lane, later, torn = KINDS[kind](), Later(), Later(CheckpointError("torn"))
    threading.Timer(0.03, later.over.set).start()
    ticket = lane.submit(lambda: MovedBytes(7, later), ())
    ticket.wait()
    assert later.over.is_set()
    assert ticket.found_bytes == 7
    torn.over.set()
    with pytest.raises(CheckpointError, match="torn"):
        lane.submit(lambda: MovedBytes(7, torn), ()).wait()
    lane.close()


def test_thread_lanes_work_at_the_same_time(thread: ThreadLane) -> None:
    other, meeting = ThreadLane("second"), threading.Barrier(3)
    tickets = [lane.submit(lambda: (meeting.wait(PATIENCE_S), None)[1], ()) for lane in (thread, other)]
    meeting.wait(PATIENCE_S)
    for ticket in tickets:
        ticket.wait()
    other.close()


def test_submitting_to_a_thread_does_not_wait(thread: ThreadLane) -> None:
    gate = threading.Event()
    ticket = thread.submit(lambda: (gate.wait(PATIENCE_S), None)[1], ())
    gate.set()
    ticket.wait()


@pytest.mark.parametrize("error", [CheckpointError("a.safetensors: gone"), OSError(5, "I/O"), KeyboardInterrupt()])
def test_a_failure_reaches_whoever_waits_as_itself(lane: LaneRunner, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        lane.submit(fail(error), ()).wait()
    assert caught.value is error


def test_a_lane_that_failed_refuses_all_later_work(lane: LaneRunner) -> None:
    done: list[int] = []
    lane.submit(lambda: done.append(1), ()).wait()
    for work in (fail(OSError("first")), lambda: done.append(2), fail(OSError("second"))):
        with pytest.raises(OSError, match="first"):
            lane.submit(work, ()).wait()
    assert done == [1]


@pytest.mark.parametrize("second", KINDS)
def test_a_failure_spreads_to_the_lanes_that_wait_for_it(second: str, thread: ThreadLane) -> None:
    """What would read the failed work's result is never done; what does not wait for it is."""
    done: list[str] = []
    reader, bystander = KINDS[second](), ThreadLane("bystander")
    failed = thread.submit(fail(OSError("disk")), ())
    with pytest.raises(OSError, match="disk"):
        reader.submit(lambda: done.append("reader"), (failed,)).wait()
    with pytest.raises(OSError, match="disk"):
        reader.submit(lambda: done.append("later"), ()).wait()
    bystander.submit(lambda: done.append("bystander"), ()).wait()
    assert done == ["bystander"]
    reader.close()
    bystander.close()


def test_closing_finishes_what_was_submitted(lane: LaneRunner) -> None:
    done: list[int] = []
    for n in range(5):
        lane.submit(lambda n=n: (time.sleep(0.002), done.append(n))[1], ())  # type: ignore[misc]
    lane.close()
    assert done == [0, 1, 2, 3, 4]
    lane.close()


def test_a_closed_thread_refuses_work_instead_of_never_doing_it() -> None:
    lane = ThreadLane("short")
    lane.close()
    assert not any(thread.name == "moelight-short" for thread in threading.enumerate())
    with pytest.raises(MoelightError, match="moelight-short is closed"):
        lane.submit(lambda: None, ())


class LoggedStream(EmulatedStream):
    """Notes what happens to it, in order."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> EmulatedStream:
        self.log.append(("enter", self.name))
        return self

    def __exit__(self, *reason: object) -> None:
        self.log.append(("exit", self.name))

    def wait_event(self, event: EmulatedEvent) -> None:
        self.log.append(("wait", self.name, event))
        super().wait_event(event)

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


class LoggedEvent(EmulatedEvent):
    """Notes on which stream it was recorded."""

    def record(self, stream: EmulatedStream) -> None:
        assert isinstance(stream, LoggedStream)
        stream.log.append(("record", stream.name, self))
        super().record(stream)


def logged() -> tuple[StreamLane, StreamLane, list[tuple[Any, ...]]]:
    log: list[tuple[Any, ...]] = []
    lanes = [StreamLane(name, LoggedStream(name, log), LoggedEvent) for name in ("load", "compute")]
    log.clear()
    return lanes[0], lanes[1], log


def test_events_are_recorded_on_the_stream_that_carries_the_work() -> None:
    """Inside the stream's context: the start, the work, the end; an event of another stream would prove nothing."""
    load, _, log = logged()
    ticket = load.submit(lambda: log.append(("work",)), ())
    assert isinstance(ticket, StreamTicket)
    ticket.wait_launched()
    assert [step[:2] for step in log] == [
        ("enter", "load"),
        ("record", "load"),
        ("work",),
        ("record", "load"),
        ("exit", "load"),
    ]
    assert log[3][2] is ticket.done
    assert log[1][2] is not ticket.done


def test_a_burst_is_in_order_after_what_all_of_it_waits_for(lane: LaneRunner, thread: ThreadLane) -> None:
    let_go, seen = threading.Event(), list[int]()
    first = thread.submit(lambda: let_go.wait() and None, ())
    timer = threading.Timer(0.05, let_go.set)
    timer.start()
    tickets = lane.submit_burst([lambda number=number: seen.append(number) for number in range(5)], (first,))
    for ticket in tickets:
        ticket.wait()
    assert (len(tickets), seen) == (5, [0, 1, 2, 3, 4])
    assert let_go.is_set()
    spans = [ticket.span() for ticket in tickets]
    assert all(begin <= end for begin, end in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_burst_on_a_stream_has_an_event_between_two_works() -> None:
    """Its works are neighbours on the stream: the end of one is the start of the next."""
    load, _, log = logged()
    tickets = load.submit_burst([lambda: log.append(("work",))] * 3, ())
    for ticket in tickets:
        ticket.wait()
    assert [step[0] for step in log] == ["enter", "record", *["work", "record"] * 3, "exit"]
    assert all(first.span()[1] == second.span()[0] for first, second in pairwise(tickets))


def test_an_error_within_a_burst_reaches_whoever_waits_for_any_of_it() -> None:
    for kind in ("thread", "stream"):
        lane = KINDS[kind]()
        tickets = lane.submit_burst([lambda: None, fail(OSError("copy")), lambda: None], ())
        for ticket in tickets:
            with pytest.raises(OSError, match="copy"):
                ticket.wait()
        with pytest.raises(OSError, match="copy"):
            lane.submit(lambda: None, ()).wait()
        lane.close()


def test_streams_wait_for_streams_on_the_device() -> None:
    """No thread waits for the copy: the other stream is told to wait, before its own work."""
    load, compute, log = logged()
    copied = load.submit(lambda: log.append(("copy",)), ())
    used = compute.submit(lambda: log.append(("use",)), (copied,))
    assert isinstance(used, StreamTicket)
    used.wait_launched()
    waits = [step for step in log if step[0] == "wait"]
    assert isinstance(copied, StreamTicket)
    assert waits == [("wait", "compute", copied.done)]
    assert log.index(("copy",)) < log.index(waits[0]) < log.index(("use",))
    assert ("synchronize", "load") not in log


def test_a_stream_that_waits_for_nothing_recorded_fails() -> None:
    """A real device would not wait at all, or for ever."""
    stream, event = EmulatedStream(), EmulatedEvent()
    with pytest.raises(RuntimeError, match="never recorded"):
        stream.wait_event(event)
    with pytest.raises(RuntimeError, match="never recorded"):
        event.synchronize()
    event.record(stream)
    stream.wait_event(event)
    with pytest.raises(RuntimeError, match="never recorded"):
        event.elapsed_time(EmulatedEvent())


def test_work_that_fails_on_a_stream_leaves_no_end_behind() -> None:
    load, _, log = logged()
    with pytest.raises(OSError, match="copy"):
        load.submit(fail(OSError("copy")), ()).wait()
    assert [step[0] for step in log] == ["enter", "record", "exit"]


def test_spans_of_streams_are_on_the_hosts_clock() -> None:
    lane = StreamLane("test", EmulatedStream(), EmulatedEvent)
    before = time.perf_counter()
    ticket = lane.submit(lambda: time.sleep(0.01), ())
    ticket.wait()
    start, end = ticket.span()
    assert before - 1e-4 <= start <= end - 0.01
    assert end <= time.perf_counter() + 1e-4


def test_a_stream_that_waits_for_the_host_delays_no_other(thread: ThreadLane) -> None:
    """Work of other streams that was submitted later is done while the host is still at it."""
    load, compute, log = logged()
    let_go = threading.Event()
    host = thread.submit(lambda: let_go.wait() and None, ())
    late = load.submit(lambda: log.append(("late",)), (host,))
    follows = compute.submit(lambda: log.append(("follows",)), ())
    follows.wait()
    assert ("follows",) in log
    assert ("late",) not in log
    let_go.set()
    late.wait()
    assert ("late",) in log


def test_a_host_that_waits_for_a_stream_sleeps() -> None:
    """The thread takes next to no processor time while the device works."""
    ready_at = time.perf_counter() + 0.3

    class Slow(EmulatedEvent):
        def query(self) -> bool:
            return time.perf_counter() > ready_at

    began = time.thread_time()
    lanes_module.wait_asleep(Slow())
    assert time.perf_counter() >= ready_at
    assert time.thread_time() - began < 0.15


class DriftingEvent(EmulatedEvent):
    """An event of a device whose clock runs a thousand times as fast as the host's."""

    def elapsed_time(self, later: EmulatedEvent) -> float:
        return super().elapsed_time(later) * 1000


def test_times_do_not_drift_from_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin of times is renewed where the stream is idle."""
    lane = StreamLane("test", EmulatedStream(), DriftingEvent)
    monkeypatch.setattr(lanes_module, "IDLE_ORIGIN_S", 0.0)
    for _ in range(30):
        time.sleep(0.01)
        before = time.perf_counter()
        ticket = lane.submit(lambda: None, ())
        ticket.wait()
        assert abs(ticket.span()[0] - before) < 5  # 10 and more if the origin stayed
    lane.close()


def test_a_stream_that_is_never_idle_renews_its_origin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(EmulatedStream):
        def query(self) -> bool:
            return False

    made: list[EmulatedEvent] = []

    def event() -> EmulatedEvent:
        made.append(EmulatedEvent())
        return made[-1]

    lane = StreamLane("test", Busy(), event)
    monkeypatch.setattr(lanes_module, "IDLE_ORIGIN_S", 0.0)
    lane.submit(lambda: None, ()).wait()
    assert len(made) == 3 + 2  # of the origin; start and end
    monkeypatch.setattr(lanes_module, "OLDEST_ORIGIN_S", 0.0)
    lane.submit(lambda: None, ()).wait()
    assert len(made) == 3 + 2 + 3 + 2
    lane.close()


@pytest.mark.parametrize("kind", ["auto", "inline", "threads"])
@pytest.mark.parametrize("device", [False, True])
def test_lanes_work_with_the_threads_they_are_given(kind: str, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane that computes has its own thread team, those of the emulated device one; every team is closed."""
    here, closed = threading.local(), []

    class Noted(ThreadTeam):
        @contextmanager
        def working(self) -> Iterator[None]:
            before, here.team = getattr(here, "team", None), self
            yield
            here.team = before

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(machine_room, "ThreadTeam", Noted)
    demands = Demands(device=device, stages=device)
    shares = share_cores(topology(8), demands, at_most=6)
    lanes, seen = open_lanes(TWIN, kind, shares), {}
    for lane, runner in lanes.items():
        runner.submit(lambda lane=lane: seen.update({lane: getattr(here, "team", None)}), ()).wait()  # type: ignore[misc]
    for runner in lanes.values():
        runner.close()
    sizes = {lane: team.threads for lane, team in seen.items() if team is not None}
    if device:
        assert sizes == {Lane.CPU: 4, Lane.STAGE: 1}
    else:
        assert sizes == dict.fromkeys(set(Lane) - {Lane.DISK, Lane.EXCHANGE}, 6)
        assert len({id(team) for team in seen.values() if team is not None}) == 1
    assert {id(team) for team in closed} == {id(team) for team in seen.values() if team is not None}
    assert getattr(here, "team", None) is None


def test_a_lanes_own_thread_stays_on_the_cores_of_its_team() -> None:
    selected = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    lane = ThreadLane("near", ThreadTeam(1, [[selected[-1]]]))
    lane.submit(lambda: seen.append(os.sched_getaffinity(0)), ()).wait()
    lane.close()
    inline = InlineLane(ThreadTeam(1, [[selected[-1]]]))
    inline.submit(lambda: seen.append(os.sched_getaffinity(0)), ()).wait()
    inline.close()
    assert seen == [{selected[-1]}, set(selected)]


@pytest.mark.gpu
def test_streams_of_a_real_device_keep_the_order() -> None:
    """One stream fills, another doubles what it finds, over and over; a missed event would show."""
    device = find_machine("auto").device
    fill, double = StreamLane.on(device, "fill"), StreamLane.on(device, "double")
    here, present = (torch.zeros(1 << 22, device=device) for _ in range(2))
    torch.accelerator.synchronize()
    used: list[Any] = []
    for n in range(1, 30):
        filled = fill.submit(lambda n=n: here.fill_(n), used[-1:])  # type: ignore[misc]
        used.append(double.submit(lambda: torch.add(here, here, out=present), (filled,)))
        assert isinstance(used[-1], StreamTicket)
    used[-1].wait()
    assert present.eq(58).all()
    spans = [ticket.span() for ticket in used]
    assert all(start <= end for start, end in spans)
    fill.close()
    double.close()
