"""Threads and files of this process, listed while some of them end. A joined thread stays in the kernel's list for a
moment, and an entry may be gone between its listing and its reading."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

TASKS, DESCRIPTORS = Path("/proc/self/task"), Path("/proc/self/fd")


def affinities() -> dict[int, set[int]]:
    """Processors by thread."""
    result = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):
            result[int(task.name)] = os.sched_getaffinity(int(task.name))
    return result


def descriptors() -> dict[int, Path]:
    """Targets by descriptor; the listing's descriptor is closed by then."""
    result = {}
    for link in list(DESCRIPTORS.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            result[int(link.name)] = link.readlink()
    return result


def holds_at_last(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    """``condition`` is true before the time is over."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def threads_end(before: Collection[int]) -> bool:
    """Every thread that is not of ``before`` has left the kernel's list, or does so in time."""
    return holds_at_last(lambda: not affinities().keys() - set(before))
