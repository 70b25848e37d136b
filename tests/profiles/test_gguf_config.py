"""The config of a GGUF file: keys that are missing have llama.cpp's values or are refused by name; what is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from moelight.core.errors import ConfigError
from moelight.models.graph.family_table import TABLE
from moelight.models.graph.support import support
from moelight.profiles.gguf import GGMLTensor, GGUFFile
from moelight.profiles.gguf_config import ARCHITECTURES, config_values
from moelight.profiles.gguf_families import (
    FROM_SAFETENSORS,
    GRAPH_ARCHITECTURES,
    NO_TEXT,
    NOT_COMPUTED,
    NOT_SERVED,
    architecture_of,
)
from tests.engine.test_dense_models import FAMILIES as DENSE

COMMON = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
    "expert_count": 8,
    "expert_used_count": 2,
    "vocab_size": 320,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmoe": {},
    "qwen2moe": {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    "qwen3moe": {"expert_feed_forward_length": 32},
    "gpt-oss": {"expert_feed_forward_length": 32, "attention.sliding_window": 16},
    "deepseek2": {
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "leading_dense_block_count": 1,
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 48,
        "attention.value_length": 32,
        "attention.key_length_mla": 40,
        "attention.value_length_mla": 24,
        "rope.dimension_count": 16,
    },
}


def file(architecture: str, changed: dict[str, Any] | None = None, *tensors: str) -> GGUFFile:
    """A file of ``architecture`` with ``tensors``; of ``changed`` keys those that are None are missing."""
    values = {**COMMON, **MORE.get(architecture, {}), **(changed or {})}
    metadata = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    made = {
        name: GGMLTensor(name=name, file=Path("a"), type="F32", shape=(1 << 20,), offset=0, nbytes=4 << 20)
        for name in tensors
    }
    return GGUFFile(path=Path("model.gguf"), metadata={"general.architecture": architecture, **metadata}, tensors=made)


def config(architecture: str, changed: dict[str, Any] | None = None, *tensors: str) -> dict[str, Any]:
    made = file(architecture, changed, *tensors)
    return config_values(made, *architecture_of(made))


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "changed", "field", "value"),
    [
        ("llama", {"rope.freq_base": None}, "rope_parameters", {**DEFAULT, "rope_theta": 10000.0}),
        ("llama", {"attention.head_count_kv": None}, "num_key_value_heads", 4),
        ("llama", {}, "head_dim", 16),
        ("llama", {"attention.key_length": 32, "rope.dimension_count": 32}, "head_dim", 32),
        ("llama", {"rope.scaling.factor": 4.0}, "rope_parameters", {**DEFAULT, "rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope.scale_linear": 4.0}, "rope_parameters", {**DEFAULT, "rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "rope_parameters", DEFAULT),
        ("qwen3moe", {"rope.scaling.type": "yarn"}, "rope_parameters", DEFAULT),
        (
            "qwen3moe",
            YARN,
            "rope_parameters",
            {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
        ("gpt-oss", {}, "rope_parameters", DEFAULT),
        ("qwen3moe", {"expert_feed_forward_length": None}, "moe_intermediate_size", 48),
        ("qwen2moe", {"expert_feed_forward_length": None}, "moe_intermediate_size", 48),
        ("qwen2moe", {"expert_shared_feed_forward_length": None}, "shared_expert_intermediate_size", 96),
        ("deepseek2", {"expert_weights_scale": None}, "routed_scaling_factor", 1.0),
        ("deepseek2", {"expert_weights_norm": None}, "norm_topk_prob", False),
        ("deepseek2", {"expert_group_count": None, "expert_group_used_count": None}, "n_group", 1),
        ("deepseek2", {"expert_group_count": None, "expert_group_used_count": None}, "topk_group", 1),
        ("deepseek2", {"leading_dense_block_count": None}, "first_k_dense_replace", 0),
        ("deepseek2", {"nextn_predict_layers": 1}, "num_hidden_layers", 3),
        ("qwen3moe", {"attention.head_count_kv": [2, 2, 2, 2]}, "num_key_value_heads", 2),
    ],
)
def test_a_missing_key_has_the_value_that_llama_cpp_takes(
    architecture: str, changed: dict[str, Any], field: str, value: Any
) -> None:
    assert config(architecture, changed)[field] == value


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        *(("qwen3moe", key) for key in ("block_count", "context_length", "expert_count", "expert_used_count")),
        ("qwen3moe", "attention.layer_norm_rms_epsilon"),
        ("olmoe", "feed_forward_length"),
        ("gpt-oss", "attention.sliding_window"),
        ("gpt-oss", "expert_feed_forward_length"),
        ("deepseek2", "expert_shared_count"),
        ("deepseek2", "attention.kv_lora_rank"),
        ("deepseek2", "rope.dimension_count"),
    ],
)
def test_a_missing_key_without_a_default_is_refused_by_name(architecture: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.gguf: the metadata key {architecture}\.{key} is missing"):
        config(architecture, {key: None})


@pytest.mark.parametrize(
    ("architecture", "changed", "complaint"),
    [
        ("qwen3moe", {"attention.head_count_kv": [2, 2, 1, 2]}, "attention.head_count_kv differs from layer to layer"),
        ("qwen3moe", {"rope.dimension_count": 8}, "rope.dimension_count is 8, and heads have 16 numbers"),
        (
            "llama",
            {"rope.scaling.type": "longrope"},
            "rope.scaling.type 'longrope' is not read; known: none, linear, yarn",
        ),
        ("llama", {"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor is 1.2"),
        ("gpt-oss", {"rope.freq_base_swa": 1e4}, "another base in windowed layers"),
        ("gpt-oss", {"attention.sliding_window_pattern": 4}, "windows are not those of every other layer"),
        ("deepseek2", {"expert_gating_func": 4}, "expert_gating_func 4 is not computed; known: 1"),
        ("deepseek2", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4 of 4 layers"),
        ("deepseek2", {"attention.head_count": "four"}, "attention.head_count is 'four', not a whole number"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(architecture: str, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(architecture, changed)


def test_a_missing_gating_function_is_that_of_llama_cpp() -> None:
    """Sigmoid for the shape of GLM-4.7-Flash, else softmax, with which no selection bias is computed."""
    bias = "blk.1.exp_probs_b.bias"
    missing: dict[str, Any] = {"expert_gating_func": None, "expert_group_count": None}
    glm = {**missing, "block_count": 47, "vocab_size": 154880}
    assert config("deepseek2", glm, bias)["model_type"] == "deepseek_v3"
    assert config("deepseek2", missing)["model_type"] == "deepseek_v2"
    for changed, says in (
        (missing, "is missing, for which llama.cpp takes softmax"),
        ({"expert_gating_func": 1}, "says"),
    ):
        with pytest.raises(ConfigError, match=rf'deepseek2.expert_gating_func {says}.*"scoring_func": "sigmoid"'):
            config("deepseek2", changed, bias)


def test_layers_without_experts_are_those_of_the_tensors() -> None:
    """Converters write 0 for configs of transformers 5, which list the layers."""
    dense = ("blk.0.ffn_gate.weight", "blk.1.ffn_gate.weight", "blk.2.ffn_gate_inp.weight")
    assert config("deepseek2", {"leading_dense_block_count": 0}, *dense)["first_k_dense_replace"] == 2


def test_refusals_name_the_family_that_runs_from_safetensors() -> None:
    with pytest.raises(
        ConfigError, match=r"'minimax-01' is not read; its files have rotations of a share .* \(model_type minimax\)$"
    ):
        architecture_of(file("minimax-01"))
    with pytest.raises(ConfigError, match=r"'grok' is not read; transformers has no code for these models$"):
        architecture_of(file("grok"))
    with pytest.raises(ConfigError, match=r"'mamba' is not read; these models do not run: .* states "):
        architecture_of(file("mamba"))
    with pytest.raises(ConfigError, match=r"'bert' is not read; its models encode, .* do not continue texts alone$"):
        architecture_of(file("bert"))
    with pytest.raises(ConfigError, match=r"'plamo9' is not read; `moelight models` lists "):
        architecture_of(file("plamo9"))
    with pytest.raises(ConfigError, match=r"'qwen3mo' is not read; .* \(did you mean 'qwen3moe'\?\)$"):
        architecture_of(file("qwen3mo"))


def test_a_llama_without_experts_is_dense() -> None:
    assert architecture_of(file("llama"))[1].model_type == "mixtral"
    assert architecture_of(file("llama", {"expert_count": None}))[1].model_type == "llama"


def test_families_that_are_said_to_run_from_safetensors_do() -> None:
    families = json.loads(TABLE.read_text())["families"]
    run = {name for family in families if family.get("how") for name in family["types"]} | set(DENSE)
    graphs = {"muse_glimmer"}  # `test_more_families_run`
    assert {family for family, _ in FROM_SAFETENSORS.values()} <= run | graphs
    refused = {*FROM_SAFETENSORS, *NOT_SERVED, *NO_TEXT, *NOT_COMPUTED}
    assert not refused & {*ARCHITECTURES, *GRAPH_ARCHITECTURES}
    assert len(refused) == sum(map(len, (FROM_SAFETENSORS, NOT_SERVED, NO_TEXT, NOT_COMPUTED))), "one reason each"
    newer = {"dots3note", "minimax-01", "muse-glimmer", "qwen4exp"}
    assert FROM_SAFETENSORS.keys() <= set(gguf.MODEL_ARCH_NAMES.values()) | newer  # than the package


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "runs"),
    [
        ("muse_glimmer", True),
        *((family, False) for family in ("bloom", "falcon", "gptj", "mpt", "mamba", "mamba2")),
    ],
)
def test_more_families_run(family: str, runs: bool) -> None:
    from transformers import AutoConfig

    assert (support(AutoConfig.for_model(family)).how is not None) == runs


def test_families_that_are_said_to_be_without_code_are() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert not {name.replace("-", "_") for name in NOT_COMPUTED} & set(CONFIG_MAPPING_NAMES)
