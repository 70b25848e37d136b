"""Layout of quantised expert matrices in their pages: the tensors of each matrix as they are stored, one after another,
each at a multiple of 16 bytes. Experts may be stored in different formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.formats.experts import ExpertLayout
from moelight.formats.format import ITEM_BYTES, PAGE_ALIGNMENT, SHAPE, RepackTable
from moelight.formats.matrix import Matrix
from moelight.kernels.repack import transposition
from moelight.weights.boxes import row_major
from moelight.weights.page_layout import PageLayout, StridedMatrix
from moelight.weights.stored_matrix import TORCH
from moelight.weights.tensor_info import StoredMatrix, TensorInfo


class PageTensor(NamedTuple):
    """A tensor of a page: ``nbytes`` bytes from ``offset`` of the page on, numbers of ``dtype`` (a safetensors name) in
    ``shape``. ``table``: how it is reordered on arrival, to lie so; None: it lies as it is stored."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    table: RepackTable | None = None

    def of(self, page: Tensor) -> Tensor:
        """View of ``page`` (uint8)."""
        return page[self.offset : self.offset + self.nbytes].view(TORCH[self.dtype]).view(self.shape)


PageMatrices = ExpertLayout[Matrix[PageTensor]]


def _tensors_of(matrices: PageMatrices) -> Iterator[PageTensor]:
    for matrix in matrices.parts().values():
        yield from matrix.tensors.values()


class GroupOrder(NamedTuple):
    """What a tensor that says the group of each column may hold: numbers below ``groups``. ``counted``: columns of the
    groups that it has to count for its matrix to be repacked; None: the matrix is not."""

    groups: int
    counted: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedPages:
    """The pages of a checkpoint's experts.

    Attributes:
        pieces: the stored tensors that make each page, in order.
        layouts: every layout of a page; ``layout_ids``: the index of that of each page.
        sizes: bytes of a page of each layout.
        orders: those of tensors that say the group of each column, by name.
        is_repacked: `repacked` made these pages.
    """

    pieces: Mapping[Page, tuple[TensorInfo, ...]]
    layouts: tuple[PageMatrices, ...]
    layout_ids: Mapping[Page, int]
    sizes: tuple[int, ...]
    orders: Mapping[str, GroupOrder]
    is_repacked: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the largest page."""
        return max(self.sizes)

    @property
    def ids_by_layer(self) -> dict[int, list[int]]:
        """The layouts of the pages of each layer's experts."""
        ids: dict[int, list[int]] = {}
        for page in sorted(self.layout_ids):
            ids.setdefault(page.layer, []).append(self.layout_ids[page])
        return ids

    def page_bytes(self, layers: int) -> list[list[int]]:
        """Bytes of the page of each expert of each of ``layers`` layers; none without experts."""
        sizes: list[list[int]] = [[] for _ in range(layers)]
        for page in sorted(self.layout_ids):
            sizes[page.layer].append(self.bytes_of(page))
        return sizes

    @property
    def turned_bytes(self) -> int:
        """Bytes of a page, on average and rounded up, that are turned on arrival."""
        turned = [
            sum(tensor.nbytes for tensor in _tensors_of(matrices) if tensor.table is not None)
            for matrices in self.layouts
        ]
        return -(-sum(turned[layout_id] for layout_id in self.layout_ids.values()) // max(len(self.layout_ids), 1))

    def bytes_of(self, page: Page) -> int:
        """Bytes of a whole page."""
        return self.sizes[self.layout_ids[page]]

    def tables(self) -> list[dict[int, RepackTable]]:
        """The tables by which tensors of each layout are reordered on arrival, by their offsets."""
        return [
            {tensor.offset: tensor.table for tensor in _tensors_of(matrices) if tensor.table is not None}
            for matrices in self.layouts
        ]

    def repacked(self) -> QuantizedPages:
        """Return the pages with GPTQ and AWQ matrices repacked to packed integers on arrival; those with act-order stay
        as stored."""
        return replace(self, layouts=tuple(matrices.map(_repacked) for matrices in self.layouts), is_repacked=True)


def _repacked(matrix: Matrix[PageTensor]) -> Matrix[PageTensor]:
    by_rows = matrix.stored.repacked_format(*matrix.shape)
    if by_rows is None:
        return matrix
    shapes = {tensor.suffix: tensor.shape for tensor in by_rows.tensors(*matrix.shape)}
    tensors = {}
    for suffix, tensor in matrix.tensors.items():
        table = matrix.stored.repack_table(suffix, tensor.shape, ITEM_BYTES[tensor.dtype])
        if table is not None:
            tensors[suffix] = tensor._replace(shape=shapes[suffix], table=table)
    return replace(matrix, stored=by_rows, tensors=tensors)


def lay_out_pages(pages: Mapping[Page, tuple[TensorInfo, ...]], layouts: Mapping[int, PageLayout]) -> QuantizedPages:
    """The pages of experts given as tensors of `as_matrices`; ``layouts``: where their values are in each layer. Raises
    CheckpointError for matrices that cannot be taken by themselves."""
    ids: dict[tuple[object, ...], int] = {}
    numbered: dict[tuple[PageMatrices, int], int] = {}
    layout_ids: dict[Page, int] = {}
    pieces: dict[Page, tuple[TensorInfo, ...]] = {}
    orders: dict[str, GroupOrder] = {}
    for page, infos in pages.items():
        parts, layout = [info.stored() for info in infos], layouts[page.layer]
        held = [info for part in parts for suffix, info in part.tensors.items() if suffix != SHAPE]
        key = (id(layout), *(part.stored for part in parts), *((info.dtype, info.nbytes) for info in held))
        if key not in ids:
            laid_out = _lay_out(infos, parts, layout)
            ids[key] = numbered.setdefault(laid_out, len(numbered))
        layout_ids[page], pieces[page] = ids[key], tuple(held)
        orders.update(_orders(parts))
    return QuantizedPages(
        pieces=MappingProxyType(pieces),
        layouts=tuple(matrices for matrices, _ in numbered),
        layout_ids=MappingProxyType(layout_ids),
        sizes=tuple(nbytes for _, nbytes in numbered),
        orders=MappingProxyType(orders),
    )


def _orders(matrices: Iterable[StoredMatrix]) -> Iterator[tuple[str, GroupOrder]]:
    for matrix in matrices:
        stored = matrix.stored
        if stored.order:
            counted = None if stored.repacked_format(*matrix.shape) is None else stored.group
            yield matrix.tensors[stored.names[3]].name, GroupOrder(stored.groups(matrix.columns), counted)


class _Segment(NamedTuple):
    """``matrix`` of a page, whose ``size`` values are numbered one after another through the page from ``begin`` on;
    ``info``: the tensor that it is from."""

    info: TensorInfo
    matrix: Matrix[PageTensor]
    begin: int
    size: int

    def holds(self, part: StridedMatrix) -> bool:
        return self.begin <= part.offset and part.offset + math.prod(part.shape) <= self.begin + self.size

    def take(self, part: StridedMatrix) -> Matrix[PageTensor]:
        """The matrix [rows, columns] or bias [rows] at ``part``."""
        info, held = self.info, self.matrix
        rows, columns = (*part.shape, 1)[:2]
        by_rows = part.strides == row_major(part.shape)
        if info.matrices:
            if by_rows and (rows, columns) == held.shape:
                return held if len(part.shape) > 1 else held.map(lambda tensor: tensor._replace(shape=(rows,)))
            if part.transposed and (columns, rows) == held.shape:
                return _transposed(info, held)
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}, which is quantised, holds matrices [{rows}, {columns}] "
                "that are not stored by themselves; use the checkpoint that is not quantised"
            )
        if not by_rows and part.strides != (1, rows):
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}: an expert's rows are not together beside quantised "
                "matrices; use the checkpoint that is not quantised"
            )
        ((suffix, values),) = held.tensors.items()
        itemsize, shape = ITEM_BYTES[values.dtype], part.shape if by_rows else part.shape[::-1]
        offset = values.offset + (part.offset - self.begin) * itemsize
        tensors = {suffix: PageTensor(offset, rows * columns * itemsize, values.dtype, shape)}
        return Matrix(stored=held.stored, rows=rows, columns=columns, tensors=tensors, transposed=not by_rows)


