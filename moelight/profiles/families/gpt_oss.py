"""gpt-oss: a window in every other layer, attention sinks, biases everywhere, clamped experts.

Released files hold the experts in blocks of 4 bits (MXFP4) and the rest in bfloat16, which ``config.json`` leaves out.
"""

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import GPT_OSS_STYLE

FAMILY = ModelFamily(
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
