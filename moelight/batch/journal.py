"""The rows of a job: on the disk, each exactly once, also after a crash; or in a pipe, which cannot be resumed.

Depends on row numbers, bytes and the order of writes. A job is new, resumed, complete or refused; a refusal leaves all
files unchanged. A commit fsyncs the rows since the last commit, and then stores
the lengths of the files and the state of the job (`RowStore`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from moelight.batch import faults
from moelight.batch.append import AppendFile, ByteRange, open_private, sync_directory
from moelight.batch.crash_guard import CrashGuard
from moelight.batch.fingerprint import differences
from moelight.batch.output import check_writable, clear, stream_file, writes_directly
from moelight.batch.paths import OutputPath, Outputs
from moelight.batch.store import JobRecord, RowStore, WaitingRows, hold
from moelight.core.errors import InputError, MoelightError, UserError

State = Literal["new", "resumed", "complete"]
_HELD_BYTES = 16 << 20  # of waiting rows in memory
_READ_BACK_BYTES = 1 << 30  # takes about a second; of older bytes only the length is checked
_BLOCK_BYTES = 1 << 20


class Ledger(ABC):
    """The destination of the rows of a job; a context that closes it.

    ``state`` is ``new``, ``resumed`` or ``complete``; ``changed`` lists the differences that ``allow_changed``
    accepted; ``totals`` sums those of all `put` calls; ``struck`` are rows that are refused because the process died
    while it prepared them; ``scan`` is the noted result of scanning the input, ``chosen`` what was left to the planner
    and must not change between runs: options by name.
    """

    struck: frozenset[int] = frozenset()

    def __init__(self, outputs: Outputs, record: JobRecord, waiting: WaitingRows) -> None:
        self.state: State = "new"
        self.changed: list[str] = []
        self.scan, self.chosen = record.scan, record.chosen
        self.completed, self.failed, self.totals = record.completed, record.failed, dict(record.totals)
        self._outputs = outputs
        self._in_order = outputs.order == "input"
        self._done = record.done
        self._next = record.next
        self._waiting = waiting

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def done(self, number: int) -> bool:
        """True if row ``number`` was put, by this process or an earlier one."""
        return number in self._done

    def preparing(self, number: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context in which row ``number`` is prepared; raises InputError if the row is in ``struck``."""
        return contextlib.nullcontext()

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        self.scan = dict(scan)

    def note_chosen(self, chosen: Mapping[str, str]) -> None:
        self.chosen = dict(chosen)

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
            data, failed = self._waiting.take(self._next)
            self._write(data, failed=failed)
            self._next += 1

    @abstractmethod
    def tick(self) -> None:
        """Begin a commit if it is due; does not wait for the disk."""

    @abstractmethod
    def commit(self) -> None:
        """Make every row that was put durable; returns when all are on the disk."""

    def finish(self, total: int) -> None:
        """Complete the files of ``total`` rows. Raises MoelightError if a row is missing, InputError if the disk
        refuses."""
        missing = self._done.missing(total)
        if missing is not None:
            raise MoelightError(f"row {missing} was never answered")
        self._complete(total)
        self.state = "complete"

    @abstractmethod
    def close(self) -> None:
        """Release files and threads."""

    @abstractmethod
    def _write(self, data: bytes, *, failed: bool) -> None:
        """Append ``data`` to the file of answers, or of failed rows."""

    @abstractmethod
    def _complete(self, total: int) -> None:
        """Complete the files, to which all rows were written."""


