"""The rows of a job: on the disk, each exactly once, also after a crash; or in a pipe, which cannot be resumed.

Depends on row numbers, bytes and the order of writes. A commit fsyncs the rows since the last commit, and then stores
the lengths of the files and the state of the job (`RowStore`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NoReturn

from moelight.batch import faults
from moelight.batch.append import AppendFile, ByteRange, open_private, sync_directory
from moelight.batch.crash_guard import CrashGuard
from moelight.batch.output import STANDARD_OUTPUT, check_writable, clear, writes_directly
from moelight.batch.paths import WHAT, Outputs, failed
from moelight.batch.recovery import Opened, open_job, take_names
from moelight.batch.store import JobRecord, WaitingRows, hold
from moelight.core.errors import InputError, MoelightError, UserError

State = Literal["new", "resumed", "complete"]
_HELD_BYTES = 16 << 20  # of waiting rows in memory


class Ledger:
    """The destination of the rows of a job; a context that closes it.

    ``state`` is ``new``, ``resumed`` or ``complete``; ``changed`` lists the differences that ``allow_changed``
    accepted; ``totals`` sums those of all `put` calls; ``struck`` are rows that are refused because the process died
    while it prepared them; ``scan`` is the noted result of scanning the input.
    """

    struck: frozenset[int] = frozenset()

    def __init__(self, outputs: Outputs, record: JobRecord, waiting: WaitingRows) -> None:
        self.state: State = "new"
        self.changed: list[str] = []
        self.scan = record.scan
        self.completed, self.failed, self.totals = record.completed, record.failed, dict(record.totals)
        self._in_order = outputs.order == "input"
        self._done = record.done
        self._next = record.next
        self._waiting = waiting

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def done(self, number: int) -> bool:
        """True if row ``number`` was put, by this process or an earlier one."""
        return number in self._done

    def preparing(self, number: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context in which row ``number`` is prepared; raises InputError if the row is in ``struck``."""
        return contextlib.nullcontext()

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        self.scan = dict(scan)

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """Append ``data``, line end included, as row ``number``, from 0. Raises InputError if the row cannot be
        written, and BrokenPipeError if the reader has closed the pipe."""
        if number in self._done:
            raise MoelightError(f"row {number} was answered twice")
        self._done.add(number)
        if failed:
            self.failed += 1
        else:
            self.completed += 1
        for name, count in (totals or {}).items():
            self.totals[name] = self.totals.get(name, 0) + count
        if self._in_order and number != self._next:
            self._waiting.hold(number, data, failed=failed)
            return
        self._write(data, failed=failed)
        self._next += 1
        while self._in_order and self._next in self._done:
            ready = self._take(self._next)
            self._write(ready[0], failed=ready[1])
            self._next += 1

    def tick(self) -> None:
        """Begin a commit if it is due; does not wait for the disk."""

    def commit(self) -> None:
        """Make every row that was put durable; returns when all are on the disk."""

    def finish(self, total: int) -> None:
        """Complete the files of ``total`` rows. Raises MoelightError if a row is missing, InputError if the disk
        refuses."""
        self._refuse_missing(total)
        self.state = "complete"

    def close(self) -> None:
        raise NotImplementedError

    def _write(self, data: bytes, *, failed: bool) -> None:
        raise NotImplementedError

    def _take(self, number: int) -> tuple[bytes, bool]:
        return self._waiting.take(number)

    def _refuse_missing(self, total: int) -> None:
        missing = self._done.missing(total)
        if missing is not None:
            raise MoelightError(f"row {missing} was never answered")


