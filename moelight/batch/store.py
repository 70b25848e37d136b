"""The state of a job in SQLite, beside its output: rows that are done, rows that wait, and the lengths of the files.

A commit is one transaction, after an fsync of the output files whose lengths it stores; bytes behind these lengths are
unknown and are truncated. With the rollback journal in SQLite's mode ``DELETE`` and ``synchronous = EXTRA`` the
database is one file between commits, and a commit that returned survives a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moelight.batch import faults
from moelight.batch.append import ByteRange, open_private
from moelight.core.errors import InputError

VERSION = 2  # 1 was a file of JSON lines
_FIRST_VERSION_HEAD = b'{"crc":"'
_WAITING = "CREATE TABLE waiting (number INTEGER PRIMARY KEY, failed INTEGER, crc INTEGER, data BLOB)"
_SCHEMA = (
    "CREATE TABLE job (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE done (part INTEGER PRIMARY KEY, bits BLOB NOT NULL)",
    "CREATE TABLE extents (file TEXT NOT NULL, first INTEGER, past INTEGER, crc INTEGER)",
    _WAITING,
    f"PRAGMA user_version = {VERSION}",
)
_DAMAGED = "is damaged, so what this job has done is not known;"
_STRANGE = "is not a journal; move it away, or"
_VERSION = (
    f"is a journal of version {{}}, this is moelight's version {VERSION}; finish the job with the moelight that began "
    "it, or"
)
_SYSTEM_ERRORS = {
    "database or disk is full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "attempt to write a readonly database": errno.EACCES,
    "unable to open database file": errno.EACCES,
    "database is locked": errno.EBUSY,
}
_SYNCHRONOUS = "EXTRA"
_BUSY_S = 10.0  # a reader holds its lock for milliseconds
_PART_BYTES = 4096
_PART_BITS = 8 * _PART_BYTES

WaitingRow = tuple[int, bool, int, bytes]  # number, failed, crc32, line


class RowSet:
    """A set of integers from 0 as bits: ten million take 1.25 MB. Stored in parts, of which only changed ones are
    written."""

    def __init__(self, parts: Iterable[tuple[int, bytes]] = ()) -> None:
        self.changed: set[int] = set()  # parts with numbers that were added since the last `changed_parts`
        self._bits = bytearray()
        for part, bits in parts:
            self._bits.extend(bytes(part * _PART_BYTES - len(self._bits)))
            self._bits += bits

    def __contains__(self, number: int) -> bool:
        byte_index = number >> 3
        return byte_index < len(self._bits) and self._bits[byte_index] >> (number & 7) & 1 == 1

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    def add(self, number: int) -> None:
        part = number // _PART_BITS
        if number >> 3 >= len(self._bits):
            self._bits.extend(bytes((part + 1) * _PART_BYTES - len(self._bits)))
        self._bits[number >> 3] |= 1 << (number & 7)
        self.changed.add(part)

    def missing(self, total: int) -> int | None:
        """The least number below ``total`` that is not in the set; None if all are."""
        full = len(self._bits) - len(self._bits.lstrip(b"\xff"))
        return next((number for number in range(full * 8, min(total, full * 8 + 8)) if number not in self), None)

    def changed_parts(self) -> list[tuple[int, bytes]]:
        """The parts that changed since the last call."""
        parts = [(part, bytes(self._bits[part * _PART_BYTES :][:_PART_BYTES])) for part in sorted(self.changed)]
        self.changed.clear()
        return parts


class WaitingRows:
    """Rows that are finished before their turn: in memory, ``held_bytes``, and in the table ``waiting`` of ``base``, or
    of a temporary database. ``before_read`` is called before the table is read: one thread at a time uses ``base``."""

    def __init__(
        self, base: sqlite3.Connection | None = None, *, before_read: Callable[[], None] = lambda: None
    ) -> None:
        self.held_bytes = 0
        self._before_read = before_read
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._unsaved: list[int] = []
        self._base = base or sqlite3.connect("", isolation_level=None)
        if base is None:
            self._base.execute(_WAITING)

    def hold(self, number: int, data: bytes, *, failed: bool) -> None:
        self._held[number] = (data, failed)
        self._unsaved.append(number)
        self.held_bytes += len(data)

    def take(self, number: int) -> tuple[bytes, bool]:
        """The bytes of row ``number`` and whether it failed; the row leaves memory, and the table with the next commit.
        Raises OSError if the row is in neither."""
        if number in self._held:
            data, failed = self._held.pop(number)
            self.held_bytes -= len(data)
            return data, failed
        self._before_read()
        row = self._base.execute("SELECT data, failed FROM waiting WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise OSError(errno.EIO, f"row {number} is gone")
        return row[0], bool(row[1])

    def unsaved(self) -> list[WaitingRow]:
        """The rows that are in memory alone; a later call returns others."""
        rows = [(number, *self._held[number]) for number in self._unsaved if number in self._held]
        self._unsaved.clear()
        return [(number, failed, zlib.crc32(data), data) for number, data, failed in rows]

    def forget(self) -> None:
        """Drop the rows in memory; all are stored."""
        self._held.clear()
        self.held_bytes = 0

    def spill(self, before: int) -> None:
        """Move the rows in memory to the temporary database, and remove its rows ``before`` that number; raises OSError
        if the directory of temporary files is full."""
        try:
            self._base.execute("BEGIN")
            _save_waiting(self._base, before, self.unsaved())
            self._base.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise _system_error(error) or error from None
        self.forget()

    def close(self) -> None:
        self._base.close()


def _save_waiting(base: sqlite3.Connection, before: int, rows: Iterable[WaitingRow]) -> None:
    base.execute("DELETE FROM waiting WHERE number < ?", (before,))
    base.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?)", rows)


@dataclass(kw_only=True, slots=True)
class JobRecord:
    """The state of a job at its last commit. ``stage`` is ``running``, ``renaming`` or ``complete``; ``next`` is the
    first row that is not in the files, in order ``input``; ``extents`` are by file: ``output``, ``errors``."""

    layout: dict[str, Any]
    facts: dict[str, Any]
    scan: dict[str, Any] | None = None
    chosen: dict[str, str] | None = None
    pid: int = 0
    completed: int = 0
    failed: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    next: int = 0
    stage: str = "running"
    total: int = 0
    done: RowSet = field(default_factory=RowSet)
    extents: dict[str, list[ByteRange]] = field(default_factory=dict)

    @property
    def ends(self) -> dict[str, int]:
        """The valid length of each file, in bytes."""
        return {name: extents[-1].end for name, extents in self.extents.items()}

    @property
    def empty(self) -> bool:
        """True if no row was ever done."""
        return self.stage == "running" and not self.completed + self.failed


_LATER = ("chosen",)  # values that earlier releases did not store
_VALUES = tuple(column.name for column in fields(JobRecord) if column.name not in ("done", "extents"))


class RowStore:
    """The database of one job at ``path``, locked until it is closed. Used by one thread at a time. `clear`, `begin`,
    `commit`, `ends` and `shrink` raise OSError."""

    def __init__(self, path: Path, *, shown: Path) -> None:
        """Lock the database, created if missing; raises InputError if another process holds the lock, or OSError."""
        self.path = path
        self._fd = _open_locked(path, shown=shown)
        self._base: sqlite3.Connection | None = None

    @property
    def base(self) -> sqlite3.Connection:
        """The connection; raises InputError if the file is no database of a job."""
        if self._base is None:
            self._base = _connect(self.path)
        return self._base

    def read(self) -> JobRecord | None:
        """The state of the job, None if it has not begun; see `read_record`."""
        return _read(self.base, self.path)

    def clear(self) -> None:
        """Empty the file, durably."""
        if self._base is not None:
            self._base.close()
            self._base = None
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)

    def begin(self, record: JobRecord) -> None:
        """Create the tables in the empty file, with the values of ``record``."""
        with _explained(self.path):
            self.base.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self.commit({name: getattr(record, name) for name in _VALUES}, schema=_SCHEMA)

    def commit(
        self,
        values: Mapping[str, Any],
        *,
        parts: Sequence[tuple[int, bytes]] = (),
        extents: Mapping[str, ByteRange] | None = None,
        waiting: Sequence[WaitingRow] = (),
        schema: Sequence[str] = (),
    ) -> None:
        """Store ``values`` by name, changed ``parts`` of the set of rows, bytes added to files, and ``waiting`` rows in
        one transaction; remove waiting rows before ``values["next"]``. After an OSError, `ends` shows whether it took
        place."""
        faults.reach("before_journal_write")
        with _explained(self.path):
            self.base.execute("BEGIN IMMEDIATE")
            for statement in schema:
                self.base.execute(statement)
            _save_waiting(self.base, values.get("next", 0), waiting)
            faults.reach("mid_journal_write")
            self.base.executemany(
                "INSERT OR REPLACE INTO job VALUES (?, ?)",
                [(name, json.dumps(value, separators=(",", ":"))) for name, value in values.items()],
            )
            self.base.executemany("INSERT OR REPLACE INTO done VALUES (?, ?)", parts)
            self.base.executemany(
                "INSERT INTO extents VALUES (?, ?, ?, ?)",
                [(name, *extent) for name, extent in (extents or {}).items()],
            )
            faults.reach("after_journal_write")
            self.base.execute("COMMIT")
        faults.reach("after_journal_fsync")

    def ends(self) -> dict[str, int]:
        """The valid length of each file after a failed commit, which is rolled back."""
        with _explained(self.path):
            if self.base.in_transaction:
                self.base.execute("ROLLBACK")
            return dict(self.base.execute("SELECT file, max(past) FROM extents GROUP BY file"))

    def shrink(self) -> None:
        """Return the space of waiting rows to the file system."""
        with _explained(self.path):
            self.base.execute("PRAGMA incremental_vacuum").fetchall()

    def close(self, *, remove: bool = False) -> None:
        """Close the database and release the lock; ``remove`` its file, too. Idempotent."""
        if self._fd < 0:
            return
        if self._base is not None:
            self._base.close()
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        # Last: a process loses SQLite's locks on a file when it closes any descriptor of it.
        os.close(self._fd)
        self._fd = -1

    @property
    def unused(self) -> bool:
        """True if nothing was stored."""
        return os.fstat(self._fd).st_size == 0


def read_record(path: Path) -> JobRecord | None:
    """The state of the job of the database at ``path``, also while another process writes it; None if it has not begun.
    Raises OSError if the file cannot be read, InputError if it is damaged, of another version, or of another kind."""
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    with contextlib.closing(_connect(path)) as base:
        return _read(base, path)


def _connect(path: Path) -> sqlite3.Connection:
    with path.open("rb") as file:
        if file.read(len(_FIRST_VERSION_HEAD)) == _FIRST_VERSION_HEAD:
            raise _refusal(path, _VERSION.format(1))
    with _explained(path):
        base = sqlite3.connect(
            f"file:{quote(os.fsencode(path))}?mode=rw",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_S,
        )
        base.execute(f"PRAGMA synchronous = {_SYNCHRONOUS}")
        return base


def _read(base: sqlite3.Connection, path: Path) -> JobRecord | None:
    with _explained(path):
        version = base.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            if base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise _refusal(path, _STRANGE)
            return None
        if version != VERSION:
            raise _refusal(path, _VERSION.format(version))
        base.execute("BEGIN")  # one state, also while another process commits
        try:
            return _record(base, path)
        except (ValueError, TypeError, KeyError):
            raise _refusal(path, _DAMAGED) from None
        finally:
            if base.in_transaction:
                base.execute("ROLLBACK")


def _record(base: sqlite3.Connection, path: Path) -> JobRecord:
    stored = {name: json.loads(value) for name, value in base.execute("SELECT name, value FROM job").fetchall()}
    record = JobRecord(
        **{name: stored[name] for name in _VALUES if name in stored or name not in _LATER},
        done=RowSet(base.execute("SELECT part, bits FROM done ORDER BY part")),
    )
    for name, *extent in base.execute("SELECT file, first, past, crc FROM extents ORDER BY rowid"):
        record.extents.setdefault(name, []).append(ByteRange(*extent))
    intact = base.execute("PRAGMA quick_check").fetchone()[0] == "ok"
    torn = sum(zlib.crc32(data) != crc for data, crc in base.execute("SELECT data, crc FROM waiting"))
    if not intact or torn or len(record.done) != record.completed + record.failed:
        raise _refusal(path, _DAMAGED)
    return record


def _refusal(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: {reason} --restart starts anew", code="journal")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as an OSError, where the system refused, or as an InputError about the file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if (system := _system_error(error)) is not None:
            raise system from None
        raise _refusal(path, _STRANGE if "not a database" in str(error) else _DAMAGED) from None


def _system_error(error: sqlite3.DatabaseError) -> OSError | None:
    number = _SYSTEM_ERRORS.get(str(error))
    return None if number is None else OSError(number, os.strerror(number))


def _open_locked(path: Path, *, shown: Path) -> int:
    """Open ``path``, created if missing, with an exclusive lock that is held until the descriptor is closed. The
    descriptor is read-only if the file or its file system is."""
    while True:
        try:
            fd = open_private(path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.exists():
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            hold(fd, path, shown=shown)
            # The previous holder may have removed the file in between: then the lock is on an unlinked file.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def hold(fd: int, path: Path, *, shown: Path) -> None:
    """Lock the file of ``fd`` until the descriptor is closed. If another process holds the lock, raises InputError,
    which names the process if ``path`` is the database of a job."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = "another process"
        with contextlib.suppress(OSError, InputError):
            record = read_record(path) if path.suffix == ".journal" else None
            who = who if record is None else f"process {record.pid}"
        raise InputError(f"output {shown}: is being written by {who}", code="job_running") from None
