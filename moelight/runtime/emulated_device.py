"""Streams and events of the emulated device: a GPU in host memory, for tests and simulated runs without an accelerator.

Work is done when it is launched, so an event is complete once recorded. The interface is torch's.
"""

from __future__ import annotations

import time
from types import TracebackType


class EmulatedEvent:
    """An event that holds the time of its recording."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def record(self, stream: EmulatedStream) -> None:
        """Record the current time; everything launched so far is done."""
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once; raise RuntimeError if the event was never recorded, where a real device would hang."""
        if self._at_s is None:
            raise RuntimeError("waited for an event that was never recorded")

    def elapsed_time(self, later: EmulatedEvent) -> float:
        """Milliseconds to ``later``."""
        self.synchronize()
        later.synchronize()
        return ((later._at_s or 0.0) - (self._at_s or 0.0)) * 1e3


class EmulatedStream:
    """A stream whose work is done at launch."""

    def __enter__(self) -> EmulatedStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def wait_event(self, event: EmulatedEvent) -> None:
        """Return at once; raise RuntimeError if the event was never recorded, where a real stream would race."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once: no work is outstanding."""
