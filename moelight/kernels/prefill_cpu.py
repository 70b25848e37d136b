"""Prefill attention on the CPU: ragged packed prompts, each optionally after earlier positions in the cache.

Selects the implementation: the extension where it is built, else `reference_prefill.py`. Does not depend on the owner
of the cache. Every wrong argument is a ValueError that names it.

Legend: S sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moelight.kernels import checks, native
from moelight.kernels import reference_prefill as reference
from moelight.kernels.dlpack import as_dlpack
from moelight.kernels.reference_prefill import Cache


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
