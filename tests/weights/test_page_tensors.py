"""Floats beside quantised matrices in a page lie as the checkpoint has them, also square ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.schedule import Page
from moelight.formats.plain import PLAIN_FORMATS
from moelight.weights.expert_pages import lay_out_pages
from moelight.weights.page_layout import StridedMatrix
from moelight.weights.source import TensorInfo


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 8)])
def test_floats_by_columns_are_transposed(rows: int, columns: int) -> None:
    count = rows * columns
    infos = tuple(
        TensorInfo(name=name, file=Path("model"), dtype="BF16", shape=shape, offset=0, nbytes=2 * count)
        for name, shape in (("up", (columns, rows)), ("down", (columns, rows)))
    )
    places = {
        "up": StridedMatrix(0, (rows, columns), (1, rows)),
        "down": StridedMatrix(count, (columns, rows), (rows, 1)),
    }
    (layout,) = lay_out_pages({Page(layer=0, expert=0): infos}, {0: places}).layouts
    up, down = layout.parts["gate_up"], layout.parts["down"]
    assert up.stored == down.stored == PLAIN_FORMATS["BF16"]
    assert up.transposed and up.shape == (rows, columns) and not down.transposed and down.shape == (columns, rows)
    tensors = [matrix.tensors[".weight"] for matrix in (up, down)]
    assert [(tensor.offset, tensor.shape) for tensor in tensors] == [(0, (columns, rows)), (2 * count, (columns, rows))]
