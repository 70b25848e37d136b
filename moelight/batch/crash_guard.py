"""Records the row that is being prepared; a row at which the process died twice is refused at the next start.

Preparing a row (encoding its text, compiling its grammar) runs libraries that can end the process. Meanwhile the row's
number is in a memory-mapped page of a small file, which outlives the process without a write; a power cut may lose it.

::

    8 bytes   number + 1 of the row that is being prepared, 0: none; native byte order
    JSON      {"number": times, ...} of the rows at which a process died
"""

from __future__ import annotations

import contextlib
import json
import mmap
from pathlib import Path
from types import TracebackType

from moelight.batch import faults
from moelight.batch.append import open_private
from moelight.core.errors import InputError
from moelight.core.paths import write_whole

MOST_DEATHS = 2
_HEAD_BYTES = 8


class CrashGuard:
    """Counts the deaths of one job by row; ``struck`` are the rows that are not tried any more. Nothing is written
    before the first row is prepared; if the file cannot be created, the job runs without it."""

    def __init__(self, path: Path, *, forget: bool = False) -> None:
        """With ``forget``, ignore the counts in ``path``: they belong to rows of another job."""
        self._path = path
        self._counts = {} if forget else _read(path)
        self.struck = frozenset(number for number, count in self._counts.items() if count >= MOST_DEATHS)
        self._page: mmap.mmap | None = None
        self._slot: memoryview | None = None
        self._tried = False
        self._number = -1

    def at(self, number: int) -> CrashGuard:
        """A context in which row ``number`` is prepared; raises InputError if the row is struck."""
        if number in self.struck:
            raise struck_row_error()
        self._number = number
        return self

    def __enter__(self) -> None:
        if not self._tried:
            self._map()
        if self._slot is not None:
            self._slot[0] = self._number + 1
        faults.reach_row(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self._slot[0] = 0

    def close(self, *, done: bool) -> None:
        """Close the file. Remove it if the job is ``done`` or no row has died."""
        if self._slot is not None and self._page is not None:
            self._slot.release()
            self._page.close()
        self._page = self._slot = None
        if done or not self._counts:
            self._path.unlink(missing_ok=True)

    def _map(self) -> None:
        self._tried = True
        with contextlib.suppress(OSError):
            write_whole(self._path, "\0" * _HEAD_BYTES + json.dumps(self._counts))
            with open(open_private(self._path, create=False), "rb+") as file:
                self._page = mmap.mmap(file.fileno(), _HEAD_BYTES)
            self._slot = memoryview(self._page).cast("q")


def struck_row_error() -> InputError:
    """The error of a row that is struck."""
    return InputError(
        f"the process died {MOST_DEATHS} times while this row was prepared (its text encoded, its grammar compiled); "
        "it is not tried again",
        code="row_crashed",
    )


def _read(path: Path) -> dict[int, int]:
    """Deaths by row number; empty if the file is missing or damaged."""
    try:
        data = path.read_bytes()
        counts = {int(number): int(times) for number, times in json.loads(data[_HEAD_BYTES:]).items()}
        number = memoryview(data)[:_HEAD_BYTES].cast("q")[0] - 1
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    if number >= 0:
        counts[number] = counts.get(number, 0) + 1
    return counts
