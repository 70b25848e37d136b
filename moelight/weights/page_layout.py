"""Places of the values of one expert in its page.

Shapes: E experts, H hidden, I expert width. Matrices are given as a linear layer has them: gate and up [I, H], down
[H, I], biases [I] and [H]; the page keeps the order of the checkpoint, which strides describe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from moelight.weights.boxes import Box, Tiled
from moelight.weights.tensor_info import Shape, TensorInfo, row_major


class StridedMatrix(NamedTuple):
    """A matrix [rows, columns] or a bias [rows] of a page: from value ``offset`` on, by ``strides``, in values."""

    offset: int
    shape: Shape
    strides: Shape


# By their names: gate, up, down, gate_bias, up_bias, down_bias; those that an expert lacks are left out.
Places = Mapping[str, StridedMatrix]


def joined_pair(places: Places, suffix: str = "") -> tuple[StridedMatrix, bool] | None:
    """The gate and up of ``places`` as one matrix [2 I, H], and whether their rows alternate in it; None if there is no
    gate, or they do not lie so. ``suffix``: "_bias" for the biases [2 I]."""
    gate, up = places.get(f"gate{suffix}"), places.get(f"up{suffix}")
    if gate is None or up is None or gate.strides != up.strides:
        return None
    rows, *columns = gate.shape
    distance, step = up.offset - gate.offset, gate.strides[0]
    if distance not in (rows * step, step / 2):
        return None
    interleaved = distance != rows * step
    strides = (distance if interleaved else step, *gate.strides[1:])
    return StridedMatrix(gate.offset, (2 * rows, *columns), strides), interleaved


def in_a_row(shapes: Mapping[str, Shape]) -> Places:
    """Matrices of ``shapes``, by rows, one after the other."""
    offsets = accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
    pairs = zip(shapes.items(), offsets, strict=False)
    return {name: StridedMatrix(offset, shape, row_major(shape)) for (name, shape), offset in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``count`` stored numbers of ``info`` from number ``begin`` on."""

    info: TensorInfo
    begin: int
    count: int


def piece_names(name: str, count: int) -> list[str]:
    """The names of the ``count`` matrices below one another that make parameter ``name``."""
    return [name] if count == 1 else [f"{name}@{index}" for index in range(count)]


def parameter_of(piece: str) -> str:
    """The parameter that has ``piece``, of `piece_names`."""
    return piece.partition("@")[0]


class ScatteredError(Exception):
    """An expert's part of the stored tensor ``info`` is not one run of numbers."""

    def __init__(self, info: TensorInfo) -> None:
        super().__init__(info)
        self.info = info


def lay_out(parts: Mapping[str, Tiled]) -> tuple[Places, tuple[Run, ...]]:
    """The places of the matrices ``parts`` in their page, and the runs of stored numbers that make the page, in order.
    Raises ScatteredError if one is not a box of stored numbers, or other numbers lie between theirs."""
    for part in parts.values():
        if len(part.boxes) != 1:
            raise ScatteredError(part.boxes[0].info)
    boxes = {name: part.boxes[0] for name, part in parts.items()}
    runs = _runs(list(boxes.values()))
    for name, info in {run.info.name: run.info for run in runs}.items():
        stored = sum(run.count for run in runs if run.info.name == name)
        if stored != sum(math.prod(box.shape) for box in boxes.values() if box.info.name == name):
            raise ScatteredError(info)
    return {name: StridedMatrix(_place(box, runs), box.shape, box.strides) for name, box in boxes.items()}, tuple(runs)


def _runs(boxes: Sequence[Box]) -> list[Run]:
    """The stored numbers from the first to the last of each box; one run of those that meet."""
    runs: list[Run] = []
    for box in boxes:
        begin, end = box.offset, box.offset + box.span
        for index, run in enumerate(runs):
            if run.info.name == box.info.name and begin <= run.begin + run.count and run.begin <= end:
                begin, end = min(begin, run.begin), max(end, run.begin + run.count)
                runs[index] = Run(info=run.info, begin=begin, count=end - begin)
                break
        else:
            runs.append(Run(info=box.info, begin=begin, count=end - begin))
    return runs


def _place(box: Box, runs: Sequence[Run]) -> int:
    """The number of the page at which ``box`` starts."""
    start = 0
    for run in runs:
        if run.info.name == box.info.name and 0 <= box.offset - run.begin < run.count:
            break
        start += run.count
    return start + box.offset - run.begin
