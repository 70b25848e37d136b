"""Reads from files into memory, several at a time, past the page cache where the file system allows.

Without the extension, Python threads read through the page cache (`PreadReader`).
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from moelight.core.units import MiB
from moelight.formats.format import RepackTable
from moelight.hrm.footprint import READ_CHUNK_BYTES, READ_DEPTH
from moelight.kernels import native
from moelight.kernels.arguments import as_dlpack, check_integer, check_tensor

Fault = tuple[int, str, str]


class PreadRequest:
    """One call of `PreadReader.submit`, whose chunks are read in order."""

    def __init__(self) -> None:
        self.chunks: list[Future[Fault | None]] = []
        self.failed = False
        self._process = os.getpid()

    @property
    def finished(self) -> bool:
        return all(chunk.done() for chunk in self.chunks)

    def wait(self, seconds: float) -> bool:
        if not self.finished:
            _check_home(self._process)
        return not wait(self.chunks, seconds).not_done

    def fault(self) -> Fault | None:
        return next((fault for chunk in self.chunks if (fault := chunk.result())), None)


class PreadReader:
    """The methods of the extension's `FileReader`; every file is read through the page cache."""

    def __init__(self, files: list[bytes], depth: int, chunk_bytes: int, direct: bool) -> None:  # noqa: ARG002
        self._paths = [os.fsdecode(file) for file in files]
        self._chunk_bytes, self._process = chunk_bytes, os.getpid()
        self._turn = threading.Lock()
        self._bytes = self._reads = self._in_flight = 0
        self._busy_s = self._busy_since = 0.0
        with ExitStack() as opened:
            self._descriptors = [_open(path, opened) for path in self._paths]
            self._files = opened.pop_all()
        self._threads = ThreadPoolExecutor(depth, "moelight-reader")

    def submit(
        self,
        files: list[int],
        offsets: list[int],
        dests: list[Any],
        tables: list[RepackTable | None],
        done: None,  # noqa: ARG002
    ) -> PreadRequest:
        _check_home(self._process)
        if any(tables):
            raise ValueError("table: must be None without the extension")
        request = PreadRequest()
        request.chunks = [
            self._threads.submit(self._serve, request, file, offset + begin, dest[begin : begin + self._chunk_bytes])
            for file, offset, dest in zip(files, offsets, dests, strict=True)
            for begin in range(0, len(dest) or 1, self._chunk_bytes)
        ]
        return request

    def direct(self, _: int) -> bool:
        return False

    def counts(self) -> dict[str, float]:
        _check_home(self._process)
        with self._turn:
            running_s = time.perf_counter() - self._busy_since if self._in_flight else 0.0
            busy_s = self._busy_s + running_s
            return {"bytes": self._bytes, "copied_bytes": 0, "reads": self._reads, "busy_s": busy_s}

    def close(self) -> None:
        if self._process == os.getpid():
            self._threads.shutdown()
            self._files.close()

    def _serve(self, request: PreadRequest, file: int, offset: int, dest: Any) -> Fault | None:
        if request.failed or not len(dest):
            return None
        with self._turn:
            if self._in_flight == 0:
                self._busy_since = time.perf_counter()
            self._in_flight += 1
        fault = self._read(file, offset, dest)
        with self._turn:
            self._reads += 1
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += time.perf_counter() - self._busy_since
            self._bytes += len(dest) if fault is None else 0
        request.failed |= fault is not None
        return fault

    def _read(self, file: int, offset: int, dest: Any) -> Fault | None:
        left, at = memoryview(dest), offset
        while left:
            try:
                count = os.preadv(self._descriptors[file], [left], at)
            except OSError as error:
                return error.errno or errno.EIO, f"{error.strerror}, at byte {at}", self._paths[file]
            if count == 0:
                return errno.EIO, f"the file ends early, at byte {at}", self._paths[file]
            left, at = left[count:], at + count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptors[file], offset, len(dest), os.POSIX_FADV_DONTNEED)
        return None


def _check_home(process: int) -> None:
    if process != os.getpid():
        raise RuntimeError("a reader serves the process that opened it, not its forks")


