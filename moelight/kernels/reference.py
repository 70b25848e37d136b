"""Reference implementations of attention, norms and routing in plain torch, accumulating in float32.

One operation at a time, on any device; clarity before speed. Callers check the arguments (as `attention.py` does).

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, D head size, P block size, E experts, H hidden; of
latent attention H heads, R the size of the latent, Rr of the rotary part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def _wide(x: Tensor) -> Tensor:
    """``x`` in at least float32: half types are widened, float64 is kept for tests that need exact results."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: x [..., H], weight [H] -> [..., H].

    Rounded as HF transformers does: normalised in float32, rounded to x's dtype, then scaled.
    """
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation: x [T, heads, D], cos and sin [T, D] of its dtype -> [T, heads, D]; pairs are (i, i + D/2).

    Rounded as HF transformers does: both products, then their sum.
    """
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
    """Write token t of k_new, v_new [T, Hkv, D] to block slots[t] // P, offset slots[t] % P of the caches.

    Caches [blocks, Hkv, P, D], slots int64 [T]; if a slot occurs twice, the later token is kept. Caches of int8 require
    k_scale, v_scale float32 [blocks, Hkv, P], which are written too.
    """
    block_size = k_cache.shape[2]
    for cache, scales, new in ((k_cache, k_scale, k_new), (v_cache, v_scale, v_new)):
        rows, steps = (new, None) if scales is None else quantise(new)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, block_size)
            cache[block, :, offset] = rows[token]
            if scales is not None and steps is not None:
                scales[block, :, offset] = steps[token]


