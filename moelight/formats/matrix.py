"""A matrix in a stored format: one type for the bytes of a file, offsets in a page, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from moelight.formats.format import Format

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix(Generic[T]):
    """A matrix [``rows``, ``columns``] stored as ``stored``.

    Attributes:
        tensors: by suffix, in the order of the format, byte ranges of a file (`weights.tensor_info.TensorInfo`),
            offsets in a page (`weights.expert_pages.PageTensor`), or torch tensors on one device, contiguous.
        transposed: of floats: the tensor [columns, rows] holds the transpose.
    """

    stored: Format
    rows: int
    columns: int
    tensors: Mapping[str, T]
    transposed: bool = False

    def __hash__(self) -> int:
        return hash((self.stored, self.rows, self.columns, *self.tensors.items()))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def map(self, function: Callable[[T], U]) -> Matrix[U]:
        """The matrix whose tensors are the results of ``function`` on those of this one."""
        tensors = {suffix: function(tensor) for suffix, tensor in self.tensors.items()}
        return Matrix(
            stored=self.stored, rows=self.rows, columns=self.columns, tensors=tensors, transposed=self.transposed
        )