def _open(path: str, opened: ExitStack) -> int:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ESPIPE
        raise OSError(code, os.strerror(code), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


MAX_DEPTH = 64
MAX_CHUNK_BYTES = 64 * MiB
CHUNK_STEP = 4096
# Interval at which a wait checks for an interrupt by the user.
_POLL_S = 0.1


class ReadPart(NamedTuple):
    """A read from byte ``offset`` of ``file`` into ``dest``: uint8 [n], contiguous, in CPU memory, pinned or not.
    ``table``: how ``dest`` is turned once all parts of the call are read, by the thread that ends them (the extension
    alone does so); None: it stays as it is."""

    file: Path
    offset: int
    dest: Tensor
    table: RepackTable | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCounts:
    """Statistics of a reader. ``copied_bytes`` passed through a buffer; ``busy_s``: seconds with a read in flight."""

    bytes: int
    copied_bytes: int
    reads: int
    busy_s: float


class ReadTicket:
    """Submitted parts. Keeps their memory alive until they are read."""

    def __init__(self, parts: Sequence[ReadPart], request: Any) -> None:
        self._parts, self._request = parts, request
        self._told = False

    def done(self) -> bool:
        """True if no read is in flight any more: `wait` returns at once, or raises."""
        return bool(self._request.finished)

    def wait(self) -> None:
        """Return when every part is in place; other threads run meanwhile.

        Raises:
            OSError: a part cannot be read, or its file ends early; names file and byte. The other parts are undefined.
            RuntimeError: called in a fork, where it would block forever.
        """
        while not self._request.wait(_POLL_S):
            pass
        self._told = True
        self._raise()

    def _raise(self) -> None:
        fault: Fault | None = self._request.fault()
        if fault is not None:
            raise OSError(*fault)

    def _over(self) -> bool:
        """True if the reader may drop the ticket: done, and its error, if any, reported."""
        return self.done() and (self._told or self._request.fault() is None)


class FileReader(AbstractContextManager["FileReader"]):
    """Reads ``files``, each opened once, ``depth`` reads of at most ``chunk_bytes`` at a time, in the order of calls.

    With ``direct`` nothing of a file remains in the page cache. If address and file offset of a part agree modulo 4096,
    the disk writes the part into place and only its unaligned ends are copied; this needs memory on huge pages
    (``MADV_HUGEPAGE``): on pages of 4 KiB it takes twice as long. Other parts pass through buffers on huge pages,
    ``depth * (chunk_bytes + 4096)`` bytes of them, at the same rate for more processor time. Where the file system
    refuses direct reads, they go through the page cache, which is then advised to drop the file.

    Any number of threads may submit and wait; in the child of a fork the reader raises RuntimeError. Raises OSError if
    a file cannot be opened, and ValueError for a wrong argument, which it names.
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
        check_integer("depth", depth, 1, MAX_DEPTH)
        check_integer("chunk_bytes", chunk_bytes, CHUNK_STEP, MAX_CHUNK_BYTES)
        if chunk_bytes % CHUNK_STEP:
            raise ValueError(f"chunk_bytes: must be a multiple of {CHUNK_STEP}, is {chunk_bytes}")
        extension = native.extension()
        opened = PreadReader if extension is None else extension.open_reader
        self._export: Callable[[str, Tensor], object] = _numpy if extension is None else as_dlpack
        self._reader: Any = opened([os.fsencode(path) for path in self._index], depth, chunk_bytes, bool(direct))
        self._closed = False
        _OPEN.add(self)

    def submit(self, parts: Sequence[ReadPart]) -> ReadTicket:
        """Submit ``parts`` to be read; raises ValueError for a file that was not opened, a wrong offset or memory."""
        if self._closed:
            raise ValueError("reader: is closed")
        checked = tuple(self._check(part) for part in parts)
        if not checked:
            raise ValueError("parts: must be at least one")
        files, offsets = [self._index[part.file] for part in checked], [part.offset for part in checked]
        dests = [self._export("dest", part.dest) for part in checked]
        tables = [part.table for part in checked]
        ticket = ReadTicket(checked, self._reader.submit(files, offsets, dests, tables, None))
        with self._turn:
            self._running = [other for other in self._running if not other._over()]
            self._running.append(ticket)
        return ticket

    def direct(self, file: Path) -> bool:
        """True if ``file`` is read past the page cache."""
        return bool(self._reader.direct(self._index[_path(file)]))

    def counts(self) -> ReadCounts:
        return ReadCounts(**self._reader.counts())

    def close(self) -> None:
        """Wait for the reads in flight, close the files; raises the first OSError not yet reported."""
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
        self.close()

    def _check(self, part: object) -> ReadPart:
        if not isinstance(part, tuple) or not 3 <= len(part) <= 4:
            raise ValueError(f"parts: each is (file, offset, dest) and perhaps a table, not {type(part).__name__}")
        file, offset, dest, table = (*part, None)[:4]
        path = _path(file)
        if path not in self._index:
            raise ValueError(f"file: {path} is not one of those that were opened")
        check_integer("offset", offset, 0, 1 << 62)
        check_tensor("dest", dest, torch.uint8, (None,))
        return ReadPart(path, offset, dest, table)


def _path(file: object) -> Path:
    if not isinstance(file, (str, os.PathLike)):
        raise ValueError(f"file: must be a path, is {type(file).__name__}")
    path = Path(file)
    if "\0" in str(path):
        raise ValueError("file: no path has a zero byte in it")
    return path


def _numpy(_: str, tensor: Tensor) -> object:
    return tensor.numpy()


_OPEN: WeakSet[FileReader] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all readers before the interpreter ends."""
    for reader in list(_OPEN):
        reader.close()
