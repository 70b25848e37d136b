"""How much of this process's processors other programs took meanwhile: figures read under load are too low.

Knows /proc/stat. Where there is none, nobody is suspected.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")
# Of the counters of a processor: user, nice, system, irq, softirq, steal. Idle and waiting are no work.
_BUSY = (0, 1, 2, 5, 6, 7)


class Others:
    """Watches from when it is made."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc = proc
        self._began = self._now()

    def cores(self) -> float:
        """Processors, on average, that were busy with something else; 0 where that is not known."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 and busy > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of work on the processors this process may use, of work of this process."""
        return time.perf_counter(), _busy_seconds(self._proc), time.process_time()


def _busy_seconds(proc: Path) -> float:
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    try:
        lines = [line.split() for line in (proc / "stat").read_text(encoding="ascii").splitlines()]
        ticks = sum(int(line[1 + column]) for line in lines if line and line[0] in usable for column in _BUSY)
    except (OSError, ValueError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")
