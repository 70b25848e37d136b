"""Reference implementations of linear layers and experts in plain torch, with weights in any stored form.

Callers check the arguments (as `ffn.py` does).

Legend: T tokens, N rows of a weight, K its columns, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


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
