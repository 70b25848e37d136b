"""Lines in, rows out: every way a line can be bad is a row, and the good ones are read as they stand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moelight.batch.fields import RowContext
from moelight.batch.input import open_input
from moelight.batch.rows import AnswerHeader, BadRow, Row, bad_row, to_json_line
from moelight.batch.simple import SimpleFormat
from moelight.core.errors import InputError
from moelight.core.request import Completion, Logprob, SamplingParams

SERVED = AnswerHeader(model="m", created=1, job="job")


def read(tmp_path: Path, content: str | bytes, **options: Any) -> list[Row | BadRow]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with open_input(path, RowContext(**options), format="simple") as result:
        return list(result.rows())


def error_row(bad: BadRow) -> dict[str, Any]:
    return SimpleFormat().refuse(bad, SERVED)


def asked(**inputs: Any) -> Row:
    sampling = SamplingParams(**inputs.pop("sampling", {}))
    return Row(**{"number": 4, "line": 6, "custom_id": None, "kind": "prompt", "sampling": sampling, **inputs})


def completion_row(completion: Completion, *, custom_id: str | None, token_ids: bool) -> dict[str, Any]:
    return SimpleFormat(token_ids=token_ids).answer(asked(custom_id=custom_id), [completion], SERVED)


def test_a_prompt_and_a_conversation(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    first, second = read(
        tmp_path,
        '{"prompt": "Grüße", "custom_id": "a", "max_tokens": 3, "stop": ["x", "y"], "seed": 5}\n'
        + json.dumps({"messages": talk, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "ignore_eos": True}),
    )
    assert isinstance(first, Row) and isinstance(second, Row)
    assert (first.line, first.custom_id, first.prompts, first.conversation) == (1, "a", ("Grüße",), None)
    assert first.sampling == SamplingParams(max_tokens=3, stop=("x", "y"), seed=5)
    assert second.conversation is not None and second.conversation.messages == talk
    assert (second.number, second.line, second.custom_id, second.prompts) == (1, 2, None, ())
    assert (first.kind, second.kind) == ("prompt", "messages")
    assert second.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=4, ignore_eos=True)
    assert (first.shown, second.shown) == ("Grüße", "u")


def test_defaults_hold_where_a_line_is_silent_or_null(tmp_path: Path) -> None:
    base = SamplingParams(max_tokens=99, temperature=0.7, seed=4, stop=("z",))
    (line,) = read(
        tmp_path, '{"prompt": "p", "max_tokens": 1, "seed": null, "custom_id": null, "messages": null}', defaults=base
    )
    assert isinstance(line, Row)
    assert line.sampling == SamplingParams(max_tokens=1, temperature=0.7, seed=4, stop=("z",))


def test_blank_lines_marks_and_line_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b\\u2028"}\r\n\n'
    content += '{"prompt": "c\u2028\u2029\x85"}'.encode()
    lines = read(tmp_path, content)
    result = [(line.line, line.prompts) for line in lines if isinstance(line, Row)]
    assert result == [(1, ("a",)), (4, ("b\u2028",)), (6, ("c\u2028\u2029\u0085",))]


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
    "content is an image": (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "invalid_request"),
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
    assert isinstance(good, Row) and isinstance(last, Row) and last.line == 3
    assert isinstance(bad, BadRow)
    assert bad.line == 2
    assert code is None or bad.code == code
    row = json.loads(to_json_line(error_row(bad)))
    assert set(row) == {"line", "error"} and set(row["error"]) == {"code", "message"}
    assert "\n" not in bad.message and len(bad.message) <= 300


def test_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"promt": "a"}')
    assert isinstance(line, BadRow)
    assert "'promt'" in line.message and "did you mean 'prompt'?" in line.message


def test_the_custom_id_stays_with_the_error(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"custom_id": "q-1", "prompt": 5}')
    assert isinstance(line, BadRow)
    assert list(error_row(line)) == ["custom_id", "line", "error"]
    assert error_row(line)["custom_id"] == "q-1"


def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    good, bad = read(tmp_path, '{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [5, "6"]}')
    assert isinstance(good, Row) and good.prompts == ((5, 6),) and good.shown == "(2 token ids)"
    assert isinstance(bad, BadRow) and bad.param == "prompt_token_ids"


def test_the_field_at_fault_is_named(tmp_path: Path) -> None:
    first, second = read(tmp_path, '{"prompt": "a", "top_k": 1, "seed": -1}\n{"prompt": "a", "min_tokens": 90}')
    assert isinstance(first, BadRow) and isinstance(second, BadRow)
    assert (first.param, second.param) == ("seed", "min_tokens")


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


def test_what_was_asked_for_is_in_the_row() -> None:
    likely = {
        9: Logprob(logprob=-math.inf, rank=2, decoded_token="i"),
        4: Logprob(logprob=-1.0, rank=1, decoded_token="h"),
    }
    inputs = Completion(
        index=0, text="t", token_ids=(4,), finish_reason="stop", prompt_tokens=7, stop_reason="x",
        cumulative_logprob=-1.0, logprobs=(likely,), prompt_logprobs=(None, likely),
    )  # fmt: skip
    row = asked(sampling={"logprobs": 1, "prompt_logprobs": 1, "stop": "x"})
    shown = {
        "4": {"logprob": -1.0, "rank": 1, "decoded_token": "h"},
        "9": {"logprob": -9999.0, "rank": 2, "decoded_token": "i"},
    }
    assert SimpleFormat(numbered=True).answer(row, [inputs], SERVED) == {
        "line": 6,
        "text": "t",
        "finish_reason": "stop",
        "stop_reason": "x",
        "usage": {"prompt_tokens": 7, "completion_tokens": 1},
        "cumulative_logprob": -1.0,
        "logprobs": [shown],
        "prompt_logprobs": [None, shown],
    }


def test_samples_are_choices() -> None:
    both = [
        Completion(index=0, text=text, token_ids=(4,), finish_reason="stop", prompt_tokens=7, sample=number)
        for number, text in enumerate("ab")
    ]
    assert SimpleFormat(token_ids=True).answer(asked(custom_id="i", sampling={"n": 2}), both, SERVED) == {
        "custom_id": "i",
        "choices": [
            {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [4]},
            {"index": 1, "text": "b", "finish_reason": "stop", "token_ids": [4]},
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
    }


@pytest.mark.parametrize("text", ["Grüße 世 🦊", 'a "quote"\nand\u2028lines\u2029of\x85\r', "half \ud800", "\x00"])
def test_a_row_is_one_line_of_utf8_and_reads_back(text: str) -> None:
    line = to_json_line(completion_row(completion(text), custom_id=text, token_ids=False))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line)["text"] == json.loads(line)["custom_id"] == text
    if text.startswith("Grüße"):
        assert text.encode() in line


def test_a_long_message_is_shortened() -> None:
    bad = bad_row(2, 3, None, InputError("x" * 10_000 + "\ny", code="c"))
    assert len(bad.message) == 300 and bad.message.endswith("…")
