"""Checkpoints of families that moelight runs as transformers' module graph: of their mechanisms, 0.8 to 0.9 GB each in
bfloat16, random weights. transformers writes them, so they are files as a hub has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "intermediate_size": 768,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "deepseek_v2": {
        "moe_intermediate_size": 512,
        "intermediate_size": 1024,
        "n_routed_experts": 48,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "qwen3_next": {
        "moe_intermediate_size": 448,
        "shared_expert_intermediate_size": 448,
        "num_experts": 48,
        "num_experts_per_tok": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
_DEVIATION = 0.03


def make_graph_shape(name: str, directory: Path) -> Path:
    """The checkpoint ``name`` of `SHAPES` in ``directory``: made unless it is there; its place."""
    from transformers import AutoConfig, AutoModelForCausalLM

    out = directory / f"{name}-graph"
    if not (out / "config.json").exists():
        unfinished = directory / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        config = AutoConfig.for_model(name, **_COMMON, **SHAPES[name])
        torch.manual_seed(0)
        with torch.no_grad():
            module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for weight in module.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, _DEVIATION)
            module.save_pretrained(unfinished)
        write_tokenizer(unfinished, config.vocab_size)
        unfinished.rename(out)
    return out
