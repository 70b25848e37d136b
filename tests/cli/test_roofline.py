"""``moelight roofline`` and ``moelight inspect``: what a machine can do, what a model is made of."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.units import GiB
from moelight.profiles.policy_files import policy_text
from tests.cli.program import moelight_inside as run

WORK = ("--num-requests", "24", "--prompt-len", "12", "--gen-len", "8")
POLICY = Policy(
    model="mixtral",
    batch_size=3360,
    micro_batch_size=280,
    micro_batch_tokens=1024,
    attention_device="cpu",
    ffn_device="gpu",
    weights=Shares(device=1 / 16, host=15 / 16),
)


def answer(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(POLICY))
    return path


def test_roofs_and_turning_points_of_a_policy(policy: Path) -> None:
    result = answer("roofline", "--hw", "t4", "--policy", policy)
    assert (result["machine"], result["model"]) == ("t4", "mixtral-8x7b")
    assert (result["batch_size"], result["micro_batch_size"]) == (3360, 280)
    device = result["levels"][0]
    assert (device["name"], device["processor"]) == ("device", "gpu")
    assert device["peak_flops"] == 65e12 and device["bandwidth"] == 320e9 and device["link_bandwidth"] == 15.75e9
    first = next(mark for mark in result["turning_points"] if mark["name"] == "P1" and mark["far"] == "host")
    sustained = {level["name"]: level for level in result["sustained"]}
    assert sustained["device"]["link_bandwidth"] == pytest.approx(0.78 * 15.75e9)
    assert first["far_intensity"] == pytest.approx(
        sustained["host"]["peak_flops"] / sustained["device"]["link_bandwidth"]
    )
    work = {point["work"]: point for point in result["work"]}
    assert work["attention"]["bound"] == "memory" and work["ffn"]["bound"] == "link"
    assert work["ffn"]["home_intensity"] > work["ffn"]["intensity"]


def test_roofs_of_the_planners_own_policy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("roofline", "--hw", "t4", "--model", "demo", *WORK, "--plot", tmp_path / "roof.png")
    assert (done.returncode, done.stderr) == (0, "")
    for message in (
        "demo on t4",
        "roofs",
        "39.0 of 65.0 Tflop/s (GPU)",
        "240 of 320 GB/s",
        "turning points",
        "P1",
        "attention",
    ):
        assert message in done.stdout
    assert struct.unpack(">I", (tmp_path / "roof.png").read_bytes()[16:20])[0] == 1200


def test_the_tables_fit_the_terminal(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (("roofline", "--hw", "t4", "--policy", policy), ("inspect", "deepseek-v2-lite")):
        text = run(*arguments).stdout
        assert text and max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_a_model_from_its_config_alone(tmp_path: Path) -> None:
    result = answer("inspect", "mixtral")
    assert result["bytes_by_kind"]["experts"] == 84 * GiB
    assert result["page_bytes"] * result["pages"] == 84 * GiB
    assert result["kv_token_bytes"] == 128 * 1024
    assert result["parameters"] / 1e9 == pytest.approx(46.7, rel=0.001)
    assert sum(result["parameters_by_kind"].values()) == result["parameters"]
    assert sum(result["bytes_by_kind"].values()) == result["bytes"]
    assert "memory" not in result
    (tmp_path / "config.json").write_text((Path(__file__).parents[2] / "moelight/demo/config.json").read_text())
    assert answer("inspect", tmp_path)["parameters"] == answer("inspect", "demo")["parameters"]


@pytest.mark.thorough
def test_what_memory_a_machine_would_need(tmp_path: Path) -> None:
    result = answer("inspect", "demo", "--hw", "t4", *WORK)["memory"]
    for tier in ("device", "host"):
        assert result[tier]["least_bytes"] <= result[tier]["total_bytes"] <= result[tier]["capacity_bytes"]
    assert result["device"]["least_bytes"] == 0  # the CPU alone can do it
    alone = answer("inspect", "demo", "--hw", "cpu-avx2", *WORK)["memory"]
    least = alone["host"]["least_bytes"]
    question = ("optimize", "--hw", "cpu-avx2", "--model", "demo", *WORK)
    assert run(*question, "--host-memory", str(least)).returncode == 0
    short = run(*question, "--host-memory", str(least - 1))
    assert short.returncode == 2 and "--host-memory" in short.stderr


def test_an_inspection_for_people() -> None:
    done = run("inspect", "mixtral", "--hw", "t4", "--disk", "0")
    words = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, "")
    for message in (
        "mixtral-8x7b mixtral, bfloat16",
        "32 layers with 8 experts, 2 for each token",
        "46.7 billion parameters, 12.9 billion (28 %) active for a token",
        "experts 45.1 billion 84.0GiB",
        "336.0MiB, 256 of them",
        "memory on t4",
        "least",
    ):
        assert message in words, message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect"], ["MODEL"]),
        (["inspect", "mixtrall"], ["mixtrall", "mixtral-8x7b"]),
        (["inspect", "/none"], ["/none"]),
        (["inspect", "demo", "--hw", "l44"], ["l44", "'l4'"]),
        (["inspect", "mixtral", "--hw", "t4", "--host-memory", "4GiB", "--disk", "0"], ["--host-memory", "at least"]),
        (["roofline", "--hw", "t4"], ["--model", "--policy"]),
        (["roofline", "--hw", "t4", "--model", "demo", "--plot", "roof.bmp"], ["roof.bmp", ".png"]),
        (["roofline", "--hw", "t4", "--model", "demo", "--fix", "ffn=gpus"], ["ffn=gpus", "'gpu'"]),
    ],
)
def test_refused_in_one_clear_line(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moelight: error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
