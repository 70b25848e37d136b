"""Values of matrices in memory, of any format (`kernels.matrices`), and their products by torch, the reference for
kernels.

Shapes: T tokens, R rows (outputs), C columns (inputs), G groups of columns. Values are float32, or a narrower dtype
rounded once from it, which equals what the reference libraries compute in that dtype; memory beyond the result is a few
times that of the rows asked for.

Products with int8 activations are of matrices whose codes are integers. A token is cut into groups of columns: the
groups in which a row of the matrix has its scales, or 128, 64 or 32 columns that lie in one, or the block of 256 whose
parts have scales (ggml's K formats; llama.cpp rounds activations so, too). Each group is a float32 scale, its largest
magnitude over 127, times int8 numbers, rounded to nearest, ties to even. A sum takes the groups in order, each product
and each sum rounded to float32: the exact sum of the products of integers, those of a part times its step, times the
scale of the row; less, where a format takes something off, the exact sum of each part's `low` times its numbers, times
the row's `least`; times the scale of the token. Nothing else has any influence on a bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from moelight.formats.matrix import Matrix
from moelight.hrm.footprint import DEQUANTISED_ROWS
from moelight.kernels import arguments, native
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.arguments import FLOATS, check_tensor, lend
from moelight.kernels.formats.reference import WholeNumbers
from moelight.kernels.formats.table import reference_of
from moelight.kernels.matrices import (
    INT8,
    Stack,
    Weight,
    Weights,
    as_matrix,
    floats_of,
    lend_weight,
    parts_checked,
)
from moelight.kernels.reference import gate_and_up

_LEAST_MAGNITUDE = 1e-30  # below it, a group of a token is zero


def stacked_rows(stack: Stack, indices: Tensor, out: Tensor) -> Tensor:
    """Values of the rows ``indices`` (int64 [n]) of ``stack``, of one matrix whose stored rows are by themselves ->
    ``out`` [n, C]."""
    (matrix,) = stack
    if (floats := floats_of(stack)) is not None:
        same = floats.dtype == out.dtype
        return torch.index_select(floats, 0, indices, out=out) if same else out.copy_(floats[indices])
    steps = {suffix: matrix.stored.rows_of_line(suffix) for suffix in matrix.tensors}
    chosen = {suffix: part[indices] if steps[suffix] else part for suffix, part in matrix.tensors.items()}
    some = Matrix(stored=matrix.stored, rows=len(indices), columns=matrix.columns, tensors=chosen)
    return cpu_dequantize(some, out.dtype, out=out)


def dense_values(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values [R, C] of ``weight``: as ``dtype``, those of floats as they are."""
    if isinstance(weight, Tensor):
        return weight
    if (floats := floats_of((weight,))) is not None:
        return floats
    out = torch.empty(weight.shape, dtype=dtype, device=next(iter(weight.tensors.values())).device)
    for begin, block in row_blocks(weight):
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
    if extension is None or floats_of((matrix,)) is not None:
        values = dense_values(parts_checked("matrix", matrix), dtype).to(dtype)
        return values if out is None else out.copy_(values)
    out = torch.empty(matrix.shape, dtype=dtype) if out is None else out
    extension.dequantize(lend_weight("matrix", matrix), *lend(out=out), threads)
    return out


def row_blocks(
    matrix: Matrix[Tensor], *, max_rows: int = DEQUANTISED_ROWS, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, Tensor]]:
    """``(first row, values [at most ``max_rows``, C])`` over all rows of ``matrix``."""
    stored, reference = matrix.stored, reference_of(matrix.stored)
    for begin in range(0, matrix.rows, max_rows):
        end = min(matrix.rows, begin + max_rows)
        yield begin, reference.values(stored, matrix.tensors, begin, end, matrix.columns).to(dtype)


