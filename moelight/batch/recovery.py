"""Reads the state of a job from its journal, and verifies the files beside it.

Read-only.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelight.batch import faults
from moelight.batch.append import ByteRange, sync_directory
from moelight.batch.fingerprint import differences
from moelight.batch.journal_file import JournalFile, Record, read_records
from moelight.batch.lock import open_locked
from moelight.batch.output import check_writable
from moelight.batch.paths import WHAT, JobPaths, Outputs, told
from moelight.batch.row_set import RowSet
from moelight.core.errors import InputError

VERSION = 1
_READ_BACK_BYTES = 1 << 30  # takes about a second; of older bytes only the length is checked
_BLOCK_BYTES = 1 << 20


@dataclass(kw_only=True, slots=True)
class RecoveredJob:
    """The state of a job according to its journal. ``end`` is the offset behind the journal's last whole line.

    ``ends`` and ``extents`` are by file: ``output``, ``errors``, ``waiting``. ``waiting`` maps the numbers of waiting
    rows to their places in the ``generation``-th file of waiting rows.
    """

    header: Record
    facts: Record
    end: int
    scan: Record | None = None
    done: RowSet = field(default_factory=RowSet)
    completed: int = 0
    failed: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    next: int = 0
    generation: int = 0
    waiting: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    extents: dict[str, list[ByteRange]] = field(default_factory=dict)
    stage: str = "running"
    total: int = 0

    @property
    def ends(self) -> dict[str, int]:
        """The end offset of each file."""
        return {name: extents[-1].end for name, extents in self.extents.items() if extents}

    @property
    def empty(self) -> bool:
        """True if no row was ever done."""
        return self.stage == "running" and not self.completed + self.failed

    def follow(self, record: Record) -> None:
        """Apply the next ``record``."""
        match record["kind"]:
            case "rows":
                self._rows(record)
            case "facts":
                self.facts, self.scan, self.stage = record["facts"], None, "running"
            case "scan":
                self.scan = record["scan"]
            case "renaming" | "complete" as stage:
                self.stage, self.total = stage, record["total"]

    def finish(self) -> None:
        """Complete ``done`` after the last record."""
        if self.next:
            self.done.add_range(0, self.next - 1)
        self._forget_written()
        for number in self.waiting:
            self.done.add(number)

    def _rows(self, record: Record) -> None:
        self.completed, self.failed, self.totals = record["completed"], record["failed"], record["totals"]
        for run in record.get("done", ()):
            first, last = run if isinstance(run, list) else (run, run)
            self.done.add_range(first, last)
        self.next = record.get("next", 0)
        waiting = record.get("waiting")
        if waiting is not None:
            if waiting["file"] != self.generation:
                self.generation = waiting["file"]
                self.waiting.clear()
                self.extents.pop("waiting", None)
            if len(self.waiting) > 4 * len(waiting["rows"]) + 1000:
                self._forget_written()
            for number, offset, size, failed in waiting["rows"]:
                self.waiting[number] = (offset, size, failed)
        for name, (start, end, crc) in record["files"].items():
            self.extents.setdefault(name, []).append(ByteRange(start=start, end=end, crc=int(crc, 16)))

    def _forget_written(self) -> None:
        self.waiting = {number: place for number, place in self.waiting.items() if number >= self.next}


def read_journal(path: Path) -> RecoveredJob | None:
    """Return the job of the journal at ``path``, also while another process writes it; None as for `read_past`.

    Raises:
        OSError: the journal is missing or cannot be read.
        InputError: as `read_past`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_past(fd, shown=path)
    finally:
        os.close(fd)


def read_past(fd: int, *, shown: Path) -> RecoveredJob | None:
    """Return the job of the journal ``fd``; None if its first record is incomplete.

    Raises:
        InputError: the journal is damaged, or of an unknown version.
    """
    past: RecoveredJob | None = None
    for record, end in read_records(fd, shown=shown):
        if past is None:
            past = _begin(record, end, shown)
        else:
            past.follow(record)
            past.end = end
    if past is None:
        _refuse_strange(fd, shown)
    else:
        past.finish()
    return past


