"""CSV whose quotes are damaged: which record is an error, and that nothing behind its first line is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pytest

from moelight.batch import columns, source
from moelight.batch.columns import MOST_LINES, CsvRecords, Record
from moelight.batch.input import open_input
from moelight.batch.source import open_input_source
from tests.cli.program import PLANNED, moelight, moelight_inside

LONGEST_LINE = 4 << 20  # here; otherwise more, which takes longer


def records(path: Path, content: str | bytes) -> list[Record]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(CsvRecords(open_input_source(path), ","))


UNCLOSED = b'id,prompt\n1,add 1 and 2 =\n2,"add 3 and 4 =\n3,add 5 and 6 =\n4,add 7 and 8 =\n'


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_an_unclosed_quote_costs_its_own_row(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(UNCLOSED) if name.endswith(".gz") else UNCLOSED)
    with open_input(path) as read:
        result = list(read.rows())
        assert [(row.number, row.line, row.custom_id) for row in result] == [(n, n + 2, f"{n + 1}") for n in range(4)]
        assert [getattr(row, "code", None) for row in result] == [None, "invalid_csv", None, None]
        assert "by the end of the file" in getattr(result[1], "message", "")
        assert list(read.rows(skip={0, 2}.__contains__)) == [result[1], result[3]]


@pytest.mark.thorough
def test_rows_behind_an_unclosed_quote_keep_their_numbers_over_a_death(tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "out.jsonl"
    path.write_bytes(UNCLOSED)
    command = ("generate", path, "-o", out, "--max-tokens", "2", "--sync-interval", "0", *PLANNED)
    assert moelight(*command, env_extra={"MOELIGHT_FAULT": "after_journal_fsync:2:kill"}).returncode == -9
    assert moelight_inside(*command).returncode == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["custom_id"], "error" in row) for row in rows] == [
        ("1", False),
        ("2", True),
        ("3", False),
        ("4", False),
    ]
    assert rows[1]["line"] == 3 and rows[1]["error"]["code"] == "invalid_csv"


def test_a_record_may_have_many_lines_but_not_any_number(tmp_path: Path) -> None:
    long = "\n" * (MOST_LINES - 1)
    path = tmp_path / "a.csv"
    assert records(path, f'a\n"{long}",b\nc\n') == [
        Record(1, ["a"]),
        Record(2, [long, "b"]),
        Record(MOST_LINES + 2, ["c"]),
    ]
    first, damaged, *rest = records(path, f'a\nx,"y\n{long}z",b\nc\n')
    assert (first, damaged.line, damaged.values) == (Record(1, ["a"]), 2, ["x"])
    assert f"not closed within {MOST_LINES:,} lines" in damaged.error
    assert rest == [Record(MOST_LINES + 2, ['z"', "b"]), Record(MOST_LINES + 3, ["c"])]


def test_a_record_is_not_held_beyond_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (source, columns):
        monkeypatch.setattr(module, "LONGEST_LINE", LONGEST_LINE)
    line = b"x" * (1 << 20) + b"\n"
    result = records(tmp_path / "a.csv", b'a,"' + line * (LONGEST_LINE // len(line) + 2) + b"b\n")
    assert "not closed within 4 MiB" in result[0].error and result[0].values == ["a"]
    assert [item.error for item in result[1:]] == [""] * (len(result) - 1) and result[-1].values == ["b"]
    long = b"y" * (LONGEST_LINE + 1)
    result = records(tmp_path / "b.csv", b'a\n"b\n' + long + b'\nc"\n')
    assert [(item.line, bool(item.error)) for item in result] == [(1, False), (2, True), (3, True), (4, False)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # A stray quote, and quotes that are in order behind it: the next one does not close the first.
        ('1,"a\n2,b\n3,"c, d"\n4,e\n', [(1, None), (2, ["2", "b"]), (3, ["3", "c, d"]), (4, ["4", "e"])]),
        ('1,"a\n2,"b\nc"\n3,d\n', [(1, None), (2, ["2", "b\nc"]), (4, ["3", "d"])]),
        # On one line text around quotes is what it always was.
        ('1,say "hi"\n2,"say" hi\n3,a"b\n', [(1, ["1", 'say "hi"']), (2, ["2", "say hi"]), (3, ["3", 'a"b'])]),
        ('1,"a"b,"c\n2,d\n', [(1, None), (2, ["2", "d"])]),
        ('1,"a\n\n"\n2,b', [(1, ["1", "a\n\n"]), (4, ["2", "b"])]),
        ('1,"', [(1, None)]),
        ("1,a\rb\n2,c\n", [(1, None), (2, ["2", "c"])]),
    ],
)
def test_where_quotes_stand(content: str, expected: list[tuple[int, list[str] | None]], tmp_path: Path) -> None:
    result = records(tmp_path / "a.csv", content)
    assert [(item.line, None if item.error else item.values) for item in result] == expected


def test_what_a_writer_wrote_is_read(tmp_path: Path) -> None:
    draw = random.Random(7)
    table = [["x" + "".join(draw.choices('ab",\n;\r', k=draw.randrange(12))) for _ in range(3)] for _ in range(2000)]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(table)
    result = records(tmp_path / "a.csv", text.getvalue())
    assert [item.values for item in result] == table and not any(item.error for item in result)
    # Whatever a damaged file holds, no line is lost: each is in a record, or the first of an error.
    damaged = "".join(draw.choices('ab",\n', weights=(4, 4, 3, 2, 2), k=40_000))
    result = records(tmp_path / "b.csv", damaged)
    covered = sum(1 if item.error else 1 + sum(value.count("\n") for value in item.values) for item in result)
    blank = sum(not item.strip(",") for item in damaged.split("\n"))
    assert any(item.error for item in result) and len(damaged.split("\n")) - blank <= covered


def test_lines_are_not_read_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the file begins a quote that nothing closes, wherever the reader stands."""
    read = 0
    inner = columns._Lines.__next__

    def counting(self: columns._Lines) -> str:
        nonlocal read
        text = inner(self)
        read += 1
        return text

    monkeypatch.setattr(columns._Lines, "__next__", counting)
    count = 5000
    result = records(tmp_path / "a.csv", 'x",",\n' * count)
    assert len(result) == count and all(item.error for item in result)
    assert read <= 3 * count
