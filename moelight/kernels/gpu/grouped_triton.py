"""The grouped product of experts in Triton, for compute capability 7.5 and later: one program for both products, all
stored formats and activations in either form.

`programs` makes the arguments and constants, `tiles` chooses the tiles. Imported only where Triton is installed.

A slot is a block of at most BM rows of one expert, with the expert's page: a column of the table of addresses. How the
matrix is stored says FORM, whose functions unpack it; how it is multiplied HOW, whose `step` is `values_step`, or one
of `integers_triton` for rows in int8.

Values are rounded to the dtype of the rows, so that results are those of the values but for the order in which a tensor
unit adds up the inputs of a step. A tile is unpacked once for a block of rows; the height of the blocks grows with the
rows of an expert (`tiles.choose`), and so does what an unpacking serves. Floats are unpacked as they are: bfloat16
beside float16 rows is widened, which takes a shift, and rounded to float16, on cards without bfloat16 too. Float32
enters a product whole (``ieee``), or in parts of 11 bits, whose three larger products tensor units sum (``tf32x3``).

Under interpretation on the CPU, bfloat16 is a bare 16-bit integer: products are then computed in float32, and sums are
rounded by hand. Numbers that change from call to call are not specialised, because every variant would be compiled.
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
def silu(gate, ALPHA: tl.constexpr):
    """x sigmoid(ALPHA x)."""
    return gate * tl.sigmoid(ALPHA * gate)


@triton.jit
def gelu(gate, ALPHA: tl.constexpr):
    """x times the normal distribution function."""
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def gelu_tanh(gate, ALPHA: tl.constexpr):
    """`gelu` by its approximation with tanh."""
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def relu2(gate, ALPHA: tl.constexpr):
    """Squares of positive numbers."""
    positive = tl.maximum(gate, 0.0)
    return positive * positive


@triton.jit
def activated(gate, up, limit, ACT: tl.constexpr):
    """`kernels.activations.Activation` in float32."""
    if ACT.limited and not ACT.late:
        gate = tl.minimum(gate, limit)
    result = ACT.curve(gate, ACT.alpha)
    if ACT.limited and ACT.late:
        result = tl.minimum(result, limit)
    if ACT.gated:
        if ACT.limited:
            up = tl.minimum(tl.maximum(up, -limit), limit)
        result = result * (up + ACT.shift)
    return result


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


@triton.jit
def pointer_to(table, table_step, part, page, DTYPE: tl.constexpr):
    """The tensor of row ``part`` of the table of addresses, of ``page``."""
    return tl.multiple_of(tl.load(table + part * table_step + page).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def matrix_of(table, table_step, part, page, FORM: tl.constexpr):
    """Codes, scales, zero points and order of the matrix whose addresses begin at row ``part``."""
    codes = pointer_to(table, table_step, part, page, FORM.codes_type)
    scales = pointer_to(table, table_step, part + 1, page, FORM.scale_type)
    zeros = pointer_to(table, table_step, part + 2, page, FORM.codes_type)
    return codes, scales, zeros, pointer_to(table, table_step, part + 3, page, tl.int32)


@triton.jit
def biased(total, table, table_step, part, page, address, stored, FORM: tl.constexpr, BN: tl.constexpr):
    """total [BM, BN] and the biases ``stored`` [BN] of row ``part`` of the table; none without an ``address``."""
    there = (tl.zeros((BN,), dtype=tl.int64) + address) != 0
    bias = pointer_to(table, table_step, part, page, FORM.bias_type)
    return total + tl.load(bias + stored, mask=there, other=0.0).to(tl.float32)[None, :]


@triton.jit
def values_product(total, a, matrix, row, first, size, FORM: tl.constexpr, HOW: tl.constexpr):
    """total [BM, BN] + a [BM, BK] times the values of the stored rows ``row`` [BN], inputs ``first`` on."""
    codes, scales, zeros, order = matrix
    rows, depth, groups = size
    tile = FORM.by.unpack(codes, scales, zeros, order, row, first, rows, depth, groups, FORM, HOW.even, HOW.depth)
    if tile.dtype != HOW.values:
        tile = rounded(tile.to(tl.float32), HOW.values, HOW.by_hand)
    return tl.dot(a, tile.to(HOW.product), total, input_precision="tf32x3" if HOW.in_parts else "ieee")


@triton.jit
def values_step(
    total, total_up, x_rows, gate, up, row, up_row, step, size,
    FORM: tl.constexpr, HOW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A step of the products with the values of gate and up, which are made of the stored bytes by the format's
    unpacker, and rounded."""
    x, _, _, x_stride, source = x_rows
    a = rows_at(x, source, x_stride, step, size[1], HOW.even, HOW.product, HOW.depth)
    total = values_product(total, a, gate, row, step * HOW.depth, size, FORM, HOW)
    if GATED:
        total_up = values_product(total_up, a, up, up_row, step * HOW.depth, size, FORM, HOW)
    return total, total_up


@triton.jit(do_not_specialize=["x_rows", "slot_count", "limit", "up_row"])
def grouped(
    x, x_scales, x_sums, tokens, out, slots, table, table_step, x_rows, x_stride, depth, columns, rows_stored, row_step,
    up_row, groups, slot_count, limit,
    GATE: tl.constexpr, UP: tl.constexpr, FORM: tl.constexpr, HOW: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """out [R, columns] = rows of x times the matrix of their expert, through the activation where there is one.

    table: int64 addresses, a row for each tensor of a page (`gpu.pages.TENSORS`) and a column for each page; those of
    the matrix begin at row GATE, those of its up at row UP; 0 for an expert that is computed elsewhere, whose rows are
    zeros. Output c is the stored row c * row_step, of up the one up_row behind it. x_scales and x_sums: of rows that
    `integers_triton.round_rows` rounded. FORM, HOW, ACT: constants of `gpu.programs`.
    """
    BM: tl.constexpr = HOW.rows
    BN: tl.constexpr = HOW.columns
    slot, first = place_of(columns, slot_count, BN, HOW.band)
    page = tl.load(slots + slot * 3)
    if page < 0:
        return
    rows, live, source = rows_in_slot(slots, slot, tokens, x_rows, HOW.gathered, BM)

    address = tl.load(table + GATE * table_step + page)
    gate, up = matrix_of(table, table_step, GATE, page, FORM), matrix_of(table, table_step, UP, page, FORM)
    stored = tl.minimum(first + tl.arange(0, BN), columns - 1) * row_step
    total = tl.zeros((BM, BN), dtype=tl.float32)
    total_up = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(tl.where(address != 0, depth, 0), HOW.inputs)):
        total, total_up = HOW.step(
            total, total_up, (x, x_scales, x_sums, x_stride, source), gate, up, stored, stored + up_row, step,
            (rows_stored, depth, groups), FORM, HOW, ACT.gated,
        )  # fmt: skip
    total *= 1.0 if ACT.active else HOW.factor
    if FORM.biased:
        total = biased(total, table, table_step, GATE + 4, page, address, stored, FORM, BN)
        if ACT.gated:
            total_up = biased(total_up, table, table_step, UP + 4, page, address, stored + up_row, FORM, BN)
    if ACT.active:
        total = activated(total, total_up, limit, ACT) * HOW.factor
    store_rows(out, total, rows, live, first, columns, HOW.by_hand, BN)