class Journal(Ledger):
    """The rows of one job in files. Not thread-safe. Rows that were put and not committed are lost if the process is
    killed; counts and totals include them. A write that fails is an InputError of the next call and of every later one;
    committed rows are kept."""

    def __init__(self, outputs: Outputs, store: RowStore, record: JobRecord, *, new: bool, changed: list[str]) -> None:
        super().__init__(outputs, record, WaitingRows(store.base, before_read=self._wait_commit))
        complete = record.stage == "complete"
        self.state = "complete" if complete else "new" if new else "resumed"
        self.changed = changed
        self._store = store
        self._files: dict[str, AppendFile] = {}
        self._pending: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        # The first tick commits, so that a reader of the output sees progress early.
        self._last = time.monotonic() - outputs.sync_s
        self._failure: InputError | None = None
        self._torn = self._closed = False
        self._deaths = CrashGuard(outputs.deaths, forget=new or bool(changed))
        self.struck = self._deaths.struck
        places = outputs.files.items() if not complete else ()
        # What is removed again if the job ends without rows.
        self._made = [file.written for _, file in places if new and not file.written.exists()]
        try:
            for name, file in places:
                self._files[name] = _open_file(file, record.ends.get(name, 0))
            for directory in outputs.directories if places else ():
                sync_directory(directory)
        except BaseException:
            self._close_files()
            raise

    @classmethod
    def open(
        cls, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool = False, allow_changed: bool = False
    ) -> Journal:
        """Begin the job, or resume it.

        Args:
            facts: JSON values that determine the rows; compared with those of the job's first start, key by key.
            restart: discard finished rows; earlier files are removed (``atomic``: when the new ones are renamed).
            allow_changed: resume with other facts. The scan of the input is discarded.

        Raises:
            InputError: ``job_running``: another process writes this output. ``job_changed``: facts differ. ``journal``:
                an output without its journal, a journal without its output, or one that does not match the other.
                ``output_path``: the files cannot be written.
        """
        try:
            for file in outputs.files.values():
                if not file.shown.exists():
                    check_writable(file.shown, label=file.label)
            store = RowStore(outputs.journal, shown=outputs.rows)
            try:
                record = None if restart else store.read()
                if record is not None and not _may_begin_anew(record, outputs):
                    changed = _resume(store, record, outputs, facts, allow_changed=allow_changed)
                    return cls(outputs, store, record, new=False, changed=changed)
                record = _begin(store, outputs, facts, restart=restart or record is not None)
                return cls(outputs, store, record, new=True, changed=[])
            except BaseException:
                store.close(remove=store.unused)
                raise
        except OSError as error:
            raise outputs.output.failed(error) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The error that ended the block is the one to report.
        with contextlib.suppress(InputError, OSError):
            self.close(forget=issubclass(kind, UserError))

    def preparing(self, number: int) -> AbstractContextManager[None]:
        return self._deaths.at(number)

    def note_scan(self, scan: Mapping[str, Any]) -> None:
        super().note_scan(scan)
        self._commit_noted({"scan": self.scan})

    def note_chosen(self, chosen: Mapping[str, str]) -> None:
        super().note_chosen(chosen)
        self._commit_noted({"chosen": self.chosen})

    def _commit_noted(self, values: Mapping[str, Any]) -> None:
        self._ready()
        self._wait_commit()
        try:
            self._store.commit(values)
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

    def _complete(self, total: int) -> None:
        self._ready()
        for file in self._files.values():
            file.make_valid()
        self.commit()
        self._close_files()
        try:
            if self._outputs.atomic:
                self._store.commit({"stage": "renaming", "total": total})
            _take_names(self._outputs, self._store, total)
        except OSError as error:
            self._fail(error)

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
                    ends = self._store.ends()
                    for name, file in self._files.items():
                        file.cut(ends.get(name, 0))
            self._close_files()
            forgotten = forget and self.state == "new" and not self.completed + self.failed
            for path in self._made if forgotten else ():
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            self._store.close(remove=forgotten)

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, data: bytes, *, failed: bool) -> None:
        self._files["errors" if failed and "errors" in self._files else "output"].append(data)

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
        """Begin a commit in the worker thread, if there is something to commit. No commit is running."""
        self._last = time.monotonic()
        if not self._done.changed and not any(file.unsealed for file in self._files.values()):
            return
        self._torn = True
        try:
            extents = {name: file.seal() for name, file in self._files.items()}
        except OSError as error:
            self._fail(error)
        extents = {name: extent for name, extent in extents.items() if extent.end > extent.start}
        values = {"completed": self.completed, "failed": self.failed, "totals": dict(self.totals), "next": self._next}
        parts, waiting = self._done.changed_parts(), self._waiting.unsaved()

        def make_durable() -> None:
            for name in extents:
                self._files[name].sync()
            faults.reach("after_fsync_rows")
            self._store.commit(values, parts=parts, extents=extents, waiting=waiting)

        self._pending = self._worker.submit(make_durable)
        self._torn = False

    def _fail(self, error: OSError) -> NoReturn:
        """Raise the failure. Nothing more is written: after a failed write or fsync the file contents are unknown."""
        self._failure = self._outputs.output.failed(error)
        raise self._failure from None


def _may_begin_anew(record: JobRecord, outputs: Outputs) -> bool:
    """True for a job without rows whose layout differs, since a new start overwrites only its own files; but if
    ``atomic`` differs, files of an earlier job may still exist."""
    return record.empty and record.layout != outputs.layout and record.layout["atomic"] == outputs.atomic


def _begin(store: RowStore, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool) -> JobRecord:
    for file in outputs.files.values():
        check_writable(file.shown, label=file.label)
        if not restart:
            file.refuse_found(outputs.journal)
    # The old state goes first: a crash in between leaves files without a job, which are refused, not an outdated job.
    store.clear()
    if restart:
        outputs.clear()
    record = JobRecord(layout=outputs.layout, facts=dict(facts), pid=os.getpid())
    store.begin(record)
    return record


