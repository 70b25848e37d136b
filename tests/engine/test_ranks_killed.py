"""A job of two ranks of which one is killed at random moments: one clear line, nothing left behind, and the same
command goes on. In the end its rows are those of an undisturbed run of one process."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moelight.cli.main import main
from tests.cases import exhaustive
from tests.engines import Tiny
from tests.process import holds_at_last

ROWS, KILLS_OF_A_JOB = 32, 2
LOST = "moelight: error: rank 1 of 2 ended by signal 9; run the same command again: finished rows are kept"


@pytest.fixture(scope="module")
def job(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Any]]:
    """The command but for its output, and the rows of an undisturbed run."""
    folder, draw = tmp_path_factory.mktemp("job"), random.Random(7)
    model = tiny("mixtral", num_local_experts=4, num_attention_heads=4, num_key_value_heads=2)
    rows = [
        {"prompt": f"row {n}", "max_tokens": draw.choice([1, 8, 30]), "temperature": float(n % 2), "seed": n}
        for n in range(ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps({**row, "ignore_eos": True}) + "\n" for row in rows))
    options = ["--model", str(model), "--dtype", "float32", "--host-memory", "1GiB", "--batch-size", "4"]
    command = ["generate", str(folder / "in.jsonl"), *options, "--sync-interval", "0.02", "--no-show"]
    assert main([*command, "-o", str(folder / "out.jsonl")]) == 0
    return command, rows_of(folder / "out.jsonl")


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", exhaustive(range(10), but=[0]))
def test_a_job_goes_on_when_a_rank_was_killed(job: tuple[list[str], list[Any]], seed: int, tmp_path: Path) -> None:
    (arguments, expected), draw, output = job, random.Random(seed), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "moelight.cli.main", *arguments, "--tp", "2", "-o", str(output)]
    for rank in draw.sample([0, 1], KILLS_OF_A_JOB):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            pair = kill(process, rank, draw, output)
            _, messages = process.communicate()
        assert holds_at_last(lambda left=pair: all(is_gone(other) for other in left), 120.0)
        assert "Traceback" not in messages
        if process.returncode:  # else it was done before
            errors = [line for line in messages.splitlines() if "error" in line]
            assert (process.returncode, errors) == ((2, [LOST]) if rank else (-9, [])), messages
    subprocess.run(command, check=True, capture_output=True)
    assert rows_of(output) == expected


def kill(process: subprocess.Popen[str], rank: int, draw: random.Random, output: Path) -> list[psutil.Process]:
    """Kill ``rank`` once it has started and some rows are there, or at any moment before; returns both ranks."""
    first, others = psutil.Process(process.pid), list[psutil.Process]()
    rows, delay_s = draw.choice([0, draw.randrange(ROWS)]), draw.uniform(0.0, 1.5)
    while process.poll() is None and not others:
        time.sleep(0.01)
        with contextlib.suppress(psutil.Error):  # one that has ended
            others = [child for child in first.children() if "moelight.engine.rank_process" in child.cmdline()]
    while process.poll() is None and rows and (not output.exists() or output.read_bytes().count(b"\n") < rows):
        time.sleep(0.002)
    if not rows:
        time.sleep(delay_s)
    pair = [first, *others]
    if process.poll() is None:
        pair[rank].kill()
    return pair


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
