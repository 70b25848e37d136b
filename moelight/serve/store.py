"""The data directory, and its files and batches in SQLite, where every change of state is one transaction.

::

    DATA/                   0700
      serve.lock            held by the one server that may use the directory
      state.db              files and batches
      token                 if no token file is given
      files/FILE_ID         uploads
      batches/BATCH_ID/     a job's directory: output.jsonl, errors.jsonl, worker.log, and its resume state
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moelight.core.errors import ConfigError

# OpenAI's states of a batch, and the next states of each.
MOVES: Mapping[str, frozenset[str]] = {
    "validating": frozenset({"in_progress", "failed", "cancelled", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling", "expired"}),
    "finalizing": frozenset({"completed", "failed"}),
    "cancelling": frozenset({"cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}
LOG = "worker.log"  # of a job's process, kept in its directory
OPEN = tuple(state for state, ways in MOVES.items() if ways)

# Changed only together with VERSION and the statements that migrate an older database.
VERSION = 2
_MIGRATIONS = {1: "ALTER TABLE batches ADD COLUMN usage TEXT"}  # from each older version to the next
_SCHEMA = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, path TEXT UNIQUE NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT,
    error_file_id TEXT, total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, metadata TEXT, errors TEXT, usage TEXT
);
CREATE INDEX batches_by_status ON batches (status, place);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file, uploaded or written by a batch; the server chooses ``path``, relative to the data directory."""

    id: str
    path: str
    filename: str
    purpose: str
    bytes: int
    created_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Numbers of a batch's requests: all, answered, failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFailure:
    """The reason why a whole batch failed; ``line`` counts from 1, where one line of the input is the cause."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One batch, with the fields of OpenAI's object. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    metadata: Mapping[str, str] | None = None
    errors: tuple[BatchFailure, ...] = ()
    usage: Mapping[str, Any] | None = None


_T = TypeVar("_T", StoredFile, Batch)
_TABLES = {StoredFile: "files", Batch: "batches"}
for _kind in _TABLES:
    msgspec.json.Decoder(_kind)  # reads the class once: two threads that do so at its first use end the process


class Store:
    """Files and batches of one data directory. Usable from any thread; each method is one transaction.

    A batch moves along `MOVES` only; a move from any other state is rejected and changes nothing.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
            self._base.row_factory = sqlite3.Row
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = FULL")  # an answered request survives a power cut
            with self._transaction() as base:
                current = base.execute("PRAGMA user_version").fetchone()[0]
                if current == 0:
                    for statement in _SCHEMA.split(";\n"):
                        base.execute(statement)
                for version in range(max(current, 1), VERSION):
                    if current:
                        base.execute(_MIGRATIONS[version])
                if current < VERSION:
                    base.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path}: not a usable database ({error}); name another --data directory") from None
        if current > VERSION:
            raise ConfigError(f"{path}: made by a later version of moelight; update, or name another --data directory")

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def add_file(self, file: StoredFile) -> None:
        with self._transaction() as base:
            _insert(base, "files", asdict(file))

    def file(self, file_id: str) -> StoredFile | None:
        return next(iter(self._select(StoredFile, "WHERE id = ?", file_id)), None)

    def files(self) -> list[StoredFile]:
        return self._select(StoredFile, "ORDER BY place")

    def drop_file(self, file_id: str) -> str | None:
        """Delete the file's entry; if an open batch reads the file, return the batch's id and do nothing."""
        with self._transaction() as base:
            user = base.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_marks(OPEN)})", (file_id, *OPEN)
            ).fetchone()
            if user is not None:
                return str(user["id"])
            base.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return None

    def add_batch(self, batch: Batch) -> bool:
        """Add the batch, which has no results yet; return False and do nothing if its input file no longer exists."""
        values = asdict(batch) | {"metadata": json.dumps(batch.metadata)}
        del values["counts"], values["errors"], values["usage"]
        with self._transaction() as base:
            if base.execute("SELECT 1 FROM files WHERE id = ?", (batch.input_file_id,)).fetchone() is None:
                return False
            _insert(base, "batches", values)
            return True

    def batch(self, batch_id: str) -> Batch | None:
        return next(iter(self._select(Batch, "WHERE id = ?", batch_id)), None)

    def open_batches(self) -> list[Batch]:
        """Return the batches with work left: started ones first, then in order of creation."""
        return self._select(Batch, f"WHERE status IN ({_marks(OPEN)}) ORDER BY status = 'validating', place", *OPEN)

    def page(
        self, kind: type[_T], after: str | None, limit: int, *, newest_first: bool = True, purpose: str | None = None
    ) -> tuple[list[_T], bool] | None:
        """Return up to ``limit`` items after ``after``, and True if more follow; None if ``after`` does not exist.

        ``purpose``: of the files, None for any.
        """
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        wanted = {} if purpose is None else {"purpose = ?": purpose}
        if after is not None:
            if not self._select(kind, "WHERE id = ?", after):
                return None
            wanted[f"place {beyond} (SELECT place FROM {_TABLES[kind]} WHERE id = ?)"] = after
        where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
        rows = self._select(kind, f"{where} ORDER BY place {order} LIMIT ?", *wanted.values(), limit + 1)
        return rows[:limit], len(rows) > limit

    def move(
        self,
        batch_id: str,
        to: str,
        *,
        counts: RowCounts | None = None,
        errors: Sequence[BatchFailure] = (),
        files: Mapping[str, StoredFile] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bool:
        """Move the batch to the state ``to`` and store its results; return False if its state does not allow that.

        ``files`` are new files by the fields of the batch that name them.
        """
        changes: dict[str, Any] = {"status": to, f"{to}_at": int(time.time())}
        if counts is not None:
            changes |= asdict(counts)
        if errors:
            changes["errors"] = json.dumps([asdict(fault) for fault in errors])
        if usage is not None:
            changes["usage"] = json.dumps(usage)
        files = files or {}
        changes |= {column: file.id for column, file in files.items()}
        with self._transaction() as base:
            if not _update(base, batch_id, changes, [state for state, ways in MOVES.items() if to in ways]):
                return False
            for file in files.values():
                _insert(base, "files", asdict(file))
            return True

    def cancel(self, batch_id: str) -> bool:
        """Cancel a batch: a waiting one ends here, a running one is marked; return False if it is in a later state."""
        now = int(time.time())
        ended = {"status": "cancelled", "cancelling_at": now, "cancelled_at": now}
        marked = {"status": "cancelling", "cancelling_at": now}
        with self._transaction() as base:
            return _update(base, batch_id, ended, ["validating"]) or _update(base, batch_id, marked, ["in_progress"])

    def count(self, batch_id: str, counts: RowCounts) -> None:
        """Store the progress of a running batch."""
        with self._transaction() as base:
            _update(base, batch_id, asdict(counts), OPEN)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            finally:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")

    def _select(self, kind: type[_T], rest: str, *values: object) -> list[_T]:
        with self._lock:
            rows = self._base.execute(f"SELECT * FROM {_TABLES[kind]} {rest}", values).fetchall()
        return [msgspec.convert(_parsed(dict(row)), kind) for row in rows]


def _parsed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of either table with the composite fields of a batch."""
    metadata, errors, usage = (json.loads(row.get(name) or "null") for name in ("metadata", "errors", "usage"))
    return {**row, "counts": row, "metadata": metadata, "errors": errors or [], "usage": usage}


def _insert(base: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    base.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({_marks(values)})", tuple(values.values()))


def _update(base: sqlite3.Connection, batch_id: str, changes: Mapping[str, Any], sources: Sequence[str]) -> bool:
    assignments = ", ".join(f"{column} = ?" for column in changes)
    done = base.execute(
        f"UPDATE batches SET {assignments} WHERE id = ? AND status IN ({_marks(sources)})",
        (*changes.values(), batch_id, *sources),
    )
    return done.rowcount == 1


def _marks(values: Sequence[object] | Mapping[str, object]) -> str:
    return ", ".join("?" * len(values))


class DataDirectory:
    """A data directory locked by this process; created if missing."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.files, self.batches = self.root / "files", self.root / "batches"
        base = self.root / "state.db"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = take_lock(self.root / "serve.lock", label=f"--data {root}")
            for folder in (self.files, self.batches):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
            open(base, "ab", opener=private).close()
        except OSError as error:
            raise ConfigError(f"--data {root}: cannot be used ({(error.strerror or str(error)).lower()})") from None
        self.store = Store(base)
        self._sweep()

    def close(self) -> None:
        self.store.close()
        os.close(self._lock)

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    def stored(self, path: Path, file_id: str, *, filename: str, purpose: str) -> StoredFile:
        """Return the entry of the complete file at ``path``."""
        return StoredFile(
            id=file_id,
            path=path.relative_to(self.root).as_posix(),
            filename=filename,
            purpose=purpose,
            bytes=path.stat().st_size,
            created_at=int(time.time()),
        )

    def clear_job(self, batch_id: str) -> None:
        """Remove the files that an ended job no longer needs: all but kept files and the log."""
        directory = self.batches / batch_id
        kept_paths = {self.path(file) for file in self.store.files()} | {directory / LOG}
        if directory.is_dir():
            for path in directory.iterdir():
                if path not in kept_paths:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _sweep(self) -> None:
        """Remove unfinished uploads, files whose deletion was interrupted, and leftovers of ended jobs."""
        kept_paths = {self.path(file) for file in self.store.files()}
        for path in self.files.iterdir():
            if path not in kept_paths:
                path.unlink()
        for directory in filter(Path.is_dir, self.batches.iterdir()):
            batch = self.store.batch(directory.name)
            if batch is None:
                shutil.rmtree(directory)
            elif batch.status not in OPEN:
                self.clear_job(directory.name)


def private(path: str, flags: int) -> int:
    """Opener, for `open`, of files that only their owner may read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed or the process ends; None if the lock is taken."""
    held = private(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held


def take_lock(path: Path, *, label: str) -> int:
    """Return the descriptor of `try_lock`; raises ConfigError if the lock is taken."""
    held = try_lock(path)
    if held is None:
        raise ConfigError(f"{label}: another moelight serve-batch works there; stop it, or name another")
    return held
