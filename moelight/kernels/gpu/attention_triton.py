"""Attention over new and cached keys and values, and what fills the caches, in Triton (imported only where installed).

`attention` checks the arguments and chooses the tiles. A row of a tile is one query: GROUP query heads, those of one
key/value head, for each of BM // GROUP tokens. Tiles of keys begin at multiples of BN positions of the sequence and a
masked key changes nothing, so a query's result depends on its own sequence up to its own position alone: neither on the
other rows of its tile nor on the chunks that a prompt is cut into.

Legend: T tokens, N slots, Hq query heads, Hkv key/value heads, D head size, P block size in tokens.
"""

import triton
import triton.language as tl

from moelight.kernels.gpu.grouped_triton import rounded

# Added to the place in the buffer that a block table names: places are below 0, slots of the cache are not.
IN_BUFFER = tl.constexpr(-(1 << 30))


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap), by its series where the quotient of exponentials would lose digits."""
    x = x / cap
    square = x * x
    series = 1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0))))
    return cap * tl.where(square < 0.0625, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def span_of(sequences, sequence):
    """First row, number of rows, first position, first seen position, and start of the block table of a sequence."""
    fields = sequences + sequence * 5
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)


@triton.jit
def cached_at(table, position, old, kv_head, kv_heads, P: tl.constexpr):
    """Of the positions that are ``old``: whether they are in the buffer, and the number of their row of keys there."""
    slot = tl.load(table + position // P, mask=old, other=0) + position % P
    return slot < 0, tl.where(slot < 0, slot - IN_BUFFER, slot).to(tl.int64) * (2 * kv_heads) + kv_head


@triton.jit
def sources(
    k_new, v_new, cache, buffer, cache_scales, buffer_scales, table, position, start, there, kv_head, kv_heads,
    CACHED: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Rows of keys and values: to read at any position; or, where INT8, of new ones, of old codes, and factors. And
    which positions are old, and which are read from the first rows."""
    old, fresh = there & (position < start), there
    k_old, v_old, k_factor, v_factor = k_new, v_new, position, position
    if CACHED:
        buffered, index = cached_at(table, position, old, kv_head, kv_heads, P)
        k_old = tl.multiple_of(tl.where(buffered, buffer, cache) + index * D, [ALIGNMENT])
        v_old = tl.multiple_of(k_old + kv_heads * D, [ALIGNMENT])
        if INT8:
            factors = tl.where(buffered, buffer_scales, cache_scales) + index
            k_factor = tl.load(factors, mask=old, other=0.0)[None, :]
            v_factor = tl.load(factors + kv_heads, mask=old, other=0.0)[:, None]
            fresh = there & (position >= start)
        else:
            k_new = tl.multiple_of(tl.where(old, k_old, k_new), [ALIGNMENT])
            v_new = tl.multiple_of(tl.where(old, v_old, v_new), [ALIGNMENT])
    return k_new, v_new, k_old, v_old, k_factor, v_factor, old, fresh


@triton.jit
def loaded(rows, column, there, D: tl.constexpr, BD: tl.constexpr):
    """Numbers ``column`` of the rows at the pointers ``rows``, zeros where not ``there``; all are expanded."""
    if D < BD:
        there = there & (column < D)
    return tl.load(rows + column, mask=there, other=0)


