"""Reference implementation of the extension's reader, with Python threads and through the page cache, for machines
without a compiler.

The caller, `reads`, checks the arguments.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Fault = tuple[int, str, str]
Done = Callable[["Fault | None"], None]


class PreadRequest:
    """One call of `PreadReader.submit`."""

    def __init__(self, chunks: int, done: Done | None) -> None:
        self.left = chunks
        self.done = done
        self.first: Fault | None = None
        self.first_number = 0
        self._finished = threading.Event()
        self._process = os.getpid()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def wait(self, seconds: float) -> bool:
        if not self.finished:
            _check_home(self._process)
            _refuse_to_wait()
        return self._finished.wait(seconds)

    def fault(self) -> Fault | None:
        return self.first

    def finish(self) -> None:
        """Call the callback, then release the threads in `wait`."""
        if self.done is not None:
            try:
                self.done(self.first)
            except BaseException as error:  # noqa: BLE001 - nobody above could be told
                told = (type(error), error, error.__traceback__, "a callback of a file reader", None)
                sys.unraisablehook(SimpleNamespace(**dict(zip(_UNRAISABLE, told, strict=True))))
            self.done = None
        self._finished.set()


class PreadReader:
    """Same methods as the extension's `FileReader`; every file is read through the page cache."""

    def __init__(self, files: list[bytes], depth: int, chunk_bytes: int, direct: bool) -> None:  # noqa: ARG002
        self._descriptors: list[int] = []
        self._paths = [os.fsdecode(file) for file in files]
        self._chunk_bytes, self._process = chunk_bytes, os.getpid()
        self._waiting: deque[tuple[PreadRequest, int, tuple[int, int, Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._bytes = self._reads = self._in_flight = 0
        self._busy_s = self._busy_since = 0.0
        try:
            for path in self._paths:
                self._descriptors.append(_open(path))
        except OSError:
            self._close_files()
            raise
        self._threads = [
            threading.Thread(target=self._serve, name="moelight-reader", daemon=True) for _ in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, files: list[int], offsets: list[int], dests: list[Any], done: Done | None) -> PreadRequest:
        _check_home(self._process)
        chunks = [
            (file, offset + begin, dest[begin : begin + self._chunk_bytes])
            for file, offset, dest in zip(files, offsets, dests, strict=True)
            for begin in range(0, len(dest) or 1, self._chunk_bytes)
        ]
        request = PreadRequest(len(chunks), done)
        with self._changed:
            self._waiting.extend((request, number, chunk) for number, chunk in enumerate(chunks))
            self._changed.notify_all()
        return request

    def direct(self, _: int) -> bool:
        return False

    def counts(self) -> dict[str, float]:
        _check_home(self._process)
        with self._changed:
            running_s = time.perf_counter() - self._busy_since if self._in_flight else 0.0
            busy_s = self._busy_s + running_s
            return {"bytes": self._bytes, "copied_bytes": 0, "reads": self._reads, "busy_s": busy_s}

    def close(self) -> None:
        if self._process != os.getpid():
            return
        _refuse_to_wait()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._close_files()

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _serve(self) -> None:
        _LOCAL.reading = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                if not self._waiting:
                    return
                request, number, (file, offset, dest) = self._waiting.popleft()
                wanted = request.first is None and len(dest) > 0
                if wanted and self._in_flight == 0:
                    self._busy_since = time.perf_counter()
                self._in_flight += wanted
            fault = self._read(file, offset, dest) if wanted else None
            with self._changed:
                self._reads += wanted
                self._in_flight -= wanted
                if wanted and self._in_flight == 0:
                    self._busy_s += time.perf_counter() - self._busy_since
                self._bytes += len(dest) if wanted and fault is None else 0
                if fault is not None and (request.first is None or number < request.first_number):
                    request.first, request.first_number = fault, number
                request.left -= 1
                last = request.left == 0
            if last:
                request.finish()

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


_LOCAL = threading.local()
_UNRAISABLE = ("exc_type", "exc_value", "exc_traceback", "err_msg", "object")


def _refuse_to_wait() -> None:
    if getattr(_LOCAL, "reading", False):
        raise RuntimeError("a callback of a reader must not wait for reads: it keeps one of them waiting")


def _check_home(process: int) -> None:
    if process != os.getpid():
        raise RuntimeError("a reader serves the process that opened it, not its forks")


def _open(path: str) -> int:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ESPIPE
        raise OSError(code, os.strerror(code), path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
