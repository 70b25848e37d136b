"""Small random transformers models with experts, and ragged prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny import BOS, EOS, PAD, randomize

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 56},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 24, "intermediate_size": 72, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 12, "intermediate_size": 40, "head_dim": 8},
    "deepseek_v2": {  # shared experts, a dense layer first
        "n_routed_experts": 8,
        "num_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "intermediate_size": 72,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 6,
        "head_dim": 8,
    },
    # Biases, transposed weights. 64: the last elements of a tensor that fill no vector differ in their last bits.
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 64, "rope_parameters": {"rope_type": "default"}},
}
_SHAPES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def build(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A model of ``family`` with random weights, for inference."""
    config = AutoConfig.for_model(family, **{**_SHAPES, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    randomize(model, 0)
    return model


class ListedExpert(nn.Module):
    """An expert as transformers 4 had them in Mixtral."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(states)) * self.w3(states))


class ListedBlock(nn.Module):
    """A block with a router and a list of experts, as transformers 4 had them."""

    def __init__(self, hidden: int, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(ListedExpert(hidden, width) for _ in range(experts))

    def forward(self, states: Tensor) -> Tensor:
        flat = states.view(-1, states.shape[-1])
        weights, chosen = self.gate(flat).float().softmax(-1).topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        mask = nn.functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        result = torch.zeros_like(flat)
        for expert in mask.sum((1, 2)).nonzero().view(-1).tolist():
            position, token = torch.where(mask[expert])
            result.index_add_(0, token, self.experts[expert](flat[token]) * weights[token, position, None])
        return result.view(states.shape)


def build_listed(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Mixtral whose blocks are those of transformers 4."""
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp = ListedBlock(48, 56, 6, 3)
    randomize(model, 1)
    return model.to(dtype).eval()


def ragged_prompts(count: int = 12) -> tuple[Tensor, Tensor]:
    """``(ids, mask)`` [count, 11], padded on the left."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    ids, mask = torch.full((count, 11), PAD), torch.zeros(count, 11, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 11 - length :] = torch.randint(0, 256, (length,), generator=generator)
        mask[row, 11 - length :] = 1
    return ids, mask


def tokens(model: PreTrainedModel, *, new: int = 4, count: int = 12, seed: int | None = None, **options: Any) -> Tensor:
    """What ``model`` generates after so many `ragged_prompts`: greedily, or sampled with ``seed``."""
    ids, mask = ragged_prompts(count)
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=seed is not None, pad_token_id=PAD, **options
    )


def logits(model: PreTrainedModel) -> Tensor:
    """Of the prompts' last places."""
    ids, mask = ragged_prompts()
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[:, -1]
