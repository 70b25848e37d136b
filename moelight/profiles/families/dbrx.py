"""DBRX: a nested config, q, k and v in one tensor, LayerNorm without biases."""

from moelight.profiles.families.family import ROPE_TYPES, ModelFamily
from moelight.profiles.names import DBRX_STYLE

FAMILY = ModelFamily(
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
