"""Settings of the Python interpreter while engines run passes: how long one thread keeps others from running.

The thread that packs passes and the threads of lanes share the interpreter. Torch gives it up in every operation, so a
lane that launches twenty of them asks for it as often, and waits up to a switch interval each time while sequences are
packed. A full garbage collection stops all lanes at once, for a tenth of a second where thousands of sequences run.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 1e-4
FULL_COLLECTIONS = 1000  # collections of the middle generation before a full one; Python's default is 10


class _Interpreter:
    """``engines`` that are open, and the settings before the first of them was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines = 0
        self.switch_s, self.thresholds = 0.0, (0, 0, 0)


_interpreter = _Interpreter()


@contextmanager
def shared_by_lanes() -> Iterator[None]:
    """While it is entered by anyone, threads switch often and full collections are rare; afterwards the settings are
    what they were."""
    with _interpreter.lock:
        if _interpreter.engines == 0:
            _interpreter.switch_s = sys.getswitchinterval()
            _interpreter.thresholds = youngest, middle, oldest = gc.get_threshold()
            sys.setswitchinterval(min(SWITCH_S, _interpreter.switch_s))
            gc.set_threshold(youngest, middle, max(FULL_COLLECTIONS, oldest))
        _interpreter.engines += 1
    try:
        yield
    finally:
        with _interpreter.lock:
            _interpreter.engines -= 1
            if _interpreter.engines == 0:
                sys.setswitchinterval(_interpreter.switch_s)
                gc.set_threshold(*_interpreter.thresholds)
