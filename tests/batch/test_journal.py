"""Rows of a job on the disk: in order, once, resumed, refused, and cut back when the disk refuses."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import re
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.batch import append, faults, store
from moelight.batch import journal as journal_module
from moelight.batch.fingerprint import differences
from moelight.batch.journal import Journal
from moelight.batch.paths import Outputs
from moelight.batch.store import RowSet
from moelight.core.errors import InputError, MoelightError, StorageError

FACTS = {"model": {"path": "m", "digest": "1"}, "sampling": {"temperature": 0.0}, "version": "1"}


def row(number: int) -> bytes:
    return b"row %d\n" % number


def rows(values: Any) -> bytes:
    return b"".join(map(row, values))


def put(journal: Journal, values: Any, *, commit: bool = True) -> None:
    for number in values:
        journal.put(number, row(number))
    if commit:
        journal.commit()


def begun(outputs: Outputs, values: Any = range(5)) -> None:
    with Journal.open(outputs, FACTS) as journal:
        put(journal, values)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsync is good for is `test_power_cut`'s; here it would only cost time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(store, "_SYNCHRONOUS", "OFF")


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    return Outputs(rows=tmp_path / "out.jsonl", sync_s=3600.0)


def test_in_order_over_three_starts(outputs: Outputs) -> None:
    with Journal.open(outputs, FACTS) as journal:
        assert (journal.state, journal.scan) == ("new", None)
        journal.note_scan({"rows": 6})
        put(journal, (4, 0, 2))
        assert outputs.rows.read_bytes() == row(0)
    assert names(outputs.rows.parent) == ["out.jsonl", "out.jsonl.journal"]
    with Journal.open(outputs, FACTS) as journal:
        assert (journal.state, journal.scan, journal.completed) == ("resumed", {"rows": 6}, 3)
        assert [journal.done(number) for number in range(6)] == [True, False, True, False, True, False]
        journal.put(1, row(1), totals={"tokens": 3})
        journal.put(5, row(5), failed=True, totals={"tokens": 4})
        assert journal.done(5)
        with pytest.raises(MoelightError, match="row 1 was answered twice"):
            journal.put(1, row(1))
        with pytest.raises(MoelightError, match="row 3 was never answered"):
            journal.finish(6)
    with Journal.open(outputs, FACTS) as journal:
        assert (journal.completed, journal.failed, journal.totals) == (4, 1, {"tokens": 7})
        journal.put(3, row(3))
        journal.finish(6)
        assert journal.state == "complete"
    assert outputs.rows.read_bytes() == rows(range(6))
    assert names(outputs.rows.parent) == ["out.jsonl", "out.jsonl.journal"]
    before = (outputs.rows.parent / "out.jsonl.journal").read_bytes()
    with Journal.open(outputs, FACTS) as journal:
        assert (journal.state, journal.completed, journal.failed) == ("complete", 5, 1)
        with pytest.raises(MoelightError, match="complete"):
            journal.put(6, row(6))
    assert (outputs.rows.parent / "out.jsonl.journal").read_bytes() == before


def test_ticks_commit_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now)
    outputs = Outputs(rows=tmp_path / "out", order="completion")
    with Journal.open(outputs, {}) as journal:
        journal.put(7, row(7))
        journal.tick()  # the first rows are seen at once
        assert outputs.rows.read_bytes() == row(7)
        journal.put(3, row(3))
        now = 4.9
        journal.tick()
        assert outputs.rows.read_bytes() == row(7)
        now = 5.0
        while outputs.rows.read_bytes() == row(7):  # the commit before may still be on its way
            journal.tick()
        journal.put(4, row(4))
        assert outputs.rows.read_bytes() == row(7) + row(3)
        journal.commit()
        assert outputs.rows.read_bytes() == row(7) + row(3) + row(4)


def test_waiting_rows_leave_memory_and_the_journal(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_HELD_BYTES", 1000)
    order = sorted(range(4000), key=lambda number: number + random.Random(number).random() * 600)
    path, largest = outputs.rows.with_name("out.jsonl.journal"), 0
    for part in range(4):
        with Journal.open(outputs, {}) as journal:
            for number in order[: (part + 1) * 1000]:
                if not journal.done(number):
                    journal.put(number, row(number))
                    largest = max(largest, path.stat().st_size)
                    assert journal._waiting.held_bytes <= 1000
            if part == 3:
                journal.finish(4000)
    assert outputs.rows.read_bytes() == rows(range(4000))
    assert path.stat().st_size < largest
    with contextlib.closing(sqlite3.connect(path)) as base:
        assert base.execute("SELECT count(*) FROM waiting").fetchone() == (0,)
        assert base.execute("PRAGMA freelist_count").fetchone() <= (2,)


def test_atomic_files_appear_at_the_end(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "out").symlink_to(real / "out")
    outputs = Outputs(rows=tmp_path / "out", errors=real / "errors", atomic=True)
    with Journal.open(outputs, FACTS) as journal:
        journal.put(0, row(0))
    assert names(real) == [".errors.partial", ".out.partial", "out.journal"]
    with Journal.open(outputs, FACTS) as journal:
        journal.put(1, row(1), failed=True)
        journal.finish(2)
    assert names(real) == ["errors", "out", "out.journal"]
    assert (tmp_path / "out").is_symlink()
    (real / "out").chmod(0o640)
    with pytest.raises(InputError, match=r"nothing is added to it; --restart starts anew"):
        Journal.open(outputs, {}, allow_changed=True)
    with Journal.open(outputs, {}, restart=True) as journal:
        put(journal, (1, 0))
        # The earlier files stay until the new ones are whole.
        assert (real / "out").read_bytes() == row(0)
        journal.finish(2)
    assert (real / "out").read_bytes() == rows(range(2))
    assert (real / "errors").read_bytes() == b""
    assert stat.S_IMODE((real / "out").stat().st_mode) == 0o640


def test_gzip_is_whole_after_each_commit(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        outputs = Outputs(rows=tmp_path / f"{name}.gz", errors=tmp_path / f"{name}-errors.gz")
        for start in range(3):
            with Journal.open(outputs, {}) as journal:
                put(journal, range(start * 10, start * 10 + 10))
                assert gzip.decompress(outputs.rows.read_bytes()) == rows(range(start * 10 + 10))
                if start == 2:
                    journal.finish(30)
        assert outputs.errors is not None
        assert gzip.decompress(outputs.errors.read_bytes()) == b"" != outputs.errors.read_bytes()
        written.append(outputs.rows.read_bytes())
    assert written[0] == written[1]


def test_a_torn_commit_and_torn_rows_are_dropped(outputs: Outputs) -> None:
    """The journal of a process that was killed while SQLite changed its pages: the commit before holds."""
    begun(outputs)
    path = outputs.rows.with_name("out.jsonl.journal")
    for start in range(3):
        copies = {}
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as base:
            # Pages leave a cache that is too small, so the file holds a part of this transaction.
            base.execute("PRAGMA cache_size = 1")
            base.execute("BEGIN")
            base.execute("DELETE FROM extents")
            base.executemany("INSERT INTO waiting VALUES (?, 0, 0, ?)", [(100 + n, bytes(3000)) for n in range(20)])
            for item in (path, path.with_name("out.jsonl.journal-journal")):
                copies[item] = item.read_bytes()
        for item, data in copies.items():
            item.write_bytes(data)
        with outputs.rows.open("ab") as file:
            file.write(b"row 5 to")
        with Journal.open(outputs, FACTS) as journal:
            assert journal.completed == 5, start
        assert outputs.rows.read_bytes() == rows(range(5))


def damage(path: Path, kind: str) -> None:
    journal = path.with_name("out.jsonl.journal")
    match kind:
        case "no journal":
            journal.unlink()
        case "no output":
            path.unlink()
        case "short":
            os.truncate(path, 7)
        case "other bytes":
            path.write_bytes(path.read_bytes().replace(b"3", b"4"))
        case "a page":
            data = bytearray(journal.read_bytes())
            data[4096:8192] = bytes(range(256)) * 16
            journal.write_bytes(data)
        case "a short journal":
            os.truncate(journal, journal.stat().st_size // 2)
        case "a value":
            execute(journal, "UPDATE job SET value = 'x' WHERE name = 'completed'")
        case "a count":
            execute(journal, "UPDATE job SET value = '4' WHERE name = 'completed'")
        case "no journal at all":
            journal.write_bytes(b"my diary\n")
        case "somebody's database":
            journal.unlink()
            execute(journal, "CREATE TABLE diary (day TEXT)")
        case "another version":
            execute(journal, "PRAGMA user_version = 9")
        case "lines of JSON":
            journal.write_bytes(b'{"crc":"1a2b3c4d","record":{"kind":"job","version":1}}\n')


def execute(journal: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as base:
        base.execute(statement)


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "no journal": "is here already, and its journal out.jsonl.journal is not",
        "no output": "is gone, 30 bytes were written to it",
        "short": "7 bytes found and 30 bytes expected",
        "other bytes": "bytes 0 to 30 are not those that were written",
        "a page": "is damaged, so what this job has done is not known",
        "a short journal": "is damaged, so what this job has done is not known",
        "a value": "is damaged, so what this job has done is not known",
        "a count": "is damaged, so what this job has done is not known",
        "no journal at all": "is not a journal",
        "somebody's database": "is not a journal",
        "lines of JSON": "is a journal of version 1, .*; finish the job with the moelight that began it",
        "another version": "version 9",
    }.items(),
)
def test_what_does_not_fit_is_refused_and_left(kind: str, message: str, outputs: Outputs) -> None:
    begun(outputs)
    damage(outputs.rows, kind)
    before = {path: path.read_bytes() for path in outputs.rows.parent.iterdir()}
    with pytest.raises(InputError, match=message) as refusal:
        Journal.open(outputs, FACTS)
    assert "--restart" in str(refusal.value) and "\n" not in str(refusal.value)
    assert before == {path: path.read_bytes() for path in outputs.rows.parent.iterdir()}
    with Journal.open(outputs, FACTS, restart=True) as journal:
        assert (journal.state, journal.completed) == ("new", 0)
        put(journal, range(2))
        journal.finish(2)
    assert outputs.rows.read_bytes() == rows(range(2))


def test_an_empty_output_and_an_unfinished_journal_are_fine(outputs: Outputs) -> None:
    outputs.rows.touch()
    outputs.rows.with_name("out.jsonl.journal").touch()
    with Journal.open(outputs, FACTS) as journal:
        assert journal.state == "new"


def test_another_job_is_refused_with_the_difference(outputs: Outputs) -> None:
    begun(outputs)
    other = {"model": FACTS["model"], "sampling": {"temperature": 0.7}, "version": "2"}
    message = re.escape('(sampling.temperature: was 0.0, is 0.7; version: was "1", is "2"); --allow-changed')
    with pytest.raises(InputError, match=message) as refusal:
        Journal.open(outputs, other)
    assert refusal.value.code == "job_changed"
    with pytest.raises(InputError, match=re.escape('order: was "input", is "completion"')):
        Journal.open(Outputs(rows=outputs.rows, order="completion"), FACTS, allow_changed=True)
    with Journal.open(outputs, FACTS) as journal:
        journal.note_scan({"rows": 5})
    with Journal.open(outputs, other, allow_changed=True) as journal:
        assert (journal.state, journal.scan) == ("resumed", None)
        assert journal.changed == ["sampling.temperature: was 0.0, is 0.7", 'version: was "1", is "2"']
        put(journal, range(5, 7))
        journal.finish(7)
    with Journal.open(outputs, other) as journal:
        assert (journal.state, journal.changed) == ("complete", [])
    # A longer input: what is complete is gone on with.
    with Journal.open(outputs, FACTS, allow_changed=True) as journal:
        assert journal.state == "resumed"
        put(journal, (8, 7))
        journal.finish(9)
    assert outputs.rows.read_bytes() == rows(range(9))


def test_differences() -> None:
    long = "x" * 100
    was = {"a": {"b": 1, "c": [1, 2]}, "long": f"{long}1{long}", "gone": 2, "null": None, "kept": 1}
    now = {"a": {"b": 1, "c": [1, 3]}, "long": f"{long}2{long}", "kept": 1, "new": True}
    assert differences(was, now) == [
        "a.c: was [1, 2], is [1, 3]",
        f"long: was …{'x' * 10}1{'x' * 49}…, is …{'x' * 10}2{'x' * 49}…",
        "new: was absent, is true",
        "gone: was 2, is absent",
    ]


def test_one_writer(outputs: Outputs, tmp_path: Path) -> None:
    with Journal.open(outputs, FACTS) as journal:
        for restart in (False, True):
            with pytest.raises(InputError, match=f"is being written by process {os.getpid()}$") as refusal:
                Journal.open(outputs, FACTS, restart=restart)
            assert refusal.value.code == "job_running"
        shared = Outputs(rows=tmp_path / "other", errors=outputs.rows)
        with pytest.raises(InputError, match="is being written by another process"):
            Journal.open(shared, FACTS)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
        put(journal, range(3))
    try:
        Journal.open(outputs, FACTS).close()
    finally:
        child.communicate(b"\n")


FAULTS = {
    "before_write": "ENOSPC",
    "mid_write": "ENOSPC",
    "before_fsync_rows": "EIO",
    "mid_journal_write": "EDQUOT",
    "after_journal_write": "EIO",
}


@pytest.mark.parametrize("suffix", [".jsonl", ".gz"])
@pytest.mark.parametrize("point", FAULTS)
def test_a_disk_that_refuses(point: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Outputs(rows=tmp_path / f"out{suffix}", order="completion")
    with Journal.open(outputs, FACTS) as journal:
        put(journal, range(5))
        committed = outputs.rows.read_bytes()
        monkeypatch.setattr(faults, "_FAULT", faults._InjectedFault(point=point, count=1, action=FAULTS[point]))
        put(journal, range(5, 9), commit=False)
        message = "output .*: cannot be written .*every row that was on the disk is kept"
        with pytest.raises(InputError, match=message) as first:
            journal.commit()
        for call in (journal.tick, journal.commit, lambda: journal.put(9, row(9)), lambda: journal.finish(9)):
            with pytest.raises(InputError) as again:
                call()
            assert again.value is first.value
    assert outputs.rows.read_bytes() == committed
    with Journal.open(outputs, FACTS) as journal:
        assert journal.completed == 5
        put(journal, range(5, 9))
        journal.finish(9)
    data = outputs.rows.read_bytes()
    assert (gzip.decompress(data) if suffix == ".gz" else data) == rows(range(9))


def test_a_database_without_room_is_a_full_disk(tmp_path: Path) -> None:
    outputs = Outputs(rows=tmp_path / "out")
    with Journal.open(outputs, FACTS) as journal:
        put(journal, range(5))
        base = journal._store.base
        base.execute(f"PRAGMA max_page_count = {base.execute('PRAGMA page_count').fetchone()[0]}")
        journal.put(6, bytes(20_000), failed=True)
        with pytest.raises(StorageError, match=r"cannot be written \(no space left on device\); every row .* is kept"):
            journal.commit()
    assert outputs.rows.read_bytes() == rows(range(5))
    with Journal.open(outputs, FACTS) as journal:
        assert journal.completed == 5 and not journal.done(6)


def test_a_failure_beside_the_job_surfaces_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(Outputs(rows=tmp_path / "out", sync_s=0.0), {}) as journal:
        monkeypatch.setattr(faults, "_FAULT", faults._InjectedFault(point="before_fsync_rows", count=1, action="EIO"))
        journal.put(0, row(0))
        journal.tick()
        assert journal._pending is not None
        assert journal._pending.exception() is not None
        with pytest.raises(InputError, match="input/output error"):
            journal.put(1, row(1))


def test_the_system_takes_little_at_a_time(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(append.os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    begun(outputs)
    assert outputs.rows.read_bytes() == rows(range(5))


def test_what_ends_the_block_loses_nothing(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), Journal.open(outputs, FACTS) as journal:
        put(journal, range(3), commit=False)
        raise KeyError("engine")
    assert outputs.rows.read_bytes() == rows(range(3))

    def interrupted(self: append.AppendFile, data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Journal.open(outputs, FACTS) as journal:
        put(journal, range(3, 5))
        monkeypatch.setattr(append.AppendFile, "append", interrupted)
        journal.put(5, row(5))
    monkeypatch.undo()
    with Journal.open(outputs, FACTS) as journal:
        assert journal.completed == 5 and not journal.done(5)


def test_numbers_are_a_set() -> None:
    dice = random.Random(0)
    for _ in range(20):
        values, parts, model = RowSet(), {}, set()
        for _ in range(dice.randint(0, 40)):
            number = dice.choice((dice.randint(0, 60), dice.randint(0, 200_000)))
            values.add(number)
            model.add(number)
            if dice.random() < 0.3:
                parts.update(values.changed_parts())
        parts.update(values.changed_parts())
        for result in (values, RowSet(sorted(parts.items()))):
            assert {number for number in range(70) if number in result} == {number for number in model if number < 70}
            assert all(number in result and number + 200_000 not in result for number in model)
            assert len(result) == len(model)
            for total in (0, 5, 64, 100):
                assert result.missing(total) == min(set(range(total)) - model, default=None)
        assert not values.changed_parts()


def test_killed_at_every_point(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.batch.kills", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 100
