"""Settings of the Python interpreter while engines run passes: how long one thread keeps others from running.

The thread that packs passes and the threads of lanes share the interpreter. Torch gives it up in every operation, so a
lane that launches twenty of them asks for it as often, and waits up to a switch interval each time while sequences are
packed. A full garbage collection stops all lanes at once, for a tenth of a second where thousands of sequences run.
"""

from __future__ import annotations

import gc
import sys
import threading

SWITCH_S = 1e-4
FULL_COLLECTIONS = 1000  # collections of the middle generation before a full one; Python's default is 10

_lock = threading.Lock()
_engines = 0
_before: tuple[float, tuple[int, int, int]] = (0.0, (0, 0, 0))


def begin_passes() -> None:
    """An engine is open: threads switch often, full collections are rare."""
    global _engines, _before
    with _lock:
        if _engines == 0:
            _before = sys.getswitchinterval(), gc.get_threshold()
            sys.setswitchinterval(min(SWITCH_S, _before[0]))
            youngest, middle, oldest = _before[1]
            gc.set_threshold(youngest, middle, max(FULL_COLLECTIONS, oldest))
        _engines += 1


def end_passes() -> None:
    """An engine is closed; with the last one the settings are what they were."""
    global _engines
    with _lock:
        _engines -= 1
        if _engines == 0:
            sys.setswitchinterval(_before[0])
            gc.set_threshold(*_before[1])
