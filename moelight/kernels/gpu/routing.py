"""Routing around the experts on the GPU: experts of each token, rows sorted by expert, weighted sums back.

Triton's kernels, or torch where `serving` selects it. Nothing synchronizes the device. Every wrong argument is a
ValueError that names it.

Legend: T tokens, E experts, k experts per token, R = T * k routed rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels.arguments import FLOATS, check_indices, check_integer, check_tensor
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.grouped import on_device
from moelight.kernels.reference import route_topk

_ROUTE_NUMBERS = 2048
_COMBINE_COLUMNS = 1024
_SORT_ROWS = (256, 2048)  # routed rows that a program reads at a time


def route(
    logits: Tensor, top_k: int, *, normalize: bool, weights_in_model_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int32 [T, k] of the k most likely experts, ids ascending.

    logits are float32, bfloat16 or float16, contiguous within rows. Softmax over all experts in float32, then the k
    largest; of equals the lowest id wins. ``normalize`` makes a token's weights sum to one; ``weights_in_model_dtype``
    rounds them to the dtype of the logits.
    """
    tokens, experts = check_tensor("logits", logits, FLOATS, (None, None), device=None)
    check_integer("top_k", top_k, 1, experts)
    if not serving.serves(logits.device, logits.dtype)[0]:
        found, chosen = route_topk(logits, top_k, normalize)
        if weights_in_model_dtype:
            found = found.to(logits.dtype).float()
        chosen, rank = chosen.sort(dim=-1)
        return found.gather(-1, rank), chosen.to(torch.int32)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    from moelight.kernels.gpu import routing_triton

    padded = 1 << (experts - 1).bit_length()
    height = max(1, min(64, _ROUTE_NUMBERS // padded))
    with on_device(logits.device):
        routing_triton.route[(-(-tokens // height),)](
            logits,
            weights,
            ids,
            tokens,
            experts,
            logits.stride(0),
            TOP_K=top_k,
            NORMALIZE=bool(normalize),
            NARROW=bool(weights_in_model_dtype) and logits.dtype != torch.float32,
            BY_HAND=by_hand(logits),
            BT=height,
            PADDED=padded,
        )
    return weights, ids


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by expert, then token: ids int32 or int64 [T, k] -> tokens, places, offsets.

    tokens int64 [R] and places int64 [T, k] for `expert_ffn` and `combine`, offsets int32 [E + 1].
    """
    _, top_k = check_tensor("ids", ids, (torch.int32, torch.int64), (None, None), device=None)
    check_integer("experts", experts, 1)
    check_indices("ids", ids, experts)
    if ids.numel() and serving.serves(ids.device, torch.float32)[0]:
        return _sorted(ids.contiguous(), experts)
    ordered, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return order // max(1, top_k), places.view(ids.shape), offsets


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`by_expert` in one launch."""
    from moelight.kernels.gpu import routing_triton

    rows, top_k = ids.numel(), ids.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=ids.device)
    places = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    block = next((size for size in _SORT_ROWS if rows <= size), _SORT_ROWS[-1])
    with on_device(ids.device):
        routing_triton.sort_by_expert[(experts,)](ids, tokens, places, offsets, rows, experts, TOP_K=top_k, BLOCK=block)
    return tokens, places, offsets


def combine(
    results: Tensor, weights: Tensor, places: Tensor, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """The weighted sum of a token's experts, in float32 and in the order of k -> ``out``, or a new [T, H].

    results  [R, H] float32, bfloat16 or float16, contiguous
    weights  float32 [T, k], k at least 1
    places   int64 [T, k]: the row of each in ``results``; on a device they are bounded, not checked
    out      [T, H] in the dtype of ``results`` or float32, contiguous
    add      begin with the contents of ``out``, not with zero
    """
    rows, width = check_tensor("results", results, FLOATS, (None, None), device=None, gap=False)
    tokens, top_k = check_tensor("weights", weights, torch.float32, (None, None), device=results.device, gap=False)
    if top_k < 1 or (tokens and not rows):
        raise ValueError(f"weights: {tokens} tokens with {top_k} experts have no rows in results")
    check_tensor("places", places, torch.int64, (tokens, top_k), device=results.device, gap=False)
    check_indices("places", places, rows)
    if out is None:
        if add:
            raise ValueError("out: must be given, to be added to")
        out = torch.empty((tokens, width), dtype=results.dtype, device=results.device)
    else:
        check_tensor("out", out, (results.dtype, torch.float32), (tokens, width), device=results.device, gap=False)
    if not out.numel():
        return out
    if not serving.serves(results.device, results.dtype)[0]:
        total = out.float() if add else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for rank in range(top_k):
            total.addcmul_(results[places[:, rank]].float(), weights[:, rank : rank + 1])
        return out.copy_(total)
    from moelight.kernels.gpu import routing_triton

    step = min(_COMBINE_COLUMNS, 1 << (width - 1).bit_length())
    with on_device(results.device):
        routing_triton.combine[(tokens, -(-width // step))](
            results,
            weights,
            places,
            out,
            rows,
            width,
            TOP_K=top_k,
            ADD=bool(add),
            BY_HAND=by_hand(out),
            BW=step,
        )
    return out


def by_hand(tensor: Tensor) -> bool:
    """True if an interpreted kernel rounds to the dtype of ``tensor`` itself (BY_HAND)."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
