"""Shared parts of the row readers: a line of JSON as an object, sampling fields, the name of the invalid field."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from moelight.batch.model_names import ModelNames
from moelight.batch.rows import LONGEST_NAME, BadRow, Row, RowFormat, bad_row
from moelight.batch.source import LONGEST_LINE, InputSource
from moelight.batch.tasks import GENERATE
from moelight.core.errors import InputError, did_you_mean
from moelight.core.request import DEFAULT_RESAMPLINGS, PoolingParams, SamplingParams
from moelight.engine.chat import check_messages

Skip: TypeAlias = Callable[[int], bool]
# Bounds of the cache of shared sampling fields: entries, and characters of one key (a schema may be long).
_MOST_KEPT, _LONGEST_KEPT = 1024, 4096
# Far deeper than any schema, and shallow enough that later recursion over the values needs no guard.
_DEEPEST = 100


class RowTokenizer(Protocol):
    """The part of the model's tokenizer that a row format uses."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens included."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token; a character may be split between two tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """Options of reading and answering rows, for every format. ``defaults`` apply where a row sets no value, and so do
    ``strict`` and ``resamplings`` in its structured outputs and tools.

    ``prompt_column`` and ``id_column`` name columns of a table. In the simple format, answers have the generated ids
    with ``token_ids``, and the line of their prompt with ``numbered``. With ``per_request_metrics`` answers have
    `metrics_fields`. ``task`` is one of `TASKS`; where it scores, rows without ``choices`` have those. ``pooling``
    applies to embeddings where a row sets no value.
    """

    defaults: SamplingParams = field(default_factory=SamplingParams)
    strict: bool = False
    resamplings: int = DEFAULT_RESAMPLINGS
    models: ModelNames = field(default_factory=ModelNames)
    prompt_column: str | None = None
    id_column: str | None = None
    vocabulary: RowTokenizer | None = None
    token_ids: bool = False
    per_request_metrics: bool = False
    numbered: bool = False
    task: str = GENERATE
    choices: tuple[str, ...] = ()
    pooling: PoolingParams = field(default_factory=PoolingParams)


def unknown_field(name: str, known_names: Iterable[str]) -> InputError:
    """The error for a field that is not ``known_names``; it suggests the most similar known name."""
    near = did_you_mean(name, known_names) if len(name) <= LONGEST_NAME else ""
    return InputError(f"unknown field {name!r}{near}", field=name, code="unknown_field")


class SamplingCache:
    """Creates SamplingParams over the defaults of a context; rows with equal fields share one object."""

    def __init__(self, context: RowContext) -> None:
        self._base = context.defaults
        self._outputs = {"strict": context.strict, "resamplings": context.resamplings}
        self._made: dict[str, SamplingParams] = {}

    def make(self, values: dict[str, Any]) -> SamplingParams:
        """The defaults changed by ``values``; raises InputError for a value that is wrong or out of range."""
        if not values:
            return self._base
        outputs = values.get("structured_outputs")
        if isinstance(outputs, dict):
            stated = {name: value for name, value in outputs.items() if value is not None}
            values = {**values, "structured_outputs": {**self._outputs, **stated}}
        key = repr(values)
        made = self._made.get(key)
        if made is None:
            made = SamplingParams.from_dict(values, base=self._base)
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            if len(key) <= _LONGEST_KEPT:
                self._made[key] = made
        return made


class Input(ABC):
    """The rows of one file, pipe or standard input; a context that closes it. ``told`` describes to the user how a
    table is read; ``detected`` is the format and the evidence for it, one line."""

    format: RowFormat
    told = ""
    detected = ""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        self.name = source.name
        self.size_bytes = source.size_bytes  # of the file as stored, compressed or not
        self.digest = source.digest  # to detect a changed file
        self._context, self._source = context, source
        self._samplings = SamplingCache(context)

    @property
    def read_bytes(self) -> int:
        """Bytes, of ``size_bytes``, of the rows that the latest iteration has given."""
        return self._source.read_bytes

    @abstractmethod
    def rows(self, *, skip: Skip | None = None) -> Iterator[Row | BadRow]:
        """Every row in order, from the start at each call, except those for whose number ``skip`` is True; an
        InputError follows the last row if the file cannot be read to its end."""

    def entries(self, *, skip: Skip | None = None) -> Iterator[tuple[int, int, bytes | Row | BadRow]]:
        """``(number, line, row)`` of what `rows` iterates over; a row of which a line is all that is needed is that
        line, unread, for `LineReader.read` of the same format anywhere."""
        return ((row.number, row.line, row) for row in self.rows(skip=skip))

    def read_entry(self, row: bytes | Row | BadRow, number: int, line: int) -> Row | BadRow:  # noqa: ARG002
        """The row of an entry."""
        assert not isinstance(row, bytes)  # which only lines are
        return row

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()


class LineReader(Input):
    """A file in which every line that is not blank is a row."""

    @abstractmethod
    def read(self, raw: bytes, number: int, line: int) -> Row | BadRow:
        """The row of the line ``raw``."""

    def read_entry(self, row: bytes | Row | BadRow, number: int, line: int) -> Row | BadRow:
        return self.read(row, number, line) if isinstance(row, bytes) else row

    def rows(self, *, skip: Skip | None = None) -> Iterator[Row | BadRow]:
        return (self.read_entry(row, number, line) for number, line, row in self.entries(skip=skip))

    def entries(self, *, skip: Skip | None = None) -> Iterator[tuple[int, int, bytes | BadRow]]:
        number = -1
        for line, raw in self._source.lines():
            if raw is not None and (not raw or raw.isspace()):
                continue
            number += 1
            if skip is not None and skip(number):
                continue
            if raw is None:
                error = InputError(f"longer than {LONGEST_LINE >> 20} MiB", code="line_too_long")
                yield number, line, bad_row(number, line, None, error)
            else:
                yield number, line, raw


def read_row_object(raw: bytes, *, holding: str) -> dict[str, Any]:
    """The JSON object in ``raw``, without duplicate keys; ``holding`` names its expected fields in the InputError."""
    try:
        values = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 (byte {error.start + 1})", code="invalid_utf8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} (column {error.colno})", code="invalid_json") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise InputError(f"must be a JSON object with {holding}")
    if raw.count(b"[") + raw.count(b"{") > _DEEPEST:
        _check_depth(values)
    return values


def read_custom_id(values: Mapping[str, Any]) -> str | None:
    """The ``custom_id`` of a row; raises InputError if it is not a string."""
    custom_id = values.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise InputError("custom_id must be a string", field="custom_id")
    return custom_id


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a conversation; raises InputError if they are none."""
    try:
        return check_messages(messages)
    except InputError as error:
        raise InputError(str(error), field="messages", code=error.code) from None


def are_token_ids(value: object) -> bool:
    """True for a list of integers that may be token ids."""
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _check_depth(values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise InputError("nested too deeply", code="invalid_json")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``pairs`` as a dict; a key that is given twice is refused, since either value may be meant."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"key {twice!r} is given twice", code="invalid_json")
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
