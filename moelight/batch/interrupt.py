"""Ctrl-C while passes run: the first asks the job to end after the pass that is running, the second ends it at once.
SIGTERM is as good as Ctrl-C, at any time.

Knows signals. Refuses to know what ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While this context is entered, ``asked`` tells whether somebody wants the job to end. ``on_first`` is called
    once, in the signal's handler. Outside the main thread, where Python delivers no signals, nothing is ever asked; nor
    by a signal that this process was started to ignore, as a script's jobs in the background are."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._on_first = on_first
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In this block SIGTERM is a KeyboardInterrupt, so that what is open is closed and whoever watches is told."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
