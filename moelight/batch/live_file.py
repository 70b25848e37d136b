"""A small file that is renewed while a job runs: complete at any moment, written at most once a second.

A live file never ends a job: a failed renewal is kept as ``trouble`` and reported once at the end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from moelight.batch.output import refused_write
from moelight.core.errors import InputError

_EVERY_S = 1.0


class LiveFile:
    """The file at ``path``, replaced atomically by a finished sibling: readers see the old text or the new text.

    There is no fsync: after a power cut the file may be old or empty, and the job writes it again.
    """

    def __init__(self, path: Path, *, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.trouble = ""
        self._path, self._what, self._clock = path, what, clock
        # A symlink is kept and its target replaced. A pipe or a device cannot be replaced.
        self._target = Path(os.path.realpath(path))
        self._partial = self._target.with_name(f".{self._target.name[:50]}.{os.getpid()}.partial")
        self._due_s = -1.0

    def begin(self, text: str) -> None:
        """Write ``text`` for the first time.

        Raises:
            InputError: the file cannot be written: no such directory, a directory of that name, or no permission.
        """
        try:
            if self._target.exists() and not stat.S_ISREG(self._target.stat().st_mode):
                raise InputError(f"{self._what} {self._path}: must be a file, to be replaced whole", code="output_path")
            self._write(text)
        except OSError as error:
            raise refused_write(error, f"{self._what} {self._path}") from None

    def renew(self, text: Callable[[], str], *, now: bool = False) -> None:
        """Write ``text()`` if the last write is a second ago, or if ``now``. A failure is kept as ``trouble``."""
        if not now and self._clock() < self._due_s:
            return
        try:
            self._write(text())
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{self._what} {self._path}: could not be renewed ({(error.strerror or str(error)).lower()})"
        self._due_s = self._clock() + _EVERY_S

    def _write(self, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(self._partial, flags, 0o666), "wb") as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
            self._partial.replace(self._target)
        except OSError:
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)
            raise
        self._due_s = self._clock() + _EVERY_S
