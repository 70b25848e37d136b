"""MXFP4 (`moelight.formats.mxfp4`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.mxfp4 import MXFP4Format
from moelight.kernels.formats.reference import E8M0_BIAS, Encoder, Tensors, WholeNumbers, e2m1_values, nibbles

_EXPONENT = 2  # of the largest power of two in E2M1
_MANTISSA_BITS = 23


class MXFP4Reference(Encoder):
    """Bytes [R, C / 2] of two codes each, exponents [R, C / 32] biased by 127."""

    code_dtype = torch.uint8

    def values(self, stored: MXFP4Format, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale = stored.names
        pairs = tensors[weight][begin:end].reshape(end - begin, -1)
        values = e2m1_values(pairs).view(end - begin, columns // stored.group, stored.group)
        exponents = tensors[scale].view(torch.uint8)[begin:end].reshape(end - begin, -1, 1).int() - E8M0_BIAS
        return torch.ldexp(values, exponents).flatten(1)

    def integers(self, stored: MXFP4Format, tensors: Tensors, rows: int, columns: int) -> WholeNumbers:
        """Twice the values of the codes, and half the scales."""
        weight, scale = stored.names
        exponents = tensors[scale].view(torch.uint8).reshape(rows, -1).int()
        ones = {weight: tensors[weight], scale: torch.full_like(exponents, E8M0_BIAS + 1, dtype=torch.uint8)}
        twice = self.values(stored, ones, 0, rows, columns)
        halves = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents - (E8M0_BIAS + 1))
        return WholeNumbers(twice.int(), halves, *stored.integer_groups(columns))

    def rounded_scales(self, stored: MXFP4Format, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """The power of two below the largest magnitude, or above from 1.75 times that on."""
        rounded = largest.view(torch.int32) + (1 << (_MANTISSA_BITS - 2))
        exponents = (rounded >> _MANTISSA_BITS) - _EXPONENT
        return torch.where(largest == 0, E8M0_BIAS, exponents.clamp_(0, 254)).to(torch.uint8)

    def codes(self, stored: MXFP4Format, quotients: Tensor) -> Tensor:
        return nibbles(_e2m1(quotients))


def _e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, plus 8 if negative. The codes of each binade are on a line,
    and the code is the least of the three lines."""
    negative = (values < 0).view(torch.int8) << 3
    values.abs_().clamp_(max=6.0)
    code = (values * 2).round_()
    torch.minimum(code, values.round().add_(2), out=code)
    torch.minimum(code, (values / 2).round_().add_(4), out=code)
    return (code.to(torch.int8) | negative).view(torch.uint8)
