"""Matrices packed as AutoGPTQ, GPTQModel and AutoAWQ write them, by their specification; equality to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moelight.formats.format import Format
from moelight.formats.matrix import Matrix
from moelight.kernels.quantized import row_blocks
from moelight.weights.stored_matrix import read_matrix
from moelight.weights.tensor_info import StoredMatrix

BIT_COUNTS = (2, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def same_bits(result: Tensor, wanted: Tensor) -> None:
    """Equal to the bit, except that any NaN equals any other."""
    assert result.dtype == wanted.dtype and result.shape == wanted.shape
    lost = result.isnan() & wanted.isnan()
    integers = torch.int32 if result.dtype == torch.float32 else torch.int16
    assert torch.equal(result.view(integers)[~lost], wanted.view(integers)[~lost])


def dequantized(matrix: StoredMatrix, *, max_rows: int = 256) -> Tensor:
    """All values of ``matrix``, unpacked in blocks of ``max_rows`` rows."""
    return torch.cat([block for _, block in row_blocks(read_matrix(matrix), max_rows=max_rows)])


def unpacked(
    stored: Format,
    tensors: Mapping[str, Tensor],
    shape: Sequence[int],
    *,
    max_rows: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """All values of the matrix of ``shape`` in ``tensors``, unpacked in blocks of ``max_rows`` rows."""
    rows, columns = shape
    matrix = Matrix(stored=stored, rows=rows, columns=columns, tensors=tensors)
    blocks = [block for _, block in row_blocks(matrix, max_rows=max_rows, dtype=dtype)]
    assert all(len(block) <= max_rows for block in blocks)
    return torch.cat(blocks)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes [n, m] as int32 words [n x bits / 32, m]: the first row is in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(len(codes) // per_word, codes.shape[1], dtype=torch.int64)
    for position in range(per_word):
        words |= codes[position::per_word].long() << (bits * position)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def pack_gptq(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor, bits: int, bias: int) -> dict[str, Tensor]:
    """Of codes [rows, columns], zero points and scales [groups, rows], the group of each column: GPTQModel's
    ``pack_original``; before, version 1 subtracts one of each zero point."""
    stored = (zeros - bias) & ((1 << bits) - 1)
    return {
        ".qweight": pack_rows(codes.t(), bits),
        ".qzeros": pack_rows(stored.t(), bits).t().contiguous(),
        ".scales": scales,
        ".g_idx": order.int(),
    }


def pack_awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Of codes [rows, columns], zero points and scales [groups, rows]: AutoAWQ's ``WQLinear_GEMM.from_linear``."""

    def interleaved(values: Tensor) -> Tensor:
        ordered = values.view(len(values), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)
        return pack_rows(ordered.t(), 4).t().contiguous()

    return {".qweight": interleaved(codes.t().contiguous()), ".qzeros": interleaved(zeros), ".scales": scales}
