"""Standard streams that are closed or full: the job is done, the exit code is the job's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import PLANNED, ROOT, Program, moelight, read_rows, write_prompts


def run(streams: str, *arguments: str | Path) -> int:
    """The exit code, with one word a stream: `null`, `full`, or `closed`."""
    opened = {"null": os.open(os.devnull, os.O_RDWR), "full": os.open("/dev/full", os.O_RDWR)}
    try:
        return Program("moelight.cli.main", *arguments, streams=[opened.get(item) for item in streams.split()]).wait()
    finally:
        for number in opened.values():
            os.close(number)


def run_by_a_shell(streams: str, *arguments: str | Path) -> int:
    """The same with an interpreter and its libraries started and ended anew: redirections of a shell."""
    command = [sys.executable, "-m", "moelight.cli.main", *map(str, arguments)]
    shell = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *command]
    return subprocess.run(shell, cwd=ROOT, capture_output=True, check=False).returncode


@pytest.mark.thorough
def test_a_job_needs_no_standard_streams(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "add 1 and 2 ="}, "{", {"prompt": "add 3 and 4 ="})
    out = tmp_path / "out.jsonl"
    arguments = ["generate", prompts, "-o", out, "--max-tokens", "1", *PLANNED]
    assert run_by_a_shell("<&- >&- 2>&-", *arguments) == 1
    rows = read_rows(out.read_text())
    assert ["error" in row for row in rows] == [False, True, False]
    assert run("null null full", *arguments, "--restart") == 1
    assert read_rows(out.read_text()) == rows


@pytest.mark.thorough
def test_a_job_needs_no_folder_beside_its_own(tmp_path: Path) -> None:
    """Nor a sensible number of threads: neither may be there where a cluster starts it."""
    prompts, out, nowhere = (
        write_prompts(tmp_path / "p.jsonl", {"prompt": "add 1 and 2 ="}),
        tmp_path / "o",
        "/dev/null/x",
    )
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "MOELIGHT_CACHE"), nowhere)
    command = [sys.executable, "-m", "moelight.cli.main", "generate", prompts, "-o", out, "--max-tokens", "1"]
    env = {**os.environ, **folders, "OMP_NUM_THREADS": "2,1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert read_rows(out.read_text())[0]["usage"]["completion_tokens"] == 1


@pytest.mark.thorough
def test_a_refusal_keeps_its_exit_code(tmp_path: Path) -> None:
    refused = ("generate", tmp_path / "none", "-o", tmp_path / "out")
    assert run("null closed null", *refused) == run("closed closed closed", *refused) == 2
    assert run_by_a_shell("2>/dev/full", *refused) == 2


def test_rows_are_not_lost_in_a_closed_output(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "{")
    assert run("null closed null", "generate", prompts) == 2
    assert run("null full null", "generate", prompts, *PLANNED) == 74
    assert run("closed null null", "generate", "-") == 2


def test_a_fault_shows_its_stack_where_asked() -> None:
    """``MOELIGHT_FAULT`` is for tests: what is wrong in it is no mistake of a user."""
    broken = {"env_extra": {"MOELIGHT_FAULT": "no fault"}}
    quiet, loud = moelight("generate", "x", **broken), moelight("--traceback", "generate", "x", **broken)
    assert (quiet.returncode, loud.returncode) == (70, 70)
    assert quiet.stderr.count("\n") == 1 and "--traceback" in quiet.stderr
    assert "Traceback (most recent call last)" in loud.stderr and "faults.py" in loud.stderr
