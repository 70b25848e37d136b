"""The bytes of an input: a file (possibly larger than memory), a pipe or standard input, gzipped or not, read any
number of times."""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moelight.core.errors import InputError

STANDARD_STREAM = Path("-")
# A prompt of a million tokens is about 6 MB of JSON: a longer line is damage (a file that lost its line ends), and
# would be held in memory whole.
LONGEST_LINE = 64 << 20
_BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"
_PACKERS = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_NOT_READ = {
    **{magic: f"packed with {packer}; unpack it, or use gzip" for magic, packer in _PACKERS.items()},
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16; save it as UTF-8"),
}


class InputSource:
    """An input as of its opening; bytes appended later are not read. ``size_bytes`` is the size as stored; ``packed``
    means gzipped."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.size_bytes = os.fstat(descriptor).st_size
        self._stored = range(0)  # of the bytes as stored: the block from which the latest iteration takes lines
        self._taken = 0.0  # the share of that block's lines that it has taken
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        start = self.start(8)
        self.packed = start.startswith(_GZIP)
        for magic, reason in _NOT_READ.items():
            if start.startswith(magic):
                raise self.refusal(reason)

    @property
    def read_bytes(self) -> int:
        """Bytes as stored of what the latest iteration over `lines` has given; of a packed file about as many."""
        return self._stored.start + round(len(self._stored) * self._taken)

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def close(self) -> None:
        self._close()

    def refusal(self, reason: str) -> InputError:
        """The error of an input that cannot be read."""
        return _refusal(self.name, reason)

    def start(self, count: int) -> bytes:
        """The first bytes of the file as stored: at most ``count``."""
        try:
            return os.pread(self._descriptor, count, 0)
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def raw(self) -> io.BufferedReader:
        """A seekable reader of the bytes as stored."""
        return io.BufferedReader(_Window(self, self._descriptor), _BLOCK)

    def blocks(self) -> Iterator[bytes]:
        """The uncompressed bytes, at most 1 MiB at a time; an InputError follows them if the file cannot be read, has
        become shorter, or its gzip data is damaged."""
        raw: io.BufferedReader = self.raw()
        file: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=raw, mode="rb") if self.packed else raw
        try:
            begin = 0
            while block := file.read1(_BLOCK):  # type: ignore[union-attr]
                self._stored, self._taken = range(begin, begin := raw.tell()), 0.0
                yield block
        except EOFError:
            raise self.refusal("the gzip data ends in the middle") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.refusal(f"damaged gzip data ({error})") from None
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """``(number from 1, bytes)`` of every line, without byte order mark and line feed; None stands for the bytes of
        a line above `LONGEST_LINE`, which is not held in memory."""
        number, held, too_long = 1, 0, False
        pieces: list[bytes] = []
        blocks = self.blocks()
        start = next(blocks, b"")
        while len(start) < len(codecs.BOM_UTF8) and (more := next(blocks, b"")):
            start += more
        block = start.removeprefix(codecs.BOM_UTF8)
        while True:
            head, *rest = block.split(b"\n")
            held += len(head)
            taken = len(head)
            too_long = too_long or held > LONGEST_LINE
            if too_long:
                pieces.clear()
            else:
                pieces.append(head)
            if rest:
                self._taken = taken / len(block)
                yield number, None if too_long else b"".join(pieces)
                for line in rest[:-1]:
                    number += 1
                    taken += len(line) + 1
                    self._taken = taken / len(block)
                    yield number, line
                number += 1
                pieces, held, too_long = [rest[-1]], len(rest[-1]), False
            if not (block := next(blocks, b"")):
                break
        self._taken = 1.0
        yield number, None if too_long else b"".join(pieces)

    def digest(self) -> str:
        """BLAKE2b of the bytes as stored, in hexadecimal."""
        state = hashlib.blake2b(digest_size=32)
        with self.raw() as file:
            while block := file.read(_BLOCK):
                state.update(block)
        return state.hexdigest()


def open_input_source(path: Path) -> InputSource:
    """Open the file ``path``; ``-`` is standard input. An input that cannot be read twice is first copied to an unnamed
    file in the folder TMPDIR. Raises InputError, also for a compression other than gzip."""
    name = "standard input" if path == STANDARD_STREAM else str(path)
    try:
        if path == STANDARD_STREAM:
            stream = sys.stdin.buffer
            return InputSource(name, _whole_file(stream) or _copied(stream))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return InputSource(name, descriptor)
        with open(descriptor, "rb") as stream:
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return InputSource(name, _copied(stream))
    except OSError as error:
        raise _unreadable(name, error) from None
    except ValueError as error:
        raise _refusal(repr(name), f"not a usable path ({error})") from None


class _Window(io.RawIOBase):
    """A reader of a descriptor with its own position, so that several readers may share the descriptor."""

    def __init__(self, source: InputSource, descriptor: int) -> None:
        self._source = source
        self._descriptor = descriptor
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._source.is_open:
            raise ValueError(f"{self._source.name} is closed")
        wanted = min(len(buffer), self._source.size_bytes - self._at)
        if wanted <= 0:
            return 0
        count = os.preadv(self._descriptor, [buffer[:wanted]], self._at)
        if count == 0:
            raise self._source.refusal("became shorter while it was read")
        self._at += count
        return count


def _whole_file(stream: BinaryIO) -> int | None:
    """A descriptor of the file redirected into ``stream``, if it is a regular file at its start."""
    try:
        descriptor = stream.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0:
            return os.dup(descriptor)
    except (AttributeError, io.UnsupportedOperation):
        pass
    return None


def _copied(stream: BinaryIO) -> int:
    with tempfile.TemporaryFile() as copy:
        try:
            shutil.copyfileobj(stream, copy, _BLOCK)
            copy.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            folder = tempfile.gettempdir()
            raise OSError(errno.ENOSPC, f"no space to keep it in {folder}; set TMPDIR, or give a file") from None
        return os.dup(copy.fileno())


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"{name}: {reason}", code="prompts_file")


def _unreadable(name: str, error: OSError) -> InputError:
    return _refusal(name, f"cannot be read ({error.strerror or error})")
