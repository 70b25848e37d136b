"""Shared parts of the formats of 8-bit codes times scales: a grid of scales, each of some rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelight.formats.format import EXPONENTS, FLOATS, Format, TensorSpec, first_of, same_but_for_ones
from moelight.formats.rules import Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledFormat(Format):
    """Codes [rows, columns] times scales [row groups, groups], less zero points of the same shape."""

    bits: int = 8

    def _tensors(self, rows: int, columns: int) -> Sequence[TensorSpec]:
        weight, scales, zeros = (*self.names, "")[:3]
        grid = (self.row_groups(rows), self.groups(columns))
        tensors = [
            TensorSpec(weight, (self.codes,), (rows, columns)),
            TensorSpec(scales, first_of(self.scale, (*FLOATS, *EXPONENTS)), grid),
        ]
        return (*tensors, TensorSpec(zeros, (self.codes,), grid)) if self.zero_points else tensors

    def rows_of_line(self, suffix: str) -> int:
        return 1 if suffix == self.names[0] else self.group_rows

    def transposed_format(self) -> Format | None:
        if bool(self.group) != bool(self.group_rows):
            return None
        return replace(self, group=self.group_rows, group_rows=self.group)

    def accepts(self, shape: Sequence[int], expected: Sequence[int]) -> bool:
        return same_but_for_ones(shape, expected)


def scheme_fields(scheme: Scheme) -> dict[str, Any]:
    """Return the fields of a scaled format from a scheme of compressed-tensors; raises ValueError if it is not
    supported."""
    if scheme.bits != 8 or scheme.strategy == "tensor_group":
        raise ValueError(f"{scheme.stored_as} weights of {scheme.bits} bits by {scheme.strategy} are not read")
    return {
        "scale": scheme.scale,
        "group": scheme.group,
        "group_rows": scheme.group_rows,
        "zero_points": not scheme.symmetric,
    }
