"""Routing around the experts on the GPU: experts of each token, rows sorted by expert, weighted sums back.

Triton's kernels, or torch where `serving` selects it. Nothing synchronizes the device. Every wrong argument is a
ValueError that names it.

Legend: T tokens, E experts, k experts per token, R = T * k routed rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels.arguments import FLOATS, check_indices, check_integer, check_tensor
from moelight.kernels.device import Device, on_host
from moelight.kernels.gpu import serving
from moelight.kernels.reference import route_topk

_ROUTE_NUMBERS = 2048
_SORT_ROWS = (1024, 4096)  # of a step, the second with many rows
_MANY_ROWS = 1 << 14
_COMBINE_COLUMNS = 1024


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
        shares, chosen = route_topk(logits, top_k, normalize)
        if weights_in_model_dtype:
            shares = shares.to(logits.dtype).float()
        chosen, rank = chosen.sort(dim=-1)
        return shares.gather(-1, rank), chosen.to(torch.int32)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    from moelight.kernels.gpu import rows_triton

    padded = 1 << (experts - 1).bit_length()
    height = max(1, min(64, _ROUTE_NUMBERS // padded))
    with Device(logits.device).context():
        rows_triton.route[(-(-tokens // height),)](
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
    if serving.serves(ids.device, torch.float32)[0]:
        from moelight.kernels.gpu import rows_triton

        rows = ids.numel()
        tokens, places = torch.empty((2, rows), dtype=torch.int64, device=ids.device)
        offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
        step = _SORT_ROWS[rows > _MANY_ROWS]
        with Device(ids.device).context():
            options = {"num_warps": max(1, step // 256), "enable_fp_fusion": False}  # integers alone
            rows_triton.sort_rows[(experts + 1,)](
                ids.contiguous(), tokens, places, offsets, rows, TOP_K=max(1, top_k), BR=step, **options
            )
        return tokens, places.view(ids.shape), offsets
    ordered, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return order // max(1, top_k), places.view(ids.shape), offsets


def combine(
    results: Tensor,
    weights: Tensor,
    places: Tensor,
    *,
    out: Tensor | None = None,
    add: bool = False,
    first: int | None = None,
    begun: Tensor | None = None,
) -> Tensor:
    """The weighted sum of a token's experts, in float32 and in the order of k -> ``out``, or a new [T, H]. The sum over
    the parts of a list, each continuing the one before, is bit for bit that of the whole list.

    results  [R, H] float32, bfloat16 or float16, contiguous
    weights  float32 [T, k], k at least 1
    places   int64 [T, k]: the row of each in ``results``; on a device they are bounded, not checked
    out      [T, H] in the dtype of ``results`` or float32, contiguous
    add      the sum, rounded to the dtype of ``out``, is added to its contents, as `cpu_scatter_sum` adds it
    first    ``results`` are the rows from this one on of a longer list, which ``places`` refer to: others add nothing
    begun    float32 [T, H], contiguous: sums of rows of lower ranks, which this sum continues; may be ``out``
    """
    rows, width = check_tensor("results", results, FLOATS, (None, None), device=None, gap=False)
    tokens, top_k = check_tensor("weights", weights, torch.float32, (None, None), device=results.device, gap=False)
    if top_k < 1 or (tokens and not rows):
        raise ValueError(f"weights: {tokens} tokens with {top_k} experts have no rows in results")
    check_tensor("places", places, torch.int64, (tokens, top_k), device=results.device, gap=False)
    if first is None:
        check_indices("places", places, rows)
    first = check_integer("first", first or 0, 0)
    if begun is not None:
        check_tensor("begun", begun, torch.float32, (tokens, width), device=results.device, gap=False)
    if out is None:
        if add:
            raise ValueError("out: must be given, to be added to")
        out = torch.empty((tokens, width), dtype=results.dtype, device=results.device)
    else:
        check_tensor("out", out, (results.dtype, torch.float32), (tokens, width), device=results.device, gap=False)
    if not out.numel():
        return out
    if not serving.serves(results.device, results.dtype)[0]:
        total = _sums_in_torch(results, weights, places - first, begun)
        return out.add_(total.to(out.dtype)) if add else out.copy_(total)
    from moelight.kernels.gpu import rows_triton

    step = min(_COMBINE_COLUMNS, 1 << (width - 1).bit_length())
    arguments = results, weights, places, out if begun is None else begun, out, rows, first, width
    flags = {"BEGUN": begun is not None, "ADD": bool(add), "BY_HAND": by_hand(out)}
    with Device(results.device).context():
        rows_triton.combine[(tokens, -(-width // step))](*arguments, TOP_K=top_k, BW=step, **flags)
    return out


def _sums_in_torch(results: Tensor, weights: Tensor, places: Tensor, begun: Tensor | None) -> Tensor:
    shape = places.shape[0], results.shape[1]
    total = torch.zeros(shape, dtype=torch.float32, device=results.device) if begun is None else begun.clone()
    for position, weight in zip(places.unbind(1), weights.split(1, dim=1), strict=True):
        valid = ((position >= 0) & (position < len(results))).unsqueeze(1)
        product = results[position.clamp(0, len(results) - 1)].float().mul_(weight)
        total += product.masked_fill_(~valid, 0.0)
    return total


def by_hand(tensor: Tensor) -> bool:
    """True if an interpreted kernel rounds to the dtype of ``tensor`` itself (BY_HAND)."""
    return on_host(tensor) and tensor.dtype == torch.bfloat16
