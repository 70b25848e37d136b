"""Lanes: resources that run one piece of work after another, with the threads, streams and events of a run.

Other lanes and the executor wait for the ticket of a piece of work. A lane that failed rejects all later work, so no
reader sees the output of a failed writer.
"""

from __future__ import annotations

import queue
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from moelight.core.errors import MoelightError
from moelight.kernels.device import Device, wakes
from moelight.kernels.threads import ThreadTeam

IDLE_ORIGIN_S = 1.0
OLDEST_ORIGIN_S = 60.0
SPIN_S = 50e-6
SLEEP_S = 50e-6  # the kernel's timer slack adds as much


class Pending(Protocol):
    """Work that continues by itself after it was begun."""

    def wait(self) -> None:
        """Block the calling thread until the work is done; raise its error."""
        ...


class Skipped:
    """Outcome of work that had nothing to do."""


SKIPPED = Skipped()


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Outcome of work that found out how many ``bytes`` to move; ``rest`` continues by itself, since ``since_s``."""

    bytes: int
    rest: Pending | None = None
    since_s: float | None = None


Outcome = Pending | MovedBytes | Skipped | None
Work = Callable[[], Outcome]


class Signal:
    """Set once; `wait` returns from then on. A fifth of the cost of `threading.Event`, which a pass over small pages
    makes hundreds of."""

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = allocate_lock()
        self._unset.acquire()

    def set(self) -> None:
        self._unset.release()

    def wait(self) -> None:
        with self._unset:
            pass


# Submitted work. `skipped` and `found_bytes` (None if known before) hold once it is done, and `span`: its start and end
# in seconds of `time.perf_counter`.
Ticket: TypeAlias = "HostTicket | StreamTicket"
# A lane: `submit` runs work after everything submitted before it and after all of the tickets given.
LaneRunner: TypeAlias = "InlineLane | ThreadLane | StreamLane"
_Submitted: TypeAlias = "tuple[Sequence[Work], Sequence[Ticket], Sequence[Any], Signal]"


class HostTicket:
    """Ticket of work done or begun by a thread of this process, which sets ``done`` (None: done before it returns)."""

    __slots__ = ("done", "end_s", "error", "found_bytes", "skipped", "start_s")

    def __init__(self, done: Signal | None = None) -> None:
        self.done = done
        self.skipped = False
        self.found_bytes: int | None = None
        self.start_s = self.end_s = 0.0
        self.error: BaseException | None = None

    def wait(self) -> None:
        if self.done is not None:
            self.done.wait()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start_s, self.end_s

    def carry_out(self, work: Work) -> None:
        """``work`` runs to its end on the calling thread."""
        self.start_s = time.perf_counter()
        try:
            self.finish(work())
        finally:
            self.end_s = time.perf_counter()

    def finish(self, outcome: Outcome) -> None:
        if isinstance(outcome, MovedBytes):
            self.start_s = self.start_s if outcome.since_s is None else outcome.since_s
            self.found_bytes, outcome = outcome.bytes, outcome.rest
        if isinstance(outcome, Skipped):
            self.skipped = True
        elif outcome is not None:
            outcome.wait()


class InlineLane:
    """A lane on the calling thread: work is done when ``submit`` returns; kernels run on the threads of ``team``.

    ``device_waits``, of every lane: how often its thread waited for work on a device.
    """

    def __init__(self, team: ThreadTeam | None = None) -> None:
        self.device_waits = 0
        self._broken: BaseException | None = None
        self._team = team

    def submit(self, work: Work, after: Sequence[Ticket]) -> Ticket:
        if self._broken is not None:
            raise self._broken
        ticket = HostTicket()
        try:
            self.device_waits += _wait_for(after)
            with _working(self._team):
                ticket.carry_out(work)
        except BaseException as error:  # later work may depend on this, so any error counts
            self._broken = error
            raise
        return ticket

    def submit_burst(self, works: Sequence[Work], after: Sequence[Ticket]) -> Sequence[Ticket]:
        """`submit` of each, all of which wait for ``after``."""
        return [self.submit(work, after) for work in works]

    def close(self) -> None:
        _dismiss(self._team)


class ThreadLane:
    """A lane with a thread of its own; kernels and reads release the GIL, so lanes overlap. With a ``team``, the thread
    and the threads that torch starts for it are bound to the team's cores."""

    def __init__(self, name: str, team: ThreadTeam | None = None) -> None:
        self.device_waits = 0
        self._team = team
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"moelight-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Ticket]) -> Ticket:
        return self.submit_burst((work,), after)[0]

    def submit_burst(self, works: Sequence[Work], after: Sequence[Ticket]) -> Sequence[Ticket]:
        """Works that begin one after another once ``after`` is done; waiting for one waits for the whole burst."""
        if self._closed:
            raise MoelightError(f"{self._thread.name} is closed")
        done = Signal()
        tickets = [self._ticket(done) for _ in works]
        self._queue.put((works, after, tickets, done))
        return tickets

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        _dismiss(self._team)

    def _ticket(self, done: Signal) -> Ticket:
        return HostTicket(done=done)

    def _serve(self) -> None:
        torch.get_num_threads()  # its own number from now on, see `one_thread_for_torch`
        if self._team is not None:
            self._team.settle()
        with _working(self._team):
            while (item := self._queue.get()) is not None:
                works, after, tickets, done = item
                try:
                    if self._broken is not None:
                        raise self._broken
                    self._carry_out(works, after, tickets)
                except BaseException as error:  # noqa: BLE001 - every waiter must receive any error
                    self._broken = error
                    for ticket in tickets:
                        ticket.error = error
                finally:
                    done.set()

    def _carry_out(self, works: Sequence[Work], after: Sequence[Ticket], tickets: Sequence[Any]) -> None:
        self.device_waits += _wait_for(after)
        for work, ticket in zip(works, tickets, strict=True):
            ticket.carry_out(work)


