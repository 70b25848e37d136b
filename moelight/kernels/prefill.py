"""Causal attention of packed prompts through torch's fused kernel, one sequence at a time, on any device.

Legend: T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moelight.hrm.footprint import CHUNK_ROWS
from moelight.kernels.reference import paged_rows


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    window: int | None = None,
    context: int = 0,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of a prompt, or of a later chunk: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    A later chunk also attends to its ``context`` earlier positions, gathered from ``cache`` = (k_cache, v_cache
    [blocks, Hkv, P, D], block_table int32 [max_blocks]). ``window`` counts the current position.
    """
    if context and cache is not None:
        return _later_chunk(q, k, v, scale, window, context, cache)
    tokens, kv_heads = q.shape[0], k.shape[1]
    mask = None
    if window is not None and tokens > window:
        mask = _mask(0, tokens, 0, window, q.device)
    # Batch = kv heads, heads = the queries that share one: keys and values are expanded views, never copies.
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    keys = k.permute(1, 0, 2).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    values = v.permute(1, 0, 2).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None and tokens > 1, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _later_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    context: int,
    cache: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Attend head by head and some rows at a time, so that neither the gathered context nor the mask grows large."""
    k_cache, v_cache, table = cache
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        one = slice(head, head + 1)
        keys = torch.cat((paged_rows(k_cache[:, one], table, 0, context), k[:, one])).permute(1, 0, 2)
        values = torch.cat((paged_rows(v_cache[:, one], table, 0, context), v[:, one])).permute(1, 0, 2)
        queries = slice(head * group, (head + 1) * group)
        for first in range(0, q.shape[0], CHUNK_ROWS):
            rows = slice(first, min(first + CHUNK_ROWS, q.shape[0]))
            mask = _mask(rows.start, rows.stop, context, window, q.device)
            seen = mask.shape[1]
            part = functional.scaled_dot_product_attention(
                q[rows, queries].permute(1, 0, 2).unsqueeze(0),
                keys[:, :seen].unsqueeze(1).expand(1, group, -1, -1),
                values[:, :seen].unsqueeze(1).expand(1, group, -1, -1),
                attn_mask=mask,
                scale=scale,
            )
            out[rows, queries] = part[0].permute(1, 0, 2)
    return out


def _mask(first: int, last: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """bool [rows, positions], true where rows ``first`` to ``last`` attend to positions 0 to ``context + last``."""
    position = torch.arange(context + first, context + last, device=device).unsqueeze(1)
    key_position = torch.arange(context + last, device=device)
    seen = key_position <= position
    if window is not None:
        seen &= key_position > position - window
    return seen
