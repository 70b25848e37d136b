"""NVFP4 (`moelight.formats.nvfp4`)."""

from __future__ import annotations

from torch import Tensor

from moelight.formats.nvfp4 import NVFP4Format
from moelight.kernels.formats.reference import Reference, Tensors, e2m1_values


class NVFP4Reference(Reference):
    """Bytes [R, C / 2] of two codes each, E4M3 scales [R, C / 16], a float32 number [1]."""

    def values(self, stored: NVFP4Format, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, number = stored.names
        pairs = tensors[weight][begin:end].reshape(end - begin, -1)
        values = e2m1_values(pairs).view(end - begin, -1, stored.group)
        scales = tensors[scale].reshape(-1, stored.groups(columns))[begin:end].float().unsqueeze(-1)
        scales = scales / tensors[number] if stored.divides else scales * tensors[number]
        return (values * scales).flatten(1)
