"""How pages cross from their home into slots beside the compute unit, and how the computation waits for them.

Reads of a disk and copies within memory go by a lane of threads, copies to a device by a stream of its own. On a device
order among streams is what keeps a slot from being overwritten while it is read; beside a CPU whoever submits keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from moelight.integrations.page_stores import Into, OffloadStore, PendingBytes
from moelight.runtime.lanes import LaneRunner, PendingLane, StreamLane, Ticket


class SlotTransfer:
    """One page on its way into a slot. ``arrived``: whoever computes may use it without another wait."""

    __slots__ = ("_ticket", "_wait", "arrived")

    def __init__(self) -> None:
        self.arrived = False
        self._ticket: Ticket | None = None
        self._wait: Callable[[Ticket], None] | None = None

    def sent(self, ticket: Ticket, wait: Callable[[Ticket], None]) -> None:
        """It is under way."""
        self._ticket, self._wait = ticket, wait

    def wait(self) -> None:
        """Have the computation wait for it; raise what went wrong."""
        if self._ticket is not None and self._wait is not None:
            self._wait(self._ticket)
        self.arrived = True

    def seconds(self) -> float:
        """How long it took; only once it has arrived."""
        if self._ticket is None:
            return 0.0
        begin, end = self._ticket.span()
        return end - begin


class PageLink(Protocol):
    """The way from a home to the slots. ``held``: a slot in flight must not be given away before it has arrived."""

    held: bool

    def start(self, home: OffloadStore, layer: int, expert: int, into: Into) -> SlotTransfer:
        """Begin to move a page; in the order of calls."""
        ...

    def close(self) -> None:
        """Finish what was begun."""
        ...


class HostLink:
    """A lane of threads: reads begin one after the other, and their ends are waited for elsewhere."""

    held = True

    def __init__(self) -> None:
        self._lane: LaneRunner = PendingLane("experts")

    def start(self, home: OffloadStore, layer: int, expert: int, into: Into) -> SlotTransfer:
        in_flight = SlotTransfer()
        ticket = self._lane.submit(lambda: _Landing(home.start(layer, expert, into), in_flight), ())
        in_flight.sent(ticket, lambda sent: sent.wait())
        return in_flight

    def close(self) -> None:
        self._lane.close()


class _Landing:
    """Notes the arrival in the lane's own thread."""

    def __init__(self, arriving: PendingBytes | None, in_flight: SlotTransfer) -> None:
        self._arriving, self._flight = arriving, in_flight

    def wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._flight.arrived = True


class StreamLink:
    """A stream of the device. A copy waits for all that was launched before it on the stream that computes, so a slot
    whose expert was in use is overwritten after that use; and that stream waits for the copies it needs."""

    held = False

    def __init__(self, copies: StreamLane, compute: Callable[[], StreamLane]) -> None:
        self._copies, self._compute = copies, compute

    @classmethod
    def on(cls, device: torch.device) -> StreamLink:
        """To ``device``, for whatever stream is current there when a layer computes."""
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
    """What is launched on a stream for its events alone."""
