"""GLM-4.5: routing and shared expert as in DeepSeek-V3, grouped-query attention, half of each head rotated."""

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import QWEN_STYLE

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
