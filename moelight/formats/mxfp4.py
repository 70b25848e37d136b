"""MXFP4: two E2M1 codes a byte, the lower bits first, and a power of two for each 32."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moelight.formats.format import EXPONENTS, MIN_INT8_GROUP, Format, TensorSpec, first_of, same_but_for_ones
from moelight.formats.rules import FormatRow, ModuleRule, Scheme, Settings

MX_GROUP = 32  # columns of a block
_BLOCKS = "_blocks"  # suffix of gpt-oss, whose experts are stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4Format(Format):
    """Bytes [rows, columns / 2], exponents [rows, groups]."""

    key = "mxfp4"

    name: str = "MXFP4"
    bits: int = 4
    codes: str = "U8"
    scale: str = "U8"
    group: int = MX_GROUP

    def _steps(self) -> tuple[int, int]:
        return 1, MX_GROUP

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        return (
            TensorSpec(self.names[0], ("U8", "I8"), (rows, columns // 2)),
            TensorSpec(self.names[1], first_of(self.scale, EXPONENTS), (rows, self.groups(columns))),
        )

    def integer_groups(self, columns: int) -> tuple[int, int]:
        return MIN_INT8_GROUP, MIN_INT8_GROUP

    def stack_of(self, codes: Sequence[int]) -> int:
        return codes[0] if len(codes) > 2 and self.names[0] == _BLOCKS else 0

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        first = 1 if self.stack_of(codes) else 0
        return codes[first], 2 * math.prod(codes[first + 1 :])

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        """Stacks of experts add a dimension, and blocks are one of their own."""
        if len(shape) > len(expected):
            *outer, blocks, width = shape
            if math.prod(shape) == math.prod(expected) and outer[-1:] == [expected[0]]:
                shape = (*outer, blocks * width)
        return same_but_for_ones(shape, expected)


def mxfp4(names: tuple[str, str]) -> MXFP4Format:
    """MXFP4 under the suffixes ``names`` of codes and scales."""
    return MXFP4Format(names=names)


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    """MXFP4 as in gpt-oss: only expert matrices are quantised."""
    settings.words("modules_to_not_convert")
    yield ModuleRule(re.compile(r".*\.experts\..*"), mxfp4((_BLOCKS, "_scales")))


def _scheme(scheme: Scheme) -> Format:
    if not scheme.floating or scheme.bits != 4 or scheme.group != MX_GROUP or scheme.strategy != "group":
        raise ValueError("mxfp4-pack-quantized weights must be float, of 4 bits in groups of 32")
    return mxfp4((".weight_packed", ".weight_scale"))


ROW = FormatRow(
    format=MXFP4Format,
    suffixes=(".weight", ".scale", _BLOCKS, "_scales", ".weight_packed", ".weight_scale"),
    methods={"mxfp4": _rules},
    schemes={("mxfp4-pack-quantized", floating): _scheme for floating in (False, True)},
)
