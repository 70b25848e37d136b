"""Reference implementations of the GPU's kernels in plain torch: correct on any device, one expert after another.

Callers check the arguments.

Legend: R routed rows, T tokens, E experts, k experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from moelight.kernels.gpu.pages import PageTable
from moelight.kernels.reference import route_topk


def dequantised(weight: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """Values of stored numbers [rows, inputs] (uint8: two a byte): in float32, or unchanged without a scale."""
    if scale is None:
        return weight
    if weight.dtype == torch.uint8:
        weight = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1).to(torch.int8) - 8
    if group == 0:
        return weight.float() * scale.float().unsqueeze(1)
    return weight.float() * scale.float().repeat_interleave(group, dim=1)[:, : weight.shape[1]]


def activated(gate: Tensor, up: Tensor, activation: str, clamp: float) -> Tensor:
    """act(gate) * up, elementwise."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def expert_ffn(
    x: Tensor, pages: PageTable, offsets: Tensor, *, activation: str, clamp: float, tokens: Tensor | None, out: Tensor
) -> Tensor:
    """`grouped.expert_ffn` into ``out`` [R, H]; reads ``offsets``, and so waits for the device."""
    result = torch.zeros_like(out)
    source = x if tokens is None else x[tokens]
    for e, (first, last) in enumerate(pairwise(offsets.tolist())):
        gate_up, down = pages.parts["gate_up"][e], pages.parts["down"][e]
        if first == last or gate_up is None or down is None:
            continue
        wide = _linear(source[first:last], pages, "gate_up", gate_up, e).float()
        active = activated(wide[:, : pages.width], wide[:, pages.width :], activation, clamp).to(x.dtype)
        result[first:last] = _linear(active, pages, "down", down, e)
    return out.copy_(result)


def _linear(x: Tensor, pages: PageTable, part: str, weight: Tensor, expert: int) -> Tensor:
    scales, biases = pages.parts[f"{part}_scale"], pages.parts[f"{part}_bias"]
    dense = dequantised(weight, scales[expert] if scales else None, pages.group).to(x.dtype)
    bias = biases[expert] if biases else None
    return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))


def route(logits: Tensor, top_k: int, *, normalize: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """`routing.route`, in torch."""
    weights, ids = route_topk(logits, top_k, normalize)
    if narrow:
        weights = weights.to(logits.dtype).float()
    ids, rank = ids.sort(dim=-1)
    return weights.gather(-1, rank), ids.to(torch.int32)


def combine(results: Tensor, weights: Tensor, places: Tensor, out: Tensor, *, add: bool) -> Tensor:
    """`routing.combine`, in torch."""
    total = out.float() if add else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for rank in range(weights.shape[1]):
        total.addcmul_(results[places[:, rank]].float(), weights[:, rank : rank + 1])
    return out.copy_(total)
