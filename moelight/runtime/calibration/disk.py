"""Read speed of a disk by one unlinked scratch file: as passes read pages, past the page cache, and from that cache."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from moelight.core.errors import ConfigError
from moelight.core.units import MiB
from moelight.kernels.reads import FileReader, ReadPart, ReadTicket
from moelight.runtime.calibration.timing import Measurement, Work, beside, reading_of, repeated

BLOCK_BYTES = 8 * MiB
LEAST_BLOCKS = 2
DIRECT_READERS = 4
BESIDE_LONGER = 5
SHARE_OF_FREE = 4  # the scratch file takes at most 1 / SHARE_OF_FREE of the free space
_DIRECT = getattr(os, "O_DIRECT", 0)
_PAGE = 4096
_APART = 3
_ON_THEIR_WAY = 4
_LEAST_ARRIVALS = 2
_CACHED_ABOVE = 0.6  # reads faster than this share of the page cache's speed were not served by the disk


class Scratch(ExitStack):
    """A file of whole blocks, unlinked at once and freed on exit; raises ConfigError if ``directory`` cannot be written
    or its disk is almost full. ``direct``: its descriptor for direct I/O; None where the file system has none."""

    def __init__(self, directory: Path, size: int, *, seconds: float) -> None:
        """Write at most ``size`` bytes, at most a quarter of the free space, for about ``seconds``."""
        super().__init__()
        self.direct: int | None = None
        try:
            max_bytes = shutil.disk_usage(directory).free // SHARE_OF_FREE
            if max_bytes < LEAST_BLOCKS * BLOCK_BYTES:
                raise ConfigError(f"{directory}: too little disk is free to measure it; name another with --disk-dir")
            self._open(directory)
            self.blocks = self._write(min(size, max_bytes) // BLOCK_BYTES, seconds)
        except OSError as error:
            self.close()
            raise ConfigError(f"{directory}: the disk cannot be measured there ({error.strerror or error})") from None
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self.blocks * BLOCK_BYTES

    def read(self, block: int, into: mmap.mmap, *, direct: bool = False) -> None:
        descriptor = self.direct if direct and self.direct is not None else self.buffered
        if os.preadv(descriptor, [into], block * BLOCK_BYTES) != BLOCK_BYTES:
            raise ConfigError("the scratch file of the disk measurement ends early: another program cut it")

    def forget(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.buffered, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self.buffered, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def _open(self, directory: Path) -> None:
        self.buffered, name = tempfile.mkstemp(prefix=".moelight-", dir=directory)
        self.callback(os.close, self.buffered)
        try:
            if _DIRECT:
                with suppress(OSError):  # some file systems have no direct I/O
                    self.direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
                    self.callback(os.close, self.direct)
        finally:
            Path(name).unlink()

    def _write(self, blocks: int, seconds: float) -> int:
        """Return the number of blocks written."""
        began, done = time.perf_counter(), 0
        with block_buffer() as block:
            block[:] = os.urandom(BLOCK_BYTES)
            while done < LEAST_BLOCKS or (done < blocks and time.perf_counter() - began < seconds):
                block[:_PAGE] = os.urandom(_PAGE)
                self._write_block(block, done)
                done += 1
        os.fsync(self.buffered)
        return done

    def _write_block(self, block: mmap.mmap, number: int) -> None:
        if self.direct is not None:
            try:
                os.pwritev(self.direct, [block], number * BLOCK_BYTES)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = None  # O_DIRECT is accepted at open but not for writes
        os.pwritev(self.buffered, [block], number * BLOCK_BYTES)


def block_buffer() -> mmap.mmap:
    """Memory for one block, aligned for direct reads."""
    return mmap.mmap(-1, BLOCK_BYTES)


def cached_reads(scratch: Scratch, seconds: float) -> Measurement:
    """bytes/s of one reader of a file in the page cache."""

    def read() -> None:
        for number in lane_order(scratch.blocks):
            scratch.read(number, block)

    with block_buffer() as block:
        read()
        return reading_of(repeated(read, seconds), scratch.size)


def lane_reads(scratch: Scratch, seconds: float) -> Measurement:
    """bytes/s of the disk lane: past the page cache where possible, pages in the order of a pass, several in flight."""
    with _DiskLane(scratch) as lane:
        return reading_of(repeated(lambda: list(lane.blocks()), seconds, before=scratch.forget), scratch.size)


def direct_reads(scratch: Scratch, seconds: float) -> Measurement:
    """bytes/s of several readers past the page cache, each with its own blocks; requires ``scratch.direct``."""

    def share(reader: int) -> None:
        with block_buffer() as block:
            for number in range(reader, scratch.blocks, DIRECT_READERS):
                scratch.read(number, block, direct=True)

    with ThreadPoolExecutor(DIRECT_READERS) as readers:
        samples = repeated(lambda: list(readers.map(share, range(DIRECT_READERS))), seconds)
    return reading_of(samples, scratch.size)


def beside_reads(work: Work, scratch: Scratch, seconds: float) -> Measurement:
    """Calls of ``work`` per second beside a disk lane that reads without a pause; the mean, so disturbances count."""
    with _reading(scratch):
        work()
        samples = repeated(work, BESIDE_LONGER * seconds)
    return Measurement(rate=len(samples) / sum(samples), spread=reading_of(samples).spread)


def reads_beside(work: Work, scratch: Scratch, seconds: float) -> Measurement:
    """bytes/s of the disk lane beside ``work`` without a pause, from the first arrival of a block to the last."""
    with _reading(scratch) as arrived:
        began = time.perf_counter()
        while time.perf_counter() - began < BESIDE_LONGER * seconds or len(arrived) < _LEAST_ARRIVALS:
            work()
        first_s, last_s, blocks = arrived[0], arrived[-1], len(arrived) - 1
    return Measurement(rate=blocks * BLOCK_BYTES / max(last_s - first_s, 1e-9), spread=0.0)


def past_cache(scratch: Scratch) -> bool:
    """True if the disk lane reads past the page cache, so that the disk serves the reads at any speed."""
    with _DiskLane(scratch) as lane:
        next(lane.blocks())  # direct reads prove to work only at the first read
        return lane.direct


def from_cache(lane: Measurement, cached: Measurement) -> bool:
    """True if reads meant for the disk were so fast that the page cache must have served them."""
    return lane.rate > _CACHED_ABOVE * cached.rate


def lane_order(blocks: int) -> list[int]:
    """All blocks, none after its neighbour: a pass skips resident pages, so read-ahead seldom helps."""
    return [number for first in range(_APART) for number in range(first, blocks, _APART)]


class _DiskLane(AbstractContextManager["_DiskLane"]):
    """Reads the scratch file as the disk lane reads pages, into slots whose alignment differs from the file's."""

    def __init__(self, scratch: Scratch) -> None:
        self._order = lane_order(scratch.blocks)
        self._file = Path(f"/dev/fd/{scratch.buffered}")
        self._reader = FileReader([self._file])
        slots = (torch.empty(BLOCK_BYTES + _APART, dtype=torch.uint8) for _ in range(_ON_THEIR_WAY))
        self._slots = [slot.fill_(0)[_APART:] for slot in slots]  # touched, as in a pass

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    @property
    def direct(self) -> bool:
        return self._reader.direct(self._file)

    def blocks(self) -> Iterator[int]:
        """Yield the numbers of all blocks as they arrive."""
        coming: deque[ReadTicket] = deque()
        for position, number in enumerate(self._order):
            if position >= _ON_THEIR_WAY:
                coming.popleft().wait()
                yield self._order[position - _ON_THEIR_WAY]
            into = self._slots[position % _ON_THEIR_WAY]
            coming.append(self._reader.submit([ReadPart(self._file, number * BLOCK_BYTES, into)]))
        for number, ticket in zip(self._order[-len(coming) :], coming, strict=True):
            ticket.wait()
            yield number


@contextmanager
def _reading(scratch: Scratch) -> Iterator[list[float]]:
    """Read the file over and over on a thread, as the disk lane does; yield the growing list of arrival times."""
    arrived = list[float]()

    def read(enough: threading.Event) -> None:
        with _DiskLane(scratch) as lane:
            while not enough.is_set():
                scratch.forget()
                for _ in lane.blocks():
                    if enough.is_set():
                        return
                    arrived.append(time.perf_counter())

    with beside(read, "moelight-scratch-reader"):
        yield arrived
