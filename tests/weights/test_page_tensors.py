"""Floats beside quantised matrices in a page lie as the checkpoint has them, also square ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.schedule import Page
from moelight.weights.page_layout import PageLayout, StridedMatrix
from moelight.weights.quantized_pages import PageTensor, lay_out_pages
from moelight.weights.source import TensorInfo


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 8)])
def test_floats_by_columns_are_transposed(rows: int, columns: int) -> None:
    count = rows * columns
    infos = tuple(
        TensorInfo(name=name, file=Path("model"), dtype="BF16", shape=shape, offset=0, nbytes=2 * count)
        for name, shape in (("up", (columns, rows)), ("down", (columns, rows)))
    )
    layout = PageLayout(
        elements=2 * count,
        up=StridedMatrix(offset=0, shape=(rows, columns), strides=(1, rows)),
        down=StridedMatrix(offset=count, shape=(columns, rows), strides=(rows, 1)),
    )
    matrices = dict(lay_out_pages({Page(layer=0, expert=0): infos}, {0: layout}).layouts[0])
    up, down = matrices["gate_up"], matrices["down"]
    assert isinstance(up, PageTensor) and isinstance(down, PageTensor)
    assert up.transposed and up.shape == (columns, rows) and up.offset == 0
    assert not down.transposed and down.shape == (columns, rows) and down.offset == 2 * count
