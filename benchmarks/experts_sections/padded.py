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
