"""Lines of a batch file that mean harm, among good ones: each says what must become of it.

`batch_lines` makes as many as are wanted, always the same for one seed. Every kind is met at least once in
``len(KINDS)`` lines. Most fail when they are read; the others only where the whole job is known (`Judge`).
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BIG = 10_000_000


class Judge(Enum):
    """Who can tell what becomes of a line: its reader, the scan of all lines, or the model's tokenizer and context."""

    READER = "reader"
    SCAN = "scan"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    r"""``raw`` without its ``\n``. ``code`` is that of its error row, None if it must be answered."""

    kind: str
    raw: bytes
    custom_id: str | None
    code: str | None
    judge: Judge = Judge.READER


Body = dict[str, Any]
Made = tuple[bytes, str | None]


def chat(custom_id: object, **body: Any) -> Body:
    """A good chat line, changed by ``body``."""
    messages = [{"role": "user", "content": f"What follows {custom_id}?"}]
    return _line(custom_id, CHAT, {"messages": messages, "max_tokens": 2, **body})


def completion(custom_id: object, **body: Any) -> Body:
    """A good completion line, changed by ``body``."""
    return _line(custom_id, COMPLETIONS, {"prompt": f"add 1 and {custom_id} =", "max_tokens": 2, **body})


def _line(custom_id: object, url: str, body: Body) -> Body:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def _dump(line: object) -> bytes:
    return json.dumps(line).encode()


def _without(line: Body, name: str) -> Body:
    return {key: value for key, value in line.items() if key != name}


def _says(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def _part(kind: str, url: str) -> list[Body]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]