def _begin(record: Record, end: int, shown: Path) -> RecoveredJob:
    if record.get("kind") != "job" or record.get("version") != VERSION:
        raise InputError(
            f"{shown}: is a journal of version {record.get('version')}, this is moelight's version {VERSION}; "
            "finish the job with the moelight that began it, or --restart starts anew",
            code="journal",
        )
    return RecoveredJob(header=record, facts=record["facts"], end=end)


def _refuse_strange(fd: int, shown: Path) -> None:
    """Refuse a file of another kind: it is not taken for a torn first line, and so not overwritten."""
    head = os.pread(fd, 8, 0).rstrip(b"\0")
    if not b'{"crc":"'.startswith(head):
        raise InputError(f"{shown}: is not a journal; move it away, or --restart starts anew", code="journal")


def check_file(path: Path, extents: list[ByteRange], *, shown: str, journal: Path) -> None:
    """Refuse a file that is shorter than its journal records, or has other contents.

    The last gigabyte is read back; of earlier bytes only the length is checked.

    Raises:
        InputError: names the file, the expected and the actual state.
        OSError: the file cannot be read.
    """
    end = extents[-1].end if extents else 0
    if end == 0:
        return
    choice = f"by its journal {journal}; put it back as it was, or --restart starts anew"
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{shown}: is gone, {end} bytes were written to it {choice}", code="journal") from None
    if found < end:
        raise InputError(
            f"{shown}: is shorter than it was, {found} bytes found and {end} bytes expected {choice}", code="journal"
        )
    with path.open("rb") as file:
        for extent in extents:
            if extent.end > end - _READ_BACK_BYTES:
                file.seek(extent.start)
                if _crc(_blocks(file, extent.end - extent.start)) != extent.crc:
                    raise InputError(
                        f"{shown}: bytes {extent.start} to {extent.end} are not those that were written {choice}",
                        code="journal",
                    )


