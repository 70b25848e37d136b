"""Tensors that are known by where their numbers are stored: transformers' operations on weights (stack, concatenate,
split, transpose, interleave) run on them, and what comes out says which stored numbers to copy where. Nothing is read.

An operation that computes numbers, rather than moving them, raises NotMovedError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moelight.weights.tensor_info import Shape, TensorInfo, row_major

_MOST_BOXES = 1 << 13


class NotMovedError(Exception):
    """The operation does not only move numbers, or moves them one by one; the text says which."""


class UnequalError(Exception):
    """Tensors that are put together differ from the first one; ``info`` is such a one."""

    def __init__(self, info: TensorInfo, first: TensorInfo) -> None:
        super().__init__(info, first)
        self.info, self.first = info, first


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: from index ``start`` on, ``shape`` numbers, which are numbers ``offset`` + index x ``strides``
    of the stored tensor ``info``."""

    start: Shape
    shape: Shape
    info: TensorInfo
    offset: int
    strides: Shape

    @property
    def span(self) -> int:
        """Numbers of the stored tensor from the first to the last of the box."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def in_order(self) -> bool:
        """True if the box is one run of stored numbers in the order of the box."""
        return all(size == 1 or stride == want for size, stride, want in self._dimensions())

    def _dimensions(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.shape, self.strides, row_major(self.shape), strict=True)

    def along(self, dim: int, begin: int, end: int) -> Box:
        """The part between indices ``begin`` and ``end`` of the box in ``dim``; it starts where the part starts."""
        start, shape = list(self.start), list(self.shape)
        start[dim] += begin
        shape[dim] = end - begin
        offset = self.offset + begin * self.strides[dim]
        return replace(self, start=tuple(start), shape=tuple(shape), offset=offset)

    def moved(self, dim: int, by: int) -> Box:
        start = list(self.start)
        start[dim] += by
        return replace(self, start=tuple(start))

    def apart(self) -> Box:
        """The box in the one that has it of two matrices whose rows alternate (`TensorInfo.matrices`); else itself."""
        info = self.info
        if len(info.matrices) < 2:
            return self
        line = info.matrices[0].columns
        index = self.offset // line % 2
        matrix, shape = info.matrices[index], (*info.shape[:-1], info.shape[-1] // 2)
        (stored,) = matrix.tensors.values()
        one = matrix.as_values(stored.name, info.dtype, shape, turned=info.turned)
        offset, strides = (self.offset - index * line) // 2, (self.strides[0] // 2, *self.strides[1:])
        return replace(self, info=one, offset=offset, strides=strides)

    def with_dimensions(self, at: int, removed: int, inserted: Sequence[tuple[int, int, int]]) -> Box:
        """``removed`` dimensions from ``at`` on replaced by ``inserted``: (start, size, stride) of each."""
        parts = zip(*inserted, strict=True) if inserted else ((), (), ())
        start, shape, strides = (
            (*old[:at], *new, *old[at + removed :])
            for old, new in zip((self.start, self.shape, self.strides), parts, strict=True)
        )
        return replace(self, start=start, shape=shape, strides=strides)


@dataclass(frozen=True, slots=True)
class Tiled:
    """A tensor of ``shape``, tiled by ``boxes``."""

    shape: Shape
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, info: TensorInfo) -> Tiled:
        """The whole stored tensor."""
        if isinstance(info, AssembledInfo):
            return info.tiled
        shape = info.shape
        return cls(shape, (Box((0,) * len(shape), shape, info, 0, info.strides),))

    def apart(self) -> Tiled:
        """The tensor with each box in the one of two matrices that has it (`Box.apart`)."""
        return replace(self, boxes=tuple(box.apart() for box in self.boxes))

    def permute(self, dims: Sequence[int]) -> Tiled:
        def moved(values: Shape) -> Shape:
            return tuple(values[dim] for dim in dims)

        boxes = (
            replace(box, start=moved(box.start), shape=moved(box.shape), strides=moved(box.strides))
            for box in self.boxes
        )
        return Tiled(moved(self.shape), tuple(boxes))

    def slice(self, dim: int, begin: int, end: int) -> Tiled:
        boxes = []
        for box in self.boxes:
            first = max(begin - box.start[dim], 0)
            last = min(end - box.start[dim], box.shape[dim])
            if first < last:
                boxes.append(box.along(dim, first, last).moved(dim, -begin))
        return Tiled((*self.shape[:dim], end - begin, *self.shape[dim + 1 :]), tuple(boxes))

    def unbind(self, dim: int) -> list[Tiled]:
        """The tensors along ``dim``."""
        pieces: list[list[Box]] = [[] for _ in range(self.shape[dim])]
        for box in self.boxes:
            for index in range(box.shape[dim]):
                pieces[box.start[dim] + index].append(box.along(dim, index, index + 1).with_dimensions(dim, 1, ()))
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return [Tiled(shape, tuple(boxes)) for boxes in pieces]

    def split(self, dim: int, sizes: Iterable[int]) -> list[Tiled]:
        pieces, begin = [], 0
        for size in sizes:
            pieces.append(self.slice(dim, begin, begin + size))
            begin += size
        return pieces

    def view(self, shape: Shape) -> Tiled:
        """Return the tensor viewed as ``shape``; dimensions are merged and split within groups of equal products."""
        result, at = self, 0
        for count, sizes in _groups(self.shape, shape):
            result = result._regrouped(at, count, sizes)
            at += len(sizes)
        return result

    def _regrouped(self, at: int, count: int, sizes: Shape) -> Tiled:
        """``count`` dimensions from ``at`` on merged into one, and that split into ``sizes``."""
        result = self
        if result.shape[at : at + count] == sizes:
            return result
        if count == 0:
            return result._each(at, 0, sizes, lambda box: [box.with_dimensions(at, 0, [(0, 1, 0)] * len(sizes))])
        for _ in range(count - 1):
            outer, inner = result.shape[at : at + 2]
            result = result._each(at, 2, (outer * inner,), lambda box, inner=inner: _merged(box, at, inner))  # type: ignore[misc]
        if not sizes:
            return result._each(at, 1, (), lambda box: [box.with_dimensions(at, 1, ())])
        for index in range(len(sizes) - 1):
            dim, inner = at + index, math.prod(sizes[index + 1 :])
            new = (sizes[index], inner)
            result = result._each(dim, 1, new, lambda box, dim=dim, inner=inner: _divided(box, dim, inner))  # type: ignore[misc]
        return result

    def _each(self, at: int, removed: int, sizes: Shape, cut: Callable[[Box], Iterable[Box]]) -> Tiled:
        boxes: list[Box] = []
        for box in self.boxes:
            for piece in cut(box):
                boxes.append(piece)
                if len(boxes) > _MOST_BOXES:
                    raise NotMovedError("moving numbers one by one")
        return Tiled((*self.shape[:at], *sizes, *self.shape[at + removed :]), tuple(boxes))


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembledInfo(TensorInfo):
    """A tensor that is stored nowhere as a whole: ``tiled`` by boxes of others. Its offset and bytes mean nothing."""

    tiled: Tiled


def concatenated(parts: Sequence[Tiled], dim: int) -> Tiled:
    """The ``parts`` one behind the other along ``dim``; raises UnequalError for another dtype or shape."""
    boxes: list[Box] = []
    begin, first = 0, parts[0]
    for part in parts:
        same = len(part.shape) == len(first.shape) and all(
            size == other
            for index, (size, other) in enumerate(zip(part.shape, first.shape, strict=True))
            if index != dim
        )
        if not same or part.boxes[0].info.dtype != first.boxes[0].info.dtype:
            raise UnequalError(part.boxes[0].info, first.boxes[0].info)
        boxes.extend(box.moved(dim, begin) for box in part.boxes)
        begin += part.shape[dim]
    return Tiled((*first.shape[:dim], begin, *first.shape[dim + 1 :]), tuple(boxes))


def _groups(old: Shape, new: Shape) -> Iterator[tuple[int, Shape]]:
    """The least groups of dimensions of ``old`` and of ``new`` with equal products: the count of one, the other."""
    if math.prod(old) != math.prod(new):
        raise ValueError(f"{list(old)} has no view as {list(new)}")
    i = j = 0
    while i < len(old) or j < len(new):
        begin, first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (have := math.prod(old[begin:i])) != (want := math.prod(new[first:j])):
            i, j = (i + 1, j) if have < want else (i, j + 1)
        yield i - begin, new[first:j]


def _merged(box: Box, at: int, inner: int) -> Iterable[Box]:
    """Dimensions ``at`` and ``at`` + 1 (``inner`` indices in the whole tensor) as one."""
    (o, i), (rows, columns), (step, stride) = (v[at : at + 2] for v in (box.start, box.shape, box.strides))
    if rows == 1 or (columns == inner and (columns == 1 or step == inner * stride)):
        stride = step if columns == 1 and rows > 1 else stride
        return [box.with_dimensions(at, 2, [(o * inner + i, rows * columns, stride)])]
    lines = (box.along(at, row, row + 1) for row in range(rows))
    return (line.with_dimensions(at, 2, [((o + row) * inner + i, columns, stride)]) for row, line in enumerate(lines))


def _divided(box: Box, at: int, inner: int) -> Iterable[Box]:
    """Dimension ``at`` as two, the second of ``inner`` indices."""
    begin, count, stride = box.start[at], box.shape[at], box.strides[at]
    done = 0
    while done < count:
        row, column = divmod(begin + done, inner)
        full_rows = (count - done) // inner if column == 0 else 0
        rows, columns = (full_rows, inner) if full_rows else (1, min(inner - column, count - done))
        piece = box.along(at, done, done + rows * columns)
        yield piece.with_dimensions(at, 1, [(row, rows, stride * inner), (column, columns, stride)])
        done += rows * columns


class TiledTensor(Tensor):
    """A `Tiled` as a torch tensor without data. It is contiguous whatever was done to it: reshape and view agree."""

    tiled: Tiled

    @staticmethod
    def over(tiled: Tiled, dtype: torch.dtype) -> TiledTensor:
        made = Tensor._make_wrapper_subclass(TiledTensor, tiled.shape, dtype=dtype, device=torch.device("meta"))
        made.tiled = tiled
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of the module
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name not in _OPERATIONS:
            raise NotMovedError(f"the operation {name}")
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        result = _OPERATIONS[name](*args, **(kwargs or {}))
        if isinstance(result, Tiled):
            return TiledTensor.over(result, first.dtype)
        return [TiledTensor.over(tiled, first.dtype) for tiled in result]


def _permute(tensor: TiledTensor, dims: Sequence[int]) -> Tiled:
    return tensor.tiled.permute([dim % tensor.dim() for dim in dims])


def _transpose(tensor: TiledTensor, first: int = 0, second: int = 1) -> Tiled:
    dims = list(range(tensor.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return tensor.tiled.permute(dims)


def _slice(tensor: TiledTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tiled:
    if step != 1:
        raise NotMovedError(f"a slice of every {step}. number")
    begin, end, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor.tiled.slice(dim % tensor.dim(), begin, max(begin, end))


def _select(tensor: TiledTensor, dim: int, index: int) -> Tiled:
    return tensor.tiled.unbind(dim % tensor.dim())[index]


def _split(tensor: TiledTensor, size: int | Sequence[int], dim: int = 0) -> list[Tiled]:
    dim %= tensor.dim()
    total = tensor.shape[dim]
    sizes = [min(size, total - begin) for begin in range(0, total, size)] if isinstance(size, int) else size
    return tensor.tiled.split(dim, sizes)


def _view(tensor: TiledTensor, shape: Sequence[int], *_: Any) -> Tiled:
    divisor = -math.prod(shape) if -1 in shape else 1
    return tensor.tiled.view(tuple(tensor.numel() // divisor if size == -1 else size for size in shape))


def _unsqueeze(tensor: TiledTensor, dim: int) -> Tiled:
    dim %= tensor.dim() + 1
    return tensor.tiled.view((*tensor.shape[:dim], 1, *tensor.shape[dim:]))


def _squeeze(tensor: TiledTensor, dim: int | Sequence[int] | None = None) -> Tiled:
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {dim % tensor.dim() for dim in dims if tensor.shape[dim] == 1}
    tiled = tensor.tiled
    for axis in sorted(gone, reverse=True):
        tiled = tiled.unbind(axis)[0]
    return tiled


def _cat(tensors: Sequence[TiledTensor], dim: int = 0) -> Tiled:
    return concatenated([tensor.tiled for tensor in tensors], dim % tensors[0].dim())


def _stack(tensors: Sequence[TiledTensor], dim: int = 0) -> Tiled:
    return concatenated([_unsqueeze(tensor, dim) for tensor in tensors], dim % (tensors[0].dim() + 1))


def _same(tensor: TiledTensor, **_: Any) -> Tiled:
    return tensor.tiled


_OPERATIONS: dict[str, Callable[..., Tiled | list[Tiled]]] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": lambda tensor, dim=0: tensor.tiled.unbind(dim % tensor.dim()),
    "view": _view,
    "_unsafe_view": _view,
    "_reshape_alias": _view,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("clone", "detach", "alias", "contiguous"), _same),
}
