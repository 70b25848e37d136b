"""GPTQ (`moelight.formats.gptq`), and what it shares with AWQ."""

from __future__ import annotations

from torch import Tensor

from moelight.formats.gptq import GPTQFormat, WordsByColumn
from moelight.kernels.formats.reference import Reference, Tensors, group_of, words


class ByColumnReference(Reference):
    """Matrices that are stored by columns, scales [G, R]."""

    def scales(self, stored: WordsByColumn, tensors: Tensors, rows: int, columns: int) -> Tensor:
        return tensors[stored.names[1]].float().t()


class GPTQReference(ByColumnReference):
    """Words [C / codes a word, R], scales [G, R], packed zero points [G, R / codes a word], order [C]."""

    def values(self, stored: GPTQFormat, tensors: Tensors, begin: int, end: int, columns: int) -> Tensor:
        weight, scale, zero, order = stored.names
        codes = words(tensors[weight][:, begin:end].unsqueeze(1), stored.bits, dim=1).flatten(0, 1)
        zeros = codes_by_row(tensors[zero], stored.bits, begin, end)
        zeros = (zeros + stored.zero_bias) & ((1 << stored.bits) - 1)
        groups = tensors[order].long() if stored.order else group_of(stored, columns, codes.device)
        return by_output(codes, zeros, tensors[scale][:, begin:end], groups)


def codes_by_row(packed: Tensor, bits: int, begin: int, end: int, offsets: tuple[int, ...] | None = None) -> Tensor:
    """Codes [any, R] of rows ``begin`` to ``end`` out of words ``packed`` [any, R / codes a word]. ``offsets``: the
    offset in a word of each of its rows."""
    per_word = 32 // bits
    first, last = begin // per_word, -(-end // per_word)
    codes = words(packed[:, first:last].unsqueeze(-1), bits)
    if offsets is not None:
        codes = codes[..., list(offsets)]
    return codes.flatten(1)[:, begin - first * per_word :][:, : end - begin]


def by_output(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(codes [C, R] - zeros [G, R]) x scales [G, R], as [R, C]."""
    return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).t().contiguous()
