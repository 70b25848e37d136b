"""The grouped product of experts whose matrices are quantised, in Triton, for compute capability 7.5 and later.

`grouped_triton.grouped` over tiles that are unpacked from the stored bytes, each number rounded to the dtype of the
rows, so that results are those of the numbers. A tile is unpacked once for a block of rows; the height of the blocks
grows with the rows of an expert (`tiles.choose`), and so does what an unpacking serves.
"""

import triton
import triton.language as tl

from moelight.kernels.gpu.grouped_triton import activated, place_of, rounded, rows_at, source_of, store_rows
from moelight.kernels.gpu.unpack_triton import unpacked


@triton.jit
def pointer_to(table, table_step, part, page, DTYPE: tl.constexpr):
    """The tensor of row ``part`` of the table of addresses, of ``page``."""
    return tl.multiple_of(tl.load(table + part * table_step + page).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def unpacked_product(
    total,
    a,
    codes,
    scales,
    zeros,
    order,
    row,
    first,
    rows,
    depth,
    groups,
    KIND: tl.constexpr,
    NAME: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHARED: tl.constexpr,
    ZEROS: tl.constexpr,
    ZERO_BIAS: tl.constexpr,
    ORDER: tl.constexpr,
    EXPONENT: tl.constexpr,
    EVEN: tl.constexpr,
    NUMBER: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_HAND: tl.constexpr,
    BK: tl.constexpr,
):
    """total [BM, BN] + a [BM, BK] times the stored rows ``row`` [BN], inputs ``first`` on, rounded to NUMBER."""
    tile = unpacked(
        codes, scales, zeros, order, row, first, rows, depth, groups,
        KIND, NAME, BITS, BYTES, GROUP, GROUP_ROWS, TRANSPOSED, SHARED, ZEROS, ZERO_BIAS, ORDER, EXPONENT, EVEN, BK,
    )  # fmt: skip
    return tl.dot(a, rounded(tile, NUMBER, BY_HAND).to(PRODUCT), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["x_rows", "slot_count", "limit", "up_row"])
def grouped_quantized(
    x,
    tokens,
    out,
    slots,
    table,
    table_step,
    x_rows,
    x_stride,
    depth,
    columns,
    rows_stored,
    row_step,
    up_row,
    groups,
    slot_count,
    limit,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ACTIVE: tl.constexpr,
    GATED: tl.constexpr,
    CURVE: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMITED: tl.constexpr,
    LATE: tl.constexpr,
    GATHERED: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    NAME: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHARED: tl.constexpr,
    ZEROS: tl.constexpr,
    ZERO_BIAS: tl.constexpr,
    ORDER: tl.constexpr,
    EXPONENT: tl.constexpr,
    EVEN: tl.constexpr,
    NUMBER: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """out [R, columns] = rows of x times the matrix of their expert, through the activation where ACTIVE.

    table: int64 addresses, a row for each tensor of a page (`gpu.quantized.TENSORS`) and a column for each page; those
    of the matrix begin at row GATE, those of its up at row UP; 0 for an expert that is computed elsewhere, whose rows
    are zeros. Output c is the stored row c * row_step, of up the one up_row behind it. All else as in
    `grouped_triton.grouped`, and the format as in `unpacked`.
    """
    slot, first = place_of(columns, slot_count, BN, BAND)
    page = tl.load(slots + slot * 3)
    if page < 0:
        return
    row = tl.load(slots + slot * 3 + 1)
    rows = row + tl.arange(0, BM)
    live = rows < tl.load(slots + slot * 3 + 2)
    source = source_of(tokens, rows, live, row, x_rows, GATHERED)

    address = tl.load(table + GATE * table_step + page)
    codes = pointer_to(table, table_step, GATE, page, CODES)
    scales = pointer_to(table, table_step, GATE + 1, page, SCALE)
    zeros = pointer_to(table, table_step, GATE + 2, page, CODES)
    order = pointer_to(table, table_step, GATE + 3, page, tl.int32)
    up_codes = pointer_to(table, table_step, UP, page, CODES)
    up_scales = pointer_to(table, table_step, UP + 1, page, SCALE)
    up_zeros = pointer_to(table, table_step, UP + 2, page, CODES)
    up_order = pointer_to(table, table_step, UP + 3, page, tl.int32)
    stored = tl.minimum(first + tl.arange(0, BN), columns - 1) * row_step
    total = tl.zeros((BM, BN), dtype=tl.float32)
    total_up = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(tl.where(address != 0, depth, 0), BK)):
        a = rows_at(x, source, x_stride, step, depth, EVEN, PRODUCT, BK)
        total = unpacked_product(
            total, a, codes, scales, zeros, order, stored, step * BK, rows_stored, depth, groups,
            KIND, NAME, BITS, BYTES, GROUP, GROUP_ROWS, TRANSPOSED, SHARED, ZEROS, ZERO_BIAS, ORDER, EXPONENT, EVEN,
            NUMBER, PRODUCT, PRECISION, BY_HAND, BK,
        )  # fmt: skip
        if GATED:
            total_up = unpacked_product(
                total_up, a, up_codes, up_scales, up_zeros, up_order, stored + up_row, step * BK, rows_stored, depth,
                groups, KIND, NAME, BITS, BYTES, GROUP, GROUP_ROWS, TRANSPOSED, SHARED, ZEROS, ZERO_BIAS, ORDER,
                EXPONENT, EVEN, NUMBER, PRODUCT, PRECISION, BY_HAND, BK,
            )  # fmt: skip
    total *= 1.0 if ACTIVE else FACTOR
    if BIASED:
        there = (tl.zeros((BN,), dtype=tl.int64) + address) != 0
        bias = pointer_to(table, table_step, GATE + 4, page, BIAS)
        total += tl.load(bias + stored, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bias = pointer_to(table, table_step, UP + 4, page, BIAS)
            total_up += tl.load(bias + stored + up_row, mask=there, other=0.0).to(tl.float32)[None, :]
    if ACTIVE:
        total = activated(total, total_up, limit, CURVE, ALPHA, SHIFT, LIMITED, LATE, GATED) * FACTOR
    store_rows(out, total, rows, live, first, columns, BY_HAND, BN)
