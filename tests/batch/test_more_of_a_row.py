"""What an answer has on request beside its text: experts of its tokens, and times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moelight.batch.job import run_job
from moelight.batch.options import JobOptions
from moelight.core.errors import InputError
from moelight.core.request import PROMPT_ONLY, SamplingParams
from tests.batch.playing import prompts, rows
from tests.cli.program import moelight_inside

TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
PROMPT = "add 17 and 25 ="


def shape(experts: list[list[list[int]]]) -> tuple[int, int, int]:
    assert all(ids == sorted(set(ids)) for token in experts for ids in token)
    return len(experts), len(experts[0]), len(experts[0][0])


def line(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"{url} {len(body)}", "method": "POST", "url": url, "body": {**body, "max_tokens": 4}}


def test_rows_with_experts_and_times(tmp_path: Path) -> None:
    path, out = tmp_path / "rows", tmp_path / "out.jsonl"
    path = prompts(
        tmp_path,
        {"prompt": PROMPT, "return_routed_experts": True},
        {"prompt": PROMPT},
        {"prompt": PROMPT, "return_routed_experts": True, "n": 2, "temperature": 1.0},
    )
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
    run_job(JobOptions(prompts=path, output=out, per_request_metrics=True, sampling=sampling))
    first, plain, samples = rows(out)
    tokens, layers, k = shape(first["prompt_routed_experts"])
    assert tokens == first["usage"]["prompt_tokens"]
    assert shape(first["routed_experts"]) == (3, layers, k)
    assert "routed_experts" not in plain and "prompt_routed_experts" not in plain
    assert samples["prompt_routed_experts"] == first["prompt_routed_experts"]
    assert [shape(choice["routed_experts"]) for choice in samples["choices"]] == [(3, layers, k)] * 2
    for row in (first, plain):
        times = row["metrics"]
        assert set(times) == TIMES
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3, abs=1e-2)
        assert times["tokens_per_second"] > 0 <= times["queue_time_ms"]
    assert samples["metrics"] is None


def test_batch_lines_with_experts_and_times(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    path = prompts(
        tmp_path,
        line("/v1/chat/completions", messages=messages, return_routed_experts=True),
        line("/v1/completions", prompt=PROMPT, return_routed_experts=True),
        line("/v1/completions", prompt=[PROMPT, "upper lemon ="], return_routed_experts=True, seed=1),
    )
    out = tmp_path / "out.jsonl"
    run_job(JobOptions(prompts=path, output=out, per_request_metrics=True))
    chat, one, two = (row["response"]["body"] for row in rows(out))
    for body in (chat, one):
        tokens, layers, _ = shape(body["prompt_routed_experts"])
        assert tokens == body["usage"]["prompt_tokens"]
        assert all(len(token) == layers for token in body["choices"][0]["routed_experts"])
        assert set(body["metrics"]) == TIMES
    assert "prompt_routed_experts" not in two and two["metrics"] is None
    assert sum(len(choice["prompt_routed_experts"]) for choice in two["choices"]) == two["usage"]["prompt_tokens"]


def test_a_resumed_job_has_its_fields(tmp_path: Path) -> None:
    how: dict[str, Any] = {"prompts": prompts(tmp_path, {"prompt": PROMPT}), "output": tmp_path / "out.jsonl"}
    sampling = SamplingParams(max_tokens=2)
    assert run_job(JobOptions(**how, sampling=sampling)).completed == 1
    with pytest.raises(InputError, match="per_request_metrics"):
        run_job(JobOptions(**how, sampling=sampling, per_request_metrics=True))
    with pytest.raises(InputError, match="return_routed_experts"):
        run_job(JobOptions(**how, sampling=SamplingParams(max_tokens=2, return_routed_experts=True)))


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    path = prompts(tmp_path, {"prompt": PROMPT})
    result = moelight_inside("generate", path, "--max-tokens", "3", "--return-routed-experts", "--per-request-metrics")
    (row,) = map(json.loads, result.stdout.splitlines())
    assert row["routed_experts"] and set(row["metrics"]) == TIMES
    for option in ("--return-routed-experts", "--per-request-metrics"):
        refused = moelight_inside("generate", path, "--task", "embed", option)
        assert refused.returncode == 2
        assert f"--task embed and {option} contradict each other: nothing is generated" in refused.stderr


def test_nothing_else_of_a_prompt_only_row(tmp_path: Path) -> None:
    """Scores have neither."""
    out = tmp_path / "out.jsonl"
    path = prompts(tmp_path, {"prompt": PROMPT, "choices": [" 42", " 41"]})
    run_job(JobOptions(prompts=path, output=out, task="score", sampling=PROMPT_ONLY))
    (row,) = rows(out)
    assert set(row) == {"scores", "usage"}
