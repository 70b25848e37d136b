"""Families that can be planned for before they can be run: read as transformers reads them, option by option."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from moelight.core.errors import ConfigError
from moelight.profiles.families import FAMILIES, profile_from_config, profile_from_dir
from moelight.profiles.files import profile_names
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import LatentSpec, ModelProfile
from moelight.profiles.model_files import load_model_profile, model_config
from moelight.profiles.rope import ROPE_TYPES
from tests.profiles.theirs import assert_same_tensors, on_meta, their_config

# One shipped model of each family.
MODELS = {
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "deepseek": "deepseek-moe-16b",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "dbrx": "dbrx",
    "gpt_oss": "gpt-oss-20b",
    "phimoe": "phi-3.5-moe",
    "glm4_moe": "glm-4.5-air",
}
# Sizes without a default, as few as transformers' own class of the family needs.
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}


def read(values: dict[str, Any]) -> ModelProfile:
    return profile_from_config(HFConfig(values, where="config.json"), name="some")


def released(family: str, **changes: Any) -> ModelProfile:
    """The shipped model of ``family``, with ``changes``."""
    return read({**model_config(MODELS[family]), **changes})


@pytest.mark.parametrize("name", profile_names("model"))
def test_a_raw_config_in_a_directory_is_the_shipped_model(name: str, tmp_path: Path) -> None:
    """Real files are full of keys that are not ours."""
    extra = {
        "auto_map": {"AutoConfig": "configuration.Config"},
        "transformers_version": "4.46.3",
        "initializer_range": 0.02,
        "use_cache": True,
        "ep_size": 1,
    }
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**extra, **model_config(name)}), encoding="utf-8")
    assert load_model_profile(str(directory)) == load_model_profile(name)


@pytest.mark.peer
@pytest.mark.parametrize("family", [family for family in MODELS if family != "deepseek"])
def test_what_transformers_saves_is_what_was_released(family: str, tmp_path: Path) -> None:
    name = MODELS[family]
    AutoConfig.for_model(**their_config(name)).save_pretrained(tmp_path)
    saved, meant = profile_from_dir(tmp_path), read(their_config(name))
    if family == "dbrx":  # transformers does not look for the base of the positions where DBRX has it
        assert saved.attention == replace(meant.attention, rope_theta=10000.0)
    else:
        assert saved.attention == meant.attention
    assert (saved.router, saved.experts, saved.moe_layers) == (meant.router, meant.experts, meant.moe_layers)
    assert (saved.norm_eps, saved.max_positions, saved.head_bias) == (
        meant.norm_eps,
        meant.max_positions,
        meant.head_bias,
    )


@pytest.mark.peer
@pytest.mark.parametrize("family", [family for family in MODELS if family not in ("deepseek", "dbrx")])
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    known_names = AutoConfig.for_model(family)
    needed = {*NEEDED, FAMILIES[family].expert_width_key}
    values = {key: getattr(known_names, key) for key in needed}
    if family == "deepseek_v2":
        values["num_experts_per_tok"] = known_names.num_experts_per_tok = 6
    if family == "glm4_moe":  # hidden size over heads, which transformers would take, is 42.7
        values["head_dim"] = 128
    model = read({"model_type": family, **values})
    router, experts, attention = model.router, model.experts, model.attention
    count = known_names.num_experts if hasattr(known_names, "num_experts") else known_names.num_local_experts
    assert (experts.num_experts, router.top_k) == (count, known_names.num_experts_per_tok)
    assert router.normalize == getattr(known_names, "norm_topk_prob", family == "gpt_oss")
    assert (router.groups, router.top_groups) == (
        getattr(known_names, "n_group", None) or 1,
        getattr(known_names, "topk_group", None) or 1,
    )
    assert router.scale == getattr(known_names, "routed_scaling_factor", 1.0)
    shared = getattr(known_names, "n_shared_experts", 0) * getattr(known_names, "moe_intermediate_size", 0)
    assert experts.shared_intermediate_size == getattr(known_names, "shared_expert_intermediate_size", shared)
    assert experts.clamp == getattr(known_names, "swiglu_limit", None)
    assert model.moe_layers.index(True) == getattr(known_names, "first_k_dense_replace", 0)
    assert attention.num_kv_heads == known_names.num_key_value_heads
    assert attention.qkv_bias == getattr(known_names, "qkv_bias", getattr(known_names, "attention_bias", None))
    assert attention.window == (getattr(known_names, "sliding_window", None) or None)
    windows = tuple(kind == "sliding_attention" for kind in getattr(known_names, "layer_types", ()))
    assert attention.window_layers == (windows if attention.window else ())
    assert attention.rope_theta == known_names.rope_parameters["rope_theta"]
    assert attention.rotary_share == known_names.rope_parameters.get("partial_rotary_factor", 1.0)
    assert (model.max_positions, model.norm_eps) == (known_names.max_position_embeddings, known_names.rms_norm_eps)
    assert model.head_bias == getattr(known_names, "lm_head_bias", False)
    if attention.latent:
        assert attention.latent == LatentSpec(
            q_lora_rank=known_names.q_lora_rank,
            kv_lora_rank=known_names.kv_lora_rank,
            nope_head_dim=known_names.qk_nope_head_dim,
            rope_head_dim=known_names.qk_rope_head_dim,
            value_head_dim=known_names.v_head_dim,
        )


@pytest.mark.peer
def test_absent_keys_of_dbrx_mean_what_they_mean_to_transformers() -> None:
    known_names = AutoConfig.for_model("dbrx")
    values = {"d_model": known_names.d_model, "n_heads": known_names.n_heads, "n_layers": known_names.n_layers}
    width = {"ffn_config": {"ffn_hidden_size": known_names.ffn_config.ffn_hidden_size}}
    model = read({"model_type": "dbrx", "vocab_size": known_names.vocab_size, **values, **width})
    assert model.experts.num_experts == known_names.ffn_config.moe_num_experts
    assert model.router.top_k == known_names.ffn_config.moe_top_k
    assert model.router.normalize == (known_names.ffn_config.moe_normalize_expert_weights == 1)
    assert model.attention.num_kv_heads == known_names.attn_config.kv_n_heads
    assert (model.attention.clip_qkv, model.max_positions) == (
        known_names.attn_config.clip_qkv,
        known_names.max_seq_len,
    )


@pytest.mark.peer
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [2], "num_experts": 6}),
        ("qwen2_moe", {"tie_word_embeddings": True, "decoder_sparse_step": 2, "num_experts": 6}),
        ("deepseek_v2", {**LATENT, "q_lora_rank": 40, "attention_bias": True, "n_routed_experts": 6}),
        ("deepseek_v2", {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_routed_experts": 6}),
        ("deepseek_v3", {**LATENT, "q_lora_rank": 40, "attention_bias": True, "n_routed_experts": 16}),
        ("deepseek_v3", {**LATENT, "q_lora_rank": None, "n_shared_experts": 3, "n_routed_experts": 16}),
        ("gpt_oss", {"attention_bias": False, "num_local_experts": 6}),
        ("gpt_oss", {"tie_word_embeddings": True, "num_local_experts": 6}),
        ("phimoe", {"attention_bias": True, "num_local_experts": 6}),
        ("phimoe", {"lm_head_bias": True, "num_local_experts": 6}),
        ("glm4_moe", {"use_qk_norm": True, "n_routed_experts": 6}),
        ("glm4_moe", {"attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 3}),
    ],
)
def test_every_option_has_the_tensors_it_has_in_transformers(family: str, options: dict[str, Any]) -> None:
    config = {"model_type": family, **SMALL, **options}
    if config.get("tie_word_embeddings"):
        parameters, buffers = on_meta(config)
        shapes = {**parameters, **{key: shape for key, shape in buffers.items() if key != "lm_head.weight"}}
    else:
        shapes = {key: shape for result in on_meta(config) for key, shape in result.items()}
    assert_same_tensors(read(config), shapes)


@pytest.mark.peer
@pytest.mark.parametrize("last", [0, 3, 24])
def test_windows_of_qwen2_alternate_up_to_a_layer(last: int) -> None:
    changes = {"use_sliding_window": True, "max_window_layers": last}
    types = AutoConfig.for_model(**{**model_config(MODELS["qwen2_moe"]), **changes}).layer_types
    attention = released("qwen2_moe", **changes).attention
    assert attention.window == 32768
    assert attention.window_layers == tuple(kind == "sliding_attention" for kind in types)
    assert released("qwen2_moe").attention.window is None


def test_windows_lie_where_layer_types_says() -> None:
    layers = [True, True, False, *[False] * 21]
    types = ["sliding_attention" if layer else "full_attention" for layer in layers]
    assert released("gpt_oss").attention.window_layers == (True, False) * 12
    assert released("gpt_oss", layer_types=None).attention.window_layers == (True, False) * 12
    assert released("gpt_oss", layer_types=types).attention.window_layers == tuple(layers)
    assert released("gpt_oss", sliding_window=None).attention.window is None
    assert released("phimoe").attention.window_layers == ()


def test_a_latent_is_cached_instead_of_keys_and_values() -> None:
    deepseek, lite = (load_model_profile(name).attention for name in ("deepseek-v2", "deepseek-v2-lite"))
    assert deepseek.cache_width == lite.cache_width == 512 + 64
    assert (deepseek.head_dim, deepseek.num_kv_heads) == (192, 128)
    assert deepseek.latent and deepseek.latent.q_lora_rank == 1536
    assert lite.latent and lite.latent.q_lora_rank is None
    assert released("deepseek").attention.cache_width == 2 * 16 * 128


def test_each_family_has_its_own_routing() -> None:
    v3 = released("deepseek_v3").router
    assert (v3.scoring, v3.groups, v3.top_groups, v3.scale, v3.selection_bias) == ("sigmoid", 8, 4, 2.5, True)
    v2 = released("deepseek_v2").router
    assert (v2.scoring, v2.groups, v2.top_groups, v2.scale, v2.normalize) == ("softmax", 8, 3, 16.0, False)
    assert (released("gpt_oss").router.scoring, released("gpt_oss").router.bias) == ("softmax_of_top", True)
    assert released("phimoe").router.scoring == "sparsemixer"
    assert (released("glm4_moe").router.scoring, released("glm4_moe").router.groups) == ("sigmoid", 1)
    assert (released("dbrx").router.top_k, released("dbrx").router.normalize) == (4, True)


def test_shared_experts_are_one_feed_forward_of_their_common_width() -> None:
    assert released("qwen2_moe").experts.shared_intermediate_size == 5632
    assert released("qwen2_moe").experts.shared_gate
    assert released("deepseek_v2").experts.shared_intermediate_size == 2 * 1536
    assert not released("deepseek_v2").experts.shared_gate
    for none in (None, 0):
        assert released("deepseek", n_shared_experts=none).experts.shared_intermediate_size == 0
    assert not released("qwen2_moe", shared_expert_intermediate_size=0).experts.shared_gate


def test_a_checkpoint_of_gpt_oss_is_bfloat16_without_saying_so() -> None:
    assert "torch_dtype" not in model_config("gpt-oss-20b")
    assert released("gpt_oss").dtype == "bfloat16"
    assert released("gpt_oss", torch_dtype="float32").dtype == "float32"


@pytest.mark.parametrize("family", MODELS)
def test_planning_takes_any_known_positions_and_remembers_their_name(family: str) -> None:
    for rope_type in ROPE_TYPES:
        scaling = {"rope_type": rope_type, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        model = released(family, rope_scaling=None, rope_parameters=scaling)
        assert model.attention.rope_type == rope_type
        scaled = rope_type in ("linear", "yarn", "llama3")
        assert (model.attention.rope_scaling and model.attention.rope_scaling.factor) == (8.0 if scaled else None)
        assert model.attention.rope_theta == released(family).attention.rope_theta
        based = released(family, rope_scaling=None, rope_parameters={**scaling, "rope_theta": 5e5})
        assert based.attention.rope_theta == 5e5


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("deepseek", {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("deepseek", {"scoring_func": "sigmoid"}, 'scoring_func "sigmoid" is not supported; known: "softmax"'),
        ("deepseek", {"first_k_dense_replace": 28}, "dense model"),
        ("deepseek", {"moe_layer_freq": 0}, "moe_layer_freq"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, '"greedy", "group_limited_greedy"'),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias true is not supported; known: false"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank"),
        ("deepseek_v2", {"kv_lora_rank": "512"}, "kv_lora_rank"),
        ("deepseek_v3", {"n_group": 7}, "n_group (7) must divide the 256 experts"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group (9) must be at most n_group"),
        ("dbrx", {"d_model": None}, "d_model is missing"),
        ("dbrx", {"attn_config": [8]}, "attn_config must be an object"),
        ("dbrx", {"attn_config": {"kv_n_heads": 5}}, "num_key_value_heads (5)"),
        ("dbrx", {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv must be a number above 0"),
        (
            "dbrx",
            {"ffn_config": {"ffn_hidden_size": 64, "moe_normalize_expert_weights": 2}},
            "ffn_config.moe_normalize_expert_weights 2 is not supported; known: 1",
        ),
        (
            "dbrx",
            {"ffn_config": {"ffn_hidden_size": 64, "ffn_act_fn": {"name": "gelu"}}},
            "ffn_config.ffn_act_fn.name 'gelu' is not supported",
        ),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be a list of 24 of"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 24}, "full_attention, sliding_attention"),
        ("gpt_oss", {"swiglu_limit": "7"}, "swiglu_limit"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ("phimoe", {"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not supported"),
    ],
)
def test_impossible_values_are_refused_by_the_key_of_the_file(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        released(family, **changes)
    assert str(caught.value).startswith("config.json: ")
    assert says in str(caught.value)
