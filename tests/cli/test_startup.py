"""The program starts at once: no torch for help, version and refusals."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.cli.program import ROOT, moelight

START_S = 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--help"], ["--version"], []])
def test_torch_is_not_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'rich', 'huggingface_hub'}; "
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
