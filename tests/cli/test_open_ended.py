"""A job without max_tokens: every answer may fill the context, in a cache that holds one of them and a half."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.program import DEMO, moelight, moelight_inside, write_prompts

CONTEXT, ROWS = 64, 9
SIZES = "{model: demo, batch_size: 6, micro_batch_size: 6, micro_batch_tokens: 24, kv_block_size: 16, kv_tokens: %d}"
FREE, FULL = ROWS * CONTEXT, CONTEXT + CONTEXT // 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of a short context, rows that never end by themselves, and a policy for each cache."""
    folder = tmp_path_factory.mktemp("open-ended")
    shutil.copytree(DEMO, folder / "model")
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    write_prompts(
        folder / "rows.jsonl", *({"prompt": f"add {n} and {n * n} =", "temperature": n % 2} for n in range(ROWS))
    )
    for cache in (FREE, FULL):
        (folder / f"{cache}.yaml").write_text(SIZES % cache)
    return folder


def command(job: Path, output: Path, cache: int, *more: str) -> list[str]:
    rows, policy = str(job / "rows.jsonl"), str(job / f"{cache}.yaml")
    fixed = ["--device", "cpu", "--ignore-eos", "--seed", "3", "--token-ids", *more]
    return ["generate", rows, "--model", str(job / "model"), "--policy", policy, "-o", str(output), *fixed]


@pytest.mark.thorough
def test_the_job_that_is_suspended_and_killed_has_the_rows_of_the_one_that_is_not(job: Path, tmp_path: Path) -> None:
    wanted, out, stats = tmp_path / "wanted.jsonl", tmp_path / "out.jsonl", tmp_path / "stats.json"
    assert moelight_inside(*command(job, wanted, FREE)).returncode == 0
    lengths = [json.loads(line)["usage"] for line in wanted.read_text().splitlines()]
    assert [length["prompt_tokens"] + length["completion_tokens"] for length in lengths] == [CONTEXT] * ROWS

    often = ("--sync-interval", "0", "--stats", str(stats))
    killed = moelight(*command(job, out, FULL, *often), env_extra={"MOELIGHT_FAULT": "after_journal_fsync:6:kill"})
    assert killed.returncode == -9
    changed = moelight_inside(*command(job, out, FULL, "--max-tokens", "64"))
    assert changed.returncode == 2
    assert "sampling.max_tokens: was null, is 64" in changed.stderr
    resumed = moelight_inside(*command(job, out, FULL, *often))
    assert resumed.returncode == 0
    assert "done before" in resumed.stderr
    assert "to generate, no max_tokens: rest of the context (64 tokens); planned for an expected 64" in resumed.stderr
    assert out.read_text() == wanted.read_text()
    assert json.loads(stats.read_text())["counts"]["suspensions"] >= 3


def test_without_a_limit_memory_must_hold_the_context(job: Path) -> None:
    """Under a policy with a smaller cache each row is an error row that says what it takes."""
    (job / "small.yaml").write_text(SIZES % (CONTEXT - 16))
    rows = str(job / "rows.jsonl")
    refused = moelight_inside("generate", rows, "--model", str(job / "model"), "--policy", str(job / "small.yaml"))
    assert refused.returncode == 1
    errors = [json.loads(line)["error"] for line in refused.stdout.splitlines()]
    assert [error["code"] for error in errors] == ["kv_capacity_exceeded"] * ROWS
    assert "may reach 64 tokens, the context, which take 64.0KiB of KV memory" in errors[0]["message"]
