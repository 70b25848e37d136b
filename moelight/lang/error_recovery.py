"""Error recovery: make a text with a syntax error parseable, so that the rest of the text can be checked.

The faulty statement is replaced by blanks, or a blank by a missing brace; no other character moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BLOCKS = ("cache", "prefetch", "schedule", "monitor", "per_layer", "adapt", "hierarchy", "per_layer_hierarchy")
_HIDDEN = re.compile(r'#[^\n]*|"[^"\n]*"')
_STATEMENT = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\s*=(?!=)|\bwhen\b")
_POLICY = re.compile(r"\bpolicy\s+[A-Za-z_][A-Za-z0-9_]*\s*\{")
_HEAD = re.compile(r"\bpolicy\b(\s+[A-Za-z_][A-Za-z0-9_]*)?\s*\Z")
_BRACE = re.compile(r"[{}]")
_WORD_BEFORE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*\Z")
_LONGEST_NAME = 200  # characters searched for the word before a position; a longer word is cut
_OPEN_ENDED = ("=", ":", "|", ",", "[")


@dataclass(frozen=True, slots=True)
class RecoveredText:
    """The text after recovery. Later errors from ``start`` to ``end`` and in the blanks after it repeat the same
    error."""

    text: str
    start: int
    end: int

    def covers(self, at: int) -> bool:
        """True if an error at ``at`` repeats the error that was recovered from."""
        return self.start <= at and not self.text[self.end : at].strip()


def recover(text: str, at: int) -> RecoveredText | None:
    """``text`` without the error at ``at``; None if no recovery is possible."""
    clear = _clear(text)
    opened = _open_braces(clear, at)
    depth = len(opened)
    if at >= len(text):
        return RecoveredText(text + "}" * depth, len(text), len(text) + depth) if depth else None
    if clear[at] == "," or (depth == 0 and clear[at] == "}"):
        return _blanked(text, at, at + 1)
    if depth == 0:
        begun = _HEAD.search(clear, 0, at)
        following = _POLICY.search(clear, at if begun else at + 1)
        return _blanked(text, begun.start() if begun else at, following.start() if following else len(text))
    missing = missing_braces(clear, at, depth)
    if missing is not None:
        return _closed(text, *missing)
    return _without_statement(text, clear, at, opened[-1])


def unclosed(text: str, at: int) -> tuple[str, tuple[int, int]] | None:
    """The word before the innermost brace that should have been closed before ``at``, and its span; None if there is
    no such brace."""
    clear = _clear(text)
    opened = _open_braces(clear, at)
    if not opened or (at < len(text) and not missing_braces(clear, at, len(opened))):
        return None
    brace = opened[-1]
    word = _word_before(clear, brace)
    return (repr(word[0]), word[1]) if word else ("this block", (brace, brace + 1))


def lacks_value(text: str, at: int) -> str | None:
    """The key whose ``=`` is at ``at``, where the value of the previous key belongs; None otherwise."""
    clear = _clear(text)
    word = _word_before(clear, at)
    if clear[at : at + 1] != "=" or word is None or not clear[: word[1][0]].rstrip().endswith(_OPEN_ENDED):
        return None
    return word[0]


def _clear(text: str) -> str:
    """``text`` with blanks for comments and quoted texts."""
    return _HIDDEN.sub(lambda found: " " * len(found.group()), text)


def _word_before(clear: str, at: int) -> tuple[str, tuple[int, int]] | None:
    """The last word before ``at`` and its span."""
    offset = max(0, at - _LONGEST_NAME)
    found = _WORD_BEFORE.search(clear[offset:at])
    return None if found is None else (found.group(1), (offset + found.start(1), offset + found.end(1)))


def _open_braces(clear: str, at: int) -> list[int]:
    opened: list[int] = []
    for found in _BRACE.finditer(clear, 0, at):
        if found.group() == "{":
            opened.append(found.start())
        elif opened:
            opened.pop()
    return opened


def missing_braces(clear: str, at: int, depth: int) -> tuple[int, int] | None:
    """(position, number) of the missing braces if a block begins inside a block, or a policy inside a policy."""
    before = _word_before(clear, at)
    if before is None:
        return None
    word, (start, _) = before
    if word == "policy":
        return start, depth
    if clear[at] == "{" and word in BLOCKS and depth > 1:
        return start, depth - 1
    return None


def _closed(text: str, before: int, count: int) -> RecoveredText | None:
    """``text`` with ``count`` closing braces in the blanks before ``before``; None if there are too few blanks."""
    if text[before - count : before].strip():
        return None
    return RecoveredText(text[: before - count] + "}" * count + text[before:], before - count, before)


def _without_statement(text: str, clear: str, at: int, brace: int) -> RecoveredText:
    start, end = brace + 1, len(clear)
    word = _word_before(clear, at)
    if word is not None and lacks_value(text, at):
        at = end = word[1][0]
    for found in _STATEMENT.finditer(clear, brace + 1):
        if found.start() < at or (found.start() == at and at != end):
            start = found.start()
        elif found.start() > at:
            end = min(end, found.start())
            break
    start = max([start, *(found.end() for found in _BRACE.finditer(clear, start, at))])
    following = _BRACE.search(clear, at, end)
    if following is not None:
        end = following.start()
        if following.group() == "{":
            end = _closing(clear, end)
    return _blanked(text, start, max(end, start))


def _closing(clear: str, opening: int) -> int:
    """The position after the brace that closes the one at ``opening``."""
    depth = 0
    for found in _BRACE.finditer(clear, opening):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.end()
    return len(clear)


def _blanked(text: str, start: int, end: int) -> RecoveredText:
    kept = "".join(c if c == "\n" else " " for c in text[start:end])
    return RecoveredText(text[:start] + kept + text[end:], start, end)
