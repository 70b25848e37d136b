"""Matrices of random codes in any format, with scales that make numbers of about 0.02, and checkpoints of them.

Codes are drawn, not rounded, so that neither a quantiser nor calibration data is needed.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from peers.common import random_huge
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moelight.formats.bitsandbytes import CODE_VALUES
from moelight.formats.format import Format, TensorSpec
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import read_quantization

# `quantization_config` of checkpoints that are drawn.
CONFIGS: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            }
        },
        "ignore": ["lm_head", "re:.*gate$"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "mlx": {"bits": 4, "group_size": 64, "mode": "affine", "lm_head": False, "model.embed_tokens": False},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
# Bytes of a block at which its float16 scales begin.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q8_0", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), (0,)),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_M": (),
    "TQ2_0": (64,),
    "TQ1_0": (52,),
}
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Scales, and numbers beside them, that make numbers of about 0.02; of the other formats scales of 0.002.
_SCALES = {"bitsandbytes": 0.02}
_BESIDE = {"nvfp4": 51200.0, "mlx": -0.015}


def drawn(stored: Format, count: int, rows: int, columns: int) -> dict[str, Tensor]:
    """Tensors [count, …] of ``count`` matrices [rows, columns], by suffix."""
    result: dict[str, Tensor] = {}
    for part in stored.tensors(rows, columns):
        suffix = part.suffix
        if suffix not in stored.names:
            continue
        if stored.order and suffix == stored.names[-1]:  # the group of each column: they are in order
            groups = torch.arange(columns, dtype=torch.int32) // stored.group
            result[suffix] = groups.expand(count, columns).contiguous()
            continue
        if (value := _constant(stored, suffix, part)) is not None:
            result[suffix] = value.expand(count, *part.shape).contiguous()
            continue
        codes = random_huge((count * part.nbytes,), torch.uint8)
        if stored.key == "ggml":
            blocks = codes.view(-1, stored.block_bytes)
            for at in _HALVES[stored.name]:
                blocks[:, at : at + 2] = torch.tensor([0.0002], dtype=torch.float16).view(torch.uint8)
            if stored.name == "IQ1_M":  # four bits of the scale are in every other byte
                blocks[:, 49::2] = (blocks[:, 49::2] & 15) | torch.tensor([0, 128, 0, 16], dtype=torch.uint8)
        elif part.dtypes[0] == "F8_E4M3":
            codes &= 0xB7  # no number above 2^-1 or so, and no NaN
        result[suffix] = codes.view(torch.int32) if part.dtypes[0] in ("I32", "U32") else codes
        result[suffix] = result[suffix].view(count, *part.shape)
        views = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
        if part.dtypes[0] in views:
            result[suffix] = result[suffix].view(views[part.dtypes[0]])
    return result


def _constant(stored: Format, suffix: str, part: TensorSpec) -> Tensor | None:
    """The number that all scales are, or all those that go with them; None for other tensors."""
    if stored.key == "ggml" or suffix == stored.names[0]:
        return None
    number = _SCALES.get(stored.key, 0.002) if suffix == stored.names[1] else _BESIDE.get(stored.key)
    if part.dtypes[0] in _FLOATS:
        return None if number is None else torch.tensor(number, dtype=_FLOATS[part.dtypes[0]])
    exponent = torch.tensor(120, dtype=torch.uint8)  # 2^-7, in E4M3 256
    if suffix != stored.names[1]:
        return None
    return exponent.view(torch.float8_e4m3fn) if part.dtypes[0] == "F8_E4M3" else exponent


def drawn_checkpoint(model: Path, kind: str) -> Path:
    """The checkpoint ``model`` with drawn matrices of ``kind``, a key of `CONFIGS`, wherever that format has them;
    beside the model, made unless it is there."""
    out = model.with_name(f"{model.name}-{kind}")
    if out.exists():
        return out
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": CONFIGS[kind]}
    config |= {"transformers_version": "4.57.6"} if kind == "nf4" else {}  # whose experts are linear layers
    quantization = read_quantization(HFConfig(config, where="config.json"))
    assert quantization is not None
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(model, unfinished, ignore=shutil.ignore_patterns("*.safetensors*"))
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    files = dict[str, str]()
    for path in sorted(model.glob("*.safetensors")):
        tensors = dict[str, Tensor]()
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a file, and no mapping
                module, shape = name.removesuffix(".weight"), shard.get_slice(name).get_shape()
                stored = quantization.format_of(module) if len(shape) == 2 else None
                if stored is None:
                    tensors[name] = shard.get_tensor(name)
                else:
                    tensors |= {module + suffix: part for suffix, part in _matrix(stored, *shape).items()}
        save_file(tensors, unfinished / path.name, {"format": "pt"})
        files |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": files}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    unfinished.rename(out)
    return out


def _matrix(stored: Format, rows: int, columns: int) -> dict[str, Tensor]:
    """All tensors of a matrix on disk."""
    tensors = {suffix: part[0].clone() for suffix, part in drawn(stored, 1, rows, columns).items()}
    if stored.key == "bitsandbytes":
        scales, state = stored.names[1], {"quant_type": "nf4", "blocksize": stored.group, "shape": [rows, columns]}
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[scales] = tensors[scales].flatten()
        tensors[stored.names[0]] = tensors[stored.names[0]].reshape(-1, 1)
        tensors[".weight.quant_map"] = torch.frombuffer(
            bytearray(struct.pack("<16f", *CODE_VALUES["nf4"])), dtype=torch.float32
        )
        tensors[".weight.quant_state.bitsandbytes__nf4"] = text
    return tensors
