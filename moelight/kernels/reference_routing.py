"""Reference implementations of routing in plain torch, on any device; clarity before speed.

Callers check the arguments.

Legend: T tokens, E experts, k experts per token, H hidden size, R = T * k routed rows (token * k + rank).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
