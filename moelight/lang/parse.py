"""Parse text to a tree: the grammar of ``moe.lark`` (LALR, contextual lexer) and the messages of syntax errors. After
an error the parse continues behind the faulty statement, so that one error hides no other."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedInput, UnexpectedToken

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.units import parse_bytes
from moelight.lang import syntax
from moelight.lang.diagnostics import LanguageError
from moelight.lang.keys import BLOCKS, FOREIGN_BLOCKS
from moelight.lang.syntax import PolicyText, Span, Value

_HIDDEN = re.compile(r'#[^\n]*|"[^"\n]*"')
_STATEMENT = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\s*=(?!=)|\bwhen\b")
_POLICY = re.compile(r"\bpolicy\s+[A-Za-z_][A-Za-z0-9_]*\s*\{")
_HEAD = re.compile(r"\bpolicy\b(\s+[A-Za-z_][A-Za-z0-9_]*)?\s*\Z")
_BRACE = re.compile(r"[{}]")
_WORD_BEFORE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*\Z")
_LONGEST_NAME = 200  # characters searched for the word before a position; a longer word is cut
_OPEN_ENDED = ("=", ":", "|", ",", "[")


class RecoveredText(NamedTuple):
    """The text after recovery; errors from ``start`` to ``end`` and in the blanks after it repeat the first."""

    text: str
    start: int
    end: int

    def covers(self, at: int) -> bool:
        return self.start <= at and not self.text[self.end : at].strip()


class _Faulty:
    """A text with an error at ``at``.

    ``clear``: blanks replace comments and quotes; ``opened``: the open braces; ``word``: the last word before ``at``.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at
        self.clear = _HIDDEN.sub(lambda match: " " * len(match.group()), text)
        self.opened: list[int] = []
        for match in _BRACE.finditer(self.clear, 0, at):
            if match.group() == "{":
                self.opened.append(match.start())
            elif self.opened:
                self.opened.pop()
        self.word, (self.word_start, _) = self.word_before(at)

    def word_before(self, at: int) -> tuple[str, Span]:
        """The last word before ``at``, empty if there is none, and its span."""
        offset = max(0, at - _LONGEST_NAME)
        match = _WORD_BEFORE.search(self.clear[offset:at])
        return (match.group(1), (offset + match.start(1), offset + match.end(1))) if match else ("", (at, at + 1))

    def recovered(self) -> RecoveredText:
        """The text without the error; the same text if no recovery is possible."""
        text, clear, at, depth = self.text, self.clear, self.at, len(self.opened)
        if at >= len(text):
            return RecoveredText(text + "}" * depth, len(text), len(text) + depth)
        if clear[at] == "," or (depth == 0 and clear[at] == "}"):
            return self._blanked(at, at + 1)
        if depth == 0:
            begun = _HEAD.search(clear, 0, at)
            following = _POLICY.search(clear, at if begun else at + 1)
            return self._blanked(begun.start() if begun else at, following.start() if following else len(text))
        if not (count := self._missing_braces()):
            return self._without_statement()
        end, start = self.word_start, self.word_start - count  # the braces replace blanks, so that all positions stay
        braces = text[start:end] if text[start:end].strip() else "}" * count
        return RecoveredText(text[:start] + braces + text[end:], start, end)

    def _missing_braces(self) -> int:
        """The number of braces missing before ``word``: a block begins inside a block, or a policy inside a policy."""
        if self.word == "policy":
            return len(self.opened)
        begins = self.clear[self.at] == "{" and self.word in (*BLOCKS, *FOREIGN_BLOCKS)
        return max(0, len(self.opened) - 1) if begins else 0

    def unclosed(self) -> tuple[str, Span] | None:
        """The word before the innermost brace that should have been closed before the error, and its span."""
        if not self.opened or (self.at < len(self.text) and not self._missing_braces()):
            return None
        word, span = self.word_before(self.opened[-1])
        return repr(word) if word else "this block", span

    def lacks_value(self) -> str:
        """The key whose ``=`` is the error, because the value of the previous key is missing; empty if it is not."""
        lacks = self.clear[self.at : self.at + 1] == "=" and self.clear[: self.word_start].rstrip().endswith(
            _OPEN_ENDED
        )
        return self.word if lacks else ""

    def _without_statement(self) -> RecoveredText:
        clear, at, start, end = self.clear, self.at, self.opened[-1] + 1, len(self.clear)
        if self.lacks_value():
            at = end = self.word_start
        for match in _STATEMENT.finditer(clear, start):
            if match.start() < at or (match.start() == at and at != end):
                start = match.start()
            elif match.start() > at:
                end = min(end, match.start())
                break
        start = max([start, *(brace.end() for brace in _BRACE.finditer(clear, start, at))])
        following = _BRACE.search(clear, at, end)
        if following is not None:
            end = following.start() if following.group() == "}" else self._closing(following.start())
        return self._blanked(start, max(end, start))

    def _closing(self, opening: int) -> int:
        """The position after the brace that closes the one at ``opening``."""
        depth = 0
        for match in _BRACE.finditer(self.clear, opening):
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return match.end()
        return len(self.clear)

    def _blanked(self, start: int, end: int) -> RecoveredText:
        blank = re.sub(r"[^\n]", " ", self.text[start:end])
        return RecoveredText(self.text[:start] + blank + self.text[end:], start, end)


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
    """Return the tree of ``text`` and its syntax errors; unreadable statements are missing from the tree."""
    if len(text) > MOST_CHARACTERS:
        message = f"the file has {len(text):,} characters; a policy file has at most {MOST_CHARACTERS:,}"
        return PolicyText(None, ()), [LanguageError("too_long", message, (0, 0))]
    errors: list[LanguageError] = []
    left = text
    last: RecoveredText | None = None
    for _ in range(2 * _MOST_SYNTAX_ERRORS):
        try:
            return cast(PolicyText, _parser().parse(left)), errors
        except UnexpectedInput as error:
            faulty = _Faulty(left, _place(error, left))
            if last is None or not last.covers(faulty.at):
                errors.append(_complaint(error, faulty))
            if len(errors) >= _MOST_SYNTAX_ERRORS:
                break
            last = faulty.recovered()
            if last.text == left:
                break
            left = last.text
    return PolicyText(None, ()), errors


