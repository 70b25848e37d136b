"""Bytes in: what an input is taken for, that it is read again and again, and what ends a reading."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import random
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.model_names import ModelNames
from moelight.batch.rows import AnswerHeader, BadRow, Row, to_json_line
from moelight.core.errors import ConfigError, InputError
from moelight.core.request import SamplingParams
from tests.hostile.batch_lines import BAD, GOOD, KINDS, Judge, batch_file, batch_lines, chat

SERVED = AnswerHeader(model="m", created=1, job="job")
OPENAI = json.dumps(chat("a")).encode() + b"\n"
SIMPLE = b'{"prompt": "a"}\n'


def write(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "kind", "reason"),
    [
        ("a.jsonl", OPENAI, "openai", "custom_id, method, url, body on line 1"),
        ("a.jsonl", b"\n\n" + OPENAI, "openai", "on line 3"),
        ("a.jsonl", b"torn\n" + OPENAI, "openai", "on line 2"),
        ("a.jsonl", codecs.BOM_UTF8 + OPENAI, "openai", "on line 1"),
        ("a.jsonl", SIMPLE, "simple", "prompt on line 1"),
        ("a.jsonl", b"torn\n", "simple", "by its name, .jsonl"),
        ("a", b'{"torn\n', "simple", "it begins as JSON"),
        ("a", OPENAI, "openai", "on line 1"),
        ("a", b"Once upon a time\n", "text", "it begins as no JSON"),
        ("a.txt", b"{a} or [b]\n", "text", "by its name, .txt"),
        ("a.txt", SIMPLE, "simple", "prompt on line 1"),
        ("a.csv", b"prompt\na\n", "csv", "by its name, .csv; columns prompt"),
        ("a.jsonl.gz", gzip.compress(OPENAI, mtime=0), "openai", "on line 1"),
        ("a.jsonl", gzip.compress(OPENAI, mtime=0), "openai", "on line 1"),
        ("a.jsonl.gz", SIMPLE, "simple", "on line 1"),
        ("a.csv.gz", gzip.compress(b"prompt\na\n", mtime=0), "csv", "by its name, .csv"),
    ],
)
def test_what_a_file_is_taken_for(name: str, content: bytes, kind: str, reason: str, tmp_path: Path) -> None:
    with open_input(write(tmp_path, name, content)) as read:
        assert read.format.name == kind
        assert read.name == str(tmp_path / name) and reason in read.detected
        assert any(isinstance(row, Row) for row in read.rows()) or b"torn" in content


def test_the_format_may_be_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", SIMPLE)
    with open_input(path, format="text") as read:
        (row,) = read.rows()
        assert isinstance(row, Row) and row.prompts == ('{"prompt": "a"}',) and "as asked" in read.detected
    with pytest.raises(ConfigError, match=r"unknown format 'opnai'.*did you mean 'openai'"):
        open_input(path, format="opnai")
    with pytest.raises(InputError, match="columns can be named for csv and parquet"):
        open_input(path, RowContext(prompt_column="a"))


def test_text_lines_are_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", codecs.BOM_UTF8 + b"one \r\n\r\n  \nt\xffo\nthree\x00\xe2\x80\xa8!")
    with open_input(path, RowContext(defaults=SamplingParams(max_tokens=3))) as read:
        first, bad, last = read.rows()
    assert isinstance(first, Row) and isinstance(bad, BadRow) and isinstance(last, Row)
    assert (first.prompts, first.line, first.custom_id, first.sampling.max_tokens) == (("one ",), 1, None, 3)
    assert (bad.line, bad.number, bad.code) == (4, 1, "invalid_utf8")
    assert last.prompts == ("three\0\u2028!",)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_read_again_and_done_ones_are_not_looked_into(packed: bool, tmp_path: Path) -> None:
    content = b"".join(b'{"prompt": "%d"}\n' % number for number in range(5)) + b"no JSON\n"
    with open_input(write(tmp_path, "a.jsonl", gzip.compress(content, mtime=0) if packed else content)) as read:
        once, again = list(read.rows()), list(read.rows())
        assert once == again and [row.number for row in once] == list(range(6))
        assert [row.number for row in read.rows(skip={0, 2, 5}.__contains__)] == [1, 3, 4]
        ahead, behind = read.rows(), read.rows()
        next(ahead)
        assert next(behind) == once[0] and next(ahead) == once[1]
        list(read.rows())
        assert read.read_bytes == read.size_bytes > 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_the_share_that_is_read_is_that_of_the_rows(name: str, tmp_path: Path) -> None:
    texts = [f"{number:06} {random.Random(number).getrandbits(200):x}" for number in range(4000)]
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()
    content = {".jsonl": lines, ".gz": gzip.compress(lines), ".csv": "\n".join(["prompt", *texts]).encode()}
    path = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"prompt": texts}), path)
    else:
        path.write_bytes(content[path.suffix])
    with open_input(path) as read:
        for rows, _ in enumerate(read.rows(), start=1):
            assert read.read_bytes / read.size_bytes == pytest.approx(rows / 4000, abs=0.06)
        assert rows == 4000 and read.read_bytes == read.size_bytes


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", SIMPLE)
    with open_input(path) as one, open_input(write(tmp_path, "b.jsonl", SIMPLE)) as same:
        assert one.digest() == same.digest()
    with open_input(write(tmp_path, "c.jsonl", SIMPLE + b"\n")) as other:
        assert other.digest() != one.name and len(other.digest()) == 64
        with open_input(path) as one:
            assert one.digest() != other.digest()


def test_a_file_that_is_replaced_or_grows_is_read_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", SIMPLE * 3)
    with open_input(path) as read:
        with path.open("ab") as file:
            file.write(SIMPLE)
        assert len(list(read.rows())) == 3
        path.unlink()
        path.write_bytes(b"")
        assert len(list(read.rows())) == 3


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", SIMPLE * 150_000)
    with open_input(path) as read:
        rows = read.rows()
        next(rows)
        os.truncate(path, 1 << 20)
        with pytest.raises(InputError, match="became shorter"):
            list(rows)
    with pytest.raises(ValueError, match="closed"):
        list(read.rows())


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\t\r\n\n", codecs.BOM_UTF8, gzip.compress(b"\n", mtime=0)])
def test_no_prompts(content: bytes, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt", "a.csv"):
        with pytest.raises(InputError, match=rf"{name}: no prompts"):
            open_input(write(tmp_path, name, content))
    with pytest.raises(InputError, match="no prompts"):
        open_input(write(tmp_path, "header.csv", b"prompt\n\n"))


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read \(No such file"):
        open_input(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        open_input(tmp_path)
    with pytest.raises(InputError, match="not a usable path"):
        open_input(Path("a\0b"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="cannot be read"):
        open_input(tmp_path / "loop")
    for content, says in [
        (b"\x28\xb5\x2f\xfd....", "packed with zstd"),
        (b"PK\x03\x04....", "packed with zip"),
        (codecs.BOM_UTF16_LE + "{}".encode("utf-16-le"), "UTF-16; save it as UTF-8"),
        (b'[\n  {"prompt": "a"}\n]', "one JSON text over many lines"),
    ]:
        with pytest.raises(InputError, match=says):
            open_input(write(tmp_path, "a.json", content))


def test_damaged_gzip_ends_the_reading_after_the_rows_before_it(tmp_path: Path) -> None:
    lines = b"".join(b'{"prompt": "%s"}\n' % os.urandom(500).hex().encode() for _ in range(1500))
    packed = gzip.compress(lines, mtime=0)
    spoilt = bytearray(packed)
    spoilt[len(packed) * 3 // 4] ^= 0xFF
    for content, says in [
        (packed[: len(packed) * 3 // 4], "ends in the middle"),
        (bytes(spoilt), "damaged gzip data"),
        (packed + b"more", "damaged gzip data"),
    ]:
        good = 0
        with open_input(write(tmp_path, "a.jsonl.gz", content)) as read, pytest.raises(InputError, match=says):
            for row in read.rows():
                good += isinstance(row, Row)
        assert 900 <= good <= 1500
    with pytest.raises(InputError, match="ends in the middle"):
        open_input(write(tmp_path, "a.jsonl.gz", packed[:5]))


def test_two_gzip_members_are_one_file(tmp_path: Path) -> None:
    with open_input(write(tmp_path, "a.jsonl.gz", gzip.compress(SIMPLE, mtime=0) * 2)) as read:
        assert len(list(read.rows())) == 2


def test_standard_input_and_pipes_are_kept_to_be_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(OPENAI, mtime=0))))
    with open_input(Path("-")) as read:
        assert read.name == "standard input" and read.detected.startswith("OpenAI batch lines")
        assert list(read.rows()) == list(read.rows())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(InputError, match="standard input: no prompts"):
        open_input(Path("-"))
    with write(tmp_path, "a.jsonl", OPENAI).open("rb") as file:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        with open_input(Path("-")) as read:
            assert len(list(read.rows())) == 1
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(SIMPLE * 3,))
    writer.start()
    with open_input(pipe) as read:
        assert len(list(read.rows())) == len(list(read.rows())) == 3
    writer.join()


def test_memory_does_not_grow_with_the_file_or_with_a_line(tmp_path: Path) -> None:
    """A line beyond all limits is passed over piece by piece and is one error row."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(SIMPLE)
        for _ in range(70):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + SIMPLE * 50_000)
    with open_input(path) as read:
        tracemalloc.start()
        try:
            rows = read.rows(skip=range(2, 50_001).__contains__)
            first, long, last = rows
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert isinstance(first, Row) and isinstance(last, Row)
    assert isinstance(long, BadRow) and (long.line, long.code) == (2, "line_too_long")
    assert "64 MiB" in long.message and peak < 80 << 20


