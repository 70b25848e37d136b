"""Phi-3.5-MoE: LayerNorm with biases, biases in attention and head, routing by sparsemixer."""

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import PHIMOE_STYLE

FAMILY = ModelFamily(
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