@cache
def _parser() -> Lark:
    grammar = Path(__file__).with_name("moe.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", start="file", transformer=_Tree())


def _span(token: Token) -> Span:
    start = token.start_pos or 0
    return start, start + len(token)


def _word(token: Token) -> Value:
    return Value("name", str(token), _span(token))


def _number(token: Token) -> Value:
    integral = token.isdigit()
    if token[0] in "+-":
        return Value("signed", str(token), _span(token))
    if len(token) > _MOST_DIGITS if integral else not math.isfinite(float(token)):
        return Value("huge", str(token), _span(token))
    return Value("int", int(token), _span(token)) if integral else Value("number", float(token), _span(token))


def _size(token: Token) -> Value:
    """The value of a size; one below a byte is 0, which a rule rejects, not the syntax."""
    if token.endswith("%"):
        share = float(token[:-1])
        return Value("percent", share, _span(token)) if math.isfinite(share) else Value("huge", token, _span(token))
    try:
        return Value("size", parse_bytes(str(token)), _span(token))
    except ConfigError:
        return Value("size", 0, _span(token))


def _text(token: Token) -> Value:
    return Value("text", re.sub(r"\\(.)", r"\1", token[1:-1]), _span(token))


@v_args(inline=True)
class _Tree(Transformer[Token, Any]):
    """Builds the nodes: Lark calls the function named after each terminal or production with its parts."""

    NAME = OPERATOR = FOREIGN = staticmethod(_word)
    NUMBER, SIZE, TEXT = staticmethod(_number), staticmethod(_size), staticmethod(_text)
    condition, conditional = syntax.Condition, syntax.Conditional
    entry, say = syntax.Assignment, syntax.Command

    def file(self, version: Value | None, *policies: syntax.PolicyNode) -> PolicyText:
        return PolicyText(version, policies)

    def policy(self, name: Value, *blocks: syntax.Block) -> syntax.PolicyNode:
        return syntax.PolicyNode(name, blocks)

    def block(self, name: Value, *items: syntax.Assignment | syntax.Rule) -> syntax.Block:
        return syntax.Block(name, items)

    foreign = block

    def rule(self, condition: syntax.Condition, count: Value | None, unit: Value | None, *actions: Any) -> syntax.Rule:
        return syntax.Rule(condition, count, unit, actions)

    def set(self, verb: Value, target: Value) -> syntax.Command:
        return syntax.Command(verb, target, assigns=True)

    def layers(self, *parts: Value) -> Value:
        return Value("layers", parts, (parts[0].span[0], parts[-1].span[1]))

    def items(self, *parts: Any) -> Value:
        values = tuple(part for part in parts if isinstance(part, Value))
        return Value("list", values, (_span(parts[0])[0], _span(parts[-1])[1]))


def _place(error: UnexpectedInput, text: str) -> int:
    at_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    return len(text) if at_end else int(getattr(error, "pos_in_stream", None) or 0)


def _complaint(error: UnexpectedInput, faulty: _Faulty) -> LanguageError:
    text, at = faulty.text, faulty.at
    if (opened := faulty.unclosed()) is not None:
        opener, span = opened
        return LanguageError("syntax", f"the '{{' of {opener} is never closed; write '}}'", span)
    if at >= len(text):
        end = len(text.rstrip())
        return LanguageError("syntax", f"the file ends where {_wanted(error)}", (max(0, end - 1), max(1, end)))
    match = _WORD.match(text, at)
    word = match.group() if match else text[at]
    return LanguageError("syntax", _hint(faulty, word, _wanted(error)), (at, at + len(word)))


def _hint(faulty: _Faulty, word: str, wanted: str) -> str:
    text, at, key = faulty.text, faulty.at, faulty.lacks_value()
    number = word.replace(".", "").isdigit()
    hints = (
        (
            word == "," and wanted[:7] != "a value",
            "',' stands only inside [ ]; between keys write a line break or nothing",
        ),
        (text.startswith(("//", "/*"), at), "a comment begins with '#'"),
        (word == '"', "the text that begins here is not closed on its line; write '\"'"),
        (word == "=" and text[:at].rstrip().endswith("="), "'==' is no operator here; write '='"),
        (word == "}" and "policy" in wanted, "this '}' closes nothing"),
        (word[0].isdigit() and not number, f"{word!r} is neither a number nor a size such as 2GiB or 25%"),
        (word == "=" and key, f"the key before {key!r} has no value"),
        (word == "=" and wanted[:3] == "'{'", "a key stands in a block, for example cache { capacity = 16 }"),
    )
    guess = did_you_mean(word, [w for w in ("policy", "version", "when", "for") if f"'{w}'" in wanted])
    return next((hint for fits, hint in hints if fits), f"{word!r} is not expected here{guess}: {wanted}")


def _wanted(error: UnexpectedInput) -> str:
    """The accepted terminals in words."""
    accepted = (
        (error.accepts or error.expected) if isinstance(error, UnexpectedToken) else getattr(error, "allowed", ())
    )
    terminals = set(accepted or ())
    if {"NUMBER", "TEXT"} <= terminals:
        return "a value belongs here"
    words = [word for name, word in _EXPECTED.items() if name in terminals and word]
    if not words:
        return "nothing belongs here"
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"{listed} belongs here"
