"""Threads of kernels: teams reserved for the kernels that one lane calls, optionally bound to cores.

`runtime.topology` assigns cores to lanes. Without the extension a team has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from moelight.kernels import native


class ThreadTeam:
    """A team of at most ``threads`` threads, the caller included; fewer if a call requests fewer.

    ``places`` is one list of processors per thread; threads are bound to them where the system allows it. The caller is
    not bound, but replaces the thread of the place it runs on. Threads are started at first use.
    """

    def __init__(self, threads: int, places: Sequence[Sequence[int]] = ()) -> None:
        if threads < 1:
            raise ValueError(f"threads: must be a positive integer, is {threads!r}")
        if places and len(places) != threads:
            raise ValueError(f"places: must be one for each of the {threads} threads, are {len(places)}")
        if any(not cores or min(cores) < 0 for cores in places):
            raise ValueError("places: each must name processors, by numbers from 0 on")
        self.threads, self.places = threads, tuple(tuple(cores) for cores in places)
        self._extension = native.extension()
        self._team: Any = None if self._extension is None else self._extension.make_team(threads, self.places)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Kernels that the calling thread calls within the context run on this team."""
        if self._extension is None:
            yield
            return
        before = self._extension.use_team(self._team)
        try:
            yield
        finally:
            self._extension.use_team(before)

    def settle(self) -> None:
        """Bind the calling thread to the team's places from now on: for a thread that ends with its lane."""
        if self.places and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # none of the processors is allowed any more
                os.sched_setaffinity(0, {processor for cores in self.places for processor in cores})

    def close(self) -> None:
        """End the threads. Later calls with the team run on their caller alone."""
        if self._team is not None:
            self._team.end()