class Journal(Ledger):
    """The rows of one job in files. Not thread-safe. Rows that were put and not committed are lost if the process is
    killed; counts and totals include them. A write that fails is an InputError of the next call and of every later one;
    committed rows are kept."""

    def __init__(self, outputs: Outputs, opened: Opened) -> None:
        record = opened.record
        super().__init__(outputs, record, WaitingRows(opened.store.base))
        self.state = "complete" if opened.complete else "new" if opened.new else "resumed"
        self.changed = opened.changed
        self._outputs = outputs
        self._opened = opened
        self._files: dict[str, AppendFile] = {}
        self._pending: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._counted = self._counts()
        # The first tick commits, so that a reader of the output sees progress early.
        self._last = time.monotonic() - outputs.sync_s
        self._failure: InputError | None = None
        self._torn = self._closed = False
        self._made: list[Path] = []
        self._deaths = CrashGuard(opened.places.deaths, forget=opened.new or bool(opened.changed))
        self.struck = self._deaths.struck
        if not opened.complete:
            self._open_files(record.ends)

    @classmethod
    def open(
        cls,
        outputs: Outputs,
        facts: Mapping[str, Any],
        *,
        informative: Iterable[str] = (),
        restart: bool = False,
        allow_changed: bool = False,
    ) -> Journal:
        """Begin the job, or resume it.

        Args:
            facts: JSON values that determine the rows; compared with those of the job's first start, key by key.
            informative: dotted keys of ``facts`` that are stored and not compared.
            restart: discard finished rows; earlier files are removed (``atomic``: when the new ones are renamed).
            allow_changed: resume with other facts. The scan of the input is discarded.

        Raises:
            InputError: ``job_running``: another process writes this output. ``job_changed``: facts differ. ``journal``:
                an output without its journal, a journal without its output, or one that does not match the other.
                ``output_path``: the files cannot be written.
        """
        opened = open_job(outputs, facts, informative=informative, restart=restart, allow_changed=allow_changed)
        try:
            return cls(outputs, opened)
        except BaseException:
            opened.store.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The error that ended the block is the one to report.
        with contextlib.suppress(InputError, OSError):
            self.close(forget=isinstance(error, UserError))

    def preparing(self, number: int) -> AbstractContextManager[None]:
        return self._deaths.at(number)

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        self._ready()
        self._wait_commit()
        super().note_scan(scan)
        try:
            self._opened.store.commit({"scan": self.scan})
        except OSError as error:
            self._fail(error)

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        self._ready()
        torn, self._torn = self._torn, True
        try:
            super().put(number, data, failed=failed, totals=totals)
        except OSError as error:
            self._fail(error)
        except MoelightError:
            self._torn = torn
            raise
        self._torn = False
        if self._waiting.held_bytes > _HELD_BYTES:
            self.commit()
            self._waiting.forget()

    def tick(self) -> None:
        self._ready()
        if self._pending is None and time.monotonic() - self._last >= self._outputs.sync_s:
            self._begin()

    def commit(self) -> None:
        self._ready()
        self._wait_commit()
        self._begin()
        self._wait_commit()

    def finish(self, total: int) -> None:
        self._ready()
        self._refuse_missing(total)
        for file in self._files.values():
            file.make_valid()
        self.commit()
        self._close_files()
        try:
            if self._outputs.atomic:
                self._opened.store.commit({"stage": "renaming", "total": total})
            take_names(self._opened.places, self._opened.store, total)
        except OSError as error:
            self._fail(error)
        self.state = "complete"

    def close(self, *, forget: bool = False) -> None:
        """Commit the rows that were put and close the files; raises InputError if that fails and no earlier call
        failed. After a failure, uncommitted bytes are truncated. With ``forget``, a job without rows removes the files
        it created."""
        if self._closed:
            return
        unfinished = self.state != "complete"
        try:
            if unfinished and not self._torn and self._failure is None:
                self.commit()
        finally:
            self._closed = True
            self._worker.shutdown()
            with contextlib.suppress(OSError):
                self._deaths.close(done=not unfinished)
            if unfinished and (self._failure is not None or self._torn):
                # The next start truncates too; doing it here hides the torn end from readers of the file.
                with contextlib.suppress(OSError, InputError):
                    ends = self._opened.store.ends()
                    for name, file in self._files.items():
                        file.cut(ends.get(name, 0))
            self._close_files()
            forgotten = forget and self._opened.new and not self.completed + self.failed
            for path in self._made if forgotten else ():
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            self._opened.store.close(remove=forgotten)

    def _open_files(self, ends: Mapping[str, int]) -> None:
        places = self._opened.places
        try:
            self._made = [place.written for place in places.files.values() if not place.written.exists()]
            for name, place in places.files.items():
                self._files[name] = self._open_file(place.written, ends.get(name, 0), gzip=place.gzip)
            for directory in places.directories():
                sync_directory(directory)
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError):
                raise failed(error, places.output) from None
            raise

    def _open_file(self, path: Path, end: int, *, gzip: bool) -> AppendFile:
        fd = open_private(path)
        try:
            hold(fd, path, shown=self._outputs.rows)
            return AppendFile(fd, path, end=end, gzip=gzip)
        except BaseException:
            os.close(fd)
            raise

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, data: bytes, *, failed: bool) -> None:
        self._files["errors" if failed and "errors" in self._files else "output"].append(data)

    def _take(self, number: int) -> tuple[bytes, bool]:
        if not self._waiting.held(number):
            self._wait_commit()  # the database is used by one thread at a time
        return self._waiting.take(number)

    def _ready(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.state == "complete" or self._closed:
            raise MoelightError("this output is complete or closed, nothing can be added to it")
        if self._pending is not None and self._pending.done():
            self._wait_commit()

    def _wait_commit(self) -> None:
        if self._pending is None:
            return
        try:
            self._pending.result()
        except OSError as error:
            self._fail(error)
        self._pending = None

    def _begin(self) -> None:
        """Begin a commit, if there is something to commit. No commit is running."""
        self._last = time.monotonic()
        if self._counts() == self._counted and not any(file.unsealed for file in self._files.values()):
            return
        self._torn = True
        try:
            extents = {name: file.seal() for name, file in self._files.items()}
        except OSError as error:
            self._fail(error)
        extents = {name: extent for name, extent in extents.items() if extent.end > extent.start}
        values = {"completed": self.completed, "failed": self.failed, "totals": dict(self.totals), "next": self._next}
        self._pending = self._worker.submit(
            self._make_durable, values, self._done.changed_parts(), extents, self._waiting.unsaved()
        )
        self._counted = self._counts()
        self._torn = False

    def _make_durable(
        self,
        values: dict[str, Any],
        parts: list[tuple[int, bytes]],
        extents: dict[str, ByteRange],
        waiting: list[tuple[int, bool, int, bytes]],
    ) -> None:
        """Finish a commit, in the worker thread. Raises OSError."""
        for name in extents:
            self._files[name].sync()
        faults.reach("after_fsync_rows")
        self._opened.store.commit(values, parts=parts, extents=extents, waiting=waiting)

    def _fail(self, error: OSError) -> NoReturn:
        """Raise the failure. Nothing more is written: after a failed write or fsync the file contents are unknown."""
        self._failure = failed(error, self._opened.places.output)
        raise self._failure from None

    def _counts(self) -> tuple[int, int]:
        return self.completed, self.failed


class StreamRows(Ledger):
    """Writes rows at once, in completion or input order; no deaths are recorded, and a job that ends early starts over.
    A closed pipe is a BrokenPipeError."""

    def __init__(self, outputs: Outputs) -> None:
        if outputs.atomic:
            raise InputError(f"output {outputs.rows}: is a pipe or device, --atomic needs a file", code="output_path")
        super().__init__(outputs, JobRecord(layout={}, facts={}), WaitingRows())
        self._output = _Stream(outputs.rows, WHAT["output"])
        try:
            self._errors = self._output if outputs.errors is None else _Stream(outputs.errors, WHAT["errors"])
        except BaseException:
            self._output.close()
            raise

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        super().put(number, data, failed=failed, totals=totals)
        if self._waiting.held_bytes > _HELD_BYTES:
            with clear(Path(tempfile.gettempdir()), "temporary rows in"):
                self._waiting.spill(self._next)

    def close(self) -> None:
        self._output.close()
        if self._errors is not self._output:
            self._errors.close()
        self._waiting.close()

    def _write(self, data: bytes, *, failed: bool) -> None:
        (self._errors if failed else self._output).write(data)


class _Stream:
    """Standard output, or a path that is written from its beginning."""

    def __init__(self, path: Path, what: str) -> None:
        check_writable(path, what=what)
        self._path = path
        self._what = what
        with clear(path, what):
            self._file: BinaryIO = sys.stdout.buffer if path == STANDARD_OUTPUT else path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        with clear(self._path, self._what):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self._file.flush()

    def close(self) -> None:
        if self._path != STANDARD_OUTPUT:
            self._file.close()


def open_outputs(
    outputs: Outputs,
    facts: Mapping[str, Any],
    *,
    informative: Iterable[str] = (),
    restart: bool = False,
    allow_changed: bool = False,
) -> Ledger:
    """A `Journal`; or `StreamRows` if ``outputs.rows`` is standard output, a pipe or a device. Raises InputError as
    `Journal.open` does, or if the two kinds are mixed, or ``atomic`` is requested for a stream."""
    if writes_directly(outputs.rows):
        return StreamRows(outputs)
    if outputs.errors is not None and writes_directly(outputs.errors):
        raise InputError(
            f"error file {outputs.errors}: is a pipe or device, and the output is a file; give a file for both, "
            "or leave the error file out: failed rows are then in the output",
            code="output_path",
        )
    return Journal.open(outputs, facts, informative=informative, restart=restart, allow_changed=allow_changed)
