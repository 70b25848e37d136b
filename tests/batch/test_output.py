"""Files are refused before work, whole afterwards, and untouched when something goes wrong in between."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from moelight.batch.output import check_writable, whole_file
from moelight.core.errors import InputError


def everything(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*"))


def test_a_new_file_and_a_replaced_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check_writable(path, label="output")
    assert everything(tmp_path) == []
    for content in (b"one\n", b"two\n"):
        with whole_file(path, label="output") as write:
            write(content)
            assert not path.exists() or path.read_bytes() != content
        assert path.read_bytes() == content
    assert everything(tmp_path) == ["out.jsonl"]


def test_a_failed_block_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"earlier")

    def fail() -> None:
        with whole_file(path, label="output") as write:
            write(b"half")
            raise KeyError("engine")

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"earlier"
    assert everything(tmp_path) == ["out.jsonl"]


def test_faults_of_the_block_are_not_taken_for_the_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="weights"), whole_file(tmp_path / "out", label="output"):
        raise OSError("weights")
    with pytest.raises(ValueError, match="bug"), whole_file(tmp_path / "out", label="output"):
        raise ValueError("bug")
    assert everything(tmp_path) == []


def test_mode_and_link_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "out.jsonl", tmp_path / "link.jsonl"
    real.write_bytes(b"earlier")
    real.chmod(0o640)
    link.symlink_to(real)
    check_writable(link, label="output")
    with whole_file(link, label="output") as write:
        write(b"new")
    assert link.is_symlink() and real.read_bytes() == b"new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


REFUSED = {
    "a directory": ("", "it is a directory"),
    "no such directory": ("missing/out.jsonl", "there is no directory"),
    "a file as a directory": ("file/out.jsonl", "is not a directory"),
    "below a file": ("file/deeper/out.jsonl", "directory"),
    "too long a name": ("n" * 300, "too long"),
    "a null": ("a\0b", "null"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_at_once(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    name, reason = REFUSED[kind]
    with pytest.raises(InputError, match=reason) as refusal:
        check_writable(tmp_path / name, label="output")
    assert str(refusal.value).startswith("output ")
    assert everything(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_permission_is_denied(tmp_path: Path) -> None:
    retained, locked = tmp_path / "kept", tmp_path / "locked"
    retained.write_bytes(b"x")
    retained.chmod(0o444)
    locked.mkdir(0o555)
    for path in (retained, locked / "out"):
        with pytest.raises(InputError, match="permission denied"):
            check_writable(path, label="output")


def test_a_full_disk_is_one_line() -> None:
    check_writable(Path("/dev/full"), label="output")
    message = re.escape("output /dev/full: cannot be written (no space left on device)")
    for size in (1, 1_000_000):
        with pytest.raises(InputError, match=message), whole_file(Path("/dev/full"), label="output") as write:
            write(b"x" * size)


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe, label="output")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    with whole_file(pipe, label="output") as write:
        write(b"rows")
    reader.join()
    assert received == [b"rows"]
    assert everything(tmp_path) == ["pipe"]


def test_a_closed_pipe_is_not_dressed_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def write_to_nobody() -> None:
        with whole_file(pipe, label="output") as write:
            os.close(reader)
            write(b"rows")

    with pytest.raises(BrokenPipeError):
        write_to_nobody()


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    check_writable(Path("-"), label="output")
    with whole_file(Path("-"), label="output") as write:
        write(b"rows\n")
    assert capfdbinary.readouterr().out == b"rows\n"
