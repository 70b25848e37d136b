"""What readers of rows share: one line of JSON as an object, sampling fields, and the name of the field at fault.

Knows JSON and SamplingParams. Refuses to know files and formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from moelight.batch.model_names import ModelNames
from moelight.batch.rows import BadRow, Row, RowFormat, bad_row
from moelight.batch.source import LONGEST_LINE, InputSource
from moelight.core.errors import InputError, did_you_mean
from moelight.core.request import SamplingParams

Skip: TypeAlias = Callable[[int], bool]
# Of sampling fields that rows share: so many, none longer than that (a schema may be).
_MOST_KEPT, _LONGEST_KEPT = 1024, 4096
# Far more than any schema has, and so little that whatever walks the values later needs no guard of its own.
_DEEPEST = 100
_LONGEST_NAME = 64


class RowTokenizer(Protocol):
    """What a format asks of the model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens around it."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a character may be cut between two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """How rows are to be read and answered, whatever their format.

    ``defaults`` hold where a row is silent. ``prompt_column`` and ``id_column`` name columns of a table. With
    ``token_ids``, answers of the simple format hold the generated ids, with ``numbered`` the line that they answer.
    """

    defaults: SamplingParams = field(default_factory=SamplingParams)
    models: ModelNames = field(default_factory=ModelNames)
    prompt_column: str | None = None
    id_column: str | None = None
    vocabulary: RowTokenizer | None = None
    token_ids: bool = False
    numbered: bool = False


class Reader(Protocol):
    """The rows of one kind of file. ``told`` is what a person should know of how the file was understood, or empty."""

    format: RowFormat
    told: str

    def rows(self, source: InputSource, *, skip: Skip | None) -> Iterator[Row | BadRow]:
        """Every row but those whose number ``skip`` is true for."""


class FieldError(InputError):
    """A row cannot be served because of ``param``."""

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_request") -> None:
        super().__init__(message, code=code)
        self.param = param if param is None else param[:_LONGEST_NAME]


def unknown_field(name: str, known: Iterable[str]) -> FieldError:
    """The refusal of a field that is not ``known``; names the nearest."""
    near = did_you_mean(name, known) if len(name) <= _LONGEST_NAME else ""
    return FieldError(f"unknown field {name!r}{near}", param=name, code="unknown_field")


class Samplings:
    """SamplingParams over one base; what many rows ask for alike is made once."""

    def __init__(self, base: SamplingParams) -> None:
        self._base = base
        self._made: dict[str, SamplingParams] = {}

    def make(self, given: dict[str, Any]) -> SamplingParams:
        """The base changed by ``given``.

        Raises:
            FieldError: a value is wrong or out of range.
        """
        if not given:
            return self._base
        key = repr(given)
        made = self._made.get(key)
        if made is None:
            made = self._new(given)
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            if len(key) <= _LONGEST_KEPT:
                self._made[key] = made
        return made

    def _new(self, given: dict[str, Any]) -> SamplingParams:
        try:
            return SamplingParams.from_dict(given, base=self._base)
        except InputError as error:
            raise FieldError(str(error), code=error.code, param=self._at_fault(given, str(error))) from None

    def _at_fault(self, given: dict[str, Any], message: str) -> str | None:
        """The field that alone leads to the same refusal; None where several do together."""
        for name, value in given.items():
            try:
                SamplingParams.from_dict({name: value}, base=self._base)
            except InputError as error:
                if str(error) == message:
                    return name
        return None


def line_rows(
    source: InputSource, skip: Skip | None, read: Callable[[bytes, int, int], Row | BadRow]
) -> Iterator[Row | BadRow]:
    """``read(line, number, place)`` of every line that is not blank."""
    number = -1
    for line, raw in source.lines():
        if raw is not None and (not raw or raw.isspace()):
            continue
        number += 1
        if skip is not None and skip(number):
            continue
        if raw is None:
            error = InputError(f"longer than {LONGEST_LINE >> 20} MiB", code="line_too_long")
            yield bad_row(number, line, None, error)
        else:
            yield read(raw, number, line)


def refused(number: int, line: int, custom_id: str | None, error: Exception, *, kind: str = "") -> BadRow:
    """What became of a row at ``error``: an InputError, or the RecursionError of JSON that is nested too deeply."""
    if isinstance(error, InputError):
        return bad_row(number, line, custom_id, error, kind=kind, param=getattr(error, "param", None))
    return bad_row(number, line, custom_id, InputError("nested too deeply", code="invalid_json"), kind=kind)


def read_row_object(raw: bytes, *, holding: str) -> dict[str, Any]:
    """The JSON object in ``raw``, which should be one ``holding`` what is said there.

    Raises:
        InputError: it is not UTF-8, not JSON, no object, or names a key twice.
    """
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
    """The ``custom_id`` of a row.

    Raises:
        FieldError: it is no string.
    """
    given = values.get("custom_id")
    if given is not None and not isinstance(given, str):
        raise FieldError("custom_id must be a string", param="custom_id")
    return given


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
    """Which of two values was meant cannot be told."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"key {twice!r} is given twice", code="invalid_json")
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
