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


class _Settings:
    """``engines`` that are open, and the settings before the first of them was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines = 0
        self.switch_s, self.thresholds = 0.0, (0, 0, 0)


_settings = _Settings()


def begin_passes() -> None:
    """An engine is open: threads switch often, full collections are rare."""
    with _settings.lock:
        if _settings.engines == 0:
            _settings.switch_s = sys.getswitchinterval()
            _settings.thresholds = youngest, middle, oldest = gc.get_threshold()
            sys.setswitchinterval(min(SWITCH_S, _settings.switch_s))
            gc.set_threshold(youngest, middle, max(FULL_COLLECTIONS, oldest))
        _settings.engines += 1


def end_passes() -> None:
    """An engine is closed; with the last one the settings are what they were."""
    with _settings.lock:
        _settings.engines -= 1
        if _settings.engines == 0:
            sys.setswitchinterval(_settings.switch_s)
            gc.set_threshold(*_settings.thresholds)
