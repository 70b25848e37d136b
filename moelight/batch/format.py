"""Registry of the row formats by name, and the encoding of an output row as a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from moelight.batch.fields import Reader, RowContext
from moelight.batch.source import InputSource
from moelight.core.registry import Registry

FORMATS: Registry[Callable[[RowContext, InputSource], Reader]] = Registry(
    "format",
    {
        "openai": "moelight.batch.openai:OpenAIReader",
        "simple": "moelight.batch.simple:SimpleReader",
        "text": "moelight.batch.simple:TextReader",
        "csv": "moelight.batch.columns:CsvReader",
        "parquet": "moelight.batch.columns:ParquetReader",
    },
)


def to_json_line(row: dict[str, Any]) -> bytes:
    """One line of UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
