"""What ``generate`` plans on a machine without a GPU: orders of work by name, and the memory that a dry run shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moelight.scheduler import SCHEDULES
from tests.cases import thorough
from tests.cli.program import moelight_inside, read_rows, write_prompts

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "p.jsonl"
    return write_prompts(path, {"prompt": "add 1 and 2 ="}, {"prompt": "add 30 and 4 ="})


@pytest.fixture(scope="module")
def usual(prompts: Path) -> list[Any]:
    return read_rows(moelight_inside("generate", prompts, "--device", "cpu", "--max-tokens", "4").stdout)


@pytest.mark.parametrize("schedule", thorough(SCHEDULES, but=[*SCHEDULES][::3]))
def test_every_order_runs_or_says_that_it_needs_a_gpu(schedule: str, prompts: Path, usual: list[Any]) -> None:
    done = moelight_inside("generate", prompts, "--device", "cpu", "--schedule", schedule, "--max-tokens", "4")
    if schedule == "flexgen-c":
        assert done.returncode == 2 and "schedule 'flexgen-c' needs a GPU" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert read_rows(done.stdout) == usual


def test_a_dry_run_shows_no_disk_that_nothing_uses(prompts: Path) -> None:
    shown = moelight_inside("generate", prompts, "--device", "cpu", "--dry-run")
    assert shown.returncode == 0
    memory = shown.stdout[shown.stdout.index("memory") : shown.stdout.index("time, if")]
    assert "host" in memory and "disk" not in memory and "system" not in memory
    result = json.loads(moelight_inside("generate", prompts, "--device", "cpu", "--dry-run", "--json").stdout)
    assert {tier: sum(use["by_purpose"].values()) for tier, use in result["plan"]["memory"].items()}["disk"] == 0
