"""A checkpoint whose experts are as large as one likes and compute what they did: real routing, real bytes.

Every expert of a trained model gets more columns, and all of them are zero: what it computes, whom its routers choose
and which tokens come out stay as they were, while a page takes megabytes, as those of published models do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def pad_experts(source: Path, target: Path, page_bytes: int) -> None:
    """Write the checkpoint ``source`` (qwen3_moe, one file) to ``target`` with experts of about ``page_bytes``."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    width = max(1, page_bytes // (3 * config["hidden_size"] * 2))
    if (target / "config.json").is_file():
        made = json.loads((target / "config.json").read_text(encoding="utf-8"))
        if made["moe_intermediate_size"] == width and (target / "model.safetensors").is_file():
            return
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors") and file.is_file() and file.suffix == ".json":
            shutil.copy(file, target)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".mlp.experts." in name:
            rows, columns = tensor.shape
            down = "down_proj" in name
            wide = torch.zeros((rows, width) if down else (width, columns), dtype=tensor.dtype)
            wide[:rows, :columns] = tensor
            tensors[name] = wide
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config["moe_intermediate_size"] = width
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def pad_to_blocks(source: Path, target: Path, block: int = 256) -> None:
    """Write the checkpoint ``source`` (qwen3_moe, one file) to ``target`` with zeros around its matrices, so that all
    rows are whole blocks, and logits stay as they were: four times the hidden size, of which norms are half. One token
    is added, as likely as ``<unk>``: llama.cpp takes no vocabulary without a merge."""
    if (target / "model.safetensors").is_file():
        return
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    hidden, queries = config["hidden_size"], config["num_attention_heads"]
    more = max(1, block // (queries * config["head_dim"]))
    wide = {
        "hidden_size": 4 * hidden,
        "moe_intermediate_size": -(-config["moe_intermediate_size"] // block) * block,
        "num_attention_heads": more * queries,
        "num_key_value_heads": more * config["num_key_value_heads"],
        "rms_norm_eps": config["rms_norm_eps"] / 4,
        "vocab_size": config["vocab_size"] + 1,
    }
    assert wide["hidden_size"] % block == 0 == queries % config["num_key_value_heads"]
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        shape = [_widened(size, kind, config, wide) for size, kind in zip(tensor.shape, _kinds(name), strict=True)]
        tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
        norm = name.endswith(("layernorm.weight", "model.norm.weight"))
        tensors[name][tuple(slice(size) for size in tensor.shape)] = tensor / 2 if norm else tensor
        if _kinds(name) == "vh":
            tensors[name][-1] = tensors[name][_UNKNOWN]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | wide, indent=2) + "\n", encoding="utf-8")
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["~~"] = config["vocab_size"]
    tokenizer["model"]["merges"] = [["~", "~"]]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


_UNKNOWN = 2  # the token <unk>

# What the dimensions of a tensor are: hidden size, expert width, query or key-value heads, vocabulary, none of them.
_KINDS = {
    "q_proj": "qh",
    "k_proj": "kh",
    "v_proj": "kh",
    "o_proj": "hq",
    "gate_proj": "ih",
    "up_proj": "ih",
    "down_proj": "hi",
    "q_norm": "-",
    "k_norm": "-",
    "gate": "-h",
    "embed_tokens": "vh",
    "lm_head": "vh",
}


def _kinds(name: str) -> str:
    return _KINDS.get(name.split(".")[-2], "h")


def _widened(size: int, kind: str, config: dict[str, int], wide: dict[str, int]) -> int:
    if kind == "v":
        return wide["vocab_size"]
    keys = {"h": "hidden_size", "i": "moe_intermediate_size", "q": "num_attention_heads", "k": "num_key_value_heads"}
    return size * wide[keys[kind]] // config[keys[kind]] if kind in keys else size
