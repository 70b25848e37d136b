"""Layout of quantised expert matrices in their pages: the parts of each matrix as they are stored, one after another,
each at a multiple of 16 bytes. Experts may be stored in different formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.formats.format import ITEM_BYTES, PAGE_ALIGNMENT, SHAPE, Format, RepackTable
from moelight.formats.matrix import Matrix
from moelight.kernels.repack import transposition
from moelight.weights.page_layout import PageLayout, StridedMatrix
from moelight.weights.quantized_checkpoint import QuantizedInfo
from moelight.weights.source import TensorInfo


class PageTensor(NamedTuple):
    """A tensor of a page: ``nbytes`` bytes from ``offset`` of the page on, numbers of ``dtype`` (a safetensors name) in
    ``shape``. ``table``: how it is reordered on arrival, to lie so; None: it lies as it is stored. ``transposed``: it
    holds the columns of a matrix of floats."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    table: RepackTable | None = None
    transposed: bool = False


# The matrices of a page by the names of `cpu_expert_ffn`, in order; a bias, and a matrix that is not quantised, is one
# tensor.
PageMatrices = tuple[tuple[str, Matrix[PageTensor] | PageTensor], ...]


def _tensors_of(matrices: PageMatrices) -> Iterator[PageTensor]:
    for _, matrix in matrices:
        yield from (matrix,) if isinstance(matrix, PageTensor) else matrix.tensors.values()


