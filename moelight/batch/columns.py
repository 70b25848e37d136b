"""Rows of tables: CSV with a header, and Parquet (pyarrow is optional). One record is one prompt or conversation.
Columns named like a field of a row are read, others ignored; `read_values` checks the values."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from moelight.batch.fields import Input, RowContext, Skip
from moelight.batch.rows import BadRow, Row, bad_row
from moelight.batch.simple import CHOICES, PROMPT_FIELDS, SAMPLING_FIELDS, format_of, read_values
from moelight.batch.source import LONGEST_LINE, InputSource
from moelight.core.errors import InputError, did_you_mean

MOST_LINES = 100_000  # of one record: no model context holds as many


class Record(NamedTuple):
    """The ``values`` of a record whose first line is ``line``, from 1; with ``error``, the values before the error."""

    line: int
    values: list[str]
    error: str = ""


class CsvRecords:
    """Iterates over the records that are not blank. One record is held; a line is parsed at most three times."""

    def __init__(self, source: InputSource, delimiter: str) -> None:
        # The csv module's limit of a field, 128 KiB by default, is global to the process.
        csv.field_size_limit(LONGEST_LINE)
        self._delimiter = delimiter
        self._lines = _Lines(source)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)

    def __iter__(self) -> Iterator[Record]:
        while True:
            self._lines.begin()
            try:
                values = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                record = self._recovered(str(error))
                if record.error or _filled(record.values):
                    yield record
                continue
            if _filled(values):
                yield Record(self._lines.record[0][0], values)

    def _recovered(self, reason: str) -> Record:
        """Parse the first line of an unreadable record alone, loosely, but with no quote left open."""
        first, text = self._lines.record[0]
        if len(self._lines.record) > 1:
            self._lines.unread()
        if text is None:
            return Record(first, [], reason)
        alone = iter((text, ""))  # the parser takes the second line if the first ends within quotes
        try:
            values = next(csv.reader(alone, delimiter=self._delimiter))
        except csv.Error as error:
            return Record(first, [], str(error))
        left_open = next(alone, None) is None
        return Record(first, values[:-1], reason) if left_open else Record(first, values)


def _filled(values: list[str]) -> bool:
    return any(value.strip() for value in values)


class _Lines:
    """The lines of a CSV file as text; those of the current ``record``, each with its number, can be returned to the
    input. Bytes that are not UTF-8 become lone surrogates, which no valid UTF-8 decodes to. The text of a line that is
    too long to be held is None."""

    def __init__(self, source: InputSource) -> None:
        self._source = source.lines()
        self._again: deque[tuple[int, str | None]] = deque()
        self.record: list[tuple[int, str | None]] = []
        self._bytes = 0
        # An abandoned record was within quotes at the end of every line before this one. A record that begins among
        # these lines and is within quotes at the end of its first line would fail the same way: abandon it at once.
        self._lost_before = 0

    def begin(self) -> None:
        self.record.clear()
        self._bytes = 0

    def unread(self) -> None:
        """Return the lines behind the record's first to the input."""
        self._lost_before = self.record[-1][0]
        self._again.extendleft(reversed(self.record[1:]))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.record:
            if self.record[0][0] < self._lost_before:
                raise csv.Error("a quote that begins here is never closed, or closed in the middle of a value")
            if len(self.record) == MOST_LINES:
                raise csv.Error(f"a quote that begins here is not closed within {MOST_LINES:,} lines")
        try:
            line = self._again.popleft() if self._again else self._read()
        except StopIteration:
            if self.record:
                raise csv.Error("a quote that begins here is not closed by the end of the file") from None
            raise
        self.record.append(line)
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


_ID_COLUMNS = ("custom_id", "id")
_AS_TEXT = ("prompt", "custom_id")
_RECORDS_AT_ONCE = 1024
_MOST_NAMED = 12
_OTHER_DELIMITERS = (";", "\t", ",", "|")
_TAB_BY_SUFFIX = (".tsv", ".tsv.gz")


class _TableReader(Input):
    """A table; its columns that are named like a field of a row are read. ``fields`` are columns by field."""

    def __init__(self, name: str, context: RowContext, source: InputSource) -> None:
        super().__init__(context, source)
        self.format = format_of(context, name)
        self.fields: dict[str, str] = {}

    def choose(self, names: Sequence[str]) -> None:
        """Set ``fields`` and ``told`` for a table with columns ``names``; raises InputError if there is no prompt."""
        prompt, custom_id = self._context.prompt_column, self._context.id_column
        listing = f"(there are {_some(names) or 'none'})"

        def need(column: str | None) -> None:
            if column is not None and column not in names:
                raise self._source.refusal(f"no column {column!r}{did_you_mean(column, names)} {listing}")

        need(prompt)
        columns = {name: name for name in (*PROMPT_FIELDS, CHOICES, *SAMPLING_FIELDS) if name in names}
        if prompt is not None:
            columns = {name: name for name in columns if name not in PROMPT_FIELDS}
            columns[prompt if prompt in PROMPT_FIELDS else "prompt"] = prompt
        elif not any(name in columns for name in PROMPT_FIELDS):
            raise self._source.refusal(f"no column prompt or messages; name it with --prompt-column {listing}")
        need(custom_id)
        custom_id = custom_id or next((name for name in _ID_COLUMNS if name in names), None)
        if custom_id is not None and custom_id not in columns.values():
            columns["custom_id"] = custom_id
        for name in sorted(set(names)):
            if name in columns.values() and names.count(name) > 1:
                raise self._source.refusal(f"there are two columns {name!r}")
        left = [name for name in names if name not in columns.values()]
        self.fields = columns
        self.told = f"; columns {', '.join(columns.values())}" + (f"; not read: {_some(left)}" if left else "")


