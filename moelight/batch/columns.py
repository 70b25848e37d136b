"""Rows of tables: CSV with a header, and Parquet. One record is one prompt or conversation.

Reads the prompt, the messages, the id and the sampling fields from the columns of those names, and ignores other
columns. pyarrow is optional. Values are checked elsewhere (`read_values`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from moelight.batch.csv_records import CsvRecords, Record
from moelight.batch.fields import FieldError, RowContext, SamplingCache, Skip, refused
from moelight.batch.rows import BadRow, Row
from moelight.batch.simple import PROMPT_FIELDS, SAMPLING_FIELDS, SimpleFormat, read_values
from moelight.batch.source import InputSource
from moelight.core.errors import InputError, did_you_mean

_ID_COLUMNS = ("custom_id", "id")
_AS_TEXT = ("prompt", "custom_id")
_RECORDS_AT_ONCE = 1024
_MOST_NAMED = 12
_TAB_BY_SUFFIX = (".tsv", ".tsv.gz")


class _TableColumns:
    """The mapping from columns of a table to fields of a row."""

    def __init__(self, names: Sequence[str], reading: RowContext, name: str) -> None:
        self._name = name
        self._names = list(names)
        twice = sorted({each for each in names if names.count(each) > 1})
        self.fields: dict[str, str] = {each: each for each in (*PROMPT_FIELDS, *SAMPLING_FIELDS) if each in names}
        if reading.prompt_column is not None:
            self._need(reading.prompt_column)
            for each in PROMPT_FIELDS:
                self.fields.pop(each, None)
            given = reading.prompt_column
            self.fields[given if given in PROMPT_FIELDS else "prompt"] = given
        elif not any(each in self.fields for each in PROMPT_FIELDS):
            raise InputError(
                f"{name}: no column prompt or messages; name it with --prompt-column (there are {self._listed()})",
                code="prompts_file",
            )
        if reading.id_column is not None:
            self._need(reading.id_column)
        found = reading.id_column or next((each for each in _ID_COLUMNS if each in names), None)
        if found is not None and found not in self.fields.values():
            self.fields["custom_id"] = found
        for each in twice:
            if each in self.fields.values():
                raise InputError(f"{name}: there are two columns {each!r}", code="prompts_file")

    @property
    def told(self) -> str:
        """The columns that are read and those that are not, for the user."""
        left = [each for each in self._names if each not in self.fields.values()]
        told = f"; columns {', '.join(self.fields.values())}"
        return f"{told}; not read: {_some(left)}" if left else told

    def _need(self, column: str) -> None:
        if column not in self._names:
            raise InputError(
                f"{self._name}: no column {column!r}{did_you_mean(column, self._names)} (there are {self._listed()})",
                code="prompts_file",
            )

    def _listed(self) -> str:
        return _some(self._names) or "none"


class CsvReader:
    """Reads rows from the records of a CSV or TSV file."""

    def __init__(self, reading: RowContext, source: InputSource) -> None:
        self.format = SimpleFormat(name="csv", token_ids=reading.token_ids, numbered=reading.numbered)
        self._delimiter = "\t" if source.name.lower().endswith(_TAB_BY_SUFFIX) else ","
        self._samplings = SamplingCache(reading.defaults)
        header = next(iter(CsvRecords(source, self._delimiter)), None)
        if header is None:
            raise InputError(f"{source.name}: no prompts", code="prompts_file")
        if header.error:
            raise InputError(f"{source.name}: the header cannot be read ({header.error})", code="prompts_file")
        self._header = header.values
        columns = _TableColumns(self._header, reading, source.name)
        self._places = {name: self._header.index(column) for name, column in columns.fields.items()}
        self.told = columns.told

    def rows(self, source: InputSource, *, skip: Skip | None) -> Iterator[Row | BadRow]:
        records = iter(CsvRecords(source, self._delimiter))
        next(records)
        for number, record in enumerate(records):
            if skip is None or not skip(number):
                yield self._row(record, number)

    def _row(self, record: Record, number: int) -> Row | BadRow:
        line, given, error = record
        place = self._places.get("custom_id", len(given))
        custom_id = given[place] or None if place < len(given) else None
        try:
            if error:
                raise InputError(f"not CSV: {error}", code="invalid_csv")
            if len(given) != len(self._header):
                raise InputError(
                    f"{len(given)} values where the header has {len(self._header)} columns", code="invalid_csv"
                )
            values = {name: _value(name, given[at]) for name, at in self._places.items() if given[at]}
        except (InputError, RecursionError) as refusal:
            return refused(number, line, custom_id, refusal)
        return read_values(values, number, line, self._samplings)


class ParquetReader:
    """Reads rows from a Parquet table, in batches of `_RECORDS_AT_ONCE` records."""

    def __init__(self, reading: RowContext, source: InputSource) -> None:
        self.format = SimpleFormat(name="parquet", token_ids=reading.token_ids, numbered=reading.numbered)
        self._samplings = SamplingCache(reading.defaults)
        if source.packed:
            raise InputError(f"{source.name}: a gzipped Parquet file; unpack it", code="prompts_file")
        with source.raw() as file:
            table = _open_parquet(file, source.name)
            if table.metadata.num_rows == 0:
                raise InputError(f"{source.name}: no prompts", code="prompts_file")
            columns = _TableColumns(table.schema_arrow.names, reading, source.name)
        self._columns = columns.fields
        self.told = columns.told

    def rows(self, source: InputSource, *, skip: Skip | None) -> Iterator[Row | BadRow]:
        number = -1
        for record in self._batches(source):
            names = list(self._columns)
            values = [record.column(column) for column in self._columns.values()]
            for at in range(record.num_rows):
                number += 1
                if skip is not None and skip(number):
                    continue
                yield self._row({name: each[at] for name, each in zip(names, values, strict=True)}, number)

    def _batches(self, source: InputSource) -> Iterator[Any]:
        from pyarrow import ArrowException

        with source.raw() as file:
            table = _open_parquet(file, source.name)
            try:
                yield from table.iter_batches(
                    batch_size=_RECORDS_AT_ONCE, columns=list(self._columns.values()), use_threads=False
                )
            except (ArrowException, OSError) as error:
                raise _damaged(source.name, error) from None

    def _row(self, values: dict[str, Any], number: int) -> Row | BadRow:
        """Return the row of ``values``, which maps fields to pyarrow scalars."""
        line = number + 1
        given: dict[str, Any] = {}
        custom_id = None
        try:
            # The id is read first, so that an error row has it.
            for name in sorted(values, key=lambda each: each != "custom_id"):
                value = _plain(name, values[name])
                if name == "custom_id":
                    value = custom_id = str(value) if isinstance(value, int) else value
                if value is not None:
                    given[name] = value
            if isinstance(given.get("messages"), str):
                given["messages"] = _value("messages", given["messages"])
        except (InputError, RecursionError) as error:
            return refused(number, line, custom_id if isinstance(custom_id, str) else None, error)
        return read_values(given, number, line, self._samplings)


def _open_parquet(file: io.BufferedReader, name: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(
            f"{name}: reading Parquet needs pyarrow; install it with: pip install 'moelight[parquet]'",
            code="prompts_file",
        ) from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: from a column's name
        raise _damaged(name, error) from None


def _plain(name: str, scalar: Any) -> Any:
    """Return ``scalar`` as a Python value. Arrow validates neither the UTF-8 of texts nor the range of dates."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise FieldError(f"{name} is not UTF-8", param=name, code="invalid_utf8") from None
    except (ValueError, OverflowError) as error:
        raise FieldError(f"{name} cannot be read: {error}", param=name) from None


def _damaged(name: str, error: Exception) -> InputError:
    return InputError(f"{name}: no readable Parquet ({' '.join(str(error).split())[:200]})", code="prompts_file")


def _value(name: str, text: str) -> Any:
    """Parse the ``text`` of a field: prompts, ids and plain stop texts are kept verbatim, other fields are JSON."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise FieldError(f"{name} is not UTF-8", param=name, code="invalid_utf8") from None
    if name in _AS_TEXT or (name == "stop" and not text.startswith("[")):
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError as error:
        raise FieldError(f"{name} is not JSON: {error}", param=name, code="invalid_json") from None


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