def _resume(
    store: RowStore, record: JobRecord, outputs: Outputs, facts: Mapping[str, Any], *, allow_changed: bool
) -> list[str]:
    """Check the files of the job, complete a rename that was cut off, and return the facts that differ."""
    changed = differences(record.facts, facts)
    _refuse_changed(record, changed, outputs, allow_changed=allow_changed)
    for name, file in outputs.files.items():
        # Also after a crash between two renames.
        named = record.stage == "complete" or (record.stage == "renaming" and not file.written.exists())
        path = file.final if named else file.written
        if name in record.extents:
            _check_file(path, record.extents[name], shown=str(file), journal=outputs.journal)
    if record.stage != "complete" or changed:
        for file in outputs.files.values():
            check_writable(file.shown, label=file.label)
        if changed:
            record.facts, record.scan, record.chosen, record.stage = dict(facts), None, None, "running"
        values = {name: getattr(record, name) for name in ("facts", "scan", "chosen", "stage")}
        store.commit({**values, "pid": os.getpid()})
        if record.stage == "renaming":
            _take_names(outputs, store, record.total)
            record.stage = "complete"
    return changed


def _refuse_changed(record: JobRecord, changed: list[str], outputs: Outputs, *, allow_changed: bool) -> None:
    fixed = differences(record.layout, outputs.layout)
    if fixed:
        reason = f"was begun otherwise ({'; '.join(fixed)}); give these as they were, or --restart starts anew"
    # A job without rows may change freely: it may have been refused, or a mistake.
    elif changed and not allow_changed and not record.empty:
        reason = (
            f"belongs to a job that was another ({'; '.join(changed)}); --allow-changed keeps its finished rows and "
            "goes on as asked now, --restart starts anew"
        )
    elif changed and outputs.atomic and record.stage != "running":
        reason = (
            f"is complete, of a job that was another ({'; '.join(changed)}), and as it is --atomic nothing is added "
            "to it; --restart starts anew"
        )
    else:
        return
    raise InputError(f"{outputs.output}: {reason}", code="job_changed")


def _check_file(path: Path, extents: list[ByteRange], *, shown: str, journal: Path) -> None:
    """Raise InputError for a file that is shorter than its journal records, or has other contents; may raise OSError.
    The last gigabyte is read back; of earlier bytes only the length is checked."""

    def refusal(reason: str) -> InputError:
        choice = "put it back as it was, or --restart starts anew"
        return InputError(f"{shown}: {reason} by its journal {journal}; {choice}", code="journal")

    end = extents[-1].end
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise refusal(f"is gone, {end} bytes were written to it") from None
    if size < end:
        raise refusal(f"is shorter than it was, {size} bytes found and {end} bytes expected")
    with path.open("rb") as file:
        for extent in extents:
            if extent.end > end - _READ_BACK_BYTES and _crc(file, extent) != extent.crc:
                raise refusal(f"bytes {extent.start} to {extent.end} are not those that were written")


def _crc(file: BinaryIO, extent: ByteRange) -> int:
    file.seek(extent.start)
    crc, left = 0, extent.end - extent.start
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    return crc


def _take_names(outputs: Outputs, store: RowStore, total: int) -> None:
    """Rename the finished files to their final names, and record the job as complete with ``total`` rows."""
    for file in outputs.files.values():
        file.take_name()
    for directory in outputs.directories:
        sync_directory(directory)
    faults.reach("before_final_record")
    store.commit({"stage": "complete", "total": total})
    faults.reach("after_final_record")
    store.shrink()


def _open_file(file: OutputPath, end: int) -> AppendFile:
    fd = open_private(file.written)
    try:
        hold(fd, file.written, shown=file.shown)
        return AppendFile(fd, end=end, gzip=file.gzip)
    except BaseException:
        os.close(fd)
        raise


class StreamRows(Ledger):
    """Writes rows at once, in completion or input order; no deaths are recorded, and a job that ends early starts over.
    A closed pipe is a BrokenPipeError."""

    def __init__(self, outputs: Outputs) -> None:
        if outputs.atomic:
            raise InputError(f"output {outputs.rows}: is a pipe or device, --atomic needs a file", code="output_path")
        super().__init__(outputs, JobRecord(layout={}, facts={}), WaitingRows())
        with contextlib.ExitStack() as files:
            writers = {}
            for name, file in outputs.files.items():
                check_writable(file.shown, label=file.label)
                writers[name] = files.enter_context(stream_file(file.shown, label=file.label))
            self._files = files.pop_all()
        self._output, self._errors = writers["output"], writers.get("errors", writers["output"])

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        super().put(number, data, failed=failed, totals=totals)
        if self._waiting.held_bytes > _HELD_BYTES:
            with clear(Path(tempfile.gettempdir()), "temporary rows in"):
                self._waiting.spill(self._next)

    def tick(self) -> None:
        """A stream has nothing to commit."""

    def commit(self) -> None:
        """A stream has nothing to commit."""

    def close(self) -> None:
        self._files.close()
        self._waiting.close()

    def _write(self, data: bytes, *, failed: bool) -> None:
        (self._errors if failed else self._output)(data)

    def _complete(self, total: int) -> None:
        """Rows were written as they came."""


def open_outputs(
    outputs: Outputs, facts: Mapping[str, Any], *, restart: bool = False, allow_changed: bool = False
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
    return Journal.open(outputs, facts, restart=restart, allow_changed=allow_changed)