def test_a_thousand_hostile_lines(tmp_path: Path) -> None:
    lines = batch_lines()
    assert len(lines) == 1000 and len(Counter(line.kind for line in lines)) == len(KINDS) > 120
    path = write(tmp_path, "hostile.jsonl", batch_file(lines))
    with open_input(path, RowContext(models=ModelNames.of("m"))) as read:
        assert read.format.name == "openai"
        count = 0
        for row, line in zip(read.rows(), lines, strict=True):
            expected = line.code if line.judge is Judge.READER else None
            assert getattr(row, "code", None) == expected, (line.kind, row)
            assert (row.number, row.line, row.custom_id) == (count, 1 + 2 * count, line.custom_id), line.kind
            count += 1
            if isinstance(row, BadRow):
                answer = read.format.refuse(row, SERVED)
                assert answer["response"]["body"]["error"]["code"] == answer["error"]["code"] == line.code
                assert len(row.message) <= 300 and "\n" not in row.message and row.message
                assert (answer.get("line") == row.line) == (row.custom_id is None)
    assert count == 1000


def test_no_spoilt_line_is_more_than_an_error_row(tmp_path: Path) -> None:
    chance = random.Random(7)
    lines = []
    for number in range(400):
        kind = chance.choice([*GOOD])
        line = bytearray(GOOD[kind](str(number)))
        for _ in range(chance.randint(1, 3)):
            position = chance.randrange(len(line))
            line[position : position + chance.randint(0, 9)] = chance.choice(
                [b"", b'"', b"{", b"]", b"9", b"\xff", b"null"]
            )
        lines.append(bytes(line).replace(b"\n", b""))
    path = write(tmp_path, "a.jsonl", b"\n".join(lines))
    for kind in ("openai", "simple", "text", "csv"):
        column = lines[0].decode("utf-8", "replace").split(",")[0] if kind == "csv" else None
        with open_input(path, RowContext(prompt_column=column), format=kind) as read:
            for row in read.rows():
                if isinstance(row, BadRow):
                    to_json_line(read.format.refuse(row, SERVED))


def test_huge_names_are_not_compared_or_repeated(tmp_path: Path) -> None:
    line = json.dumps({"x" * 3_000_000: 1}).encode()
    with open_input(write(tmp_path, "a.jsonl", OPENAI + line), format="openai") as read:
        _, bad = read.rows()
        assert isinstance(bad, BadRow) and bad.code == "unknown_field"
        assert len(to_json_line(read.format.refuse(bad, SERVED))) < 2000


def test_every_hostile_line_is_harmless_in_the_simple_format_too(tmp_path: Path) -> None:
    lines = [line for line in batch_lines(len(KINDS)) if line.kind in BAD]
    with open_input(write(tmp_path, "a.jsonl", batch_file(lines)), format="simple") as read:
        assert all(isinstance(row, BadRow) for row in read.rows())
