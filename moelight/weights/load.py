"""Reads weights from disk into the caller's memory: the dense part into its arena, expert pages into given slots.
Allocates only one bounce buffer per thread.

Shapes: H hidden, Q query width, K key width, V vocabulary, E experts, I expert width, F dense feed-forward width.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from moelight.core.errors import CheckpointError, MoelightError
from moelight.core.schedule import Page
from moelight.core.small_files import open_regular, read_error_text
from moelight.core.units import MiB, align_up
from moelight.hrm.costs import TENSOR_ALIGNMENT, dense_bytes, page_bytes
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import dense_tensors, page_shapes
from moelight.weights.tensor_map import TensorExtent, WeightMap
from moelight.weights.torch_dtypes import from_torch, to_torch

BOUNCE_BYTES = 4 * MiB


class ExtentReader(AbstractContextManager["ExtentReader"]):
    """Reads extents of ``files``, each opened once. Thread-safe. Raises CheckpointError for a damaged file."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._descriptors: dict[Path, int] = {}
        self._local = threading.local()
        try:
            for file in files:
                if file not in self._descriptors:
                    self._descriptors[file] = _open(file)
        except CheckpointError:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, extent: TensorExtent, dest: torch.Tensor) -> None:
        """Fill ``dest`` (contiguous, as many numbers as ``extent``, any device), rounding to its dtype; no GIL held."""
        source = to_torch(extent.dtype)
        if dest.numel() * source.itemsize != extent.nbytes or not dest.is_contiguous():
            raise ValueError(f"{extent.tensor}: {extent.nbytes} bytes of {source} do not fill {tuple(dest.shape)}")
        if dest.dtype == source and dest.device.type == "cpu":
            self._fill(extent, 0, dest.reshape(-1).view(torch.uint8))
            return
        bounce = self._bounce(dest.device)
        flat = dest.view(-1)
        for begin in range(0, extent.nbytes, bounce.numel()):
            chunk = bounce[: min(bounce.numel(), extent.nbytes - begin)]
            self._fill(extent, begin, chunk)
            numbers = chunk.view(source)
            first = begin // source.itemsize
            flat[first : first + numbers.numel()].copy_(numbers)

    def same(self, first: TensorExtent, second: TensorExtent) -> bool:
        """True if two extents hold the same bytes."""
        if first.nbytes != second.nbytes:
            return False
        half = self._bounce(torch.device("cpu")).view(2, -1)
        for begin in range(0, first.nbytes, half.shape[1]):
            width = min(half.shape[1], first.nbytes - begin)
            self._fill(first, begin, half[0, :width])
            self._fill(second, begin, half[1, :width])
            if not torch.equal(half[0, :width], half[1, :width]):
                return False
        return True

    def _bounce(self, device: torch.device) -> torch.Tensor:
        """The calling thread's bounce buffer for ``device``; page-locked if an accelerator reads it."""
        buffers: dict[bool, torch.Tensor] = self._local.__dict__.setdefault("buffers", {})
        pinned = device.type != "cpu" and torch.accelerator.is_available()
        if pinned not in buffers:
            buffers[pinned] = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return buffers[pinned]

    def _fill(self, extent: TensorExtent, begin: int, dest: torch.Tensor) -> None:
        """Read ``extent`` from byte ``begin`` on into ``dest`` (uint8, 1-D, CPU) until ``dest`` is full."""
        view = dest.numpy().data
        descriptor, offset = self._descriptors[extent.file], extent.offset + begin
        while view:
            try:
                count = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(
                    f"{extent.file}: tensor {extent.tensor!r} cannot be read at byte {offset} ({error.strerror}); "
                    "check the disk or fetch the file again"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{extent.file}: tensor {extent.tensor!r} ends early, at byte {offset}: the file was changed "
                    "after it was opened; fetch it again"
                )
            view, offset = view[count:], offset + count


