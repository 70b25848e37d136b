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
def sort_by_expert(ids, tokens, places, offsets, rows, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The routed rows of one expert a program, in their order: a stable sort by counting.

    Rows of lower experts come first: every program counts them. A row with an id outside of 0 to experts - 1 has no
    place; ``offsets`` stay within 0 to ``rows``.
    """
    expert = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    before = 0
    for first in range(0, rows, BLOCK):
        row = first + column
        chosen = tl.load(ids + row, mask=row < rows, other=experts)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(offsets + expert, before)
    for first in range(0, rows, BLOCK):
        row = first + column
        mine = (row < rows) & (tl.load(ids + row, mask=row < rows, other=experts) == expert)
        place = before + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(tokens + place, row // TOP_K, mask=mine)
        tl.store(places + row, place, mask=mine)
        before += tl.sum(mine.to(tl.int32), 0)
    if expert == experts - 1:
        tl.store(offsets + experts, before)


@triton.jit(do_not_specialize=["rows"])
def combine(
    results,
    weights,
    places,
    out,
    rows,
    width,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    BY_HAND: tl.constexpr,
    BW: tl.constexpr,
):
    """out [T, width] = (ADD: out +) the sum of weights[t, k] * results[places[t, k]], in float32, in the order of k."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = column < width
    if ADD:
        total = tl.load(out + token * width + column, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BW,), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + rank)
        place = tl.minimum(tl.maximum(place, 0), rows - 1).to(tl.int64)
        result = tl.load(results + place * width + column, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + token * TOP_K + rank)
    tl.store(out + token * width + column, rounded(total, out.dtype.element_ty, BY_HAND), mask=inside)
