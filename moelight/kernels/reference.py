"""Reference implementations of the kernels in plain torch, accumulating in float32 or, of float64, in float64.

They run on any device; callers check the arguments.

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, D head size, P block size, E experts, H hidden; of
latent attention H heads, R the size of the latent, Rr of the rotary part; of the delta rule as in `delta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

Cache = tuple[Tensor, Tensor, Tensor, Tensor]


def _wide(x: Tensor) -> Tensor:
    """``x`` in at least float32: half types are widened, float64 is kept for tests that need exact results."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, gate: Tensor | None = None) -> Tensor:
    """`cpu_rms_norm`, without its sum: x and gate [..., H], weight [H] -> [..., H]."""
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = wide.to(x.dtype) * weight
    return scaled if gate is None else (_wide(scaled) * functional.silu(_wide(gate))).to(x.dtype)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Sequence[Tensor], starts: Sequence[int], *, silu: bool
) -> Tensor:
    """`cpu_causal_conv`: x [T, C], weight [C, K], bias [C], states [K - 1, C] each -> [T, C]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for (first, last), state in zip(pairwise(starts), states, strict=True):
        rows = torch.cat((state, x[first:last]))
        taps = _wide(weight).t().unsqueeze(1)  # [K, 1, C]
        sums = sum((_wide(rows[j : j + last - first]) * taps[j] for j in range(len(taps))), torch.zeros(()))
        rounded = (sums if bias is None else sums + bias).to(x.dtype)
        out[first:last] = functional.silu(_wide(rounded)).to(x.dtype) if silu else rounded
        state.copy_(rows[len(rows) - len(state) :])
    return out


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Sequence[Tensor], starts: Sequence[int]
) -> Tensor:
    """`cpu_delta_rule`: q and k [T, Hk, Dk], v [T, H, Dv], decay [T, H, 1 or Dk], beta [T, H], states [H, Dk, Dv] each
    -> [T, H, Dv]."""
    repeats = v.shape[1] // q.shape[1]
    query, key = (_unit(_wide(x)).repeat_interleave(repeats, dim=1) for x in (q, k))
    query, value, retention = query * q.shape[2] ** -0.5, _wide(v), decay.exp().unsqueeze(-1)  # kept [T, H, 1 or Dk, 1]
    out = torch.empty_like(value)
    for (first, last), state in zip(pairwise(starts), states, strict=True):
        for t in range(first, last):
            state.mul_(retention[t])
            change = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * beta[t, :, None]
            state.add_(key[t].unsqueeze(2) * change.unsqueeze(1))
            out[t] = torch.einsum("hkv,hk->hv", state, query[t])
    return out.to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cpu_rotate`: x [T, heads, D], cos and sin [T, D] of its dtype -> [T, heads, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(1)).add_(turned.mul_(sin.unsqueeze(1)))


def kv_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`cpu_kv_append`: write token t of k_new, v_new [T, Hkv, D] to slot slots[t] of the caches [blocks, Hkv, P, D]."""
    for cache, scales, new in ((k_cache, k_scale, k_new), (v_cache, v_scale, v_new)):
        rows, steps = (new, new) if scales is None else quantise(new)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, cache.shape[2])
            cache[block, :, offset] = rows[token]
            if scales is not None:
                scales[block, :, offset] = steps[token]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, row by row: x [..., D] -> codes int8 [..., D], scales float32 [...]; x is about codes * scales.

    The scale of a row is its largest magnitude / 127; nan, with codes of zero, if that is not finite.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (wide / scales.unsqueeze(-1)).round().clamp(-127, 127)
    return torch.where(scales.unsqueeze(-1) > 0, codes, 0).to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `quantise`, rounded to ``dtype``."""
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)


def gqa_decode(
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
) -> Tensor:
    """`cpu_gqa_decode`: q [B, Hq, D] over caches [blocks, Hkv, P, D] -> [B, Hq, D]; zeros if seq_lens is 0."""
    lengths, block_size = seq_lens.tolist(), k_cache.shape[2]
    if k_new is not None and v_new is not None:
        rows = [b for b, length in enumerate(lengths) if length > 0]
        last = [(b, *divmod(lengths[b] - 1, block_size)) for b in rows]
        slots = torch.tensor([int(block_tables[b, i]) * block_size + at for b, i, at in last], dtype=torch.int64)
        kv_append(k_cache, v_cache, k_new[rows], v_new[rows], slots, k_scale=k_scale, v_scale=v_scale)
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths):
        if length > 0:
            begin = 0 if window is None else max(0, length - window)
            k = paged_rows(k_cache, block_tables[b], begin, length, k_scale)
            v = paged_rows(v_cache, block_tables[b], begin, length, v_scale)
            out[b] = attend(q[b : b + 1], k, v, scale, sinks=sinks, softcap=softcap)[0]
    return out


def mla_append(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """`cpu_mla_append`: write token t of new [T, R + Rr] to slot slots[t] of the cache [blocks, P, R + Rr]."""
    for token, slot in enumerate(slots.tolist()):
        cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


def mla_decode(
    q_nope_absorbed: Tensor, q_rope: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """`cpu_mla_decode`: q_nope_absorbed [B, H, R], q_rope [B, H, Rr], cache [blocks, P, R + Rr] -> [B, H, R]."""
    out = torch.zeros_like(q_nope_absorbed)
    q = torch.cat((q_nope_absorbed, q_rope), dim=-1)
    for b, length in enumerate(seq_lens.tolist()):
        if length > 0:
            rows = paged_rows(cache.unsqueeze(1), block_tables[b], 0, length)
            out[b] = attend(q[b : b + 1], rows, rows[..., : out.shape[-1]], scale)[0]
    return out


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
    """`cpu_prefill_attention`: q [T, Hq, D], k and v [T, Hkv, D], cu_seqlens int32 [S + 1] -> [T, Hq, D]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for s, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        keys, values, context = k[first:last], v[first:last], 0 if cache is None else int(cache[3][s])
        if cache is not None and context > 0 and last > first:
            begin = 0 if window is None else max(0, context - window + 1)
            earlier = [
                paged_rows(tensor, cache[2][s], begin, context, scales).to(q.dtype)
                for tensor, scales in ((cache[0], k_scale), (cache[1], v_scale))
            ]
            keys, values = torch.cat((earlier[0], keys)), torch.cat((earlier[1], values))
            context -= begin  # positions count from the first one that any row attends to
        position = torch.arange(context, context + last - first, device=q.device).unsqueeze(1)
        key_position = torch.arange(len(keys), device=q.device)
        seen = key_position <= position
        if window is not None:
            seen &= key_position > position - window
        out[first:last] = attend(q[first:last], keys, values, scale, seen, sinks=sinks, softcap=softcap)
    return out


