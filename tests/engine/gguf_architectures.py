"""GGUF files of llama.cpp's own converter, of every architecture that runs as a module graph, beside transformers.

    python -m tests.engine.gguf_architectures --source DIR [--update] [--names NAME ...]

DIR is the unpacked source of the package llama-cpp-python, which `make gguf` fetches. For each architecture
transformers makes a tiny random checkpoint, the converter writes a file of it in float32, and greedy tokens from the
file are compared with those of transformers on the checkpoint; tokens from files of its quantiser, with those from the
same file unpacked by gguf-py. --update writes the table of docs/reference/gguf.md, its data (gguf_tested.json) and the
headers that test_gguf_architectures.py reads: the keys that the converter wrote, and the tensors' shapes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moelight.core.errors import MoelightError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.models.graph import self_test
from moelight.models.graph.model import language_model
from moelight.profiles import gguf_tested
from moelight.profiles.gguf_tested import ArchitectureTest, read_tests, write_tests
from tests.engine import gguf_quantized
from tests.models.graph.measured import config_of, sized

ROOT = Path(__file__).parents[2]
HEADERS = Path(__file__).with_name("gguf_architectures.json")
TABLE = ROOT / "docs" / "reference" / "gguf.md"
MARK = "<!-- measured by `make gguf` -->"
PROMPTS = [[3, 5, 7, 9], [11, 2], list(range(20, 60))]
TOKENS = 8
_SPARE = {"qwen2": 8, "qwen3_5_moe_text": 16}  # ids, where the tokenizer of the family adds tokens of its own
_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {
    "short_factor": [1.0 + 0.05 * number for number in range(8)],
    "long_factor": [1.5 + 0.5 * number for number in range(8)],
    "original_max_position_embeddings": 32,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
Fixed = Mapping[str, Any]
_STEP: Fixed = {
    "vision_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "mlp_ratio": 2.0,
    },
    "text_config": {
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 8,
        "per_layer_config": {layer: {"num_attention_heads": 8} for layer in (1, 2)},
        "query_pre_attn_scalar": 16,
        "share_expert_dim": 32,
        "sliding_window": 8,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [0.0, 0.0, 0.05, 0.1],
        "swiglu_limits_shared": [0.0, 0.1, 0.0, 0.05],
        "rope_parameters": {
            kind: {**_DEFAULT, "rope_theta": theta, "partial_rotary_factor": factor}
            for kind, theta, factor in (("full_attention", 5e6, 0.5), ("sliding_attention", 1e4, 1.0))
        },
    },
}
# By architecture the family, and values of its config that files do not state and llama.cpp's code fixes. What is in
# brackets is another config of the same architecture.
FAMILIES: Mapping[str, tuple[str, Fixed]] = {
    "afmoe": ("afmoe", {"mup_enabled": True}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bailingmoe2": ("sarvam_moe", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}),
    "bailingmoe2 (groups)": ("sarvam_moe", {"n_group": 4, "topk_group": 2}),
    "chatglm": ("glm", {}),
    "cohere2": ("cohere2", {}),
    "cohere2moe": ("cohere2_moe", {}),
    "command-r": ("cohere", {}),
    "dbrx": ("dbrx", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "deepseek2": ("deepseek_v2", {}),
    "deepseek2 (GLM-4.7-Flash)": ("glm4_moe_lite", {}),
    "deepseek2 (V3)": ("deepseek_v3", {}),
    "deepseek32": ("deepseek_v32", {}),
    "deepseek4": (
        "deepseek_v4",
        {
            "num_hidden_layers": 4,
            "layer_types": [
                "sliding_attention",
                *["compressed_sparse_attention", "heavily_compressed_attention"],
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": [*["hash_moe"] * 2, *["moe"] * 2],
            "rope_parameters": {
                "main": {**_DEFAULT, "partial_rotary_factor": 0.25},
                "compress": {**_YARN, "rope_theta": 160000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0},
            },
            "partial_rotary_factor": 0.25,
        },
    ),
    "dots1": ("dots1", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "exaone": ("exaone", {}),
    "exaone-moe": ("exaone_moe", {}),
    "exaone4": ("exaone4", {}),
    "falcon-h1": (
        "falcon_h1",
        {
            **{
                f"{name}_multiplier": 0.5 + 0.25 * number
                for number, name in enumerate(
                    ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
                )
            },
            "head_dim": 16,
            "mlp_multipliers": [0.75, 1.5],
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 1.75],
            "mamba_d_ssm": 128,
            "mamba_d_head": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": "head_dim"}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": "head_dim"}),
    "gemma4": ("gemma4_text", {"per_layer_config": {5: {"head_dim": 32}}}),
    "gemma4 (26B-A4B)": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "per_layer_config": {5: {"head_dim": 32, "num_key_value_heads": 1}},
        },
    ),
    "gemma4 (E2B)": (
        "gemma4_text",
        {
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "per_layer_config": {layer: {"head_dim": 32} for layer in (2, 5)},
        },
    ),
    "glm-dsa": ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared", "full"]}),
    "glm4": ("glm4", {}),
    "glm4moe": ("glm4_moe", {}),
    "glm5-next": ("glm5_next", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt2": ("gpt2", {}),
    "gptneox": ("gpt_neox", {}),
    "granite": ("granite", {}),
    "granite_swa": ("granite_swa", {}),
    "granite_swa (experts)": ("granitemoe_swa", {"shared_intermediate_size": 48}),
    "granitehybrid": ("granitemoehybrid", {"position_embedding_type": "nope"}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe (shared)": ("granitemoeshared", {"shared_intermediate_size": 48}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"moe_topk": 2}),
    "hy_v3": ("hy_v3", {}),
    "hy_v4": ("hy_v4", {}),
    "jamba": ("jamba", {}),
    "jais2": ("jais2", {}),
    "kimi-linear": (
        "kimi_linear",
        {
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_hidden_layers": 4,
        },
    ),
    "laguna": (
        "laguna",
        {
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", {}),
    "llama": ("llama", {}),
    "llama (Llama 3)": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3}}),
    "llama (experts)": ("mixtral", {}),
    "llama4": ("llama4_text", {"attention_chunk_size": 8192, "floor_scale": 8192}),
    "mellum": ("mellum", {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    "mimo2": (
        "mimo_v2_flash",
        {
            "rope_parameters": {
                kind: {**_DEFAULT, "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
            },
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_hidden_layers": 4,
        },
    ),
    "minicpm3": ("minicpm3", {}),
    "minimax-m2": ("minimax_m2", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}),
    "minimax-m3": (
        "minimax_m3_vl_text",
        {
            "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
    ),
    "mistral3": ("ministral3", {}),
    "mistral4": ("mistral4", {}),
    "nemotron": ("nemotron", {}),
    "nemotron_h_moe": ("nemotron_h", {}),
    "olmo": ("olmo", {"clip_qkv": 8.0}),
    "olmo2": ("olmo2", {}),
    "olmo2 (Olmo 3)": ("olmo3", {}),
    "olmoe": ("olmoe", {}),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3 (128k)": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **_LONG},
        },
    ),
    "phimoe": ("phimoe", {}),
    "phimoe (128k)": (
        "phimoe",
        {
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_mscale": math.sqrt(1 + math.log(2) / math.log(64)),
                "long_mscale": math.sqrt(1 + math.log(2) / math.log(64)),
                **_LONG,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen2vl": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 (yarn)": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen35": ("qwen3_5_text", {}),
    "qwen35moe": ("qwen3_5_moe_text", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next": ("qwen3_next", {}),
    "qwen3vl": ("qwen3", {}),
    "qwen3vlmoe": ("qwen3_moe", {"norm_topk_prob": True}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "starcoder": ("gpt_bigcode", {}),
    "starcoder2": ("starcoder2", {}),
    "step35": ("step3p7", _STEP),
    "step35 (Llama 3)": (
        "step3p7",
        {
            **_STEP,
            "text_config": {
                **_STEP["text_config"],
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "llama3",
                        "rope_theta": 5e6,
                        "partial_rotary_factor": 0.5,
                        **_LLAMA3,
                    },
                    "sliding_attention": {**_DEFAULT, "partial_rotary_factor": 1.0},
                },
            },
        },
    ),
}
_STEP_PUBLISHED: Fixed = {
    "text_config": {
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "norm_expert_weight": True,
        "num_attention_groups": 2,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "rope_theta": [5e6, 1e4, 1e4, 5e6],
    },
}
# By architecture what config.json of published checkpoints has, the converter reads, and transformers does not write.
_BAILING = {"num_experts": 8, "num_shared_experts": 1, "score_function": "sigmoid"}
PUBLISHED: Mapping[str, Fixed] = {
    "bailingmoe2": {"architectures": ["BailingMoeV2ForCausalLM"], **_BAILING},
    "bailingmoe2 (groups)": {"architectures": ["SarvamMoEForCausalLM"], **_BAILING},
    "cohere2": {"rotary_pct": 1.0},
    "deepseek2 (V3)": {"scoring_func": "sigmoid"},
    "deepseek2 (GLM-4.7-Flash)": {"scoring_func": "sigmoid"},
    "deepseek32": {"scoring_func": "sigmoid"},
    "deepseek4": {
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 2,
        "rope_scaling": {**_YARN, "type": "yarn"},
    },
    "exaone": {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu"},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "glm5-next": {
        "first_k_dense_replace": 3,
        "linear_attn_config": {
            "gate_lower_bound": "linear_lower_bound",
            "head_dim": "linear_head_dim",
            "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        },
        "mla_use_nope": True,
        "scoring_func": "sigmoid",
    },
    "gpt2": {"n_ctx": 1024},
    "gptneox": {"rotary_pct": 0.25},
    "hunyuan-moe": {"moe_intermediate_size": ["intermediate_size"], "moe_topk": [2], "num_shared_expert": [1]},
    "kimi-linear": {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": "linear_head_dim",
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "moe_router_activation_func": "sigmoid",
        "num_shared_experts": 1,
    },
    "mimo2": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_parameters": None,
        "rope_theta": 5e6,
        "scoring_func": "sigmoid",
        "swa_head_dim": "head_dim",
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 1e4,
        "swa_v_head_dim": "v_head_dim",
        "topk_method": "noaux_tc",
    },
    "minimax-m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    "minimax-m3": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "moe_layer_freq": [0, 1, 1, 1],
        "n_shared_experts": 1,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": "index_head_dim",
            "sparse_topk_blocks": 3,
            "sparse_block_size": 4,
            "sparse_local_block": 1,
        },
    },
    "mistral4": {"architectures": ["Ministral3ForCausalLM"]},
    "step35": _STEP_PUBLISHED,
    "step35 (Llama 3)": _STEP_PUBLISHED,
    **{
        f"qwen{number}": {
            "architectures": [f"{named}ForConditionalGeneration"],
            "vision_config": {"deepstack_visual_indexes": [1]},
            "text_config": {"model_type": "none"},
            "rope_parameters": {"mrope_section": [4, 2, 2]},
        }
        for number, named in (("2vl", "Qwen2VL"), ("3vl", "Qwen3VL"), ("3vlmoe", "Qwen3VLMoe"))
    },
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 4096},
    "phimoe (128k)": {"architectures": ["PhiMoEForCausalLM"]},
}


# By architecture the family whose conversions give the names of published checkpoints, where the text alone has none.
SAVED_AS: Mapping[str, str] = {"minimax-m3": "minimax_m3_vl"}


# Parts of names, as regular expressions, that transformers saves otherwise than published checkpoints have them.
RENAMED: Mapping[str, Sequence[tuple[str, str]]] = {
    "kimi-linear": ((r"layers\.0\.block_sparse_moe\.", "layers.0.mlp."),),
    "hy_v4": (
        (r"\.hc_pre\.hc_(attn|mlp)_layer\.", r".hc_\1_layer.hc_pre."),
        (r"^model\.hc_pre\.hc_head\.", "model.hc_head."),
        (r"\.mlp\.(shared_experts\.)?linear_gate\.", r".mlp.\1gate_proj."),
    ),
    "deepseek4": (
        (r"^model\.(hc_head\.)?", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_(fn|base|scale)$", r"hc_head_\1"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
}
# Architectures whose experts are published in MXFP4, which the converter does not unpack.
MXFP4_EXPERTS = frozenset({"deepseek4"})
_EXPERT = re.compile(r"(.*\.experts\.\d+\.w[123])\.weight")


def _blocks(weight: torch.Tensor) -> np.ndarray:
    """``weight`` [rows, columns] as blocks uint8 [rows, columns / 32, 17] of MXFP4: a scale, and codes by halves."""
    from gguf.quants import quantize

    blocks = quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4)
    return blocks.reshape(len(weight), -1, 17)


def _packed(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors`` with experts as codes, two of neighbours in a byte, and scales."""
    for key, tensor in tensors.items():
        expert = _EXPERT.fullmatch(key)
        if expert is None:
            yield key, tensor
            continue
        scales, halves = np.split(_blocks(tensor), [1], axis=2)
        codes = np.concatenate((halves & 15, halves >> 4), axis=2)
        pairs = codes[:, :, ::2] | (codes[:, :, 1::2] << 4)
        yield key, torch.from_numpy(pairs.reshape(len(tensor), -1).view(np.int8).copy())
        yield f"{expert[1]}.scale", torch.from_numpy(scales[:, :, 0].copy()).view(torch.float8_e8m0fnu)


