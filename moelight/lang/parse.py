"""Parse text to a tree: the grammar of ``moe.lark`` (LALR, contextual lexer) and the messages of syntax errors.

After an error the parse continues behind the faulty statement (`recover`), so that one error hides no other.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any, cast

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import parse_bytes
from moelight.lang.diagnostics import LanguageError
from moelight.lang.error_recovery import RecoveredText, lacks_value, recover, unclosed
from moelight.lang.syntax import (
    Assignment,
    Block,
    Command,
    Condition,
    Conditional,
    Name,
    PolicyNode,
    PolicyText,
    Rule,
    Value,
)

MOST_CHARACTERS = 1 << 20  # a policy has some hundreds
_MOST_SYNTAX_ERRORS = 20
_MOST_DIGITS = 18  # of a whole number: more do not fit 64 bits
_WORD = re.compile(r"[A-Za-z_0-9.]+|\S")
_EXPECTED = {
    "NAME": "a name",
    "NUMBER": "a number",
    "SIZE": "a size",
    "TEXT": 'a text in "quotes"',
    "OPERATOR": "one of < > <= >= !=",
    "FOREIGN": "",
    "POLICY": "'policy'",
    "VERSION": "'version'",
    "WHEN": "'when'",
    "FOR": "'for'",
    "EQUAL": "'='",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "LSQB": "'['",
    "RSQB": "']'",
    "COMMA": "','",
    "COLON": "':'",
    "VBAR": "'|'",
}


def parse(text: str) -> tuple[PolicyText, list[LanguageError]]:
    """The tree of ``text`` and its syntax errors; unreadable statements are missing from the tree."""
    if len(text) > MOST_CHARACTERS:
        message = f"the file has {len(text):,} characters; a policy file has at most {MOST_CHARACTERS:,}"
        return PolicyText(None, ()), [LanguageError(code="too_long", message=message, span=(0, 0))]
    errors: list[LanguageError] = []
    left = text
    last: RecoveredText | None = None
    for _ in range(2 * _MOST_SYNTAX_ERRORS):
        try:
            return _run(left), errors
        except UnexpectedInput as error:
            at = _place(error, left)
            if last is None or not last.covers(at):
                errors.append(_complaint(error, left, at))
            if len(errors) >= _MOST_SYNTAX_ERRORS:
                break
            last = recover(left, at)
            if last is None or last.text == left:
                break
            left = last.text
    return PolicyText(None, ()), errors


def _run(text: str) -> PolicyText:
    return cast(PolicyText, _parser().parse(text))


@cache
def _parser() -> Lark:
    grammar = Path(__file__).with_name("moe.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", start="file", transformer=_Tree(), maybe_placeholders=False)


def _name(token: Token) -> Name:
    return Name(str(token), _span(token))


def _span(token: Token) -> tuple[int, int]:
    start = token.start_pos or 0
    return start, start + len(token)


class _Tree(Transformer[Token, Any]):
    """Builds the nodes: Lark calls the method named after each production with its parts."""

    def file(self, parts: list[Any]) -> PolicyText:
        version = parts.pop(0) if parts and isinstance(parts[0], Value) else None
        return PolicyText(version, tuple(parts))

    def version(self, parts: list[Any]) -> Value:
        return _number(parts[0])

    def policy(self, parts: list[Any]) -> PolicyNode:
        return PolicyNode(_name(parts[0]), tuple(parts[1:]))

    def block(self, parts: list[Any]) -> Block:
        return Block(_name(parts[0]), tuple(parts[1:]))

    def foreign(self, parts: list[Any]) -> Block:
        return Block(_name(parts[0]), (), True)

    def entry(self, parts: list[Any]) -> Assignment:
        return Assignment(_name(parts[0]), parts[1])

    def conditional(self, parts: list[Any]) -> Conditional:
        return Conditional(*parts)

    def condition(self, parts: list[Any]) -> Condition:
        metric, operator, threshold = parts
        return Condition(_name(metric), _name(operator), _number(threshold))

    def rule(self, parts: list[Any]) -> Rule:
        count, unit = parts.pop(1) if len(parts) > 1 and isinstance(parts[1], tuple) else (None, None)
        return Rule(parts[0], count, unit, tuple(parts[1:]))

    def duration(self, parts: list[Any]) -> tuple[Value, Name]:
        return _number(parts[0]), _name(parts[1])

    def set(self, parts: list[Any]) -> Command:
        return Command(_name(parts[0]), value=parts[1])

    def say(self, parts: list[Any]) -> Command:
        return Command(_name(parts[0]), what=_name(parts[1]))

    def layers(self, parts: list[Value]) -> Value:
        first, last = parts[0].span or (0, 0), parts[-1].span or (0, 0)
        return Value("layers", tuple(parts), (first[0], last[1]))

    def items(self, parts: list[Any]) -> Value:
        opening, *items, closing = parts
        kept = tuple(item for item in items if isinstance(item, Value))
        return Value("list", kept, (opening.start_pos, closing.start_pos + 1))

    def number(self, parts: list[Token]) -> Value:
        return _number(parts[0])

    def size(self, parts: list[Token]) -> Value:
        return _size(parts[0])

    def name(self, parts: list[Token]) -> Value:
        return Value("name", str(parts[0]), _span(parts[0]))

    def text(self, parts: list[Token]) -> Value:
        return Value("text", re.sub(r"\\(.)", r"\1", parts[0][1:-1]), _span(parts[0]))


def _number(token: Token) -> Value:
    span = _span(token)
    if token[0] in "+-":
        return Value("signed", str(token), span)
    if token.isdigit():
        return Value("int", int(token), span) if len(token) <= _MOST_DIGITS else Value("huge", str(token), span)
    number = float(token)
    return Value("number", number, span) if math.isfinite(number) else Value("huge", str(token), span)


def _size(token: Token) -> Value:
    """The value of a size; one below a byte is 0, which a rule refuses, not the syntax."""
    if token.endswith("%"):
        share = float(token[:-1])
        return (
            Value("percent", share, _span(token)) if math.isfinite(share) else Value("huge", str(token), _span(token))
        )
    try:
        return Value("size", parse_bytes(str(token)), _span(token))
    except ConfigError:
        return Value("size", 0, _span(token))


# ---------------------------------------------------------------------------------------------------------------------
# Messages of syntax errors


def _place(error: UnexpectedInput, text: str) -> int:
    if isinstance(error, UnexpectedToken):
        return len(text) if error.token.type == "$END" else _span(error.token)[0]
    return int(getattr(error, "pos_in_stream", None) or 0)


def _complaint(error: UnexpectedInput, text: str, at: int) -> LanguageError:
    opened = unclosed(text, at)
    if opened is not None:
        what, span = opened
        return LanguageError(code="syntax", message=f"the '{{' of {what} is never closed; write '}}'", span=span)
    if at >= len(text):
        return LanguageError(code="syntax", message=f"the file ends where {_wanted(error)}", span=_last_word(text))
    found = _WORD.match(text, at)
    word = found.group() if found else text[at]
    return LanguageError(code="syntax", message=f"{_hint(error, text, at, word)}", span=(at, at + len(word)))


def _last_word(text: str) -> tuple[int, int]:
    end = len(text.rstrip())
    return max(0, end - 1), max(1, end)


def _hint(error: UnexpectedInput, text: str, at: int, word: str) -> str:
    wanted = _wanted(error)
    before = text[:at].rstrip()
    if word == "," and not wanted.startswith("a value"):
        return "',' stands only inside [ ]; between keys write a line break or nothing"
    if text.startswith(("//", "/*"), at):
        return "a comment begins with '#'"
    if word == '"':
        return "the text that begins here is not closed on its line; write '\"'"
    if word == "=" and before.endswith("="):
        return "'==' is no operator here; write '='"
    if word == "}" and "policy" in wanted:
        return "this '}' closes nothing"
    if word[0].isdigit() and not word.replace(".", "").isdigit():
        return f"{word!r} is neither a number nor a size such as 2GiB or 25%"
    if word == "=" and (key := lacks_value(text, at)):
        return f"the key before {key!r} has no value"
    if word == "=" and wanted.startswith("'{'"):
        return "a key stands in a block, for example cache { capacity = 16 }"
    guess = did_you_mean(word, [w for w in ("policy", "version", "when", "for") if f"'{w}'" in wanted])
    return f"{word!r} is not expected here{guess}: {wanted}"


def _wanted(error: UnexpectedInput) -> str:
    """The accepted terminals in words."""
    terminals = set()
    if isinstance(error, UnexpectedToken):
        terminals = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        terminals = set(error.allowed or ())
    if {"NUMBER", "TEXT"} <= terminals:
        return "a value belongs here"
    words = [word for name, word in _EXPECTED.items() if name in terminals and word]
    if not words:
        return "nothing belongs here"
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"{listed} belongs here"
