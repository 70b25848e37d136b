"""A watched folder: what is dropped is answered once, whatever is killed meanwhile; what is no drop is left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.serve.jobs import JobRunner
from moelight.serve.watch import Watcher, watch
from tests.cli.program import ROOT, Program
from tests.serve.standing import PACE, lines, stand_in, until

SETTLE_S = 0.1


def watcher(root: Path) -> tuple[Watcher, JobRunner]:
    runner = JobRunner(stand_in, say=lambda text: print(text, file=sys.stderr, flush=True), pace=PACE)
    return Watcher(root, runner, settle_s=SETTLE_S), runner


@contextlib.contextmanager
def watching(root: Path) -> Iterator[None]:
    result, runner = watcher(root)
    thread = threading.Thread(target=result.run)
    thread.start()
    try:
        yield
    finally:
        runner.stop()
        thread.join()


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_what_is_dropped_is_answered(tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(lines(1))
    root = tmp_path / "in"
    root.mkdir()
    (root / "link.jsonl").symlink_to(outside)
    os.mkfifo(root / "pipe.jsonl")
    for left in (".hidden.jsonl", "a.jsonl.part", "b.jsonl.tmp", "notes.txt"):
        (root / left).write_bytes(lines(1))
    (root / "empty.jsonl").touch()
    (root / "good.jsonl").write_bytes(lines(2) + lines(1, "refuse").replace(b"r0", b"bad"))
    (root / "bad.jsonl").write_bytes(lines(1) + lines(1, "reject").replace(b"r0", b"r1"))
    with watching(root):
        until(lambda: (root / "failed" / "bad.jsonl").exists() and (root / "done" / "good.jsonl").exists(), bool)
        with (root / "good.jsonl").open("wb") as slow:  # the name again, written slowly
            for line in lines(3).splitlines(keepends=True):
                slow.write(line)
                slow.flush()
                time.sleep(SETTLE_S / 2)
        until((root / "done" / "good-2.jsonl").exists, bool)
        with pytest.raises(ConfigError, match="another moelight serve-batch works there"):
            watcher(root)
    assert (root / "failed" / "bad.error.txt").read_text() == "this job is refused\n"
    made = {name for name in names(root) if "/" in name} - {".moelight/lock"}
    assert made == {
        *(f"done/good{end}" for end in (".jsonl", ".output.jsonl", ".errors.jsonl", "-2.jsonl", "-2.output.jsonl")),
        *(f"failed/bad{end}" for end in (".jsonl", ".error.txt", ".output.jsonl")),
    }
    assert len((root / "done" / "good-2.output.jsonl").read_bytes().splitlines()) == 3
    assert {"link.jsonl", ".hidden.jsonl", "a.jsonl.part", "b.jsonl.tmp", "notes.txt", "empty.jsonl"} <= set(
        names(root)
    )


@pytest.mark.parametrize("wish", ["panic", "skip"])
def test_what_is_not_done_to_its_last_row_does_not_go_to_done(tmp_path: Path, wish: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(2) + lines(1, wish).replace(b"r0", b"bad"))
    with watching(tmp_path):
        until((tmp_path / "failed" / "a.jsonl").exists, bool)
    assert (tmp_path / "failed" / "a.error.txt").read_text().startswith("the job ended with exit code ")
    assert len((tmp_path / "failed" / "a.output.jsonl").read_bytes().splitlines()) == 2
    assert not any((tmp_path / "done").iterdir())


def test_a_killed_watcher_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(6, "slow"))
    output = tmp_path / ".moelight" / "a.jsonl" / "output.jsonl"
    for number in (signal.SIGKILL, signal.SIGINT):
        process = Program("tests.serve.test_watch", tmp_path, cwd=ROOT)
        before = output.read_bytes() if output.exists() else b""
        until(lambda: output.exists() and len(output.read_bytes()) > len(before), bool)  # noqa: B023
        process.send_signal(number)
        assert process.wait() == (-number if number == signal.SIGKILL else number)
    with watching(tmp_path):
        until((tmp_path / "done" / "a.jsonl").exists, bool)
    assert len((tmp_path / "done" / "a.output.jsonl").read_bytes().splitlines()) == 6


@pytest.mark.parametrize("moved", [(), ("output.jsonl",), ("output.jsonl", "input.jsonl")])
def test_a_kill_between_two_moves_loses_nothing(tmp_path: Path, moved: tuple[str, ...]) -> None:
    taken, done = tmp_path / ".moelight" / "a.jsonl", tmp_path / "done"
    taken.mkdir(parents=True)
    (tmp_path / ".moelight" / "b.jsonl").mkdir()  # killed before the file was taken
    done.mkdir()
    for name in ("input.jsonl", "output.jsonl"):
        path = done / ("a.jsonl" if name == "input.jsonl" else "a.output.jsonl") if name in moved else taken / name
        path.write_bytes(lines(1))
    (taken / "ending.json").write_text('{"to": "done", "stem": "a", "why": null}')
    with watching(tmp_path):
        until(lambda: taken.exists() or (tmp_path / ".moelight" / "b.jsonl").exists(), lambda present: not present)
    assert {"done/a.jsonl", "done/a.output.jsonl"} <= set(names(tmp_path))
    assert (done / "a.jsonl").read_bytes() == (done / "a.output.jsonl").read_bytes() == lines(1)


LONG = "\u00e4" * 120 + "b" * 9 + ".jsonl"  # 255 bytes; what is cut off at 242 ends within a character
ODD = os.fsdecode(b"not utf-8 \xff\xfe\x1b[2J.jsonl")


def test_no_name_holds_up_those_behind_it(tmp_path: Path) -> None:
    for name in (LONG, LONG.replace("b.", "c."), "a" * 238 + ".jsonl", ODD):
        (tmp_path / name).write_bytes(lines(2) + lines(1, "refuse").replace(b"r0", b"r2"))
    (tmp_path / LONG.replace("b.", "d.")).write_bytes(lines(1, "reject"))
    stuck = tmp_path / ".moelight" / ("s" * 249 + ".jsonl")  # where an earlier version left it
    stuck.mkdir(parents=True)
    for name in ("input.jsonl", "output.jsonl"):
        (stuck / name).write_bytes(lines(3))
    (stuck / "ending.json").write_text(json.dumps({"to": "done", "stem": "s" * 249, "why": None}))
    (tmp_path / "last.jsonl").write_bytes(lines(1))
    with watching(tmp_path):
        until(lambda: len(names(tmp_path / "done")) == 16, bool)
        until(lambda: len(names(tmp_path / "failed")) == 2, bool)
    cut = "\u00e4" * 120 + "bb"
    again = "\u00e4" * 120 + "-2"
    done = {name: (tmp_path / "done" / name).read_bytes().count(b"\n") for name in names(tmp_path / "done")}
    made = {(".jsonl", 3), (".output.jsonl", 2), (".errors.jsonl", 1)}
    stems = (cut, again, "a" * 238, ODD.removesuffix(".jsonl"))
    assert done == {
        **{f"{stem}{end}": count for stem in stems for end, count in made},
        **{"s" * 242 + end: 3 for end in (".jsonl", ".output.jsonl")},
        **{f"last{end}": 1 for end in (".jsonl", ".output.jsonl")},
    }
    assert (tmp_path / "failed" / f"{cut}.error.txt").read_text() == "this job is refused\n"
    assert names(tmp_path / ".moelight") == ["lock"]


def test_a_file_that_cannot_be_moved_holds_up_nobody(tmp_path: Path) -> None:
    """A directory stands where the rows should be that one job made."""
    (tmp_path / ".moelight").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines(1))
    taken = tmp_path / ".moelight" / "b.jsonl"
    (taken / "output.jsonl").mkdir(parents=True)
    (taken / "input.jsonl").write_bytes(lines(1))
    (taken / "ending.json").write_text('{"to": "done", "stem": "b", "why": null}')
    with watching(tmp_path):
        until((tmp_path / "done" / "c.jsonl").exists, bool)
        assert (taken / "input.jsonl").exists() and (tmp_path / "b.jsonl").exists()
        (taken / "output.jsonl").rmdir()
        until((tmp_path / "done" / "b.jsonl").exists, bool)
        until((tmp_path / "done" / "b-2.jsonl").exists, bool)
    rows = [f"{stem}.output.jsonl" for stem in ("a", "b-2", "c")]
    assert names(tmp_path / "done") == sorted([*(f"{stem}.jsonl" for stem in ("a", "b", "b-2", "c")), *rows])


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        watcher(tmp_path / "none")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(watch(*watcher(Path(sys.argv[1]))))