def save_model(name: str, config: Any, directory: Path) -> None:
    """Save a random model of ``config``, the experts of `MXFP4_EXPERTS` as numbers that this format has."""
    from gguf.quants import dequantize

    model = self_test.random_model(config, 0)
    for parameter, weight in model.named_parameters() if name in MXFP4_EXPERTS else ():
        if ".experts." in parameter:
            rows = weight.detach().reshape(-1, weight.shape[-1])
            values = dequantize(_blocks(rows).reshape(len(rows), -1), gguf.GGMLQuantizationType.MXFP4)
            weight.data = torch.from_numpy(values).view(weight.shape)
    model.save_pretrained(directory)


def architecture(name: str) -> str:
    """The ``general.architecture`` of an entry of `FAMILIES`."""
    return name.partition(" (")[0]


# Values of configs of which the defaults of transformers build no model.
_NEEDED: Mapping[str, Fixed] = {"hunyuan_v1_dense": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 8}}


def config_for(name: str) -> Any:
    """The tiny config of architecture ``name``."""
    family, fixed = FAMILIES[name]
    config = sized(self_test.tiny(config_of(family, **_NEEDED.get(family, {}))))
    fields = config.to_dict()
    fixed = {key: fields.get(value, value) if isinstance(value, str) else value for key, value in fixed.items()}
    for part in config.sub_configs.keys() & fixed.keys():
        fixed[part] = fields[part] | fixed[part]
    return type(config)(**fields | fixed)


