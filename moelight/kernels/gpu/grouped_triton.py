"""The grouped product of experts in Triton, for compute capability 7.5 and later: one kernel for both products.

`grouped` checks the arguments, `tiles` chooses the tiles. Imported only where Triton is installed.

A slot is a block of at most BM rows of one expert, with the expert's page: a column of the table of addresses. bfloat16
weights beside float16 rows are widened, which takes a shift, and rounded to float16 (PRODUCT), on cards without
bfloat16 too. Float32 enters a product as PRECISION says: whole (``ieee``), or in parts of 11 bits, whose three larger
products tensor units sum (``tf32x3``).

Under interpretation on the CPU, bfloat16 is a bare 16-bit integer: products are then computed in float32 (PRODUCT), and
sums are rounded by hand (BY_HAND). Numbers that change from call to call are not specialised, because every variant
would be compiled.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pages", "rows", "slot_count"])
def map_slots(
    offsets,
    index,
    slots,
    experts,
    pages,
    rows,
    slot_count,
    BM: tl.constexpr,
    PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """slots int32 [slot_count, 3] = (page, first row, row after the expert's last); page -1 for unused slots.

    ``index`` int32 [experts]: the page of each expert; for any number but 0 … pages - 1 it is ``pages``, the column
    without addresses. ``offsets`` int32 [experts + 1] are bounded to 0 … rows. So no value leads outside of the table
    or of the rows.
    """
    expert = tl.arange(0, PADDED)
    page = tl.load(index + expert, mask=expert < experts, other=-1)
    page = tl.where((page >= 0) & (page < pages), page, pages)
    first = tl.load(offsets + expert, mask=expert < experts, other=0)
    last = tl.load(offsets + expert + 1, mask=expert < experts, other=0)
    first = tl.minimum(tl.maximum(first, 0), rows)
    last = tl.minimum(tl.maximum(last, first), rows)
    blocks = (last - first + (BM - 1)) // BM
    ends = tl.cumsum(blocks, 0)
    begins = ends - blocks
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    hit = (begins[None, :] <= slot[:, None]) & (slot[:, None] < ends[None, :])
    found = tl.sum(tl.where(hit, page[None, :] + 1, 0), 1) - 1
    row = tl.sum(tl.where(hit, first[None, :] + (slot[:, None] - begins[None, :]) * BM, 0), 1)
    end = tl.sum(tl.where(hit, last[None, :], 0), 1)
    inside = slot < slot_count
    tl.store(slots + slot * 3, found, mask=inside)
    tl.store(slots + slot * 3 + 1, row, mask=inside)
    tl.store(slots + slot * 3 + 2, end, mask=inside)


@triton.jit
def rounded(value, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Round float32 to DTYPE, to the nearest, ties to even."""
    if BY_HAND:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(DTYPE)
    return result


@triton.jit
def activated(
    gate,
    up,
    limit,
    CURVE: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMITED: tl.constexpr,
    LATE: tl.constexpr,
    GATED: tl.constexpr,
):
    """`kernels.activations.Activation` in float32."""
    if LIMITED and not LATE:
        gate = tl.minimum(gate, limit)
    if CURVE == "silu":
        result = gate * tl.sigmoid(ALPHA * gate)
    elif CURVE == "gelu_tanh":
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif CURVE == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        positive = tl.maximum(gate, 0.0)
        result = positive * positive
    if LIMITED and LATE:
        result = tl.minimum(result, limit)
    if GATED:
        if LIMITED:
            up = tl.minimum(tl.maximum(up, -limit), limit)
        result = result * (up + SHIFT)
    return result


@triton.jit
def step_of_product(
    total,
    a,
    weight,
    column,
    step,
    depth,
    row_step,
    column_step,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
):
    """total [BM, BN] + a [BM, BK] times the rows ``column`` [BN] of the matrix at ``weight``, inputs step * BK on."""
    k = step * BK + tl.arange(0, BK)
    pointers = weight + column[None, :] * row_step + k[:, None] * column_step
    stored = tl.load(pointers) if EVEN else tl.load(pointers, mask=(k < depth)[:, None], other=0)
    return tl.dot(a, stored.to(PRODUCT), total, input_precision=PRECISION)


@triton.jit
def place_of(columns, slot_count, BN: tl.constexpr, BAND: tl.constexpr):
    """Slot of a program, and the first of its BN columns. Programs go over BAND slots for one block of columns, then
    the next: rows are in the cache while a band's weights are read once."""
    program = tl.program_id(0)
    blocks = tl.cdiv(columns, BN)
    first_slot = program // (BAND * blocks) * BAND
    band = tl.minimum(slot_count - first_slot, BAND)
    inside = program % (BAND * blocks)
    return first_slot + inside % band, inside // band * BN


@triton.jit
def rows_in_slot(slots, slot, tokens, x_rows, GATHERED: tl.constexpr, BM: tl.constexpr):
    """The BM rows of a slot, which of them are live, and where in x each is; one that is not is the slot's first."""
    row = tl.load(slots + slot * 3 + 1)
    rows = row + tl.arange(0, BM)
    live = rows < tl.load(slots + slot * 3 + 2)
    source = tl.where(live, rows, row).to(tl.int64)
    if GATHERED:
        source = tl.minimum(tl.maximum(tl.load(tokens + source), 0), x_rows - 1).to(tl.int64)
    return rows, live, source


@triton.jit
def rows_at(x, source, x_stride, step, depth, EVEN: tl.constexpr, PRODUCT: tl.constexpr, BK: tl.constexpr):
    """Inputs step * BK on of the rows ``source`` [BM] of x, [BM, BK]; zeros beyond the last."""
    k = step * BK + tl.arange(0, BK)
    pointers = x + source[:, None] * x_stride + k[None, :]
    a = tl.load(pointers) if EVEN else tl.load(pointers, mask=(k < depth)[None, :], other=0.0)
    return a.to(PRODUCT)


@triton.jit
def store_rows(out, total, rows, live, first, columns, BY_HAND: tl.constexpr, BN: tl.constexpr):
    """total [BM, BN] into ``rows`` [BM] of out [R, columns], columns ``first`` on."""
    column = first + tl.arange(0, BN)
    pointers = out + rows.to(tl.int64)[:, None] * columns + column[None, :]
    result = rounded(total, out.dtype.element_ty, BY_HAND)
    tl.store(pointers, result, mask=live[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["x_rows", "slot_count", "limit", "up_bias"])
def grouped(
    x,
    tokens,
    out,
    slots,
    weights,
    biases,
    x_rows,
    x_stride,
    depth,
    columns,
    row_step,
    column_step,
    up_step,
    bias_step,
    up_bias,
    slot_count,
    limit,
    ACTIVE: tl.constexpr,
    GATED: tl.constexpr,
    CURVE: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMITED: tl.constexpr,
    LATE: tl.constexpr,
    GATHERED: tl.constexpr,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
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

    weights and biases are int64 addresses, one per page; 0 for an expert that is computed elsewhere, whose
    rows are zeros. Rows of a matrix are row_step and its columns column_step apart; where GATED the number of up is
    up_step behind that of its gate. The activation, or else the product, is multiplied by FACTOR.
    """
    slot, first = place_of(columns, slot_count, BN, BAND)
    page = tl.load(slots + slot * 3)
    if page < 0:
        return
    rows, live, source = rows_in_slot(slots, slot, tokens, x_rows, GATHERED, BM)

    address = tl.load(weights + page)
    there = (tl.zeros((BN,), dtype=tl.int64) + address) != 0
    column = tl.minimum(tl.arange(0, BN), columns - 1 - first)
    begin = first.to(tl.int64)
    matrix = tl.multiple_of(address.to(tl.pointer_type(STORED)), 16)
    weight = matrix + begin * row_step
    weight_up = weight + up_step
    total = tl.zeros((BM, BN), dtype=tl.float32)
    total_up = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(tl.where(address != 0, depth, 0), BK)):
        a = rows_at(x, source, x_stride, step, depth, EVEN, PRODUCT, BK)
        total = step_of_product(
            total, a, weight, column, step, depth, row_step, column_step, EVEN, PRODUCT, PRECISION, BK
        )
        if GATED:
            total_up = step_of_product(
                total_up, a, weight_up, column, step, depth, row_step, column_step, EVEN, PRODUCT, PRECISION, BK
            )
    total *= 1.0 if ACTIVE else FACTOR
    if BIASED:
        bias = tl.load(biases + page).to(tl.pointer_type(BIAS)) + (begin + column) * bias_step
        total += tl.load(bias, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(bias + up_bias, mask=there, other=0.0).to(tl.float32)[None, :]
    if ACTIVE:
        total = activated(total, total_up, limit, CURVE, ALPHA, SHIFT, LIMITED, LATE, GATED) * FACTOR
    store_rows(out, total, rows, live, first, columns, BY_HAND, BN)