def _blocks(file: Any, size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        size -= len(block)
        yield block


def _crc(blocks: Iterator[bytes]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


@dataclass(kw_only=True, slots=True)
class Opened:
    """An open job, locked until ``fd``, its journal, is closed. ``changed`` lists the facts that differ."""

    places: JobPaths
    fd: int
    past: RecoveredJob
    journal: JournalFile | None
    changed: list[str]
    new: bool

    @property
    def complete(self) -> bool:
        """True if all rows are written, and the files have their final names."""
        return self.past.stage == "complete"


def open_job(
    outputs: Outputs, facts: Mapping[str, Any], *, informative: Iterable[str], restart: bool, allow_changed: bool
) -> Opened:
    """Lock the job and read its state. A refusal leaves all files unchanged.

    Raises:
        InputError: see `Journal.open`.
    """
    for what, path in ((WHAT["output"], outputs.rows), (WHAT["errors"], outputs.errors)):
        if path is not None and not path.exists():
            check_writable(path, what=what)
    places = JobPaths.of(outputs)
    with told(places.output):
        fd = open_locked(places.journal, shown=outputs.rows)
        try:
            past = None if restart else read_past(fd, shown=places.journal)
            if past is None or (past.empty and _layout_differs(past, places, outputs)):
                return _begin_new(fd, places, outputs, facts, restart=restart or past is not None)
            return _go_on(fd, past, places, outputs, facts, tuple(informative), allow_changed=allow_changed)
        except BaseException:
            if os.fstat(fd).st_size == 0:
                places.journal.unlink(missing_ok=True)
            os.close(fd)
            raise


def _begin_new(fd: int, places: JobPaths, outputs: Outputs, facts: Mapping[str, Any], *, restart: bool) -> Opened:
    for place in places.files.values():
        check_writable(place.shown, what=place.what)
        if not restart:
            place.refuse_found(places.journal)
    # The journal first: a crash in between leaves files without a journal, which are refused, not an outdated journal.
    journal = JournalFile(fd)
    os.fsync(fd)
    if restart:
        places.clear(keep_finals=outputs.atomic)
    header = {
        "kind": "job",
        "version": VERSION,
        "pid": os.getpid(),
        "created": int(time.time()),
        "layout": _layout(outputs, places),
        "facts": dict(facts),
    }
    journal.write(header)
    past = RecoveredJob(header=header, facts=dict(facts), end=0)
    return Opened(places=places, fd=fd, past=past, journal=journal, changed=[], new=True)


def _go_on(
    fd: int,
    past: RecoveredJob,
    places: JobPaths,
    outputs: Outputs,
    facts: Mapping[str, Any],
    informative: tuple[str, ...],
    *,
    allow_changed: bool,
) -> Opened:
    changed = differences(past.facts, facts, informative=informative)
    _refuse_changed(past, changed, places, outputs, allow_changed=allow_changed)
    _check_files(past, places)
    journal = None
    if past.stage != "complete" or changed:
        for place in places.files.values():
            check_writable(place.shown, what=place.what)
        journal = JournalFile(fd, end=past.end)
        journal.write({"kind": "opened", "pid": os.getpid(), "time": int(time.time())})
        if changed:
            journal.write({"kind": "facts", "facts": dict(facts)})
            past.follow({"kind": "facts", "facts": dict(facts)})
        if past.stage == "renaming":
            take_names(places, journal, past.total)
            past.stage = "complete"
    else:
        # A crash after the final record leaves these files; on a disk that is now read-only they remain.
        with contextlib.suppress(OSError):
            places.clear_waiting()
    return Opened(places=places, fd=fd, past=past, journal=journal, changed=changed, new=False)


def _refuse_changed(
    past: RecoveredJob, changed: list[str], places: JobPaths, outputs: Outputs, *, allow_changed: bool
) -> None:
    fixed = differences(past.header["layout"], _layout(outputs, places))
    if fixed:
        raise InputError(
            f"{places.output}: was begun otherwise ({'; '.join(fixed)}); give these as they were, "
            "or --restart starts anew",
            code="job_changed",
        )
    # A job without rows may change freely: it may have been refused, or a mistake.
    if changed and not allow_changed and not past.empty:
        raise InputError(
            f"{places.output}: belongs to a job that was another ({'; '.join(changed)}); --allow-changed keeps its "
            "finished rows and goes on as asked now, --restart starts anew",
            code="job_changed",
        )
    if changed and outputs.atomic and past.stage != "running":
        raise InputError(
            f"{places.output}: is complete, of a job that was another ({'; '.join(changed)}), and as it is --atomic "
            "nothing is added to it; --restart starts anew",
            code="job_changed",
        )


def _layout_differs(past: RecoveredJob, places: JobPaths, outputs: Outputs) -> bool:
    """True if the layout differs but ``atomic`` does not: a new start then overwrites only this job's files. If
    ``atomic`` differs, an earlier job's files may still exist."""
    now = _layout(outputs, places)
    return past.header["layout"] != now and past.header["layout"]["atomic"] == now["atomic"]


def _layout(outputs: Outputs, places: JobPaths) -> dict[str, Any]:
    """Return the options that decide where bytes are written; they are fixed for the whole job."""
    errors = places.files.get("errors")
    return {
        "order": outputs.order,
        "atomic": outputs.atomic,
        "error file": None if errors is None else errors.final.name,
    }


def _check_files(past: RecoveredJob, places: JobPaths) -> None:
    """Verify the files against the journal, also after a crash between two renames."""
    for name, place in places.files.items():
        named = past.stage == "complete" or (past.stage == "renaming" and not place.written.exists())
        path = place.final if named else place.written
        check_file(path, past.extents.get(name, []), shown=str(place), journal=places.journal)
    if past.stage == "running" and past.waiting:
        path = places.waiting(past.generation)
        check_file(path, past.extents.get("waiting", []), shown=str(path), journal=places.journal)


def take_names(places: JobPaths, journal: JournalFile, total: int) -> None:
    """Rename the finished files to their final names, and record the job as complete with ``total`` rows."""
    for place in places.files.values():
        place.take_name()
    for directory in places.directories():
        sync_directory(directory)
    faults.reach("before_final_record")
    journal.write({"kind": "complete", "total": total})
    faults.reach("after_final_record")
    places.clear_waiting()
