"""Conversion of panics in Rust libraries into exceptions. PyO3 raises ``pyo3_runtime.PanicException``, a
`BaseException` that no module exports."""

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
    """True if ``error`` is a Rust panic that PyO3 converted into an exception."""
    return any((kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException") for kind in type(error).__mro__)


@contextlib.contextmanager
def panics_as(make: Callable[[str], Exception], *, quiet: bool = False) -> Iterator[None]:
    """Raise ``make(message)``, a line, in place of a panic within the block. ``quiet`` keeps Rust's own report off
    stderr; output of other threads to stderr is then held until the block ends, so the block should be short."""
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
    """Hold output to file descriptor 2 until the block ends; discard it if the block panics."""
    with _ONE_AT_A_TIME, contextlib.ExitStack() as opened:
        try:
            stderr = opened.enter_context(open(os.dup(_STDERR), "wb", buffering=0))
            held = opened.enter_context(tempfile.TemporaryFile())
        except OSError:  # stderr is closed, or no temporary file can be created
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
    """Flush Python's stderr, which may be closed, absent or unwritable."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
