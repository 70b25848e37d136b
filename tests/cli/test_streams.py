"""Standard streams that are closed or full: the job is done, the exit code is the job's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import ROOT, moelight, write_prompts

CLOSED = {"stdout": ">&-", "all": "<&- >&- 2>&-", "full": "2>/dev/full"}


def run(streams: str, *arguments: str | Path) -> int:
    command = [sys.executable, "-m", "moelight.cli.main", *map(str, arguments)]
    shell = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *command]
    return subprocess.run(shell, cwd=ROOT, capture_output=True, check=False).returncode


@pytest.mark.parametrize("streams", ["all", "full"])
def test_a_job_needs_no_standard_streams(streams: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "add 1 and 2 ="}, "{", {"prompt": "add 3 and 4 ="})
    out = tmp_path / "out.jsonl"
    assert run(CLOSED[streams], "generate", prompts, "-o", out, "--max-tokens", "1") == 1
    rows = [json.loads(each) for each in out.read_text().splitlines()]
    assert ["error" in row for row in rows] == [False, True, False]


@pytest.mark.parametrize("streams", ["stdout", "all", "full"])
def test_a_refusal_keeps_its_exit_code(streams: str, tmp_path: Path) -> None:
    assert run(CLOSED[streams], "generate", tmp_path / "none", "-o", tmp_path / "out") == 2


def test_rows_are_not_lost_in_a_closed_output(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "{")
    assert run(">&-", "generate", prompts) == 2
    assert run(">/dev/full", "generate", prompts) == 74
    assert run("<&-", "generate", "-") == 2


def test_a_fault_shows_its_stack_where_asked() -> None:
    """``MOELIGHT_FAULT`` is for tests: what is wrong in it is no mistake of a user."""
    broken = {"env_extra": {"MOELIGHT_FAULT": "no fault"}}
    quiet, loud = moelight("generate", "x", **broken), moelight("--traceback", "generate", "x", **broken)
    assert (quiet.returncode, loud.returncode) == (70, 70)
    assert quiet.stderr.count("\n") == 1 and "--traceback" in quiet.stderr
    assert "Traceback (most recent call last)" in loud.stderr and "faults.py" in loud.stderr
