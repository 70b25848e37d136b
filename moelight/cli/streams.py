"""Standard streams that the program was begun without, and a standard error that cannot end it.

What is said on standard error is for people who may be gone: closed, on a full disk or a pipe that nobody reads, it
changes neither what the program does nor its exit code. A closed standard input is empty, and what is written to a
closed standard output fails.
"""

from __future__ import annotations

import io
import os
import sys


def shield_streams() -> None:
    """Open what is closed, and let the process's own standard error swallow what cannot be written. Streams that were
    put in their places are left."""
    for descriptor in range(3):
        _occupy(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it is the stream from now on)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = _swallowing(2, "utf-8")
    elif sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _swallowing(sys.__stderr__.fileno(), sys.__stderr__.encoding)


def _occupy(descriptor: int) -> None:
    """``descriptor`` is open, if only on nothing and to be read: else the next file that is opened gets it, and with
    it whatever libraries write there."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


def _swallowing(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """As the interpreter makes its own: lines go out as they end, and what cannot be encoded is escaped."""
    buffer = io.BufferedWriter(_Swallowing(descriptor))  # type: ignore[type-var]
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=True, write_through=True)


class _Swallowing(io.RawIOBase):
    """Writes to a descriptor that it does not own; what the system refuses is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(data)
