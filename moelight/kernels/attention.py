"""CPU attention over the paged key/value cache: native where the extension is built, else `reference.py`.

Tensors are in CPU memory, contiguous beyond the first dimension. Every wrong argument is a ValueError that names it.
``threads`` None stands for torch.get_num_threads(). Attention sums in float32 and releases the GIL; a sequence's result
is bit for bit independent of the rest of the batch and of the number of threads.

Legend: B sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens; of latent
attention H heads, R the size of the latent, Rr of the rotary part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moelight.core.policy import KV_BLOCK_SIZES
from moelight.kernels import arguments, native, reference
from moelight.kernels.arguments import FLOATS, Shape, check_tensor, lend, lend_given, stored
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.reference import Cache

__all__ = ["cpu_gqa_decode", "cpu_kv_append", "cpu_mla_append", "cpu_mla_decode", "cpu_prefill_attention"]

_MAX_HEAD_DIM = 512


def cpu_gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Softmax(scale * q k^T) v of one query per sequence over its paged context -> `out` (may be `q`), or a new tensor.

    q, out        [B, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 512
    k_cache, v_cache  [blocks, Hkv, P, D]: dtype of q, or int8; P one of 16, 32, 64 and 128
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks, or before its window, are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    window        attend to the last `window` positions, the current one included; None for all
    sinks         float32 [Hq]: a logit of each head that joins its softmax and is dropped
    softcap       scores become softcap * tanh(score / softcap) before the softmax
    k_scale, v_scale  float32 [blocks, Hkv, P]: the factor of each position's row; for int8 caches, and only for them
    k_new, v_new  [B, Hkv, D], dtype of q: written first, at position seq_lens - 1, as by `cpu_kv_append`; both or none
    """
    scale, threads = arguments.check_number("scale", scale), arguments.check_threads(threads)
    window, softcap = arguments.check_window(window), arguments.check_softcap(softcap)
    extension = native.extension()
    if extension is None:
        _check_decode(q, k_cache, v_cache, block_tables, seq_lens, window, sinks, k_scale, v_scale, k_new, v_new, out)
        rest: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap, "k_new": k_new, "v_new": v_new}
        paged = (q, k_cache, v_cache, block_tables, seq_lens)
        return stored(reference.gqa_decode(*paged, scale, k_scale=k_scale, v_scale=v_scale, **rest), out)
    lent = lend(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens)
    sink, *rows = lend_given(sinks=sinks, k_scale=k_scale, v_scale=v_scale, k_new=k_new, v_new=v_new)
    if out is None:
        out = RESULTS.empty(q.shape, q.dtype)
    extension.gqa_decode(*lent, scale, window or 0, sink, softcap or 0.0, *rows, *lend(out=out), threads)
    return out


def cpu_kv_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Write token t of k_new, v_new to block slots[t] // P, offset slots[t] % P of the caches.

    k_cache, v_cache  [blocks, Hkv, P, D]: float32, bfloat16, float16 or int8, D and P as in `cpu_gqa_decode`
    k_new, v_new      [T, Hkv, D], dtype of the caches; any of the three float dtypes if those are int8
    slots             int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept
    k_scale, v_scale  float32 [blocks, Hkv, P], for int8 caches and only for them: written too. A row's scale is its
                      largest magnitude / 127, its codes the nearest multiples of that; nan for a row that is not finite

    Nothing is written if any argument is wrong.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        (blocks, kv_heads, block_size, head_dim), dtypes = _check_caches(k_cache, v_cache, k_scale, v_scale)
        check_tensor("slots", slots, torch.int64, (None,))
        check_tensor("k_new", k_new, dtypes, (len(slots), kv_heads, head_dim))
        check_tensor("v_new", v_new, k_new.dtype, k_new.shape)
        arguments.check_indices("slots", slots, blocks * block_size)
        reference.kv_append(k_cache, v_cache, k_new, v_new, slots, k_scale=k_scale, v_scale=v_scale)
        return
    lent = lend(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, slots=slots)
    extension.kv_append(*lent, *lend_given(k_scale=k_scale, v_scale=v_scale), threads)


