"""The benchmark of a small card runs on a twin, whole; what it says adds up. How fast anything is, is no test."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from moelight.hrm.footprint import DEVICE_RUNTIME_BYTES
from tests.benchmarks.scripts import BENCHMARKS, ran


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small-card") / "results"


@pytest.fixture(scope="module")
def report(results: Path) -> dict[str, Any]:
    options = ["--device", "twin", "--tiny", "--results", results, "--accelerate-python", results / "no-such-python"]
    return ran("gpu_small_card", *options)


@pytest.mark.thorough
def test_every_contestant_has_its_figures(report: dict[str, Any]) -> None:
    *rows, accelerate = report["rows"]
    assert [row["contestant"] for row in rows] == ["cgopipe", "static", "flexgen"]
    assert rows[2]["policy"]["schedule"] == "flexgen" != rows[1]["policy"]["schedule"] == "cgopipe"
    for row in rows:
        steady = row["steady"]
        assert 0 < steady["lanes"]["h2d"] <= 1
        assert steady["h2d_bytes_per_s"] > 0
        assert steady["h2d_share_of_roof"] == pytest.approx(
            steady["h2d_bytes_per_s"] / report["pinned_h2d_bytes_per_s"]
        )
        assert [(job["new_tokens"], job["tokens"], job["cut"]) for job in row["jobs"]] == [
            (3, 36, False),
            (5, 60, False),
        ]
    assert accelerate["contestant"] == "accelerate" and "FileNotFoundError" in accelerate["unable"]


def test_a_plan_takes_most_of_its_cap_and_no_more(report: dict[str, Any]) -> None:
    for row in report["rows"][:3]:
        assert row["device_planned_bytes"] <= row["cap_bytes"]
        free = row["cap_bytes"] - DEVICE_RUNTIME_BYTES
        assert 0.85 * free <= row["device_planned_bytes"] - DEVICE_RUNTIME_BYTES
        assert row["device_used_share"] <= 1
        assert not row["device_exceeded"]


def test_results_and_traces_are_kept(report: dict[str, Any], results: Path) -> None:
    assert report["device"] == "twin" and report["files"] == "hollow"
    assert json.loads((results / "gpu_small_card.json").read_text()) == report
    traces = sorted(path.name for path in results.glob("*.trace.json"))
    assert traces == [f"{name}-{123 << 20}.trace.json" for name in ("cgopipe", "flexgen", "static")]
    assert all(json.loads((results / name).read_text())["traceEvents"] for name in traces)


def test_real_files_are_read_and_kept_for_another_run(tmp_path: Path) -> None:
    options = ["--device", "twin", "--tiny", "--real", "mixtral-6g", "--model", tmp_path / "model"]
    few = ["--contestants", "cgopipe", "--prompt-len", "5", "--rounds", "0"]
    result = ran("gpu_small_card", *options, *few)
    (row,) = result["rows"]
    assert (result["files"], result["prompt_len"], row["jobs"]) == ("mixtral-6g", 5, [])
    assert row["steady"]["prompt_tokens"] == 5 * row["steady"]["sequences"]
    assert row["predicted_pass_s"] > 0
    assert all(
        path.stat().st_blocks * 512 >= path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_prompts_are_mtbenchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_sections.mtbench import mtbench_requests, prompt_lengths

    lengths = prompt_lengths()
    assert len(lengths) == 80
    assert mean(lengths) == pytest.approx(77, abs=0.5)
    assert max(lengths) == 418
    assert lengths == sorted(lengths)
    asked = mtbench_requests(160, 7, 512)
    assert sorted(len(item.token_ids) for item in asked) == sorted(lengths * 2)
    assert {item.sampling.max_tokens for item in asked} == {7}
    assert all(3 <= token < 512 for item in asked for token in item.token_ids)
