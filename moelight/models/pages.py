"""The experts in pages: of floats, or of stored bytes; does not depend on where pages come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.models.expert import Expert
from moelight.profiles.model import ModelProfile
from moelight.weights.load import page_views
from moelight.weights.quantized_pages import PageTensor, QuantizedPages


class PagedExperts:
    """The experts in pages; each is made once of the memory of its page and how the page lies.

    ``view`` makes the expert of a layout's id and a page in memory (uint8); ``layout_ids`` has the layout of each page
    of a layer's experts, for layers with experts; None: all pages have the layout 0.
    """

    def __init__(
        self, view: Callable[[int, Tensor], Expert], layout_ids: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self._view, self._layout_ids = view, layout_ids
        # By the identity of the page's tensor, which is kept, so that no other has it.
        self._experts: dict[tuple[int, int], tuple[Tensor, Expert]] = {}

    def layout_id(self, layer: int) -> int | None:
        """The layout id shared by all pages of ``layer``, or None if their layouts differ."""
        ids = {0} if self._layout_ids is None else set(self._layout_ids[layer])
        return ids.pop() if len(ids) == 1 else None

    def of_layout(self, layout_id: int, pages: Sequence[Tensor]) -> list[Expert]:
        """The experts whose ``pages`` have the layout ``layout_id``."""
        return [self._expert(layout_id, page) for page in pages]

    def of_layer(self, layer: int, pages: Sequence[Tensor | None]) -> list[Expert | None]:
        """The experts of ``layer`` in ``pages``; None for those elsewhere, and in a layer without experts."""
        none = [0] * len(pages)
        ids = none if self._layout_ids is None else self._layout_ids.get(layer, none)
        pairs = zip(ids, pages, strict=True)
        return [None if page is None else self._expert(layout_id, page) for layout_id, page in pairs]

    def _expert(self, layout_id: int, page: Tensor) -> Expert:
        entry = self._experts.get((layout_id, id(page)))
        if entry is None:
            entry = self._experts[layout_id, id(page)] = page, self._view(layout_id, page)
        return entry[1]


def plain_experts(model: ModelProfile, dtype: torch.dtype) -> PagedExperts:
    """The experts in pages of floats of ``dtype``, in the order of the profile: gate, up, down."""

    def view(_: int, slot: Tensor) -> Expert:
        gate_up, down = page_views(slot, model, dtype)
        return Expert(gate_up=gate_up, down=down)

    return PagedExperts(view)


def quantized_experts(pages: QuantizedPages, activations: str = "auto") -> PagedExperts:
    """The experts in ``pages``. ``activations``: those that their products take where matrices have integers, as
    `Policy` says."""

    def view(layout_id: int, slot: Tensor) -> Expert:
        layout = pages.layouts[layout_id]
        views: dict[str, Any] = layout.map(partial(_view, slot)).parts()
        inward = all(matrix.stored.int8_reason is None for matrix in (layout.gate_up, layout.up) if matrix is not None)
        outward = layout.down.stored.int8_reason is None
        sides = activations if inward else "auto", activations if outward else "auto"
        return Expert(**views, layout_id=layout_id, interleaved=layout.interleaved, activations=sides)

    return PagedExperts(view, pages.ids_by_layer)


def _view(slot: Tensor, matrix: Matrix[PageTensor]) -> Tensor | Matrix[Tensor]:
    """``matrix`` in ``slot``; a tensor of floats that are by columns, and of a bias."""
    held = matrix.map(lambda tensor: tensor.of(slot))
    first = next(iter(held.tensors.values()))
    return first.t() if matrix.transposed else first if first.ndim == 1 else held