# By kind: the line with this custom_id, and its code (None: it is good).
GOOD: dict[str, Callable[[str], bytes]] = {
    "chat": lambda i: _dump(chat(i)),
    "completion": lambda i: _dump(completion(i)),
    "several prompts": lambda i: _dump(completion(i, prompt=["add 1 and 1 =", "add 2 and 2 ="])),
    "two samples": lambda i: _dump(chat(i, n=2, temperature=0.8, seed=3)),
    "log-probabilities": lambda i: _dump(chat(i, logprobs=True, top_logprobs=2)),
    "completion's log-probabilities": lambda i: _dump(completion(i, logprobs=2)),
    "harmless fields": lambda i: _dump(chat(i, user="u", metadata={"a": "b"}, store=False, stream=False)),
    "nulls": lambda i: _dump(chat(i, stop=None, seed=None, tools=None, response_format=None, functions=None)),
    "CRLF": lambda i: _dump(chat(i)) + b"\r",
    "spaces around": lambda i: b" \t " + _dump(chat(i)) + b"  ",
    "escaped line ends": lambda i: _dump(chat(i, messages=_says("a\nb\r\u2028c\x85"))),
    "NUL in a text": lambda i: _dump(chat(i, messages=_says("a\0b"))),
    "unusual letters": lambda i: json.dumps(chat(i, messages=_says("Grüße 世界 🦊")), ensure_ascii=False).encode(),
    "max_completion_tokens": lambda i: _dump(chat(i, max_tokens=None, max_completion_tokens=2)),
    "logit_bias": lambda i: _dump(chat(i, logit_bias={"5": -100})),
    "stop texts": lambda i: _dump(chat(i, stop=["never", "ever"])),
}
BAD: dict[str, tuple[Callable[[str], bytes], str]] = {
    "half an object": (lambda i: _dump(chat(i))[:-9], "invalid_json"),
    "plain text": (lambda i: f"{i}: once upon a time".encode(), "invalid_json"),
    "two objects": (lambda i: _dump(chat(i)) * 2, "invalid_json"),
    "trailing comma": (lambda i: _dump(chat(i))[:-1] + b",}", "invalid_json"),
    "single quotes": (lambda i: str(chat(i)).encode(), "invalid_json"),
    "a mark in the middle": (lambda i: codecs.BOM_UTF8 + _dump(chat(i)), "invalid_json"),
    "UTF-16": (lambda i: json.dumps(chat(i)).replace("\n", "").encode("utf-16-le"), "invalid_json"),
    "NUL bytes": (lambda i: b"\0" * 200, "invalid_json"),
    "NUL in JSON": (lambda i: _dump(chat(i)) + b"\0", "invalid_json"),
    "raw control letter": (lambda i: _dump(chat(i)).replace(b"follows", b"fol\x01ows"), "invalid_json"),
    "bad UTF-8": (lambda i: _dump(chat(i)).replace(b"follows", b"fol\xff\xfe"), "invalid_utf8"),
    "overlong UTF-8": (lambda i: _dump(chat(i)).replace(b"follows", b"\xc0\xaf"), "invalid_utf8"),
    "cut UTF-8": (lambda i: _dump(chat(i)).replace(b"follows", b"fol\xf0\x9f\xa6"), "invalid_utf8"),
    "surrogates in UTF-8": (lambda i: _dump(chat(i)).replace(b"follows", b"\xed\xa0\x80"), "invalid_utf8"),
    "NaN": (lambda i: _dump(chat(i, temperature=float("nan"))), "invalid_json"),
    "Infinity": (lambda i: _dump(chat(i, temperature=float("inf"))), "invalid_json"),
    "minus Infinity": (lambda i: _dump(chat(i, logit_bias={"1": float("-inf")})), "invalid_json"),
    "1e999": (lambda i: _dump(chat(i)).replace(b'"max_tokens": 2', b'"temperature": 1e999'), "invalid_request"),
    "deep lists": (lambda i: b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
    "deep objects": (lambda i: b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "invalid_json"),
    "deep value": (lambda i: b'{"custom_id": "%s", "body": ' % i.encode() + b"[" * 90_000, "invalid_json"),
    "deep schema": (lambda i: _dump(chat(i, guided_json={})).replace(b"{}", b'{"a":' * 200 + b"1" + b"}" * 200),
                    "invalid_json"),
    "many digits": (lambda i: _dump(chat(i)).replace(b'": 2}', b'": ' + b"9" * 5000 + b"}"), "invalid_json"),
    "huge integer": (lambda i: _dump(chat(i, seed=10**40)), "invalid_request"),
    "key given twice": (lambda i: _dump(chat(i)).replace(b'"max_tokens": 2', b'"n": 1, "n": 2'), "invalid_json"),
    "custom_id twice": (lambda i: b'{"custom_id": "a", ' + _dump(chat(i))[1:], "invalid_json"),
    "10 MB of letters": (lambda i: b"x" * BIG, "invalid_json"),
    "10 MB in an unknown field": (lambda i: _dump(chat(i, xs="x" * BIG)), "unknown_field"),
    "a list": (lambda i: _dump([chat(i)]), "invalid_request"),
    "a string": (_dump, "invalid_request"),
    "a number": (lambda i: b"1", "invalid_request"),
    "null": (lambda i: b"null", "invalid_request"),
    "nothing": (lambda i: b"{}", "missing_required_parameter"),
    "no custom_id": (lambda i: _dump(_without(chat(i), "custom_id")), "missing_required_parameter"),
    "custom_id null": (lambda i: _dump(chat(None)), "missing_required_parameter"),
    "custom_id a number": (lambda i: _dump(chat(7)), "invalid_request"),
    "custom_id a list": (lambda i: _dump(chat([i])), "invalid_request"),
    "no url": (lambda i: _dump(_without(chat(i), "url")), "missing_required_parameter"),
    "no body": (lambda i: _dump(_without(chat(i), "body")), "missing_required_parameter"),
    "body a list": (lambda i: _dump({**chat(i), "body": []}), "invalid_request"),
    "body a text": (lambda i: _dump({**chat(i), "body": json.dumps(chat(i)["body"])}), "invalid_request"),
    "embeddings": (lambda i: _dump({**chat(i), "url": "/v1/responses"}), "invalid_url"),
    "responses": (lambda i: _dump({**chat(i), "url": "/v1/responses"}), "invalid_url"),
    "whole address": (lambda i: _dump({**chat(i), "url": f"http://127.0.0.1{CHAT}"}), "invalid_url"),
    "a file's address": (lambda i: _dump({**chat(i), "url": "file:///etc/passwd"}), "invalid_url"),
    "path upwards": (lambda i: _dump({**chat(i), "url": "/v1/chat/completions/../../files"}), "invalid_url"),
    "url a number": (lambda i: _dump({**chat(i), "url": 1}), "invalid_url"),
    "url a list": (lambda i: _dump({**chat(i), "url": [CHAT]}), "invalid_url"),
    "GET": (lambda i: _dump({**chat(i), "method": "GET"}), "invalid_method"),
    "method a list": (lambda i: _dump({**chat(i), "method": ["POST"]}), "invalid_method"),
    "unknown key": (lambda i: _dump({**chat(i), "headers": {}}), "unknown_field"),
    "unknown field": (lambda i: _dump(chat(i, max_token=4)), "unknown_field"),
    "dunder field": (lambda i: _dump(chat(i, __class__="x")), "unknown_field"),
    "another model": (lambda i: _dump(chat(i, model="gpt-4o")), "model_not_found"),
    "model a number": (lambda i: _dump(chat(i, model=4)), "invalid_request"),
    "model a path": (lambda i: _dump(chat(i, model="../../etc")), "model_not_found"),
    "no messages": (lambda i: _dump(chat(i, messages=None)), "missing_required_parameter"),
    "empty messages": (lambda i: _dump(chat(i, messages=[])), "invalid_request"),
    "messages a text": (lambda i: _dump(chat(i, messages="hi")), "invalid_request"),
    "messages of texts": (lambda i: _dump(chat(i, messages=["hi"])), "invalid_request"),
    "empty message": (lambda i: _dump(chat(i, messages=[{}])), "invalid_request"),
    "no role": (lambda i: _dump(chat(i, messages=[{"content": "x"}])), "invalid_request"),
    "role a number": (lambda i: _dump(chat(i, messages=[{"role": 1, "content": "x"}])), "invalid_request"),
    "content a number": (lambda i: _dump(chat(i, messages=[{"role": "user", "content": 1}])), "invalid_request"),
    "content an object": (lambda i: _dump(chat(i, messages=[{"role": "user", "content": {}}])), "invalid_request"),
    "image": (lambda i: _dump(chat(i, messages=_part("image_url", "https://example.com/a.png"))), "invalid_request"),
    "image in a file": (lambda i: _dump(chat(i, messages=_part("image_url", "file:///etc/passwd"))), "invalid_request"),
    "part without type": (lambda i: _dump(chat(i, messages=[{"role": "user", "content": [{}]}])), "invalid_request"),
    "max_tokens 0": (lambda i: _dump(chat(i, max_tokens=0)), "invalid_request"),
    "max_tokens -1": (lambda i: _dump(chat(i, max_tokens=-1)), "invalid_request"),
    "max_tokens true": (lambda i: _dump(chat(i, max_tokens=True)), "invalid_request"),
    "max_tokens 1.5": (lambda i: _dump(chat(i, max_tokens=1.5)), "invalid_request"),
    "max_tokens a text": (lambda i: _dump(chat(i, max_tokens="two")), "invalid_request"),
    "both limits": (lambda i: _dump(chat(i, max_tokens=1, max_completion_tokens=2)), "invalid_request"),
    "temperature below 0": (lambda i: _dump(chat(i, temperature=-1)), "invalid_request"),
    "temperature a text": (lambda i: _dump(chat(i, temperature="hot")), "invalid_request"),
    "temperature a list": (lambda i: _dump(chat(i, temperature=[1])), "invalid_request"),
    "top_p 0": (lambda i: _dump(chat(i, top_p=0)), "invalid_request"),
    "n 0": (lambda i: _dump(chat(i, n=0)), "invalid_request"),
    "seed below 0": (lambda i: _dump(chat(i, seed=-1)), "invalid_request"),
    "empty stop": (lambda i: _dump(chat(i, stop="")), "invalid_request"),
    "stop of numbers": (lambda i: _dump(chat(i, stop=["x", 1])), "invalid_request"),
    "deep stop": (lambda i: _dump(chat(i, stop=["[" * 9])).replace(b'"[[[[[[[[["', b"[" * 50 + b"]" * 50),
                  "invalid_request"),
    "bias of a word": (lambda i: _dump(chat(i, logit_bias={"word": 1})), "invalid_request"),
    "bias of a surrogate": (lambda i: _dump(chat(i, logit_bias={"\ud800": 1})), "invalid_request"),
    "bias above 100": (lambda i: _dump(chat(i, logit_bias={"1": 101})), "invalid_request"),
    "logprobs a number": (lambda i: _dump(chat(i, logprobs=2)), "invalid_request"),
    "top_logprobs alone": (lambda i: _dump(chat(i, top_logprobs=2)), "invalid_request"),
    "top_logprobs 21": (lambda i: _dump(chat(i, logprobs=True, top_logprobs=21)), "invalid_request"),
    "stream": (lambda i: _dump(chat(i, stream=True)), "unsupported_parameter"),
    "forced tool": (lambda i: _dump(chat(i, tool_choice="required")), "invalid_request"),
    "tools a text": (lambda i: _dump(chat(i, tools="t")), "invalid_request"),
    "template of its own": (lambda i: _dump(chat(i, chat_template="{{ ''.__class__ }}")), "unsupported_parameter"),
    "unknown response format": (lambda i: _dump(chat(i, response_format={"type": "xml"})), "invalid_request"),
    "schema missing": (lambda i: _dump(chat(i, response_format={"type": "json_schema"})), "invalid_request"),
    "two constraints": (lambda i: _dump(chat(i, guided_regex="a", guided_choice=["a"])), "invalid_request"),
    "no prompt": (lambda i: _dump(completion(i, prompt=None)), "missing_required_parameter"),
    "prompt a number": (lambda i: _dump(completion(i, prompt=1)), "invalid_request"),
    "empty list of prompts": (lambda i: _dump(completion(i, prompt=[])), "invalid_request"),
    "texts and ids": (lambda i: _dump(completion(i, prompt=["a", 1])), "invalid_request"),
    "ids below 0": (lambda i: _dump(completion(i, prompt=[-1])), "invalid_request"),
    "ids true": (lambda i: _dump(completion(i, prompt=[True])), "invalid_request"),
    "suffix": (lambda i: _dump(completion(i, suffix="x")), "unsupported_parameter"),
    "best_of": (lambda i: _dump(completion(i, best_of=3)), "unsupported_parameter"),
    "messages to completions": (lambda i: _dump(completion(i, messages=_says("x"))), "unknown_field"),
    "half a surrogate in a key": (lambda i: _dump(chat(i, **{"\ud800": 1})), "unknown_field"),
}  # fmt: skip
BY_THE_MODEL: dict[str, tuple[Callable[[str], bytes], str]] = {
    "empty prompt": (lambda i: _dump(completion(i, prompt="")), "empty_prompt"),
    "half a surrogate": (lambda i: _dump(chat(i, messages=_says("\ud800"))), "invalid_text"),
    "too long": (lambda i: _dump(completion(i, prompt="add 1 " * 100_000)), "context_length_exceeded"),
    "10 MB prompt": (lambda i: _dump(completion(i, prompt="add 1 " * (BIG // 6))), "context_length_exceeded"),
    "regex that is none": (lambda i: _dump(chat(i, guided_regex="(a")), "invalid_structured_output"),
    "schema that is none": (lambda i: _dump(chat(i, guided_json={"type": "wish"})), "invalid_structured_output"),
    "schema in a file": (
        lambda i: _dump(chat(i, guided_json={"$ref": "file:///etc/passwd"})), "invalid_structured_output",
    ),
    "schema on a server": (
        lambda i: _dump(chat(i, guided_json={"$ref": "http://127.0.0.1:9/s"})), "invalid_structured_output",
    ),
    "grammar in a file": (
        lambda i: _dump(chat(i, guided_grammar='%import "/etc/passwd"')), "invalid_structured_output",
    ),
    "stop token outside the vocabulary": (lambda i: _dump(chat(i, stop_token_ids=[10**9])), "bad_token_id"),
    "bias outside the vocabulary": (lambda i: _dump(chat(i, logit_bias={"99999999": 1})), "bad_token_id"),
    "id outside the vocabulary": (lambda i: _dump(completion(i, prompt=[10**9])), "bad_token_id"),
    "role the template refuses": (
        lambda i: _dump(chat(i, messages=[{"role": "nobody", "content": "x"}])), "chat_template",
    ),
}  # fmt: skip
_RARE = frozenset({"10 MB of letters", "10 MB in an unknown field", "10 MB prompt", "too long"})
_NAMELESS = frozenset({"no custom_id", "custom_id null", "custom_id a number", "custom_id a list", "nothing"})
KINDS = (*GOOD, *BAD, *BY_THE_MODEL, "used twice")


def batch_lines(count: int = 1000, *, seed: int = 0) -> list[BatchLine]:
    """``count`` lines in an order of ``seed``; every kind once, then small ones at random, a good line at each third
    place."""
    chance = random.Random(seed)
    small = [kind for kind in (*BAD, *BY_THE_MODEL, "used twice") if kind not in _RARE]
    kinds = [*KINDS]
    while len(kinds) < count:
        kinds.append(chance.choice([*GOOD]) if len(kinds) % 3 == 0 else chance.choice(small))
    chance.shuffle(kinds)
    # The first line is good, so that the file is taken for what it is and there is an id to use twice.
    return [_made("chat", 0), *(_made(kind, number) for number, kind in enumerate(kinds[: count - 1], start=1))]


def batch_file(lines: list[BatchLine]) -> bytes:
    """The lines as a file that begins with a byte order mark, has blank lines, and no end of its last line."""
    return codecs.BOM_UTF8 + b"\n\r\n".join(line.raw for line in lines)


def _made(kind: str, number: int) -> BatchLine:
    custom_id = f"h-{number}"
    if kind == "used twice":
        return BatchLine(
            kind=kind, raw=_dump(chat("h-0")), custom_id="h-0", code="duplicate_custom_id", judge=Judge.SCAN
        )
    if kind in GOOD:
        return BatchLine(kind=kind, raw=GOOD[kind](custom_id), custom_id=custom_id, code=None)
    if kind in BY_THE_MODEL:
        make, code = BY_THE_MODEL[kind]
        return BatchLine(kind=kind, raw=make(custom_id), custom_id=custom_id, code=code, judge=Judge.MODEL)
    make, code = BAD[kind]
    # Where a line cannot be read at all, there is no id to name.
    known_names = code not in ("invalid_json", "invalid_utf8") and kind not in _NAMELESS
    known_names = known_names and kind not in ("a list", "a string", "a number", "null")
    return BatchLine(kind=kind, raw=make(custom_id), custom_id=custom_id if known_names else None, code=code)
