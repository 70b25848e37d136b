"""``moelight simulate``: orders of work side by side, a trace and a picture of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from moelight.core.policy import Policy, Shares
from moelight.observe.trace import read_trace
from moelight.profiles.policy_files import policy_text
from moelight.scheduler import SCHEDULES
from tests.cli.program import moelight_inside as run

WORK = ("--num-requests", "24", "--prompt-len", "12", "--gen-len", "8")
SMALL = ("--hw", "t4", "--model", "demo", *WORK)
STREAMED = Policy(
    model="demo",
    batch_size=12,
    micro_batch_size=4,
    micro_batch_tokens=32,
    kv_tokens=1024,
    attention_device="cpu",
    ffn_device="gpu",
    weights=Shares(device=0.25, host=0.5, disk=0.25),
)


def simulation(*arguments: str | Path) -> dict[str, Any]:
    done = run("simulate", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(STREAMED))
    return path


def test_every_order_that_the_devices_allow_best_first(policy: Path) -> None:
    result = simulation("--hw", "t4", *WORK, "--policy", policy, "--schedule", "all")
    names = [item["schedule"] for item in result["schedules"]]
    assert set(names) == set(SCHEDULES) - {"flexgen"}  # which attends on the GPU
    speeds = [item["tokens_per_s"] for item in result["schedules"]]
    assert speeds == sorted(speeds, reverse=True)
    assert names[-1] == "serial" and names[0] in ("cgopipe", "module")
    assert result["policy"]["batch_size"] == 12 and result["hardware"] == "t4"


def test_a_pass_moves_what_the_policy_streams(policy: Path) -> None:
    result = simulation("--hw", "t4", *WORK, "--policy", policy, "--schedule", "cgopipe")
    (only,) = result["schedules"]
    for kind in ("decode", "with_prompts"):
        item = only[kind]
        assert item["pass_s"] > 0 and 0 <= item["idle_share"] < 1
        assert set(item["lanes"]) == {"disk", "stage", "h2d", "d2h", "device", "cpu"}
        for lane in item["lanes"].values():
            assert 0 < lane["busy_s"] <= item["pass_s"] * 1.001
            assert lane["share"] == pytest.approx(lane["busy_s"] / item["pass_s"])
        assert item["lanes"][item["binding"]]["busy_s"] == max(lane["busy_s"] for lane in item["lanes"].values())
        page, pages = 96 * 1024, 32
        assert item["lanes"]["disk"]["bytes"] == pages // 4 * page
        assert item["lanes"]["stage"]["bytes"] == pages // 2 * page
        assert item["lanes"]["h2d"]["bytes"] >= 3 * pages // 4 * page
    assert (only["decode"]["decode_tokens"], only["decode"]["prompt_tokens"]) == (12, 0)
    assert only["with_prompts"]["prompt_tokens"] > 0
    assert only["decode"]["decode_tokens_per_s"] == pytest.approx(12 / only["decode"]["pass_s"])


def test_without_a_gpu(tmp_path: Path) -> None:
    result = simulation("--hw", "cpu-avx2", "--model", "demo", *WORK, "--schedule", "all")
    for item in result["schedules"]:
        assert set(item["decode"]["lanes"]) <= {"cpu", "disk"}
        assert item["decode"]["pass_s"] == pytest.approx(item["estimate"]["pass_s"], rel=0.1)


def test_one_policy_on_another_model(policy: Path) -> None:
    result = simulation("--hw", "t4", *WORK, "--policy", policy, "--model", "olmoe-1b-7b")
    assert result["policy"]["model"] == "olmoe-1b-7b"
    assert result["schedules"][0]["decode"]["lanes"]["h2d"]["bytes"] > 1 << 30


def test_a_trace_that_can_be_reported(policy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "sim.json"
    done = run("simulate", "--hw", "t4", *WORK, "--policy", policy, "--passes", "5", "--trace", trace)
    assert (done.returncode, done.stderr) == (0, "") and f"trace: {trace}" in done.stdout.replace("\n", "")
    result = read_trace(trace)
    assert set(result.bars.passes) == set(range(6))  # one with prompts, five that decode
    assert result.about.source == "simulated" and result.about.hardware == "t4"
    assert result.about.policy["schedule"] == "cgopipe" and result.about.pass_s > 0
    assert set(result.about.predicted) <= {"disk", "stage", "h2d", "d2h", "device", "cpu"}
    assert set(result.about.roofs) == {"disk", "stage", "h2d", "d2h"}
    assert result.about.predicted["disk"].bytes == 8 * 96 * 1024
    reported = run("report", trace)
    assert reported.returncode == 0 and "6 passes simulated" in reported.stdout


def test_drafts_gain_where_a_link_binds_and_more_if_more_are_accepted(policy: Path) -> None:
    asked = "--policy", policy, "--hw", "t4", *WORK, "--acceptance"
    gains = [simulation(*asked, share)["drafts"] for share in ("0", "0.8")]
    assert (gains[0]["num_speculative_tokens"], gains[0]["gain"]) == (0, 1.0)
    assert gains[1]["num_speculative_tokens"] >= 1
    assert gains[1]["gain"] > 1.2
    done = run("simulate", *asked, "0.8")
    assert "drafts, 80 % of them accepted" in done.stdout


def test_a_picture(policy: Path, tmp_path: Path) -> None:
    """Of one schedule as SVG and PDF: the file's name says what is written."""
    pytest.importorskip("matplotlib")
    for name, begin, which in (
        ("p.png", b"\x89PNG", "all"),
        ("p.svg", b"<?xml", "cgopipe"),
        ("p.pdf", b"%PDF", "cgopipe"),
    ):
        path = tmp_path / name
        done = run("simulate", "--hw", "t4", *WORK, "--policy", policy, "--schedule", which, "--plot", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert path.read_bytes().startswith(begin)
    assert struct.unpack(">I", (tmp_path / "p.png").read_bytes()[16:20])[0] == 1200


def test_the_tables_fit_the_terminal(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("simulate", "--hw", "t4", *WORK, "--policy", policy, "--schedule", "all")
    text = run(*arguments).stdout
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for message in ("demo on t4", "N = 12 in micro-batches of 4", "best first", "flexgen-loop", "binding lane idle"):
        assert message in text


REFUSED = {
    "nothing named": ("--hw t4", ["--model", "--policy"]),
    "unknown schedule": ("--hw t4 --model demo --schedule cgopip", ["cgopip", "'cgopipe'", "flexgen"]),
    "not on these devices": (
        "--hw cpu-avx2 --model demo --fix batch_size=8 --schedule flexgen-c",
        ["flexgen-c", "GPU"],
    ),
    "attention elsewhere": ("--hw t4 --policy @/policy.yaml --schedule flexgen", ["flexgen", "attention_device"]),
    "no GPU for the policy": ("--hw cpu-avx2 --policy @/policy.yaml", ["@/policy.yaml", "GPU", "cpu-avx2"]),
    "a policy and a fix": ("--hw t4 --policy @/policy.yaml --fix ffn=gpu", ["--policy", "--fix"]),
    "a policy and a limit": ("--hw t4 --policy @/policy.yaml --host-memory 1GiB", ["--policy", "--host-memory"]),
    "no such policy": ("--hw t4 --policy @/none.yaml", ["@/none.yaml"]),
    "no passes": ("--hw t4 --model demo --passes 0", ["--passes"]),
    "no picture": ("--hw t4 --model demo --plot @/plot.bmp", ["@/plot.bmp", ".png"]),
    "trace in no directory": ("--hw t4 --model demo --trace @/none/t.json", ["@/none"]),
    "unknown machine": ("--hw l44 --model demo", ["l44", "'l4'"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_clear_line(kind: str, policy: Path) -> None:
    arguments, words = REFUSED[kind]
    done = run("simulate", *arguments.replace("@", str(policy.parent)).split(), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moelight: error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word.replace("@", str(policy.parent)) in done.stderr
    assert [path.name for path in policy.parent.iterdir()] == ["policy.yaml"]
