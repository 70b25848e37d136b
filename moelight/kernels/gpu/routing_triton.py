"""The router and the weighted sum of experts in Triton (imported only where installed); `routing` checks arguments."""

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
