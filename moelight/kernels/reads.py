"""Reads from files into memory, several at a time, past the page cache where the file system allows.

Depends only on byte ranges of files and their destinations. Without the extension, Python threads read through the page
cache (`reference_reads`).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from moelight.core.units import MiB
from moelight.hrm.footprint import READ_CHUNK_BYTES, READ_DEPTH
from moelight.kernels import checks, native
from moelight.kernels.dlpack import as_dlpack
from moelight.kernels.reference_reads import PreadReader

MAX_DEPTH = 64
MAX_CHUNK_BYTES = 64 * MiB
CHUNK_STEP = 4096
# Interval at which a wait checks for an interrupt by the user.
_POLL_S = 0.1

Fault = tuple[int, str, str]  # errno, what at which byte, file: the arguments of OSError


class ReadPart(NamedTuple):
    """A read from byte ``offset`` of ``file`` into ``dest``: uint8 [n], contiguous, in CPU memory, pinned or not."""

    file: Path
    offset: int
    dest: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCounts:
    """Statistics of a reader. ``copied_bytes`` passed through a buffer; ``busy_s``: seconds with a read in flight."""

    bytes: int
    copied_bytes: int
    reads: int
    busy_s: float


class ReadTicket:
    """Submitted parts. Keeps their memory alive until they are read."""

    def __init__(self, parts: Sequence[ReadPart], *, told: bool) -> None:
        self._parts = tuple(parts)
        self._told = told
        self._request: Any = None

    def done(self) -> bool:
        """True if no read is in flight any more: `wait` returns at once, or raises."""
        return bool(self._request.finished)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every part is in place; other threads run meanwhile.

        Raises:
            OSError: a part cannot be read, or its file ends early; names file and byte. The contents of the other parts
                are undefined.
            TimeoutError: not within ``timeout`` seconds; the reads continue.
            RuntimeError: called by a callback of the reader, or in a fork, where it would block forever.
        """
        left = float("inf") if timeout is None else timeout
        while not self._request.wait(min(left, _POLL_S)):
            left -= _POLL_S
            if left <= 0:
                raise TimeoutError(f"not read within {timeout} s")
        self._told = True
        self._raise()

    def _raise(self) -> None:
        fault: Fault | None = self._request.fault()
        if fault is not None:
            raise OSError(*fault)

    def _over(self) -> bool:
        """True if the reader may drop the ticket: it is done, and its error, if any, was reported."""
        return self.done() and (self._told or self._request.fault() is None)


class FileReader(AbstractContextManager["FileReader"]):
    """Reads ``files``, each opened once, ``depth`` reads of at most ``chunk_bytes`` at a time, in the order of calls.

    With ``direct`` nothing of a file remains in the page cache. If address and file offset of a part agree modulo 4096,
    the disk writes the part into place and only its unaligned ends are copied; this needs memory on huge pages
    (``MADV_HUGEPAGE``): on pages of 4 KiB it takes twice as long. Other parts pass through buffers on huge pages,
    ``depth * (chunk_bytes + 4096)`` bytes of them, at the same rate for more processor time. Where the file system
    refuses direct reads, they go through the page cache, which is then advised to drop the file.

    Any number of threads may submit and wait. In the child of a fork the reader raises RuntimeError.

    Raises:
        OSError: a file does not exist, is a directory, or cannot be opened.
        ValueError: an argument is wrong; named.
    """

    def __init__(
        self,
        files: Iterable[Path],
        *,
        depth: int = READ_DEPTH,
        chunk_bytes: int = READ_CHUNK_BYTES,
        direct: bool = True,
    ) -> None:
        self._closed = True
        self._running: list[ReadTicket] = []
        self._turn = threading.Lock()
        paths = [_path(file) for file in files]
        self._index = {path: position for position, path in enumerate(dict.fromkeys(paths))}
        _whole("depth", depth, 1, MAX_DEPTH)
        _whole("chunk_bytes", chunk_bytes, CHUNK_STEP, MAX_CHUNK_BYTES)
        if chunk_bytes % CHUNK_STEP:
            raise ValueError(f"chunk_bytes: must be a multiple of {CHUNK_STEP}, is {chunk_bytes}")
        extension = native.extension()
        opened = PreadReader if extension is None else extension.open_reader
        self._export: Callable[[str, Tensor], object] = _numpy if extension is None else as_dlpack
        self._reader: Any = opened([os.fsencode(path) for path in self._index], depth, chunk_bytes, bool(direct))
        self._closed = False
        _OPEN.add(self)

    def submit(self, parts: Sequence[ReadPart], done: Callable[[OSError | None], None] | None = None) -> ReadTicket:
        """Submit ``parts`` to be read.

        ``done`` is called once, in a thread of the reader, with None or the error. It must not wait for reads; an
        exception it raises goes to `sys.unraisablehook`.

        Raises ValueError, naming the argument, for a part of a file that was not opened, a wrong offset or memory.
        """
        if self._closed:
            raise ValueError("reader: is closed")
        found = [self._check(part) for part in parts]
        if not found:
            raise ValueError("parts: must be at least one")
        ticket = ReadTicket(found, told=done is not None)
        tell = None if done is None else lambda fault: done(None if fault is None else OSError(*fault))
        ticket._request = self._reader.submit(
            [self._index[part.file] for part in found],
            [part.offset for part in found],
            [self._export("dest", part.dest) for part in found],
            tell,
        )
        with self._turn:
            self._running = [other for other in self._running if not other._over()]
            self._running.append(ticket)
        return ticket

    def direct(self, file: Path) -> bool:
        """True if ``file`` is read past the page cache."""
        return bool(self._reader.direct(self._index[_path(file)]))

    def counts(self) -> ReadCounts:
        """Statistics so far."""
        return ReadCounts(**self._reader.counts())

    def close(self) -> None:
        """Wait for the reads in flight and close the files.

        Raises:
            OSError: the first error that no `wait` and no callback has reported.
        """
        if self._closed:
            return
        self._reader.close()
        self._closed = True
        _OPEN.discard(self)
        running, self._running = self._running, []
        for ticket in running:
            if ticket.done() and not ticket._told:
                ticket._raise()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for ticket in self._running:
                ticket._told = True
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except RuntimeError:  # released by its own callback, in a thread that cannot wait for itself
            threading.Thread(target=self.close, name="moelight-reader-closing").start()

    def _check(self, part: object) -> ReadPart:
        if not isinstance(part, tuple) or len(part) != 3:
            raise ValueError(f"parts: each is (file, offset, dest), not {type(part).__name__}")
        file, offset, dest = part
        path = _path(file)
        if path not in self._index:
            raise ValueError(f"file: {path} is not one of those that were opened")
        _whole("offset", offset, 0, 1 << 62)
        checks._tensor("dest", dest)
        checks._layout("dest", dest, 1, torch.uint8)
        return ReadPart(path, offset, dest)


def _path(file: object) -> Path:
    if not isinstance(file, (str, os.PathLike)):
        raise ValueError(f"file: must be a path, is {type(file).__name__}")
    path = Path(file)
    if "\0" in str(path):
        raise ValueError("file: no path has a zero byte in it")
    return path


def _whole(name: str, number: object, least: int, most: int) -> None:
    if not isinstance(number, int) or not least <= number <= most:
        raise ValueError(f"{name}: must be an integer from {least} to {most}, is {number!r}")


def _numpy(_: str, tensor: Tensor) -> object:
    return tensor.numpy()


_OPEN: WeakSet[FileReader] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all readers before the interpreter ends, while callbacks can still run."""
    for reader in list(_OPEN):
        reader.close()
