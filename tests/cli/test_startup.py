"""The program starts at once: no torch for help, version and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from moelight.cli.main import COMMANDS, app
from tests.cli.program import ROOT

QUESTION = ["--hw", "t4", "--model", "demo", "--num-requests", "4", "--gen-len", "2", "--fix", "schedule=serial"]


def test_help_imports_nothing_heavy() -> None:
    """One process asks for the help of every command, and says after each what it has imported."""
    code = (
        "import sys; from moelight.cli.main import COMMANDS, main\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'rich', 'huggingface_hub', 'starlette'}\n"
        "for words in (['--version'], [], ['--help'], *([name, '--help'] for name in COMMANDS)):\n"
        "    print(main(words), words, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 3 + len(COMMANDS)
    for line in lines:
        assert line.startswith("0 [") and line.endswith(" []"), line
    assert all(name in done.stdout for name in COMMANDS)


def test_a_command_imports_its_own_files() -> None:
    """What help costs is the interpreter and typer: of the package it loads one file and the errors."""
    code = (
        "import sys; from moelight.cli.main import main\n"
        "for words in (['--help'], ['roofline', '--help']):\n"
        "    print(main(words), *(name for name in sys.modules if name.startswith('moelight.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    (ended, *first), (ended_too, *second) = (line.replace("moelight.", "").split() for line in done.stderr.splitlines())
    assert ended == ended_too == "0"
    assert set(first) == {"cli", "cli.main", "core", "core.errors"}
    drawing = {"cli.options", "cli.tables", "observe", "observe.number_format"}
    assert set(second) - set(first) == {"cli.roofline", "cli.planning_options", "core.units", *drawing}


def test_help_says_what_the_commands_say() -> None:
    program = typer.main.get_group(app)
    assert list(program.commands) == list(COMMANDS)
    for name, summary in COMMANDS.items():
        help_ = " ".join(program.commands[name].help.split("\n\n")[0].split())
        assert help_ == summary or help_.startswith(f"{summary} "), name
        assert program.commands[name].name == name


def test_version() -> None:
    from moelight import __version__

    package = [sys.executable, "-m", "moelight", "--version"]
    done = subprocess.run(package, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"moelight {__version__}\n"


def check_without_torch(*commands: list[str], code: int = 0) -> None:
    """One process runs the commands: each ends with ``code``, leaves torch alone, and says something."""
    program = (
        "import contextlib, io, json, sys; from moelight.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):\n"
        "        code = main(words)\n"
        "    print(code, 'torch' in sys.modules, len(out.getvalue()) > 1)"
    )
    inputs = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(inputs, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, command in zip(done.stdout.splitlines(), commands, strict=True):
        assert line == f"{code} False True", command


def test_planning_and_reporting_need_no_torch(tmp_path: Path) -> None:
    trace, plot, roof = (str(tmp_path / name) for name in ("t.json", "p.png", "r.png"))
    check_without_torch(
        ["optimize", *QUESTION],
        ["optimize", *QUESTION, "--json"],
        ["simulate", *QUESTION, "--schedule", "all", "--trace", trace, "--plot", plot],
        ["roofline", *QUESTION, "--plot", roof],
        ["inspect", "demo", "--hw", "cpu-avx2", "--num-requests", "4"],
        ["report", trace],
        ["models"],
        ["models", "--json"],
    )


@pytest.mark.thorough
def test_a_refused_job_does_not_wait_for_torch(tmp_path: Path) -> None:
    check_without_torch(["generate", str(tmp_path / "none.jsonl")], code=2)
