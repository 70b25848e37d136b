"""Packed integers of compressed-tensors: codes in 32-bit words along a row, the lowest bits first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelight.formats.format import FLOATS, SHAPE, Format, TensorSpec, first_of
from moelight.formats.rules import FormatRow, Scheme

_BITS = (2, 4, 8)  # codes that do not cross words
NAMES = (".weight_packed", ".weight_scale", ".weight_zero_point")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFormat(Format):
    """Words [rows, columns / codes a word], scales [rows, groups], words of zero points [rows / codes a word,
    groups]."""

    key = "packed"
    stores_shape = True

    codes: str = "I32"

    def _steps(self) -> tuple[int, int]:
        return 1, self.group or 1

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        weight, scales, zeros = (*self.names, "")[:3]
        groups = self.groups(columns)
        tensors = [
            TensorSpec(weight, ("I32",), (rows, -(-columns * self.bits // 32))),
            TensorSpec(scales, first_of(self.scale, FLOATS), (rows, groups)),
        ]
        if self.zero_points:
            tensors.append(TensorSpec(zeros, ("I32",), (-(-rows * self.bits // 32), groups)))
        return (*tensors, TensorSpec(SHAPE, ("I64", "I32"), (2,)))

    def rows_of_line(self, suffix: str) -> int:
        if suffix == SHAPE:
            return 0
        return self.per_word if suffix == self.names[2] else 1

    def size_of(self, codes: Sequence[int]) -> tuple[int, int]:
        return codes[-2], codes[-1] * self.per_word


def _scheme(scheme: Scheme) -> Format:
    if scheme.floating or scheme.bits not in _BITS or scheme.strategy not in ("group", "channel"):
        raise ValueError(
            f"packed codes of {scheme.bits} bits by {scheme.strategy} are not read; known: int 2, 4, 8 bits"
        )
    return PackedFormat(
        name=f"int{scheme.bits} {scheme.described}",
        bits=scheme.bits,
        scale=scheme.scale,
        group=scheme.group,
        group_rows=scheme.group_rows,
        zero_points=not scheme.symmetric,
        names=NAMES,
    )


ROW = FormatRow(
    format=PackedFormat,
    suffixes=(*NAMES, ".weight_g_idx", ".weight_global_scale", SHAPE),
    schemes={("pack-quantized", floating): _scheme for floating in (False, True)},
)
