"""Experts whose matrices are quantised, in pages of stored bytes; does not depend on where pages come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moelight.kernels.quantized import QuantizedMatrix
from moelight.models.moe import Matrices
from moelight.weights.quantized_pages import MatrixPlace, PartPlace, QuantizedPages
from moelight.weights.stored_matrix import TORCH


class QuantizedExperts:
    """The experts in pages of ``pages``; one is known by the memory of its page and its layer. ``activations``: those
    that their products take, as `Policy` says."""

    def __init__(self, pages: QuantizedPages, activations: str = "auto") -> None:
        self._pages, self._activations = pages, activations
        self._known: dict[tuple[int, int], Matrices] = {}

    def matrices(self, layer: int, slot: Tensor) -> Matrices:
        """The matrices of an expert of ``layer`` whose page is in ``slot`` (uint8)."""
        kind = self._pages.kind_of[layer]
        key = kind, slot.data_ptr()
        if key not in self._known:
            self._known[key] = self._view(kind, slot)
        return self._known[key]

    def _view(self, kind: int, slot: Tensor) -> Matrices:
        views = {name: _view(place, slot) for name, place in self._pages.kinds[kind]}
        return Matrices(**views, interleaved=self._pages.interleaved, activations=self._activations)


def _view(place: MatrixPlace, slot: Tensor) -> Any:
    parts = {suffix: _part(each, slot) for suffix, each in place.parts}
    if place.stored is not None:
        return QuantizedMatrix(stored=place.stored, rows=place.rows, columns=place.columns, parts=parts)
    (numbers,) = parts.values()
    return numbers.t() if place.transposed else numbers


def _part(place: PartPlace, slot: Tensor) -> Tensor:
    return slot[place.offset : place.offset + place.nbytes].view(TORCH[place.dtype]).view(place.shape)
