"""Reads byte ranges of files into tensors, directly or through a small bounce buffer that converts dtypes or crosses
devices.

Files are read, not memory-mapped, so their contents do not count towards the process's memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from moelight.core.errors import CheckpointError
from moelight.core.small_files import open_regular, read_error_text
from moelight.core.units import MiB
from moelight.weights.tensor_map import TensorExtent
from moelight.weights.torch_dtypes import to_torch

BOUNCE_BYTES = 4 * MiB


class ExtentReader(AbstractContextManager["ExtentReader"]):
    """Reads extents of ``files``, each opened once. Thread-safe.

    Raises:
        CheckpointError: a file cannot be opened, or (while reading) ends early or gives an I/O error.
    """

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
        """Close every file. Reading after `close` is a programming error."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, extent: TensorExtent, dest: torch.Tensor) -> None:
        """Fill ``dest`` (contiguous, as many numbers as ``extent`` holds, any device, any dtype).

        Releases the GIL during disk reads. Numbers are rounded to ``dest``'s dtype if it differs from the stored one.
        """
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