_Begun = tuple[Outcome, HostTicket, Signal]


class PendingLane(ThreadLane):
    """A lane that does not wait for the end of earlier work, so that a resource with a queue (a disk) is never idle.
    Ends are recorded in order of beginnings, so spans do not overlap."""

    def __init__(self, name: str) -> None:
        self._begun: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._ending = threading.Thread(target=self._end, name=f"moelight-{name}-ends", daemon=True)
        self._ending.start()
        super().__init__(name)

    def submit_burst(self, works: Sequence[Work], after: Sequence[Ticket]) -> Sequence[Ticket]:
        return [super(PendingLane, self).submit_burst((work,), after)[0] for work in works]

    def close(self) -> None:
        super().close()
        self._ending.join()

    def _serve(self) -> None:
        torch.get_num_threads()  # its own number from now on, see `one_thread_for_torch`
        while (item := self._queue.get()) is not None:
            (work,), after, (ticket,), done = item
            outcome: Outcome = None
            try:
                if self._broken is not None:
                    raise self._broken
                self.device_waits += _wait_for(after)
                ticket.start_s = time.perf_counter()
                outcome = work()
            except BaseException as error:  # noqa: BLE001 - every waiter must receive any error
                self._broken = ticket.error = error
            self._begun.put((outcome, ticket, done))
        self._begun.put(None)

    def _end(self) -> None:
        last_s = 0.0
        while (item := self._begun.get()) is not None:
            outcome, ticket, done = item
            try:
                ticket.finish(outcome)
                if self._broken is not None:
                    raise self._broken
            except BaseException as error:  # noqa: BLE001 - every waiter must receive any error
                self._broken = ticket.error = error
            finally:
                ticket.start_s = max(ticket.start_s, last_s)
                ticket.end_s = last_s = max(ticket.start_s, time.perf_counter())
                done.set()


class StreamTicket:
    """Ticket of work between two events on a device stream. ``done`` may be waited for once ``launched`` is set; other
    streams do so without blocking the host."""

    __slots__ = ("_origin", "_start", "done", "error", "found_bytes", "lane", "launched", "skipped")

    def __init__(self, lane: StreamLane, launched: Signal) -> None:
        self.lane, self.launched = lane, launched
        self.error: BaseException | None = None
        self.skipped = False
        self.found_bytes: int | None = None

    def launch(
        self, work: Work, stream: Any, new_event: Callable[[], Any], origin: ClockOrigin, start: Any = None
    ) -> None:
        """``work`` enqueues operations on ``stream``, the current one, which ``start`` was recorded on last."""
        if start is None:
            start = new_event()
            start.record(stream)
        self._origin, self._start, self.done = origin, start, new_event()
        outcome = work()
        self.done.record(stream)
        self.skipped = isinstance(outcome, Skipped)
        self.found_bytes = outcome.bytes if isinstance(outcome, MovedBytes) else None

    def wait_launched(self) -> None:
        self.launched.wait()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        self.wait_launched()
        wait_asleep(self.done)

    def span(self) -> tuple[float, float]:
        return self._origin.seconds(self._start), self._origin.seconds(self.done)


