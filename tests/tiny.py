"""Tiny random checkpoints of every family, in odd shapes, written by transformers itself: ground truth for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
BOS, EOS, PAD = 256, 257, 258
SPECIALS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
SHARD_SIZE = "60KB"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_SHAPES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 56},
    "qwen3_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "intermediate_size": 72,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": True,
    },
    "olmoe": {
        "num_experts": 6,
        "intermediate_size": 40,
        "hidden_size": 240,
        "clip_qkv": 1.25,
        "norm_topk_prob": False,
    },
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A raw ``config.json`` of ``family``: 6 experts top-3, 6 query and 2 key heads of 40, hidden 48, 3 layers.

    ``qwen3_moe`` has 6 layers: sparse are the second and the last, for every other layer may be
    (``decoder_sparse_step``) and the fourth is named in ``mlp_only_layers``. ``olmoe`` clips q, k and v; its norms
    over whole projections want hidden size = heads x head size, so hidden is 240.
    """
    return {"model_type": family, **_SHAPES, **_FAMILY[family], **overrides}


def save_tiny(
    directory: Path,
    family: str,
    *,
    dtype: str = "float32",
    tie: bool = False,
    seed: int = 0,
    fused: bool = False,
    sharded: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random model of ``family`` with a byte-level tokenizer into ``directory``; returns ``directory``.

    ``fused`` stores the experts of a layer as one tensor, under transformers 5's own names; ``sharded`` cuts the
    weights into several files under an index. ``overrides`` are keys of ``config.json``.
    """
    directory = Path(directory)
    values = tiny_config(family, tie_word_embeddings=tie, dtype=dtype, **overrides)
    if values["vocab_size"] <= max(SPECIALS.values()):
        raise ValueError(f"vocab_size must cover {len(SPECIALS)} special tokens after the 256 bytes")
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    randomize(model, seed)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE if sharded else "1GB")
    if fused:
        _save_fused(model, directory, sharded=sharded)
    save_byte_tokenizer(directory)
    return directory


def hf_model(directory: Path, **options: Any) -> PreTrainedModel:
    """The checkpoint in ``directory`` as transformers loads it, for inference."""
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that prompts diverge, norms and biases unlike their usual 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif "embed_tokens" in name:
                noise *= 0.3 if model.config.tie_word_embeddings else 1.0
            else:
                noise *= 0.2 if weight.dim() == 1 else 1.4 / weight.shape[-1] ** 0.5
            weight.copy_(noise)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer whose first 256 ids are the bytes, with a chat template and no merges."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _save_fused(model: PreTrainedModel, directory: Path, *, sharded: bool) -> None:
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if not sharded:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return
    plan = split_torch_state_dict_into_shards(state, max_shard_size=SHARD_SIZE)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, directory / file, metadata={"format": "pt"})
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
