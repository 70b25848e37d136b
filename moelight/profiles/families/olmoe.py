"""OLMoE: RMSNorm over the whole q and k projections, optional clipping of q, k and v."""

from moelight.profiles.families.family import ModelFamily
from moelight.profiles.names import QWEN_STYLE

FAMILY = ModelFamily(
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
