"""The lines of a job: what may stand in the input, and what is written for each.

Knows JSON and the names of the fields. A line that cannot be served is a value (`BadLine`), never an exception, so that
one bad row does not end a run. Refuses to know tokens, engines and the order in which completions finish.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from moelight.batch.fields import Reader, Reading
from moelight.batch.source import Source
from moelight.core.errors import InputError, did_you_mean
from moelight.core.registry import Registry
from moelight.core.request import Completion, SamplingParams
from moelight.engine.chat import check_messages

FORMATS: Registry[Callable[[Reading, Source], Reader]] = Registry(
    "format",
    {
        "openai": "moelight.batch.openai:OpenAIReader",
        "simple": "moelight.batch.simple:SimpleReader",
        "text": "moelight.batch.simple:TextReader",
        "csv": "moelight.batch.columns:CsvReader",
        "parquet": "moelight.batch.columns:ParquetReader",
    },
)

STANDARD_STREAM = Path("-")
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_FIELDS = ("prompt", "messages", "custom_id", *_SAMPLING_FIELDS)
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLine:
    """A line that asks for a completion: exactly one of ``prompt`` and ``messages`` is set. ``line`` counts from 1."""

    line: int
    custom_id: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    sampling: SamplingParams

    @property
    def shown(self) -> str:
        """What a person would call the prompt: the text, or the last thing the user said."""
        if self.messages is None:
            return self.prompt or ""
        said = [message["content"] for message in self.messages if message["role"] == "user"]
        return str((said or [self.messages[-1]["content"]])[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """A line that cannot be served, and why: ``code`` for programs, ``message`` for people."""

    line: int
    custom_id: str | None
    code: str
    message: str


def read_lines(path: Path, *, defaults: SamplingParams | None = None) -> Iterator[InputLine | BadLine]:
    """Every line of the JSONL file ``path`` (``-`` is standard input) that is not blank, one at a time.

    ``defaults`` hold where a line does not say otherwise.

    Raises:
        InputError: there is no such file, it cannot be read, or every line is blank.
    """
    name = "standard input" if path == STANDARD_STREAM else str(path)
    base = defaults if defaults is not None else SamplingParams()
    seen: set[str] = set()
    empty = True
    try:
        with _open(path) as file:
            for number, raw in _texts(file):
                empty = False
                yield _parse(raw, line=number, base=base, seen=seen)
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error})", code="prompts_file") from None
    if empty:
        raise InputError(f"{name}: no prompts", code="prompts_file")


def error_row(bad: BadLine) -> dict[str, Any]:
    """The output row of a line that was not served."""
    error = {"code": bad.code, "message": bad.message}
    return {**_identity(bad.custom_id), "line": bad.line, "error": error}


def completion_row(completion: Completion, *, custom_id: str | None, token_ids: bool) -> dict[str, Any]:
    """The output row of a completion, with its ids if ``token_ids``."""
    row: dict[str, Any] = {
        **_identity(custom_id),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
        },
    }
    return {**row, "token_ids": list(completion.token_ids)} if token_ids else row


def to_json_line(row: dict[str, Any]) -> bytes:
    r"""``row`` as one line of UTF-8. Half a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def bad_line(line: int, custom_id: str | None, error: InputError) -> BadLine:
    """``error`` as the fate of one line; a message that quotes a huge value is shortened."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[: _LONGEST_MESSAGE - 1] + "…"
    return BadLine(line=line, custom_id=custom_id, code=error.code, message=message)


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    if path == STANDARD_STREAM:
        return nullcontext(sys.stdin.buffer)
    try:
        return path.open("rb")
    except ValueError as error:
        raise InputError(f"{str(path)!r}: not a usable path ({error})", code="prompts_file") from None


def _texts(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """``(number, bytes)`` of the lines that are not blank, without byte order mark and line end."""
    for number, raw in enumerate(file, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if text.strip():
            yield number, text


def _parse(raw: bytes, *, line: int, base: SamplingParams, seen: set[str]) -> InputLine | BadLine:
    custom_id: str | None = None
    try:
        values = _read_object(raw)
        custom_id = _custom_id(values)
        if custom_id is not None:
            if custom_id in seen:
                raise InputError(f"custom_id {custom_id!r} was used by an earlier line", code="duplicate_custom_id")
            seen.add(custom_id)
        return _input_line(values, line=line, custom_id=custom_id, base=base)
    except InputError as error:
        return bad_line(line, custom_id, error)
    except RecursionError:
        return bad_line(line, custom_id, InputError("nested too deeply", code="invalid_json"))


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 (byte {error.start + 1})", code="invalid_utf8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} (column {error.colno})", code="invalid_json") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise InputError("must be a JSON object with prompt or messages")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _custom_id(values: dict[str, Any]) -> str | None:
    given = values.get("custom_id")
    if given is not None and not isinstance(given, str):
        raise InputError("custom_id must be a string")
    return given


def _input_line(values: dict[str, Any], *, line: int, custom_id: str | None, base: SamplingParams) -> InputLine:
    for name in values:
        if name not in _FIELDS:
            raise InputError(f"unknown field {name!r}{did_you_mean(name, _FIELDS)}", code="unknown_field")
    prompt, messages = values.get("prompt"), values.get("messages")
    if prompt is None and messages is None:
        raise InputError("neither prompt nor messages is given", code="missing_prompt")
    if prompt is not None and messages is not None:
        raise InputError("both prompt and messages are given; send one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise InputError("prompt must be a string")
    return InputLine(
        line=line,
        custom_id=custom_id,
        prompt=prompt,
        messages=None if messages is None else check_messages(messages),
        sampling=SamplingParams.from_dict(
            {name: values[name] for name in _SAMPLING_FIELDS if name in values}, base=base
        ),
    )


def _identity(custom_id: str | None) -> dict[str, str]:
    return {} if custom_id is None else {"custom_id": custom_id}
