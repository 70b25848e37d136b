"""The trace of a job while it runs: written pass by pass, in its place when the job is done.

Knows files and the trace's writer. Refuses to end a job because its trace cannot be written: that is said afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from moelight.batch.output import whole_file
from moelight.core.errors import InputError
from moelight.core.timeline import Timeline
from moelight.observe.trace import About, TraceWriter


class RunTrace:
    """Passes go to the file as they end. ``about``, once it is known, is what the trace says of the run."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._writer = TraceWriter(write)
        self._fault: InputError | OSError | None = None
        self.about: About | None = None

    def add(self, timeline: Timeline) -> None:
        """The next pass; nothing more is written once writing has failed."""
        if self._fault is not None:
            return
        try:
            self._writer.add(timeline)
        except (InputError, OSError) as fault:
            self._fault = fault

    def finish(self) -> None:
        """No pass follows; raises what kept the trace from being written."""
        if self._fault is not None:
            raise self._fault
        self._writer.finish(self.about)


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[RunTrace | None]:
    """The trace that ``path`` will hold once `RunTrace.finish` was called and the block ends well; None for none.

    Raises:
        InputError: ``path`` cannot be written.
    """
    if path is None:
        yield None
        return
    with whole_file(path, what="trace") as write:
        yield RunTrace(write)
