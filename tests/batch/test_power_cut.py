"""A disk that loses what was not fsynced: wherever it stops, the same job goes on, and nothing committed is missing."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moelight.batch import faults
from moelight.batch import journal as journal_module
from moelight.batch.journal import Journal
from moelight.batch.paths import Outputs
from tests.cases import thorough

ROWS = 60


class PowerCutError(BaseException):
    """Nothing runs after this."""


class Disk:
    """Counts what changes the disk in one directory, stops at the ``cut``-th change, and keeps what was fsynced.

    ``named`` holds the names of files (to inodes) after each change since the directory was last fsynced: of these a
    crash leaves any. Bytes since the last fsync of a file are there in part, cut anywhere, pages of them zero.

    SQLite's own writes are not seen here. Its files are kept as they are when the process reaches a point of a commit,
    or changes the disk outside of one; with a cache of a page, its changes are in the file before the commit. A commit
    that returned is durable, and with it the names of the directory, which SQLite fsyncs.
    """

    def __init__(self, directory: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.left = cut
        self.off = False
        self.current: dict[int, bytes] = {}
        self.named: list[dict[str, int]] = [{}]
        self.base: dict[str, bytes] = {}
        self.committing = False
        self._look()
        self.named, self.synced = self.named[-1:], dict(self.current)
        for name in ("pwrite", "ftruncate", "fsync", "unlink", "replace", "rename"):
            monkeypatch.setattr(os, name, self._changing(getattr(os, name), name))
        monkeypatch.setattr(faults, "reach", self._reach)
        connect = sqlite3.connect

        def with_a_small_cache(*args: Any, **options: Any) -> sqlite3.Connection:
            base = connect(*args, **options)
            base.execute("PRAGMA cache_size = 1")
            return base

        monkeypatch.setattr(sqlite3, "connect", with_a_small_cache)

    def _changing(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            if self.off:
                raise PowerCutError
            # The real disk need not be waited for: what is fsynced is kept here.
            result = None if name == "fsync" else call(*args, **options)
            self._look()
            if name == "fsync":
                self._sync(args[0])
            self._count()
            return result

        return change

    def _reach(self, point: str, *_: object) -> None:
        if "journal" not in point:
            return
        if self.off:
            raise PowerCutError
        self.committing = False
        self._look()
        self.committing = point != "after_journal_fsync"
        if not self.committing:
            self.named = [self.named[-1]]
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.off = True
            raise PowerCutError

    def _look(self) -> None:
        result = list(self.directory.iterdir())
        files = [path for path in result if ".journal" not in path.name]
        names = {path.name: path.stat().st_ino for path in (*files, *self.directory.glob("*.journal"))}
        self.current.update((path.stat().st_ino, path.read_bytes()) for path in files)
        if names != self.named[-1]:
            self.named.append(names)
        if not self.committing:
            self.base = {path.name: path.read_bytes() for path in result if path not in files}

    def _sync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path == self.directory:
            self.named = [self.named[-1]]
        else:
            inode = os.fstat(fd).st_ino
            self.synced[inode] = self.current.get(inode, b"")

    def leave(self, directory: Path, dice: random.Random) -> None:
        """What is found after the power is back, in the empty ``directory``."""
        if not self.off:
            self._look()
        for name, inode in dice.choice(self.named).items():
            if name.endswith(".journal"):
                for item, data in self.base.items():
                    (directory / item).write_bytes(data)
            else:
                (directory / name).write_bytes(self._left_of(inode, dice))

    def _left_of(self, inode: int, dice: random.Random) -> bytes:
        synced, current = self.synced.get(inode, b""), self.current[inode]
        if not current.startswith(synced):
            return dice.choice((synced, current))
        tail = bytearray(current[len(synced) :][: dice.randint(0, len(current) - len(synced))])
        if tail and dice.random() < 0.3:
            start = dice.randrange(len(tail))
            tail[start : start + 20] = bytes(len(tail[start : start + 20]))
        return synced + bytes(tail)


def row(number: int) -> bytes:
    return b'{"row":%d,"text":"%s"}\n' % (number, b"x" * (number * 7 % 40))


def work(outputs: Outputs, dice: random.Random, safe: set[int]) -> None:
    """One start of the job: rows in another order each time, commits now and then; ``safe`` are those committed."""
    with Journal.open(outputs, {"seed": 1}) as journal:
        assert all(journal.done(number) for number in safe)
        if journal.state == "complete":
            return
        open_rows = [number for number in range(ROWS) if not journal.done(number)]
        assert journal.completed + journal.failed == ROWS - len(open_rows)
        # Near the order of the input, as an engine answers.
        open_rows.sort(key=lambda number: number + dice.random() * 20)
        put = []
        for number in open_rows:
            journal.put(number, row(number), failed=number % 5 == 0, totals={"tokens": number})
            put.append(number)
            if dice.random() < 0.15:
                journal.commit()
                safe.update(put)
            elif dice.random() < 0.2:
                journal.tick()
        journal.finish(ROWS)
        assert journal.totals == {"tokens": sum(range(ROWS))}


def check(outputs: Outputs) -> None:
    result = {}
    for name, path in (("rows", outputs.rows), ("errors", outputs.errors)):
        assert path is not None
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        result[name] = data.splitlines(keepends=True)
    rows = [row(number) for number in range(ROWS) if number % 5]
    errors = [row(number) for number in range(0, ROWS, 5)]
    if outputs.order == "completion":
        result = {name: sorted(lines) for name, lines in result.items()}
        rows, errors = sorted(rows), sorted(errors)
    assert result == {"rows": rows, "errors": errors}
    left = {path.name for path in outputs.rows.parent.iterdir()}
    assert left == {outputs.rows.name, outputs.errors.name, f"{outputs.rows.name}.journal"}


@pytest.mark.parametrize("seed", thorough(range(25), but=range(0, 25, 3)))
def test_whatever_is_left_goes_on(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    # Small, so that waiting rows leave memory as well.
    monkeypatch.setattr(journal_module, "_HELD_BYTES", 300)
    suffix = dice.choice((".jsonl", ".jsonl.gz"))
    order, atomic = ("input", "completion")[seed % 3 == 0], dice.random() < 0.4
    safe: set[int] = set()
    for start in range(4):
        directory = tmp_path / str(start)
        outputs = Outputs(
            rows=directory / f"o{suffix}", errors=directory / f"e{suffix}", order=order, atomic=atomic, sync_s=0.0
        )
        if start == 0:
            directory.mkdir()
        if start == 3:
            work(outputs, dice, safe)
            check(outputs)
            return
        with monkeypatch.context() as patched:
            disk = Disk(directory, dice.randint(1, 150), patched)
            with contextlib.suppress(PowerCutError):
                work(outputs, dice, safe)
        (tmp_path / str(start + 1)).mkdir()
        disk.leave(tmp_path / str(start + 1), dice)
