"""Stores of offloaded experts: a private file on a disk, or host memory.

A page takes ``slot_bytes`` in every store and is identified by (layer, expert). Does not depend on which pages are
requested.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.units import format_bytes
from moelight.integrations.layers import MoeLayer
from moelight.kernels.reads import FileReader, ReadPart, ReadTicket
from moelight.memory.locking import on_huge_pages, page_locked

Into = Sequence[tuple[int, Tensor]]  # (first byte in the page, destination: uint8 [n], contiguous)


class PendingBytes(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Return when the bytes have arrived; raises the transfer's error."""
        ...


class OffloadStore(Protocol):
    """Holds every page of a model. ``where`` describes the location."""

    where: str

    def keep(self, layer: int, source: MoeLayer) -> None:
        """Copy the experts of ``source``, which is layer ``layer``, into the store."""
        ...

    def kept(self) -> None:
        """Called once all layers are stored."""
        ...

    def start(self, layer: int, expert: int, into: Into) -> PendingBytes | None:
        """Start to copy a page, or parts of it; returns None if the copy is done, or enqueued on the current stream."""
        ...

    def close(self) -> None:
        """Free the pages."""
        ...


class DiskStore:
    """Pages in a private file, read past the page cache. The file is unlinked once it is written, so it disappears with
    the process however that ends.

    Raises:
        ConfigError: ``directory`` cannot be written, or has too little space.
    """

    def __init__(self, directory: Path, num_layers: int, num_experts: int, slot_bytes: int) -> None:
        self._num_experts, self._slot_bytes = num_experts, slot_bytes
        size = num_layers * num_experts * slot_bytes
        try:
            free = shutil.disk_usage(directory).free
            if free < size:
                raise ConfigError(
                    f"{directory} has {format_bytes(free)} left, the experts take {format_bytes(size)}; "
                    "give another directory="
                )
            handle, name = tempfile.mkstemp(prefix="moelight-experts-", dir=directory)
        except OSError as error:
            raise ConfigError(f"{directory} cannot hold the experts ({error.strerror}); give directory=") from None
        self._file, self._handle = Path(name), handle
        self._reader: FileReader | None = None
        self.where = f"a file in {directory}"
        os.truncate(handle, size)

    def keep(self, layer: int, source: MoeLayer) -> None:
        """Copy a layer to the file and drop it from the page cache.

        Raises:
            ConfigError: the write fails.
        """
        try:
            for held in source.parameters:
                for expert, tensor in held.parts(held.parameter.detach()):
                    cells = tensor.cpu().contiguous().view(-1).view(torch.uint8)
                    _write(self._handle, cells, self._at(layer, expert) + held.piece.offset)
            os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ConfigError(f"{self._file}: {source.name} cannot be written ({error.strerror})") from None

    def kept(self) -> None:
        self._reader = FileReader([self._file])
        self._unname()

    def start(self, layer: int, expert: int, into: Into) -> PendingBytes:
        assert self._reader is not None  # `kept` was called before
        at = self._at(layer, expert)
        ticket = self._reader.submit([ReadPart(self._file, at + begin, dest) for begin, dest in into])
        return _DiskRead(ticket, layer, expert)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._unname()

    def _unname(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._file.unlink()

    def _at(self, layer: int, expert: int) -> int:
        return (layer * self._num_experts + expert) * self._slot_bytes


class HostStore:
    """Pages in host memory, page-locked if a ``device`` fetches them across a link."""

    def __init__(self, device: torch.device, num_layers: int, slot_bytes: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._pages: list[Tensor | None] = [None] * num_layers
        self.where = "host memory"

    def keep(self, layer: int, source: MoeLayer) -> None:
        size = source.num_experts * self._slot_bytes
        pages = self._pages[layer] = self._memory(size).view(source.num_experts, self._slot_bytes)
        for held in source.parameters:
            for expert, tensor in held.parts(held.parameter.detach()):
                held.piece.of(pages[expert]).copy_(tensor)

    def kept(self) -> None:
        """Does nothing."""

    def start(self, layer: int, expert: int, into: Into) -> None:
        pages = self._pages[layer]
        assert pages is not None  # `keep` was called before
        for begin, dest in into:
            dest.copy_(pages[expert][begin : begin + dest.numel()], non_blocking=True)

    def close(self) -> None:
        self._pages = []

    def _memory(self, size: int) -> Tensor:
        if self._device.type != "cpu":
            # RuntimeError: no more memory can be locked, so the rest transfers at the speed of pageable copies.
            with suppress(RuntimeError):
                return page_locked(size, self._device)
        return on_huge_pages(size)


class _DiskRead:
    """A disk read of one page in flight."""

    def __init__(self, ticket: ReadTicket, layer: int, expert: int) -> None:
        self._ticket, self._layer, self._expert = ticket, layer, expert

    def wait(self) -> None:
        try:
            self._ticket.wait()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: expert {self._expert} of layer {self._layer} cannot be read ({error.strerror}); "
                "check the disk, or attach with another directory="
            ) from None


def _write(handle: int, cells: Tensor, at: int) -> None:
    left = memoryview(cells.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers from Python 3.12 on
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written
