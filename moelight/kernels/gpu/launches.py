"""What a launch of the grouped kernels needs beside the table of matrices: its tile, and which rows each block has."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels.activations import Activation
from moelight.kernels.device import compute_capability, on_host
from moelight.kernels.gpu import tiles
from moelight.kernels.gpu.pages import ExpertTable

_MAP_NUMBERS = 4096


def tile_of(
    pages: ExpertTable, part: str, x: Tensor, activation: Activation, mean_rows: float, *, wide: bool = False
) -> tiles.Tile:
    """The tile of the product of ``x`` with the matrices ``part``, of ``mean_rows`` rows an expert."""
    card = tiles.UNITS_SINCE if on_host(x) else compute_capability(x.device.index)
    matrices = 2 if part == "gate_up" and activation.gated else 1
    stored = pages.forms[part].stored
    if pages.rounds(part):
        group, _ = stored.integer_groups(x.shape[1])
        scattered = stored.scattered
        return tiles.choose_integers(card, group=group, mean_rows=mean_rows, matrices=matrices, scattered=scattered)
    itemsize = torch.float32.itemsize if wide else x.element_size()
    unpacks = pages.floats is None
    return tiles.choose(card, itemsize=itemsize, mean_rows=mean_rows, matrices=matrices, unpacks=unpacks)


def row_slots(offsets: Tensor, pages: ExpertTable, rows: int, height: int) -> Tensor:
    """Blocks of at most ``height`` rows of one expert: int32 [n, 3] (page, first row, row after the expert's last).

    In order of rows, then unused ones with page -1; n is the most that ``rows`` rows can need.
    """
    from moelight.kernels.gpu import grouped_triton

    count = (rows + min(rows, pages.experts) * (height - 1)) // height
    slots = torch.empty((count, 3), dtype=torch.int32, device=offsets.device)
    padded = 1 << (pages.experts - 1).bit_length()
    step = max(1, min(64, _MAP_NUMBERS // padded))
    grouped_triton.map_slots[(-(-count // step),)](
        offsets, pages.index, slots, pages.experts, pages.pages, rows, count, BM=height, PADDED=padded, SLOTS=step
    )
    return slots
