"""One input of a job: its format, detected or given, and its rows, iterated any number of times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from moelight.batch.fields import Input, RowContext
from moelight.batch.simple import PROMPT_FIELDS
from moelight.batch.source import InputSource, open_input_source
from moelight.batch.tasks import EMBED, GENERATE
from moelight.core.errors import InputError
from moelight.core.registry import Registry
from moelight.core.request import PoolingParams

FORMATS: Registry[Callable[[RowContext, InputSource], Input]] = Registry(
    "format",
    {
        "openai": "moelight.batch.openai:OpenAIReader",
        "simple": "moelight.batch.simple:SimpleReader",
        "text": "moelight.batch.simple:TextReader",
        "csv": "moelight.batch.columns:CsvReader",
        "parquet": "moelight.batch.columns:ParquetReader",
    },
)
AUTO = "auto"
_PARQUET = b"PAR1"
_BY_SUFFIX = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_TEXT_SUFFIXES = (".txt", ".text")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonlines")
# The first line may be damaged: the first of these lines that is an object decides.
_LINES_TRIED = 100
_OPENAI_KEYS = ("method", "url", "body")
_ALL_KEYS = ("custom_id", *_OPENAI_KEYS)
_CALLED = {
    "openai": "OpenAI batch lines",
    "simple": "one JSON object a line",
    "text": "one prompt a line",
    "csv": "a table, one prompt a record",
    "parquet": "a Parquet table, one prompt a row",
}
_TABLES = ("csv", "parquet")


def open_input(path: Path, context: RowContext | None = None, *, format: str = AUTO) -> Input:  # noqa: A002 (the option's name)
    """Open ``path`` (``-``: standard input) in ``format``, or in the format detected from its name and first lines;
    raises InputError if it cannot be read, holds no row, or cannot be of that format."""
    context, source = context or RowContext(), open_input_source(path)
    try:
        name, reason = _detect(source, path) if format == AUTO else (format, "as asked")
        reader = FORMATS.get(name)(context, source)
        if name not in _TABLES and (context.prompt_column is not None or context.id_column is not None):
            raise InputError(f"{source.name}: columns can be named for {' and '.join(_TABLES)}, not for {name}")
        if name == "openai" and context.task != GENERATE:
            raise InputError(f"{source.name}: --task {context.task} reads prompts and messages, not OpenAI batch lines")
        if name != "openai" and context.task != EMBED and context.pooling != PoolingParams():
            raise InputError(f"{source.name}: --pooling, --normalize and --dimensions go with --task {EMBED}")
        if next(reader.rows(), None) is None:
            raise source.refusal("no prompts")
    except BaseException:
        source.close()
        raise
    reader.detected = f"{_CALLED[name]} ({reason}{reader.told})"
    return reader


def _detect(source: InputSource, path: Path) -> tuple[str, str]:
    """``(format, why)``."""
    if source.start(len(_PARQUET)) == _PARQUET:
        return "parquet", "it begins as Parquet does"
    suffix = _suffix(path)
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix], f"by its name, {suffix}"
    first = b""
    filled = ((line, raw) for line, raw in source.lines() if raw is not None and raw.strip())
    for tried, (line, raw) in enumerate(filled):
        first = first or raw.strip()
        if suffix == ".json" and first in (b"{", b"["):
            raise source.refusal("one JSON text over many lines; write each row as an object on a line of its own")
        parsed = _object(raw)
        if parsed is not None:
            openai = any(name in parsed for name in _OPENAI_KEYS)
            names = ", ".join(name for name in (_ALL_KEYS if openai else PROMPT_FIELDS) if name in parsed)
            return "openai" if openai else "simple", f"{names or 'no url and no body'} on line {line}"
        if tried >= _LINES_TRIED or suffix in _TEXT_SUFFIXES:
            break
    if suffix in _TEXT_SUFFIXES:
        return "text", f"by its name, {suffix}"
    if suffix in _JSON_SUFFIXES:
        return "simple", f"by its name, {suffix}"
    if first.startswith((b"{", b"[")):
        return "simple", "it begins as JSON"
    return "text", "it begins as no JSON"


def _suffix(path: PurePath) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".gzip"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
