"""Append-only files: bytes at known offsets, checksums of the appended ranges, optional gzip."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import NamedTuple

from moelight.batch import faults

_AT_ONCE_BYTES = 1 << 20  # large enough to amortize system calls, small enough to bound memory
_GZIP = zlib.MAX_WBITS | 16  # with a gzip header; zlib writes no time and no name into it


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``end`` of a file, and their crc32."""

    start: int
    end: int
    crc: int


class AppendFile:
    """A file that is first truncated to ``end``, and then grows; ``end`` is behind all bytes handed to the system.
    Other bytes are buffered until the buffer is full or `seal` is called."""

    def __init__(self, fd: int, *, end: int, gzip: bool) -> None:
        self.end = end
        self._fd = fd
        self._gzip = gzip
        self._held = bytearray()
        self._member: zlib._Compress | None = None
        self._sealed = end
        self._crc = 0
        os.ftruncate(fd, end)

    @property
    def unsealed(self) -> bool:
        """True if `seal` has something to write or to close."""
        return bool(self._held) or self._member is not None or self.end > self._sealed

    def append(self, data: bytes) -> None:
        self._held += data
        if len(self._held) >= _AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the buffer to the system, except the bytes that the compressor still holds."""
        if not self._held:
            return
        held = bytes(self._held)
        if self._gzip:
            if self._member is None:
                self._member = zlib.compressobj(wbits=_GZIP)
            held = self._member.compress(held)
        self._held.clear()
        self._write(held)

    def seal(self) -> ByteRange:
        """Flush, close the gzip member, and return the range of bytes written since the last call."""
        self.flush()
        if self._member is not None:
            self._write(self._member.flush())
            self._member = None
        extent = ByteRange(self._sealed, self.end, self._crc)
        self._sealed, self._crc = self.end, 0
        return extent

    def make_valid(self) -> None:
        """Begin an empty gzip member if the file is empty: an empty file is not valid gzip."""
        if self._gzip and self.end == 0 and not self._held and self._member is None:
            self._member = zlib.compressobj(wbits=_GZIP)

    def sync(self) -> None:
        """Fsync the file. After an OSError, bytes handed to the system may be lost."""
        faults.reach("before_fsync_rows")
        os.fsync(self._fd)

    def cut(self, end: int) -> None:
        os.ftruncate(self._fd, end)
        self.end = self._sealed = end

    def close(self) -> None:
        """Close the file. Bytes that were not handed to the system are lost."""
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        faults.reach("before_write")
        faults.reach("mid_write", self._fd, data, self.end)
        write_at(self._fd, data, self.end)
        faults.reach("after_write")
        self.end += len(data)
        self._crc = zlib.crc32(data, self._crc)


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``, in several system calls if needed."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def open_private(path: Path, *, create: bool = True) -> int:
    """Open ``path`` for reading and writing; the descriptor is not inherited and follows no symlink."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    return os.open(path, flags, 0o666)


def sync_directory(path: Path) -> None:
    """Fsync the directory ``path``: names created, removed or changed in it become durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
