"""Resident memory under a budget, measured on a process of its own: the benchmark itself, on a model of 90 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPE = "--layers 4 --hidden 512 --intermediate 1024 --experts 6 --heads 8 --kv-heads 2 --head-dim 64 --vocab 2048"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on two budgets, both smaller than the model and what a run needs beside it."""
    model = tmp_path_factory.mktemp("memory") / "model"
    _run("make_checkpoint.py", str(model), "--model", "mixtral-8x7b", *SHAPE.split())
    options = ["--prompts", "12", "--longest", "60", "--max-tokens", "4"]
    return _run("memory.py", "--model", str(model), "--budgets", "160MiB", "least", *options)


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_the_resident_set_stays_within_the_budget(report: dict[str, Any]) -> None:
    for row in report["budgets"]:
        assert row["peak_rss_bytes"] <= row["bound_bytes"]


def test_the_least_budget_that_a_refusal_names_is_enough_and_streams(report: dict[str, Any]) -> None:
    least = report["budgets"][-1]
    assert least["passes"] > 0
    assert least["disk_bytes"] > 0
