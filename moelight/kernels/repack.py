"""Matrices that are stored by columns, turned in their own memory to lie by rows: those of GPTQ and AWQ become packed
integers, the same numbers in the same bytes, unpacked several times as fast on a CPU; codes of 8 bits and scales are
transposed.

Shapes: R rows, C columns, G groups of columns, w codes a word.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moelight.formats.format import CELLS, RepackTable
from moelight.formats.matrix import Matrix
from moelight.hrm.footprint import READ_CHUNK_BYTES
from moelight.kernels import native
from moelight.kernels.arguments import as_dlpack, check_tensor
from moelight.profiles.gguf_config import hf_rows


class RowOrder(NamedTuple):
    """Rows of a matrix that is stored by rows in llama.cpp's order of ``heads`` heads (`gguf_config.hf_rows`)."""

    rows: int
    heads: int


_TORCH = {"bytes": torch.uint8, "halves": torch.int16, "words": torch.int32}


def transposition(lines: int, width: int, itemsize: int) -> RepackTable | None:
    """The table that transposes [``lines``, ``width``] numbers of ``itemsize`` bytes; None where a line is larger than
    the buffer that tables are turned by way of."""
    if width * itemsize > READ_CHUNK_BYTES:
        return None
    return CELLS[itemsize], lines, width, False, 0, 0


def turn(part: Tensor, table: RepackTable | RowOrder) -> None:
    """Turn ``part`` (uint8, 1-D, on the CPU, of the size of ``table``) in its place; the GIL is released.

    Raises RuntimeError without the extension for codes that are packed in words.
    """
    extension = native.extension()
    check_tensor("part", part, torch.uint8, (None,))
    if isinstance(table, RowOrder):
        rows = part.view(table.rows, -1)
        rows.copy_(rows[hf_rows(*table)])
        return
    if extension is not None:
        extension.repack(as_dlpack("part", part), table, READ_CHUNK_BYTES)
        return
    cells, lines, width, _, bits, _ = table
    if cells not in _TORCH or bits:
        raise RuntimeError(f"tables of packed codes are turned by the extension only: {native.reason()}")
    values = part.view(_TORCH[cells])
    values.copy_(values.view(lines, width).t().flatten())


def repacked(matrix: Matrix[Tensor]) -> Matrix[Tensor]:
    """``matrix`` as packed integers in the same memory, or as it is: of another format, in an order of columns, or
    without the extension."""
    stored = matrix.stored
    if stored.order:
        stored = replace(stored, in_order=in_group_order(matrix.tensors[stored.names[3]], stored.group))
    by_rows = stored.repacked_format(matrix.rows, matrix.columns)
    if by_rows is None or not native.available():
        return matrix
    parts = {}
    for part in by_rows.tensors(matrix.rows, matrix.columns):
        if part.suffix in by_rows.names:
            memory = matrix.tensors[part.suffix]
            table = stored.repack_table(part.suffix, memory.shape, memory.itemsize)
            assert table is not None, "packed integers have no order"
            turn(memory.view(-1).view(torch.uint8), table)
            parts[part.suffix] = memory.view(part.shape)
    return replace(matrix, stored=by_rows, tensors=parts)


def in_group_order(order: Tensor, group: int) -> bool:
    """True if ``order`` int32 [C], the group of each column, counts groups of ``group`` columns (0: one of all)."""
    return torch.equal(order, (torch.arange(len(order)) // (group or len(order))).int())
