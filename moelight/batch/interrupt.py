"""Ctrl-C while passes run: the first ends the job after the running pass, the second ends it at once. SIGTERM equals
Ctrl-C, at any time."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While this context is entered, ``asked`` is True once SIGINT or SIGTERM has arrived. ``on_first`` is called once,
    in the signal's handler. Outside the main thread, where Python delivers no signals, ``asked`` stays False. Signals
    that this process was started to ignore, as a script's background jobs are, stay ignored."""

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
    """Raise KeyboardInterrupt on SIGTERM in this block, so that open files are closed and watchers notified."""
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
