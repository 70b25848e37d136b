"""Mixtral: softmax, top-k, always renormalised, router weights kept in float32; optional sliding window."""

from __future__ import annotations

from dataclasses import replace

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import DBRX_STYLE, GPT_OSS_STYLE, MIXTRAL_STYLE, PHIMOE_STYLE, QWEN_STYLE

MIXTRAL = ModelFamily(
    model_type="mixtral",
    names=MIXTRAL_STYLE,
    expert_width_key="intermediate_size",
    num_experts=8,
    top_k=2,
    kv_heads=8,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=1e6,
    normalize=True,
    weights_in_model_dtype=False,
    windowed=True,
)


QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    names=QWEN_STYLE,
    expert_width_key="moe_intermediate_size",
    num_experts=128,
    top_k=8,
    kv_heads=4,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=10000.0,
    weights_in_model_dtype=True,
    qk_norm="head",
    bias_key="attention_bias",
    windowed=True,
    window=4096,
    window_flag="use_sliding_window",
    sparse_layers=True,
)

QWEN2_MOE = ModelFamily(
    model_type="qwen2_moe",
    names=QWEN_STYLE,
    experts_keys=("num_experts",),
    expert_width_key="moe_intermediate_size",
    num_experts=60,
    top_k=4,
    kv_heads=16,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_types=ROPE_TYPES,
    weights_in_model_dtype=True,
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


OLMOE = ModelFamily(
    model_type="olmoe",
    names=QWEN_STYLE,
    expert_width_key="intermediate_size",
    num_experts=64,
    top_k=8,
    kv_heads=None,
    max_positions=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
    weights_in_model_dtype=True,
    qk_norm="projection",
    clip_qkv=True,
    bias_key="attention_bias",
)


PHIMOE = ModelFamily(
    model_type="phimoe",
    names=PHIMOE_STYLE,
    experts_keys=("num_local_experts",),
    expert_width_key="intermediate_size",
    num_experts=16,
    top_k=2,
    kv_heads=8,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=1e6,
    rope_types=ROPE_TYPES,
    weights_in_model_dtype=True,
    bias_key="attention_bias",
    windowed=True,
    scoring="sparsemixer",
    normalize=False,
    norm="layer",
    norm_bias=True,
    head_bias=True,
)


GLM4_MOE = ModelFamily(
    model_type="glm4_moe",
    names=QWEN_STYLE,
    experts_keys=("n_routed_experts", "num_local_experts"),
    expert_width_key="moe_intermediate_size",
    num_experts=128,
    top_k=8,
    kv_heads=8,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_types=ROPE_TYPES,
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


GPT_OSS = ModelFamily(
    model_type="gpt_oss",
    names=GPT_OSS_STYLE,
    expert_width_key="intermediate_size",
    num_experts=128,
    top_k=4,
    kv_heads=8,
    head_dim=64,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=150000.0,
    rope_type="yarn",
    rope_types=ROPE_TYPES,
    dtype="bfloat16",
    weights_in_model_dtype=True,
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
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_types=ROPE_TYPES,
    weights_in_model_dtype=True,
    clip_qkv=True,
    normalize=True,
    norm="layer",
)


DEEPSEEK = ModelFamily(
    model_type="deepseek",
    names=QWEN_STYLE,
    experts_keys=("n_routed_experts",),
    only={"scoring_func": ("softmax",)},
    expert_width_key="moe_intermediate_size",
    num_experts=None,
    top_k=None,
    kv_heads=None,
    max_positions=2048,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_types=ROPE_TYPES,
    weights_in_model_dtype=False,
    bias_key="attention_bias",
    first_dense=0,
    shared_experts=0,
)

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
