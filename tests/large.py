"""Checkpoints of 0.7 to 1 GB with the switches of released ones, written by transformers: ground truth for tests of
families that run as module graphs. 32 layers, so that two of them are a small part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.graph.released import RELEASED
from tests.tiny import save_byte_tokenizer

_LAYERS = 32
_SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": _LAYERS}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE: dict[str, Any] = {"num_experts_per_tok": 4}
_MANY: dict[str, Any] = {"moe_intermediate_size": 288, "num_experts_per_tok": 6}
LARGE: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **_SIZES,
        **_HEADS,
        **_WIDE,
        "head_dim": 64,
        "intermediate_size": 576,
        "num_local_experts": 16,
        "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
    },
    "deepseek_v2": {
        **_SIZES,
        **_MANY,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 768,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "dbrx": {
        "vocab_size": 320,
        "d_model": 256,
        "n_heads": 4,
        "n_layers": _LAYERS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 576, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "qwen3_next": {
        **_SIZES,
        **_HEADS,
        **_MANY,
        "head_dim": 64,
        "shared_expert_intermediate_size": 288,
        "num_experts": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "glm4_moe": {
        **_SIZES,
        **_HEADS,
        **_MANY,
        "head_dim": 64,
        "intermediate_size": 768,
        "n_routed_experts": 32,
    },
}


def large_model(family: str) -> Any:
    """A random model of ``family`` in float32 under transformers' eager attention, the same every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**RELEASED.get(family, {}), **LARGE[family]})
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 256, 257, 258
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    module.set_experts_implementation("eager")
    module.eval().requires_grad_(False)
    _randomize(module)
    return module


def _randomize(module: nn.Module) -> None:
    """Matrices large enough that prompts diverge; vectors (norms, biases, sinks) near what they are in a new model."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 if "embed" in name or "wte" in name else 1.4 * 256**-0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)


def save_large(module: Any, directory: Path, *, hub_names: bool = True) -> Path:
    """Write ``module`` in shards under the names that hubs use for its family, or under transformers' own."""
    module.save_pretrained(directory, max_shard_size="300MB", save_original_format=hub_names)
    save_byte_tokenizer(directory)
    return directory
