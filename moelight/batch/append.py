"""Files that only grow: bytes at known offsets, checksums of what was added, gzip where it is asked for.

Knows descriptors and bytes. Refuses to know what a row is, or which of the bytes count.
"""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from moelight.batch import faults

_AT_ONCE_BYTES = 1 << 20  # enough that system calls cost nothing, little enough that memory stays flat
_GZIP = zlib.MAX_WBITS | 16  # with gzip's header; zlib leaves time and name out of it


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """Bytes ``start`` to ``end`` of a file, and their crc32."""

    start: int
    end: int
    crc: int


class AppendFile:
    """A file that grows behind ``end``; whatever lies there already is cut off.

    ``end`` is the offset behind all bytes that were handed to the system. What is appended waits in memory until there
    is enough of it, or until ``seal``.
    """

    def __init__(self, fd: int, path: Path, *, end: int = 0, gzip: bool = False) -> None:
        self.path = path
        self.end = end
        self._fd = fd
        self._gzip = gzip
        self._held = bytearray()
        self._member: zlib._Compress | None = None
        self._sealed = end
        self._crc = 0
        os.ftruncate(fd, end)

    @property
    def held(self) -> int:
        """Bytes that are still in memory, as they were appended."""
        return len(self._held)

    @property
    def unsealed(self) -> bool:
        """There is something to seal."""
        return bool(self._held) or self._member is not None or self.end > self._sealed

    def append(self, data: bytes) -> None:
        """``data`` comes next. Raises OSError if the system refuses what had to be written."""
        self._held += data
        if len(self._held) >= _AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the system, but for what the compressor still keeps."""
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
        """Hand everything to the system, close the gzip member: the bytes since the last call of this."""
        self.flush()
        if self._member is not None:
            self._write(self._member.flush())
            self._member = None
        extent = ByteRange(start=self._sealed, end=self.end, crc=self._crc)
        self._sealed, self._crc = self.end, 0
        return extent

    def make_valid(self) -> None:
        """An empty file is no gzip file: give it one empty member."""
        if self._gzip and self.end == 0 and not self._held and self._member is None:
            self._member = zlib.compressobj(wbits=_GZIP)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes that were handed to the system, from ``offset``. Raises OSError if they are not there."""
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OSError(errno.EIO, f"{size} bytes at {offset} are gone")
        return data

    def sync(self) -> None:
        """Everything that was handed to the system is on the disk, or OSError: then it may be lost."""
        faults.reach("before_fsync_rows")
        os.fsync(self._fd)

    def cut(self, end: int) -> None:
        """Forget what lies behind ``end``."""
        os.ftruncate(self._fd, end)
        self.end = self._sealed = end

    def close(self) -> None:
        """Bytes that were not handed to the system are gone."""
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
    """All of ``data``, however little the system takes at a time."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def open_private(path: Path, *, create: bool = True) -> int:
    """A descriptor to read and write ``path``, which children do not inherit and which follows no link."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    return os.open(path, flags, 0o666)


def sync_directory(path: Path) -> None:
    """Names made, removed or changed in the directory ``path`` are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
