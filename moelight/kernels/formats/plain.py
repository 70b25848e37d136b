"""Plain values (`moelight.formats.plain`)."""

from __future__ import annotations

from torch import Tensor

from moelight.formats.plain import PlainFormat
from moelight.kernels.formats.reference import Reference, Tensors


class PlainReference(Reference):
    """Floats as they are."""

    def values(self, stored: PlainFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        return tensors[stored.names[0]][begin:end, :columns].float()
