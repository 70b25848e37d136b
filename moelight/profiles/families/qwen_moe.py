"""Qwen3-MoE: RMSNorm over each q and k head, explicit head size, dense layers between the sparse ones."""

from moelight.profiles.families.family import Family
from moelight.profiles.names import QWEN_STYLE

QWEN3_MOE = Family(
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
    bias=True,
    windowed=True,
    window_flag="use_sliding_window",
    sparse_layers=True,
)