def cpu_mla_decode(
    q_nope_absorbed: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Latent attention of one query per sequence over its paged context -> `out`, or a new tensor.

    A cached row is a latent c of R elements and a rotary key r of Rr, shared by all heads. The score of a position is
    scale * (q_nope_absorbed . c + q_rope . r), the result the sum of softmax weights times c.

    q_nope_absorbed, out  [B, H, R], may be the same: float32, bfloat16 or float16, as q_rope and cache
    q_rope        [B, H, Rr]
    cache         [blocks, P, R + Rr]
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    """
    scale, threads = arguments.check_number("scale", scale), arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        blocks, block_size, row = _check_filled("cache", cache, FLOATS, (None,) * 3)
        batch, heads, latent = _check_filled("q_nope_absorbed", q_nope_absorbed, cache.dtype, (None,) * 3)
        _, _, rotary = _check_filled("q_rope", q_rope, cache.dtype, (batch, heads, None))
        if latent + rotary != row:
            raise ValueError(f"cache: its rows have {row} elements, the queries {latent} + {rotary}")
        _check_optional(("out", out, cache.dtype, q_nope_absorbed.shape))
        _check_blocks("seq_lens", seq_lens, block_tables, batch, blocks, block_size)
        return stored(reference.mla_decode(q_nope_absorbed, q_rope, cache, block_tables, seq_lens, scale), out)
    queries = lend(q_nope_absorbed=q_nope_absorbed, q_rope=q_rope)
    paged = lend(cache=cache, block_tables=block_tables, seq_lens=seq_lens)
    if out is None:
        out = RESULTS.empty(q_nope_absorbed.shape, q_nope_absorbed.dtype)
    extension.mla_decode(*queries, *paged, scale, *lend(out=out), threads)
    return out


def cpu_mla_append(cache: Tensor, new: Tensor, slots: Tensor, *, threads: int | None = None) -> None:
    """Write token t of `new` to block slots[t] // P, offset slots[t] % P of a latent cache.

    cache  [blocks, P, R + Rr]: float32, bfloat16 or float16
    new    [T, R + Rr], dtype of the cache
    slots  int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept

    Nothing is written if any argument is wrong.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is None:
        blocks, block_size, row = _check_filled("cache", cache, FLOATS, (None,) * 3)
        check_tensor("slots", slots, torch.int64, (None,))
        check_tensor("new", new, cache.dtype, (slots.shape[0], row))
        arguments.check_indices("slots", slots, blocks * block_size)
        reference.mla_append(cache, new, slots)
        return
    extension.mla_append(*lend(cache=cache, new=new, slots=slots), threads)


def cpu_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache: Cache | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Causal softmax(scale * q k^T) v of packed prompts -> `out` (may be `q`), or a new tensor.

    q, out      [T, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 512
    k, v        [T, Hkv, D], dtype of q
    cu_seqlens  int32 [S + 1], ascending from 0 to T: sequence s has rows cu_seqlens[s] to cu_seqlens[s + 1]
    window      a row attends to the last `window` positions, its own included; None for all
    sinks       [Hq], a float dtype: one logit per head that joins the softmax and is dropped
    softcap     logits become softcap * tanh(logit / softcap)
    cache       (k_cache, v_cache, block_tables, context_lens): [blocks, Hkv, P, D] twice, dtype of q, int32
                [S, max_blocks] and int32 [S]. Sequence s follows context_lens[s] positions in the cache; entries of
                block_tables beyond them, or before the window, are ignored
    k_scale, v_scale  float32 [blocks, Hkv, P], for int8 caches: factors of their rows, rounded to q's dtype after

    bfloat16 is multiplied in pairs where the processor does so. A row's result depends on its own sequence up to its
    own position alone, bit for bit: not on the chunks that its prompt is cut into, if the cache holds the same values
    as k and v (an int8 cache does not).
    """
    scale, threads = arguments.check_number("scale", scale), arguments.check_threads(threads)
    window, softcap = arguments.check_window(window), arguments.check_softcap(softcap)
    _check_context(cache, k_scale, v_scale)
    if sinks is not None and arguments.check_dense("sinks", sinks).dtype in FLOATS:
        sinks = sinks.float().contiguous()
    extension = native.extension()
    if extension is None:
        _check_prefill(q, k, v, cu_seqlens, window, sinks, cache, k_scale, v_scale, out)
        rest: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap, "cache": cache}
        result = reference.prefill_attention(q, k, v, cu_seqlens, scale, **rest, k_scale=k_scale, v_scale=v_scale)
        return stored(result, out)
    prompts = lend(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    paged: list[object] = [None] * 4
    if cache is not None:
        k_cache, v_cache, block_tables, context_lens = cache
        paged = lend(k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens)
    sink, *scales = lend_given(sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    if out is None:
        out = RESULTS.empty(q.shape, q.dtype)
    extension.prefill_attention(
        *prompts, scale, window or 0, sink, softcap or 0.0, *paged, *scales, *lend(out=out), threads
    )
    return out


def _check_filled(name: str, tensor: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], shape: Shape) -> torch.Size:
    sizes = check_tensor(name, tensor, dtypes, shape)
    if 0 in sizes[1:]:
        raise ValueError(f"{name}: is empty: shape {list(sizes)}")
    return sizes


def _check_queries(q: Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], kv_heads: int, head_dim: int) -> None:
    _, heads, _ = _check_filled("q", q, dtypes, (None, None, head_dim))
    if heads % kv_heads:
        raise ValueError(f"q: its {heads} heads are no multiple of the {kv_heads} of keys and values")


def _check_head_dim(name: str, size: int) -> None:
    if not 8 <= size <= _MAX_HEAD_DIM or size % 8:
        raise ValueError(f"{name}: head size must be a multiple of 8 from 8 to {_MAX_HEAD_DIM}, is {size}")


def _check_optional(*table: tuple[str, Tensor | None, torch.dtype, Shape]) -> None:
    for name, tensor, dtype, shape in table:
        if tensor is not None:
            check_tensor(name, tensor, dtype, shape)


def _check_caches(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[torch.Size, tuple[torch.dtype, ...]]:
    """Shape of the caches, and the dtypes that queries and new rows may have."""
    shape = check_tensor("k_cache", k_cache, (*FLOATS, torch.int8), (None,) * 4)
    if shape[2] not in KV_BLOCK_SIZES:
        raise ValueError(f"k_cache: block size must be one of {KV_BLOCK_SIZES}, shape is {list(shape)}")
    _check_head_dim("k_cache", shape[3])
    _check_filled("k_cache", k_cache, k_cache.dtype, shape)
    check_tensor("v_cache", v_cache, k_cache.dtype, shape)
    scaled = k_cache.dtype == torch.int8
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scales is not None) != scaled:
            raise ValueError(f"{name}: int8 caches need it, others have none")
        _check_optional((name, scales, torch.float32, shape[:3]))
    return shape, FLOATS if scaled else (k_cache.dtype,)


def _check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    window: int | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    out: Tensor | None,
) -> None:
    (blocks, kv_heads, block_size, head_dim), dtypes = _check_caches(k_cache, v_cache, k_scale, v_scale)
    _check_queries(q, dtypes, kv_heads, head_dim)
    batch, heads, _ = q.shape
    if (k_new is None) != (v_new is None):
        raise ValueError(f"{'k_new' if k_new is None else 'v_new'}: k_new and v_new come together")
    _check_optional(
        ("out", out, q.dtype, q.shape),
        ("sinks", sinks, torch.float32, (heads,)),
        ("k_new", k_new, q.dtype, (batch, kv_heads, head_dim)),
        ("v_new", v_new, q.dtype, (batch, kv_heads, head_dim)),
    )
    _check_blocks("seq_lens", seq_lens, block_tables, batch, blocks, block_size, window)


def _check_context(cache: object, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if cache is not None and not (isinstance(cache, (tuple, list)) and len(cache) == 4):
        raise ValueError("cache: must be (k_cache, v_cache, block_tables, context_lens) or None")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("v_scale: must come with k_scale, or not at all")
    if cache is None and k_scale is not None:
        raise ValueError("k_scale: without a cache there is nothing to scale")


def _check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    sinks: Tensor | None,
    cache: Cache | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> None:
    tokens, heads, head_dim = check_tensor("q", q, FLOATS, (None,) * 3)
    _check_head_dim("q", head_dim)
    _, kv_heads, _ = _check_filled("k", k, q.dtype, (tokens, None, head_dim))
    check_tensor("v", v, q.dtype, k.shape)
    _check_queries(q, q.dtype, kv_heads, head_dim)
    _check_optional(("out", out, q.dtype, q.shape), ("sinks", sinks, torch.float32, (heads,)))
    check_tensor("cu_seqlens", cu_seqlens, torch.int32, (None,))
    bounds = arguments.check_offsets("cu_seqlens", cu_seqlens, tokens)
    if cache is not None:
        k_cache, v_cache, block_tables, context_lens = cache
        dtype = q.dtype if k_scale is None else torch.int8
        shape = _check_filled("k_cache", k_cache, dtype, (None, kv_heads, None, head_dim))
        check_tensor("v_cache", v_cache, dtype, shape)
        _check_optional(
            *((name, factor, torch.float32, shape[:3]) for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)))
        )
        idle = [s for s, (first, last) in enumerate(pairwise(bounds)) if first == last]
        earlier = None if window is None else window - 1
        sequences = (len(bounds) - 1, shape[0], shape[2])
        _check_blocks("context_lens", context_lens, block_tables, *sequences, earlier, idle)


def _check_blocks(
    name: str,
    lengths: Tensor,
    block_tables: Tensor,
    batch: int,
    blocks: int,
    block_size: int,
    window: int | None = None,
    idle: Sequence[int] = (),
) -> None:
    """Check the tables of all sequences but the ``idle`` ones, from the last ``window`` positions on."""
    check_tensor("block_tables", block_tables, torch.int32, (batch, None))
    check_tensor(name, lengths, torch.int32, (batch,))
    room = block_tables.shape[1] * block_size
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"{name}: entry {b} is {length}, the block table holds 0 to {room}")
        first = 0 if window is None else max(0, length - window) // block_size
        entries = [] if b in idle else block_tables[b, first : -(-length // block_size)].tolist()
        for i, block in enumerate(entries, start=first):
            if not 0 <= block < blocks:
                raise ValueError(f"block_tables: entry [{b}, {i}] is {block}, the cache has {blocks} blocks")
