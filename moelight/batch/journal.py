"""The durable output of a job: every finished row is on the disk exactly once, also after a crash.

Depends on row numbers, bytes and the order of writes, not on the contents of rows.

A commit has two steps. First the rows since the last commit are written and fsynced; then one journal record, which
holds the current lengths of the files, is written and fsynced. Bytes behind the ends of the last record are ignored.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from moelight.batch import faults
from moelight.batch.append import AppendFile, open_private, sync_directory
from moelight.batch.crash_guard import CrashGuard
from moelight.batch.journal_file import Record
from moelight.batch.lock import hold
from moelight.batch.paths import Outputs, failed
from moelight.batch.recovery import Opened, open_job, take_names
from moelight.batch.reorder_buffer import ReorderBuffer
from moelight.batch.row_set import row_ranges
from moelight.core.errors import InputError, MoelightError, UserError

State = Literal["new", "resumed", "complete"]
_HELD_BYTES = 16 << 20  # of waiting rows in memory before they are committed
_MOVED_BYTES = 16 << 20  # the file of waiting rows grows to this before it is compacted


class Journal:
    """The rows of one job on the disk. Not thread-safe; close it, or use it as a context.

    ``state`` is ``new``, ``resumed`` or ``complete``; ``changed`` lists the differences that ``allow_changed``
    accepted; ``completed`` and ``failed`` count rows; ``totals`` sums the ``totals`` of all ``put`` calls. All of these
    include rows that were put and not yet committed; such rows are lost if the process is killed.
    """

    def __init__(self, outputs: Outputs, opened: Opened) -> None:
        past = opened.past
        self.state: State = "complete" if opened.complete else "new" if opened.new else "resumed"
        self.changed = opened.changed
        self.scan = past.scan
        self.completed, self.failed, self.totals = past.completed, past.failed, dict(past.totals)
        self._outputs = outputs
        self._opened = opened
        self._done = past.done
        self._fresh: list[int] = []
        self._next = past.next
        # A file without waiting rows is not reused.
        self._generation = past.generation if past.waiting else past.generation + 1
        places = [(number, *place) for number, place in past.waiting.items()]
        self._waiting = ReorderBuffer(places=places)
        self._ends = dict(past.ends)  # of files, as of the last record
        self._files: dict[str, AppendFile] = {}
        self._pending: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._counted = self._counts()
        # The first tick commits, so that a reader of the output sees progress early.
        self._last = time.monotonic() - outputs.sync_s
        self._failure: InputError | None = None
        self._torn = False
        self._made: list[Path] = []
        self._deaths = CrashGuard(opened.places.deaths, forget=opened.new or bool(opened.changed))
        if not opened.complete:
            self._open_files()

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
            os.close(opened.fd)
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

    def done(self, number: int) -> bool:
        """True if row ``number`` was put, by this process or an earlier one."""
        return number in self._done

    @property
    def struck(self) -> frozenset[int]:
        """Rows that are refused because the process died while it prepared them."""
        return self._deaths.struck

    def preparing(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which row ``number`` is prepared. Raises InputError if the row is `struck`."""
        return self._deaths.at(number)

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        """Store the result of scanning the input."""
        self._ready()
        self._wait_commit()
        self.scan = dict(scan)
        self._record({"kind": "scan", "scan": self.scan})

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        """Append ``data``, line end included, as row ``number``, from 0. ``totals`` is added to the job's totals.

        Raises:
            InputError: the disk refuses; every later call raises it again, and committed rows are kept.
        """
        self._ready()
        if number in self._done:
            raise MoelightError(f"row {number} was answered twice")
        self._torn = True
        self._done.add(number)
        if failed:
            self.failed += 1
        else:
            self.completed += 1
        for name, count in (totals or {}).items():
            self.totals[name] = self.totals.get(name, 0) + count
        try:
            self._place(number, data, failed=failed)
        except OSError as error:
            self._fail(error)
        self._torn = False
        if self._waiting.held_bytes > _HELD_BYTES:
            self.commit()

    def tick(self) -> None:
        """Begin a commit if ``sync_s`` seconds have passed since the last; does not wait for the disk."""
        self._ready()
        if self._pending is None and time.monotonic() - self._last >= self._outputs.sync_s:
            self._begin()

    def commit(self) -> None:
        """Make every row that was put durable; returns when all are on the disk."""
        self._ready()
        self._wait_commit()
        self._begin()
        self._wait_commit()

    def finish(self, total: int) -> None:
        """Complete the files; all rows from 0 to ``total`` - 1 were put.

        Raises:
            MoelightError: a row is missing.
            InputError: the disk refuses.
        """
        self._ready()
        missing = self._done.missing(total)
        if missing is not None:
            raise MoelightError(f"row {missing} was never answered")
        for file in self._files.values():
            file.make_valid()
        self.commit()
        self._close_files()
        if self._outputs.atomic:
            self._record({"kind": "renaming", "total": total})
        try:
            assert self._opened.journal is not None
            take_names(self._opened.places, self._opened.journal, total)
        except OSError as error:
            self._fail(error)
        self.state = "complete"

    def close(self, *, forget: bool = False) -> None:
        """Commit the rows that were put, and close the files. After a failure, uncommitted bytes are truncated.

        With ``forget``, a job without rows removes the files that it created.

        Raises:
            InputError: the last commit failed, and no earlier call has raised the error.
        """
        if self._opened.fd < 0:
            return
        try:
            if self.state != "complete" and not self._torn and self._failure is None:
                self.commit()
        finally:
            self._worker.shutdown()
            with contextlib.suppress(OSError):
                self._deaths.close(done=self.state == "complete")
            try:
                if self.state != "complete" and (self._failure is not None or self._torn):
                    # The next start truncates too; doing it here hides the torn end from readers of the file.
                    with contextlib.suppress(OSError):
                        self._cut_back()
            finally:
                self._close_files()
                if forget and self._opened.new and not self.completed + self.failed:
                    self._remove_files()
                os.close(self._opened.fd)
                self._opened.fd = -1

    def _open_files(self) -> None:
        places = self._opened.places
        try:
            self._made = [place.written for place in places.files.values() if not place.written.exists()]
            for name, place in places.files.items():
                self._files[name] = self._open_file(place.written, self._ends.get(name, 0), gzip=place.gzip)
            if self._waiting:
                path = places.waiting(self._generation)
                self._files["waiting"] = self._waiting.file = self._open_file(path, self._ends["waiting"])
            for directory in places.directories():
                sync_directory(directory)
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError):
                raise failed(error, places.output) from None
            raise

    def _open_file(self, path: Path, end: int, *, gzip: bool = False) -> AppendFile:
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

    def _remove_files(self) -> None:
        for path in (*self._made, self._opened.places.journal):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _place(self, number: int, data: bytes, *, failed: bool) -> None:
        if self._outputs.order == "completion":
            self._fresh.append(number)
            self._file(failed=failed).append(data)
            return
        if number != self._next:
            self._waiting.hold(number, data, failed=failed)
            return
        self._file(failed=failed).append(data)
        self._next += 1
        while (ready := self._waiting.take(self._next)) is not None:
            self._file(failed=ready[1]).append(ready[0])
            self._next += 1

    def _file(self, *, failed: bool) -> AppendFile:
        return self._files["errors" if failed and "errors" in self._files else "output"]

    def _ready(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.state == "complete" or self._opened.fd < 0:
            raise MoelightError("this output is complete or closed, nothing can be added to it")
        if self._pending is not None and self._pending.done():
            self._wait_commit()

    def _wait_commit(self) -> None:
        """Wait for the running commit."""
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
            record, spent = self._seal()
        except OSError as error:
            self._fail(error)
        files = [self._files[name] for name in record["files"]]
        ends = {name: file.end for name, file in self._files.items()}
        self._pending = self._worker.submit(self._make_durable, files, record, ends, spent)
        self._torn = False

    def _seal(self) -> tuple[Record, AppendFile | None]:
        """Return the record of a commit, whose bytes are with the system, and the file of waiting rows that the commit
        makes obsolete, if any."""
        record: Record = {"kind": "rows", "completed": self.completed, "failed": self.failed}
        record["totals"] = dict(self.totals)
        spent = None
        if self._outputs.order == "completion":
            record["done"], self._fresh = row_ranges(self._fresh), []
        else:
            record["next"] = self._next
            rows, spent = self._spill()
            if rows or spent is not None:
                record["waiting"] = {"file": self._generation, "rows": rows}
        extents = {name: file.seal() for name, file in self._files.items()}
        record["files"] = {
            name: [extent.start, extent.end, f"{extent.crc:08x}"]
            for name, extent in extents.items()
            if extent.end > extent.start
        }
        self._counted = self._counts()
        return record, spent

    def _spill(self) -> tuple[list[tuple[int, int, int, bool]], AppendFile | None]:
        """Move waiting rows out of memory; return their places, and an obsolete file of waiting rows, if any."""
        file = self._files.get("waiting")
        if file is None:
            if not self._waiting:
                return [], None
            return self._waiting.spill(self._open_waiting()), None
        if file.end <= max(_MOVED_BYTES, 4 * self._waiting.filed_bytes):
            return self._waiting.spill(file), None
        self._generation += 1
        del self._files["waiting"]
        return (self._waiting.move(self._open_waiting()) if self._waiting else []), file

    def _open_waiting(self) -> AppendFile:
        path = self._opened.places.waiting(self._generation)
        file = self._files["waiting"] = self._open_file(path, 0)
        sync_directory(path.parent)
        return file

    def _make_durable(
        self, files: list[AppendFile], record: Record, ends: dict[str, int], spent: AppendFile | None
    ) -> None:
        """Finish a commit, in the worker thread. Raises OSError."""
        try:
            for file in files:
                file.sync()
            faults.reach("after_fsync_rows")
            assert self._opened.journal is not None
            self._opened.journal.write(record)
            self._ends = ends
            if spent is not None:
                spent.path.unlink(missing_ok=True)
        finally:
            if spent is not None:
                spent.close()

    def _record(self, record: Record) -> None:
        try:
            assert self._opened.journal is not None
            self._opened.journal.write(record)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        """Raise the failure. Nothing more is written: after a failed write or fsync the file contents are unknown."""
        self._failure = failed(error, self._opened.places.output)
        raise self._failure from None

    def _cut_back(self) -> None:
        """Truncate the files to the ends of the last record. A failed record is removed first: no record may refer to
        removed bytes."""
        assert self._opened.journal is not None
        self._opened.journal.take_back()
        for name in self._opened.places.files:
            if name in self._files:
                self._files[name].cut(self._ends.get(name, 0))

    def _counts(self) -> tuple[int, int]:
        return self.completed, self.failed
