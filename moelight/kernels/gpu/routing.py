"""Routing around the experts on the GPU: experts of each token, rows sorted by expert, weighted sums back.

Selects the implementation: Triton's kernels, or the reference implementation in torch. Nothing waits for the device.

Legend: T tokens, E experts, k experts per token, R = T * k routed rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels.gpu import checks, reference, serving
from moelight.kernels.gpu.grouped import on_device
from moelight.kernels.gpu.pages import FLOATS

_ROUTE_NUMBERS = 2048
_COMBINE_COLUMNS = 1024


def route(
    logits: Tensor, top_k: int, *, normalize: bool, weights_in_model_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights float32 [T, k] and ids int32 [T, k] of the k most likely experts, ids ascending.

    logits  float32, bfloat16 or float16, contiguous within rows
    Softmax over all experts in float32, then the k largest; of equals the lowest id wins. ``normalize`` makes a token's
    weights sum to one; ``weights_in_model_dtype`` rounds them to the dtype of the logits.

    Raises ValueError, naming the argument, for a wrong type, dtype, shape, stride or number.
    """
    checks.check_tensor("logits", logits, FLOATS, 2)
    checks.check_rows("logits", logits)
    tokens, experts = logits.shape
    checks.check_integer("top_k", top_k, 1, experts)
    if not serving.serves(logits.device, logits.dtype)[0]:
        return reference.route(logits, top_k, normalize=normalize, narrow=weights_in_model_dtype)
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
            BY_HAND=_by_hand(logits),
            BT=height,
            PADDED=padded,
        )
    return weights, ids


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by expert, then token.

    ids int32 or int64 [T, k] -> tokens int64 [R] and places int64 [T, k] for `expert_ffn` and `combine`, and offsets
    int32 [E + 1].

    Raises ValueError, naming the argument, for a wrong type, dtype, shape or number.
    """
    checks.check_tensor("ids", ids, (torch.int32, torch.int64), 2)
    checks.check_integer("experts", experts, 1)
    checks.check_indices("ids", ids, experts)
    top_k = ids.shape[1]
    ordered, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return order // max(1, top_k), places.view(ids.shape), offsets


def combine(
    results: Tensor, weights: Tensor, places: Tensor, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """The weighted sum of a token's experts, in float32 and in the order of k -> ``out``, or a new [T, H].

    results  [R, H] float32, bfloat16 or float16, contiguous
    weights  float32 [T, k], k at least 1
    places   int64 [T, k]: the row of each in ``results``; on a device they are bounded, not checked
    out      [T, H] in the dtype of ``results`` or float32, contiguous
    add      begin with the contents of ``out``, not with zero

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, layout or index.
    """
    checks.check_tensor("results", results, FLOATS, 2)
    checks.check_shape("results", results, tuple(results.shape))
    checks.check_tensor("weights", weights, (torch.float32,), 2, results.device)
    checks.check_shape("weights", weights, tuple(weights.shape))
    tokens, top_k = weights.shape
    if top_k < 1 or (tokens and not results.shape[0]):
        raise ValueError(f"weights: {tokens} tokens with {top_k} experts have no rows in results")
    checks.check_tensor("places", places, (torch.int64,), 2, results.device)
    checks.check_shape("places", places, (tokens, top_k))
    checks.check_indices("places", places, results.shape[0])
    width = results.shape[1]
    if out is None:
        if add:
            raise ValueError("out: must be given, to be added to")
        out = torch.empty((tokens, width), dtype=results.dtype, device=results.device)
    else:
        checks.check_tensor("out", out, (results.dtype, torch.float32), 2, results.device)
        checks.check_shape("out", out, (tokens, width))
    if not out.numel():
        return out
    if not serving.serves(results.device, results.dtype)[0]:
        return reference.combine(results, weights, places, out, add=add)
    from moelight.kernels.gpu import routing_triton

    step = min(_COMBINE_COLUMNS, 1 << (width - 1).bit_length())
    with on_device(results.device):
        routing_triton.combine[(tokens, -(-width // step))](
            results,
            weights,
            places,
            out,
            results.shape[0],
            width,
            TOP_K=top_k,
            ADD=bool(add),
            BY_HAND=_by_hand(out),
            BW=step,
        )
    return out


def _by_hand(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
