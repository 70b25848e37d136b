"""The program starts at once: no torch for help, version and refusals."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import ROOT, moelight
from tests.observe.traces import write_passes

START_S = 0.3


COMMANDS = (
    "generate",
    "optimize",
    "simulate",
    "roofline",
    "report",
    "inspect",
    "profile",
    "doctor",
    "lm-eval",
    "policy",
)
PLANNED = ["--hw", "t4", "--model", "demo", "--num-requests", "4", "--gen-len", "2"]


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in (*COMMANDS, "serve-batch")), ["--version"], []]
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'rich', 'huggingface_hub', 'starlette'}; "
        "print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "0 []\n"
    assert done.stdout


def test_help_takes_less_than_a_third_of_a_second() -> None:
    """Processor time, which other work on the machine does not lengthen; the best of three."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    spent = []
    for _ in range(3):
        before = used()
        assert moelight("--help").returncode == 0
        spent.append(used() - before)
    assert min(spent) < START_S


def test_version() -> None:
    from moelight import __version__

    assert moelight("--version").stdout == f"moelight {__version__}\n"


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