def paged_rows(cache: Tensor, table: Tensor, begin: int, end: int, scales: Tensor | None = None) -> Tensor:
    """Positions [begin, end) of a sequence: cache [blocks, Hkv, P, D], table [max_blocks] -> [end - begin, Hkv, D].

    With ``scales`` [blocks, Hkv, P], the products in the dtype of the scales.
    """
    block_size = cache.shape[2]
    first, last = begin // block_size, -(-end // block_size)
    rows = cache[table[first:last].long()].transpose(1, 2).flatten(0, 1)
    rows = rows[begin - first * block_size : end - first * block_size]
    if scales is None:
        return rows
    return rows.to(scales.dtype) * paged_rows(scales.unsqueeze(-1), table, begin, end)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, R], mask [n, m] true where attended, sinks [Hq] -> [n, Hq, R]."""
    kv_heads = k.shape[1]
    grouped = _wide(q).unflatten(1, (kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.to(grouped.dtype)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, q.shape[0], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hgnm,mhd->nhgd", weights, v.to(grouped.dtype)).flatten(1, 2).to(q.dtype)


def route_topk(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int64 [T, k] of the k most likely experts.

    Softmax over all experts in float32, then the k largest; of equals the lowest id wins. `normalize` makes a
    token's k weights sum to one.
    """
    ordered, ids = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids[:, :top_k]


def gate_and_up(both: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of both [n, 2I]: one after the other, or ``interleaved``."""
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    return gate, up


def route(logits: Tensor, top_k: int, *, normalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    """`cpu_route`: logits [T, E] -> weights float32 [T, k] and ids int32 [T, k], ids ascending."""
    wide = _wide(logits)
    shares = wide.softmax(-1)
    wide = wide.masked_fill(shares.isnan().any(-1, keepdim=True), 0.0)
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = shares.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if round_weights:
        weights = weights.to(logits.dtype).to(wide.dtype)
    ids, rank = ids.sort(dim=-1)
    return weights.gather(-1, rank), ids.to(torch.int32)


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cpu_sort_by_expert`: ids int32 [T, k] -> order [R], token [R], position [T, k], offsets [E + 1], all int32."""
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=ids.device)
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = torch.bincount(flat, minlength=experts).cumsum(0)
    token = order // max(1, top_k)
    return order.int(), token.int(), position.view(tokens, top_k).int(), offsets.int()


def scatter_sum(rows: Tensor, position: Tensor, weights: Tensor, out: Tensor, *, residual: bool) -> Tensor:
    """`cpu_scatter_sum`: rows [_, H], position and weights [T, k], out [T, H], overwritten unless ``residual``."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    for rank in range(position.shape[1]):
        index = position[:, rank].long()
        here = torch.nonzero(index >= 0).flatten()
        part = rows.index_select(0, index[here]).to(wide) * weights[here, rank].unsqueeze(1)
        total.index_copy_(0, here, total.index_select(0, here) + part)
    total = total.to(rows.dtype)
    if residual:
        return out.add_(total)
    return out.copy_(total)
