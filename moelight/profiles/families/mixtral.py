"""Mixtral: softmax, top-k, always renormalised, router weights kept in float32; optional sliding window."""

from moelight.profiles.families.family import ModelFamily
from moelight.profiles.names import MIXTRAL_STYLE

FAMILY = ModelFamily(
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