def save_checkpoint(name: str, directory: Path, spare: int = 0) -> Any:
    """A random checkpoint of architecture ``name`` in ``directory``, with a tokenizer; its config. ``spare``: so many
    ids have no token, which the tokenizers of some families take for special ones."""
    config = config_for(name)
    save_model(name, config, directory)
    save_tokenizer(directory, config.get_text_config().vocab_size - spare)
    return config


def publish(name: str, directory: Path) -> None:
    """Write the checkpoint in ``directory`` as published ones are, where transformers saves it otherwise."""
    if (family := SAVED_AS.get(name)) is not None:
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model._weight_conversions = get_checkpoint_conversion_mapping(family)
        model.save_pretrained(directory)
    if name in RENAMED or name in MXFP4_EXPERTS:
        tensors = load_file(directory / "model.safetensors")
        for part, other in RENAMED.get(name, ()):
            tensors = {re.sub(part, other, key): tensor for key, tensor in tensors.items()}
        if name in MXFP4_EXPERTS:
            tensors = dict(_packed(tensors))
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    if name in PUBLISHED:
        path = directory / "config.json"
        path.write_text(json.dumps(published(name, json.loads(path.read_text()))))


def published(name: str, config: Fixed) -> dict[str, Any]:
    """``config``, of architecture ``name``, with what `PUBLISHED` says; without what it says is None."""
    result, config = dict(config), {**config, **config.get("text_config", {})}
    for key, value in PUBLISHED.get(name, {}).items():
        result[key] = {**result.get(key, {}), **_of(config, value)} if isinstance(value, dict) else _of(config, value)
    return {key: value for key, value in result.items() if PUBLISHED.get(name, {}).get(key, key) is not None}


