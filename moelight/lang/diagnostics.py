"""Errors and warnings about a policy with their positions in the text, as text for users and as values for JSON."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moelight.experts.policy import ExpertPolicy
from moelight.lang.syntax import Span

_SHOWN = 100  # characters of a source line shown on either side of the position


@dataclass(eq=False)
class LanguageError(Exception):
    """An error, or a ``warning`` about something pointless."""

    code: str
    message: str
    span: Span
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or warning with its position: ``line`` and ``column`` count from 1, ``length`` in characters."""

    code: str
    message: str
    line: int
    column: int
    length: int
    warning: bool

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "column": self.column, "message": self.message}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedText:
    """A text with its policies (none if there are errors), its errors and its warnings."""

    text: str
    policies: tuple[ExpertPolicy, ...]
    errors: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]

    @property
    def lines(self) -> list[str]:
        """The lines of the text, as diagnostics count them."""
        return self.text.split("\n")


def checked(text: str, all_errors: list[LanguageError], policies: Iterable[ExpertPolicy] = ()) -> CheckedText:
    """``text`` with what was ``all_errors``, in the order of the text."""
    starts = [0, *(at + 1 for at, c in enumerate(text) if c == "\n")] if all_errors else []
    sides: tuple[list[Diagnostic], list[Diagnostic]] = [], []
    for complaint in sorted(all_errors, key=lambda error: min(error.span[0], len(text))):
        start, end = min(complaint.span[0], len(text)), complaint.span[1]
        line = bisect_right(starts, start)
        column, length = start - starts[line - 1] + 1, max(1, end - start)
        sides[complaint.warning].append(
            Diagnostic(complaint.code, complaint.message, line, column, length, complaint.warning)
        )
    errors, warnings = map(tuple, sides)
    return CheckedText(text=text, policies=() if errors else tuple(policies), errors=errors, warnings=warnings)


def diagnostic_lines(finding: Diagnostic, file: str, lines: Sequence[str]) -> str:
    """Return three lines: position and message, the source line from ``lines``, and a caret under the position."""
    line = lines[finding.line - 1] if finding.line <= len(lines) else ""
    at = finding.column - 1
    first, last = max(0, at - _SHOWN), at + _SHOWN
    before, after = _harmless(line[first:at]), _harmless(line[at:last].rstrip())
    before = "…" + before[1:] if first else before
    after = after[:-1] + "…" if last < len(line.rstrip()) else after
    width = max(1, min(_width(_harmless(line[at : at + finding.length])), _width(after) or 1))
    gutter = f"{finding.line:>5} | "
    kind = "warning" if finding.warning else "error"
    return "\n".join(
        (
            f"{_harmless(file)}:{finding.line}:{finding.column}: {kind}[{finding.code}]: {_harmless(finding.message)}",
            f"{gutter}{before}{after}".rstrip(),
            f"{' ' * (len(gutter) - 2)}| {' ' * _width(before)}{'^' * width}",
        )
    )


def _harmless(text: str) -> str:
    """``text`` with control characters replaced, one for one."""
    return "".join(c if c.isprintable() else " " if c in "\t\r" else "�" for c in text)


def _width(text: str) -> int:
    """The width of ``text`` in terminal columns."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
