"""One writer at a time. Knows descriptors and processes; refuses to know what is written."""

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
    """A descriptor of ``path``, made if it is missing, that nobody else holds until it is closed.

    Read-only where the file or its file system is.

    Raises:
        InputError: another process holds it, named where the file says which: it keeps ``"pid":N`` of whom opens it.
        OSError: it cannot be opened.
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
            # Whoever held it may have removed it in between: then the lock is on a file without a name.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def hold(fd: int, path: Path, *, shown: Path) -> None:
    """Lock what ``fd`` stands for until it is closed.

    Raises:
        InputError: another process holds it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = _HOLDER.findall(path.read_bytes()) if path.suffix == ".journal" else []
        who = f"process {int(found[-1])}" if found else "another process"
        raise InputError(f"output {shown}: is being written by {who}", code="job_running") from None