class CsvReader(_TableReader):
    """Reads rows from a CSV or TSV file."""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        super().__init__("csv", context, source)
        self._delimiter = "\t" if source.name.lower().endswith(_TAB_BY_SUFFIX) else ","
        header = next(iter(CsvRecords(source, self._delimiter)), None)
        if header is None:
            raise source.refusal("no prompts")
        if header.error:
            raise source.refusal(f"the header cannot be read ({header.error})")
        self._header = header.values
        self._check_delimiter()
        self.choose(self._header)
        self._places = {name: self._header.index(column) for name, column in self.fields.items()}

    def _check_delimiter(self) -> None:
        """Raise InputError where the names are separated by another character, or announced by ``sep=``."""
        usual = "tabs" if self._delimiter == "\t" else "commas"
        first = "".join(self._header[:1])
        if first.lower().startswith("sep=") and len(self._header) <= 2:
            raise self._source.refusal(
                f"the first line, {first!r}, is for spreadsheets alone; save it without, with {usual}"
            )
        wanted = {*PROMPT_FIELDS, self._context.prompt_column}
        for delimiter in _OTHER_DELIMITERS:
            names = next(csv.reader([first], delimiter=delimiter), [])
            if len(self._header) == 1 and len(names) > 1 and wanted.intersection(names):
                raise self._source.refusal(f"columns are separated by {delimiter!r}; save it with {usual}")

    def rows(self, *, skip: Skip | None = None) -> Iterator[Row | BadRow]:
        records = iter(CsvRecords(self._source, self._delimiter))
        next(records)
        for number, record in enumerate(records):
            if skip is None or not skip(number):
                yield self._row(record, number)

    def _row(self, record: Record, number: int) -> Row | BadRow:
        line, cells, error = record
        column = self._places.get("custom_id", len(cells))
        custom_id = cells[column] or None if column < len(cells) else None
        try:
            if error:
                raise InputError(f"not CSV: {error}", code="invalid_csv")
            if len(cells) != len(self._header):
                raise InputError(
                    f"{len(cells)} values where the header has {len(self._header)} columns", code="invalid_csv"
                )
            values = {name: _value(name, cells[at]) for name, at in self._places.items() if cells[at]}
        except (InputError, RecursionError) as refusal:
            return bad_row(number, line, custom_id, refusal)
        return read_values(values, number, line, self._context, self._samplings)


class ParquetReader(_TableReader):
    """Reads rows from a Parquet table, in batches of `_RECORDS_AT_ONCE` records."""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        super().__init__("parquet", context, source)
        if source.packed:
            raise source.refusal("a gzipped Parquet file; unpack it")
        with source.raw() as file:
            table = _open_parquet(file, source)
            self._total, self._given = table.metadata.num_rows, 0
            if not self._total:
                raise source.refusal("no prompts")
            self.choose(table.schema_arrow.names)

    @property
    def read_bytes(self) -> int:
        return round(self.size_bytes * self._given / self._total)

    def rows(self, *, skip: Skip | None = None) -> Iterator[Row | BadRow]:
        for number, (columns, at) in enumerate(self._records()):
            self._given = number + 1
            if skip is None or not skip(number):
                values = {name: column[at] for name, column in zip(self.fields, columns, strict=True)}
                yield self._row(values, number)

    def _records(self) -> Iterator[tuple[list[Any], int]]:
        """Yield for every record the arrays of its batch, in the order of ``fields``, and its index in them."""
        from pyarrow import ArrowException

        names = list(self.fields.values())
        with self._source.raw() as file:
            table = _open_parquet(file, self._source)
            try:
                for batch in table.iter_batches(batch_size=_RECORDS_AT_ONCE, columns=names, use_threads=False):
                    columns = [batch.column(name) for name in names]
                    yield from ((columns, at) for at in range(batch.num_rows))
            except (ArrowException, OSError) as error:
                raise _damaged(self._source, error) from None

    def _row(self, values: dict[str, Any], number: int) -> Row | BadRow:
        """The row of ``values``, pyarrow scalars by field."""
        line = number + 1
        cells: dict[str, Any] = {}
        custom_id = None
        try:
            # The id is read first, so that an error row has it.
            for name in sorted(values, key=lambda key: key != "custom_id"):
                value = _plain(name, values[name])
                if name == "custom_id":
                    value = custom_id = str(value) if isinstance(value, int) else value
                if value is not None:
                    cells[name] = value
            if isinstance(cells.get("messages"), str):
                cells["messages"] = _value("messages", cells["messages"])
        except (InputError, RecursionError) as error:
            return bad_row(number, line, custom_id if isinstance(custom_id, str) else None, error)
        return read_values(cells, number, line, self._context, self._samplings)


def _open_parquet(file: io.BufferedReader, source: InputSource) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        message = "reading Parquet needs pyarrow; install it with: pip install 'moelight[parquet]'"
        raise source.refusal(message) from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: from a column's name
        raise _damaged(source, error) from None


def _plain(name: str, scalar: Any) -> Any:
    """``scalar`` as a Python value. Arrow validates neither the UTF-8 of texts nor the range of dates."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8", field=name, code="invalid_utf8") from None
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name} cannot be read: {error}", field=name) from None


def _damaged(source: InputSource, error: Exception) -> InputError:
    return source.refusal(f"no readable Parquet ({' '.join(str(error).split())[:200]})")


def _value(name: str, text: str) -> Any:
    """Prompts, ids and plain stop texts are kept verbatim; other fields are JSON."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not UTF-8", field=name, code="invalid_utf8") from None
    if name in _AS_TEXT or (name == "stop" and not text.startswith("[")):
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError as error:
        raise InputError(f"{name} is not JSON: {error}", field=name, code="invalid_json") from None


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
