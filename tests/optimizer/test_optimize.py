"""The whole optimizer on named machines and models: plans that fit, bounds that hold, fixed values that are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.paths import cache_directory
from moelight.optimizer import optimize
from moelight.optimizer.optimize import make_plan
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.plan import Plan, key_of, plan_as_dict, store_plan, stored_plan
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload, load_workload
from tests.cases import thorough

PAIRS = [("t4", "mixtral"), ("h100", "gpt-oss-120b"), ("laptop-nvme", "olmoe-1b-7b")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELIGHT_CACHE", str(tmp_path))


def plan(hardware: str, model: str, workload: Workload | None = None, **changes: object) -> Plan:
    return make_plan(
        load_hardware_profile(hardware),
        load_model_profile(model),
        workload or load_workload("mtbench"),
        PlanOptions(**changes),  # type: ignore[arg-type]
        name=model,
    )


@cache
def free_plan(hardware: str, model: str) -> Plan:
    """What nothing is fixed of, planned once, with its proof."""
    return plan(hardware, model, cache=False)


@pytest.mark.parametrize(("hardware", "model"), thorough(PAIRS, but=PAIRS[:1]))
def test_a_plan_fits_and_no_policy_is_much_faster(hardware: str, model: str) -> None:
    result = free_plan(hardware, model)
    assert all(use.total_bytes <= use.capacity_bytes for use in result.memory)
    assert result.estimate.tokens_per_s <= result.bound_tokens_per_s <= 1.2 * result.estimate.tokens_per_s
    assert result.what_if == tuple(sorted(result.what_if, key=lambda item: -item.gain))
    assert model.split("-", maxsplit=1)[0] in result.why
    message = plan_as_dict(result)
    assert json.loads(json.dumps(message)) == message
    assert sum(message["policy"]["weights"].values()) == pytest.approx(1)
    for use in message["memory"].values():
        assert sum(use["by_purpose"].values()) == use["total_bytes"]


@pytest.mark.parametrize(
    ("key", "value"),
    thorough(
        [
            ("batch_size", 777),
            ("micro_batch_size", 51),
            ("num_micro_batches", 7),
            ("attention_device", "cpu"),
            ("ffn_device", "gpu"),
            ("schedule", "serial"),
            ("micro_batch_tokens", 512),
        ],
        but=[("schedule", "serial")],
    ),
)
@pytest.mark.usefixtures("unproved")
def test_a_fixed_value_is_kept_and_never_helps(key: str, value: object) -> None:
    free, fixed = free_plan("t4", "mixtral"), plan("t4", "mixtral", fix={key: value})
    assert plan_as_dict(fixed)["policy"][key] == value
    assert fixed.estimate.tokens_per_s <= free.estimate.tokens_per_s * 1.001


@pytest.mark.parametrize(
    ("key", "share"),
    thorough(
        [("weights.device", 0.05), ("weights.host", 0.5), ("weights.disk", 0.3), ("cpu_experts", 0.125)],
        but=[("weights.host", 0.5), ("cpu_experts", 0.125)],
    ),
)
@pytest.mark.usefixtures("unproved")
def test_a_fixed_share_is_met_to_the_page(key: str, share: float) -> None:
    fixed = plan("t4", "mixtral", fix={key: share, "ffn_device": "split"})
    tier, _, name = key.partition(".")
    policy = plan_as_dict(fixed)["policy"]
    result = policy[tier][name] if name else policy[tier]
    assert result == pytest.approx(round(share * 256) / 256)


@pytest.mark.usefixtures("unproved")
def test_limits_bind_to_the_byte_and_a_refusal_names_what_lacks() -> None:
    result = plan("t4", "mixtral", limits={"device": 10 << 30, "host": 100 << 30})
    assert result.use_of("device").capacity_bytes == 10 << 30
    assert result.use_of("device").total_bytes <= 10 << 30
    with pytest.raises(BudgetError, match=r"--host-memory 512\.0MiB is too small for mixtral-8x7b: at least .* more"):
        plan("t4", "mixtral", limits={"host": 1 << 29})
    with pytest.raises(BudgetError, match=r"without --fix weights\.device=0\.9 it fits"):
        plan("t4", "mixtral", fix={"weights.device": 0.9})


@pytest.mark.thorough
@pytest.mark.usefixtures("unproved")
def test_no_disk_means_that_nothing_streams_from_it() -> None:
    result = plan("t4", "mixtral", limits={"disk": 0})
    assert result.policy.weights.disk == 0
    with pytest.raises(BudgetError, match="mixtral"):
        plan("laptop-nvme", "mixtral", limits={"disk": 0})


@pytest.mark.thorough
@pytest.mark.usefixtures("unproved")
def test_a_choice_of_dtypes_is_used_where_it_helps() -> None:
    plain, free = free_plan("t4", "mixtral"), plan("t4", "mixtral", weight_dtypes=("auto", "int8", "int4"))
    assert free.policy.weight_dtype == "int4"
    assert free.estimate.tokens_per_s > 1.5 * plain.estimate.tokens_per_s


def test_contradictions_name_both() -> None:
    with pytest.raises(ConfigError, match=r"attention_device.*schedule|schedule.*attention_device|flexgen"):
        plan("t4", "mixtral", fix={"attention_device": "cpu", "schedule": "flexgen"})
    with pytest.raises(ConfigError, match="estimator 'papper'"):
        plan("t4", "mixtral", estimator="papper")


def test_an_equal_question_is_answered_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = ("laptop-nvme", "olmoe-1b-7b"), free_plan("laptop-nvme", "olmoe-1b-7b")
    searches: list[object] = []

    def searched(*question: object, proof: bool) -> Plan:
        searches.append((question, proof))
        return made

    monkeypatch.setattr(optimize, "best_plan", searched)
    first = plan(*asked)
    assert plan(*asked) == first and first.policy == made.policy
    (retained,) = cache_directory("plans").iterdir()
    retained.write_text(retained.read_text()[:100])
    again = plan(*asked)
    assert again.policy == first.policy
    assert again.solve_s != first.solve_s
    assert len(searches) == 2
    plan(*asked, limits={"host": 20 << 30})
    assert len(list(cache_directory("plans").iterdir())) == 2 and len(searches) == 3


def test_a_plan_survives_its_file() -> None:
    result = free_plan("t4", "mixtral")
    assert not cache_directory("plans").exists()
    key = key_of("any", {"of": 1}, ("inputs",))
    store_plan(key, result)
    assert stored_plan(key) == replace(result, speeds=None)  # which whoever asks has again
    assert result.speeds is not None
    assert stored_plan(key_of("any", {"of": 2}, ("inputs",))) is None