def _of(config: Fixed, value: Any) -> Any:
    """``value``, in which names of fields of ``config`` stand for their values."""
    if isinstance(value, dict):
        return {key: _of(config, entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_of(config, entry) for entry in value]
    return config.get(value, value) if isinstance(value, str) else value


def save_tokenizer(directory: Path, size: int) -> None:
    """A byte-level tokenizer of ``size`` tokens, with merges, as the converter asks for them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: index for index, letter in enumerate(letters)}, list[tuple[str, str]]()
    plain = [letter for letter in letters if letter.isascii() and letter.isalpha()]
    for first in plain:
        for second in plain:
            if len(vocabulary) + len(_SPECIALS) < size:
                vocabulary[first + second] = len(vocabulary)
                merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos, pad = _SPECIALS
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def wanted_tokens(directory: Path) -> list[list[int]]:
    """Greedy tokens of transformers in float32, without its cache."""
    from transformers import AutoConfig

    kind = language_model(type(AutoConfig.from_pretrained(directory)))
    model = kind.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def tokens_of(path: Path, homes: Shares | None = None) -> list[list[int]]:
    """Greedy tokens from the file ``path``, computed in float32."""
    sizes = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 512}
    policy = Policy(
        model=str(path), **sizes, weights=homes or Shares(host=1.0), ffn_device="cpu", weight_dtype="float32"
    )
    with Engine(policy, device="cpu") as engine:
        rows = engine.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        return [list(row.token_ids) for row in rows]


def convert(source: Path, directory: Path, path: Path, name: str) -> str:
    """Write the checkpoint of architecture ``name`` in ``directory`` to ``path`` with the converter of ``source``; the
    name that the file says."""
    vendored = source / "vendor" / "llama.cpp"
    if str(vendored) not in sys.path:
        sys.path[:0] = [str(vendored / "gguf-py"), str(vendored)]
        for module in [module for module in sys.modules if module.partition(".")[0] == "gguf"]:
            del sys.modules[module]
    import gguf
    from conversion import ModelBase, ModelType, base, get_model_architecture, get_model_class

    load, written = ModelBase.load_hparams, json.loads((directory / "config.json").read_text())
    # transformers drops keys of published checkpoints that its classes do not have.
    ModelBase.load_hparams = staticmethod(lambda *args, **kwargs: published(name, written | load(*args, **kwargs)))
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    architecture = get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT)
    kind = get_model_class(architecture)
    kind.no_mtp = True  # transformers saves none
    kind.set_vocab = lambda self: self._set_vocab_gpt2()
    with torch.inference_mode():
        writer = kind(directory, gguf.LlamaFileType.ALL_F32, path)
        writer.write()
    ModelBase.load_hparams = load
    return str(getattr(writer, "impl", writer).gguf_writer.arch)


def compared(
    converter: ProcessPoolExecutor,
    source: Path,
    name: str,
    library: Path | None = None,
    kinds: Sequence[str] = tuple(gguf_quantized.KINDS),
    imatrix: Path | None = None,
) -> tuple[ArchitectureTest, dict[str, Any]]:
    """The test of architecture ``name``, and the header that the converter, in its own process, wrote. With a
    ``library`` of llama.cpp its quantiser's files of ``kinds`` are compared, too, with importances by ``imatrix``."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    family = FAMILIES[name][0]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        path = directory / "tiny.gguf"
        save_checkpoint(name, directory, spare=_SPARE.get(family, 0))
        wanted = wanted_tokens(directory)
        publish(name, directory)
        written = converter.submit(convert, source, directory, path, name).result()
        assert written == architecture(name), f"{family} became {written}"
        header = header_of(path, name)
        try:
            answers = tokens_of(path)
        except MoelightError as error:
            reason = str(error).replace(scratch, "")
            return ArchitectureTest(name=name, model_type=family, reason=reason), header
        files = {} if library is None else quantised(converter, source, library, name, directory, kinds, imatrix)
    return ArchitectureTest(
        name=name, model_type=family, equal=_equal(answers, wanted), tokens=sum(map(len, wanted)), kinds=files
    ), header


def quantised(
    converter: ProcessPoolExecutor,
    source: Path,
    library: Path,
    name: str,
    directory: Path,
    kinds: Sequence[str],
    imatrix: Path | None,
) -> dict[str, str]:
    """By kind of file, how many greedy tokens from files of llama.cpp's quantiser are those of their values.
    Importances are those that the tool ``imatrix`` measures; drawn without one, or where it does not run the file."""
    results = {}
    wide, stored, values = (directory / f"{part}.gguf" for part in ("wide", "stored", "values"))
    config = gguf_quantized.widened(config_for(name))
    save_model(name, config, directory)
    save_tokenizer(directory, config.get_text_config().vocab_size - _SPARE.get(FAMILIES[name][0], 0))
    publish(name, directory)
    converter.submit(convert, source, directory, wide, name).result()
    importance = None if imatrix is None else directory / "importance.gguf"
    if importance is not None and (reason := gguf_quantized.measure_importance(imatrix, wide, importance)):
        logging.getLogger(__name__).error("%s: %s; importances are drawn", name, reason)
        importance = None
    for kind in kinds:
        if reason := converter.submit(gguf_quantized.quantize, library, wide, stored, kind, importance).result():
            results[kind] = f"not written: {reason}"
            continue
        gguf_quantized.unpack(stored, values)
        wanted = tokens_of(values)
        try:
            drawn = ", drawn" if importance is None and kind in gguf_quantized.BY_IMPORTANCE else ""
            results[kind] = f"{_equal(tokens_of(stored), wanted)} of {sum(map(len, wanted))}{drawn}"
        except MoelightError as error:
            results[kind] = str(error).replace(str(directory), "")
    return results


def _equal(answers: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(a == b for one, other in zip(answers, wanted, strict=True) for a, b in zip(one, other, strict=True))


def header_of(path: Path, name: str) -> dict[str, Any]:
    """The keys of the architecture in the file, without its prefix, and the tensors with their shapes."""
    from moelight.profiles.gguf import read_gguf

    file = read_gguf(path)
    prefix = f"{architecture(name)}."
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return {"keys": keys, "tensors": {tensor.name: list(tensor.shape) for tensor in file.tensors.values()}}


def table_of(tests: Iterable[ArchitectureTest]) -> str:
    """The table of docs/reference/gguf.md."""
    kinds = list(gguf_quantized.KINDS)
    lines = [
        f"| `general.architecture` | family (model_type) | tokens | {' | '.join(kinds)} |",
        f"| --- | --- | --- |{' --- |' * len(kinds)}",
    ]
    for test in tests:
        result = f"{test.equal} of {test.tokens}" if test.tokens else test.reason
        cells = (test.kinds.get(kind, "") for kind in kinds)
        lines.append(f"| {test.name} | {test.model_type} | {result} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="unpacked source of llama-cpp-python")
    parser.add_argument("--library", type=Path, help="libllama.so, whose quantiser is asked for files, too")
    parser.add_argument("--imatrix", type=Path, help="llama-imatrix, which measures importances; drawn without it")
    parser.add_argument("--names", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--kinds", nargs="*", default=list(gguf_quantized.KINDS), choices=list(gguf_quantized.KINDS))
    parser.add_argument("--update", action="store_true", help="write the table, its data and the headers")
    arguments = parser.parse_args()
    headers = json.loads(HEADERS.read_text()) if HEADERS.exists() else {}
    tests = {test.name: test for test in read_tests()} if gguf_tested.TABLE.exists() else {}
    results = []
    # The converter brings a gguf-py of its own, so it has its own process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as converter:
        for name in arguments.names:
            test, headers[name] = compared(
                converter, arguments.source, name, arguments.library, arguments.kinds, arguments.imatrix
            )
            before = tests[name].kinds if name in tests else {}
            tests[name] = replace(test, kinds={**before, **test.kinds} if test.tokens else {})
            results.append(test)
            kinds = ", ".join(f"{kind} {result}" for kind, result in test.kinds.items())
            report(f"{name}: {test.equal} of {test.tokens} {test.reason}{kinds}".rstrip())
            if arguments.update:
                write_all(headers, tests)
    right = sum(test.tokens > 0 and test.equal == test.tokens for test in results)
    wrong = sum(test.equal < test.tokens for test in results)
    same = f"{TOKENS * len(PROMPTS)} of {TOKENS * len(PROMPTS)}"
    files = [result for test in results for result in test.kinds.values()]
    other = sum(" of " in result and not result.startswith(same) for result in files)
    refused = sum(" of " not in result for result in files)
    counts = {"architectures": len(results), "equal": right, "other tokens": wrong}
    counts |= {"quantised files": len(files), "equal to their values": len(files) - other - refused}
    counts |= {"other values": other, "not written or refused": refused}
    report(json.dumps(counts))
    return 0 if right == len(results) and not other else 1


def write_all(headers: Mapping[str, Any], tests: Mapping[str, ArchitectureTest]) -> None:
    """Write the headers, the data of the table, and the table, of all that `FAMILIES` has."""
    headers, tests = ({name: results[name] for name in FAMILIES if name in results} for results in (headers, tests))
    HEADERS.write_text(json.dumps(dict(sorted(headers.items())), indent=None, separators=(",", ":")) + "\n")
    write_tests(tests)
    before, _, after = TABLE.read_text().partition(MARK)
    end = after.partition(MARK)[2]
    TABLE.write_text(f"{before}{MARK}\n\n{table_of(read_tests())}\n\n{MARK}{end}")


if __name__ == "__main__":
    sys.exit(main())
