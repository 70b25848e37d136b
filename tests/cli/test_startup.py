"""The program starts at once: no torch for help, version and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from moelight.cli.main import COMMANDS, app
from tests.cli.program import ROOT, moelight
from tests.observe.traces import write_passes

PLANNED = ["--hw", "t4", "--model", "demo", "--num-requests", "4", "--gen-len", "2"]


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


def imported(*arguments: str) -> set[str]:
    """The modules of ours that a command line loads."""
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, *[name for name in sys.modules if name.startswith('moelight.')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, *names = done.stderr.split()
    assert code == "0"
    return {name.removeprefix("moelight.") for name in names}


PROGRAM = {"cli", "cli.main", "core", "core.errors"}


def test_help_imports_no_command() -> None:
    """What help costs is the interpreter and typer: of the package it loads one file and the errors."""
    assert imported("--help") == PROGRAM


def test_a_command_imports_its_own_files() -> None:
    found = imported("roofline", "--help")
    drawing = {"cli.options", "cli.tables", "observe", "observe.number_format"}
    assert found - PROGRAM == {"cli.roofline", "cli.planning_options", "core.units", *drawing}


def test_help_says_what_the_commands_say() -> None:
    program = typer.main.get_command(app)
    assert list(program.commands) == list(COMMANDS)
    for name, summary in COMMANDS.items():
        help_ = " ".join(program.commands[name].help.split("\n\n")[0].split())
        assert help_ == summary or help_.startswith(f"{summary} "), name
        assert program.commands[name].name == name


def test_version() -> None:
    from moelight import __version__

    assert moelight("--version").stdout == f"moelight {__version__}\n"
    package = [sys.executable, "-m", "moelight", "--version"]
    done = subprocess.run(package, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"moelight {__version__}\n"


def without_torch(*arguments: str) -> str:
    """What the command prints; it must leave torch alone and end well."""
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "0 False\n"
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimize", *PLANNED],
        ["optimize", *PLANNED, "--json"],
        ["simulate", *PLANNED, "--schedule", "all", "--trace", "@/t.json", "--plot", "@/p.png"],
        ["roofline", *PLANNED, "--plot", "@/r.png"],
        ["inspect", "demo", "--hw", "t4", "--num-requests", "4"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_planning_needs_no_torch(arguments: list[str], tmp_path: Path) -> None:
    assert without_torch(*(argument.replace("@", str(tmp_path)) for argument in arguments))


def test_reporting_needs_no_torch(tmp_path: Path) -> None:
    assert without_torch("report", str(write_passes(tmp_path / "t.json", 2)))


def test_a_refused_job_does_not_wait_for_torch(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    arguments = ["generate", str(tmp_path / "none.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "2 False"
