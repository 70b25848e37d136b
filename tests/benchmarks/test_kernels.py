"""The kernel benchmark runs, says what is absent, and its roofs are roofs; how fast anything is, is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.kernels import native

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
ONLY = ["latent 16h 16", "E64 r4", "linear 1 ", "copy 4"]

pytestmark = pytest.mark.skipif(not native.available(), reason="nothing to measure without the extension")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of four cases; the environment given for vLLM has no vLLM, and none is given for IPEX."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--vllm-python", sys.executable, "--only", *ONLY]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_every_contender_is_named(report: dict[str, Any]) -> None:
    rows = {(row["case"].split()[0], row["who"]): row for row in report["rows"]}
    assert {who for family, who in rows if family == "experts"} == {
        "moelight",
        "moelight int8",
        "moelight int4",
        "torch grouped_mm",
        "torch linear loop",
        "vLLM",
    }
    assert all(row["ms"] > 0 for row in report["rows"] if "unable" not in row)
    assert rows["linear", "moelight int8"]["of"] == "x moelight"


def test_the_absent_say_why(report: dict[str, Any]) -> None:
    unable = {row["who"]: row["unable"] for row in report["rows"] if "unable" in row}
    assert unable == {"vLLM": "absent: its process ended with 1"}
    assert report["peers"][1] == "ipex: no environment given"


def test_roofs(report: dict[str, Any]) -> None:
    assert report["read_bytes_per_s"] > 1e8
    assert report["bf16_flops"] > 1e8
    assert all(row["share"] > 0 for row in report["rows"] if row["who"] == "moelight")


def test_a_case_that_is_not_there() -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--only", "nonesuch"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no case is named so: nonesuch" in done.stderr
