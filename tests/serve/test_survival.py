"""Kills, restarts and ends: no row is lost or done twice, and no batch has two workers."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moelight.core.errors import ConfigError
from moelight.serve import child_process, jobs
from moelight.serve.jobs import (
    Command,
    Job,
    JobRunner,
    WorkThread,
    generate_command,
    truncate_partial_line,
    wait_until_free,
)
from moelight.serve.store import MOVES, Batch, DataDirectory, RowCounts, Store, StoredFile
from moelight.serve.worker import Worker, check_lines
from tests.cli.program import forked_job
from tests.serve.standing import PACE, line, lines, stand_in, standing, until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def workers(data: Path) -> list[int]:
    began = data / "began.log"
    return [int(line.split()[0]) for line in began.read_text().splitlines()] if began.exists() else []


@pytest.mark.parametrize("kind", [Batch, StoredFile, jobs._JobStatus])
def test_types_are_read_before_threads_convert(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec reads a class at its first use; two threads that do so at once end the process (SIGSEGV)."""

    def read(_: type) -> None:
        raise AssertionError("the class is read now")

    for name in ("get_dataclass_info", "get_class_annotations"):
        monkeypatch.setattr(msgspec._utils, name, read)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({}, kind)


def test_a_server_goes_on_where_it_was_killed_or_interrupted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with standing(data) as first:
        working, waiting = first.begin(lines(25, "slow")), first.begin(lines(2))
        first.until(working, lambda now: now.request_counts.completed >= 2)
        with pytest.raises(ConfigError, match="another moelight serve-batch works there"):
            DataDirectory(data)
        (data / "files" / "file-half").write_bytes(b"half an upload")
        first.end(signal.SIGKILL)
        (killed,) = workers(data)
        until(lambda: alive(killed), lambda still: not still)
    with standing(data) as second:
        assert second.token == first.token and not (data / "files" / "file-half").exists()
        second.until(working, lambda now: now.request_counts.completed >= 4)
        second.process.send_signal(signal.SIGTERM)
        assert "stopped; 2 batches go on with the same command" in second.output.read()
        assert second.end() == 128 + signal.SIGTERM
        assert not any(alive(pid) for pid in workers(data))
    with standing(data) as third:
        done, after = third.finished(working), third.finished(waiting)
        assert (done.status, after.status) == ("completed", "completed")
        assert [row["custom_id"] for row in third.rows(done.output_file_id)] == [f"r{n}" for n in range(25)]
        assert done.request_counts.completed == 25
        assert third.end() == 128 + signal.SIGINT
    assert len(workers(data)) == 4


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    """The second begins when the first is gone, and neither begins for a parent that is gone."""
    lock, seen = tmp_path / "lock", tmp_path / "seen"
    command = ["/bin/sh", "-c", f"echo in >> {seen}; sleep 0.2; echo out >> {seen}"]

    def begin(parent: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-I", "-S", child_process.__file__, str(parent), str(lock), *command])

    two = [begin(os.getpid()) for _ in range(2)]
    with pytest.raises(TimeoutError, match="still works there"):
        until(seen.exists, bool)
        wait_until_free(Job(source=tmp_path, directory=directory_with(lock)), within_s=0)
    assert [item.wait() for item in two] == [0, 0]
    assert seen.read_text().split() == ["in", "out"] * 2
    assert begin(1).wait() == 1
    wait_until_free(Job(source=tmp_path, directory=lock.parent), within_s=1)


def directory_with(lock: Path) -> Path:
    (lock.parent / "worker.lock").symlink_to(lock)
    return lock.parent


def test_a_torn_tail_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    assert truncate_partial_line(path) == 0
    for text, rows, left in ((b"", 0, b""), (b"a\nb\n", 2, b"a\nb\n"), (b"a\nb", 1, b"a\n"), (b"ab", 0, b"")):
        path.write_bytes(text)
        assert truncate_partial_line(path) == rows and path.read_bytes() == left
    path.write_bytes(b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20))
    assert truncate_partial_line(path) == 1 and path.stat().st_size == (1 << 20) + 1


def batch_of(name: str, **more: object) -> Batch:
    base = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h", "created_at": 1}
    return Batch(id=name, expires_at=2, **{**base, **more})  # type: ignore[arg-type]