def kv_append_last(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Append row b of k_new, v_new [B, Hkv, D] at position seq_lens[b] - 1 of sequence b, where it has one."""
    block_size = k_cache.shape[2]
    last = [(b, length - 1) for b, length in enumerate(seq_lens.tolist()) if length > 0]
    slots = [int(block_tables[b, at // block_size]) * block_size + at % block_size for b, at in last]
    rows = [b for b, _ in last]
    kv_append(
        k_cache,
        v_cache,
        k_new[rows],
        v_new[rows],
        torch.tensor(slots, dtype=torch.int64),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, row by row: x [..., D] -> codes int8 [..., D], scales float32 [...]; x is about codes * scales.

    The scale of a row is its largest magnitude / 127; nan, with codes of zero, if that is not finite.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (wide / scales.unsqueeze(-1)).round().clamp(-127, 127)
    return torch.where(scales.unsqueeze(-1) > 0, codes, 0).to(torch.int8), scales


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
) -> Tensor:
    """Attention of one query per sequence over its paged context: q [B, Hq, D] -> [B, Hq, D]. Zeros if seq_lens is 0.

    Caches [blocks, Hkv, P, D], block_tables int32 [B, max_blocks], seq_lens int32 [B]. Sinks [Hq] are logits that join
    the softmax of their head and are dropped. Caches of int8 require k_scale, v_scale [blocks, Hkv, P].
    """
    out = torch.zeros_like(q)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        begin = 0 if window is None else max(0, length - window)
        k = paged_rows(k_cache, block_tables[b], begin, length)
        v = paged_rows(v_cache, block_tables[b], begin, length)
        if k_scale is not None and v_scale is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            k = k.to(wide) * paged_rows(k_scale.unsqueeze(-1), block_tables[b], begin, length)
            v = v.to(wide) * paged_rows(v_scale.unsqueeze(-1), block_tables[b], begin, length)
        out[b] = _attend(q[b : b + 1], k, v, scale, mask=None, sinks=sinks, softcap=softcap)[0]
    return out


def mla_append(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write token t of new [T, R + Rr] to block slots[t] // P, offset slots[t] % P of the cache [blocks, P, R + Rr].

    Slots int64 [T]; if a slot occurs twice, the later token is kept.
    """
    for token, slot in enumerate(slots.tolist()):
        cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


def mla_decode(
    q_nope_absorbed: Tensor, q_rope: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Latent attention, absorbed: q_nope_absorbed [B, H, R], q_rope [B, H, Rr] -> [B, H, R]. Zeros where seq_lens is 0.

    A row of the cache [blocks, P, R + Rr] is a latent, which is key and value of all heads, and a rotary key.
    """
    out = torch.zeros_like(q_nope_absorbed)
    q = torch.cat((q_nope_absorbed, q_rope), dim=-1)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        rows = paged_rows(cache.unsqueeze(1), block_tables[b], 0, length)
        out[b] = _attend(q[b : b + 1], rows, rows[..., : out.shape[-1]], scale, mask=None)[0]
    return out


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    context_lens: Sequence[int] | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    block_tables: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged packed prompts: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    Sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1]. If `context_lens` is given, each sequence also sees that
    many earlier positions in the paged caches, through its row of block_tables. `window` counts the current position.
    """
    out = torch.empty_like(q)
    for s, (first, last) in enumerate(pairwise(cu_seqlens)):
        keys, values = k[first:last], v[first:last]
        context = 0 if context_lens is None else context_lens[s]
        if context > 0:
            if k_cache is None or v_cache is None or block_tables is None:
                raise ValueError("context_lens: earlier context needs k_cache, v_cache and block_tables")
            keys = torch.cat((paged_rows(k_cache, block_tables[s], 0, context), keys))
            values = torch.cat((paged_rows(v_cache, block_tables[s], 0, context), values))
        position = torch.arange(context, context + last - first, device=q.device).unsqueeze(1)
        key_position = torch.arange(context + last - first, device=q.device)
        mask = key_position <= position
        if window is not None:
            mask &= key_position > position - window
        out[first:last] = _attend(q[first:last], keys, values, scale, mask)
    return out


def paged_rows(cache: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Positions [begin, end) of a sequence: cache [blocks, Hkv, P, D], table [max_blocks] -> [end - begin, Hkv, D]."""
    block_size = cache.shape[2]
    first, last = begin // block_size, -(-end // block_size)
    rows = cache[table[first:last].long()].transpose(1, 2).flatten(0, 1)
    return rows[begin - first * block_size : end - first * block_size]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, R], mask [n, m] true where seen, sinks [Hq] -> [n, Hq, R]."""
    kv_heads = k.shape[1]
    grouped = _wide(q).unflatten(1, (kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, _wide(k)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, q.shape[0], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hgnm,mhd->nhgd", weights, _wide(v)).flatten(1, 2).to(q.dtype)


def route_topk(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k most likely experts of each token: logits [T, E] -> weights float32 [T, k], ids int64 [T, k].

    Softmax over all experts in float32, then the k largest; of equals the lowest id wins. `normalize` makes a
    token's k weights sum to one.
    """
    ordered, ids = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids[:, :top_k]


def dequantized(weight: Tensor, scale: Tensor | None, group_size: int | None) -> Tensor:
    """Values of a stored weight, in at least float32: [N, K], or uint8 [N, K / 2] with two values a byte.

    int8 and uint8 have scale [N] or [N, ceil(K / group_size)]; the low four bits of a byte are the earlier value, and 8
    means zero.
    """
    if scale is None:
        return weight.to(torch.promote_types(weight.dtype, torch.float32))
    if weight.dtype == torch.uint8:
        weight = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1).to(torch.int8) - 8
    depth = weight.shape[1]
    wide = scale.reshape(len(scale), -1)
    per_column = wide.repeat_interleave(min(group_size or depth, depth), dim=1)[:, :depth]
    return weight.to(scale.dtype) * per_column


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """x [T, K] -> x weight^T + bias [T, N], in float32 or wider, rounded to x's dtype."""
    return _product(x, weight, bias, scale, group_size).to(x.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, group_size: int | None) -> Tensor:
    numbers = dequantized(weight, scale, group_size)
    wide = torch.promote_types(x.dtype, numbers.dtype)
    return functional.linear(x.to(wide), numbers.to(wide), None if bias is None else bias.to(wide))


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swiglu_oai": _swiglu_oai,
}


def expert_ffn(
    x: Tensor,
    gate_up: Sequence[Tensor | None],
    down: Sequence[Tensor | None],
    offsets: Sequence[int],
    *,
    activation: str = "silu",
    gate_up_bias: Sequence[Tensor | None] | None = None,
    down_bias: Sequence[Tensor | None] | None = None,
    gate_up_scale: Sequence[Tensor | None] | None = None,
    down_scale: Sequence[Tensor | None] | None = None,
    group_size: int | None = None,
) -> Tensor:
    """down(activation(gate(x), up(x))) of every expert for its own rows: x [T, H] sorted by expert -> [T, H].

    Expert e owns rows offsets[e] to offsets[e + 1]; gate_up[e] is [2I, H], gate rows first, and down[e] [H, I]. The
    result of the activation is rounded to x's dtype, as is the output.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for e, (first, last) in enumerate(pairwise(offsets)):
        wide, narrow = gate_up[e], down[e]
        if first == last or wide is None or narrow is None:
            continue
        product = _product(x[first:last], wide, _of(gate_up_bias, e), _of(gate_up_scale, e), group_size)
        inner = ACTIVATIONS[activation](*product.chunk(2, dim=-1)).to(x.dtype)
        out[first:last] = linear(inner, narrow, _of(down_bias, e), scale=_of(down_scale, e), group_size=group_size)
    return out


def _of(tensors: Sequence[Tensor | None] | None, expert: int) -> Tensor | None:
    return None if tensors is None else tensors[expert]


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
        out[first:last] = _attend_prompt(q[first:last], keys, values, scale, context, window, sinks, softcap)
    return out


def _scaled(cache: Tensor, scales: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Positions [begin, end) of an int8 cache, in float32."""
    return paged_rows(cache, table, begin, end).float() * paged_rows(scales.unsqueeze(-1), table, begin, end)


def _attend_prompt(
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


def route(logits: Tensor, top_k: int, *, normalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int32 [T, k] of the k largest logits, ids ascending.

    Weights are the softmax over all experts; of equal logits the lowest id wins. A token with a logit that is not a
    number, or infinite, gets the first k experts and weights that are not numbers.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
    """Sort routed rows by expert, then token: ids int32 [T, k] -> order [R], token of each [R], position in that order
    of routed row (token, rank) [T, k], offsets [E + 1]. All int32."""
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=ids.device)
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = torch.bincount(flat, minlength=experts).cumsum(0)
    token = order // max(1, top_k)
    return order.int(), token.int(), position.view(tokens, top_k).int(), offsets.int()


def gather_rows(x: Tensor, token_of_row: Tensor) -> Tensor:
    """x [T, H], token_of_row int32 [R] -> [R, H]."""
    return x.index_select(0, token_of_row.long())


def scatter_sum(rows: Tensor, position: Tensor, weights: Tensor, out: Tensor, *, residual: bool) -> Tensor:
    """Sum into out [T, H] each token's rows[position[t, r]] times weights[t, r], over r in order, in float32.

    A negative position adds nothing. The sum is rounded to rows' dtype; with ``residual`` it is then added to `out`.
    """
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
