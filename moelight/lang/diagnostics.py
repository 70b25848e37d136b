"""Errors and warnings about a policy with their positions in the text, as text for users and as values for JSON."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moelight.lang.syntax import Span

_SHOWN = 100  # characters of a source line shown on either side of the position


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageError:
    """An error, or a ``warning`` about something pointless."""

    code: str
    message: str
    span: Span
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
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


def located(errors: list[LanguageError], text: str) -> list[Diagnostic]:
    """Return the errors and warnings with their positions, in the order of the text."""
    starts = [0, *(at + 1 for at, c in enumerate(text) if c == "\n")] if errors else []
    findings = []
    for complaint in errors:
        start, end = min(complaint.span[0], len(text)), complaint.span[1]
        line = bisect_right(starts, start)
        findings.append(
            Diagnostic(
                code=complaint.code,
                message=complaint.message,
                line=line,
                column=start - starts[line - 1] + 1,
                length=max(1, end - start),
                warning=complaint.warning,
            )
        )
    return sorted(findings, key=lambda finding: (finding.line, finding.column, finding.warning))


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
