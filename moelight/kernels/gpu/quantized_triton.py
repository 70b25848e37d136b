"""Values of a tile of a stored matrix in Triton, from the stored bytes: the unpackers of all formats, for compute
capability 7.5 and later.

Each unpacker gives the tile [K, N] float32 of K inputs, from ``first`` on, of the N stored rows ``row``, as
`kernels.quantized` defines them: the same operations in float32, so the same bits; what a sum is fused with is a
product of few bits, exact. K and N are powers of two, and K at least 32. Values that several inputs share are loaded
once and repeated in registers. Inputs beyond the last one repeat it (or others of its word), which is in memory, and
finite wherever the matrix is. No conversion of a narrow float is needed: E4M3, E2M1 and E8M0 are put together from
their bits, on every card alike.
"""

import triton
import triton.language as tl

from moelight.formats.bitsandbytes import FP4, NF4


def _four(*values: int) -> tl.constexpr:
    """Four signed bytes as one word, the first lowest."""
    return tl.constexpr(int.from_bytes(bytes(value & 255 for value in values), "little", signed=True))


# The numbers of IQ4_NL's and IQ4_XS's codes.
_IQ4_0 = _four(-127, -104, -83, -65)
_IQ4_4 = _four(-49, -35, -22, -10)
_IQ4_8 = _four(1, 13, 25, 38)
_IQ4_12 = _four(53, 69, 89, 113)
_E2M1_DOUBLED = tl.constexpr(0xC8643210 - (1 << 32))  # 0, 1, 2, 3, 4, 6, 8, 12 in four bits each
_NF4, _FP4 = tl.constexpr(NF4), tl.constexpr(FP4)
# Bits of float32 numbers.
_LEAST_POWER = tl.constexpr(0x00400000)  # 2^-127, below the normal numbers
_TWO_TO_23 = tl.constexpr(0x4B000000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def repeat_rows(values, TIMES: tl.constexpr):
    """values [n, N] -> [n * TIMES, N], each row TIMES times; one row is left to broadcasting."""
    if TIMES == 1 or values.shape[0] == 1:
        result = values
    else:
        rows: tl.constexpr = values.shape[0]
        columns: tl.constexpr = values.shape[1]
        wide = tl.broadcast_to(tl.expand_dims(values, 1), (rows, TIMES, columns))
        result = tl.reshape(wide, (rows * TIMES, columns))
    return result


@triton.jit
def inputs(first, depth, EVEN: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """Each EACH-th of COUNT * EACH inputs from ``first`` on; below ``depth``, which they reach unless EVEN."""
    k = first + tl.arange(0, COUNT) * EACH
    if not EVEN:
        k = tl.minimum(k, depth - 1)
    return k


@triton.jit
def whole(code):
    """Codes (int32, 0 to 2^23) as float32, by their bits: conversions run at a quarter of the rate."""
    return (code | _TWO_TO_23).to(tl.float32, bitcast=True) - 8388608.0


# ---------------------------------------------------------------------------------------------------------------------
# Narrow floats, by their bits.


@triton.jit
def e4m3(code):
    """Numbers of E4M3 codes (uint8)."""
    size = (code & 127).to(tl.uint32)
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    found = tl.where(size < 8, whole(size) * 0.001953125, normal)
    bits = found.to(tl.uint32, bitcast=True) | ((code & 128).to(tl.uint32) << 24)
    bits = tl.where(size == 127, bits * 0 + _NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """Numbers of E2M1 codes (int32, 0 to 15): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative."""
    size = whole(e2m1_doubled(code)) * 0.5
    return tl.where(code < 8, size, -size)


@triton.jit
def e2m1_doubled(code):
    """Twice the magnitudes of E2M1 codes (int32, 0 to 15), int32."""
    table = (code & 0) | _E2M1_DOUBLED  # the interpreter shifts no constant
    return (table >> ((code & 7) * 4)) & 15


@triton.jit
def e8m0(exponent):
    """Powers of two by exponents (uint8) biased by 127."""
    bits = exponent.to(tl.uint32) << 23
    bits = tl.where(exponent == 0, bits + _LEAST_POWER, bits)
    return tl.where(exponent == 255, bits * 0 + _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def iq4(code):
    """Numbers of the codes (int32, 0 to 15) of IQ4_NL and IQ4_XS."""
    low = tl.where(code < 4, _IQ4_0, _IQ4_4)
    high = tl.where(code < 12, _IQ4_8, _IQ4_12)
    byte = tl.where(code < 8, low, high) >> ((code & 3) * 8)
    return whole((byte & 255) ^ 128) - 128.0


# ---------------------------------------------------------------------------------------------------------------------
# Codes, scales and zero points in tensors of their own.


@triton.jit
def codes_of_words(
    words, row, first, depth, word_step, row_step, BITS: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr
):
    """Codes (int32) of words along the inputs, the lowest bits first."""
    EACH: tl.constexpr = 32 // BITS
    word = inputs(first, depth, EVEN, K // EACH, EACH) // EACH
    found = tl.load(words + row[None, :] * row_step + word[:, None] * word_step)
    shift = (tl.arange(0, K) % EACH) * BITS
    return (repeat_rows(found, EACH) >> shift[:, None]) & ((1 << BITS) - 1)


@triton.jit
def codes_by_row(words, row, k, k_step, row_step, BITS: tl.constexpr, AWQ: tl.constexpr):
    """Codes (int32) [len(k), N] of words that hold neighbouring rows; AWQ's are in the order 0, 2, 4, 6, 1, 3, 5, 7.

    Of a word the byte with the code is loaded: pipelines copy what they load, and would copy a word for each code."""
    EACH: tl.constexpr = 32 // BITS
    place = row % EACH
    if AWQ:
        place = place // 2 + place % 2 * 4
    byte = words.to(tl.pointer_type(tl.uint8)) + k[:, None] * k_step * 4
    found = tl.load(byte + (row // EACH * row_step * 4 + place * BITS // 8)[None, :]).to(tl.int32)
    return (found >> (place * BITS % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def signed(code):
    """Numbers of signed bytes."""
    return code.to(tl.float32)


@triton.jit
def groups_of(order, first, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr):
    """The group of each ``FORM.shared``-th input."""
    k = inputs(first, depth, EVEN, K // FORM.shared, FORM.shared)
    if FORM.order:
        found = tl.minimum(tl.maximum(tl.load(order + k), 0), groups - 1)
    elif FORM.group == 0:
        found = k * 0
    else:
        found = k // FORM.group
    return found


@triton.jit
def place_by_column(row, group, rows, groups, FORM: tl.constexpr):
    """Where the scales of ``group`` [any] and ``row`` [N] are stored, [any, N], a line for each group."""
    return group[:, None] * rows + row[None, :]


@triton.jit
def place_by_row(row, group, rows, groups, FORM: tl.constexpr):
    """The same, a line for each row."""
    return row[None, :] * groups + group[:, None]


@triton.jit
def place_in_grid(row, group, rows, groups, FORM: tl.constexpr):
    """The same, a line for each group of rows."""
    band = row * 0 if FORM.group_rows == 0 else row // FORM.group_rows
    return band[None, :] * groups + group[:, None]


@triton.jit
def loaded_scale(pointers, EXPONENT: tl.constexpr):
    """Scales in float32; EXPONENT: stored as E8M0."""
    found = tl.load(pointers)
    return e8m0(found) if EXPONENT else found.to(tl.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of ggml: the layouts of ggml/src/ggml-common.h, as in `kernels.quantized`.


@triton.jit
def block_bytes(blocks, row, k, at, row_bytes, FORM: tl.constexpr):
    """The byte ``at`` (one, or of each k) of the block that holds input k, uint8 [len(k), N]."""
    return tl.load(blocks + row[None, :] * row_bytes + (k // FORM.group * FORM.block_bytes + at)[:, None])


@triton.jit
def block_half(blocks, row, k, row_bytes, AT: tl.constexpr, FORM: tl.constexpr):
    """The float16 number at byte AT of the block that holds input k, as float32 [len(k), N]."""
    pointers = blocks + row[None, :] * row_bytes + (k // FORM.group * FORM.block_bytes + AT)[:, None]
    return tl.load(pointers.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def block_code(blocks, row, k, at, shift, row_bytes, MASK: tl.constexpr, FORM: tl.constexpr):
    """Bits of the byte ``at`` from ``shift`` on, int32 [len(k), N]."""
    byte = block_bytes(blocks, row, k, at, row_bytes, FORM).to(tl.int32)
    return (byte >> shift[:, None]) & MASK


@triton.jit
def four_bits(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int32) of types of blocks of 32 values, whose last 16 bytes they are."""
    n = k % 32
    return block_code(blocks, row, k, n % 16 + (FORM.block_bytes - 16), n // 16 * 4, row_bytes, 15, FORM)


@triton.jit
def five_bits(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int32) whose fifth bits are in the four bytes ahead of the others."""
    n = k % 32
    fifth = block_code(blocks, row, k, n // 8 + (FORM.block_bytes - 20), n % 8, row_bytes, 1, FORM)
    return four_bits(blocks, row, k, row_bytes, FORM) | (fifth << 4)


@triton.jit
def signed_bytes(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int8) of Q8_0."""
    return block_bytes(blocks, row, k, k % 32 + 2, row_bytes, FORM).to(tl.int8, bitcast=True)


@triton.jit
def q4_0(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Half bytes less 8."""
    code = whole(four_bits(blocks, row, k, row_bytes, FORM)) - 8.0
    return repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code


@triton.jit
def q4_1(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Half bytes, with a minimum."""
    code = whole(four_bits(blocks, row, k, row_bytes, FORM))
    result = repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code
    return result + repeat_rows(block_half(blocks, row, g, row_bytes, 2, FORM), 32)


@triton.jit
def q5_0(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Five bits less 16."""
    code = whole(five_bits(blocks, row, k, row_bytes, FORM)) - 16.0
    return repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code


@triton.jit
def q5_1(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Five bits, with a minimum."""
    code = whole(five_bits(blocks, row, k, row_bytes, FORM))
    result = repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code
    return result + repeat_rows(block_half(blocks, row, g, row_bytes, 2, FORM), 32)


@triton.jit
def q8_0(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Signed bytes."""
    code = signed_bytes(blocks, row, k, row_bytes, FORM).to(tl.float32)
    return repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code


@triton.jit
def iq4_nl(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Half bytes that are indices of a table."""
    code = iq4(four_bits(blocks, row, k, row_bytes, FORM))
    return repeat_rows(block_half(blocks, row, g, row_bytes, 0, FORM), 32) * code


@triton.jit
def mxfp4_block(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """E2M1 codes, with a power of two."""
    code = e2m1(four_bits(blocks, row, k, row_bytes, FORM))
    return repeat_rows(e8m0(block_bytes(blocks, row, g, g * 0, row_bytes, FORM)), 32) * code


@triton.jit
def k_six_bits(blocks, row, g, row_bytes, FORM: tl.constexpr):
    """Q4_K and Q5_K: whole scales and minima for each 32 of 256 numbers, one of which each input of ``g`` is; int32."""
    s = g % 256 // 32
    # Of the upper four, four bits are in the last bytes and two are the highest ones of the bytes of the lower four.
    low = block_bytes(blocks, row, g, s % 4 + 4, row_bytes, FORM).to(tl.int32)
    low_least = block_bytes(blocks, row, g, s % 4 + 8, row_bytes, FORM).to(tl.int32)
    both = block_bytes(blocks, row, g, s % 4 + 12, row_bytes, FORM).to(tl.int32)
    upper = (s >= 4)[:, None]
    scale = tl.where(upper, (both & 15) | ((low >> 2) & 48), low & 63)
    least = tl.where(upper, (both >> 4) | ((low_least >> 2) & 48), low_least & 63)
    return scale, least


@triton.jit
def q4_k_codes(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int32) of four bits, the last 128 bytes of a block."""
    n = k % 256
    at = n // 64 * 32 + n % 32 + (FORM.block_bytes - 128)
    return block_code(blocks, row, k, at, n // 32 % 2 * 4, row_bytes, 15, FORM)


@triton.jit
def q5_k_codes(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int32) with a fifth bit."""
    n = k % 256
    fifth = block_code(blocks, row, k, n % 32 + 16, n // 32, row_bytes, 1, FORM)
    return q4_k_codes(blocks, row, k, row_bytes, FORM) | (fifth << 4)


@triton.jit
def q6_k_codes(blocks, row, k, row_bytes, FORM: tl.constexpr):
    """Codes (int32) of six bits."""
    n = k % 256
    code = block_code(blocks, row, k, n // 128 * 64 + n % 64, n // 64 % 2 * 4, row_bytes, 15, FORM)
    at = n // 128 * 32 + n % 32 + 128
    return code | (block_code(blocks, row, k, at, n // 32 % 4 * 2, row_bytes, 3, FORM) << 4)


@triton.jit
def k_minima(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Q4_K and Q5_K: scales and minima for each 32 of 256 values, one of which each input of ``g`` is."""
    scale, least = k_six_bits(blocks, row, g, row_bytes, FORM)
    scale = scale.to(tl.float32) * block_half(blocks, row, g, row_bytes, 0, FORM)
    least = least.to(tl.float32) * block_half(blocks, row, g, row_bytes, 2, FORM)
    code = FORM.by.codes(blocks, row, k, row_bytes, FORM)
    return repeat_rows(scale, 32) * whole(code) - repeat_rows(least, 32)


@triton.jit
def q2_k(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """A scale and a minimum for each 16 of 256 values, one of which each input of ``g`` is."""
    n = k % 256
    packed = block_bytes(blocks, row, g, g % 256 // 16, row_bytes, FORM).to(tl.int32)
    scale = block_half(blocks, row, g, row_bytes, 80, FORM) * (packed & 15).to(tl.float32)
    least = block_half(blocks, row, g, row_bytes, 82, FORM) * (packed >> 4).to(tl.float32)
    code = block_code(blocks, row, k, n // 128 * 32 + n % 32 + 16, n // 32 % 4 * 2, row_bytes, 3, FORM)
    return repeat_rows(scale, 16) * whole(code) - repeat_rows(least, 16)


@triton.jit
def q3_k(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """A scale for each 16 of 256 values, one of which each input of ``g`` is."""
    s, n = g % 256 // 16, k % 256
    low = block_code(blocks, row, g, s % 8 + 96, s // 8 * 4, row_bytes, 15, FORM)
    high = block_code(blocks, row, g, s % 4 + 104, s // 4 * 2, row_bytes, 3, FORM)
    scale = block_half(blocks, row, g, row_bytes, 108, FORM) * ((low | (high << 4)) - 32).to(tl.float32)
    code = block_code(blocks, row, k, n // 128 * 32 + n % 32 + 32, n // 32 % 4 * 2, row_bytes, 3, FORM)
    code = code | (block_code(blocks, row, k, n % 32, n // 32, row_bytes, 1, FORM) << 2)
    return repeat_rows(scale, 16) * (whole(code) - 4.0)


@triton.jit
def q6_k(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """A scale for each 16 of 256 values, one of which each input of ``g`` is."""
    scale = q6_k_steps(blocks, row, g, row_bytes, FORM).to(tl.float32)
    scale *= block_half(blocks, row, g, row_bytes, 208, FORM)
    return repeat_rows(scale, 16) * (whole(q6_k_codes(blocks, row, k, row_bytes, FORM)) - 32.0)


@triton.jit
def q6_k_steps(blocks, row, g, row_bytes, FORM: tl.constexpr):
    """The int8 scale of each 16 values, one of which each input of ``g`` is."""
    return block_bytes(blocks, row, g, g % 256 // 16 + 192, row_bytes, FORM).to(tl.int8, bitcast=True)


@triton.jit
def iq4_xs(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """A scale of 6 bits for each 32 of 256 numbers, one of which each input of ``g`` is."""
    s, n = g % 256 // 32, k % 256
    low = block_code(blocks, row, g, s // 2 + 4, s % 2 * 4, row_bytes, 15, FORM)
    high = block_code(blocks, row, g, s // 4 + 2, s % 4 * 2, row_bytes, 3, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * ((low | (high << 4)) - 32).to(tl.float32)
    code = block_code(blocks, row, k, n // 32 * 16 + n % 16 + 8, n // 16 % 2 * 4, row_bytes, 15, FORM)
    return repeat_rows(scale, 32) * iq4(code)


@triton.jit
def tq1_0(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Ternary digits of bytes, which are fractions of 256: five of each of 32 and of 16 bytes, four of the last 4."""
    n = k % 256
    middle, last = n - 160, n - 240
    place = tl.where(n < 160, n // 32, tl.where(n < 240, middle // 16, last // 4))
    at = tl.where(n < 160, n % 32, tl.where(n < 240, middle % 16 + 32, last % 4 + 48))
    power = tl.where(place == 0, 1, tl.where(place == 1, 3, tl.where(place == 2, 9, tl.where(place == 3, 27, 81))))
    byte = block_bytes(blocks, row, k, at, row_bytes, FORM).to(tl.int32)
    digit = (((byte * power[:, None]) & 255) * 3) >> 8
    return repeat_rows(block_half(blocks, row, g, row_bytes, 52, FORM), FORM.shared) * (whole(digit) - 1.0)


@triton.jit
def tq2_0(blocks, row, k, g, row_bytes, FORM: tl.constexpr):
    """Two bits less 1."""
    n = k % 256
    code = block_code(blocks, row, k, n // 128 * 32 + n % 32, n // 32 % 4 * 2, row_bytes, 3, FORM)
    return repeat_rows(block_half(blocks, row, g, row_bytes, 64, FORM), FORM.shared) * (whole(code) - 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of ggml whose codes are indices of a codebook. Its points (`gpu.pages.points_on`) are in memory, a word for
# four values: every fourth input loads the word that it begins, every eighth a byte of signs.


@triton.jit
def byte_at(blocks, row, k, at, row_bytes, FORM: tl.constexpr):
    """The byte ``at`` of the block that holds input k, int32 [len(k), N]."""
    return block_bytes(blocks, row, k, at, row_bytes, FORM).to(tl.int32)


@triton.jit
def two_bytes_at(blocks, row, k, at, row_bytes, FORM: tl.constexpr):
    """The same of an integer of two bytes."""
    return byte_at(blocks, row, k, at, row_bytes, FORM) | (byte_at(blocks, row, k, at + 1, row_bytes, FORM) << 8)


@triton.jit
def word_values(words):
    """Signed bytes of words [n, N], float32 [4 n, N]."""
    byte = repeat_rows(words, 4) >> (tl.arange(0, words.shape[0] * 4) % 4 * 8)[:, None]
    return whole((byte & 255) ^ 128) - 128.0


@triton.jit
def eights_at(words, index, fours):
    """The values of points of eight, of which ``index`` is that of each four inputs, [4 n, N]."""
    return word_values(tl.load(words + index * 2 + (fours // 4 % 2)[:, None]))


@triton.jit
def fours_at(words, index):
    """The values of points of four, [4 n, N]."""
    return word_values(tl.load(words + index))


@triton.jit
def even_signs(seven):
    """Eight signs, of which an even number is negative, from the first seven; int32."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return seven | (((parity ^ (parity >> 1)) & 1) << 7)


@triton.jit
def even_signs_at(blocks, row, eights, at, row_bytes, FORM: tl.constexpr):
    """The same, from the fields of seven bits, one for each eight inputs, of four bytes from ``at`` on."""
    bit = eights // 8 % 4 * 7
    packed = two_bytes_at(blocks, row, eights, at + bit // 8, row_bytes, FORM)
    return even_signs((packed >> (bit % 8)[:, None]) & 127)


@triton.jit
def with_signs(values, signs):
    """values [K, N], negative where a bit of ``signs`` [K / 8, N] is set."""
    bits = repeat_rows(signs, 8) >> (tl.arange(0, values.shape[0]) % 8)[:, None]
    return tl.where((bits & 1) != 0, -values, values)


@triton.jit
def iq2_xxs(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """Of each 32 values four indices, four fields of signs and a scale."""
    index = byte_at(blocks, row, fours, fours % 256 // 32 * 8 + fours // 8 % 4 + 2, row_bytes, FORM)
    signs = even_signs_at(blocks, row, eights, eights % 256 // 32 * 8 + 6, row_bytes, FORM)
    step = block_code(blocks, row, g, g % 256 // 32 * 8 + 9, g * 0 + 4, row_bytes, 15, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole(step) + 0.5) * 0.25
    return with_signs(repeat_rows(scale, 32) * eights_at(words, index, fours), signs)


@triton.jit
def iq2_xs(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """Two bytes for each 8 values: an index of 9 bits and signs; a scale for each 16."""
    index = two_bytes_at(blocks, row, fours, fours % 256 // 8 * 2 + 2, row_bytes, FORM) & 511
    signs = even_signs(byte_at(blocks, row, eights, eights % 256 // 8 * 2 + 3, row_bytes, FORM) >> 1)
    step = block_code(blocks, row, g, g % 256 // 32 + 66, g // 16 % 2 * 4, row_bytes, 15, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole(step) + 0.5) * 0.25
    return with_signs(repeat_rows(scale, 16) * eights_at(words, index, fours), signs)


@triton.jit
def iq2_s(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """An index of 10 bits and eight signs for each 8 values, a scale for each 16."""
    n = fours % 256
    high = block_code(blocks, row, fours, n // 32 + 66, n // 8 % 4 * 2, row_bytes, 3, FORM)
    index = byte_at(blocks, row, fours, n // 8 + 2, row_bytes, FORM) | (high << 8)
    signs = byte_at(blocks, row, eights, eights % 256 // 8 + 34, row_bytes, FORM)
    step = block_code(blocks, row, g, g % 256 // 32 + 74, g // 16 % 2 * 4, row_bytes, 15, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole(step) + 0.5) * 0.25
    return with_signs(repeat_rows(scale, 16) * eights_at(words, index, fours), signs)


@triton.jit
def iq3_xxs(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """An index for each 4 values; of each 32 four fields of signs and a scale."""
    index = byte_at(blocks, row, fours, fours % 256 // 4 + 2, row_bytes, FORM)
    signs = even_signs_at(blocks, row, eights, eights % 256 // 32 * 4 + 66, row_bytes, FORM)
    step = block_code(blocks, row, g, g % 256 // 32 * 4 + 69, g * 0 + 4, row_bytes, 15, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole(step) + 0.5) * 0.5
    return with_signs(repeat_rows(scale, 32) * fours_at(words, index), signs)


@triton.jit
def iq3_s(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """An index of 9 bits for each 4 values, eight signs for each 8, a scale for each 32."""
    n = fours % 256
    high = block_code(blocks, row, fours, n // 32 + 66, n // 4 % 8, row_bytes, 1, FORM)
    index = byte_at(blocks, row, fours, n // 4 + 2, row_bytes, FORM) | (high << 8)
    signs = byte_at(blocks, row, eights, eights % 256 // 8 + 74, row_bytes, FORM)
    step = block_code(blocks, row, g, g % 256 // 64 + 106, g // 32 % 2 * 4, row_bytes, 15, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole(step) * 2.0 + 1.0)
    return with_signs(repeat_rows(scale, 32) * fours_at(words, index), signs)


@triton.jit
def shifted(values, lower):
    """values [K, N], an eighth lower where ``lower`` [some rows, N] is not 0, and an eighth higher elsewhere."""
    shift = tl.where(lower != 0, -0.125, 0.125)
    return values + repeat_rows(shift, values.shape[0] // lower.shape[0])


@triton.jit
def iq1_s(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """An index of 11 bits for each 8 values; for each 32 a scale and which way they are moved."""
    n, at = fours % 256, g % 256 // 32 * 2 + 34
    high = two_bytes_at(blocks, row, fours, n // 32 * 2 + 34, row_bytes, FORM) >> (n // 8 % 4 * 3)[:, None]
    index = byte_at(blocks, row, fours, n // 8 + 2, row_bytes, FORM) | ((high & 7) << 8)
    packed = byte_at(blocks, row, g, at + 1, row_bytes, FORM)
    scale = block_half(blocks, row, g, row_bytes, 0, FORM) * (whole((packed >> 4) & 7) * 2.0 + 1.0)
    return repeat_rows(scale, 32) * shifted(eights_at(words, index, fours), packed & 128)


@triton.jit
def iq1_m(blocks, words, row, fours, eights, g, row_bytes, FORM: tl.constexpr):
    """An index of 11 bits for each 8 values and which way they are moved, a scale for each 16; four bits of the scale
    of the block are in every other byte of those."""
    n, m = fours % 256, eights % 256
    code = block_code(blocks, row, fours, n // 16 + 32, n // 8 % 2 * 4, row_bytes, 7, FORM)
    index = byte_at(blocks, row, fours, n // 8, row_bytes, FORM) | (code << 8)
    lower = block_code(blocks, row, eights, m // 16 + 32, m // 8 % 2 * 4, row_bytes, 8, FORM)
    packed = two_bytes_at(blocks, row, g, g % 256 // 64 * 2 + 48, row_bytes, FORM) >> (g // 16 % 4 * 3)[:, None]
    half = byte_at(blocks, row, g, g * 0 + 49, row_bytes, FORM) >> 4
    half |= byte_at(blocks, row, g, g * 0 + 51, row_bytes, FORM) & 0xF0
    half |= (byte_at(blocks, row, g, g * 0 + 53, row_bytes, FORM) >> 4) << 8
    half |= (byte_at(blocks, row, g, g * 0 + 55, row_bytes, FORM) & 0xF0) << 8
    scale = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (whole(packed & 7) * 2.0 + 1.0)
    return repeat_rows(scale, 16) * shifted(eights_at(words, index, fours), lower)


# ---------------------------------------------------------------------------------------------------------------------
# Codes and zero points in words.


@triton.jit
def packed_codes(codes, row, first, rows, depth, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr):
    """Codes (int32) of packed integers, [K, N]."""
    return codes_of_words(codes, row, first, depth, 1, (depth * FORM.bits + 31) // 32, FORM.bits, EVEN, K)


@triton.jit
def gptq_codes(codes, row, first, rows, depth, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr):
    """The same of GPTQ."""
    return codes_of_words(codes, row, first, depth, rows, 1, FORM.bits, EVEN, K)


@triton.jit
def awq_codes(codes, row, first, rows, depth, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr):
    """The same of AWQ."""
    k = inputs(first, depth, EVEN, K, 1)
    return codes_by_row(codes, row, k, rows * FORM.bits // 32, 1, FORM.bits, True)


@triton.jit
def packed_zeros(zeros, row, group, rows, groups, FORM: tl.constexpr):
    """Zero points (int32) of packed integers, [len(group), N]."""
    return codes_by_row(zeros, row, group, 1, groups, FORM.bits, False)


@triton.jit
def gptq_zeros(zeros, row, group, rows, groups, FORM: tl.constexpr):
    """The same of GPTQ."""
    zero = codes_by_row(zeros, row, group, rows * FORM.bits // 32, 1, FORM.bits, False)
    return (zero + FORM.zero_bias) & ((1 << FORM.bits) - 1)


@triton.jit
def awq_zeros(zeros, row, group, rows, groups, FORM: tl.constexpr):
    """The same of AWQ."""
    return codes_by_row(zeros, row, group, rows * FORM.bits // 32, 1, FORM.bits, True)


# ---------------------------------------------------------------------------------------------------------------------
# Unpackers, one a layout: inputs ``first`` to ``first`` + K of the stored ``row`` [N] of a matrix [rows, depth], as
# float32 [K, N]; FORM: a `gpu.programs.TileForm`, whose functions (`gpu.unpackers`) are those of its format.


@triton.jit
def plain_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Floats as they are, in their dtype; zeros beyond the last input."""
    k = first + tl.arange(0, K)
    if FORM.transposed:
        pointers = codes + row[None, :] + k[:, None] * rows
    else:
        pointers = codes + row[None, :] * depth + k[:, None]
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=(k < depth)[:, None], other=0)


@triton.jit
def block_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Blocks of a ggml type."""
    k, g = inputs(first, depth, EVEN, K, 1), inputs(first, depth, EVEN, K // FORM.shared, FORM.shared)
    return FORM.by.decode(codes, row, k, g, depth // FORM.group * FORM.block_bytes, FORM)


@triton.jit
def point_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Blocks of a ggml type whose codes are indices of the codebook at ``scales``."""
    fours, eights = inputs(first, depth, EVEN, K // 4, 4), inputs(first, depth, EVEN, K // 8, 8)
    g = inputs(first, depth, EVEN, K // FORM.shared, FORM.shared)
    row_bytes = depth // FORM.group * FORM.block_bytes
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    return FORM.by.decode(codes, words, row, fours, eights, g, row_bytes, FORM)


@triton.jit
def byte_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """8-bit codes times scales, less zero points of the same type."""
    k = inputs(first, depth, EVEN, K, 1)
    code = FORM.by.decode(tl.load(codes + row[None, :] * depth + k[:, None]))
    place = FORM.by.place(row, groups_of(order, first, depth, groups, FORM, EVEN, K), rows, groups, FORM)
    if FORM.zeros:
        code -= repeat_rows(FORM.by.decode(tl.load(zeros + place)), FORM.shared)
    return code * repeat_rows(loaded_scale(scales + place, FORM.exponent), FORM.shared)


@triton.jit
def word_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Integers in words times scales, less zero points in words, or half their range."""
    code = whole(FORM.by.codes(codes, row, first, rows, depth, FORM, EVEN, K))
    group = groups_of(order, first, depth, groups, FORM, EVEN, K)
    place = FORM.by.place(row, group, rows, groups, FORM)
    if FORM.zeros:
        code -= repeat_rows(whole(FORM.by.zeros(zeros, row, group, rows, groups, FORM)), FORM.shared)
    else:
        code -= 1 << (FORM.bits - 1)
    return code * repeat_rows(loaded_scale(scales + place, FORM.exponent), FORM.shared)


@triton.jit
def e2m1_codes(codes, row, first, depth, EVEN: tl.constexpr, K: tl.constexpr):
    """Codes (int32) of two a byte, [K, N]."""
    pair = inputs(first, depth, EVEN, K // 2, 2) // 2
    byte = tl.load(codes + row[None, :] * (depth // 2) + pair[:, None]).to(tl.int32)
    return (repeat_rows(byte, 2) >> (tl.arange(0, K) % 2 * 4)[:, None]) & 15


@triton.jit
def mxfp4_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """E2M1 codes times powers of two."""
    code = e2m1(e2m1_codes(codes, row, first, depth, EVEN, K))
    place = FORM.by.place(row, groups_of(order, first, depth, groups, FORM, EVEN, K), rows, groups, FORM)
    return code * repeat_rows(loaded_scale(scales + place, FORM.exponent), FORM.shared)


@triton.jit
def scale_times(scale, number):
    """Scales of NVFP4 of ModelOpt."""
    return scale * number


@triton.jit
def scale_over(scale, number):
    """The same of compressed-tensors: rounded once, as a division on a CPU is."""
    return tl.div_rn(scale, scale * 0 + number)


@triton.jit
def nvfp4_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """E2M1 codes times E4M3 scales and a number of all."""
    code = e2m1(e2m1_codes(codes, row, first, depth, EVEN, K))
    place = FORM.by.place(row, groups_of(order, first, depth, groups, FORM, EVEN, K), rows, groups, FORM)
    number = tl.load(zeros.to(tl.pointer_type(tl.float32)))
    return code * repeat_rows(FORM.by.decode(e4m3(tl.load(scales + place)), number), FORM.shared)


@triton.jit
def codes_of_bits(codes, row, first, depth, FORM: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr):
    """Codes (int32) of rows that are one string of bits, the lowest first, [K, N]."""
    bit = inputs(first, depth, EVEN, K, 1) * FORM.bits
    row_bytes = depth * FORM.bits // 8
    line = codes.to(tl.pointer_type(tl.uint8)) + row[None, :] * row_bytes
    low = tl.load(line + (bit // 8)[:, None]).to(tl.int32)
    high = tl.load(line + tl.minimum(bit // 8 + 1, row_bytes - 1)[:, None]).to(tl.int32)
    return ((low | (high << 8)) >> (bit % 8)[:, None]) & ((1 << FORM.bits) - 1)


@triton.jit
def mlx_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Unsigned codes times scales, plus biases of their type."""
    if 32 % FORM.bits == 0:
        code = FORM.by.codes(codes, row, first, rows, depth, FORM, EVEN, K)
    else:
        code = codes_of_bits(codes, row, first, depth, FORM, EVEN, K)
    place = FORM.by.place(row, groups_of(order, first, depth, groups, FORM, EVEN, K), rows, groups, FORM)
    bias = tl.load(zeros.to(tl.pointer_type(scales.dtype.element_ty)) + place).to(tl.float32)
    return whole(code) * repeat_rows(tl.load(scales + place).to(tl.float32), FORM.shared) + repeat_rows(
        bias, FORM.shared
    )


@triton.jit
def one_of_four(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """The number of the two lowest bits of a code (int32)."""
    odd = (code & 1) != 0
    return tl.where((code & 2) != 0, tl.where(odd, D, C), tl.where(odd, B, A))


@triton.jit
def nf4(code):
    """Numbers of NF4 codes (int32, 0 to 15)."""
    first = one_of_four(code, _NF4[0], _NF4[1], _NF4[2], _NF4[3])
    second = one_of_four(code, _NF4[4], _NF4[5], _NF4[6], _NF4[7])
    third = one_of_four(code, _NF4[8], _NF4[9], _NF4[10], _NF4[11])
    last = one_of_four(code, _NF4[12], _NF4[13], _NF4[14], _NF4[15])
    upper = (code & 4) != 0
    return tl.where((code & 8) != 0, tl.where(upper, last, third), tl.where(upper, second, first))


@triton.jit
def fp4(code):
    """Numbers of bitsandbytes' FP4 codes (int32, 0 to 15)."""
    small = one_of_four(code, _FP4[0], _FP4[1], _FP4[2], _FP4[3])
    size = tl.where((code & 4) != 0, one_of_four(code, _FP4[4], _FP4[5], _FP4[6], _FP4[7]), small)
    return tl.where(code > 8, -size, size)


@triton.jit
def nibble_tile(
    codes, scales, zeros, order, row, first, rows, depth, groups, FORM: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Numbers of codes of two a byte, the first in the upper bits, times scales."""
    pair = inputs(first, depth, EVEN, K // 2, 2) // 2
    byte = tl.load(codes + row[None, :] * (depth // 2) + pair[:, None]).to(tl.int32)
    code = (repeat_rows(byte, 2) >> (4 - tl.arange(0, K) % 2 * 4)[:, None]) & 15
    place = FORM.by.place(row, groups_of(order, first, depth, groups, FORM, EVEN, K), rows, groups, FORM)
    return FORM.by.decode(code) * repeat_rows(tl.load(scales + place).to(tl.float32), FORM.shared)