def _open(file: Path) -> int:
    try:
        descriptor = open_regular(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened ({read_error_text(error)})") from None
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer without its experts; ``router`` is None in a dense layer, ``dense_*`` in a sparse one.

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
    """All weights except experts: ``embed`` [V, H], ``head`` [V, H] (``embed`` itself if tied), ``final_norm`` [H]."""

    embed: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


def load_dense(weight_map: WeightMap, model: ModelProfile, arena: torch.Tensor, dtype: torch.dtype) -> ModelWeights:
    """Read all weights except experts as ``dtype``; the result holds views of ``arena`` (uint8, at least `dense_bytes`,
    contiguous, any device). Raises CheckpointError for an unreadable file, or tied embeddings stored twice that differ.
    """
    _check_bytes(arena, dense_bytes(model, from_torch(dtype)), "the arena")
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    used = 0
    with ExtentReader(extent.file for extent in weight_map.parts.values()) as reader:
        for stored in dense_tensors(model):
            nbytes = stored.elements * dtype.itemsize
            view = arena[used : used + nbytes].view(dtype).view(stored.shape)
            row = 0
            for part in stored.parts:
                reader.read(weight_map.parts[part], view[row : row + part.shape[0]])
                row += part.shape[0]
            tensors[stored.name, stored.layer] = view
            used += align_up(nbytes, TENSOR_ALIGNMENT)
    _check_tie(weight_map, model)
    if used != dense_bytes(model, from_torch(dtype)):
        raise MoelightError(f"{used} bytes were loaded, the ledger says {dense_bytes(model, from_torch(dtype))}")
    return _assemble(tensors, model)


class PageRead(Protocol):
    """A read of a page in flight."""

    def wait(self) -> None:
        """Block until the page has been read; raise the error if the read failed."""
        ...

    def done(self) -> bool:
        """True if `wait` returns at once."""
        ...


Submit = Callable[[Sequence[tuple[Path, int, torch.Tensor]]], PageRead]


class PageReader(AbstractContextManager["PageReader"]):
    """Reads expert pages from disk, as ``dtype``. Thread-safe; `close` after use.

    ``submit`` starts reads of (file, offset, destination) that bypass the page cache, for pages that need no dtype
    conversion. Without it, and for other pages, reads are sequential and go through the page cache.
    """

    def __init__(
        self, weight_map: WeightMap, model: ModelProfile, dtype: torch.dtype, submit: Submit | None = None
    ) -> None:
        self._pages = weight_map.pages
        self._dtype = dtype
        self._submit = submit if to_torch(weight_map.dtype) == dtype else None
        self.page_bytes = page_bytes(model, from_torch(dtype))
        self._reader = ExtentReader(page_files(weight_map))

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, page: Page, dest: torch.Tensor, begin: int = 0) -> None:
        reading = self.start(page, dest, begin)
        if reading is not None:
            reading.wait()

    def start(self, page: Page, dest: torch.Tensor, begin: int = 0) -> PageRead | None:
        """Start to fill ``dest`` (uint8, contiguous, whole numbers of ``dtype``) with the bytes of ``page`` (gate, up,
        down) from ``begin`` on. Returns None if the read is complete on return; raises CheckpointError here or in
        `PageRead.wait`."""
        _check_bytes(dest, 1, "the slot")
        size = min(dest.numel(), self.page_bytes - begin)
        pieces, filled = self._pieces(page, begin, size), 0
        if self._submit is not None and dest.device.type == "cpu":
            parts = []
            for piece in pieces:
                parts.append((piece.file, piece.offset, dest[filled : filled + piece.nbytes]))
                filled += piece.nbytes
            return _DirectPageRead(self._submit(parts), pieces)
        numbers = dest[:size].view(self._dtype)
        for piece in pieces:
            count = piece.nbytes // piece.dtype.itemsize
            self._reader.read(piece, numbers[filled : filled + count])
            filled += count
        return None

    def close(self) -> None:
        self._reader.close()

    def _pieces(self, page: Page, begin: int, size: int) -> list[TensorExtent]:
        """The extents of ``size`` bytes of a page from ``begin`` on; both count bytes of numbers of ``dtype``."""
        found, item, start = [], self._dtype.itemsize, 0
        for extent in self._pages[page]:
            stored = extent.dtype.itemsize
            first = max(begin - start, 0) // item
            last = min(begin + size - start, extent.nbytes // stored * item) // item
            if first < last:
                found.append(replace(extent, offset=extent.offset + first * stored, nbytes=(last - first) * stored))
            start += extent.nbytes // stored * item
        return found


class _DirectPageRead:
    def __init__(self, reading: PageRead, pieces: Sequence[TensorExtent]) -> None:
        self._reading, self._pieces = reading, pieces

    def done(self) -> bool:
        return self._reading.done()

    def wait(self) -> None:
        try:
            self._reading.wait()
        except OSError as error:
            piece = next((each for each in self._pieces if str(each.file) == str(error.filename)), self._pieces[0])
            raise CheckpointError(
                f"{piece.file}: tensor {piece.tensor!r} cannot be read ({error.strerror}); "
                "check the disk or fetch the file again"
            ) from None


def page_files(weight_map: WeightMap) -> tuple[Path, ...]:
    """The files that hold expert pages."""
    return tuple(dict.fromkeys(extent.file for extents in weight_map.pages.values() for extent in extents))


def page_views(slot: torch.Tensor, model: ModelProfile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(gate_up [2I, H], down [H, I])``: views of the page in ``slot`` (uint8, at least a page long)."""
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


def _check_tie(weight_map: WeightMap, model: ModelProfile) -> None:
    """If tied embeddings are stored twice and differ, it is ambiguous which of the two to use."""
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