@dataclass(frozen=True, kw_only=True, slots=True)
class Repacking:
    """How the parts of a page are repacked on arrival: the table of each by its offset in the page. ``orders``: by the
    offsets of tensors that say the group of each column, the columns of the groups that they have to count."""

    tables: Mapping[int, RepackTable]
    orders: Mapping[int, int]

    @classmethod
    def of(cls, matrices: PageMatrices, orders: Mapping[int, int]) -> Repacking:
        """Return the repacking of a page of ``matrices``."""
        tables = {tensor.offset: tensor.table for tensor in _tensors_of(matrices) if tensor.table is not None}
        return cls(tables=MappingProxyType(tables), orders=MappingProxyType(dict(orders)))


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedPages:
    """The pages of a checkpoint's experts.

    Attributes:
        pieces: the stored tensors that make each page, in order.
        layouts: every layout of a page; ``layout_ids``: the index of that of each page.
        sizes: bytes of a page of each layout.
        repacking: how pages of each layout are reordered on arrival, to lie as ``layouts`` says.
        interleaved: rows of gate and up alternate in ``gate_up``.
        groups: of tensors that say the group of each column, by name: how many there are.
    """

    pieces: Mapping[Page, tuple[TensorInfo, ...]]
    layouts: tuple[PageMatrices, ...]
    layout_ids: Mapping[Page, int]
    sizes: tuple[int, ...]
    repacking: tuple[Repacking, ...]
    interleaved: bool = False
    groups: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest page."""
        return max(self.sizes)

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

    def repacking_of(self, page: Page) -> Repacking | None:
        """Return the repacking of ``page`` on arrival; None if no part of it is repacked."""
        repacking = self.repacking[self.layout_ids[page]]
        return repacking if repacking.tables else None

    def repacked(self) -> QuantizedPages:
        """Return the pages with GPTQ and AWQ matrices repacked to packed integers on arrival; those with act-order stay
        as stored."""
        pairs = [_repacked(matrices) for matrices in self.layouts]
        return replace(
            self, layouts=tuple(matrices for matrices, _ in pairs), repacking=tuple(repacking for _, repacking in pairs)
        )


def _repacked(matrices: PageMatrices) -> tuple[PageMatrices, Repacking]:
    """Where the parts of a page of ``matrices`` lie once they are turned, and how they are."""
    result, orders = [], dict[int, int]()
    for name, matrix in matrices:
        by_rows = None if isinstance(matrix, PageTensor) else matrix.stored.repacked_format(*matrix.shape)
        if isinstance(matrix, PageTensor) or by_rows is None:
            result.append((name, matrix))
            continue
        shapes = {part.suffix: part.shape for part in by_rows.tensors(*matrix.shape)}
        tensors = {}
        for suffix, part in matrix.tensors.items():
            table = matrix.stored.repack_table(suffix, part.shape, ITEM_BYTES[part.dtype])
            if table is None:
                orders[part.offset] = matrix.stored.group
            else:
                tensors[suffix] = part._replace(shape=shapes[suffix], table=table)
        result.append((name, replace(matrix, stored=by_rows, tensors=tensors)))
    return tuple(result), Repacking.of(tuple(result), orders)


def lay_out_pages(
    pages: Mapping[Page, tuple[TensorInfo, ...]], layouts: Mapping[int, PageLayout] | None = None
) -> QuantizedPages:
    """The pages of experts given as tensors of `as_matrices`. ``layouts``: of a graph's layers; None: each page is
    gate, up and down, or the first two as one. Raises CheckpointError for matrices that cannot be taken by themselves.
    """
    numbered: dict[PageMatrices, int] = {}
    layout_ids: dict[Page, int] = {}
    pieces: dict[Page, tuple[TensorInfo, ...]] = {}
    groups: dict[str, int] = {}
    sizes: dict[int, int] = {}
    layouts = {} if layouts is None else dict(layouts)
    for page, together in pages.items():
        infos = tuple(half for info in together for half in _apart(info))
        layout = layouts.get(page.layer)
        if layout is not None and layout.interleaved and len(infos) > len(together):
            layout = layouts[page.layer] = layout.apart()
        parts = [_parts(info) for info in infos]
        matrices, nbytes = _page_matrices(infos, parts, layout)
        number = layout_ids[page] = numbered.setdefault(matrices, len(numbered))
        pieces[page] = tuple(location for _, places in parts for _, location in places)
        groups.update(_orders(parts))
        sizes[number] = nbytes
    return QuantizedPages(
        pieces=MappingProxyType(pieces),
        layouts=tuple(numbered),
        layout_ids=MappingProxyType(layout_ids),
        sizes=tuple(sizes[number] for number in range(len(numbered))),
        interleaved=any(layout.interleaved for layout in layouts.values()),
        groups=MappingProxyType(groups),
        repacking=tuple(Repacking.of(matrices, {}) for matrices in numbered),
    )


def _apart(info: TensorInfo) -> tuple[TensorInfo, ...]:
    return info.apart() if isinstance(info, QuantizedInfo) else (info,)


_Parts = tuple[Format | None, list[tuple[str, TensorInfo]]]


def _parts(info: TensorInfo) -> _Parts:
    """The format of ``info`` and the tensors that it stands for."""
    if not isinstance(info, QuantizedInfo):
        return None, [("", info)]
    matrix = info.stored()
    return matrix.stored, [(suffix, location) for suffix, location in matrix.tensors.items() if suffix != SHAPE]


def _orders(parts: Sequence[_Parts]) -> Iterator[tuple[str, int]]:
    for stored, places in parts:
        if stored is not None and stored.order:
            (order,) = (location for suffix, location in places if suffix == stored.names[3])
            yield order.name, stored.groups(order.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """A stored matrix of a page, or numbers that are not quantised: ``count`` of them, where they are numbered one
    after another through the page from ``begin`` on."""

    info: TensorInfo
    tensors: Mapping[str, PageTensor]
    begin: int
    count: int

    def as_matrix(self) -> Matrix[PageTensor] | PageTensor:
        if isinstance(self.info, QuantizedInfo):
            return self._matrix(self.info)
        return self.tensors[""]

    def _matrix(self, info: QuantizedInfo) -> Matrix[PageTensor]:
        matrix = info.stored()
        return Matrix(stored=matrix.stored, rows=matrix.rows, columns=matrix.columns, tensors=self.tensors)

    def holds(self, matrix: StridedMatrix) -> bool:
        return self.begin <= matrix.offset and matrix.offset + math.prod(matrix.shape) <= self.begin + self.count

    def part(self, matrix: StridedMatrix) -> Matrix[PageTensor] | PageTensor:
        """The matrix or bias at ``matrix``."""
        rows, columns = (*matrix.shape, 1)[:2]
        in_order = matrix.strides == ((columns, 1) if len(matrix.shape) > 1 else (1,))
        if isinstance(self.info, QuantizedInfo):
            full = self._matrix(self.info)
            if in_order and (rows, columns) == (full.rows, full.columns):
                return full if len(matrix.shape) > 1 else _bias(full)
            if (columns, rows) == (full.rows, full.columns) and matrix.transposed:
                return self._transposed(full)
            raise CheckpointError(
                f"{self.info.file}: tensor {self.info.name!r}, which is quantised, holds matrices [{rows}, {columns}] "
                "that are not stored by themselves; use the checkpoint that is not quantised"
            )
        stored_part = self.tensors[""]
        size = stored_part.nbytes // self.count
        at = stored_part.offset + (matrix.offset - self.begin) * size
        shape, strides = matrix.shape, matrix.strides
        if not in_order and strides != (1, shape[0]):
            raise CheckpointError(
                f"{self.info.file}: tensor {self.info.name!r}: an expert's rows are not together beside quantised "
                "matrices; use the checkpoint that is not quantised"
            )
        nbytes = math.prod(shape) * size
        return PageTensor(at, nbytes, stored_part.dtype, shape if in_order else shape[::-1], transposed=not in_order)

    def _transposed(self, matrix: Matrix[PageTensor]) -> Matrix[PageTensor]:
        """The transpose of ``matrix``: its parts are transposed on arrival, and its blocks with them."""
        by_rows, tensors = matrix.stored.transposed_format(), dict[str, PageTensor]()
        for suffix, part in matrix.tensors.items() if by_rows is not None else ():
            lines, width = (*part.shape, 1, 1)[:2]
            table = transposition(lines, width, ITEM_BYTES[part.dtype])
            if table is not None:
                tensors[suffix] = part._replace(shape=(width, lines), table=table)
        if by_rows is None or len(tensors) < len(matrix.tensors):
            raise CheckpointError(
                f"{self.info.file}: tensor {self.info.name!r} holds experts by columns, and {matrix.stored.name} is "
                "read by rows only; use a checkpoint with experts one by one, or the one that is not quantised"
            )
        return Matrix(stored=by_rows, rows=matrix.columns, columns=matrix.rows, tensors=tensors)


def _bias(matrix: Matrix[PageTensor]) -> PageTensor:
    """``matrix`` [rows, 1] of floats as a tensor [rows]."""
    (tensor,) = matrix.tensors.values()
    return tensor._replace(shape=(matrix.rows,))


def _page_matrices(
    infos: Sequence[TensorInfo], parts: Sequence[_Parts], layout: PageLayout | None
) -> tuple[PageMatrices, int]:
    """The matrices of the page of ``infos``, and its bytes."""
    segments, at, begin = [], 0, 0
    for info, (_, tensors) in zip(infos, parts, strict=True):
        placed = {}
        for suffix, part in tensors:
            placed[suffix] = PageTensor(at, part.nbytes, part.dtype, part.shape)
            at = align_up(at + part.nbytes, PAGE_ALIGNMENT)
        count = info.nbytes // ITEM_BYTES[info.dtype]
        segments.append(_Segment(info=info, tensors=placed, begin=begin, count=count))
        begin += count
    if layout is None:
        names = ("gate_up", "up", "down") if len(segments) > 2 else ("gate_up", "down")
        return tuple((name, item.as_matrix()) for name, item in zip(names, segments, strict=True)), at
    matrices = []
    for name, matrix in _named(layout, segments):
        holder = next(segment for segment in reversed(segments) if segment.begin <= matrix.offset)
        matrices.append((name, holder.part(matrix)))
    return tuple(matrices), at


def _named(layout: PageLayout, segments: Sequence[_Segment]) -> Iterator[tuple[str, StridedMatrix]]:
    """The matrices of ``layout`` by the names of `cpu_expert_ffn`; gate and up are one only if they are stored so."""

    def held(matrix: StridedMatrix | None) -> StridedMatrix | None:
        return matrix if matrix is not None and any(segment.holds(matrix) for segment in segments) else None

    joined, biases = held(layout.gate_up), held(layout.gate_up_bias)
    apart = layout.gate is not None and (joined is None or (layout.gate_bias is not None and biases is None))
    first_bias = (layout.gate_bias if apart else biases) if layout.gate else layout.up_bias
    places = {
        "gate_up": layout.gate if apart else joined or layout.up,
        "up": layout.up if apart else None,
        "down": layout.down,
        "gate_up_bias": first_bias,
        "up_bias": layout.up_bias if apart else None,
        "down_bias": layout.down_bias,
    }
    return ((name, matrix) for name, matrix in places.items() if matrix is not None)
