"""MLX's affine groups (`moelight.formats.mlx`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.mlx import MLXFormat
from moelight.kernels.formats.reference import Reference, Tensors, group_of


class MLXReference(Reference):
    """Words [R, C x bits / 32], scales and biases [R, G]."""

    def values(self, stored: MLXFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, bias = (tensors[name][begin:end] for name in stored.names)
        codes = _codes(weight.contiguous().view(torch.uint8), stored.bits, columns)
        groups = group_of(stored, columns, weight.device)
        return codes.float() * scale.float()[:, groups] + bias.float()[:, groups]


def _codes(values: Tensor, bits: int, columns: int) -> Tensor:
    """Codes [R, C] of ``bits`` bits out of bytes [R, C x bits / 8], which are one string of bits."""
    first = torch.arange(columns, device=values.device) * bits
    low = first // 8
    high = (low + 1).clamp_(max=values.shape[1] - 1)
    both = values[:, low].int() | (values[:, high].int() << 8)
    return (both >> (first % 8).int()) & ((1 << bits) - 1)
