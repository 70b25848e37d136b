"""Switches of released checkpoints where the defaults of a config class of transformers have none, or others."""

from __future__ import annotations

from typing import Any

_ALTERNATE = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

RELEASED: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
            "num_hidden_layers": 12,
            "num_experts_per_tok": 6,
        }
    },
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "doge": {"is_moe": True},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gemma4": {
        "text_config": {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    },
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        }
    },
    "nemotron_h": {"hybrid_override_pattern": "MEMEM*EMEME"},
    "qwen3_omni_moe_thinker": {"text_config": {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}}
    },
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 6, "num_hidden_layers": 24},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1, 2],
            "eos_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
        }
    },
    "step3p7": {"text_config": {"layer_types": _ALTERNATE * 11 + ["full_attention"], "sliding_window": 512}},
}
