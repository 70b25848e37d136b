"""The supported model families, as data, and the profile of a model by its family."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from moelight.core.errors import ConfigError, did_you_mean
from moelight.profiles.families.family import ModelFamily, read_profile
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile
from moelight.profiles.names import DBRX_STYLE, GPT_OSS_STYLE, MIXTRAL_STYLE, PHIMOE_STYLE

# Mixtral: softmax, top-k, always renormalised, router weights kept in float32; optional sliding window.
MIXTRAL = ModelFamily(
    model_type="mixtral",
    names=MIXTRAL_STYLE,
    expert_width_key="intermediate_size",
    num_experts=8,
    top_k=2,
    kv_heads=8,
    max_positions=131072,
    rope_theta=1e6,
    normalize=True,
    weights_in_model_dtype=False,
    windowed=True,
)

# Qwen3-MoE: softmax, top-k, renormalised on request; RMSNorm on each head of q and k; every n-th layer may be dense.
QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    num_experts=128,
    top_k=8,
    kv_heads=4,
    max_positions=32768,
    norm_eps=1e-6,
    qk_norm="head",
    bias_key="attention_bias",
    windowed=True,
    window=4096,
    window_flag="use_sliding_window",
    sparse_layers=True,
)

# Qwen1.5-MoE and Qwen2-MoE: biases on q, k and v; shared experts behind a sigmoid gate; windows in some layers.
QWEN2_MOE = ModelFamily(
    model_type="qwen2_moe",
    experts_keys=("num_experts",),
    num_experts=60,
    top_k=4,
    kv_heads=16,
    max_positions=32768,
    norm_eps=1e-6,
    bias_key="qkv_bias",
    bias_default=True,
    output_bias=False,
    windowed=True,
    window=4096,
    window_flag="use_sliding_window",
    alternating=True,
    window_layers=28,
    sparse_layers=True,
    shared_width=5632,
    shared_gate=True,
)

# OLMoE: RMSNorm over the whole projections of q and k, which may be clipped.
OLMOE = ModelFamily(
    model_type="olmoe",
    expert_width_key="intermediate_size",
    num_experts=64,
    top_k=8,
    max_positions=4096,
    qk_norm="projection",
    clip_qkv=True,
    bias_key="attention_bias",
)

# Phi-3.5-MoE: sparsemixer routing, LayerNorm with biases, a bias of the output matrix.
PHIMOE = ModelFamily(
    model_type="phimoe",
    names=PHIMOE_STYLE,
    experts_keys=("num_local_experts",),
    expert_width_key="intermediate_size",
    num_experts=16,
    top_k=2,
    kv_heads=8,
    max_positions=131072,
    rope_theta=1e6,
    bias_key="attention_bias",
    windowed=True,
    scoring="sparsemixer",
    normalize=False,
    norm="layer",
    norm_bias=True,
    head_bias=True,
)

# GLM-4.5: sigmoid scores with a selection bias, groups of experts, a shared expert, the first layers dense.
GLM4_MOE = ModelFamily(
    model_type="glm4_moe",
    experts_keys=("n_routed_experts", "num_local_experts"),
    num_experts=128,
    top_k=8,
    kv_heads=8,
    max_positions=131072,
    rotary_share=0.5,
    weights_in_model_dtype=False,
    bias_key="attention_bias",
    output_bias=False,
    qk_norm="head",
    qk_norm_flag="use_qk_norm",
    scoring="sigmoid",
    normalize_default=True,
    grouped=(1, 1),
    scale=1.0,
    selection_bias=True,
    first_dense=1,
    shared_experts=1,
)

# gpt-oss: biases, attention sinks, alternating windows, softmax over the chosen experts, clamped experts in MXFP4.
GPT_OSS = ModelFamily(
    model_type="gpt_oss",
    names=GPT_OSS_STYLE,
    expert_width_key="intermediate_size",
    num_experts=128,
    top_k=4,
    kv_heads=8,
    head_dim=64,
    max_positions=131072,
    rope_theta=150000.0,
    rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    dtype="bfloat16",
    bias_key="attention_bias",
    bias_default=True,
    windowed=True,
    window=128,
    alternating=True,
    sinks=True,
    scoring="softmax_of_top",
    normalize=True,
    router_bias=True,
    expert_bias=True,
    clamp=7.0,
)

# DBRX: one tensor for q, k and v (clipped), one for each matrix of all experts; LayerNorm without biases.
DBRX = ModelFamily(
    model_type="dbrx",
    names=DBRX_STYLE,
    keys={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "num_key_value_heads": "attn_config.kv_n_heads",
        "clip_qkv": "attn_config.clip_qkv",
        "rope_theta": "attn_config.rope_theta",
        "expert_width": "ffn_config.ffn_hidden_size",
        "num_experts_per_tok": "ffn_config.moe_top_k",
        "normalize_power": "ffn_config.moe_normalize_expert_weights",
        "hidden_act": "ffn_config.ffn_act_fn.name",
    },
    only={"normalize_power": (1,)},
    experts_keys=("ffn_config.moe_num_experts",),
    expert_width_key="expert_width",
    num_experts=4,
    top_k=1,
    kv_heads=1,
    head_dim_key=False,
    max_positions=2048,
    clip_qkv=True,
    normalize=True,
    norm="layer",
)

# DeepSeek-MoE: shared experts beside the routed ones, the first layers dense.
DEEPSEEK = ModelFamily(
    model_type="deepseek",
    experts_keys=("n_routed_experts",),
    only={"scoring_func": ("softmax",)},
    max_positions=2048,
    norm_eps=1e-6,
    weights_in_model_dtype=False,
    bias_key="attention_bias",
    first_dense=0,
    shared_experts=0,
)

# DeepSeek-V2: the same with latent attention; experts are chosen within groups, and their weights scaled.
DEEPSEEK_V2 = replace(
    DEEPSEEK,
    model_type="deepseek_v2",
    experts_keys=("n_routed_experts", "num_experts"),
    only={
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    num_experts=64,
    latent=True,
    grouped=(1, 1),
    scale=1.0,
    shared_experts=2,
)

# DeepSeek-V3: the same with sigmoid scores and a selection bias.
DEEPSEEK_V3 = replace(
    DEEPSEEK,
    model_type="deepseek_v3",
    experts_keys=("n_routed_experts", "num_local_experts"),
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    num_experts=256,
    top_k=8,
    max_positions=4096,
    latent=True,
    scoring="sigmoid",
    normalize_default=True,
    grouped=(8, 4),
    scale=2.5,
    selection_bias=True,
    first_dense=3,
    shared_experts=1,
)

_ALL = (MIXTRAL, QWEN3_MOE, OLMOE, QWEN2_MOE, DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3, DBRX, GPT_OSS, PHIMOE, GLM4_MOE)
FAMILIES = {family.model_type: family for family in _ALL}


def unknown_family(config: HFConfig, families: Collection[str]) -> ConfigError:
    """The refusal of ``config``, whose ``model_type`` is none of ``families``. The closest of them is suggested, unless
    it is the mixture-of-experts sibling of a dense family (``qwen2_moe`` of ``qwen2``)."""
    model_type = config.find("model_type")
    dense = isinstance(model_type, str) and any(name.startswith(f"{model_type}_") for name in families)
    near = "" if dense else did_you_mean(str(model_type), families)
    listed = f"{near}; `moelight models` lists those that run"
    return config.error(f"model_type {model_type!r} is not a family that moelight knows{listed}")


def profile_from_config(config: HFConfig, *, name: str) -> ModelProfile:
    """The profile of the model that ``config`` describes.

    Raises ConfigError if ``model_type`` is absent, dense or unknown.
    """
    model_type = config.find("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_family(config, FAMILIES)
    return read_profile(config, FAMILIES[model_type], name=name)


def profile_from_dir(directory: Path) -> ModelProfile:
    """The profile of the checkpoint in ``directory``; reads its ``config.json`` only."""
    return profile_from_config(HFConfig.from_file(directory / "config.json"), name=directory.resolve().name)
