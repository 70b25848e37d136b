"""``moelight policy replay``, ``tune`` and ``auto``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moelight.experts.policy import Capacity
from moelight.lang.files import load_expert_policy
from tests.cli.program import ROOT, moelight_inside
from tests.cli.test_startup import check_without_torch
from tests.experts.traces import skewed, write_trace

EXAMPLES = ROOT / "examples" / "policies"
KEYS = ["policy", "accesses", "hits", "misses", "hit_rate", "evictions", "max_resident", "bytes", "stall_s"]
ON = ("--model", "olmoe-1b-7b", "--hw", "t4")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = skewed(8, layers=16, experts=64, top_k=8)
    return write_trace(tmp_path_factory.mktemp("trace") / "t.jsonl", rows)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = skewed(2, layers=16, experts=64, top_k=8)
    return write_trace(tmp_path_factory.mktemp("trace") / "t.jsonl", rows)


def small(tmp_path: Path, name: str = "small", more: str = "") -> Path:
    path = tmp_path / f"{name}.moe"
    path.write_text(f"policy {name} {{ cache {{ capacity = 64 }} {more} }}\n")
    return path


def test_json_has_one_row_a_policy_in_order(trace: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.moe"
    both.write_text(small(tmp_path, "a").read_text() + small(tmp_path, "b").read_text())
    done = moelight_inside("policy", "replay", trace, "--policy", both, "--policy", small(tmp_path, "c"), "--json")
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == ["a", "b", "c"] and done.returncode == 0
    for row in rows:
        assert list(row) == [*KEYS, "tokens_per_s"]
        assert row["accesses"] == 8 * 16 * 8 == row["hits"] + row["misses"]
        assert row["hit_rate"] == row["hits"] / row["accesses"] and row["max_resident"] == 64
        assert (row["bytes"], row["stall_s"], row["tokens_per_s"]) == (None, None, None)
    with_model = ("policy", "replay", trace, "--policy", small(tmp_path, "a"), "--json", *ON[:2])
    [row] = json.loads(moelight_inside(*with_model).stdout)
    assert row["bytes"] == row["misses"] * 12 * 2**20 and row["tokens_per_s"] is None
    [row] = json.loads(moelight_inside(*with_model, *ON[2:]).stdout)
    assert 0 < row["stall_s"] < 8 / row["tokens_per_s"]


def test_the_table_says_what_was_replayed(trace: Path, tmp_path: Path) -> None:
    more = "prefetch { predictor = next_router }"
    files = ("--policy", small(tmp_path, "plain"), "--policy", small(tmp_path, "foresees", more))
    done = moelight_inside("policy", "replay", trace, *files, *ON, "--bound")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "t.jsonl of olmoe-1b-7b on t4"
    assert lines[1] == "1,024 accesses, 16 layers of 64 experts"
    assert [line.split()[0] for line in lines[3:7]] == ["policy", "plain", "foresees", "belady@64"]
    assert "foresees: next_router predicts from hidden states" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "which policy? give --policy FILE.moe"),
        (("--policy", "@", "--hw", "t4"), "give --model, too"),
        (("--policy", "@", "--model", "mixtral"), "t.jsonl:1: expert"),
        (("--policy", "@", "--model", "deepseek-v2-lite"), "t.jsonl:1: layer 0 is none of"),
        (("--policy", "none.moe"), "none.moe: cannot be read"),
    ],
)
def test_refusals_of_replay(trace: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    file = str(small(tmp_path))
    inputs = [file if argument == "@" else argument for argument in arguments]
    done = moelight_inside("policy", "replay", trace, *inputs)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_tune_writes_the_best_and_shows_the_front(short: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.moe"
    done = moelight_inside("policy", "tune", short, *ON, "--memory", "1GiB", "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"best", "front", "candidates", "replays", "rows"}
    assert result["best"] == result["front"][-1] and result["rows"] == 32
    assert [row["slots"] for row in result["candidates"]] == [64, 80]
    assert result["best"]["memory_bytes"] <= 2**30 and result["best"]["moe"].startswith("policy tuned_")
    best = load_expert_policy(out)
    assert out.read_text().startswith("# olmoe-1b-7b on t4, tuned to t.jsonl") and best.name in result["best"]["moe"]
    shown = moelight_inside("policy", "tune", short, *ON, "--memory", "1GiB")
    assert "bold: the fastest" in shown.stdout and "768.0MiB" in shown.stdout


def test_refusals_of_tune(trace: Path, tmp_path: Path) -> None:
    empty = write_trace(tmp_path / "empty.jsonl", [])
    for arguments, complaint in (
        ((trace, *ON, "--memory", "1MiB"), "--memory 1MiB is too little"),
        ((empty, *ON), "has no rows"),
        ((trace, *ON, "--json", "-o", "-"), "contradict each other"),
        ((trace, *ON, "-o", tmp_path), "it is a directory"),
    ):
        done = moelight_inside("policy", "tune", *arguments)
        assert (done.returncode, done.stdout) == (2, "") and complaint in done.stderr


def test_auto_says_why(tmp_path: Path) -> None:
    out = tmp_path / "auto.moe"
    shown = moelight_inside("policy", "auto", "--model", "deepseek-v2-lite", "--hw", "t4")
    assert moelight_inside("policy", "auto", "--model", "deepseek-v2-lite", "--hw", "t4", "-o", out).stdout == ""
    assert shown.returncode == 0 and out.read_text() == shown.stdout
    lines = shown.stdout.splitlines()
    capacity = next(at for at, line in enumerate(lines) if "capacity =" in line)
    assert lines[capacity - 1].lstrip().startswith("#") and max(map(len, lines)) <= 100
    assert load_expert_policy(out).cache.capacity == Capacity(value=37.5, unit="percent")
    checked = moelight_inside("policy", "check", out, "--json")
    assert json.loads(checked.stdout)[0]["warnings"] == [] and checked.returncode == 0


@pytest.mark.thorough
def test_no_torch(trace: Path) -> None:
    replay = ["policy", "replay", str(trace), "--policy", str(EXAMPLES / "default.moe"), *ON]
    check_without_torch(replay, ["policy", "auto", "--model", "demo", "--hw", "t4"])
