"""The tensors of a checkpoint by the places of their bytes, and the stored matrices that some of them stand for. Does
not depend on torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from moelight.core.errors import CheckpointError
from moelight.core.units import align_up
from moelight.formats.format import ITEM_BYTES, PAGE_ALIGNMENT, SHAPE
from moelight.formats.matrix import Matrix
from moelight.formats.plain import PLAIN_FORMATS

Shape = tuple[int, ...]
TRANSPOSED = "transposed"  # of ``stored_as``


def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """The location of a tensor, or of a slice of it: ``nbytes`` bytes at ``offset`` from the start of ``file``,
    row-major. ``dtype`` is the safetensors name (``BF16``), possibly of a format that moelight does not support.

    Attributes:
        matrices: the stored matrices, below one another, whose values the tensor has in ``dtype``. It has no bytes of
            its own then: ``offset`` and ``nbytes`` are those of a row-major tensor of such values, which is nowhere.
            Rows of two matrices alternate. Empty: the tensor has the bytes at its location.
        turned: it is a stack [E, columns, rows] of matrices that are stored by rows.
        derived: how its numbers, float32, are computed when they are read; it has no bytes of its own then, either.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    matrices: tuple[StoredMatrix, ...] = ()
    turned: bool = False
    derived: Derivation | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold its bytes."""
        return (self.file,) if self.derived is None else tuple(info.file for info in self.derived.sources)

    @property
    def strides(self) -> tuple[int, ...]:
        """Numbers from one index of each dimension to the next."""
        if self.turned:
            return (math.prod(self.shape[1:]), 1, self.shape[1])
        return row_major(self.shape)

    def part(self, index: int, count: int) -> TensorInfo:
        """Slice ``index`` of ``count`` equal slices along the first dimension, under the name of the whole."""
        shape, nbytes = (self.shape[0] // count, *self.shape[1:]), self.nbytes // count
        return replace(self, shape=shape, offset=self.offset + index * nbytes, nbytes=nbytes)

    def lines(self, begin: int, end: int) -> TensorInfo:
        """Slice ``begin`` to ``end`` along the first dimension."""
        line = self.nbytes // self.shape[0]
        return replace(
            self, shape=(end - begin, *self.shape[1:]), offset=self.offset + begin * line, nbytes=(end - begin) * line
        )

    def stored(self) -> StoredMatrix:
        """The rows of the one of ``matrices`` that this tensor stands for; raises CheckpointError if it stands for
        parts of rows. The values of a tensor without any are one row."""
        if not self.matrices:
            stored, count = PLAIN_FORMATS[self.dtype], self.nbytes // ITEM_BYTES[self.dtype]
            return StoredMatrix(module=self.name, stored=stored, rows=1, columns=count, tensors={stored.names[0]: self})
        line = self.matrices[0].columns * ITEM_BYTES[self.dtype]
        if self.offset % line or self.nbytes % line or len(self.matrices) > 1:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} is needed in parts that are no rows of it, which "
                f"{self.matrices[0].stored.name} does not allow; use the checkpoint that is not quantised"
            )
        return self.matrices[0].rows_of(self.offset // line, (self.offset + self.nbytes) // line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Derivation:
    """Numbers that are computed from those of ``stored``, as `DerivedScales` says."""

    stored: TensorInfo
    factor: float = 1.0
    table: TensorInfo | None = None
    scales: TensorInfo | None = None
    block: int = 1
    offset: float = 0.0
    repeats: int = 1

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return tuple(info for info in (self.stored, self.table, self.scales) if info is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMatrix(Matrix[TensorInfo]):
    """A matrix of ``module`` in a checkpoint. ``heads``: that many heads, the two halves of each with their rows
    interleaved (`gguf_config.hf_rows`); 0: rows are in transformers' order. ``stack``: so many matrices of equal size
    below one another, whose blocks begin anew with each. ``stored_as``: values are stored as a function of them, one of
    `stored_matrix.INVERSES`; empty: as they are. ``rounds``: of ``heads_in_rounds`` the number of rounds, and of heads
    in each."""

    module: str
    heads: int = 0
    stored_as: str = ""
    rounds: tuple[int, int] = (1, 1)
    stack: int = 1

    @property
    def indivisible(self) -> bool:
        """Whether rows are not stored in transformers' order, so that all are read at once."""
        return self.heads > 0 or self.stored_as == TRANSPOSED

    @property
    def kept_bytes(self) -> int:
        """Bytes in memory: each tensor that says more than a shape, aligned."""
        return sum(align_up(info.nbytes, PAGE_ALIGNMENT) for suffix, info in self.tensors.items() if suffix != SHAPE)

    def as_values(self, name: str, dtype: str, shape: tuple[int, ...], *, turned: bool = False) -> TensorInfo:
        """The tensor ``name`` [``shape``] of the values of this matrix in ``dtype``."""
        file, nbytes = next(iter(self.tensors.values())).file, math.prod(shape) * ITEM_BYTES[dtype]
        return TensorInfo(
            name=name, file=file, dtype=dtype, shape=shape, offset=0, nbytes=nbytes, matrices=(self,), turned=turned
        )

    def rows_of(self, begin: int, end: int) -> StoredMatrix:
        """Rows ``begin`` to ``end`` as a matrix of its own: whole heads, where the rows of each are interleaved. Raises
        CheckpointError where its bytes are not together."""
        if (begin, end) == (0, self.rows) and self.stack == 1:
            return self
        count = end - begin
        if self.stack > 1:
            rows = self.rows // self.stack
            if begin % rows or count != rows:
                raise self.error(self.stored.names[0], f"is not to be divided at rows {begin} and {end}")
            tensors = {suffix: info.part(begin // rows, self.stack) for suffix, info in self.tensors.items()}
            return replace(self, rows=rows, stack=1, tensors=tensors)
        heads = self.heads * count // self.rows
        if self.stored_as == TRANSPOSED or heads * self.rows != self.heads * count or begin * self.heads % self.rows:
            raise self.error(self.stored.names[0], "has its rows in another order, so they are not taken by themselves")
        tensors = dict(self.tensors)
        for suffix, info in tensors.items():
            if (step := self.stored.rows_of_line(suffix)) == 0:
                continue
            if step < 0 or begin % step or (end % step and end < self.rows):
                raise self.error(suffix, f"is not to be divided at rows {begin} and {end}")
            tensors[suffix] = info.lines(begin // step, -(-end // step))
        return replace(self, rows=count, heads=heads, tensors=tensors)

    def error(self, suffix: str, complaint: str) -> CheckpointError:
        info = self.tensors[suffix]
        return CheckpointError(f"{info.file}: tensor {info.name!r} {complaint}; fetch the checkpoint again")
