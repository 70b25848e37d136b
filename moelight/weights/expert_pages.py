"""Experts in their pages: where the tensors of each matrix are in a page, and the stored bytes that make it.

Quantised matrices keep their tensors as they are stored, one after another, each at a multiple of 16 bytes; experts may
be stored in different formats. Where all are floats, a page is their values one after another, in the dtype that it is
read as. Does not depend on models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.formats.experts import ExpertLayout
from moelight.formats.format import ITEM_BYTES, PAGE_ALIGNMENT, SHAPE, RepackTable
from moelight.formats.matrix import Matrix
from moelight.formats.plain import PLAIN_FORMATS
from moelight.kernels.repack import RowOrder, transposition
from moelight.weights.page_layout import Places, StridedMatrix, joined_pair
from moelight.weights.stored_matrix import TORCH
from moelight.weights.tensor_info import StoredMatrix, TensorInfo, row_major


class PageTensor(NamedTuple):
    """A tensor of a page: ``nbytes`` bytes from ``offset`` of the page on, numbers of ``dtype`` (a safetensors name) in
    ``shape``. ``table``: how it is reordered on arrival, to lie so; None: it lies as it is stored."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    table: RepackTable | RowOrder | None = None

    def of(self, page: Tensor) -> Tensor:
        """View of ``page`` (uint8)."""
        return page[self.offset : self.offset + self.nbytes].view(TORCH[self.dtype]).view(self.shape)


PageLayout = ExpertLayout[Matrix[PageTensor]]


