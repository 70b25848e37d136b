"""Paths that a reader of files must not follow to the end: what waits for ever, and what never ends.

`ENDLESS` makes each kind at a path; `guarded` ends a test that meets one and does not know what it is.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moelight.core.units import GiB

_ROOM_BYTES = 3 * GiB
_HUNG_S = 100


def _fifo_elsewhere(path: Path) -> None:
    """A link to a FIFO, which a process that reads and writes it holds open: there is no end of file either."""
    target = path.with_name(f"{path.name}.fifo")
    os.mkfifo(target)
    path.symlink_to(target)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        try:
            listening.bind(path.name)
        finally:
            os.chdir(before)


# By kind: what makes it at a path where nothing is, and what a refusal calls it.
ENDLESS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "link to a fifo": (_fifo_elsewhere, "a FIFO"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "socket": (_socket, "No such device or address"),
    "directory": (lambda path: path.mkdir(), "directory"),
}


def put(kind: str, path: Path) -> Path:
    """Put that kind in place of the file ``path``, if there is one; returns ``path``."""
    path.unlink(missing_ok=True)
    ENDLESS[kind][0](path)
    return path


@contextmanager
def guarded() -> Iterator[None]:
    """Three GiB more of memory and no more, and an alarm for who waits; a reader that knows better meets neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()

    def ring(*_: object) -> None:
        raise TimeoutError("it waits for a file that has no end")

    before = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, hard))
    signal.alarm(_HUNG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
