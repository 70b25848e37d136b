"""GPTQ (`moelight.formats.gptq`)."""

from __future__ import annotations

from torch import Tensor

from moelight.formats.gptq import GPTQFormat
from moelight.kernels.formats.reference import ByColumnReference, Tensors, by_output, codes_by_row, group_of, words


class GPTQReference(ByColumnReference):
    """Words [C / codes a word, R], scales [G, R], packed zero points [G, R / codes a word], order [C]."""

    def values(self, stored: GPTQFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, zero, order = stored.names
        codes = words(tensors[weight][:, begin:end].unsqueeze(1), stored.bits, dim=1).flatten(0, 1)
        zeros = codes_by_row(tensors[zero], stored.bits, begin, end)
        zeros = (zeros + stored.zero_bias) & ((1 << stored.bits) - 1)
        groups = tensors[order].long() if stored.order else group_of(stored, columns, codes.device)
        return by_output(codes, zeros, tensors[scale][:, begin:end], groups)
