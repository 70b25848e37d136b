"""How much of this process's processors other programs took meanwhile: figures read under load are too low.

Knows /proc. Where there is none, nobody is suspected.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")
# Of the counters of a processor: user, nice, system, irq, softirq, steal. Idle and waiting are no work.
_BUSY = (0, 1, 2, 5, 6, 7)


class Others:
    """Watches from when it is made, the processors that threads of this process could use then."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc, self._processors = proc, _processors()
        self._began = self._now()

    def cores(self) -> float:
        """Processors, on average, that were busy with something else; 0 where that is not known."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 and busy > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of work on those processors, of work of this process."""
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
    """Of all threads together: each may be bound to a processor of its own, and the time of this process is theirs."""
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
        except ProcessLookupError:  # it has ended
            continue
    return frozenset(found)
