"""Policies good and bad, one rule each; a head of comments says what must be found where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moelight.lang.diagnostics import Diagnostic, diagnostic_lines
from moelight.lang.files import read_file

CORPUS = Path(__file__).with_name("corpus")
GOOD, BAD = (sorted((CORPUS / kind).glob("*.moe")) for kind in ("good", "bad"))
_HEAD = re.compile(rb"^# (error|warning) (\w+) (\d+):(\d+)$", re.MULTILINE)
RULES = {f"V{number}" for number in range(1, 21)}


def expected(path: Path) -> list[tuple[str, str, int, int]]:
    """(error or warning, code, line, column) of each finding, in order of the places."""
    result = _HEAD.findall(path.read_bytes())
    return sorted(
        ((kind.decode(), code.decode(), int(line), int(column)) for kind, code, line, column in result),
        key=lambda row: (row[2:], row[:2]),
    )


def positions(findings: tuple[Diagnostic, ...]) -> list[tuple[str, str, int, int]]:
    rows = [("warning" if f.warning else "error", f.code, f.line, f.column) for f in findings]
    return sorted(rows, key=lambda row: (row[2:], row[:2]))


@pytest.mark.parametrize("path", [*GOOD, *BAD], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_found_and_where(path: Path) -> None:
    reading = read_file(path)
    assert positions((*reading.errors, *reading.warnings)) == expected(path)
    assert bool(reading.errors) == (path.parent.name == "bad")
    assert bool(reading.policies) != bool(reading.errors)
    lines = reading.lines
    for finding in (*reading.errors, *reading.warnings):
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
        assert finding.message
        position, source, caret = diagnostic_lines(finding, "x.moe", lines).split("\n")
        assert position.startswith(f"x.moe:{finding.line}:{finding.column}: ")
        assert caret.index("^") - caret.index("|") - 2 == finding.column - 1
        assert len(source) >= caret.index("^") or source.endswith("|")


def test_the_corpus_has_every_rule() -> None:
    assert len(GOOD) + len(BAD) >= 60
    assert {code for path in BAD for _, code, _, _ in expected(path)} >= RULES
    for path in BAD:
        assert any(kind == "error" for kind, *_ in expected(path)), path.name
