"""Router and experts of one layer: tokens sorted by expert, each expert once over its own rows, weighted sum back.

Legend: T tokens, E experts, k experts per token, H hidden, I intermediate, R = T * k routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moelight.kernels.products import Workspace, feed_forward, padded_rows
from moelight.kernels.reference import route_topk
from moelight.profiles.model import RouterSpec

ExpertWeights = tuple[Tensor, Tensor]


def route(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and expert ids int64 [T, k], largest first; the lowest id wins a tie."""
    weights, ids = route_topk(logits, spec.top_k, spec.normalize)
    if spec.weights_in_model_dtype:
        weights = weights.to(logits.dtype).float()
    return weights, ids


def mixture(x: Tensor, weights: Tensor, ids: Tensor, experts: Sequence[ExpertWeights], space: Workspace) -> Tensor:
    """x [T, H] -> [T, H] in x's dtype. A token's experts are summed in float32 in the order of ``ids``, so its result
    does not depend on its company beyond each product's own rounding.

    Rows are sorted by expert. An expert's padded rows run into those of the next, which has not been computed yet:
    they are read, and their results dropped.
    """
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    rows = space.rows
    torch.index_select(x, 0, order // top_k, out=rows[: order.numel()])
    first = 0
    for (gate_up, down), count in zip(experts, counts, strict=True):
        if count:
            padded = rows[first : first + padded_rows(count)]
            rows[first : first + count] = feed_forward(padded, gate_up, down, space)[:count]
            first += count
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    ranked = back.view(tokens, top_k)
    total = rows[ranked[:, 0]].float().mul_(weights[:, :1])
    for rank in range(1, top_k):
        total.addcmul_(rows[ranked[:, rank]].float(), weights[:, rank : rank + 1])
    return total.to(x.dtype)
