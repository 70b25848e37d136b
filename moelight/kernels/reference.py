"""The plain-torch twin of every kernel: correct and clear first, accumulating in float32.

Knows the mathematics of one operation at a time, on any device. Refuses to know paging policy, models and speed;
callers check shapes (the faces in `attention.py` do).

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, D head size, P block size, E experts, H hidden,
I intermediate.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def _wide(x: Tensor) -> Tensor:
    """At least float32: half types are widened, float64 stays for tests that want the truth."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: x [..., H], weight [H] -> [..., H].

    Rounded as HF transformers does: normalised in float32, rounded to x's dtype, then scaled.
    """
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation as in HF transformers: x [T, heads, D], cos and sin float32 [T, R/2] -> [T, heads, D].

    The first R of the D dimensions turn (element i with element i + R/2), the rest pass.
    """
    half = cos.shape[-1]
    first, second, rest = _wide(x).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def kv_append(k_cache: Tensor, v_cache: Tensor, k_new: Tensor, v_new: Tensor, slots: Tensor) -> None:
    """Writes token t of k_new, v_new [T, Hkv, D] to block slots[t] // P, offset slots[t] % P of the caches.

    Caches [blocks, Hkv, P, D], slots int64 [T]; of a slot named twice the later token stays.
    """
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        k_cache[block, :, offset] = k_new[token]
        v_cache[block, :, offset] = v_new[token]


def gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its paged context; q [B, Hq, D] -> [B, Hq, D]. Zeros where seq_lens is 0.

    Caches [blocks, Hkv, P, D], block_tables int32 [B, max_blocks], seq_lens int32 [B].
    """
    out = torch.zeros_like(q)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        begin = 0 if window is None else max(0, length - window)
        k = paged_rows(k_cache, block_tables[b], begin, length)
        v = paged_rows(v_cache, block_tables[b], begin, length)
        out[b] = _attend(q[b : b + 1], k, v, scale, mask=None)[0]
    return out


def prefill_attention(
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

    Sequence s owns rows cu_seqlens[s] to cu_seqlens[s + 1]. When `context_lens` is given, each sequence also sees that
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


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """q [n, Hq, D], k and v [m, Hkv, D], mask [n, m] true where seen -> [n, Hq, D]."""
    kv_heads = k.shape[1]
    grouped = _wide(q).unflatten(1, (kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, _wide(k)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hgnm,mhd->nhgd", scores.softmax(-1), _wide(v)).flatten(1, 2).to(q.dtype)


def route_topk(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token: logits [T, E] -> weights float32 [T, k], ids int64 [T, k].

    Softmax over all experts in float32, then the k largest; of equals the lowest id wins. `normalize` makes a
    token's k weights sum to one.
    """
    ordered, ids = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids[:, :top_k]


def expert_ffn(
    x: Tensor, gate_up: Sequence[Tensor | None], down: Sequence[Tensor | None], offsets: Sequence[int]
) -> Tensor:
    """Gated experts, down(silu(gate(x)) * up(x)): x [T, H] sorted by expert -> [T, H].

    Expert e owns rows offsets[e] to offsets[e + 1]; its weights are gate_up[e] [2I, H], gate rows first, and down[e]
    [H, I]. An expert without rows may be None. Products accumulate in float32 and are rounded to x's dtype.
    """
    out = torch.empty_like(x)
    for e, (first, last) in enumerate(pairwise(offsets)):
        if first == last:
            continue
        wide, narrow = gate_up[e], down[e]
        if wide is None or narrow is None:
            raise ValueError(f"gate_up, down: expert {e} has {last - first} rows and no weights")
        gate, up = _wide(functional.linear(x[first:last], wide)).chunk(2, dim=-1)
        out[first:last] = functional.linear((functional.silu(gate) * up).to(x.dtype), narrow)
    return out
