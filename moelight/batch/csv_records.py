"""Records of a CSV file, with recovery: a damaged quote costs one record, and none of the lines behind its first.

A record is an error if it takes more lines than `MOST_LINES`, more bytes than `LONGEST_LINE`, or the rest of the file,
or if it spans several lines and its quotes are misplaced; the lines behind its first are then read again, as records of
their own. Does not depend on columns or on the meaning of values.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from moelight.batch.source import LONGEST_LINE, InputSource

MOST_LINES = 100_000  # of one record: no model context holds as many


class Record(NamedTuple):
    """The ``values`` of a record whose first line is ``line``, from 1; with ``error``, the values before the error."""

    line: int
    values: list[str]
    error: str = ""


class CsvRecords:
    """Iterates over the records that are not blank. Holds the lines of one record; a line is parsed at most three
    times, however the quotes are placed."""

    def __init__(self, source: InputSource, delimiter: str) -> None:
        # The csv module's limit of a field, 128 KiB by default, is global to the process.
        csv.field_size_limit(LONGEST_LINE)
        self._delimiter = delimiter
        self._lines = _Lines(source)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)

    def __iter__(self) -> Iterator[Record]:
        lines = self._lines
        while True:
            lines.begin()
            try:
                values = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                found = self._recovered(str(error))
                if found.error or _filled(found.values):
                    yield found
                continue
            if _filled(values):
                yield Record(lines.first, values)

    def _recovered(self, why: str) -> Record:
        """Parse the first line of an unreadable record alone: text behind a closing quote then belongs to the value,
        but no quote may stay open."""
        lines = self._lines
        first, text = lines.first, lines.first_text
        if lines.taken > 1:
            lines.unread()
        if text is None:
            return Record(first, [], why)
        alone = _Alone(text)
        try:
            values = next(csv.reader(alone, delimiter=self._delimiter))
        except csv.Error as error:
            return Record(first, [], str(error))
        return Record(first, values[:-1], why) if alone.left_open else Record(first, values)


def _filled(values: list[str]) -> bool:
    return any(value.strip() for value in values)


class _Alone:
    """Iterates over one line. ``left_open`` is true if the parser requested another line: the line ends within
    quotes."""

    def __init__(self, text: str) -> None:
        self.left_open = False
        self._text = iter((text,))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = next(self._text, None)
        if text is None:
            self.left_open = True
            raise StopIteration
        return text


class _Lines:
    """The lines of a CSV file as text; the lines of the current record can be returned to the input.

    Bytes that are not UTF-8 become lone surrogates, which no valid UTF-8 decodes to.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source.lines()
        self._again: deque[tuple[int, str | None]] = deque()
        self._record: list[tuple[int, str | None]] = []
        self._bytes = 0
        # An abandoned record was within quotes at the end of every line before this one. A record that begins among
        # these lines and is within quotes at the end of its first line would fail the same way: abandon it at once.
        self._lost_before = 0

    def begin(self) -> None:
        """Begin a record with the next line."""
        self._record.clear()
        self._bytes = 0

    @property
    def taken(self) -> int:
        """Number of lines that the record has taken."""
        return len(self._record)

    @property
    def first(self) -> int:
        """Number of the record's first line."""
        return self._record[0][0]

    @property
    def first_text(self) -> str | None:
        """Text of the record's first line; None if the line is too long to be held."""
        return self._record[0][1]

    def unread(self) -> None:
        """Return the lines behind the record's first to the input."""
        self._lost_before = self._record[-1][0]
        self._again.extendleft(reversed(self._record[1:]))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._record:
            if self.first < self._lost_before:
                raise csv.Error("a quote that begins here is never closed, or closed in the middle of a value")
            if len(self._record) == MOST_LINES:
                raise csv.Error(f"a quote that begins here is not closed within {MOST_LINES:,} lines")
        try:
            line = self._again.popleft() if self._again else self._read()
        except StopIteration:
            if self._record:
                raise csv.Error("a quote that begins here is not closed by the end of the file") from None
            raise
        self._record.append(line)
        number, text = line
        if text is None:
            raise csv.Error(f"line {number} is longer than {LONGEST_LINE >> 20} MiB")
        self._bytes += len(text if text.isascii() else text.encode("utf-8", "surrogateescape"))
        if self._bytes > LONGEST_LINE + 1:
            raise csv.Error(f"a quote that begins here is not closed within {LONGEST_LINE >> 20} MiB")
        return text

    def _read(self) -> tuple[int, str | None]:
        number, raw = next(self._source)
        return number, None if raw is None else raw.decode("utf-8", "surrogateescape") + "\n"
