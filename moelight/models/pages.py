"""The experts in pages; does not depend on where pages come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.kernels.stored_weight import StoredWeight
from moelight.models.expert import Expert
from moelight.weights.expert_pages import ExpertPages, PageTensor
from moelight.weights.page_layout import parameter_of


class PagedExperts:
    """The experts in ``pages``; each is built once for the memory of its page and its layout. ``activations``: those
    that their products take where matrices have integers, as `Policy` says."""

    def __init__(self, pages: ExpertPages, activations: str = "auto") -> None:
        self._pages, self.activations, self._layout_ids = pages, activations, pages.ids_by_layer
        # By layout and the identity of the page's tensor, which is kept, so that no other has it.
        self._experts: dict[tuple[int, int], tuple[Tensor, Expert]] = {}
        self._layers: dict[tuple[int, int], tuple[Tensor, Mapping[str, Tensor]]] = {}  # by layout and page

    def layout_id(self, layer: int) -> int | None:
        """The layout id shared by all pages of ``layer``, or None if their layouts differ."""
        ids = set(self._layout_ids[layer])
        return ids.pop() if len(ids) == 1 else None

    def holding(self, layout_id: int, memory: Sequence[Tensor]) -> list[Tensor]:
        """``memory`` for pages of the layout ``layout_id``: in place of any that is too short to hold one the first
        that is not; empty if all are too short."""
        size = self._pages.sizes[layout_id]
        first = next((page for page in memory if page.numel() >= size), None)
        return [] if first is None else [page if page.numel() >= size else first for page in memory]

    def of_layout(self, layout_id: int, pages: Sequence[Tensor]) -> list[Expert]:
        """The experts whose ``pages`` have the layout ``layout_id``."""
        return [self._expert(layout_id, page) for page in pages]

    def of_layer(self, layer: int, pages: Sequence[Tensor | None]) -> list[Expert | None]:
        """The experts of ``layer`` in ``pages``; None for those elsewhere, and in a layer without experts."""
        pairs = zip(self._layout_ids.get(layer, [0] * len(pages)), pages, strict=True)
        return [None if page is None else self._expert(layout_id, page) for layout_id, page in pairs]

    def matrices(self, layer: int, page: Tensor, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """The matrices of ``layer`` of a dense model, whose page is ``page``, by the names of its parameters; as
        weights of a computation in ``dtype``."""
        (layout_id,) = self._layout_ids[layer]
        entry = self._layers.get((layout_id, id(page)))
        if entry is None:
            parts = self._pages.layouts[layout_id].parts
            weights: dict[str, Tensor] = {}
            if self._pages.dtype is not None:
                weights = {name: cast("Tensor", self._view(page, matrix)) for name, matrix in parts.items()}
            else:
                stacks: dict[str, list[Matrix[Tensor]]] = {}
                for name, matrix in parts.items():
                    stacks.setdefault(parameter_of(name), []).append(matrix.map(lambda tensor: tensor.of(page)))
                for name, stack in stacks.items():
                    weights[name] = StoredWeight.of(tuple(stack), dtype, self.activations)
            entry = self._layers[layout_id, id(page)] = page, weights
        return entry[1]

    def _expert(self, layout_id: int, page: Tensor) -> Expert:
        entry = self._experts.get((layout_id, id(page)))
        if entry is None:
            layout = self._pages.layouts[layout_id]
            parts: dict[str, Any] = dict(layout.map(partial(self._view, page)).parts)
            has_integers = {name: matrix.stored.int8_reason is None for name, matrix in layout.parts.items()}
            inward = self.activations if has_integers["gate_up"] and has_integers.get("up", True) else "auto"
            outward = self.activations if has_integers["down"] else "auto"
            rest: dict[str, Any] = {"interleaved": layout.interleaved, "activations": (inward, outward)}
            entry = self._experts[layout_id, id(page)] = page, Expert(**parts, layout_id=layout_id, **rest)
        return entry[1]

    def _view(self, page: Tensor, matrix: Matrix[PageTensor]) -> Tensor | Matrix[Tensor]:
        """``matrix`` in ``page``; a tensor of floats where all pages are, of those by columns, and of a bias."""
        held = matrix.map(lambda tensor: tensor.of(page))
        first = next(iter(held.tensors.values()))
        if matrix.transposed:
            return first.t()
        return first if self._pages.dtype is not None or first.ndim == 1 else held
