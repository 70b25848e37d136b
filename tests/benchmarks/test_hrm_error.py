"""The arithmetic of `benchmarks/hrm_error.py` and its two sets of runs. How near predictions are, is no test."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def error(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hrm_error")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("planner_sections.hrm_runs")


def row(measured: float, predicted: float = 100.0, **changes: Any) -> dict[str, Any]:
    facts = {"set": "held-out", "binding": "cpu", "measured_disk_bytes": 0, "others_busy": 0.0, **changes}
    return {"measured_tokens_per_s": measured, "predicted_tokens_per_s": predicted, **facts}


def test_the_sets_share_no_shape_and_no_work(runs: ModuleType) -> None:
    """Nor a number of sequences with the same lengths: what shaped the ledger does not judge it."""
    fit, held = runs.SETS["fit"], runs.SETS["held-out"]
    assert len(fit) == len(held) == 18
    assert not {run.model for run in fit} & {run.model for run in held}
    lengths = [{(run.prompt_len, run.gen_len) for run in some} for some in (fit, held)]
    assert not lengths[0] & lengths[1]
    assert len({run.label for run in (*fit, *held)}) == len(fit) + len(held)
    assert {run.schedule for run in held} == {"cgopipe", "module", "serial"}
    assert sum(run.host_memory != "12GiB" for run in held) >= 6


def test_held_out_models_differ_in_every_size_and_are_small(runs: ModuleType) -> None:
    sizes = [(name, shape) for name, (_, shape) in runs._MODELS.items()]
    seen = [dict(zip(runs._SIZES, shape, strict=True)) for name, shape in sizes if name in ("qwen", "olmoe")]
    for name in {run.model for run in runs.HELD_OUT}:
        shape = dict(zip(runs._SIZES, dict(sizes)[name], strict=True))
        assert all(shape[key] != other[key] for other in seen for key in ("layers", "hidden", "intermediate", "vocab"))
        model = profile_from_config(HFConfig(runs.config_of(name), where=name), name=name)
        experts = model.num_moe_layers * model.experts.num_experts
        assert 3 * experts * model.hidden_size * model.experts.intermediate_size * 2 < 1e9


def test_a_quick_check_has_one_run_of_each_model(error: ModuleType, runs: ModuleType) -> None:
    result = error.quick(runs.HELD_OUT)
    assert {run.model for run in result} == {run.model for run in runs.HELD_OUT} and len(result) == 4


def test_the_median_round_counts_and_its_error_has_a_sign(error: ModuleType) -> None:
    result = error.combined([row(80.0), row(125.0), row(100.0)])
    assert result["error"] == 0.0 and result["noise"] == pytest.approx(0.2)
    assert error.combined([row(80.0)])["error"] == pytest.approx(0.25)
    assert error.combined([row(125.0)])["error"] == pytest.approx(-0.2)
    assert error.combined([row(1.0, measured_disk_bytes=size) for size in (1, 5, 9)])["measured_disk_bytes"] == 5


def test_a_summary_is_of_one_set_and_split_by_the_lane_that_binds(error: ModuleType) -> None:
    fast, slow, none = (error.combined([row(measured)]) for measured in (80.0, 200.0, 100.0))
    rows = [fast, {**slow, "binding": "disk"}, none, error.combined([row(1.0, set="fit")])]
    result = error.summary(rows, "held-out")
    assert result["runs"] == 3 and result["worst_error"] == pytest.approx(-0.5)
    assert result["median_error"] == pytest.approx(0.25) and result["median_signed_error"] == 0.0
    assert result["by_binding"]["disk"]["worst_error"] == pytest.approx(-0.5)
    assert result["by_binding"]["cpu"]["runs"] == 2
    assert "roof" in error._said("held-out", result)
