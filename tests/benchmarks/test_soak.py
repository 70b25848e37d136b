"""What the soak calls a lost, doubled or wrong row."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("jobs_sections.soak")


def rows(soak: ModuleType, count: int) -> list[dict[str, Any]]:
    """Rows as a job writes them: of a broken line without its custom_id."""
    named = [{"custom_id": f"row-{n}"} if soak.fault_of(n) != "broken" else {"line": n + 1} for n in range(count)]
    return [{**row, "error": {}} if soak.fault_of(n) else {**row, "text": ""} for n, row in enumerate(named)]


def test_the_first_rows_of_the_input_are_right(soak: ModuleType) -> None:
    assert soak.check_first_rows(rows(soak, 120)) == []
    assert {soak.fault_of(n) for n in range(120)} == {None, "broken", "unknown field", "max_tokens", "too long"}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda all_rows: all_rows.pop(17), "row 17 is lost"),
        (lambda all_rows: all_rows.insert(3, all_rows[40]), "row 40 2 times"),
        (lambda all_rows: all_rows.insert(3, all_rows.pop(40)), "order"),
        (lambda all_rows: all_rows[5].update(error={}), "row 5: an error"),
        (lambda all_rows: all_rows[14].pop("error"), "row 14: an error"),
    ],
)
def test_other_rows_are_failures(soak: ModuleType, damage: Any, says: str) -> None:
    all_rows = rows(soak, 60)
    damage(all_rows)
    assert any(says in failure for failure in soak.check_first_rows(all_rows))


def test_half_a_line_is_no_row(soak: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert soak.read_rows(output) == []
    output.write_text('{"custom_id": "row-0"}\n{"custom_id": "ro')
    assert soak.read_rows(output) == [{"custom_id": "row-0"}]
