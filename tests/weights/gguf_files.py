"""Tiny models of transformers as GGUF files, written by the ``gguf`` package as llama.cpp's converter does."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moelight.formats.ggml import GGML_FORMATS
from tests.kernels.quantized import matrix

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_MOE = {"moe_intermediate_size": 32, "norm_topk_prob": True}
_DEEPSEEK = {
    **_MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.5,
}
# By architecture of llama.cpp: the family and its config.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3moe": ("qwen3_moe", {**_MOE, "num_experts": 4}),
    "qwen2moe": (
        "qwen2_moe",
        {**_MOE, "norm_topk_prob": False, "num_experts": 4, "shared_expert_intermediate_size": 64, "head_dim": None},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "norm_topk_prob": False}),
    "deepseek2": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "n_group": 4,
            "topk_group": 2,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "q_lora_rank": 32,
        },
    ),
    "deepseek2 softmax": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 16}),
}


def tiny(architecture: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A random model and its raw config, of which ``sizes`` replaces values."""
    family, values = CONFIGS[architecture]
    config = {**_SMALL, "model_type": family, "dtype": "bfloat16", **values, **sizes}
    if family == "gpt_oss":
        config["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 150000.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    torch.manual_seed(1)
    left_out = {"dtype"} | ({"head_dim"} if config["head_dim"] is None else set())
    theirs = AutoConfig.for_model(**{key: value for key, value in config.items() if key not in left_out})
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            if weight.is_floating_point():
                weight.normal_().copy_(weight.bfloat16())  # what a file keeps in float32 came from bfloat16
    return model, config


def write_gguf(
    path: Path,
    architecture: str,
    *,
    halves: bool = True,
    shard: int = 0,
    experts: str = "Q4_0",
    vocab: bool = False,
    fused: bool = False,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    types: Mapping[str, str] = MappingProxyType({}),
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Write `tiny` of ``architecture`` to ``path``, at most ``shard`` tensors a part; returns tensors before they were
    quantised. ``halves``: DeepSeek's kv_b in two parts, as newer converters write it; ``fused``: as with
    ``--fuse-gate-up-exps --fuse-qkv``. ``metadata`` replaces values of keys; None: the key is left out. ``types`` are
    those of tensors by the beginning of their names."""
    model, config = tiny(architecture, sizes)
    name = architecture.partition(" ")[0]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=shard)
    _metadata(writer, config)
    if vocab:
        add_vocabulary(writer, config["vocab_size"])
    for key, value in metadata.items():
        for pairs in writer.kv_data:
            pairs.pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    written = _tensors(name, model, config, halves)
    if fused:
        written = _fused(written)
    for key, tensor in written.items():
        kind, data = _kind(key, tensor, experts, types), tensor.contiguous().numpy()
        if tensor.ndim > 3:  # q and k by heads and halves
            data = data.reshape(-1, tensor.shape[-1])
        if key.endswith("gate_inp_shexp.weight"):  # llama.cpp's quantiser leaves out dimensions of 1
            data = data.reshape(-1)
        writer.add_tensor(key, blocks_of(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def save_numbers(
    directory: Path,
    architecture: str,
    *,
    halves: bool = True,
    experts: str = "Q4_0",
    dtype: torch.dtype = torch.bfloat16,
    types: Mapping[str, str] = MappingProxyType({}),
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Save in ``directory``, by transformers and in ``dtype``, the model whose parameters are the numbers of what
    `write_gguf` writes."""
    model, config = tiny(architecture, sizes)
    for key, tensor in _tensors(architecture.partition(" ")[0], model, config, halves).items():
        tensor.copy_(as_written(tensor, _kind(key, tensor, experts, types).name))
    model.to(dtype).save_pretrained(directory)


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`conversion/base.py: ModelBase.modify_tensors`: gate and up of experts, and q, k and v, one after another."""
    result = {}
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".attn_q.")
        if layer:
            rows = [tensors[f"{layer}.attn_{name}.{part}"] for name in "qkv"]
            result[f"{layer}.attn_qkv.{part}"] = torch.cat(
                [row.reshape(-1, row.shape[-1]) if row.ndim > 1 else row for row in rows]
            )
        elif key.endswith("gate_exps.weight"):
            result[key.replace("gate", "gate_up")] = torch.cat((tensor, tensors[key.replace("gate", "up")]), 1)
        elif not any(part in key for part in (".attn_k.", ".attn_v.", "up_exps.weight")):
            result[key] = tensor
    return result


def _kind(key: str, tensor: Tensor, experts: str, types: Mapping[str, str]) -> gguf.GGMLQuantizationType:
    if (stated := next((name for start, name in types.items() if key.startswith(start)), None)) is not None:
        return gguf.GGMLQuantizationType[stated]
    if tensor.ndim == 1 or key.endswith(".bias") or "gate_inp." in key:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType[experts if "_exps." in key else "Q8_0"]


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family = config["model_type"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_count(
        next(config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config)
    )
    writer.add_feed_forward_length(config["intermediate_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "deepseek" in family:
        _latent_metadata(writer, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    if family == "mixtral":
        writer.add_rope_dimension_count(config["head_dim"])
    if config["head_dim"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])


def _latent_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`DeepseekV2Model.set_gguf_parameters`: keys and values as absorbed attention has them, and in full."""
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + rope)
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    sigmoid = config.get("scoring_func") == "sigmoid"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    writer.add_rope_dimension_count(rope)
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [f"{first} {second}" for first in "abcdefgh" for second in "abcdefgh"][: size - 2 - len(tokens)]
    tokens += [merge.replace(" ", "") for merge in merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|end|>", "<|pad|>"])
    writer.add_token_types([1] * len(tokens) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(size - 2)


def _tensors(name: str, model: PreTrainedModel, config: dict[str, Any], halves: bool) -> dict[str, Tensor]:
    """The tensors of a file as views of the parameters of ``model``."""
    arch = next(arch for arch, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == name)
    names, result = gguf.get_tensor_name_map(arch, config["num_hidden_layers"]), dict[str, Tensor]()
    heads = config["num_attention_heads"]
    for original, tensor in model.state_dict().items():
        layer, value = original.split(".")[2] if "layers" in original else "", tensor
        key = original.replace("e_score_correction_bias", "e_score_correction.bias")
        if ".experts." in key:
            result |= _experts(f"blk.{layer}.ffn_", key.rpartition(".")[2], value, config["model_type"])
        elif "kv_b_proj" in key and halves:
            both = value.view(heads, config["qk_nope_head_dim"] + config["v_head_dim"], config["kv_lora_rank"])
            k, v = both.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            result |= {f"blk.{layer}.attn_k_b.weight": k.transpose(1, 2), f"blk.{layer}.attn_v_b.weight": v}
        else:
            if name == "llama" and (".q_proj" in key or ".k_proj" in key):
                count = heads if ".q_proj" in key else config["num_key_value_heads"]
                value = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2)
            theirs = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, key
            result[theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"] = value
    return result


def _experts(prefix: str, matrix: str, value: Tensor, family: str) -> dict[str, Tensor]:
    """Of fused tensors, as transformers keeps them in memory."""
    kind = "bias" if matrix.endswith("_bias") else "weight"
    if family == "gpt_oss" and kind == "weight":
        value = value.transpose(1, 2)
    if matrix.startswith("down"):
        return {f"{prefix}down_exps.{kind}": value}
    gate, up = (value[:, ::2], value[:, 1::2]) if family == "gpt_oss" else value.chunk(2, dim=1)
    return {f"{prefix}gate_exps.{kind}": gate, f"{prefix}up_exps.{kind}": up}


def blocks_of(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """``data`` as the package writes it in ``kind``; of types that it only reads, random blocks that depend on it."""
    try:
        return quantize(data, kind)
    except NotImplementedError:
        drawn = matrix(GGML_FORMATS[kind.name], data.size // data.shape[-1], data.shape[-1], zlib.crc32(data.tobytes()))
        return drawn.tensors[".weight"].numpy().reshape(*data.shape[:-1], -1)


def as_written(tensor: Tensor, kind: str) -> Tensor:
    """The numbers of ``tensor`` after a round trip through ``kind``."""
    from gguf.quants import dequantize

    number = gguf.GGMLQuantizationType[kind]
    raw = blocks_of(np.ascontiguousarray(tensor.float().numpy()), number)
    return torch.from_numpy(dequantize(raw, number)).view(tensor.shape)
