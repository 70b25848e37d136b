"""Layout of the stored bytes of one expert in its page.

Shapes: E experts, H hidden, I expert width. Matrices are given as a linear layer has them: gate and up [I, H], down
[H, I], biases [I] and [H]; the page keeps the order of the checkpoint, which strides describe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import page_shapes
from moelight.weights.boxes import Box, Shape, Tiled, row_major
from moelight.weights.source import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class StridedMatrix:
    """A matrix [rows, columns] or a bias [rows] of a page: at number ``offset``, by ``strides``, in numbers."""

    offset: int
    shape: Shape
    strides: Shape

    @property
    def transposed(self) -> bool:
        """True if the numbers of a column are nearer to each other than those of a row."""
        return self.strides[0] < self.strides[-1]

    def of(self, page: Tensor) -> Tensor:
        """View of ``page``, the numbers of a page [at least a page]."""
        return page.as_strided(self.shape, self.strides, page.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """The places of an expert's matrices in a page of ``elements`` numbers; those that it has not are None."""

    elements: int
    up: StridedMatrix
    down: StridedMatrix
    gate: StridedMatrix | None = None
    gate_bias: StridedMatrix | None = None
    up_bias: StridedMatrix | None = None
    down_bias: StridedMatrix | None = None

    @property
    def interleaved(self) -> bool:
        """True if rows of the gate and of up alternate."""
        return self.gate is not None and 2 * (self.up.offset - self.gate.offset) == self.gate.strides[0]

    @property
    def gate_up(self) -> StridedMatrix | None:
        """The gate and up as one matrix [2 I, H]: up's rows follow the gate's, or alternate with them; else None."""
        gate, up = self.gate, self.up
        return None if gate is None else _joined(gate, up, interleaved=self.interleaved)

    @property
    def gate_up_bias(self) -> StridedMatrix | None:
        """The biases [2 I] of `gate_up`; None if there are none, or they do not lie so."""
        gate, up = self.gate_bias, self.up_bias
        return None if gate is None or up is None else _joined(gate, up, interleaved=self.interleaved)


def _joined(gate: StridedMatrix, up: StridedMatrix, *, interleaved: bool) -> StridedMatrix | None:
    rows, *columns = gate.shape
    step = gate.strides[0] // 2 if interleaved else gate.strides[0]
    if gate.strides != up.strides or up.offset != gate.offset + step * (1 if interleaved else rows):
        return None
    return StridedMatrix(offset=gate.offset, shape=(2 * rows, *columns), strides=(step, *gate.strides[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``count`` stored numbers of ``info`` from number ``begin`` on."""

    info: TensorInfo
    begin: int
    count: int


def usual_layout(model: ModelProfile) -> PageLayout:
    """The layout of a page of gate, up and down, one after the other."""
    shapes = page_shapes(model)
    offsets = accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
    places = {
        name: StridedMatrix(offset=offset, shape=shape, strides=row_major(shape))
        for (name, shape), offset in zip(shapes.items(), offsets, strict=False)
    }
    return PageLayout(elements=sum(map(math.prod, shapes.values())), **places)


class ScatteredError(Exception):
    """An expert's part of the stored tensor ``info`` is not one run of numbers."""

    def __init__(self, info: TensorInfo) -> None:
        super().__init__(info)
        self.info = info


def lay_out(parts: Mapping[str, Tiled]) -> tuple[PageLayout, tuple[Run, ...]]:
    """The layout of a page of the matrices ``parts``, and the runs of stored numbers that make the page, in order.
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
    places = {
        name: StridedMatrix(offset=_place(box, runs), shape=box.shape, strides=box.strides)
        for name, box in boxes.items()
    }
    return PageLayout(elements=sum(run.count for run in runs), **places), tuple(runs)


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