def round_tokens(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, C] -> int8 numbers as int32 [T, groups, ``group``], with zeros behind the last column, and scales float32
    [T, groups]."""
    tokens, columns = x.shape
    groups = -(-columns // group)
    padded = torch.zeros(tokens, groups * group, device=x.device)
    padded[:, :columns] = x.float()
    parts = padded.view(tokens, groups, group)
    largest = parts.abs().amax(-1)
    scales = largest / 127
    factors = torch.full_like(largest, 127) / largest  # not the reciprocal times 127
    lost, small = ~largest.isfinite(), largest < _LEAST_MAGNITUDE
    factors[lost | small] = 0
    scales[small], scales[lost] = 0, torch.nan
    values = torch.where((lost | small).unsqueeze(-1), 0, parts * factors.unsqueeze(-1))
    return values.round().int(), scales


def integer_product(x: Tensor, matrix: Matrix[Tensor]) -> Tensor:
    """x [T, C] times ``matrix`` [R, C] -> float32 [T, R]."""
    integers = whole_numbers(matrix)
    values, token_scales = round_tokens(x, integers.group)
    rows, columns = matrix.shape
    padded = torch.zeros(rows, values.shape[1] * integers.group, dtype=torch.int32, device=x.device)
    padded[:, :columns] = integers.values
    # whole numbers are exact in float64
    tokens, codes = (tensor.reshape(len(tensor), -1, integers.part).double() for tensor in (values, padded))
    sums, parts = torch.zeros(len(x), rows, device=x.device), integers.group // integers.part
    for g in range(token_scales.shape[1]):
        exact, low = torch.zeros((2, len(x), rows), dtype=torch.float64, device=x.device)
        for p in range(g * parts, (g + 1) * parts):
            product = tokens[:, p] @ codes[:, p].t()
            exact += product if integers.steps is None else product * integers.steps[:, p]
            if integers.lows is not None:
                low += tokens[:, p].sum(-1, keepdim=True) * integers.lows[:, p]
        value = exact.float() * integers.scales[:, g]
        if integers.least is not None:
            value = value - low.float() * integers.least[:, g]
        sums = sums + value * token_scales[:, g, None]
    return sums


def whole_numbers(matrix: Matrix[Tensor]) -> WholeNumbers:
    """``matrix``, of a format with integers, as whole numbers and scales."""
    stored = matrix.stored
    return reference_of(stored).integers(stored, matrix.tensors, matrix.rows, matrix.columns)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activations: str = "auto",
) -> Tensor:
    """`cpu_linear`: x [T, K] -> x weight^T + bias [T, N], in float32 or wider, rounded to x's dtype."""
    return _product(x, weight, bias, activations).to(x.dtype)


def _product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    if activations == INT8:
        sums = integer_product(x, as_matrix("weight", weight))
        return sums if bias is None else sums + bias.float()
    values = dense_values(weight, x.dtype)
    dtype = torch.promote_types(torch.promote_types(x.dtype, values.dtype), torch.float32)
    return functional.linear(x.to(dtype), values.to(dtype), None if bias is None else bias.to(dtype))


def expert_ffn(
    x: Tensor,
    gate_up: Weights,
    down: Weights,
    offsets: Sequence[int],
    *,
    up: Weights | None = None,
    activation: Activation = SILU,
    interleaved: bool = False,
    gate_up_bias: Sequence[Tensor | None] | None = None,
    up_bias: Sequence[Tensor | None] | None = None,
    down_bias: Sequence[Tensor | None] | None = None,
    activations: tuple[str, str] = ("auto", "auto"),
) -> Tensor:
    """`cpu_expert_ffn`: x [T, H] sorted by expert -> [T, H]; expert e has rows offsets[e] to offsets[e + 1]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for e, (first, last) in enumerate(pairwise(offsets)):
        wide, narrow = gate_up[e], down[e]
        if first == last or wide is None or narrow is None:
            continue
        first_bias, second_bias, bias = (
            None if tensors is None else tensors[e] for tensors in (gate_up_bias, up_bias, down_bias)
        )
        rows = x[first:last]
        projected = [_product(rows, wide, first_bias, activations[0])]
        if up is not None and (second := up[e]) is not None:
            projected.append(_product(rows, second, second_bias, activations[0]))
        elif activation.gated:
            projected = list(gate_and_up(projected[0], interleaved=interleaved))
        inner = activation(*projected).to(x.dtype)
        out[first:last] = _product(inner, narrow, bias, activations[1]).to(x.dtype)
    return out
