"""Matrices in a stored format, and their values: by `kernels.formats`, the reference for kernels, or natively.

Shapes: R rows (outputs), C columns (inputs), G groups of columns. Results are float32, or a narrower dtype rounded once
from it, which equals what the reference libraries compute in that dtype; memory beyond the result is a few times that
of the rows asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.hrm.footprint import DEQUANTISED_ROWS
from moelight.kernels import arguments, native
from moelight.kernels.arguments import FLOATS, as_dlpack, check_tensor, lend
from moelight.kernels.formats.reference import Tensors
from moelight.kernels.formats.table import reference_of


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Quantised matrices ``parts`` below one another, each multiplied by its own ``activations`` (`integers`)."""

    parts: tuple[Matrix[Tensor], ...]
    activations: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].columns

    def rows(self, places: Tensor, out: Tensor) -> Tensor:
        """The numbers of rows ``places`` (int64 [n]) of its only part, whose stored rows are by themselves -> ``out``
        [n, C]."""
        (stacked,) = self.parts
        steps = {suffix: stacked.stored.rows_of_line(suffix) for suffix in stacked.tensors}
        chosen = {suffix: part[places] if steps[suffix] else part for suffix, part in stacked.tensors.items()}
        some = Matrix(stored=stacked.stored, rows=len(places), columns=stacked.columns, tensors=chosen)
        return cpu_dequantize(some, out.dtype, out=out)


def dense_values(weight: Tensor | Matrix[Tensor], dtype: torch.dtype) -> Tensor:
    """``weight`` if it is a tensor, else its values [R, C] as ``dtype``."""
    if not isinstance(weight, Matrix):
        return weight
    out = torch.empty(weight.shape, dtype=dtype, device=next(iter(weight.tensors.values())).device)
    for begin, block in row_blocks(weight.stored, weight.tensors, weight.rows, weight.columns):
        out[begin : begin + len(block)].copy_(block)
    return out


def cpu_dequantize(
    matrix: Matrix[Tensor], dtype: torch.dtype, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """The numbers of ``matrix`` -> `out` [R, C] of ``dtype`` (a float), or a new tensor; the GIL is released.

    Equal to ``dense_values(matrix, dtype)`` to the bit, except that any NaN may be any other. Natively where the
    extension is built, without memory beyond the result; ``threads`` None stands for torch.get_num_threads().
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype: must be one of {', '.join(map(str, FLOATS))}, is {dtype}")
    threads, extension = arguments.check_threads(threads), native.extension()
    if out is not None:
        check_tensor("out", out, dtype, matrix.shape)
    if extension is None or not matrix.stored.is_quantised:
        values = dense_values(parts_checked("matrix", matrix), dtype)
        return values if out is None else out.copy_(values)
    out = torch.empty(matrix.shape, dtype=dtype) if out is None else out
    extension.dequantize(lend_matrix("matrix", matrix), *lend(out=out), threads)
    return out


def lend_matrix(name: str, matrix: Matrix[Tensor]) -> object:
    """Check the parts of ``matrix`` and return the extension's arguments for it: format and sizes, and DLPack capsules
    of codes, scales, zero points and order; of plain numbers the capsule alone."""
    form, parts = matrix.stored, matrix.tensors
    if not form.is_quantised:
        return as_dlpack(name, parts_checked(name, matrix).tensors[form.names[0]])
    lent: list[object] = [None] * 4
    needed = (True, True, form.zero_points, form.order)
    for index, suffix in enumerate(form.names):
        if not needed[index]:
            continue
        if suffix not in parts:
            raise ValueError(f"{name}: its part {suffix} is missing")
        lent[index] = as_dlpack(name, parts[suffix])
    return (
        form.native_name,
        form.bits,
        matrix.rows,
        matrix.columns,
        form.group,
        form.group_rows,
        form.zero_bias,
        *lent,
    )


def parts_checked(name: str, matrix: Matrix[Tensor], device: torch.device | None = arguments.CPU) -> Matrix[Tensor]:
    """``matrix``, all of whose parts are there, dense, on ``device`` (None: any but meta) and of the right size; raises
    ValueError that names ``name``."""
    try:
        parts = matrix.stored.tensors(matrix.rows, matrix.columns)
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None
    for part in parts:
        if part.suffix not in matrix.stored.names:
            continue
        tensor = arguments.check_dense(name, matrix.tensors.get(part.suffix), device)
        if not tensor.is_contiguous() or tensor.numel() != math.prod(part.shape):
            shape = f"contiguous {list(part.shape)}, is {list(tensor.shape)}"
            raise ValueError(f"{name}: its part {part.suffix} must be {shape}")
    return matrix


def unpack(
    stored: Format, parts: Tensors, begin: int, end: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows ``begin`` to ``end`` [R, C] of the matrix whose tensors are ``parts``, which `weights.stored_matrix`
    checked."""
    return reference_of(stored).values(stored, parts, begin, end, columns).to(dtype)


def row_blocks(
    stored: Format,
    parts: Tensors,
    rows: int,
    columns: int,
    *,
    max_rows: int = DEQUANTISED_ROWS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[int, Tensor]]:
    """``(first row, numbers [at most ``max_rows``, C])`` over all rows."""
    for begin in range(0, rows, max_rows):
        yield begin, unpack(stored, parts, begin, min(rows, begin + max_rows), columns, dtype)
