"""The trace of a running job: written pass by pass to a sibling, renamed when the job is done.

A failed write of the trace does not end the job; `RunTrace.finish` raises it afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from moelight.batch.output import whole_file
from moelight.core.errors import InputError
from moelight.core.timeline import Timeline
from moelight.observe.trace import TraceHeader, TraceWriter


class RunTrace:
    """Writes passes to the file as they end. ``about`` is the header of the trace, once it is known."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._writer = TraceWriter(write)
        self._fault: InputError | OSError | None = None
        self.about: TraceHeader | None = None

    def add(self, timeline: Timeline) -> None:
        """Write a pass; does nothing after a failed write."""
        if self._fault is not None:
            return
        try:
            self._writer.add(timeline)
        except (InputError, OSError) as fault:
            self._fault = fault

    def finish(self) -> None:
        """End the trace; raises the error of a failed write."""
        if self._fault is not None:
            raise self._fault
        self._writer.finish(self.about)


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[RunTrace | None]:
    """Yield the trace that ``path`` holds once `RunTrace.finish` was called and the block ends without error, or None.

    Raises:
        InputError: ``path`` cannot be written.
    """
    if path is None:
        yield None
        return
    with whole_file(path, what="trace") as write:
        yield RunTrace(write)
