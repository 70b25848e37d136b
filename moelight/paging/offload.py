"""Stores of offloaded experts (a private file on disk, or host memory), and the copies from host memory to slots."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.schedule import Page
from moelight.core.units import format_bytes
from moelight.kernels.device import Device
from moelight.kernels.reads import FileReader, ReadPart
from moelight.paging.arena import PinningError, on_huge_pages, page_locked
from moelight.paging.slots import PendingPage

_TIMED_COPIES = 3
Into = Sequence[tuple[int, Tensor]]  # (first byte in the page, destination: uint8 [n], contiguous)
Tensors = Iterable[tuple[int, int, Tensor]]  # (expert, first byte in its page, tensor)


# Holds every page of a model, ``where`` it says: `keep` for each layer, then `finish`, `start` for pages in the order
# of calls, and `close`, which finishes all copies and frees the pages. ``slot_bytes``: of a page of each layer.
OffloadStore: TypeAlias = "DiskStore | HostStore"


class DiskStore:
    """Pages in a private file, read past the page cache and unlinked once written, so that it ends with the process;
    raises ConfigError if ``directory`` cannot be written or has too little space."""

    def __init__(self, directory: Path, experts: Sequence[int], slot_bytes: Sequence[int]) -> None:
        """``experts``: number of experts in each layer."""
        self.slot_bytes = slot_bytes
        *self._starts, size = accumulate(map(mul, experts, slot_bytes), initial=0)
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

    @property
    def busy_s(self) -> float:
        """Seconds with a read in flight."""
        return self._reader.counts().busy_s if self._reader is not None else 0.0

    def keep(self, layer: int, name: str, tensors: Tensors) -> None:
        """Write the layer and drop it from the page cache; raises ConfigError if the write fails."""
        try:
            for expert, offset, tensor in tensors:
                left, at = memoryview(bytes_of(tensor.cpu()).numpy()), self._at(layer, expert) + offset  # type: ignore[arg-type]  # numpy's arrays are buffers from Python 3.12 on
                while left:
                    written = os.pwrite(self._handle, left, at)
                    left, at = left[written:], at + written
            os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ConfigError(f"{self._file}: {name} cannot be written ({error.strerror})") from None

    def finish(self) -> None:
        self._reader = FileReader([self._file])
        self._unlink()

    def start(self, page: Page, into: Into) -> PendingPage:
        """Start to copy a page, or parts of it."""
        assert self._reader is not None  # `finish` was called before
        at = self._at(page.layer, page.expert)
        ticket = self._reader.submit([ReadPart(self._file, at + begin, dest) for begin, dest in into])

        def wait() -> None:
            try:
                ticket.wait()
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename}: expert {page.expert} of layer {page.layer} cannot be read ({error.strerror}); "
                    "check the disk, or attach with another directory="
                ) from None

        return _InFlight(wait, ticket.done)

    def close(self) -> None:
        if self._reader is not None:
            with suppress(OSError):  # of reads that nothing waited for
                self._reader.close()
        self._unlink()

    def _unlink(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._file.unlink()

    def _at(self, layer: int, expert: int) -> int:
        return self._starts[layer] + expert * self.slot_bytes[layer]


class HostStore:
    """Pages in host memory, page-locked if ``device`` fetches them across a link."""

    def __init__(self, device: torch.device, experts: Sequence[int], slot_bytes: Sequence[int]) -> None:
        """``experts``: number of experts in each layer."""
        self._device, self._experts, self.slot_bytes = device, experts, slot_bytes
        self._pages: dict[int, Tensor] = {}
        self._copies = copies_to(device)
        self._byte_s: float | None = None
        self.where = "host memory"

    @property
    def busy_s(self) -> float:
        """Seconds with a copy in flight, as far as the host knows."""
        return self._copies.busy_s

    def keep(self, layer: int, name: str, tensors: Tensors) -> None:  # noqa: ARG002
        count, size = self._experts[layer], self.slot_bytes[layer]
        pages = self._pages[layer] = self._memory(count * size).view(count, size)
        for expert, offset, tensor in tensors:
            source = bytes_of(tensor)
            pages[expert][offset : offset + source.numel()].copy_(source)

    def finish(self) -> None:
        """Does nothing."""

    def start(self, page: Page, into: Into) -> PendingPage:
        source = self.stored(page)
        return self._copies.start([(dest, source[begin : begin + dest.numel()]) for begin, dest in into])

    def stored(self, page: Page) -> Tensor:
        """The bytes of ``page``, uint8 [slot bytes], in host memory."""
        return self._pages[page.layer][page.expert]

    def copy_s(self, layer: int) -> float:
        """Seconds of the copy of a page of ``layer`` to the device, at the rate of a copy measured once."""
        if self._byte_s is None:
            page = max((pages[0] for pages in self._pages.values()), key=Tensor.numel)
            dest, device = torch.empty_like(page, device=self._device), Device(self._device)
            seconds = []
            for _ in range(_TIMED_COPIES):
                device.synchronize()
                began = time.perf_counter()
                dest.copy_(page)
                device.synchronize()
                seconds.append(time.perf_counter() - began)
            self._byte_s = min(seconds) / page.numel()
        return self._byte_s * self.slot_bytes[layer]

    def close(self) -> None:
        self._copies.close()
        self._pages = {}

    def _memory(self, size: int) -> Tensor:
        if not Device(self._device).host:
            # Where no more memory can be locked, the rest transfers at the speed of pageable copies.
            with suppress(RuntimeError, PinningError):
                return page_locked(size, self._device)
        return on_huge_pages(size)


class _InFlight:
    def __init__(self, wait: Callable[[], None], done: Callable[[], bool]) -> None:
        self.wait, self.done = wait, done


class CopyThread:
    """Copies within host memory, by one thread in the order of calls."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moelight-experts")

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> PendingPage:
        """``copies``: (destination, source) each."""
        future = self._thread.submit(self._copy, copies)
        return _InFlight(future.result, future.done)

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        began = time.perf_counter()
        for dest, source in copies:
            dest.copy_(source)
        self.busy_s += time.perf_counter() - began


class CopyStream:
    """Copies to a device on a stream: a copy waits for all earlier work on the compute stream, so a slot is overwritten
    only after its last use; the compute stream waits for the copies that it needs."""

    busy_s = 0.0

    def __init__(self, stream: Any, compute: Callable[[], Any], new_event: Callable[[], Any]) -> None:
        """``compute`` returns the stream that is current where a layer computes."""
        self._stream, self._compute, self._new_event = stream, compute, new_event

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> PendingPage:
        """``copies``: (destination, source) each."""
        before, after = self._new_event(), self._new_event()
        before.record(self._compute())
        self._stream.wait_event(before)
        with self._stream:
            for dest, source in copies:
                dest.copy_(source, non_blocking=True)
            after.record(self._stream)
        return _InFlight(lambda: self._compute().wait_event(after), lambda: True)

    def close(self) -> None:
        self._stream.synchronize()


def copies_to(device: torch.device) -> CopyThread | CopyStream:
    """Copies from host memory to ``device``."""
    kind = Device(device)
    return CopyThread() if kind.host else CopyStream(kind.stream(), kind.current_stream, kind.event)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor``, uint8 [n]; a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
