"""All stored formats: one row each, and what follows from all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moelight.formats import awq, fp8, ggml, gptq, int8, mxfp4, packed, plain
from moelight.formats.rules import FormatRow, SchemeReader

FORMATS: Mapping[str, FormatRow] = MappingProxyType(
    {row.format.key: row for row in (gptq.ROW, awq.ROW, fp8.ROW, mxfp4.ROW, packed.ROW, int8.ROW, ggml.ROW, plain.ROW)}
)
SCHEMES: Mapping[tuple[str, bool], SchemeReader] = MappingProxyType(
    {scheme: reader for row in FORMATS.values() for scheme, reader in row.schemes.items()}
)
# Every suffix under which a format keeps a tensor: a matrix with one that its format has not is stored otherwise.
SUFFIXES = tuple(dict.fromkeys(suffix for row in FORMATS.values() for suffix in row.suffixes))
# Those that stacks of experts have, which are named without a module of their own.
STACK_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix.endswith("_blocks"))
