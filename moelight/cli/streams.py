"""Opens missing standard streams and makes write errors on standard error harmless.

A standard error that is closed, on a full disk, or a pipe without a reader changes neither the behaviour of the program
nor its exit code. A closed standard input reads as empty, and writes to a closed standard output fail.
"""

from __future__ import annotations

import io
import os
import sys


def shield_streams() -> None:
    """Open closed standard streams and ignore write errors on the process's own standard error.

    Streams that replace the original ones are left unchanged.
    """
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
    """Open ``descriptor`` read-only on the null device if it is closed.

    Otherwise the next opened file would get the number, and with it the output that libraries write there.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


def _swallowing(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """Return a line-buffered text stream that escapes what cannot be encoded, as the interpreter's own stderr does."""
    buffer = io.BufferedWriter(_Swallowing(descriptor))  # type: ignore[type-var]
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=True, write_through=True)


class _Swallowing(io.RawIOBase):
    """Raw writer to a descriptor that it does not own; data of failed writes is dropped."""

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
