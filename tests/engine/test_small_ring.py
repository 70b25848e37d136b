"""A ring of fewer pages than two layers stream: the same tokens, whatever its size, the devices and the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.engine.engine import Engine
from moelight.engine.options import EngineOptions
from moelight.engine.planning import plan_for, resolve
from moelight.hrm import costs
from moelight.models.checkpoints import open_model
from moelight.profiles.families import profile_from_dir
from moelight.runtime.machine import find_machine
from tests.cases import covering, thorough
from tests.engine.graphs import STREAMED, tokens
from tests.engine.test_invariance import DEVICES, MODELS, PROMPTS, SAMPLING, WORK, answers, fits, run, truth
from tests.engines import Tiny, in_turn, least_memory
from tests.weights.quantised import METHODS, quantise

ANY_RING = [name for name, chosen in DEVICES.items() if fits("module", Policy(model="m", **chosen))]
RINGS = in_turn([(item, ring) for item in ANY_RING for ring in (2, 3, 5)], MODELS)


def policy(model: Path, **changes: Any) -> Policy:
    """Prompts are cut, so that passes have several micro-batches of several sizes."""
    sizes = {"batch_size": 9, "micro_batch_size": 4, "micro_batch_tokens": 20, "kv_tokens": 9 * 160}
    return Policy(model=str(model), schedule="module", **{**sizes, **changes})


@pytest.mark.parametrize(("devices", "ring_pages", "name"), thorough(RINGS, but=covering(RINGS)))
def test_a_ring_of_any_size_gives_the_same_tokens(tiny: Tiny, devices: str, ring_pages: int, name: str) -> None:
    model = tiny(name, **MODELS[name])
    assert run(policy(model, ring_pages=ring_pages, **DEVICES[devices])) == truth(model)


def test_pages_that_cross_in_parts_give_the_same_tokens(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_moe", **MODELS["qwen3_moe"])
    monkeypatch.setattr(costs, "PART_BYTES", costs.PAGE_ALIGNMENT)
    assert run(policy(model, ring_pages=3, **DEVICES["gpu"])) == truth(model)


@pytest.mark.parametrize(
    ("family", "device"),
    thorough([("gpt_oss", "cpu"), ("deepseek_v2", "twin"), ("qwen3_next", "cpu")], but=[("deepseek_v2", "twin")]),
)
def test_a_module_graph_gives_the_tokens_of_transformers(family: str, device: str, checkpoints: Any) -> None:
    directory, expected = checkpoints(family)
    where = {"ffn_device": "gpu"} if device == "twin" else {}
    assert tokens(directory, device, schedule="module", weights=STREAMED, ring_pages=2, **where) == expected


@pytest.mark.parametrize("name", thorough(["int4", "fp8 blocks"], but=["int4"]))
def test_quantised_pages_give_the_tokens_of_the_numbers(name: str, tiny: Tiny, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    quantised, values = quantise(tiny("mixtral", intermediate_size=96, **shape), tmp_path, METHODS[name])
    wanted = tokens(values, weights=Shares(host=1.0))
    assert tokens(quantised, schedule="module", weights=STREAMED, ring_pages=2) == wanted


@pytest.mark.parametrize("device", thorough(["cpu", "twin"], but=["twin"]))
def test_the_least_memory_is_that_of_a_few_pages(device: str, tiny: Tiny) -> None:
    """What the planner asks for at least holds neither two layers nor one. Beside a GPU the CPU would need no ring, so
    the schedule is given."""
    model = tiny("olmoe")
    profile = profile_from_dir(model)
    how: dict[str, Any] = {"schedule": "module"} if device == "twin" else {}
    least = least_memory(model, device, WORK, **how)
    with Engine.from_pretrained(model, device=device, workload=WORK, **how, **least) as engine:  # type: ignore[arg-type]
        assert engine.policy.schedule == "module" and 2 <= engine.policy.ring_pages < profile.experts.num_experts
        assert engine.policy.residents == "static"
        assert answers(engine.generate(PROMPTS, SAMPLING)) == truth(model)
    with pytest.raises(BudgetError, match=r"too small for .* at least"):
        of = str(model), open_model(str(model)), find_machine(device)
        plan_for(*of, EngineOptions(schedule="serial", **least), WORK)


def test_a_ring_that_cannot_be_is_refused_by_name(tiny: Tiny) -> None:
    model = tiny("mixtral")
    profile = profile_from_dir(model)
    with pytest.raises(ConfigError, match="ring_pages must be at least 2"):
        policy(model, ring_pages=1)
    small = policy(model, ring_pages=3, weights=Shares(disk=1.0))
    with pytest.raises(ConfigError, match=r"'cgopipe' needs a ring of two layers \(ring_pages 0\); .* module"):
        resolve(replace(small, schedule="cgopipe"), profile, discrete=False)
    assert resolve(replace(small, schedule="cgopipe", weights=Shares(host=1.0)), profile, discrete=False)
