"""8-bit codes times scales (`moelight.formats.fp8`, `moelight.formats.int8`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.scaled import ScaledFormat
from moelight.kernels.formats.reference import Encoder, Tensors, signed_codes

_MAX_E4M3 = 448.0


class ScaledReference(Encoder):
    """Codes [R, C], scales and zero points [row groups, G]."""

    def values(self, stored: ScaledFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scales, *zeros = (tensors[name] for name in stored.names if name in tensors)
        result = weight[begin:end].float()
        if stored.zero_points:
            result = result - _by_column(stored, _by_row(stored, zeros[0], begin, end, columns), columns)
        return result * _by_column(stored, _by_row(stored, scales, begin, end, columns), columns)

    def scales(self, stored: ScaledFormat, tensors: Tensors, rows: int, columns: int) -> Tensor:
        return _by_row(stored, tensors[stored.names[1]], 0, rows, columns)


class Int8Reference(ScaledReference):
    """Signed bytes."""

    code_dtype = torch.int8

    def codes(self, stored: ScaledFormat, quotients: Tensor) -> Tensor:
        return signed_codes(stored.bits, quotients).view(torch.uint8)


class FP8Reference(ScaledReference):
    """E4M3."""

    code_dtype = torch.float8_e4m3fn

    def max_code(self, stored: ScaledFormat) -> float:
        return _MAX_E4M3

    def codes(self, stored: ScaledFormat, quotients: Tensor) -> Tensor:
        return quotients.clamp_(-_MAX_E4M3, _MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def _by_row(stored: ScaledFormat, grid: Tensor, begin: int, end: int, columns: int) -> Tensor:
    """The values [R, G] of a grid of blocks."""
    grid = grid.view(torch.float8_e8m0fnu) if grid.dtype == torch.uint8 else grid
    blocks = grid.float().reshape(-1, stored.groups(columns))
    rows = torch.arange(begin, end, device=blocks.device)
    return blocks[rows // stored.group_rows if stored.group_rows else torch.zeros_like(rows)]


def _by_column(stored: ScaledFormat, groups: Tensor, columns: int) -> Tensor:
    """The value of each column [R, C or 1] from one for each group."""
    return groups.repeat_interleave(stored.group, dim=1)[:, :columns] if stored.group else groups
