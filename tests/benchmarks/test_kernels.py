"""The kernel benchmark runs, says what is absent, and its roofs are roofs; how fast anything is, is no test."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.kernels import native
from tests.benchmarks.scripts import BENCHMARKS, ran

ONLY = ["latent 16h 16", "E4 r4", "linear 1 ", "copy 4"]
SMALLER = {"kernel_cases.experts.SHAPES": {"H256 I128 E4": (256, 128, 4)}, "kernel_cases.linear.SIDE": 512}

pytestmark = pytest.mark.skipif(not native.available(), reason="nothing to measure without the extension")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    """Of four cases; the environment given for vLLM has no vLLM, and none is given for IPEX."""
    bare = Path(sys.base_prefix, "bin", "python3")
    options = ["--quick", "--gib", 0.01, "--vllm-python", bare, "--out", out, "--only", *ONLY]
    return ran("kernels", *options, changes=SMALLER)


def test_every_contender_is_named(report: dict[str, Any]) -> None:
    rows = {(row["case"].split()[0], row["who"]): row for row in report["rows"]}
    assert {who for family, who in rows if family == "experts"} == {
        "moelight",
        "torch grouped_mm",
        "torch linear loop",
        "vLLM",
    }
    assert all(row["ms"] > 0 for row in report["rows"] if "unable" not in row)


def test_the_absent_say_why(report: dict[str, Any]) -> None:
    unable = {row["who"]: row["unable"] for row in report["rows"] if "unable" in row}
    assert unable == {"vLLM": "absent: its process ended with 1"}
    assert report["peers"][1] == "ipex: no environment given"


def test_roofs(report: dict[str, Any]) -> None:
    assert report["read_bytes_per_s"] > 1e8
    assert report["bf16_flops"] > 1e8
    assert all(row["share"] > 0 for row in report["rows"] if row["who"] == "moelight")


def test_the_files_of_a_run(report: dict[str, Any], out: Path) -> None:
    text, result = sorted(out.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert re.fullmatch(
        r"kernels_.+-2threads_[\d-]{10}\.md" if report["threads"] == 2 else r"kernels_.+\.md", text.name
    )
    assert json.loads(result.read_text(encoding="utf-8")) == report
    assert "linear 1 " in text.read_text(encoding="utf-8")


CPUINFO = {
    "zen3-avx2-8threads": ("AuthenticAMD", 25, 1, ["avx2"]),
    "zen4-avx512bf16-8threads": ("AuthenticAMD", 25, 17, ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]),
    "zen5-avx512bf16-8threads": ("AuthenticAMD", 26, 2, ["avx512f", "avx512_bf16"]),
    "sapphire-rapids-amx-8threads": ("GenuineIntel", 6, 143, ["avx512f", "avx512_bf16", "amx_bf16"]),
    "intel-avx512vnni-8threads": ("GenuineIntel", 6, 1, ["avx512f", "avx512_vnni"]),
}


@pytest.mark.parametrize("name", CPUINFO)
def test_names_of_machines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor, family, model, features = CPUINFO[name]
    lines = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
    (tmp_path / "cpuinfo").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    result = importlib.import_module("runner.report")
    monkeypatch.setattr(native, "cpu_features", lambda: {item: item in features for item in result._UNITS})
    assert result.machine_name(8, proc=tmp_path) == name


def test_a_case_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="no case is named so: nonesuch"):
        ran("kernels", "--quick", "--only", "nonesuch", changes={"kernels.Roofs": lambda *_: None})


def test_it_starts_again_with_short_spins() -> None:
    """Once, and with the same arguments."""
    program = (
        "import os, json, sys; from runner.threads import restart_with_short_spins\n"
        "restart_with_short_spins(); print(json.dumps([os.environ['GOMP_SPINCOUNT'], sys.argv[1:]]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", program, "--only", "copy 4"]
    message = subprocess.check_output(command, cwd=BENCHMARKS, env=environment, timeout=300)
    assert json.loads(message) == ["10000", ["--only", "copy 4"]]
