"""DeepSeek: many small experts and a few shared ones; the first layers are dense.

The first generation has plain attention; V2 has latent attention and grouped routing (groups are chosen first, then
experts within them); V3 scores by a sigmoid, adds a bias for selection only, and rescales the weights.
"""

from dataclasses import replace

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import QWEN_STYLE

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