class GroupOrder(NamedTuple):
    """What a tensor that says the group of each column may hold: numbers below ``groups``. ``counted``: columns of the
    groups that it has to count for its matrix to be repacked; None: the matrix is not."""

    groups: int
    counted: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPages:
    """The pages of a checkpoint's experts.

    Attributes:
        pieces: the stored tensors that make each page, in order.
        layouts: every layout of a page; ``layout_ids``: the index of that of each page.
        sizes: bytes of a page of each layout.
        dtype: safetensors name of the values of pages of floats; None: pages keep their stored bytes.
        orders: those of tensors that say the group of each column, by name.
        is_repacked: `repacked` made these pages.
    """

    pieces: Mapping[Page, tuple[TensorInfo, ...]]
    layouts: tuple[PageLayout, ...]
    layout_ids: Mapping[Page, int]
    sizes: tuple[int, ...]
    dtype: str | None
    orders: Mapping[str, GroupOrder]
    is_repacked: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the largest page."""
        return max(self.sizes, default=0)

    @property
    def ids_by_layer(self) -> dict[int, list[int]]:
        """The layouts of the pages of each layer's experts."""
        ids: dict[int, list[int]] = {}
        for page in sorted(self.layout_ids):
            ids.setdefault(page.layer, []).append(self.layout_ids[page])
        return ids

    def page_bytes(self, layers: int) -> list[list[int]]:
        """Bytes of the page of each expert of each of ``layers`` layers; none without experts."""
        ids = self.ids_by_layer
        return [[self.sizes[layout_id] for layout_id in ids.get(layer, ())] for layer in range(layers)]

    @property
    def turned_bytes(self) -> int:
        """Bytes of a page, on average and rounded up, that are turned on arrival."""
        turned = [sum(tensor.nbytes for tensor in _turned(layout)) for layout in self.layouts]
        return -(-sum(turned[layout_id] for layout_id in self.layout_ids.values()) // max(len(self.layout_ids), 1))

    def bytes_of(self, page: Page) -> int:
        """Bytes of a whole page."""
        return self.sizes[self.layout_ids[page]]

    def tables(self) -> list[dict[int, RepackTable | RowOrder | None]]:
        """The tables by which tensors of each layout are reordered on arrival, by their offsets."""
        return [{tensor.offset: tensor.table for tensor in _turned(layout)} for layout in self.layouts]

    def repacked(self) -> ExpertPages:
        """Return the pages with GPTQ and AWQ matrices repacked to packed integers on arrival; those with act-order stay
        as stored."""
        return replace(self, layouts=tuple(layout.map(_repacked) for layout in self.layouts), is_repacked=True)

    def read_as(self, dtype: str) -> ExpertPages:
        """Return the pages whose floats are converted to ``dtype`` when they are read; others keep their bytes."""
        if self.dtype in (None, dtype):
            return self
        layouts = tuple(layout.map(partial(_converted, dtype)) for layout in self.layouts)
        sizes = tuple(size // ITEM_BYTES[self.dtype] * ITEM_BYTES[dtype] for size in self.sizes)
        return replace(self, layouts=layouts, sizes=sizes, dtype=dtype)


def _turned(layout: PageLayout) -> Iterator[PageTensor]:
    tensors = (tensor for matrix in layout.parts.values() for tensor in matrix.tensors.values())
    return (tensor for tensor in tensors if tensor.table is not None)


def _converted(dtype: str, matrix: Matrix[PageTensor]) -> Matrix[PageTensor]:
    before, after = ITEM_BYTES[matrix.stored.codes], ITEM_BYTES[dtype]
    return replace(matrix, stored=PLAIN_FORMATS[dtype]).map(
        lambda tensor: PageTensor(tensor.offset // before * after, tensor.nbytes // before * after, dtype, tensor.shape)
    )


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


def lay_out_pages(
    pages: Mapping[Page, tuple[TensorInfo, ...]],
    places: Mapping[int, Places],
    *,
    dense: bool = False,
    unpacks: bool = False,
) -> ExpertPages:
    """The pages of experts given as tensors of a checkpoint of plain matrices. Raises CheckpointError for matrices that
    cannot be taken by themselves.

    Args:
        places: where the values are in the pages of each layer.
        dense: pages are those of the layers of a dense model, whose matrices have names of their own.
        unpacks: pages are floats, and quantised matrices are unpacked when they are read.
    """
    quantised = not unpacks and any(info.matrices for infos in pages.values() for info in infos)
    ids: dict[tuple[object, ...], int] = {}
    numbered: dict[tuple[PageLayout, int], int] = {}
    layout_ids: dict[Page, int] = {}
    pieces: dict[Page, tuple[TensorInfo, ...]] = {}
    orders: dict[str, GroupOrder] = {}
    for page, infos in pages.items():
        laid_out = infos if quantised else [replace(info, matrices=(), turned=False) for info in infos]
        parts, where = [info.stored() for info in laid_out], places[page.layer]
        held = tuple(info for part in parts for suffix, info in part.tensors.items() if suffix != SHAPE)
        kinds = ((part.stored, part.heads) for part in parts)
        key = (id(where), *kinds, *((info.dtype, info.nbytes) for info in held))
        if key not in ids:
            segments, nbytes = _segments(laid_out, parts, PAGE_ALIGNMENT if quantised else 1)
            named, interleaved = (where, False) if dense else _arranged(where, segments)
            taken = {name: _segment_at(segments, strided).take(strided) for name, strided in named.items()}
            layout = ExpertLayout(parts=taken, interleaved=interleaved)
            ids[key] = numbered.setdefault((layout, nbytes), len(numbered))
        layout_ids[page], pieces[page] = ids[key], held if quantised else infos
        orders.update(_orders(parts))
    sizes = [nbytes for _, nbytes in numbered]
    return ExpertPages(
        pieces=MappingProxyType(pieces),
        layouts=tuple(layout for layout, _ in numbered),
        layout_ids=MappingProxyType(layout_ids),
        sizes=(max(sizes),) * len(sizes) if dense and not quantised else tuple(sizes),
        dtype=None if quantised else next((infos[0].dtype for infos in pages.values()), None),
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
            if part.strides == (1, rows) and (columns, rows) == held.shape:
                return _transposed(info, held)
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}, which is quantised, holds matrices [{rows}, {columns}] "
                "that are not stored by themselves; use the checkpoint that is not quantised"
            )
        if not by_rows and part.strides != (1, rows):
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}: an expert's rows are not together, so they are no page; save the "
                "model again with transformers 5"
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


def _segments(infos: Sequence[TensorInfo], parts: Sequence[StoredMatrix], alignment: int) -> tuple[list[_Segment], int]:
    """The segments of the page of ``infos``, which are stored as ``parts``, and its bytes; one of floats that are not
    aligned."""
    segments, at, begin = list[_Segment](), 0, 0
    for info, part in zip(infos, parts, strict=True):
        tensors = {}
        for suffix, tensor in part.tensors.items():
            if suffix != SHAPE:
                order = RowOrder(part.rows, part.heads) if part.heads else None
                tensors[suffix] = PageTensor(at, tensor.nbytes, tensor.dtype, tensor.shape, order)
                at += align_up(tensor.nbytes, alignment)
        matrix = Matrix(stored=part.stored, rows=part.rows, columns=part.columns, tensors=tensors)
        segments.append(_Segment(info, matrix, begin, info.nbytes // ITEM_BYTES[info.dtype]))
        begin += segments[-1].size
    if alignment == 1:
        first = segments[0].matrix.map(lambda tensor: tensor._replace(nbytes=at, shape=(begin,)))
        segments = [_Segment(infos[0], replace(first, columns=begin), 0, begin)]
    return segments, at


def _segment_at(segments: Sequence[_Segment], strided: StridedMatrix) -> _Segment:
    return next(segment for segment in reversed(segments) if segment.begin <= strided.offset)


def _arranged(places: Places, segments: Sequence[_Segment]) -> tuple[Places, bool]:
    """The ``places`` by the names of `cpu_expert_ffn`, and whether rows of gate and up alternate. They are one matrix
    only if they are stored so, and their biases alike."""
    both, biases = (
        pair if pair and any(segment.holds(pair[0]) for segment in segments) else None
        for pair in (joined_pair(places), joined_pair(places, "_bias"))
    )
    biased = "gate_bias" in places
    if both is not None and (not biased or (biases is not None and biases[1] == both[1])):
        first, interleaved = {"gate_up": both[0]} | ({"gate_up_bias": biases[0]} if biased and biases else {}), both[1]
    else:
        names = {"gate": "gate_up", "up": "up"} if "gate" in places else {"up": "gate_up"}
        named = {f"{name}{end}": f"{new}{end}" for name, new in names.items() for end in ("", "_bias")}
        first, interleaved = {named[name]: matrix for name, matrix in places.items() if name in named}, False
    return first | {name: matrix for name, matrix in places.items() if name.startswith("down")}, interleaved
