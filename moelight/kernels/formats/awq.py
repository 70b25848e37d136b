"""AWQ (`moelight.formats.awq`)."""

from __future__ import annotations

from torch import Tensor

from moelight.formats.awq import AWQFormat
from moelight.kernels.formats.reference import ByColumnReference, Tensors, by_output, codes_by_row, group_of

_OFFSETS = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of each of its eight rows


class AWQReference(ByColumnReference):
    """Words [C, R / 8], scales [G, R], packed zero points [G, R / 8]."""

    def values(self, stored: AWQFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, zero = stored.names
        codes = codes_by_row(tensors[weight], stored.bits, begin, end, _OFFSETS)
        zeros = codes_by_row(tensors[zero], stored.bits, begin, end, _OFFSETS)
        return by_output(codes, zeros, tensors[scale][:, begin:end], group_of(stored, columns, codes.device))
