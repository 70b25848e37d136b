"""Products with one stored matrix on the GPU: the second launch of the grouped kernels, with one expert, which has all
rows.

Legend: T tokens, R rows of the matrix (outputs), C columns (inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.kernels.activations import SILU
from moelight.kernels.device import Device
from moelight.kernels.gpu import serving, tiles
from moelight.kernels.gpu.pages import ExpertTable, row_slots, tile_of


def matrix_table(matrix: Matrix[Tensor], bias: Tensor | None = None) -> ExpertTable | None:
    """What `stored_linear` multiplies by; None where Triton does not unpack the format, or not where its bytes lie."""
    if matrix.stored.unpacker is None:
        return None
    try:
        return ExpertTable.of_matrix(matrix, bias)
    except ValueError:
        return None


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton multiplies tokens of ``dtype`` on ``device``."""
    return serving.expert_kernel(device, dtype, 1.0, plain=False)[0] == "triton"


def stored_linear(x: Tensor, table: ExpertTable, out: Tensor) -> None:
    """x [T, C], contiguous within rows, times the matrix of ``table``, plus its bias -> ``out`` [T, R], contiguous, of
    x's dtype. Sums in float32."""
    from moelight.kernels.gpu import grouped_triton, programs

    if not len(x):
        return
    with Device(x.device).context():
        tile = tile_of(table, "down", x, SILU, float(len(x)))
        offsets = torch.arange(2, dtype=torch.int32, device=x.device).mul_(len(x))
        slots = row_slots(offsets, table, len(x), tile.rows)
        arguments, constants = programs.arguments_of(table, "down", x, out, slots, None, tile, SILU)
        grid = (len(slots) * -(-out.shape[1] // tile.columns),)
        grouped_triton.grouped[grid](*arguments, **constants, **tiles.launch_options(tile))
