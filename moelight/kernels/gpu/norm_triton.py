"""Norms and rotary positions in Triton (imported only where installed); `kernels.norm` checks arguments.

Rounded where Hugging Face rounds: the steps between two roundings are not fused (launched without fused
multiply-adds), so in 16-bit formats only the order of the norm's sum can differ from `kernels.reference`.
"""

import triton
import triton.language as tl

from moelight.kernels.gpu.grouped_triton import rounded


@triton.jit
def rms_norm(
    x,
    add,
    weight,
    out,
    width,
    x_stride,
    add_stride,
    out_stride,
    eps,
    ADD: tl.constexpr,
    BY_HAND: tl.constexpr,
    PADDED: tl.constexpr,
):
    """out = weight * x / rms(x), one row a program; where ADD, x += add first, in place. ``out`` may be x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(add + row * add_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = rounded(value, x.dtype.element_ty, BY_HAND)
        tl.store(x + row * x_stride + column, total, mask=inside)
        value = total.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = rounded(value, out.dtype.element_ty, BY_HAND).to(tl.float32)
    value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, rounded(value, out.dtype.element_ty, BY_HAND), mask=inside)


@triton.jit
def clipped(value, clip):
    """``value`` within ±clip; what is not a number stays."""
    value = tl.where(value > clip, clip, value)
    return tl.where(value < -clip, -clip, value)


@triton.jit
def norm_weight(q_norm, k_norm, query, place, half):
    """One half of the norm's weight of each head: that of queries, or that of keys."""
    of_queries = tl.load(q_norm + place, mask=place < half, other=0.0).to(tl.float32)
    of_keys = tl.load(k_norm + place, mask=place < half, other=0.0).to(tl.float32)
    return tl.where(query, of_queries[None, :], of_keys[None, :])


@triton.jit
def turned(one, other, cos, sin, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """one * cos + other * sin: both products rounded, then their sum."""
    first = rounded(one * cos[None, :], DTYPE, BY_HAND).to(tl.float32)
    second = rounded(other * sin[None, :], DTYPE, BY_HAND).to(tl.float32)
    return rounded(first + second, DTYPE, BY_HAND)


@triton.jit
def finish_heads(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    heads,
    q_heads,
    rotated,
    size,
    stride,
    rope_stride,
    clip,
    eps,
    CLIP: tl.constexpr,
    NORM: tl.constexpr,
    BY_HAND: tl.constexpr,
    BH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Clip ``heads`` heads of a token of ``qkv``, norm and rotate the first ``rotated``, of which q_heads are queries.

    In place; BH heads a program. PADDED: half the head ``size``, rounded up; the second half of cos and sin repeats
    the first.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    half = size // 2
    place = tl.arange(0, PADDED)
    inside = (head < heads)[:, None] & (place < half)[None, :]
    first = qkv + token * stride + head[:, None] * size + place[None, :]
    low = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    if CLIP:
        low = clipped(low, clip)
        high = clipped(high, clip)
    plain_low = low
    plain_high = high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / size + eps)[:, None]
        low = rounded(low * scale, dtype, BY_HAND).to(tl.float32)
        high = rounded(high * scale, dtype, BY_HAND).to(tl.float32)
        query = (head < q_heads)[:, None]
        low = rounded(low * norm_weight(q_norm, k_norm, query, place, half), dtype, BY_HAND).to(tl.float32)
        high = rounded(high * norm_weight(q_norm + half, k_norm + half, query, place, half), dtype, BY_HAND)
        high = high.to(tl.float32)
    angle = token * rope_stride + place
    c = tl.load(cos + angle, mask=place < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=place < half, other=0.0).to(tl.float32)
    turn = (head < rotated)[:, None]
    new_low = tl.where(turn, turned(low, -high, c, s, dtype, BY_HAND), rounded(plain_low, dtype, BY_HAND))
    new_high = tl.where(turn, turned(high, low, c, s, dtype, BY_HAND), rounded(plain_high, dtype, BY_HAND))
    tl.store(first, new_low, mask=inside)
    tl.store(first + half, new_high, mask=inside)
