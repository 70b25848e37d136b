"""Exclusive file locks: one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from moelight.batch.append import open_private
from moelight.core.errors import InputError

_HOLDER = re.compile(rb'"pid":(\d+)')


def open_locked(path: Path, *, shown: Path) -> int:
    """Open ``path``, created if missing, with an exclusive lock that is held until the descriptor is closed.

    Opens read-only if the file or its file system is read-only.

    Raises:
        InputError: another process holds the lock; named by the last ``"pid":N`` in the file, if any.
        OSError: the file cannot be opened.
    """
    while True:
        try:
            fd = open_private(path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.exists():
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            hold(fd, path, shown=shown)
            # The previous holder may have removed the file in between: then the lock is on an unlinked file.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def hold(fd: int, path: Path, *, shown: Path) -> None:
    """Lock the file of ``fd`` until the descriptor is closed.

    Raises:
        InputError: another process holds the lock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = _HOLDER.findall(path.read_bytes()) if path.suffix == ".journal" else []
        who = f"process {int(found[-1])}" if found else "another process"
        raise InputError(f"output {shown}: is being written by {who}", code="job_running") from None
