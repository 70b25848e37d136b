"""The notebooks run, and hold what came out of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import NOTEBOOKS, CellError, run

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))


def outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """Kinds of what each cell of Python shows."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[kind for output in cell["outputs"] for kind in (output.get("data") or {"text": ""})] for cell in cells]


@pytest.mark.thorough
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_notebooks_run(path: Path) -> None:
    present = json.loads(path.read_text(encoding="utf-8"))
    assert outputs(run(path)) == outputs(present)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_notebooks_have_been_run(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert notebook["nbformat"] == 4 and len(ALL) == 2


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.ipynb"
    cell = {"cell_type": "code", "source": ["name = 'mixtral'\n", "!moelight optimize --hw t5 --model {name}\n"]}
    path.write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    with pytest.raises(CellError, match=r"optimize --hw t5 --model \{name\}: exit code 2"):
        run(path)
