"""Panics of libraries written in Rust, as errors that the rest of the program can handle.

PyO3 raises a panic as ``pyo3_runtime.PanicException``, a `BaseException`, which passes every ``except Exception``. No
module exports the class, so it is known by its qualified name. Refuses to know which library panics, and why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

_LONGEST = 300  # characters of a panic's message that are quoted
_STDERR = 2
_ONE_AT_A_TIME = threading.RLock()  # file descriptor 2 belongs to the whole process


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a panic that PyO3 turned into an exception."""
    return any((kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException") for kind in type(error).__mro__)


@contextlib.contextmanager
def panics_as(make: Callable[[str], Exception], *, quiet: bool = False) -> Iterator[None]:
    """Raises ``make(message)`` in place of a panic within the block; ``message`` is one line. All else passes.

    ``quiet``: what Rust itself prints of the panic, a backtrace included, does not reach stderr. It is for short work
    while nothing else reports: what other threads write to stderr meanwhile comes out at the end of the block.
    """
    try:
        with _without_message() if quiet else contextlib.nullcontext():
            yield
    except BaseException as error:
        if not is_panic(error):
            raise
        failure = make(" ".join(str(error)[: 2 * _LONGEST].split())[:_LONGEST] or "panic")
    else:
        return
    raise failure from None


@contextlib.contextmanager
def _without_message() -> Iterator[None]:
    """What is written to file descriptor 2 within the block comes out at its end, or not at all where it panicked."""
    with _ONE_AT_A_TIME, contextlib.ExitStack() as opened:
        try:
            stderr = opened.enter_context(open(os.dup(_STDERR), "wb", buffering=0))
            held = opened.enter_context(tempfile.TemporaryFile())
        except OSError:  # stderr is closed, or there is no room for what it would be told
            yield
            return
        panicked = False
        _flush()
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            _flush()
            os.dup2(stderr.fileno(), _STDERR)
            if not panicked:
                held.seek(0)
                with contextlib.suppress(OSError):
                    shutil.copyfileobj(held, stderr)


def _flush() -> None:
    """Python's own stderr may be closed, absent, or lead nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
