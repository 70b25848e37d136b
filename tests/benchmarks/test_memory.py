"""Resident memory under a budget, measured on a process of its own: the benchmark itself, on a model of 90 MB."""

from __future__ import annotations

import os
from subprocess import CompletedProcess, run
from typing import Any

import pytest

from tests.benchmarks.scripts import ran
from tests.cli.program import moelight_inside

SHAPE = "--layers 4 --hidden 512 --intermediate 1024 --experts 6 --heads 8 --kv-heads 2 --head-dim 64 --vocab 2048"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on two budgets, both smaller than the model and what a run needs beside it."""
    model = tmp_path_factory.mktemp("memory") / "model"
    ran("make_checkpoint", model, "--model", "mixtral-8x7b", *SHAPE.split())
    options = ["--budget-prompts", "12", "--budget-longest", "60", "--budget-new", "4"]
    changes = {"pipeline_sections.budget.subprocess.run": _run}
    sections = ["--sections", "budget", "--models", model, "--budgets", "160MiB", "least"]
    return ran("pipeline", *sections, *options, changes=changes)["budget"]


def _run(command: list[str], **options: Any) -> CompletedProcess[str]:
    """One byte is refused before anything is loaded, which may be in this process. Others run as a user's do: Triton,
    which tests tell to interpret, is not imported on a CPU."""
    refused = command[1:3] == ["-m", "moelight.cli.main"] and command[command.index("--host-memory") + 1] == "1"
    if refused:
        return moelight_inside(*command[3:])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return run(command, env=environment, **options)  # noqa: PLW1510 - as told


@pytest.mark.thorough
def test_the_resident_set_stays_within_the_budget(report: dict[str, Any]) -> None:
    for row in report["budgets"]:
        assert row["peak_rss_bytes"] <= row["bound_bytes"]


@pytest.mark.thorough
def test_the_least_budget_that_a_refusal_names_is_enough_and_streams(report: dict[str, Any]) -> None:
    least = report["budgets"][-1]
    assert least["passes"] > 0
    assert least["disk_bytes"] > 0
