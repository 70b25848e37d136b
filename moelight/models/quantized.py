"""Experts whose matrices are quantised, in pages of stored bytes; does not depend on where pages come from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.models.moe import Matrices
from moelight.weights.quantized_pages import PageTensor, QuantizedPages


class QuantizedExperts:
    """The experts in pages of ``pages``; one is known by the memory of its page and how the page lies. ``activations``:
    those that their products take where matrices have integers, as `Policy` says."""

    def __init__(self, pages: QuantizedPages, activations: str = "auto") -> None:
        self._pages, self._activations = pages, activations
        self._layout_ids: dict[int, list[int]] = {}  # of the experts of each layer
        for page in sorted(pages.layout_ids):
            self._layout_ids.setdefault(page.layer, []).append(pages.layout_ids[page])
        self._known: dict[tuple[int, int], Matrices] = {}

    def layout_id(self, layer: int) -> int | None:
        """The layout id shared by all pages of ``layer``, or None if their layouts differ."""
        ids = set(self._layout_ids[layer])
        return ids.pop() if len(ids) == 1 else None

    def of_layout(self, layout_id: int, slots: Sequence[Tensor]) -> list[Matrices]:
        """The matrices of experts whose pages, in ``slots`` (uint8), all have the layout ``layout_id``."""
        return [self._matrices(layout_id, slot) for slot in slots]

    def layer(self, layer: int, slots: Sequence[Any]) -> list[Matrices | None]:
        """The matrices of the experts of ``layer``, whose pages are in ``slots`` (uint8); None for those elsewhere, and
        in a layer without experts."""
        if layer not in self._layout_ids:
            return [None] * len(slots)
        return [
            self._matrices(layout_id, slot) if isinstance(slot, Tensor) else None
            for layout_id, slot in zip(self._layout_ids[layer], slots, strict=True)
        ]

    def _matrices(self, layout_id: int, slot: Tensor) -> Matrices:
        key = layout_id, slot.data_ptr()
        if key not in self._known:
            self._known[key] = self._view(layout_id, slot)
        return self._known[key]

    def _view(self, layout_id: int, slot: Tensor) -> Matrices:
        layout = self._pages.layouts[layout_id]
        views: dict[str, Any] = layout.map(partial(_view, slot)).parts()
        inward = all(matrix.stored.int8_reason is None for matrix in (layout.gate_up, layout.up) if matrix is not None)
        outward = layout.down.stored.int8_reason is None
        activations = (self._activations if inward else "auto", self._activations if outward else "auto")
        return Matrices(**views, layout_id=layout_id, interleaved=layout.interleaved, activations=activations)


def _view(slot: Tensor, matrix: Matrix[PageTensor]) -> Tensor | Matrix[Tensor]:
    """``matrix`` in ``slot``; a tensor of floats that are by columns, and of a bias."""
    held = matrix.map(lambda tensor: tensor.of(slot))
    first = next(iter(held.tensors.values()))
    return first.t() if matrix.transposed else first if first.ndim == 1 else held
