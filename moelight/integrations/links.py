"""Transfers of pages from an offload store into slots beside the compute unit, and the computation's waits for them.

Disk reads and copies within memory run on a lane of threads, copies to a device on a separate stream. On a device,
stream order keeps a slot from being overwritten while it is read; on a CPU the caller must ensure that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from moelight.integrations.page_stores import Into, OffloadStore, PendingBytes
from moelight.runtime.lanes import LaneRunner, PendingLane, StreamLane, Ticket


class SlotTransfer:
    """One page in flight to a slot. ``arrived``: the page may be read without another wait."""

    __slots__ = ("_ticket", "_wait", "arrived")

    def __init__(self) -> None:
        self.arrived = False
        self._ticket: Ticket | None = None
        self._wait: Callable[[Ticket], None] | None = None

    def sent(self, ticket: Ticket, wait: Callable[[Ticket], None]) -> None:
        """Record that the transfer was submitted."""
        self._ticket, self._wait = ticket, wait

    def wait(self) -> None:
        """Make the computation wait for the page; raises the transfer's error."""
        if self._ticket is not None and self._wait is not None:
            self._wait(self._ticket)
        self.arrived = True

    def seconds(self) -> float:
        """Duration of the transfer; valid only once the page has arrived."""
        if self._ticket is None:
            return 0.0
        begin, end = self._ticket.span()
        return end - begin


class PageLink(Protocol):
    """Transfers pages from an offload store to the slots. ``held``: a slot in flight must not be reused before its page
    has arrived."""

    held: bool

    def start(self, home: OffloadStore, layer: int, expert: int, into: Into) -> SlotTransfer:
        """Start the transfer of a page; transfers run in the order of calls."""
        ...

    def close(self) -> None:
        """Finish all started transfers."""
        ...


class HostLink:
    """A lane of threads: reads start one after the other and are awaited concurrently."""

    held = True

    def __init__(self) -> None:
        self._lane: LaneRunner = PendingLane("experts")

    def start(self, home: OffloadStore, layer: int, expert: int, into: Into) -> SlotTransfer:
        in_flight = SlotTransfer()
        ticket = self._lane.submit(lambda: _MarkArrived(home.start(layer, expert, into), in_flight), ())
        in_flight.sent(ticket, lambda sent: sent.wait())
        return in_flight

    def close(self) -> None:
        self._lane.close()


class _MarkArrived:
    """Marks a transfer as arrived in the lane's own thread."""

    def __init__(self, arriving: PendingBytes | None, in_flight: SlotTransfer) -> None:
        self._arriving, self._flight = arriving, in_flight

    def wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._flight.arrived = True


class StreamLink:
    """A stream of the device. A copy waits for all earlier work on the compute stream, so a slot is overwritten only
    after its last use; the compute stream waits for the copies it needs."""

    held = False

    def __init__(self, copies: StreamLane, compute: Callable[[], StreamLane]) -> None:
        self._copies, self._compute = copies, compute

    @classmethod
    def on(cls, device: torch.device) -> StreamLink:
        """A link to ``device`` for whichever stream is current there when a layer computes."""
        lanes: dict[int, StreamLane] = {}

        def compute() -> StreamLane:
            stream = torch.accelerator.current_stream(device)
            if stream.stream_id not in lanes:
                lanes[stream.stream_id] = StreamLane(stream, lambda: torch.Event(device=device, enable_timing=True))
            return lanes[stream.stream_id]

        return cls(StreamLane.on(device), compute)

    def start(self, home: OffloadStore, layer: int, expert: int, into: Into) -> SlotTransfer:
        in_flight = SlotTransfer()
        before = self._compute().submit(_nothing, ())
        ticket = self._copies.submit(lambda: home.start(layer, expert, into), (before,))
        in_flight.sent(ticket, self._wait_for)
        return in_flight

    def close(self) -> None:
        self._copies.close()

    def _wait_for(self, ticket: Ticket) -> None:
        self._compute().submit(_nothing, (ticket,))


def _nothing() -> None:
    """Launched on a stream for its events alone."""
