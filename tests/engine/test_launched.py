"""Ranks that torchrun starts: one command, whose rows are those of one process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moelight.cli.main import main
from moelight.core.errors import ConfigError
from moelight.engine import launched
from moelight.engine.launched import Launch, leading
from moelight.engine.ranks import count_ranks
from tests.engines import Tiny

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SERVED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def job(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The command but for its output, and its rows from one process."""
    folder = tmp_path_factory.mktemp("job")
    model = tiny("mixtral", num_local_experts=4, num_attention_heads=4, num_key_value_heads=2)
    rows = ({"prompt": f"row {n}", "max_tokens": 20, "ignore_eos": True} for n in range(16))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(model), "--dtype", "float32", "--host-memory", "1GiB", "--batch-size", "4"]
    command = ["generate", str(folder / "in.jsonl"), *options, "--sync-interval", "0.02", "--no-show"]
    assert main([*command, "-o", str(folder / "out.jsonl")]) == 0
    return command, (folder / "out.jsonl").read_text()


def under_torchrun(arguments: list[str], output: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, "-m", "moelight.cli.main", *arguments, "-o", str(output)]


@pytest.mark.thorough
def test_torchrun_starts_the_ranks(job: tuple[list[str], str], tmp_path: Path) -> None:
    command, output = under_torchrun(job[0], tmp_path / "out.jsonl"), tmp_path / "out.jsonl"
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert output.read_text() == job[1]
    assert done.stderr.count("16 completions") == 1


@pytest.mark.thorough
def test_torchrun_plans_once() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "moelight.cli.main", "inspect", "demo"]
    alone = subprocess.run([sys.executable, *command[6:]], check=True, capture_output=True, text=True)
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == alone.stdout


@pytest.mark.exhaustive
def test_the_same_command_goes_on_when_a_rank_was_killed(job: tuple[list[str], str], tmp_path: Path) -> None:
    command, output = under_torchrun(job[0], tmp_path / "out.jsonl"), tmp_path / "out.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (output.exists() and output.read_bytes()):
            time.sleep(0.002)
        for other in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if other.environ().get("RANK") == "1":
                    other.kill()
        process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert output.read_text() == job[1]


def test_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**TWO, **SERVED}:
        monkeypatch.delenv(name, raising=False)
    assert Launch.read() is None
    for name, value in {**TWO, **SERVED}.items():
        monkeypatch.setenv(name, value)
    assert Launch.read() == Launch(0, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="2 of 4 ranks are on this machine"):
        Launch.read()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert Launch.read() is None
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK must be a number, not 'first'"):
        Launch.read()


class Announced:
    """In place of torchrun's store."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.tasks = launch, list[dict[str, Any]]()

    def announce(self, **task: Any) -> None:
        self.tasks.append(task)


def test_other_ranks_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Announced]()
    monkeypatch.setattr(launched, "LaunchedRanks", lambda launch: made.append(Announced(launch)) or made[-1])
    with leading(Launch(0, 2)):
        assert count_ranks("1", "cpu") == count_ranks("auto", "cpu") == count_ranks("2", "cpu") == 2
        with pytest.raises(ConfigError, match="--tp 4: torchrun started 2 ranks; leave --tp out"):
            count_ranks("4", "cpu")
    assert made[0].tasks == [{}] and count_ranks("1", "cpu") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("command", [["--version"], ["models", "--help"], ["generate", "--help"], ["generate", "-h"]])
def test_commands_without_ranks_run_on_rank_0(
    command: list[str], rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others say nothing; none looks for the others, which nobody started here."""
    for name, value in {**TWO, **SERVED, "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 0
    shown = capsys.readouterr()
    assert bool(shown.out) == (rank == "0") and not shown.err
    assert Launch.read() is None  # processes that the command starts are no ranks
