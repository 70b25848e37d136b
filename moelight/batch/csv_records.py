"""Records of a CSV file: one damaged quote costs the record it stands in, and nothing behind that record's first line.

Knows the csv module and how far one record may reach. Refuses to know columns and what values mean. A record that takes
more lines than `MOST_LINES`, more bytes than `LONGEST_LINE`, or the rest of the file, and one over several lines whose
quotes are out of place, is an error; the lines behind its first are then read again, as records of their own.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from moelight.batch.source import LONGEST_LINE, InputSource

MOST_LINES = 100_000  # of one record: no context holds as many


class Record(NamedTuple):
    """``values`` of a record whose first line is ``line``, from 1; with an ``error`` those that stand before it."""

    line: int
    values: list[str]
    error: str = ""


class CsvRecords:
    """The records that are not blank. Holds the lines of one; however quotes are strewn, a line is parsed three times
    at most."""

    def __init__(self, source: InputSource, delimiter: str) -> None:
        # The module's own limit of a field, 128 KiB, is one for the whole process.
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
                found = self._mended(str(error))
                if found.error or _filled(found.values):
                    yield found
                continue
            if _filled(values):
                yield Record(lines.first, values)

    def _mended(self, why: str) -> Record:
        """The first line of a record that cannot be read, alone: text behind a closing quote then belongs to the value,
        but no quote may stay open."""
        lines = self._lines
        first, text = lines.first, lines.first_text
        if lines.taken > 1:
            lines.give_back()
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
    """One line, and whether its reader wanted another: it ends within quotes."""

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
    """The lines of a CSV file as text, of which those of the record under way can be given back.

    What is not UTF-8 becomes half surrogates, which only it can.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source.lines()
        self._again: deque[tuple[int, str | None]] = deque()
        self._record: list[tuple[int, str | None]] = []
        self._bytes = 0
        # A record that was given up was within quotes at the end of every line before this one. Whichever begins among
        # them and is within quotes at the end of its first line would go on the same way: it is given up at once.
        self._lost_before = 0

    def begin(self) -> None:
        """A record begins with the next line."""
        self._record.clear()
        self._bytes = 0

    @property
    def taken(self) -> int:
        """How many lines the record has taken."""
        return len(self._record)

    @property
    def first(self) -> int:
        """The place of its first line."""
        return self._record[0][0]

    @property
    def first_text(self) -> str | None:
        """Its first line; None if that is too long to be held."""
        return self._record[0][1]

    def give_back(self) -> None:
        """The lines behind the record's first come again."""
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