def file_of(name: str) -> StoredFile:
    return StoredFile(id=name, path=f"files/{name}", filename="x", purpose="batch", bytes=1, created_at=1)


def test_a_batch_moves_along_its_states_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    assert not store.add_batch(batch_of("b"))
    store.add_file(file_of("file-1"))
    for state, ways in MOVES.items():
        for to in [item for item in MOVES if item != "validating"]:
            name = f"{state}-{to}"
            assert store.add_batch(batch_of(name, status=state))
            assert store.move(
                name, to, counts=RowCounts(total=1), files={"output_file_id": file_of(f"out-{name}")}
            ) == (to in ways)
            result = store.batch(name)
            assert result is not None and result.status == (to if to in ways else state)
            assert (store.file(f"out-{name}") is not None) == (to in ways) == (result.output_file_id is not None)
            assert (getattr(result, f"{to}_at") is not None) == (to in ways)
        assert store.add_batch(batch_of(state, status=state))
        assert store.cancel(state) == (state in {"validating", "in_progress"})
    store.close()
    again = Store(tmp_path / "state.db")
    assert {batch.status for batch in again.open_batches()} == {"validating", "in_progress", "finalizing", "cancelling"}
    assert again.open_batches()[-1].status == "validating"
    again.close()


def work(data: DataDirectory, *, command: Command = stand_in, expire: bool = False) -> list[str]:
    """What a worker says until there is nothing left to do."""
    message: list[str] = []
    runner = JobRunner(command, say=message.append, pace=PACE)
    thread = WorkThread(Worker(data, runner, expire=expire).run)
    thread.start()
    until(data.store.open_batches, lambda left: not left)
    runner.stop()
    thread.finish()
    return message


def test_a_window_that_is_over_ends_a_batch_only_if_asked(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "data")
    (data.files / "file-1").write_bytes(lines(3))
    data.store.add_file(file_of("file-1"))
    endpoint = "/v1/chat/completions"
    for name, state in (("batch_begun", "in_progress"), ("batch_waits", "validating")):
        data.store.add_batch(batch_of(name, status=state, endpoint=endpoint))
    begun = data.batches / "batch_begun"
    begun.mkdir()
    (begun / "output.jsonl").write_bytes(lines(2) + b"{torn")
    work(data, expire=True)
    result = {batch.id: batch for batch in data.store.page(Batch, None, 9)[0]}  # type: ignore[index]
    assert {batch.status for batch in result.values()} == {"expired"}
    assert (begun / "output.jsonl").read_bytes() == lines(2)
    assert result["batch_begun"].output_file_id and result["batch_waits"].output_file_id is None
    data.store.add_batch(batch_of("batch_late", endpoint=endpoint))
    work(data)
    late = data.store.batch("batch_late")
    assert late is not None and (late.status, late.counts.completed) == ("completed", 3)
    data.close()


def test_a_disk_that_is_full_for_a_while_fails_no_batch(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "data")
    (data.files / "file-1").write_bytes(lines(1))
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1", endpoint="/v1/chat/completions"))
    failures = [OSError(errno.ENOSPC, "no space left"), OSError(errno.EIO, "broken")]

    def sometimes(job: Job) -> list[str]:
        if failures:
            raise failures.pop()
        return stand_in(job)

    message = work(data, command=sometimes)
    assert sum("tried again" in item for item in message) == 2
    done = data.store.batch("batch_1")
    assert done is not None and done.status == "completed"
    data.close()


def test_a_job_whose_disk_is_full_waits_for_room(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "full").touch()
    with standing(data) as server:
        batch = server.begin(lines(2) + lines(1, "full").replace(b"r0", b"r2"))
        waiting = server.until(batch, lambda now: now.errors is not None)
        (fault,) = waiting.errors.data
        assert (waiting.status, fault.code) == ("in_progress", "insufficient_storage")
        assert fault.message == (
            "output x: cannot be written (no space left on device); the batch goes on once there is room"
        )
        until(lambda: workers(data), lambda began: len(began) > 4)  # more often than a crash is tried again
        assert server.client.batches.retrieve(batch.id).status == "in_progress"
        (data / "full").unlink()
        done = server.finished(batch)
        assert (done.status, done.errors) == ("completed", None)
        assert [row["custom_id"] for row in server.rows(done.output_file_id)] == ["r0", "r1", "r2"]
        (data / "full").touch()
        given_up = server.begin(lines(1, "full"))
        server.until(given_up, lambda now: now.errors is not None)
        server.client.batches.cancel(given_up.id)
        assert server.finished(given_up).status == "cancelled"
        server.end()


