"""``moelight doctor`` says what there is, for people and for programs, with and without the extension."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from moelight import __version__
from moelight.cli import facts
from moelight.kernels import native
from moelight.kernels.serving import serving
from tests.cli.program import ROOT, moelight


def test_facts_as_json() -> None:
    done = moelight("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["moelight"] == __version__
    assert found["libraries"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["extension"]["available"] == native.available()
    assert [row["operation"] for row in found["kernels"]] == [row.operation for row in serving()]
    memory = found["memory"]
    assert 0 < memory["available_bytes"] <= memory["limit_bytes"] <= memory["physical_bytes"]
    assert 1 <= found["processor"]["usable"] <= found["processor"]["threads"] <= os.cpu_count()
    assert found["torch"]["fault"] is None


def test_facts_for_people() -> None:
    done = moelight("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for row in serving():
        assert row.operation in done.stdout
    for said in ("moelight", "torch", "memory", "physical", "instructions", "kernels", "served by", "why"):
        assert said in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_missing_extension_is_said_with_what_to_do() -> None:
    """Stand-in for an install without a compiler: the extension cannot be imported."""
    code = (
        "import sys; sys.modules['moelight.kernels._native'] = None; "
        "from moelight.cli.main import main; sys.exit(main(['doctor']))"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    text = " ".join(done.stdout.split())
    assert "native kernels are missing" in text and "C++20 compiler" in text and "pip install" in text
    assert "avx512 of" not in text


def test_a_broken_torch_is_a_fact_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = facts.facts()
    assert found["torch"]["fault"]
    facts.print_facts(found)
    assert "does not load" in capsys.readouterr().out


def test_a_limit_below_the_physical_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts.facts()
    found["memory"]["limit_bytes"] = 1 << 30
    facts.print_facts(found)
    assert "1.0GiB is the limit of this control group" in capsys.readouterr().out
