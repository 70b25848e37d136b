"""Models whose layers differ: the ledger is the sum over layers, and layers listed one by one cost what they did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.dtypes import BFLOAT16, FLOAT16
from moelight.core.policy import Policy, Shares
from moelight.hrm import costs
from moelight.hrm.estimate import cost_model_of, estimate
from moelight.hrm.footprint import TRANSFORMERS_BYTES, footprint
from moelight.hrm.machine_model import speeds_of
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model import AttentionSpec, LayerSpec, ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.tensor_list import dense_tensors
from moelight.profiles.workload import Workload
from tests.shapes import ATTENTIONS, NO_ATTENTION, small_model

WORKLOAD = Workload(num_requests=400, prompt_len=100, max_prompt_len=200, gen_len=32)
POLICIES = [
    Policy(
        model="it",
        batch_size=64,
        micro_batch_size=16,
        micro_batch_tokens=256,
        kv_tokens=20000,
        attention_device=attention,
        ffn_device=ffn,
        weights=Shares(host=1.0),
        kv=Shares(host=1.0),
    )
    for attention, ffn in (("cpu", "gpu"), ("gpu", "gpu"), ("cpu", "cpu"))
]
EVERY_POLICY = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda item: f"{item.attention_device}-{item.ffn_device}"
)


def one_by_one(model: ModelProfile) -> ModelProfile:
    """``model`` with every layer and tensor listed."""
    spec = replace(model.attention, window_layers=())
    marked = model.attention.window_layers or (True,) * model.num_layers
    layers = tuple(
        LayerSpec(
            attention=spec if windowed else replace(spec, window=None),
            before=item.before_attention,
            after=item.after_attention,
        )
        for windowed, item in zip(marked, costs.layer_elements(model), strict=True)
    )
    parts = tuple(replace(part, kind="x") for tensor in dense_tensors(model) for part in tensor.parts)
    return replace(model, layers=layers, tensors=parts)


@EVERY_POLICY
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_layers_one_by_one_cost_what_they_cost_together(name: str, policy: Policy) -> None:
    model = load_model_profile(name)
    listed, speeds = one_by_one(model), speeds_of(load_hardware_profile("t4"))
    assert costs.seen_positions(listed, 3000.0) == costs.seen_positions(model, 3000.0)
    assert costs.kv_token_bytes(listed, FLOAT16) == costs.kv_token_bytes(model, FLOAT16)
    assert costs.dense_bytes(listed, FLOAT16) == pytest.approx(costs.dense_bytes(model, FLOAT16), rel=1e-6)
    result, wanted = (estimate(item, policy, WORKLOAD, speeds) for item in (listed, model))
    assert result.tokens_per_s == pytest.approx(wanted.tokens_per_s, rel=1e-9)
    assert result.lanes == pytest.approx(wanted.lanes, rel=1e-9)
    sizes = [footprint(item, policy, dtype=BFLOAT16) for item in (listed, model)]
    for arena in sizes[1].arenas:
        if arena.purpose not in ("dense", "transient"):
            assert sizes[0].bytes_of(arena.purpose) == arena.bytes
    assert [size.bytes_of("transformers") for size in sizes] == [TRANSFORMERS_BYTES, 0]  # only graphs list their layers


def mixed(*attentions: AttentionSpec, state: int = 0, of_token: int = 0) -> ModelProfile:
    layers = tuple(
        LayerSpec(attention=spec, before=64, after=64, state_bytes=state, state_token_bytes=of_token)
        for spec in attentions
    )
    widest = max(attentions, key=lambda spec: spec.cache_width)
    return replace(small_model((True,) * len(layers)), layers=layers, attention=widest)


def test_widths_are_those_of_each_layer_and_buffers_those_of_the_widest() -> None:
    model = mixed(*ATTENTIONS)
    widths = [spec.cache_width for spec in ATTENTIONS]
    assert widths == [2 * 2 * 16, 16 + 8, 2 * 8, 2 * 8, 0]
    assert costs.kv_token_bytes(model, FLOAT16) == 2 * sum(widths)
    assert [3 * costs.kv_layer_bytes(model, FLOAT16, layer) for layer in range(5)] == [6 * width for width in widths]
    assert costs.kv_layer_bytes(model, FLOAT16) == 2 * max(widths)
    queries = [4 * 16, 3 * (16 + 8), 2 * 8, 4 * 8, 0]
    assert [costs.attention_width(model, layer) for layer in range(5)] == queries
    assert costs.qkv_bytes(model, FLOAT16, 1, 1) == 2 * (queries[1] + widths[1])
    assert costs.attention_out_width(model, 1) == 3 * 16
    assert costs.seen_positions(model, 100.0) == 20 + 100 + 100 + 22


@EVERY_POLICY
def test_states_take_memory_and_time_where_the_projections_run(policy: Policy) -> None:
    speeds = speeds_of(load_hardware_profile("t4"))
    plain, stateful = mixed(NO_ATTENTION, ATTENTIONS[0]), mixed(NO_ATTENTION, ATTENTIONS[0], state=10**7, of_token=100)
    taken = [footprint(model, policy, dtype=FLOAT16) for model in (plain, stateful)]
    states = 2 * (policy.batch_size * 10**7 + policy.kv_tokens * 100)
    assert taken[0].bytes_of("states") == 0
    assert taken[1].bytes_of("states") == states
    tier = "device" if policy.discrete else "host"
    assert taken[1].total(tier) - taken[0].total(tier) == states
    cost_model = cost_model_of(stateful, policy, speeds)
    touched = 64 * (2 * 2 * 10**7 + 2 * 100 * 50)
    assert cost_model.states_s(64, 50, 0, 1) == pytest.approx(cost_model.expert_unit.touch_s(touched))
    before, after = (estimate(model, policy, WORKLOAD, speeds).lanes for model in (plain, stateful))
    lane = "device" if policy.discrete else "cpu"
    context = WORKLOAD.prompt_len + WORKLOAD.gen_len / 2
    assert after[lane] - before[lane] == pytest.approx(cost_model.states_s(64, context, 0, 1), rel=1e-6)
