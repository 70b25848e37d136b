"""Inputs that mean harm, through the program as it is run: each bad row is an error row, good ones are as ever."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moelight.core.request import Completion, SamplingParams
from moelight.engine.engine import Engine
from tests.cli.program import PLANNED, moelight, moelight_inside, read_rows, write_prompts
from tests.hostile.batch_lines import BatchLine, batch_file, batch_lines

LINES = batch_lines(10 * int(os.environ.get("MOELIGHT_EXAMPLES", "40")))
# Behind them, packed into 192 KB: a line that is longer than any may be.
ZEROS = BatchLine(kind="zeros", raw=b"", custom_id=None, code="line_too_long")
ZEROS_BYTES = 192 << 20
# Four lines have 10 MB; one at a time is there as bytes, as text and as JSON. Of the zeros, 64 MiB are looked at.
MORE_BYTES = 160 << 20


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """All lines with a file of errors, and the good ones alone, in processes of their own."""
    directory = tmp_path_factory.mktemp("hostile")
    zeros = gzip.compress(bytes(1 << 20), mtime=0) * (ZEROS_BYTES >> 20)
    packed = gzip.compress(batch_file(LINES) + b"\n\r\n", 1) + zeros
    (directory / "all.jsonl").write_bytes(packed)
    (directory / "good.jsonl").write_bytes(batch_file([line for line in LINES if line.code is None]))
    return {name: (directory, generate(directory, name, "--error-file", f"{name}.errors")) for name in ("all", "good")}


def generate(directory: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    options = ("-o", f"{name}.out", "--stats", f"{name}.stats", *PLANNED, *more)
    return moelight("generate", f"{name}.jsonl", *options, cwd=directory, env_extra=on_the_same_path())


def on_the_same_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", host_memory="1GiB", batch_size=8) as opened:
        yield opened


def answers(engine: Engine, line: BatchLine) -> list[Completion]:
    """What the engine says to a line, asked for nothing else at the time."""
    body = json.loads(line.raw)["body"]
    prompts = body.get("prompt", [{"messages": body.get("messages")}])
    fields = ("n", "temperature", "seed", "stop", "logit_bias")
    sampling = {name: body[name] for name in fields if body.get(name) is not None}
    return engine.generate(prompts, SamplingParams.from_dict({"max_tokens": 2, "seed": 0, **sampling}))


def texts(row: dict[str, Any]) -> list[str]:
    choices = row["response"]["body"]["choices"]
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def check_error_row(row: dict[str, Any], line: BatchLine, number: int) -> None:
    assert set(row) == {"id", "custom_id", "response", "error"} | ({"line"} if line.custom_id is None else set())
    assert row["custom_id"] == line.custom_id
    response, body = row["response"], row["response"]["body"]
    assert row["id"].startswith("batch_req_") and set(response) == {"status_code", "request_id", "body"}
    assert response["status_code"] == (404 if line.code == "model_not_found" else 400)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    inner = body["error"] | {"code": response["status_code"], "type": row["error"]["error"]["type"]}
    assert row["error"] == {"code": line.code, "message": message, "error": inner}
    assert (body["error"]["code"], body["error"]["type"]) == (line.code, "invalid_request_error")
    assert 0 < len(row["error"]["message"]) < 400 and row["error"]["message"].isprintable()
    if line.custom_id is None:
        assert row["line"] == 2 * number + 1


def test_each_bad_row_is_an_error_row_and_the_good_ones_are_right(
    jobs: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], engine: Engine
) -> None:
    directory, done = jobs["all"]
    bad = [(number, line) for number, line in enumerate([*LINES, ZEROS]) if line.code is not None]
    good = [line for line in LINES if line.code is None]
    assert done.returncode == 1
    # A slow machine is told the progress, too.
    progress = re.compile(r"moelight: (reading the input: |\d+/\d+ rows \()")
    message = [line for line in done.stderr.splitlines() if not progress.match(line)]
    assert len(message) == 3 and all(line.startswith("moelight: ") for line in message), done.stderr
    first = 2 * bad[0][0] + 1
    assert f"{len(bad):,} of {len(LINES) + 1:,} lines were not served; the first is line {first}: " in message[-1]

    errors = read_rows((directory / "all.errors").read_text())
    assert len(errors) == len(bad) > 250
    for row, (number, line) in zip(errors, bad, strict=True):
        check_error_row(row, line, number)

    rows = read_rows((directory / "all.out").read_text())
    assert len(rows) == len(good) > 100
    for row, line in zip(rows, good, strict=True):
        assert row["custom_id"] == line.custom_id and row["error"] is None
        assert texts(row) == [answer.text for answer in answers(engine, line)], line.kind

    assert jobs["good"][1].returncode == 0, jobs["good"][1].stderr
    alone = read_rows((directory / "good.out").read_text())
    assert [texts(row) for row in alone] == [texts(row) for row in rows]


def test_hostile_lines_take_no_memory(jobs: dict[str, tuple[Path, subprocess.CompletedProcess[str]]]) -> None:
    directory, _ = jobs["all"]
    of = {name: json.loads((directory / f"{name}.stats").read_text())["peak_rss_bytes"] for name in jobs}
    assert of["all"] < of["good"] + MORE_BYTES, of


def test_in_place_the_rows_are_those_of_both_files(
    jobs: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    directory, _ = jobs["all"]
    small = [line for line in LINES if len(line.raw) < 1000][:200]
    (tmp_path / "in.jsonl").write_bytes(batch_file(small))
    done = moelight_inside("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *PLANNED)
    assert done.returncode == 1
    rows = read_rows((tmp_path / "out.jsonl").read_text())
    assert [row["custom_id"] for row in rows] == [line.custom_id for line in small]
    assert [(row["error"] or {}).get("code") for row in rows] == [line.code for line in small]
    before = {row["custom_id"]: texts(row) for row in read_rows((directory / "all.out").read_text())}
    for row in rows:
        assert row["error"] or texts(row) == before[row["custom_id"]]


GOOD = b'{"prompt": "add 17 and 25 ="}\n'


def refused(*arguments: str | Path, **options: Any) -> str:
    """What is said by a job that is refused: one line."""
    done = moelight_inside("generate", *arguments, **options)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("moelight: error: ")
    return done.stderr


def test_prompts_behind_a_link_and_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_bytes(GOOD)
    link, pipe = tmp_path / "link.jsonl", tmp_path / "pipe"
    link.symlink_to("real.jsonl")
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=(GOOD,), daemon=True).start()
    for path in (link, pipe):
        done = moelight_inside("generate", path, *PLANNED)
        assert (done.returncode, read_rows(done.stdout)[0]["text"].strip()) == (0, "42"), done.stderr


def files_of_prompts(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """By kind: the file, and what is said of it."""
    packed = gzip.compress(GOOD * 1000)
    contents = {
        "truncated gzip": (packed[:-20], "the gzip data ends in the middle"),
        "damaged gzip": (packed[:-8] + bytes(8), "damaged gzip data"),
        "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16; save it as UTF-8"),
        "zip": (b"PK\x03\x04" + bytes(100), "packed with zip"),
        "zstd": (b"\x28\xb5\x2f\xfd" + bytes(100), "packed with zstd"),
        "only blank lines": (b"\xef\xbb\xbf\r\n \n\t\n", "no prompts"),
        "empty": (b"", "no prompts"),
        "empty gzip": (gzip.compress(b""), "no prompts"),
        "one JSON text": (b'[\n  {"prompt": "a"}\n]\n', "one JSON text over many lines"),
    }
    made = {}
    for number, (kind, (data, content)) in enumerate(contents.items()):
        path = tmp_path / f"{number}.json"
        path.write_bytes(data)
        made[kind] = path, content
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    return {
        **made,
        "a directory": (tmp_path, "Is a directory"),
        "a link to nothing": (_link(tmp_path / "dangling", "nowhere"), "No such file"),
        "a link to itself": (loop, "Too many levels of symbolic links"),
        "a name that is too long": (tmp_path / ("x" * 300), "File name too long"),
        "memory of a process": (Path("/proc/self/mem"), "cannot be read"),
    }


def _link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def test_files_that_are_no_prompts_are_refused_in_a_line(tmp_path: Path) -> None:
    for kind, (path, prompt) in files_of_prompts(tmp_path).items():
        before = sorted(tmp_path.iterdir())
        assert prompt in refused(path, "-o", tmp_path / "out.jsonl"), kind
        assert sorted(tmp_path.iterdir()) == before, kind


def test_what_is_appended_while_it_is_read_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moelight.batch import job

    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(GOOD * 3)
    scan = job.scan

    def growing(*inputs: Any, **options: Any) -> Any:
        with path.open("ab") as file:
            file.write(GOOD)
        return scan(*inputs, **options)

    with monkeypatch.context() as patched:
        patched.setattr(job, "scan", growing)
        assert moelight_inside("generate", path, "-o", out, *PLANNED).returncode == 0
    assert len(read_rows(out.read_text())) == 3
    assert "prompts.bytes: was 90, is 120" in refused(path, "-o", out, *PLANNED)


def test_what_is_cut_off_while_it_is_read_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moelight.batch import job

    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(GOOD * 3)
    scan = job.scan

    def shrinking(*inputs: Any, **options: Any) -> Any:
        os.truncate(path, 20)
        return scan(*inputs, **options)

    monkeypatch.setattr(job, "scan", shrinking)
    assert "became shorter while it was read" in refused(path, "-o", out, *PLANNED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "in.jsonl", {"prompt": "a"})
    link = _link(tmp_path / "link", "in.jsonl")
    out = tmp_path / "out.jsonl"
    before = sorted(tmp_path.iterdir())
    for more, message in (
        (("-o", path), "is the same file as the prompts"),
        (("-o", link), "is the same file as the prompts"),
        (("-o", out, "--error-file", out), "is the same file as the output"),
        (("-o", out, "--error-file", link), "is the same file as the prompts"),
        (("-o", out, "--stats", f"{out}.journal"), "is the same file as the stats"),
        (("-o", tmp_path / "none" / "out"), "there is no directory"),
        (("-o", path / "out"), "is not a directory"),
        (("-o", tmp_path), "it is a directory"),
        (("-o", _link(tmp_path / "far", "none/out")), "there is no directory"),
        (("-o", Path("/proc/none/out")), "there is no directory"),
        (("-o", tmp_path / ("x" * 300)), "file name too long"),
    ):
        assert message in refused(path, *more), more
        assert path.read_text() == '{"prompt": "a"}\n'
    (tmp_path / "far").unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_behind_a_link_stays_there(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    (tmp_path / "there").mkdir()
    link = _link(tmp_path / "out.jsonl", "there/real.jsonl")
    for options in ((), ("--atomic", "--restart")):
        assert moelight_inside("generate", tmp_path / "in.jsonl", "-o", link, *PLANNED, *options).returncode == 0
        assert link.is_symlink() and link.read_text() == (tmp_path / "there" / "real.jsonl").read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "there"]
        names = sorted(path.name for path in (tmp_path / "there").iterdir())
        assert names == ["real.jsonl", "real.jsonl.journal"]


@pytest.mark.parametrize("planted", ["out.jsonl.journal", "out.jsonl.journal-journal", ".out.jsonl.partial"])
def test_links_that_others_planted_beside_an_output_are_not_followed(planted: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / planted).symlink_to(victim)
    moelight_inside("generate", tmp_path / "in.jsonl", "-o", folder / "out.jsonl", "--atomic", *PLANNED)
    assert victim.read_text() == "mine"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp is: everybody may write there, nobody remove what is another's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_without_rights_it_is_a_line_and_nothing_is_touched(shared: Path) -> None:
    moelight_inside("generate", "/nowhere")  # what a refusal imports is imported
    prompts, theirs, closed = shared / "in.jsonl", shared / "theirs.jsonl", shared / "closed"
    prompts.write_bytes(GOOD)
    theirs.write_text("theirs")
    (shared / "secret.jsonl").write_bytes(GOOD)
    (shared / "secret.jsonl").chmod(0o600)
    (shared / "out.jsonl.journal").write_text("")
    closed.mkdir(mode=0o755)
    before = sorted(shared.rglob("*"))
    with as_nobody():
        for arguments, message in (
            ((shared / "secret.jsonl", "-o", shared / "o"), "is not readable"),
            ((prompts, "-o", closed / "o"), "cannot be written (permission denied)"),
            ((prompts, "-o", theirs), "cannot be written (permission denied)"),
            ((prompts, "-o", theirs, "--restart"), "cannot be written (permission denied)"),
            ((prompts, "-o", shared / "out.jsonl"), "cannot be written"),
            ((prompts, "-o", shared / "o", "--status", theirs), "status"),
            ((prompts, "-o", shared / "o", "--error-file", theirs), "cannot be written (permission denied)"),
        ):
            assert message in refused(*arguments), arguments
    assert theirs.read_text() == "theirs"
    assert sorted(shared.rglob("*")) == before