def _transposed(info: TensorInfo, matrix: Matrix[PageTensor]) -> Matrix[PageTensor]:
    """The transpose of ``matrix``: its tensors are transposed on arrival, and its blocks with them."""
    by_rows, tensors = matrix.stored.transposed_format(), dict[str, PageTensor]()
    for suffix, part in matrix.tensors.items() if by_rows is not None else ():
        lines, width = (*part.shape, 1, 1)[:2]
        table = transposition(lines, width, ITEM_BYTES[part.dtype])
        if table is not None:
            tensors[suffix] = part._replace(shape=(width, lines), table=table)
    if by_rows is None or len(tensors) < len(matrix.tensors):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} holds experts by columns, and {matrix.stored.name} is "
            "read by rows only; use a checkpoint with experts one by one, or the one that is not quantised"
        )
    return Matrix(stored=by_rows, rows=matrix.columns, columns=matrix.rows, tensors=tensors)


def _lay_out(
    infos: Sequence[TensorInfo], parts: Sequence[StoredMatrix], layout: PageLayout
) -> tuple[PageMatrices, int]:
    """The matrices of the page of ``infos``, which are stored as ``parts``, and its bytes."""
    segments, at, begin = [], 0, 0
    for info, part in zip(infos, parts, strict=True):
        tensors = {}
        for suffix, tensor in part.tensors.items():
            if suffix != SHAPE:
                tensors[suffix] = PageTensor(at, tensor.nbytes, tensor.dtype, tensor.shape)
                at = align_up(at + tensor.nbytes, PAGE_ALIGNMENT)
        matrix = Matrix(stored=part.stored, rows=part.rows, columns=part.columns, tensors=tensors)
        segments.append(_Segment(info, matrix, begin, info.nbytes // ITEM_BYTES[info.dtype]))
        begin += segments[-1].size

    def take(part: StridedMatrix | None) -> Matrix[PageTensor] | None:
        return (
            None if part is None else next(item for item in reversed(segments) if item.begin <= part.offset).take(part)
        )

    def held(part: StridedMatrix | None) -> StridedMatrix | None:
        return part if part is not None and any(segment.holds(part) for segment in segments) else None

    joined, biases = held(layout.gate_up), held(layout.gate_up_bias)
    apart = layout.gate is not None and (joined is None or (layout.gate_bias is not None and biases is None))
    first_bias = (layout.gate_bias if apart else biases) if layout.gate else layout.up_bias
    first, down = take(layout.gate if apart else joined or layout.up), take(layout.down)
    assert first is not None and down is not None, "every expert has them"
    matrices = ExpertLayout(
        gate_up=first,
        up=take(layout.up) if apart else None,
        down=down,
        gate_up_bias=take(first_bias),
        up_bias=take(layout.up_bias) if apart else None,
        down_bias=take(layout.down_bias),
        interleaved=layout.interleaved and not apart,
    )
    return matrices, at
