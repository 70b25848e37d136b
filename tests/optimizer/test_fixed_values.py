"""Fixed parts of a policy: typed, in range, known by name, and free of contradictions."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.optimizer.fixed_values import KEYS, SHORT, check_fixes, parse_fixes
from moelight.optimizer.plan import policy_as_dict
from moelight.scheduler.requirements import NEEDS
from tests.shapes import examples


def test_values_are_typed_by_their_key() -> None:
    result = parse_fixes(
        ["attention=cpu", "ffn=split", "batch_size=64", "weights.device=0.25", "kv.host=1", "schedule=cgopipe"]
    )
    assert result == {
        "attention_device": "cpu",
        "ffn_device": "split",
        "batch_size": 64,
        "weights.device": 0.25,
        "kv.host": 1.0,
        "schedule": "cgopipe",
    }
    assert isinstance(result["kv.host"], float) and isinstance(result["batch_size"], int)


def test_the_keys_are_those_of_a_policy_in_json() -> None:
    plain = policy_as_dict(Policy(model="m"))
    flat = {
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in plain.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert set(KEYS) == flat - {"model"}
    assert set(SHORT.values()) <= set(KEYS)
    assert {field.name for field in fields(Policy)} <= {key.split(".")[0] for key in (*KEYS, "model")}


def test_a_key_may_be_given_twice_with_one_value() -> None:
    assert parse_fixes(["attention=cpu", "attention_device=cpu"]) == {"attention_device": "cpu"}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["attention"], ["--fix attention", "KEY=VALUE"]),
        (["=cpu"], ["KEY=VALUE"]),
        (["attention="], ["KEY=VALUE"]),
        (["atention=cpu"], ["'atention'", "did you mean 'attention'"]),
        (["weights=0.5"], ["'weights'", "weights.device"]),
        (["model=x"], ["'model'", "known:"]),
        (["attention=gpus"], ["attention=gpus", "did you mean 'gpu'"]),
        (["schedule=cgopip"], ["schedule=cgopip", "did you mean 'cgopipe'"]),
        (["kv_dtype=int5"], ["kv_dtype=int5", "int4"]),
        (["batch_size=0"], ["batch_size=0", "from 1 to 1,073,741,824"]),
        (["batch_size=4.5"], ["batch_size=4.5", "whole number"]),
        (["batch_size=²"], ["whole number"]),
        (["batch_size=" + "9" * 30], ["whole number"]),
        (["kv_block_size=24"], ["kv_block_size=24", "16, 32, 64, 128"]),
        (["weights.device=1.5"], ["weights.device=1.5", "0 to 1"]),
        (["weights.device=nan"], ["0 to 1"]),
        (["weights.device=half"], ["0 to 1"]),
        (["attention=cpu", "attention_device=gpu"], ["attention=cpu", "attention_device=gpu", "contradict"]),
        (["batch_size=4", "batch_size=8"], ["batch_size=4", "batch_size=8", "contradict"]),
    ],
)
def test_what_is_no_fix_is_refused(texts: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_fixes(texts)
    for word in words:
        assert word in str(refused.value)


# Fixes that no plan can satisfy on a machine with a GPU; each is named in the refusal.
CONTRADICTIONS = [
    ["weights.device=0.7", "weights.host=0.6"],
    ["weights.device=0.2", "weights.host=0.2", "weights.disk=0.2"],
    ["kv.device=0.7", "kv.host=0.6"],
    ["kv.device=0.3", "kv.host=0.3"],
    ["micro_batch_size=8", "batch_size=4"],
    ["num_micro_batches=8", "batch_size=4"],
    ["num_micro_batches=2", "micro_batch_size=4", "batch_size=9"],
    ["num_micro_batches=4", "micro_batch_size=4", "batch_size=9"],
    ["micro_batch_size=64", "micro_batch_tokens=32"],
    ["cpu_experts=0.5", "ffn_device=gpu"],
    ["cpu_experts=0.5", "weights.host=0.4"],
    ["cpu_experts=0.5", "weights.device=0.6"],
    ["attention_device=cpu", "kv.device=0.1"],
    ["attention_device=cpu", "kv.host=0.9"],
    ["ffn_device=cpu", "weights.device=0.1"],
    ["schedule=flexgen", "attention_device=cpu"],
    ["schedule=module", "ffn_device=split"],
]


@pytest.mark.parametrize("texts", CONTRADICTIONS, ids=" ".join)
def test_contradictions_name_all_sides(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="contradict each other") as refused:
        check_fixes(parse_fixes(texts), has_gpu=True)
    for text in texts:
        assert f"--fix {text}" in str(refused.value)


@pytest.mark.parametrize("texts", CONTRADICTIONS, ids=" ".join)
def test_each_side_of_a_contradiction_alone_is_fine(texts: list[str]) -> None:
    for text in texts:
        check_fixes(parse_fixes([text]), has_gpu=True)


@pytest.mark.parametrize(
    "text", ["attention=gpu", "ffn=gpu", "ffn=split", "weights.device=0.5", "kv.device=1", "cpu_experts=0.1"]
)
def test_without_a_gpu_nothing_is_on_it(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        check_fixes(parse_fixes([text]), has_gpu=False)
    check_fixes(parse_fixes([text]), has_gpu=True)


@pytest.mark.parametrize("schedule", NEEDS)
def test_a_schedule_alone_is_refused_only_where_it_cannot_be(schedule: str) -> None:
    check_fixes({"schedule": schedule}, has_gpu=True)
    if NEEDS[schedule].gpu:
        with pytest.raises(ConfigError, match=f"schedule={schedule}.*GPU"):
            check_fixes({"schedule": schedule}, has_gpu=False)
    else:
        check_fixes({"schedule": schedule}, has_gpu=False)


def test_nothing_of_the_device_may_be_fixed_without_one() -> None:
    check_fixes(parse_fixes(["attention=cpu", "weights.device=0", "kv.device=0", "kv.host=1"]), has_gpu=False)


@examples(200)
@given(st.integers(1, 200), st.integers(1, 200))
def test_the_counts_of_any_policy_agree(batch_size: int, micro_batch_size: int) -> None:
    policy = Policy(model="m", batch_size=max(batch_size, micro_batch_size), micro_batch_size=micro_batch_size)
    counts = {key: getattr(policy, key) for key in ("batch_size", "micro_batch_size", "num_micro_batches")}
    check_fixes(counts, has_gpu=False)
    with pytest.raises(ConfigError, match="contradict"):
        check_fixes({**counts, "num_micro_batches": policy.num_micro_batches + 1}, has_gpu=False)
