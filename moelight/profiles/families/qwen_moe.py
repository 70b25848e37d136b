"""Qwen-MoE: dense layers between the sparse ones.

Qwen3: RMSNorm over each q and k head, explicit head size. Qwen2: biases of q, k and v, and a gated shared expert.
"""

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import QWEN_STYLE

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
