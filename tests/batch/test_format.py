"""Lines in, rows out: every way a line can be bad is a row, and the good ones are read as they stand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from moelight.batch.format import BadLine, InputLine, bad_line, completion_row, error_row, read_lines, to_json_line
from moelight.core.errors import InputError
from moelight.core.request import Completion, SamplingParams


def read(tmp_path: Path, content: str | bytes, **options: object) -> list[InputLine | BadLine]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_lines(path, **options))  # type: ignore[arg-type]


def test_a_prompt_and_a_conversation(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    first, second = read(
        tmp_path,
        '{"prompt": "Grüße", "custom_id": "a", "max_tokens": 3, "stop": ["x", "y"], "seed": 5}\n'
        + json.dumps({"messages": talk, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "ignore_eos": True}),
    )
    assert isinstance(first, InputLine) and isinstance(second, InputLine)
    assert (first.line, first.custom_id, first.prompt, first.messages) == (1, "a", "Grüße", None)
    assert first.sampling == SamplingParams(max_tokens=3, stop=("x", "y"), seed=5)
    assert (second.line, second.custom_id, second.prompt, second.messages) == (2, None, None, talk)
    assert second.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=4, ignore_eos=True)
    assert (first.shown, second.shown) == ("Grüße", "u")


def test_defaults_hold_where_a_line_is_silent_or_null(tmp_path: Path) -> None:
    base = SamplingParams(max_tokens=99, temperature=0.7, seed=4, stop=("z",))
    (line,) = read(
        tmp_path, '{"prompt": "p", "max_tokens": 1, "seed": null, "custom_id": null, "messages": null}', defaults=base
    )
    assert isinstance(line, InputLine)
    assert line.sampling == SamplingParams(max_tokens=1, temperature=0.7, seed=4, stop=("z",))


def test_blank_lines_marks_and_line_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b\\u2028"}\r\n\n{"prompt": "c\xe2\x80\xa8"}'
    lines = read(tmp_path, content)
    assert [(line.line, line.prompt) for line in lines] == [(1, "a"), (4, "b\u2028"), (6, "c\u2028")]  # type: ignore[union-attr]


BAD = {
    "half an object": (b'{"prompt": ', "invalid_json"),
    "plain text": (b"Once upon a time", "invalid_json"),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    "Infinity": (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    "bytes": (b'{"prompt": "\xff\xfe"}', "invalid_utf8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16-le"), "invalid_json"),
    "a mark in the middle": (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json"),
    "nested": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    "many digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    "a list": (b'["prompt"]', "invalid_request"),
    "a string": (b'"prompt"', "invalid_request"),
    "null": (b"null", "invalid_request"),
    "nothing asked": (b"{}", "missing_prompt"),
    "null prompt": (b'{"prompt": null}', "missing_prompt"),
    "both": (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "invalid_request"),
    "prompt is a number": (b'{"prompt": 1}', "invalid_request"),
    "prompt is a list": (b'{"prompt": ["a"]}', "invalid_request"),
    "messages is a string": (b'{"messages": "hi"}', "invalid_request"),
    "messages is empty": (b'{"messages": []}', "invalid_request"),
    "a message without role": (b'{"messages": [{"content": "x"}]}', "invalid_request"),
    "content is a list": (b'{"messages": [{"role": "user", "content": []}]}', "invalid_request"),
    "custom_id is a number": (b'{"custom_id": 7, "prompt": "a"}', "invalid_request"),
    "unknown field": (b'{"prompt": "a", "max_token": 4}', "unknown_field"),
    "max_tokens 0": (b'{"prompt": "a", "max_tokens": 0}', "invalid_request"),
    "max_tokens is true": (b'{"prompt": "a", "max_tokens": true}', "invalid_request"),
    "max_tokens is 1.5": (b'{"prompt": "a", "max_tokens": 1.5}', "invalid_request"),
    "temperature below 0": (b'{"prompt": "a", "temperature": -0.1}', "invalid_request"),
    "temperature is huge": (b'{"prompt": "a", "temperature": 1e999}', "invalid_request"),
    "temperature is text": (b'{"prompt": "a", "temperature": "hot"}', "invalid_request"),
    "top_p 0": (b'{"prompt": "a", "top_p": 0}', "invalid_request"),
    "top_p above 1": (b'{"prompt": "a", "top_p": 1.1}', "invalid_request"),
    "top_k below -1": (b'{"prompt": "a", "top_k": -2}', "invalid_request"),
    "seed below 0": (b'{"prompt": "a", "seed": -1}', "invalid_request"),
    "seed too large": (b'{"prompt": "a", "seed": 18446744073709551616}', "invalid_request"),
    "empty stop": (b'{"prompt": "a", "stop": ""}', "invalid_request"),
    "stop holds a number": (b'{"prompt": "a", "stop": ["x", 1]}', "invalid_request"),
    "stop is nested": (b'{"prompt": "a", "stop": ' + b"[" * 900 + b"]" * 900 + b"}", None),
    "ignore_eos is 1": (b'{"prompt": "a", "ignore_eos": 1}', "invalid_request"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_a_row_and_the_rest_goes_on(kind: str, tmp_path: Path) -> None:
    content, code = BAD[kind]
    good, bad, last = read(tmp_path, b'{"prompt": "first"}\n' + content + b'\n{"prompt": "last"}\n')
    assert isinstance(good, InputLine) and isinstance(last, InputLine) and last.line == 3
    assert isinstance(bad, BadLine)
    assert bad.line == 2
    assert code is None or bad.code == code
    row = json.loads(to_json_line(error_row(bad)))
    assert set(row) == {"line", "error"} and set(row["error"]) == {"code", "message"}
    assert "\n" not in bad.message and len(bad.message) <= 300


def test_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"promt": "a"}')
    assert isinstance(line, BadLine)
    assert "'promt'" in line.message and "did you mean 'prompt'?" in line.message


def test_the_custom_id_stays_with_the_error(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"custom_id": "q-1", "prompt": 5}')
    assert isinstance(line, BadLine)
    assert list(error_row(line)) == ["custom_id", "line", "error"]
    assert error_row(line)["custom_id"] == "q-1"


def test_a_custom_id_may_be_used_once(tmp_path: Path) -> None:
    lines = read(tmp_path, '{"custom_id": "a", "prompt": "1"}\n{"custom_id": "a", "prompt": "2"}\n{"prompt": "3"}')
    assert [type(line) for line in lines] == [InputLine, BadLine, InputLine]
    assert isinstance(lines[1], BadLine)
    assert (lines[1].code, lines[1].custom_id) == ("duplicate_custom_id", "a")


@pytest.mark.parametrize("content", ["", "\n", " \n\t\r\n\n", "\ufeff"])
def test_no_prompts(content: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.jsonl: no prompts"):
        read(tmp_path, content)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl.*No such file"):
        list(read_lines(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InputError, match="directory"):
        list(read_lines(tmp_path))
    with pytest.raises(InputError, match="not a usable path"):
        list(read_lines(Path("a\0b")))


def test_the_file_is_read_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 10)
    lines = read_lines(path)
    assert isinstance(next(lines), InputLine)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b'{"prompt": "a"}')))
    (line,) = read_lines(Path("-"))
    assert isinstance(line, InputLine) and line.prompt == "a"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(InputError, match="standard input: no prompts"):
        list(read_lines(Path("-")))


def completion(text: str = "t") -> Completion:
    return Completion(index=0, text=text, token_ids=(4, 5), finish_reason="stop", prompt_tokens=7)


def test_the_row_of_a_completion() -> None:
    row = completion_row(completion(), custom_id="a", token_ids=True)
    assert row == {
        "custom_id": "a",
        "text": "t",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
        "token_ids": [4, 5],
    }
    assert list(row) == ["custom_id", "text", "finish_reason", "usage", "token_ids"]
    assert list(completion_row(completion(), custom_id=None, token_ids=False)) == ["text", "finish_reason", "usage"]


@pytest.mark.parametrize("text", ["Grüße 世 🦊", 'a "quote"\nand\u2028lines\r', "half \ud800", "\x00"])
def test_a_row_is_one_line_of_utf8_and_reads_back(text: str) -> None:
    line = to_json_line(completion_row(completion(text), custom_id=text, token_ids=False))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line)["text"] == json.loads(line)["custom_id"] == text
    if text.startswith("Grüße"):
        assert text.encode() in line


def test_a_long_message_is_shortened() -> None:
    bad = bad_line(3, None, InputError("x" * 10_000 + "\ny", code="c"))
    assert len(bad.message) == 300 and bad.message.endswith("…")
