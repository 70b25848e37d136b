"""Where experts lie while they are away from the compute unit: a private file on a disk, or memory of the host.

A page is ``slot_bytes`` long wherever it lies. Knows pages by (layer, expert); refuses to know which are wanted.
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

Into = Sequence[tuple[int, Tensor]]  # (byte of the page, where it and those after it go: uint8 [n], contiguous)


class PendingBytes(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Return when they are there; raise what went wrong."""
        ...


class OffloadStore(Protocol):
    """Holds every page of a model. ``where`` says where, in words."""

    where: str

    def keep(self, layer: int, source: MoeLayer) -> None:
        """Copy the experts of ``source``, which is layer ``layer``, here."""
        ...

    def kept(self) -> None:
        """All layers are here."""
        ...

    def start(self, layer: int, expert: int, into: Into) -> PendingBytes | None:
        """Begin to copy a page, or parts of it; None if that is done, or enqueued on the current stream."""
        ...

    def close(self) -> None:
        """Let go of the pages."""
        ...


class DiskStore:
    """Pages in a file of their own, read past the page cache. The file has no name once it is written: it goes with the
    process, however that ends.

    Raises:
        ConfigError: ``directory`` cannot be written, or has no room.
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
        """Copy a layer to the file, and have the page cache let go of it.

        Raises:
            ConfigError: the disk refuses.
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
        assert self._reader is not None  # `kept` comes before
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
    """Pages in memory of the host, locked where a ``device`` fetches them across a link."""

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
        """Nothing is left to do."""

    def start(self, layer: int, expert: int, into: Into) -> None:
        pages = self._pages[layer]
        assert pages is not None  # `keep` comes before
        for begin, dest in into:
            dest.copy_(pages[expert][begin : begin + dest.numel()], non_blocking=True)

    def close(self) -> None:
        self._pages = []

    def _memory(self, size: int) -> Tensor:
        if self._device.type != "cpu":
            with suppress(RuntimeError):  # the machine locks no more: the rest crosses at the pace of a plain copy
                return page_locked(size, self._device)
        return on_huge_pages(size)


class _DiskRead:
    """A page on its way from the disk."""

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
