"""Products of rows rounded to int8 with experts whose codes are whole numbers, in Triton, for the integer tensor units
of compute capability 8.0 to 9.0; `kernels.quantized` defines them.

`round_rows` rounds each group of a row once. The product takes the groups in order: integer units sum the products of
whole numbers exactly, and the scales of the matrix and of the rows multiply the sums in float32. Launched without fused
multiply-adds, each float32 step is that of the definition, so a result depends on no tile and no other row.

Numbers of ggml's K formats are codes times a step of their part, up to 13 bits: they enter as 128 times one int8 number
plus another, so a block of 256 has two sums of whole numbers, and none of its parts has one of its own. What these
formats take off is a product of float16: of the sums of each part, as 64 times one number plus another, with the
minima; its terms are whole and below 2^18, so it is exact as well.
"""

import triton
import triton.language as tl

from moelight.kernels.gpu.quantized_triton import (
    block_bytes,
    block_half,
    e2m1_codes,
    e2m1_doubled,
    five_bits,
    four_bits,
    inputs,
    k_six_bits,
    loaded_scale,
    q6_k_steps,
    repeat_rows,
    signed_bytes,
)

# 1.5 * 2^23: its bits plus a whole number below 2^22 in magnitude are the bits of its sum with the number.
_BIASED = tl.constexpr(0x4B400000)
_BIAS = tl.constexpr(12582912.0)
_LEAST_MAGNITUDE = tl.constexpr(1e-30)
_PARTS = tl.constexpr(8)  # of a block of 256 that have a minimum
_SUMS = tl.constexpr(16)  # halves of these sums


