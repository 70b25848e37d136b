"""Reference implementation of prefill attention in plain torch, with windows, sinks, soft caps and cached context.

Callers check the arguments.

Legend: S sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moelight.kernels.reference import _wide, paged_rows

Cache = tuple[Tensor, Tensor, Tensor, Tensor]


def prefill_attention(
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
) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D], cu_seqlens int32 [S + 1] -> [T, Hq, D]; see `cpu_prefill_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for s, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        keys, values, context = k[first:last], v[first:last], 0
        if last == first:
            continue
        if cache is not None and (context := int(cache[3][s])) > 0:
            begin = 0 if window is None else max(0, context - window + 1)
            earlier = [
                paged_rows(each, cache[2][s], begin, context)
                if scale_of is None
                else _scaled(each, scale_of, cache[2][s], begin, context).to(q.dtype)
                for each, scale_of in ((cache[0], k_scale), (cache[1], v_scale))
            ]
            keys, values = torch.cat((earlier[0], keys)), torch.cat((earlier[1], values))
            context -= begin  # positions count from the first one that any row sees
        out[first:last] = _attend(q[first:last], keys, values, scale, context, window, sinks, softcap)
    return out


def _scaled(cache: Tensor, scales: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Positions [begin, end) of an int8 cache, in float32."""
    return paged_rows(cache, table, begin, end).float() * paged_rows(scales.unsqueeze(-1), table, begin, end)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    context: int,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """q [n, Hq, D], k and v [context + n, Hkv, D] -> [n, Hq, D]."""
    kv_heads = k.shape[1]
    grouped = _wide(q).unflatten(1, (kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, _wide(k)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    position = torch.arange(context, context + q.shape[0]).unsqueeze(1)
    key_position = torch.arange(context + q.shape[0])
    seen = key_position <= position
    if window is not None:
        seen &= key_position > position - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hgnm,mhd->nhgd", weights, _wide(v)).flatten(1, 2).to(q.dtype)
