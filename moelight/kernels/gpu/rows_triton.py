"""Programs over the rows of tokens in Triton (imported only where installed): router, sort by expert, weighted sum of
experts, norms, heads. `routing` and `kernels.norm` check arguments.

Norms and heads round where Hugging Face rounds: the steps between two roundings are not fused (launched without fused
multiply-adds), so in 16-bit formats only the order of the norm's sum can differ from `kernels.reference`.
"""

import triton
import triton.language as tl

from moelight.kernels.gpu.grouped_triton import rounded


@triton.jit(do_not_specialize=["tokens"])
def route(
    logits,
    weights,
    ids,
    tokens,
    experts,
    stride,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NARROW: tl.constexpr,
    BY_HAND: tl.constexpr,
    BT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Softmax in float32, the TOP_K largest, of equals the lowest id; stored in the order of the ids.

    All probabilities of a row with a NaN are NaN and count as equal, so its result is the first TOP_K ids.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.arange(0, PADDED)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    value = tl.load(logits + token.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    value = tl.where((column < experts)[None, :], value.to(tl.float32), float("-inf"))
    value = tl.exp(value - tl.max(value, 1)[:, None])
    probability = value / tl.sum(value, 1)[:, None]
    key = tl.where(probability >= 0.0, probability, 2.0)
    key = tl.where((column < experts)[None, :], key, -1.0)
    chosen = tl.zeros((BT, PADDED), dtype=tl.int32)
    for _ in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        lowest = tl.min(tl.where(key == best[:, None], column[None, :], PADDED), 1)
        hit = column[None, :] == lowest[:, None]
        chosen = tl.where(hit, 1, chosen)
        key = tl.where(hit, -1.0, key)
    if NORMALIZE:
        probability = probability / tl.sum(tl.where(chosen == 1, probability, 0.0), 1)[:, None]
    if NARROW:
        probability = rounded(probability, logits.dtype.element_ty, BY_HAND).to(tl.float32)
    place = token.to(tl.int64)[:, None] * TOP_K + tl.cumsum(chosen, 1) - 1
    kept = inside & (chosen == 1)
    tl.store(weights + place, probability, mask=kept)
    tl.store(ids + place, tl.broadcast_to(column[None, :], (BT, PADDED)), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def sort_rows(ids, tokens, places, offsets, rows, TOP_K: tl.constexpr, BR: tl.constexpr):
    """A stable counting sort: program e lists the rows of expert e behind those of all lower ids.

    ids [rows], tokens and places int64 [rows], offsets int32 [programs]; row r is of token r // TOP_K. No row has the
    expert of the last program, which stores the end. An id beyond the programs is in no list.
    """
    expert = tl.program_id(0)
    begin = 0
    for first in range(0, rows, BR):
        row = first + tl.arange(0, BR)
        inside = row < rows
        chosen = tl.load(ids + row, mask=inside, other=0).to(tl.int32)
        begin += tl.sum((inside & (chosen < expert)).to(tl.int32), 0)
    tl.store(offsets + expert, begin)
    for first in range(0, rows, BR):
        row = first + tl.arange(0, BR)
        inside = row < rows
        chosen = tl.load(ids + row, mask=inside, other=0).to(tl.int32)
        mine = inside & (chosen == expert)
        place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(tokens + place, (row // TOP_K).to(tl.int64), mask=mine)
        tl.store(places + row, place.to(tl.int64), mask=mine)
        begin += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows", "first"])
def combine(
    results,
    weights,
    places,
    begun,
    out,
    rows,
    first,
    width,
    TOP_K: tl.constexpr,
    BEGUN: tl.constexpr,
    ADD: tl.constexpr,
    BY_HAND: tl.constexpr,
    BW: tl.constexpr,
):
    """out [T, width] = (ADD: out +) the sum of weights[t, k] * results[places[t, k] - first], after that in ``begun``
    where BEGUN, in float32 and in the order of k, rounded before it is added. Places outside of the rows add nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = column < width
    if BEGUN:
        total = tl.load(begun + token * width + column, mask=inside, other=0.0)
    else:
        total = tl.zeros((BW,), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + rank) - first + tl.zeros((BW,), dtype=tl.int64)
        there = inside & (place >= 0) & (place < rows)
        result = tl.load(results + place * width + column, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights + token * TOP_K + rank)
    if ADD:
        before = tl.load(out + token * width + column, mask=inside, other=0.0).to(tl.float32)
        total = before + rounded(total, out.dtype.element_ty, BY_HAND).to(tl.float32)
    tl.store(out + token * width + column, rounded(total, out.dtype.element_ty, BY_HAND), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["finite"])
def rms_norm(
    x,
    add,
    weight,
    out,
    finite,
    width,
    x_stride,
    add_stride,
    out_stride,
    eps,
    ADD: tl.constexpr,
    ONCE: tl.constexpr,
    WATCHED: tl.constexpr,
    BY_HAND: tl.constexpr,
    PADDED: tl.constexpr,
):
    """out = weight * x / rms(x), one row a program; where ADD, x += add first, in place. ``out`` may be x.

    ONCE: the result alone is rounded. WATCHED: ``finite`` [1] becomes NaN if a result is not finite.
    """
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
    if not ONCE:
        value = rounded(value, out.dtype.element_ty, BY_HAND).to(tl.float32)
    value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = rounded(value, out.dtype.element_ty, BY_HAND)
    tl.store(out + row * out_stride + column, result, mask=inside)
    if WATCHED:
        tl.store(finite, float("nan"), mask=tl.max(beyond(result), 0) > 0)


@triton.jit
def beyond(value):
    """1 where ``value`` is infinite or not a number, else 0."""
    return tl.where(tl.abs(value.to(tl.float32)) < float("inf"), 0, 1)


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
def normed(value, weight, DTYPE: tl.constexpr, ONCE: tl.constexpr, BY_HAND: tl.constexpr):
    """value * weight, rounded to DTYPE; where not ONCE, ``value`` is rounded first."""
    if not ONCE:
        value = rounded(value, DTYPE, BY_HAND).to(tl.float32)
    return rounded(value * weight, DTYPE, BY_HAND).to(tl.float32)


@triton.jit
def turned(one, other, cos, sin, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """one * cos + other * sin: both products rounded, then their sum."""
    first = rounded(one * cos[None, :], DTYPE, BY_HAND).to(tl.float32)
    second = rounded(other * sin[None, :], DTYPE, BY_HAND).to(tl.float32)
    return rounded(first + second, DTYPE, BY_HAND)


@triton.jit
def finish_heads(
    qkv, cos, sin, q_norm, k_norm, heads, q_heads, rotated, size, stride, rope_stride, clip, eps,
    CLIP: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BY_HAND: tl.constexpr, BH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Clip ``heads`` heads of a token of ``qkv``, norm and rotate the first ``rotated``, of which q_heads are queries.

    In place; BH heads at a time. PADDED: half the head ``size``, rounded up; the second half of cos and sin repeats the
    first. MIXED: norms are rounded once, and if a query or key of the token is not finite, its values become NaN: one
    program a token, which meets all queries and keys before the last values.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    half = size // 2
    place = tl.arange(0, PADDED)
    angle = token * rope_stride + place
    c = tl.load(cos + angle, mask=place < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=place < half, other=0.0).to(tl.float32)
    lost = 0
    for block in range(tl.program_id(1), tl.cdiv(heads, BH), tl.num_programs(1)):
        head = block * BH + tl.arange(0, BH)
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
            query = (head < q_heads)[:, None]
            low = normed(low * scale, norm_weight(q_norm, k_norm, query, place, half), dtype, MIXED, BY_HAND)
            high = normed(
                high * scale, norm_weight(q_norm + half, k_norm + half, query, place, half), dtype, MIXED, BY_HAND
            )
        turn = (head < rotated)[:, None]
        new_low = tl.where(turn, turned(low, -high, c, s, dtype, BY_HAND), rounded(plain_low, dtype, BY_HAND))
        new_high = tl.where(turn, turned(high, low, c, s, dtype, BY_HAND), rounded(plain_high, dtype, BY_HAND))
        if MIXED:
            found = tl.where(turn & inside, tl.maximum(beyond(new_low), beyond(new_high)), 0)
            lost = tl.maximum(lost, tl.max(tl.max(found, 1), 0))
            spoiled = (head >= rotated)[:, None] & (lost > 0)
            new_low = tl.where(spoiled, float("nan"), new_low)
            new_high = tl.where(spoiled, float("nan"), new_high)
        tl.store(first, new_low, mask=inside)
        tl.store(first + half, new_high, mask=inside)