def wait_asleep(event: Any) -> None:
    """Wait for ``event`` without a busy core, which would be one of the CPU's attention and experts.

    A CUDA event that blocks puts the thread to sleep in the driver, without the GIL. Others spin in their own
    synchronisation, so they are asked from time to time; a wait that is over within `SPIN_S` does not sleep."""
    if wakes(event):
        event.synchronize()
        return
    spins_until = time.perf_counter() + SPIN_S
    while not event.query():
        if time.perf_counter() > spins_until:
            time.sleep(SLEEP_S)


class ClockOrigin:
    """An event whose time on the host's clock is known, from which the times of later events are measured.

    CUDA counts milliseconds in float32, 0.1 us apart after a second and 4 us after a minute.
    """

    def __init__(self, event: Any, at_s: float) -> None:
        self.event, self.at_s = event, at_s

    @classmethod
    def now(cls, stream: Any, new_event: Callable[[], Any]) -> ClockOrigin:
        """An origin at the end of what ``stream`` was given, which is waited for: of three events the one whose host
        time is known best."""
        readings = []
        for _ in range(3):
            event, before = new_event(), time.perf_counter()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter()
            readings.append((after - before, (before + after) / 2, event))
        _, at_s, event = min(readings, key=lambda reading: reading[0])
        return cls(event, at_s)

    def seconds(self, event: Any) -> float:
        """`time.perf_counter` when ``event`` was reached."""
        return self.at_s + float(self.event.elapsed_time(event)) / 1e3


class StreamLane(ThreadLane):
    """A stream of an accelerator (CUDA, ROCm, XPU).

    The lane's thread launches work and waits for host lanes, so that a stream whose next work waits for the host delays
    no other. Streams wait for each other on the device. On the emulated device the thread and the ``team`` do the work.
    """

    def __init__(self, name: str, stream: Any, new_event: Callable[[], Any], team: ThreadTeam | None = None) -> None:
        self._stream, self._new_event = stream, new_event
        self._origin = ClockOrigin.now(stream, new_event)
        super().__init__(name, team)

    @classmethod
    def on(cls, device: torch.device, name: str) -> StreamLane:
        return cls(name, Device(device).stream(), partial(Device(device).event, timed=True))

    def close(self) -> None:
        super().close()
        self._stream.synchronize()

    def _ticket(self, done: Signal) -> Ticket:
        return StreamTicket(self, done)

    def _carry_out(self, works: Sequence[Work], after: Sequence[Ticket], tickets: Sequence[Any]) -> None:
        for earlier in after:
            if not isinstance(earlier, StreamTicket):
                earlier.wait()
            elif earlier.lane is not self:  # a stream keeps its own order
                earlier.wait_launched()
                self._stream.wait_event(earlier.done)
        self._follow_clock()
        start = None
        with self._stream:
            for work, ticket in zip(works, tickets, strict=True):
                ticket.launch(work, self._stream, self._new_event, self._origin, start)
                start = ticket.done

    def _follow_clock(self) -> None:
        """Renew the origin where the stream is idle, or once it is old: device and host clocks drift apart."""
        age = time.perf_counter() - self._origin.at_s
        if age > OLDEST_ORIGIN_S or (age > IDLE_ORIGIN_S and self._stream.query()):
            self._origin = ClockOrigin.now(self._stream, self._new_event)


def _wait_for(tickets: Sequence[Ticket]) -> int:
    """Block the calling thread until all work of ``tickets`` is done; returns how much of it was a device's."""
    for ticket in tickets:
        ticket.wait()
    return sum(isinstance(ticket, StreamTicket) for ticket in tickets)


def _working(team: ThreadTeam | None) -> AbstractContextManager[None]:
    return nullcontext() if team is None else team.working()


def _dismiss(team: ThreadTeam | None) -> None:
    if team is not None:
        team.close()
