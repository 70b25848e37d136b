"""Gangs: threads of their own for the kernels that one lane calls, on cores of their own if wanted.

Knows processors by their numbers. Refuses to know who gets which (`runtime.cores` says that). Without the extension a
gang is nothing: torch's threads compute then, and those are torch's to place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from moelight.kernels import native


class ThreadTeam:
    """At most ``threads`` threads, the caller among them; fewer where a call asks for fewer.

    With ``places``, one for each thread and each a list of processors, threads are bound to them where the system
    allows it; who calls is not, but stands in for the thread of the place it is on. Threads are born when first wanted.

    Raises ValueError, naming the argument, for a wrong number of threads or places.
    """

    def __init__(self, threads: int, places: Sequence[Sequence[int]] = ()) -> None:
        if threads < 1:
            raise ValueError(f"threads: must be a positive integer, is {threads!r}")
        if places and len(places) != threads:
            raise ValueError(f"places: must be one for each of the {threads} threads, are {len(places)}")
        if any(not place or min(place) < 0 for place in places):
            raise ValueError("places: each must name processors, by numbers from 0 on")
        self.threads, self.places = threads, tuple(tuple(place) for place in places)
        self._extension = native.extension()
        self._team: Any = None if self._extension is None else self._extension.make_team(threads, self.places)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Kernels that the calling thread calls meanwhile run on this gang."""
        if self._extension is None:
            yield
            return
        before = self._extension.work_with(self._team)
        try:
            yield
        finally:
            self._extension.work_with(before)

    def settle(self) -> None:
        """The calling thread stays on the gang's places from now on: for a thread that ends with its lane."""
        if self.places and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # none of them is allowed any more
                os.sched_setaffinity(0, {processor for place in self.places for processor in place})

    def close(self) -> None:
        """End the threads. What is called with the gang later is worked through by its caller alone."""
        if self._team is not None:
            self._team.end()
