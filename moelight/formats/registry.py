"""All stored formats: one row each, and what follows from all of them together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moelight.core.errors import did_you_mean
from moelight.formats import awq, bitsandbytes, fp8, ggml, gptq, int8, mlx, mxfp4, nvfp4, packed, plain
from moelight.formats.rules import FormatRow, SchemeReader

FORMATS: Mapping[str, FormatRow] = MappingProxyType(
    {
        row.format.key: row
        for row in (
            gptq.ROW,
            awq.ROW,
            fp8.ROW,
            mxfp4.ROW,
            nvfp4.ROW,
            mlx.ROW,
            bitsandbytes.ROW,
            packed.ROW,
            int8.ROW,
            ggml.ROW,
            plain.ROW,
        )
    }
)
SCHEMES: Mapping[tuple[str, bool], SchemeReader] = MappingProxyType(
    {scheme: reader for row in FORMATS.values() for scheme, reader in row.schemes.items()}
)
# Every suffix under which a format keeps a tensor: a matrix with one that its format has not is stored otherwise.
SUFFIXES = tuple(dict.fromkeys(suffix for row in FORMATS.values() for suffix in row.suffixes))
# Those that stacks of experts have, which are named without a module of their own.
STACK_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix.endswith("_blocks"))
# Names of formats by bits, none of which is a misspelling of another.
_BY_BITS = re.compile(r"(nv|mx|n)?(int|fp|f)\d+")


def similar_format(name: str, names: Iterable[str]) -> str:
    """`did_you_mean`, but for a ``name`` that is that of another format."""
    return "" if _BY_BITS.fullmatch(name.lower()) else did_you_mean(name, names)
