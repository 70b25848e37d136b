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


GATE = UP = (2, 3)  # I = 2, H = 3
WAYS = {
    "joined": ((0, (3, 1)), (6, (3, 1)), {"gate_up": (0, (4, 3), False), "down": (12, (3, 2), False)}),
    "interleaved": ((0, (6, 1)), (3, (6, 1)), {"gate_up": (0, (4, 3), False), "down": (12, (3, 2), False)}),
    "joined by columns": ((0, (1, 4)), (2, (1, 4)), {"gate_up": (0, (4, 3), True), "down": (12, (3, 2), False)}),
    "apart by columns": (
        (0, (1, 2)),
        (6, (1, 2)),
        {"gate_up": (0, (2, 3), True), "up": (6, (2, 3), True), "down": (12, (3, 2), False)},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_gate_and_up_of_floats_are_one_matrix_where_they_lie_so(way: str) -> None:
    """Whatever the dtype that pages are read as, and without alignment."""
    gate, up, expected = WAYS[way]
    info = TensorInfo(name="both", file=Path("model"), dtype="BF16", shape=(12,), offset=0, nbytes=24)
    down = TensorInfo(name="down", file=Path("model"), dtype="BF16", shape=(6,), offset=24, nbytes=12)
    places = {"gate": StridedMatrix(gate[0], GATE, gate[1]), "up": StridedMatrix(up[0], UP, up[1])}
    places["down"] = StridedMatrix(12, (3, 2), (2, 1))
    pages = lay_out_pages({Page(layer=0, expert=expert): (info, down) for expert in range(2)}, {0: places})
    for itemsize, held in ((2, pages), (4, pages.read_as("F32"))):
        (layout,) = held.layouts
        assert held.sizes == (18 * itemsize,) and layout.interleaved == (way == "interleaved")
        arranged = {
            name: (matrix.tensors[".weight"].offset // itemsize, matrix.shape, matrix.transposed)
            for name, matrix in layout.parts.items()
        }
        assert arranged == expected