@triton.jit(do_not_specialize=["x_rows"])
def round_rows(
    x,
    tokens,
    numbers,
    scales,
    sums,
    x_rows,
    x_stride,
    columns,
    groups,
    GATHERED: tl.constexpr,
    SUMS: tl.constexpr,
    G: tl.constexpr,
    COUNT: tl.constexpr,
):
    """x [T, columns] -> numbers int8 [R, groups * G], zeros behind the last column, and scales float32 [R, groups].

    SUMS "groups": sums int32 [R, groups] of the numbers; "parts": of each 32 of 256 as 16 halves, float16
    [R, groups, 16]. A program rounds COUNT groups of a row, which is x[tokens[row]] where GATHERED.
    """
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHERED:
        source = tl.minimum(tl.maximum(tl.load(tokens + row), 0), x_rows - 1).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    inside = group < groups
    k = group[:, None] * G + tl.arange(0, G)[None, :]
    value = tl.load(x + source * x_stride + k, mask=k < columns, other=0.0).to(tl.float32)
    magnitudes = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # which stand in the order of their bits
    largest = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
    finite = largest < float("inf")
    some = finite & (largest >= _LEAST_MAGNITUDE)
    most = tl.full((COUNT,), 127.0, dtype=tl.float32)
    scale = tl.where(some, tl.div_rn(largest, most), tl.where(finite, 0.0, float("nan")))
    factor = tl.div_rn(most, tl.where(some, largest, 1.0))
    near = tl.where(some[:, None], value * factor[:, None], 0.0) + _BIAS
    number = near.to(tl.int32, bitcast=True) - _BIASED
    place = row * groups + group
    tl.store(numbers + row * groups * G + k, number.to(tl.int8), mask=inside[:, None])
    tl.store(scales + place, scale, mask=inside)
    if SUMS == "groups":
        tl.store(sums + place, tl.sum(number, 1), mask=inside)
    elif SUMS == "parts":
        part = tl.sum(tl.reshape(number, (COUNT * _PARTS, G // _PARTS)), 1)
        part = tl.reshape(part, (COUNT, _PARTS))
        upper = (part + 32) >> 6
        at = sums + place[:, None] * _SUMS + tl.arange(0, _PARTS)[None, :]
        tl.store(at, (part - upper * 64).to(tl.float16), mask=inside[:, None])
        tl.store(at + _PARTS, (upper * 64).to(tl.float16), mask=inside[:, None])


@triton.jit
def e2m1_whole(code):
    """Twice the numbers of E2M1 codes (int32, 0 to 15), int32."""
    size = e2m1_doubled(code)
    return tl.where(code < 8, size, -size)


@triton.jit
def halved_power(exponent):
    """Half the powers of two by exponents (uint8) biased by 127."""
    wide = exponent.to(tl.uint32)
    bits = tl.where(wide < 2, (wide + 1) << 21, (wide - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def group_at(first, FORM: tl.constexpr):
    """The group of the matrix that holds input ``first``, [1]."""
    here = tl.zeros((1,), dtype=tl.int32) + first
    return here * 0 if FORM.group == 0 else here // FORM.group


# ---------------------------------------------------------------------------------------------------------------------
# Integers of a format: those of K inputs from ``first`` on, in one group, of the stored rows ``row``, int8 [K, N]. Zero
# points of 8-bit codes are not taken off; where codes are unsigned, 128 is.


@triton.jit
def byte_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Signed bytes."""
    k = inputs(first, depth, EVEN, K, 1)
    return tl.load(codes + row[None, :] * depth + k[:, None])


@triton.jit
def packed_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Packed integers; those of 8 bits are bytes."""
    if FORM.bits == 8:
        k = inputs(first, depth, EVEN, K, 1)
        words = (depth + 3) // 4
        byte = tl.load(codes.to(tl.pointer_type(tl.uint8)) + row[None, :] * words * 4 + k[:, None])
        result = (byte ^ 128).to(tl.int8, bitcast=True)
    else:
        result = word_integers(codes, zeros, row, first, rows, depth, groups, FORM, EVEN, K)
    return result


@triton.jit
def word_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Integers in words."""
    code = FORM.by.codes(codes, row, first, rows, depth, FORM, EVEN, K)
    if FORM.bits == 4 and FORM.zeros:
        code -= FORM.by.zeros(zeros, row, group_at(tl.minimum(first, depth - 1), FORM), rows, groups, FORM)
    else:
        code -= 1 << (FORM.bits - 1)
    return code.to(tl.int8)


@triton.jit
def mxfp4_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Twice the values of E2M1 codes."""
    return e2m1_whole(e2m1_codes(codes, row, first, depth, EVEN, K)).to(tl.int8)


@triton.jit
def q8_0_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Signed bytes of blocks."""
    k = inputs(first, depth, EVEN, K, 1)
    return signed_bytes(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM)


@triton.jit
def q4_0_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Half bytes of blocks, less 8."""
    k = inputs(first, depth, EVEN, K, 1)
    return (four_bits(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM) - 8).to(tl.int8)


@triton.jit
def q4_1_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Half bytes of blocks."""
    k = inputs(first, depth, EVEN, K, 1)
    return four_bits(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM).to(tl.int8)


@triton.jit
def q5_0_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Five bits of blocks, less 16."""
    k = inputs(first, depth, EVEN, K, 1)
    return (five_bits(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM) - 16).to(tl.int8)


@triton.jit
def q5_1_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Five bits of blocks."""
    k = inputs(first, depth, EVEN, K, 1)
    return five_bits(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM).to(tl.int8)


@triton.jit
def mxfp4_block_integers(
    codes, zeros, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Twice the values of E2M1 codes."""
    k = inputs(first, depth, EVEN, K, 1)
    return e2m1_whole(four_bits(codes, row, k, depth // FORM.group * FORM.block_bytes, FORM)).to(tl.int8)


# ---------------------------------------------------------------------------------------------------------------------
# Scales of integers: of the group that holds input ``first``, float32 [1, N].


@triton.jit
def own_scale(codes, scales, row, first, rows, depth, groups, FORM: tl.constexpr):
    """Scales in a tensor of their own."""
    return loaded_scale(scales + FORM.by.place(row, group_at(first, FORM), rows, groups, FORM), FORM.exponent)


@triton.jit
def mxfp4_scale(codes, scales, row, first, rows, depth, groups, FORM: tl.constexpr):
    """Half the powers of two."""
    return halved_power(tl.load(scales + FORM.by.place(row, group_at(first, FORM), rows, groups, FORM)))


@triton.jit
def first_half(codes, scales, row, first, rows, depth, groups, FORM: tl.constexpr):
    """The float16 number at the beginning of a block."""
    return block_half(codes, row, group_at(first, FORM) * FORM.group, depth // FORM.group * FORM.block_bytes, 0, FORM)


@triton.jit
def last_half(codes, scales, row, first, rows, depth, groups, FORM: tl.constexpr):
    """The float16 number at the end of a block."""
    block, row_bytes = group_at(first, FORM) * FORM.group, depth // FORM.group * FORM.block_bytes
    return block_half(codes, row, block, row_bytes, FORM.block_bytes - 2, FORM)


@triton.jit
def mxfp4_block_scale(codes, scales, row, first, rows, depth, groups, FORM: tl.constexpr):
    """Half the powers of two at the beginning of a block."""
    block, row_bytes = group_at(first, FORM) * FORM.group, depth // FORM.group * FORM.block_bytes
    return halved_power(block_bytes(codes, row, block, block * 0, row_bytes, FORM))


# ---------------------------------------------------------------------------------------------------------------------
# What is to be taken off 8-bit integers: of the group that holds input ``first``, int32 [1, N].


@triton.jit
def byte_zeros_at(zeros, row, first, rows, groups, FORM: tl.constexpr):
    """Zero points that are bytes."""
    return tl.load(zeros + FORM.by.place(row, group_at(first, FORM), rows, groups, FORM)).to(tl.int32)


@triton.jit
def word_zeros_at(zeros, row, first, rows, groups, FORM: tl.constexpr):
    """Zero points in words, for codes that 128 is taken off."""
    return FORM.by.zeros(zeros, row, group_at(first, FORM), rows, groups, FORM) - 128


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of 256 with a step for each part: what multiplies the codes of each part that has an input of ``g``, int32
# [len(g), N].


@triton.jit
def k_steps(codes, row, g, row_bytes, FORM: tl.constexpr):
    """Q4_K and Q5_K."""
    steps, _ = k_six_bits(codes, row, g, row_bytes, FORM)
    return steps


@triton.jit
def q6_k_whole_steps(codes, row, g, row_bytes, FORM: tl.constexpr):
    """Q6_K."""
    return q6_k_steps(codes, row, g, row_bytes, FORM).to(tl.int32)


@triton.jit
def numbers_at(x, source, x_stride, first, K: tl.constexpr):
    """Numbers ``first`` on of the rounded rows ``source``, int8 [BM, K]."""
    return tl.load(x + source[:, None] * x_stride + (first + tl.arange(0, K))[None, :])


@triton.jit
def group_product(x_rows, matrix, row, step, size, FORM: tl.constexpr, HOW: tl.constexpr):
    """Group ``step`` of the rounded rows times that of the stored rows ``row``, and the latter's scale, HOW.piece
    inputs at a time: [BM, BN]."""
    x, _, sums, x_stride, source = x_rows
    codes, scales, zeros, _ = matrix
    rows, depth, groups = size
    G: tl.constexpr = HOW.group
    K: tl.constexpr = HOW.piece
    first = step * G
    known = first if HOW.even else tl.minimum(first, depth - 1)  # groups behind the last one are zeros
    exact = tl.full((HOW.rows, HOW.columns), _BIASED, dtype=tl.int32)
    for at in tl.static_range(0, G, K):
        tile = FORM.by.integers(codes, zeros, row, first + at, rows, depth, groups, FORM, HOW.even, K)
        exact = tl.dot(numbers_at(x, source, x_stride, first + at, K), tile, exact, out_dtype=tl.int32)
    if FORM.zeros and FORM.bits == 8:
        sum_of_group = tl.load(sums + source * (x_stride // G) + step)
        exact -= sum_of_group[:, None] * FORM.by.zeros_at(zeros, row, known, rows, groups, FORM)
    value = exact.to(tl.float32, bitcast=True) - _BIAS
    return value * FORM.by.scale(codes, scales, row, known, rows, depth, groups, FORM)


@triton.jit
def least_product(x_rows, matrix, row, step, size, FORM: tl.constexpr, HOW: tl.constexpr):
    """`group_product` of a block that begins with a scale and a minimum."""
    _, _, sums, x_stride, source = x_rows
    codes, _, _, _ = matrix
    _, depth, _ = size
    known = step * HOW.group if HOW.even else tl.minimum(step * HOW.group, depth - 1)
    block, row_bytes = group_at(known, FORM) * FORM.group, depth // FORM.group * FORM.block_bytes
    sum_of_group = tl.load(sums + source * (x_stride // HOW.group) + step).to(tl.float32)
    least = sum_of_group[:, None] * block_half(codes, row, block, row_bytes, 2, FORM)
    return group_product(x_rows, matrix, row, step, size, FORM, HOW) + least


@triton.jit
def block_product(x_rows, matrix, row, step, size, FORM: tl.constexpr, HOW: tl.constexpr):
    """`group_product` of a block of 256 of ggml's K formats, HOW.depth inputs at a time."""
    x, _, sums, x_stride, source = x_rows
    codes, _, _, _ = matrix
    _, depth, _ = size
    BM: tl.constexpr = HOW.rows
    BN: tl.constexpr = HOW.columns
    BK: tl.constexpr = HOW.depth
    row_bytes = depth // 256 * FORM.block_bytes
    upper = tl.zeros((BM, BN), dtype=tl.int32)
    lower = tl.zeros((BM, BN), dtype=tl.int32)
    for piece in tl.static_range(256 // BK):
        first = step * 256 + piece * BK
        k, g = first + tl.arange(0, BK), first + tl.arange(0, BK // FORM.shared) * FORM.shared
        code = FORM.by.codes(codes, row, k, row_bytes, FORM)
        if not FORM.minima:
            code -= 32
        number = code * repeat_rows(FORM.by.steps(codes, row, g, row_bytes, FORM), FORM.shared)
        high = (number + 64) >> 7
        a = numbers_at(x, source, x_stride, first, BK)
        upper = tl.dot(a, high.to(tl.int8), upper, out_dtype=tl.int32)
        lower = tl.dot(a, (number - high * 128).to(tl.int8), lower, out_dtype=tl.int32)
    first = step * 256
    value = (upper * 128 + lower).to(tl.float32) * FORM.by.scale(codes, codes, row, first, 0, depth, 0, FORM)
    if FORM.minima:
        place = (source * (x_stride // 256) + step) * _SUMS
        part = tl.load(sums + place[:, None] + tl.arange(0, _SUMS)[None, :])
        _, least = k_six_bits(codes, row, first + tl.arange(0, _SUMS) % _PARTS * 32, row_bytes, FORM)
        low = tl.dot(part, least.to(tl.float16))
        here = tl.zeros((1,), dtype=tl.int32) + first
        value -= low * block_half(codes, row, here, row_bytes, 2, FORM)
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Steps of `grouped_triton.grouped` for rows that `round_rows` rounded.


@triton.jit
def block_step(
    total, total_up, x_rows, gate, up, row, up_row, step, size,
    FORM: tl.constexpr, HOW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A block of 256 inputs."""
    _, x_scales, _, x_stride, source = x_rows
    scale = tl.load(x_scales + source * (x_stride // 256) + step)[:, None]
    total += scale * block_product(x_rows, gate, row, step, size, FORM, HOW)
    if GATED:
        total_up += scale * block_product(x_rows, up, up_row, step, size, FORM, HOW)
    return total, total_up


@triton.jit
def groups_step(
    total, total_up, x_rows, gate, up, row, up_row, step, size,
    FORM: tl.constexpr, HOW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """HOW.depth inputs: some groups."""
    _, x_scales, _, x_stride, source = x_rows
    for piece in tl.static_range(HOW.depth // HOW.group):
        group = step * (HOW.depth // HOW.group) + piece
        scale = tl.load(x_scales + source * (x_stride // HOW.group) + group)[:, None]
        total += scale * group_product(x_rows, gate, row, group, size, FORM, HOW)
        if GATED:
            total_up += scale * group_product(x_rows, up, up_row, group, size, FORM, HOW)
    return total, total_up


@triton.jit
def least_step(
    total, total_up, x_rows, gate, up, row, up_row, step, size,
    FORM: tl.constexpr, HOW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """`groups_step` of blocks that have a minimum."""
    _, x_scales, _, x_stride, source = x_rows
    for piece in tl.static_range(HOW.depth // HOW.group):
        group = step * (HOW.depth // HOW.group) + piece
        scale = tl.load(x_scales + source * (x_stride // HOW.group) + group)[:, None]
        total += scale * least_product(x_rows, gate, row, group, size, FORM, HOW)
        if GATED:
            total_up += scale * least_product(x_rows, up, up_row, group, size, FORM, HOW)
    return total, total_up