def test_rows_of_a_real_job_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process finds the disk full at its second write, in the middle of its rows."""
    monkeypatch.setenv("MOELIGHT_FAULT", "before_write:2:ENOSPC")
    data = DataDirectory(tmp_path / "data")
    prompts = [{**line(f"r{n}"), "body": {**line("")["body"], "max_tokens": 1}} for n in range(2)]
    (data.files / "file-1").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1", endpoint="/v1/chat/completions"))
    policy = tmp_path / "policy.yaml"
    policy.write_text("model: demo\nbatch_size: 1\nmicro_batch_size: 1\n")
    real = generate_command("demo", ("--sync-interval", "0", "--policy", str(policy)), line_format="openai")
    monkeypatch.setattr(jobs.subprocess, "Popen", forked_job)
    message = work(data, command=real)
    done = data.store.batch("batch_1")
    assert done is not None and (done.status, done.counts) == ("completed", RowCounts(total=2, completed=2)), message
    assert any("no space left on device); goes on once there is room" in item for item in message)
    rows = (data.batches / "batch_1" / "output.jsonl").read_text().splitlines()
    assert sorted(json.loads(row)["custom_id"] for row in rows) == ["r0", "r1"]
    data.close()


def test_a_base_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="not a usable database"):
        Store(path)
    path.unlink()
    store = Store(path)
    store._base.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(ConfigError, match="later version"):
        Store(path)


def test_bad_lines_are_left_to_the_job(tmp_path: Path) -> None:
    path = tmp_path / "in"
    hostile = [b"\xff\xfe", b'{"url": 3}', b'{"url":' + b"[" * 50_000, b"[]", b"null", b'{"a": "\\ud800"}', b"{"]
    path.write_bytes(b"\xef\xbb\xbf" + lines(1) + b"\r\n\n" + b"\n".join(hostile) + b"\n" + b"x" * (17 << 20))
    assert check_lines(path, endpoint="/v1/chat/completions") == (RowCounts(total=9), [])
    path.write_bytes(lines(150))
    counts, faults = check_lines(path, endpoint="/v1/completions")
    assert counts.total == 150 and len(faults) == 100 and faults[-1].line == 100
    assert line("a")["url"] in faults[0].message


@pytest.mark.parametrize(("wish", "expected"), [("panic", "retry-limit-in-match over"), ("skip", "2 rows")])
def test_a_batch_is_completed_only_if_its_rows_add_up(tmp_path: Path, wish: str, expected: str) -> None:
    """Python ends with 1 by itself, which is also the exit code of a job with error rows."""
    data = DataDirectory(tmp_path / "data")
    (data.files / "file-1").write_bytes(lines(2) + lines(1, wish).replace(b"r0", b"bad"))
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1", endpoint="/v1/chat/completions"))
    assert sum("begun again" in item for item in work(data)) == 2
    result = data.store.batch("batch_1")
    assert result is not None and result.status == "failed"
    assert (result.counts.total, result.counts.completed, result.counts.failed) == (3, 2, 0)
    assert [error.code for error in result.errors] == ["worker_failed"] and expected in result.errors[0].message
    data.close()


def test_a_batch_whose_rows_are_gone_is_not_completed(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "data")
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1", status="finalizing"))
    data.store.count("batch_1", RowCounts(total=3, completed=3))
    (data.batches / "batch_1").mkdir()
    (data.batches / "batch_1" / "output.jsonl").write_bytes(lines(2))
    work(data)
    result = data.store.batch("batch_1")
    assert result is not None and (result.status, result.counts.completed) == ("failed", 2)
    assert result.errors[0].message == "2 of 3 rows are in the job's files"
    data.close()
