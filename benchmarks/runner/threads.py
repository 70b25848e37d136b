"""Where threads run and how long they spin, so that a turn has its cores to itself.

Two things went wrong without it on two cores (docs/log.md): torch's threads go on spinning for milliseconds after every
operation and take a core from whatever runs next; and the system wakes a pool's thread on the core of its waker after a
pause of ten milliseconds, and leaves both there for twenty and more, so that two threads have one core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAUSE_S = 0.005  # after a turn, until threads have stopped spinning
_SPINS = ("GOMP_SPINCOUNT", "10000")  # a fraction of a millisecond: from one operation to the next, not longer
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()  # before anything is bound
_TASKS = Path("/proc/self/task")


def restart_with_short_spins() -> None:
    """This program again, unless the variable is set, which OpenMP reads when it loads. Children inherit it."""
    name, value = _SPINS
    if name not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, name: value})


def spread() -> None:
    """The main thread to the first core this process may use, the workers of every pool to the others in turn.

    To be called when all pools have their threads. Elsewhere than on Linux nothing happens.
    """
    if not _TASKS.is_dir() or not ALL:
        return
    first, *others = _cores()
    os.sched_setaffinity(0, {first})
    workers = sorted(int(task.name) for task in _TASKS.iterdir() if int(task.name) != os.getpid())
    for number, worker in enumerate(workers):
        try:
            os.sched_setaffinity(worker, {others[number % len(others)] if others else first})
        except ProcessLookupError:
            continue


@contextmanager
def spreading() -> Iterator[None]:
    """`spread` within the context; afterwards the main thread may use every core, as an engine that it opens counts
    the cores that it may use."""
    spread()
    try:
        yield
    finally:
        unbind()


def bound() -> dict[str, str]:
    """The same for a child, in OpenMP's words."""
    return {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{core}}}" for core in _cores())} if ALL else {}


def unbind() -> None:
    """Every core again for the main thread, as in a child before it becomes another program."""
    if ALL:
        os.sched_setaffinity(0, ALL)


def _cores() -> list[int]:
    return sorted(ALL)
