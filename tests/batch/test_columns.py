"""Tables: which columns are read, what their values mean, and which records are error rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.rows import BadRow, Row
from moelight.core.errors import InputError
from moelight.core.request import SamplingParams

TALK = [{"role": "user", "content": "u"}]


def rows(path: Path, **options: Any) -> list[Row | BadRow]:
    with open_input(path, RowContext(**options)) as read:
        result = list(read.rows())
        assert list(read.rows(skip={0}.__contains__)) == result[1:]
        return result


def csv_rows(tmp_path: Path, content: str | bytes, name: str = "a.csv", **options: Any) -> list[Row | BadRow]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return rows(path, **options)


def test_columns_of_a_csv_file(tmp_path: Path) -> None:
    first, second, third = csv_rows(
        tmp_path,
        "id,prompt,max_tokens,temperature,stop,ignore_eos,topic\r\n"
        '7,"Say ""hi"",\nplease",3,0.5,END,TRUE,x\r\n\r\n'
        '8,plain,,,"[""a"", ""b""]",false,\r\n'
        "09,1e5,,,,,\r\n",
        defaults=SamplingParams(max_tokens=9),
    )
    assert isinstance(first, Row) and isinstance(second, Row) and isinstance(third, Row)
    assert (first.custom_id, first.prompts, first.line) == ("7", ('Say "hi",\nplease',), 2)
    assert first.sampling == SamplingParams(max_tokens=3, temperature=0.5, stop=("END",), ignore_eos=True)
    assert (second.number, second.line, second.sampling) == (1, 5, SamplingParams(max_tokens=9, stop=("a", "b")))
    assert (third.custom_id, third.prompts) == ("09", ("1e5",))


def test_conversations_other_names_and_tabs(tmp_path: Path) -> None:
    (talk,) = csv_rows(tmp_path, 'messages\n"[{""role"": ""user"", ""content"": ""u""}]"\n')
    assert isinstance(talk, Row) and talk.conversation is not None and talk.conversation.messages == TALK
    (named,) = csv_rows(
        tmp_path, "key\tquestion\tprompt\nk\tq, r\tp\n", "a.tsv", prompt_column="question", id_column="key"
    )
    assert isinstance(named, Row) and (named.custom_id, named.prompts) == ("k", ("q, r",))
    (marked,) = csv_rows(tmp_path, b"\xef\xbb\xbfprompt\na\n")
    assert isinstance(marked, Row) and marked.custom_id is None


def test_a_bad_record_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    content = (
        b"custom_id,prompt,max_tokens\n"
        b"a,few\n"
        b"b,many,1,2\n"
        b"c,p,x\n"
        b"d,p,0\n"
        b"e,\xff\xfe,1\n"
        b"f,,1\n"
        b"g,p,NaN\n"
        b"h,good,1\n"
        b'i,"never closed,1\nj,p,1\n'
    )
    result = csv_rows(tmp_path, content)
    assert [(getattr(row, "code", None), row.custom_id) for row in result] == [
        ("invalid_csv", "a"),
        ("invalid_csv", "b"),
        ("invalid_json", "c"),
        ("invalid_request", "d"),
        ("invalid_utf8", "e"),
        ("missing_prompt", "f"),
        ("invalid_request", "g"),
        (None, "h"),
        ("invalid_csv", "i"),
        (None, "j"),
    ]
    assert [row.line for row in result] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (
            "question,answer\na,b\n",
            {},
            r"no column prompt or messages; name it with --prompt-column .*question, answer",
        ),
        ("prompt\na\n", {"prompt_column": "promt"}, "no column 'promt'.*did you mean 'prompt'"),
        ("prompt\na\n", {"id_column": "key"}, "no column 'key'"),
        ("prompt,prompt\na,b\n", {}, "two columns 'prompt'"),
        ("prompt\n", {}, "no prompts"),
        ("id;prompt\n1;a\n", {}, "separated by ';'; save it with commas"),
        ("id\tquestion\n1\ta\n", {"prompt_column": "question"}, r"separated by '\\t'; save it with commas"),
        ("sep=,\nid,prompt\n1,a\n", {}, "the first line, 'sep=', is for spreadsheets alone"),
        ("sep=;\nid;prompt\n1;a\n", {}, "the first line, 'sep=;', is for spreadsheets alone.*with commas"),
        (",".join(f"c{n}" for n in range(40)) + "\n1\n", {}, "c11 and 28 more"),
    ],
)
def test_a_table_without_its_columns_is_refused(
    content: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        csv_rows(tmp_path, content, **options)


def test_a_prompt_may_hold_other_delimiters(tmp_path: Path) -> None:
    (row,) = csv_rows(tmp_path, "prompt\na;b|c\n")
    assert isinstance(row, Row) and row.prompts == ("a;b|c",)
    with pytest.raises(InputError, match="UTF-16; save it as UTF-8"):
        csv_rows(tmp_path, "prompt\na\n".encode("utf-16"))


def write_parquet(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet")
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def test_columns_of_a_parquet_table(tmp_path: Path) -> None:
    talks = [None, [{"role": "user", "content": "u", "name": None}]]
    path = write_parquet(
        tmp_path / "a.parquet",
        {"id": [5, 6], "prompt": ["p", None], "messages": talks, "max_tokens": [3, None], "more": [1, 2]},
    )
    with open_input(path) as read:
        assert "; not read: more" in read.detected and read.format.name == "parquet"
    first, second = rows(path)
    assert isinstance(first, Row) and isinstance(second, Row)
    assert (first.custom_id, first.prompts, first.sampling.max_tokens) == ("5", ("p",), 3)
    assert second.conversation is not None and second.conversation.messages == TALK
    assert (second.number, second.line, second.kind) == (1, 2, "messages")


def test_many_parquet_rows_their_ids_and_bad_values(tmp_path: Path) -> None:
    count = 3000
    prompts = [f"p{n}" for n in range(count)]
    path = write_parquet(tmp_path / "by_content", {"text": prompts, "seed": range(-1, count - 1)}, row_group_size=700)
    result = rows(path, prompt_column="text")
    assert [row.number for row in result] == list(range(count))
    assert isinstance(result[0], BadRow) and (result[0].code, result[0].param) == ("invalid_request", "seed")
    last = result[-1]
    assert isinstance(last, Row) and last.prompts == ("p2999",) and last.sampling.seed == 2998
    texts = ['[{"role": "user", "content": "u"}]', "[", "[1]"]
    kinds = rows(write_parquet(tmp_path / "b.parquet", {"messages": texts}))
    assert [getattr(row, "code", None) for row in kinds] == [None, "invalid_json", "invalid_request"]


def test_damaged_parquet_and_no_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"] * 50})
    full = path.read_bytes()
    path.write_bytes(full[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: no readable Parquet"):
        open_input(path)
    path.write_bytes(full)
    empty = write_parquet(tmp_path / "empty.parquet", {"prompt": []})
    with pytest.raises(InputError, match="no prompts"):
        open_input(empty)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow; install it with: pip install 'moelight\[parquet\]'"):
        open_input(path)


def test_parquet_texts_that_are_not_utf8_are_error_rows(tmp_path: Path) -> None:
    """Arrow does not check them; what cannot be told of a row is not what can be told of the next."""
    path = write_parquet(
        tmp_path / "a.parquet",
        {"id": ["a", "b", "CCC"], "prompt": ["one", "BBB", "three"], "topic": ["x", "y", "z"]},
        compression="none",
        use_dictionary=False,
        store_schema=False,
        write_statistics=False,
    )
    full = path.read_bytes()
    path.write_bytes(full.replace(b"BBB", b"B\xffB").replace(b"CCC", b"\xed\xa0\x80"))
    first, second, third = rows(path)
    assert isinstance(first, Row) and first.prompts == ("one",)
    assert isinstance(second, BadRow) and isinstance(third, BadRow)
    assert (second.custom_id, second.code, second.message) == ("b", "invalid_utf8", "prompt is not UTF-8")
    assert (third.custom_id, third.code, third.param) == (None, "invalid_utf8", "custom_id")
    path.write_bytes(full.replace(b"topic", b"\xff\xff\xff\xff\xff"))
    with pytest.raises(InputError, match=r"a\.parquet: no readable Parquet"):
        rows(path)


def test_parquet_dates_that_are_none_are_error_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet")
    dates = pyarrow.array([0, 1 << 60], pyarrow.timestamp("ms"))
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["a", "b"], "id": dates})
    first, second = rows(path)
    assert isinstance(first, BadRow) and first.message == "custom_id must be a string"
    assert isinstance(second, BadRow) and second.message.startswith("custom_id cannot be read: ")
