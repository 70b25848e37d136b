"""Streams and events that need no accelerator: the twin of a GPU, in host memory, for tests and rehearsals.

Work is done when it is launched, so an event is complete once recorded. The interface is torch's.
"""

from __future__ import annotations

import time
from types import TracebackType


class EmulatedEvent:
    """An event that notes when it was recorded."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def record(self, stream: EmulatedStream) -> None:
        """Note now; everything launched so far is done."""
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """A recorded event is complete; waiting for one that was never recorded would hang on a real device."""
        if self._at_s is None:
            raise RuntimeError("waited for an event that was never recorded")

    def elapsed_time(self, later: EmulatedEvent) -> float:
        """Milliseconds to ``later``."""
        self.synchronize()
        later.synchronize()
        return ((later._at_s or 0.0) - (self._at_s or 0.0)) * 1e3


class EmulatedStream:
    """A stream whose work is done at once."""

    def __enter__(self) -> EmulatedStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def wait_event(self, event: EmulatedEvent) -> None:
        """Refuses an event that was never recorded, as a real stream would ignore it and race."""
        event.synchronize()

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""
