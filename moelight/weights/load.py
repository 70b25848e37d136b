"""Weights from disk into memory someone else owns: the dense part into its arena, expert pages into their slots.

Knows layouts. Refuses to own memory beyond one bounce buffer per thread, or to decide which page goes where.

Shapes: H hidden, Q query width, K key width, V vocabulary, E experts, I expert width, F dense feed-forward width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from moelight.core.errors import CheckpointError, MoelightError
from moelight.core.schedule import Page
from moelight.core.units import align_up
from moelight.hrm.costs import TENSOR_ALIGNMENT, dense_bytes, page_bytes
from moelight.profiles.model import ModelProfile
from moelight.profiles.stored import Stored, dense_tensors, page_shapes
from moelight.weights.names import WeightMap
from moelight.weights.reading import ExtentReader
from moelight.weights.torch_dtypes import from_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer outside its experts; ``router`` is None in a dense layer, ``dense_*`` in a sparse one.

    ``input_norm``, ``post_norm`` [H]; ``qkv`` [Q+2K, H], ``qkv_bias`` [Q+2K]; ``q_norm``, ``k_norm`` [D] or [Q], [K];
    ``o`` [H, Q], ``o_bias`` [H]; ``router`` [E, H]; ``dense_gate_up`` [2F, H] (gate rows first), ``dense_down`` [H, F].
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    dense_gate_up: torch.Tensor | None = None
    dense_down: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """Everything outside the experts: ``embed`` [V, H], ``head`` [V, H] (``embed`` itself if tied), ``final_norm``."""

    embed: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


def load_dense(weight_map: WeightMap, model: ModelProfile, arena: torch.Tensor, dtype: torch.dtype) -> ModelWeights:
    """Read everything outside the experts into ``arena``, as ``dtype``; the result is views of it.

    Args:
        arena: uint8 [at least `dense_bytes`], contiguous, on any device.

    Raises:
        CheckpointError: a file ends early or cannot be read, or tied embeddings are stored twice and differ.
    """
    _check_bytes(arena, dense_bytes(model, from_torch(dtype)), "the arena")
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    used = 0
    with ExtentReader(extent.file for extent in weight_map.parts.values()) as reader:
        for stored in dense_tensors(model):
            nbytes = stored.elements * dtype.itemsize
            view = arena[used : used + nbytes].view(dtype).view(stored.shape)
            _read_stored(reader, weight_map, stored, view)
            tensors[stored.name, stored.layer] = view
            used += align_up(nbytes, TENSOR_ALIGNMENT)
    _check_tie(weight_map, model)
    if used != dense_bytes(model, from_torch(dtype)):
        raise MoelightError(f"{used} bytes were loaded, the ledger says {dense_bytes(model, from_torch(dtype))}")
    return _assemble(tensors, model)


class PageReader(AbstractContextManager["PageReader"]):
    """Reads expert pages from disk, as ``dtype``. Any number of threads may read at once; `close` when done.

    Raises:
        CheckpointError: a file of the checkpoint cannot be opened.
    """

    def __init__(self, weight_map: WeightMap, model: ModelProfile, dtype: torch.dtype) -> None:
        self._pages = weight_map.pages
        self._dtype = dtype
        self.page_bytes = page_bytes(model, from_torch(dtype))
        self._reader = ExtentReader(extent.file for extents in self._pages.values() for extent in extents)

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, page: Page, dest: torch.Tensor, begin: int = 0) -> None:
        """Fill ``dest`` (uint8, contiguous) with bytes ``begin`` and on of ``page``: gate, up and down, end to end.

        ``begin`` and the length of ``dest`` are whole numbers of the dtype; what is longer than the page is left alone.

        Raises:
            CheckpointError: a file ends early or gives an I/O error.
        """
        _check_bytes(dest, 0, "the slot")
        numbers = dest[: self.page_bytes - begin].view(self._dtype)
        first = begin // self._dtype.itemsize
        last, passed = first + numbers.numel(), 0
        for extent in self._pages[page]:
            width, count = extent.dtype.itemsize, extent.nbytes // extent.dtype.itemsize
            start, stop = max(first - passed, 0), min(last - passed, count)
            if start < stop:
                some = replace(extent, offset=extent.offset + start * width, nbytes=(stop - start) * width)
                self._reader.read(some, numbers[passed + start - first : passed + stop - first])
            passed += count

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def page_views(slot: torch.Tensor, model: ModelProfile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(gate_up [2I, H], down [H, I])``: views of a page that lies in ``slot`` (uint8, at least a page long)."""
    shapes = page_shapes(model)
    (width, hidden), down_shape = shapes["gate"], shapes["down"]
    numbers = slot[: page_bytes(model, from_torch(dtype))].view(dtype)
    split = 2 * width * hidden
    return numbers[:split].view(2 * width, hidden), numbers[split:].view(down_shape)


def _check_bytes(memory: torch.Tensor, needed: int, what: str) -> None:
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.numel() < needed:
        raise ValueError(
            f"{what} must be contiguous uint8 of at least {needed} bytes, not {memory.dtype} {tuple(memory.shape)}"
        )


def _read_stored(reader: ExtentReader, weight_map: WeightMap, stored: Stored, view: torch.Tensor) -> None:
    row = 0
    for part in stored.parts:
        reader.read(weight_map.parts[part], view[row : row + part.shape[0]])
        row += part.shape[0]


def _check_tie(weight_map: WeightMap, model: ModelProfile) -> None:
    """Tied embeddings may be stored twice, but only as the same numbers: which of two to use is not ours to guess."""
    spare = weight_map.spare_head
    if spare is None:
        return
    embed = next(weight_map.parts[part] for stored in dense_tensors(model) for part in stored.parts)
    with ExtentReader([embed.file, spare.file]) as reader:
        if not reader.same(embed, spare):
            raise CheckpointError(
                f"{spare.file}: tensor {spare.tensor!r} differs from {embed.tensor!r}, although config.json says "
                "tie_word_embeddings; set that to false, or remove the tensor"
            )


def _assemble(tensors: dict[tuple[str, int], torch.Tensor], model: ModelProfile) -> ModelWeights:
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(model.num_layers)]
    outside: dict[str, torch.Tensor] = {}
    for (name, layer), tensor in tensors.items():
        (outside if layer < 0 else layers[layer])[name] = tensor
    outside.setdefault("head", outside["embed"])
    return ModelWeights(**outside, layers=tuple(LayerWeights(**layer) for layer in layers))
