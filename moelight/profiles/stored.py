"""The stored bytes of a quantised model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moelight.core.dtypes import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The stored bytes of a quantised model.

    Attributes:
        name: the formats, for people; experts first.
        pages: bytes of the largest expert of each layer, 0 without experts.
        mean_page_bytes: bytes of an expert on average, rounded up.
        total_bytes: of all experts.
        dtype: the experts as a number format for prices: `DType.bytes_for` all numbers of an expert is the largest
            page.
        dense: quantised tensors outside the experts: name, layer and bytes; the others have the model's dtype.
        dense_stored: those that our own decoder multiplies on a CPU as they are stored: name, layer and bytes in
        memory. repacked_bytes: of an expert on average, those of matrices that are turned on a CPU, to lie by rows.
        mixed: experts of some layer, or gate and up of one, are stored in several formats, so that on a GPU torch
            computes them.
        without_integers: the reason why activations rounded to int8 multiply no matrix of the experts, or None.
        cpu_integers: the reason why activations rounded to int8 multiply some of the experts on the CPU alone, or None.
        cpu_only: the reason why experts run on the CPU alone, or None.
        exact: where they multiply some, the formats of those that meet activations as they are.
    """

    name: str
    pages: tuple[int, ...]
    dtype: DType
    total_bytes: int
    mean_page_bytes: int
    dense: tuple[tuple[str, int, int], ...] = ()
    dense_stored: tuple[tuple[str, int, int], ...] = ()
    repacked_bytes: int = 0
    mixed: bool = False
    without_integers: str | None = None
    cpu_integers: str | None = None
    cpu_only: str | None = None
    exact: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        experts: str,
        pages: Sequence[Sequence[int]],
        elements: int,
        dense: Sequence[tuple[str, int, int]],
        matrices: Sequence[tuple[str, int, int]] = (),
        reasons: Mapping[str, str | None] | None = None,
    ) -> StoredWeights:
        """``pages``: bytes of each expert of each layer. They hold ``elements`` numbers at most; their format is called
        ``experts``. ``reasons``: why each format of theirs is without integers, or None."""
        exact = {name: reason for name, reason in (reasons or {}).items() if reason is not None}
        without = next(iter(exact.values()), None) if len(exact) == len(reasons or {}) else None
        sizes = [max(layer, default=0) for layer in pages]
        largest, total, count = max(sizes), sum(map(sum, pages)), sum(map(len, pages))
        bits = max(1, 8 * largest // elements)
        scales = max(0, largest - -(-elements * bits // 8))
        dtype = DType(name=experts, bits=bits, group=elements, scale_bytes=scales)
        return cls(
            name=name,
            pages=tuple(sizes),
            dtype=dtype,
            total_bytes=total,
            mean_page_bytes=-(-total // max(count, 1)),
            dense=tuple(dense),
            dense_stored=tuple(matrices),
            without_integers=without,
            exact=() if without else tuple(exact),
            mixed=any(len(set(layer)) > 1 for layer in pages),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of the largest expert."""
        return max(self.pages)
