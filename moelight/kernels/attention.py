"""CPU attention over the paged key/value cache.

Selects the implementation: the extension where it is built, else `reference.py`. Does not depend on the owner of the
cache. Every wrong argument is a ValueError that names it; the extension has checks of its own, `checks.py` checks for
the reference implementations.

Legend: B sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens; of latent
attention H heads, R the size of the latent, Rr of the rotary part.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moelight.kernels import checks, native, reference
from moelight.kernels.dlpack import as_dlpack
from moelight.kernels.reference import Cache

__all__ = ["cpu_gqa_decode", "cpu_kv_append", "cpu_mla_append", "cpu_mla_decode", "cpu_prefill_attention"]


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
    """Softmax(scale * q k^T) v of one query per sequence over its paged context -> `out`, or a new [B, Hq, D].

    q, out        [B, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 256
    k_cache, v_cache  [blocks, Hkv, P, D]: dtype of q, or int8; P one of 16, 32, 64 and 128
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks, or before its window, are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    window        attend to the last `window` positions, the current one included; None for all
    sinks         float32 [Hq]: a logit of each head that joins its softmax and is dropped
    softcap       scores become softcap * tanh(score / softcap) before the softmax
    k_scale, v_scale  float32 [blocks, Hkv, P]: the factor of each position's row; for int8 caches, and only for them
    k_new, v_new  [B, Hkv, D], dtype of q: written first, at position seq_lens - 1, as by `cpu_kv_append`; both or none
    threads       None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Accumulates in float32. A sequence's result is bit for bit
    independent of the rest of the batch and of the number of threads. `out` may be `q`. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, window, threads = checks.check_scalars(scale, window, threads)
    softcap = checks.check_softcap(softcap)
    extension = native.extension()
    if extension is None:
        checks.check_decode(q, k_cache, v_cache, block_tables, seq_lens, window, out)
        checks.check_decode_extras(q, k_cache, sinks, k_scale, v_scale, k_new, v_new)
        if k_new is not None and v_new is not None:
            reference.kv_append_last(k_cache, v_cache, k_new, v_new, block_tables, seq_lens, k_scale, v_scale)
        result = reference.gqa_decode(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return result if out is None else out.copy_(result)
    queries = as_dlpack("q", q)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    extension.gqa_decode(
        queries,
        as_dlpack("k_cache", k_cache),
        as_dlpack("v_cache", v_cache),
        as_dlpack("block_tables", block_tables),
        as_dlpack("seq_lens", seq_lens),
        scale,
        window or 0,
        _optional("sinks", sinks),
        softcap or 0.0,
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
        _optional("k_new", k_new),
        _optional("v_new", v_new),
        as_dlpack("out", out),
        threads,
    )
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

    k_cache, v_cache  [blocks, Hkv, P, D]: float32, bfloat16, float16 or int8, D a multiple of 8 up to 256, P
                      one of 16, 32, 64 and 128
    k_new, v_new      [T, Hkv, D], dtype of the caches; any of the three float dtypes if those are int8
    slots             int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept
    k_scale, v_scale  float32 [blocks, Hkv, P], for int8 caches and only for them: written too. A row's scale is its
                      largest magnitude / 127, its codes the nearest multiples of that; a row that is not finite gets
                      the scale nan
    threads           None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Nothing is written if any argument is wrong.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or slot.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_append(k_cache, v_cache, k_new, v_new, slots, k_scale, v_scale)
        reference.kv_append(k_cache, v_cache, k_new, v_new, slots, k_scale=k_scale, v_scale=v_scale)
        return
    extension.kv_append(
        as_dlpack("k_cache", k_cache),
        as_dlpack("v_cache", v_cache),
        as_dlpack("k_new", k_new),
        as_dlpack("v_new", v_new),
        as_dlpack("slots", slots),
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
        threads,
    )


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
    """Latent attention of one query per sequence over its paged context -> `out`, or a new [B, H, R].

    A cached row is a latent c of R elements and a rotary key r of Rr, shared by all heads. The score of a position is
    scale * (q_nope_absorbed . c + q_rope . r), the result the sum of softmax weights times c.

    q_nope_absorbed, out  [B, H, R]: float32, bfloat16 or float16
    q_rope        [B, H, Rr]
    cache         [blocks, P, R + Rr]
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    threads       None for torch.get_num_threads()

    One dtype throughout, CPU memory, contiguous beyond the first dimension. Accumulates in float32. A sequence's result
    is bit for bit independent of the rest of the batch and of the number of threads. `out` may be `q_nope_absorbed`.
    The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, _, threads = checks.check_scalars(scale, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_latent_decode(q_nope_absorbed, q_rope, cache, block_tables, seq_lens, out)
        result = reference.mla_decode(q_nope_absorbed, q_rope, cache, block_tables, seq_lens, scale)
        return result if out is None else out.copy_(result)
    queries = as_dlpack("q_nope_absorbed", q_nope_absorbed)
    if out is None:
        out = torch.empty_like(q_nope_absorbed, memory_format=torch.contiguous_format)
    extension.mla_decode(
        queries,
        as_dlpack("q_rope", q_rope),
        as_dlpack("cache", cache),
        as_dlpack("block_tables", block_tables),
        as_dlpack("seq_lens", seq_lens),
        scale,
        as_dlpack("out", out),
        threads,
    )
    return out


def cpu_mla_append(cache: Tensor, new: Tensor, slots: Tensor, *, threads: int | None = None) -> None:
    """Write token t of `new` to block slots[t] // P, offset slots[t] % P of a latent cache.

    cache    [blocks, P, R + Rr]: float32, bfloat16 or float16
    new      [T, R + Rr], dtype of the cache
    slots    int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept
    threads  None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Nothing is written if any argument is wrong.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or slot.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_latent_append(cache, new, slots)
        reference.mla_append(cache, new, slots)
        return
    extension.mla_append(as_dlpack("cache", cache), as_dlpack("new", new), as_dlpack("slots", slots), threads)


def _optional(name: str, tensor: Tensor | None) -> object:
    return None if tensor is None else as_dlpack(name, tensor)


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
    """Causal softmax(scale * q k^T) v of packed prompts -> `out`, or a new [T, Hq, D].

    q, out      [T, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 256
    k, v        [T, Hkv, D], dtype of q
    cu_seqlens  int32 [S + 1], ascending from 0 to T: sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1]
    window      a row sees the last `window` positions, its own included; None for all
    sinks       [Hq], a float dtype: one logit per head that joins the softmax and is dropped
    softcap     logits become softcap * tanh(logit / softcap)
    cache       (k_cache, v_cache, block_tables, context_lens): [blocks, Hkv, P, D] twice, dtype of q, int32
                [S, max_blocks] and int32 [S]. Sequence s follows context_lens[s] positions in the cache; entries of
                block_tables beyond them, or before the window, are ignored
    k_scale, v_scale  float32 [blocks, Hkv, P], for int8 caches: factors of their rows, rounded to q's dtype after
    threads     None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Sums in float32; bfloat16 is multiplied in pairs where the
    processor does so. A row's result depends on its own sequence up to its own position alone, bit for bit: not on the
    other sequences, the number of threads, or the chunks that its prompt is cut into, if the cache holds the same
    values as k and v (an int8 cache does not). `out` may be `q`. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, window, threads = checks.check_scalars(scale, window, threads)
    _softcap(softcap)
    _cache(cache, k_scale, v_scale)
    sinks = _sinks(sinks)
    extension = native.extension()
    if extension is None:
        _check(q, k, v, cu_seqlens, window, sinks, cache, k_scale, v_scale, out)
        options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap, "cache": cache}
        result = reference.prefill_attention(q, k, v, cu_seqlens, scale, **options, k_scale=k_scale, v_scale=v_scale)
        return result if out is None else out.copy_(result)
    prompts = _export(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    names = ("k_cache", "v_cache", "block_tables", "context_lens")
    context = _export(**dict(zip(names, cache or (), strict=False))) or [None] * 4
    scales = [None] * 2 if k_scale is None or v_scale is None else _export(k_scale=k_scale, v_scale=v_scale)
    sink = None if sinks is None else as_dlpack("sinks", sinks)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    extension.prefill_attention(
        *prompts, scale, window or 0, sink, softcap or 0.0, *context, *scales, as_dlpack("out", out), threads
    )
    return out


def _export(**tensors: Tensor) -> list[object]:
    return [as_dlpack(name, tensor) for name, tensor in tensors.items()]


def _softcap(softcap: object) -> None:
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise ValueError(f"softcap: must be a positive number or None, is {softcap!r}")


def _cache(cache: object, k_scale: object, v_scale: object) -> None:
    if cache is not None and not (isinstance(cache, (tuple, list)) and len(cache) == 4):
        raise ValueError("cache: must be (k_cache, v_cache, block_tables, context_lens) or None")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("v_scale: must come with k_scale, or not at all")
    if cache is None and k_scale is not None:
        raise ValueError("k_scale: without a cache there is nothing to scale")


def _sinks(sinks: Tensor | None) -> Tensor | None:
    """``sinks`` as the extension reads them: float32, contiguous."""
    if sinks is None:
        return None
    checks._tensor("sinks", sinks)
    if sinks.dtype not in checks.FLOATS:
        raise ValueError(f"sinks: must be float32, bfloat16 or float16, is {sinks.dtype}")
    return sinks.float().contiguous()


def _check(
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
    checks._tensor("q", q)
    if q.dtype not in checks.FLOATS:
        raise ValueError(f"q: must be float32, bfloat16 or float16, is {q.dtype}")
    checks._layout("q", q, 3, q.dtype)
    tokens, q_heads, head_dim = q.shape
    if not 8 <= head_dim <= checks.MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"q: head size must be a multiple of 8 from 8 to {checks.MAX_HEAD_DIM}, is {head_dim}")
    for name, tensor in (("k", k), ("v", v)):
        checks._layout(name, tensor, 3, q.dtype)
        checks._shape(name, tensor, (tokens, k.shape[1], head_dim))
    if k.shape[1] < 1:
        raise ValueError("k: has no heads")
    if q_heads < 1 or q_heads % k.shape[1]:
        raise ValueError(f"q: its {q_heads} heads are no multiple of k's {k.shape[1]}")
    if out is not None:
        checks._layout("out", out, 3, q.dtype)
        checks._shape("out", out, tuple(q.shape))
    checks._layout("cu_seqlens", cu_seqlens, 1, torch.int32)
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens: must ascend from 0 to the {tokens} tokens of q")
    if sinks is not None:
        checks._shape("sinks", sinks, (q_heads,))
    if cache is not None:
        _check_cache(q, k, bounds, window, cache, torch.int8 if k_scale is not None else q.dtype)
        for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scales is not None:
                checks._layout(name, scales, 3, torch.float32)
                checks._shape(name, scales, tuple(cache[0].shape[:3]))


def _check_cache(q: Tensor, k: Tensor, bounds: list[int], window: int | None, cache: Cache, dtype: torch.dtype) -> None:
    k_cache, v_cache, block_tables, context_lens = cache
    checks._layout("k_cache", k_cache, 4, dtype)
    blocks, _, block_size, _ = k_cache.shape
    checks._shape("k_cache", k_cache, (blocks, k.shape[1], max(1, block_size), q.shape[2]))
    checks._layout("v_cache", v_cache, 4, dtype)
    checks._shape("v_cache", v_cache, tuple(k_cache.shape))
    checks._layout("block_tables", block_tables, 2, torch.int32)
    checks._shape("block_tables", block_tables, (len(bounds) - 1, block_tables.shape[1]))
    checks._layout("context_lens", context_lens, 1, torch.int32)
    checks._shape("context_lens", context_lens, (len(bounds) - 1,))
    room = block_tables.shape[1] * block_size
    for s, length in enumerate(context_lens.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"context_lens: entry {s} is {length}, the block table holds 0 to {room}")
        if bounds[s] == bounds[s + 1]:
            continue
        first = 0 if window is None else max(0, length - window + 1) // block_size
        for i, block in enumerate(block_tables[s, first : -(-length // block_size)].tolist(), start=first):
            if not 0 <= block < blocks:
                raise ValueError(f"block_tables: entry [{s}, {i}] is {block}, the cache has {blocks} blocks")
