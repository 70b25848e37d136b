"""Processor time taken by other programs during a measurement: figures measured under load are too low.

Reads /proc; without it the load counts as 0.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")
# Columns of a processor in /proc/stat: user, nice, system, irq, softirq, steal; not idle and iowait.
_BUSY = (0, 1, 2, 5, 6, 7)


class Others:
    """Load by other programs since construction, on the processors that threads of this process could use then."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc, self._processors = proc, _processors()
        self._began = self._now()

    def cores(self) -> float:
        """Mean number of processors that other programs kept busy; 0 if unknown."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 and busy > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Seconds: wall clock, busy time of the watched processors, processor time of this process."""
        return time.perf_counter(), self._busy_seconds(), time.process_time()

    def _busy_seconds(self) -> float:
        names = {f"cpu{number}" for number in self._processors}
        try:
            lines = [line.split() for line in (self._proc / "stat").read_text(encoding="ascii").splitlines()]
            ticks = sum(int(line[1 + column]) for line in lines if line and line[0] in names for column in _BUSY)
        except (OSError, ValueError, IndexError):
            return 0.0
        return ticks / os.sysconf("SC_CLK_TCK")


def _processors() -> frozenset[int]:
    """Processors of all threads of this process; each thread may be bound to a processor of its own."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    found = set(os.sched_getaffinity(0))
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return frozenset(found)
    for thread in threads:
        try:
            found |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # the thread has ended
            continue
    return frozenset(found)
