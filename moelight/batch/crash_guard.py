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
import sys
from collections.abc import Iterator
from pathlib import Path

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
        self._page: mmap.mmap | bytearray | None = None

    @contextlib.contextmanager
    def at(self, number: int) -> Iterator[None]:
        """A context in which row ``number`` is prepared; raises InputError if the row is struck."""
        if number in self.struck:
            raise struck_row_error()
        page = self._page = self._page or self._map()
        page[:_HEAD_BYTES] = (number + 1).to_bytes(_HEAD_BYTES, sys.byteorder)
        faults.reach(f"row_{number}")
        try:
            yield
        finally:
            page[:_HEAD_BYTES] = bytes(_HEAD_BYTES)

    def close(self, *, done: bool) -> None:
        """Close the file. Remove it if the job is ``done`` or no row has died."""
        if isinstance(self._page, mmap.mmap):
            self._page.close()
        if done or not self._counts:
            self._path.unlink(missing_ok=True)

    def _map(self) -> mmap.mmap | bytearray:
        """The page of the file; memory of this process if there can be no file."""
        with contextlib.suppress(OSError):
            write_whole(self._path, "\0" * _HEAD_BYTES + json.dumps(self._counts))
            with open(open_private(self._path, create=False), "rb+") as file:
                return mmap.mmap(file.fileno(), _HEAD_BYTES)
        return bytearray(_HEAD_BYTES)


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
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    number = int.from_bytes(data[:_HEAD_BYTES], sys.byteorder, signed=True) - 1
    if number >= 0:
        counts[number] = counts.get(number, 0) + 1
    return counts