@triton.jit
def either(
    new, fresh, stored, old, factor, column,
    INT8: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """`loaded` from the rows ``new``; where ``old`` and INT8 from the codes ``stored``, times their factors."""
    numbers = loaded(new, column, fresh, D, BD).to(PRODUCT)
    if INT8:
        codes = loaded(stored, column, old, D, BD).to(tl.float32)
        numbers = tl.where(old, (codes * factor).to(PRODUCT), numbers)
    return numbers


@triton.jit
def scored(products, query, position, there, scale, cap, window, CAPPED: tl.constexpr, WINDOWED: tl.constexpr):
    """Scores of ``products`` [BM, BN], minus infinity where a query does not see a position."""
    scores = products * scale
    if CAPPED:
        scores = capped(scores, cap)
    seen = there[None, :] & (position[None, :] <= query[:, None])
    if WINDOWED:
        seen = seen & (position[None, :] > query[:, None] - window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def key_products(
    queries, q_row, live, k_row, fresh, k_old, old, factor,
    INT8: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DEPTH: tl.constexpr, PRODUCT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products [BM, BN] of the queries at ``q_row`` with the keys of a tile, in steps of DEPTH; ``queries``: those of
    the first step."""
    products = tl.zeros((BM, BN), dtype=tl.float32)
    for part in tl.static_range(BD // DEPTH):
        depth = part * DEPTH + tl.arange(0, DEPTH)
        if DEPTH < BD:
            queries = loaded(q_row, depth[None, :], live[:, None], D, BD).to(PRODUCT)
        keys = either(
            k_row[None, :], fresh[None, :], k_old[None, :], old[None, :], factor, depth[:, None], INT8, D, BD, PRODUCT
        )
        products = tl.dot(queries, keys, products, input_precision="ieee")
    return products


@triton.jit(
    do_not_specialize=["scale", "cap", "window"], do_not_specialize_on_alignment=["sequences", "tiles", "entries"]
)
def attend(
    q, k, v, out, cache, buffer, cache_scales, buffer_scales, sequences, tiles, entries, sinks, scale, cap, window,
    q_stride, k_stride, v_stride, kv_heads,
    DECODES: tl.constexpr, CACHED: tl.constexpr, INT8: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, DEPTH: tl.constexpr, ALIGNMENT: tl.constexpr, PRODUCT: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] = causal softmax(scale * q k^T) v of the sequences of a `RaggedBatch`; a program a tile and head.

    cache and buffer are [N, 2, Hkv, D], where INT8 with scales [N, 2, Hkv]; their rows begin at multiples of ALIGNMENT
    bytes. DECODES: sequence i is row i and one tile; else ``tiles`` [_, 2] are (sequence, first token). The product
    with the keys goes over D in steps of DEPTH.
    """
    sequence, first = tl.program_id(0), 0
    if not DECODES:
        sequence, first = tl.load(tiles + tl.program_id(0) * 2), tl.load(tiles + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1)
    row, count, start, lowest, base = span_of(sequences, sequence)
    inside = tl.arange(0, BM)
    token = first + inside // GROUP
    head = kv_head * GROUP + inside % GROUP
    live = (inside < BM // GROUP * GROUP) & (token < count)
    q_row = (q + tl.where(live, row + token, row).to(tl.int64) * q_stride + tl.where(live, head, 0) * D)[:, None]
    column = tl.arange(0, BD)
    queries = loaded(q_row, tl.arange(0, DEPTH)[None, :], live[:, None], D, BD).to(PRODUCT)

    peak = tl.full((BM,), -1e30, dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0)
        peak = tl.maximum(sink, peak)
        total = tl.exp(sink - peak)
    sums = tl.zeros((BM, BD), dtype=tl.float32)
    if WINDOWED:
        lowest = tl.maximum(lowest, start + first - window + 1)
    end = start + tl.minimum(first + BM // GROUP, count)
    for tile in range(lowest // BN, tl.cdiv(end, BN)):
        position = tile * BN + tl.arange(0, BN)
        there = (position >= lowest) & (position < end)
        k_new = k + (row + position - start).to(tl.int64) * k_stride + kv_head * D
        v_new = v + (row + position - start).to(tl.int64) * v_stride + kv_head * D
        k_row, v_row, k_old, v_old, k_factor, v_factor, old, fresh = sources(
            k_new, v_new, cache, buffer, cache_scales, buffer_scales, entries + base, position, start, there, kv_head,
            kv_heads, CACHED, INT8, D, P, ALIGNMENT,
        )  # fmt: skip
        products = key_products(
            queries, q_row, live, k_row, fresh, k_old, old, k_factor, INT8 and CACHED, D, BD, DEPTH, PRODUCT, BM, BN
        )
        scores = scored(products, start + token, position, there, scale, cap, window, CAPPED, WINDOWED)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink, weights = tl.exp(peak - higher), tl.exp(scores - higher[:, None])
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        values = either(
            v_row[:, None], fresh[:, None], v_old[:, None], old[:, None], v_factor, column[None, :],
            INT8 and CACHED, D, BD, PRODUCT,
        )  # fmt: skip
        sums = tl.dot(weights.to(PRODUCT), values, sums * shrink[:, None], input_precision="ieee")
    into = out + ((row + token).to(tl.int64) * kv_heads * GROUP + head)[:, None] * D + column[None, :]
    result = rounded(sums / tl.where(live, total, 1.0)[:, None], out.dtype.element_ty, BY_HAND)
    tl.store(into, result, mask=live[:, None] & (column < D)[None, :])


@triton.jit
def quantised(numbers):
    """Codes (whole float32) and factors [BH, 1] of the rows of ``numbers`` float32 [BH, BD]."""
    factor = tl.max(tl.abs(numbers), 1)[:, None] / 127.0
    whole = tl.max(tl.where(tl.abs(numbers) < float("inf"), 0, 1), 1)[:, None] == 0
    codes = numbers / tl.where(whole & (factor > 0.0), factor, 1.0)
    codes = tl.where(whole, codes + 12582912.0 - 12582912.0, 0.0)  # to the nearest, ties to even
    return codes, tl.where(whole, factor, float("nan"))


@triton.jit
def through_int8(
    k, v, k_out, v_out, k_stride, v_stride, kv_heads,
    BY_HAND: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """k_out and v_out [T, Hkv, D] = the rows of k and v, each head quantised and multiplied back; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)[:, None]
    column = tl.arange(0, BD)[None, :]
    there = (head < kv_heads) & (column < D)
    for which in tl.static_range(2):
        source = k + row * k_stride if which == 0 else v + row * v_stride
        into = k_out if which == 0 else v_out
        codes, factor = quantised(tl.load(source + head * D + column, mask=there, other=0).to(tl.float32))
        numbers = rounded(codes * factor, into.dtype.element_ty, BY_HAND)
        tl.store(into + (row * kv_heads + head) * D + column, numbers, mask=there)


@triton.jit(do_not_specialize_on_alignment=["rows", "slots"])
def append(
    k, v, cache, scales, rows, slots, k_stride, v_stride, kv_heads,
    PICKED: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write row rows[i] (PICKED, else i) of k and v to slot slots[i] of the cache [N, 2, Hkv, D]; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if PICKED:
        row = tl.load(rows + row)
    head = tl.arange(0, BH)[:, None]
    column = tl.arange(0, BD)[None, :]
    there = (head < kv_heads) & (column < D)
    for which in tl.static_range(2):
        source = k + row * k_stride if which == 0 else v + row * v_stride
        numbers = tl.load(source + head * D + column, mask=there, other=0)
        place = (slot * 2 + which) * kv_heads
        if INT8:
            codes, factor = quantised(numbers.to(tl.float32))
            tl.store(scales + place + head, factor, mask=head < kv_heads)
            numbers = codes.to(tl.int8)
        tl.store(cache + (place + head) * D + column, numbers, mask=there)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["pieces"])
def fetch(source, into, pieces, count, width, BW: tl.constexpr):
    """Copy rows of ``width`` numbers: piece (slot, place, rows) int32 [count, 3] from ``source`` to ``into``.

    Few programs, each with many reads in flight: ``source`` is host memory, and programs that wait for the link keep
    others from the processors.
    """
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        slot = tl.load(pieces + piece * 3).to(tl.int64)
        place = tl.load(pieces + piece * 3 + 1).to(tl.int64)
        size = tl.load(pieces + piece * 3 + 2) * width
        for first in range(0, size, BW):
            inside = first + tl.arange(0, BW)
            numbers = tl.load(source + slot * width + inside, mask=inside < size)
            tl.store(into + place * width + inside, numbers, mask=inside < size)
