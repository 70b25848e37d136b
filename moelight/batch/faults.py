"""Fault injection for tests: kill this process or fail its disk at a point. Inactive unless ``MOELIGHT_FAULT`` is set.

``MOELIGHT_FAULT=POINT:COUNT:ACTION`` acts when ``POINT`` (``*``: any) is reached for the ``COUNT``-th time, from 1:
``kill`` sends SIGKILL, an error's name (``ENOSPC``, ``EIO``) raises that OSError. ``mid_write`` writes half of the
bytes first: a torn line. ``row_N``, no point of the journal, is reached when row N, from 0, is prepared.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from dataclasses import dataclass, field

POINTS = (
    "before_write", "mid_write", "after_write", "before_fsync_rows", "after_fsync_rows", "before_journal_write",
    "mid_journal_write", "after_journal_write", "after_journal_fsync", "before_rename", "after_rename",
    "before_final_record", "after_final_record",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _InjectedFault:
    point: str
    count: int
    action: str
    reached: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def reach(self, point: str, fd: int, data: bytes, offset: int) -> None:
        if self.point not in (point, "*") or next(self.reached) != self.count:
            return
        if data:
            os.pwrite(fd, data[: len(data) // 2], offset)
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.action)
        raise OSError(number, os.strerror(number))


def _from_environment() -> _InjectedFault | None:
    told = os.environ.get("MOELIGHT_FAULT")
    if told is None:
        return None
    point, count, action = told.split(":")
    return _InjectedFault(point=point, count=int(count), action=action)


_FAULT = _from_environment()


def reach(point: str, fd: int = -1, data: bytes = b"", offset: int = 0) -> None:
    """Mark ``point`` as reached; at ``mid_write``, ``data`` is about to be written at ``offset`` of ``fd``."""
    if _FAULT is not None:
        _FAULT.reach(point, fd, data, offset)
