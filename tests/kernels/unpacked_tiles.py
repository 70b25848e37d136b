"""A Triton program that writes unpacked tiles, for the tests of `kernels.gpu.quantized_triton`."""

import triton
import triton.language as tl

from moelight.kernels.gpu.grouped_triton import matrix_of


@triton.jit
def write_tile(
    table,
    table_step,
    out,
    rows,
    depth,
    groups,
    FORM: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out float32 [depth, rows]: the numbers of the matrix [rows, depth] of the first page; a program writes BK x BN of
    them."""
    codes, scales, zeros, order = matrix_of(table, table_step, 0, 0, FORM)
    row, first = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0) * BK
    tile = FORM.by.unpack(
        codes, scales, zeros, order, tl.minimum(row, rows - 1), first, rows, depth, groups, FORM, EVEN, BK
    )  # fmt: skip
    k = first + tl.arange(0, BK)
    tl.store(out + k[:, None] * rows + row[None, :], tile, mask=(k < depth)[:, None] & (row < rows)[None, :])
