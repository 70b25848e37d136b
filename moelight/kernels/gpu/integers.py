"""Rows rounded to int8 on a GPU, as `kernels.quantized` defines it.

Legend: T rows of x, R routed rows, C columns, G columns of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.units import align_up
from moelight.formats.format import Format
from moelight.kernels.gpu import tiles

_SUMS = {"groups": ((), torch.int32), "parts": ((16,), torch.float16)}  # shapes of a group's, dtypes
_NUMBERS = 4096  # that a program rounds


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows of ``columns`` as ``values`` int8 [n, groups x ``group``] times ``scales`` float32 [n, groups]; ``sums`` of
    the numbers as `integers_triton.round_rows` stores them, where the matrices need some. Groups are whole steps of a
    product; behind the last column are zeros."""

    values: Tensor
    scales: Tensor
    sums: Tensor
    group: int
    columns: int

    @staticmethod
    def empty(rows: int, columns: int, stored: Format, device: torch.device) -> RoundedRows:
        """Memory for rows that matrices of ``stored`` multiply."""
        group, _ = stored.integer_groups(columns)
        groups, sums = align_up(columns, max(group, tiles.INTEGER_STEP)) // group, stored.token_sums
        scales = torch.empty((rows, groups), dtype=torch.float32, device=device)
        shape, dtype = _SUMS.get(sums, ((), torch.float32))
        return RoundedRows(
            values=torch.empty((rows, groups * group), dtype=torch.int8, device=device),
            scales=scales,
            sums=torch.empty((rows, groups, *shape), dtype=dtype, device=device) if sums else scales,
            group=group,
            columns=columns,
        )


def round_rows(x: Tensor, stored: Format, tokens: Tensor | None = None) -> RoundedRows:
    """x [T, C] (row r x[tokens[r]], with ``tokens`` int64 [R]), rounded for matrices of ``stored``."""
    from moelight.kernels.gpu import integers_triton

    result = RoundedRows.empty(len(x) if tokens is None else len(tokens), x.shape[1], stored, x.device)
    (rows, groups), group = result.scales.shape, result.group
    count = min(_NUMBERS // group, 1 << (groups - 1).bit_length())
    program = integers_triton.round_rows[(rows, -(-groups // count))]
    program(
        x,
        x if tokens is None else tokens,
        result.values,
        result.scales,
        result.sums,
        len(x),
        x.stride(0),
        x.shape[1],
        groups,
        GATHERED=tokens is not None,
        SUMS=stored.token_sums,
        G=group,
        COUNT=count,
        enable_fp_fusion=False,
    )
    return result
