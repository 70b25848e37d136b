"""GGUF files of families that run as module graphs: their tokens are those of transformers.

Files have the headers that llama.cpp's converter wrote for the same tiny checkpoints (`gguf_architectures`), and
numbers of those checkpoints, put under gguf-py's names by the rules of the converter, written here once more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize
from gguf.tensor_mapping import get_tensor_name_map
from transformers import AutoConfig

from moelight.core.errors import ConfigError
from moelight.core.policy import Shares
from moelight.models.checkpoints import open_model
from moelight.models.graph.gguf import names_in_file
from moelight.models.graph.model import GraphModel, language_model, on_meta
from moelight.models.profiles import profile_of_checkpoint
from moelight.profiles.gguf_config import ARCHITECTURES
from moelight.profiles.gguf_families import GRAPH_ARCHITECTURES
from moelight.profiles.model_files import load_model_profile
from tests.cases import thorough
from tests.engine import gguf_architectures as architectures

HEADERS: dict[str, dict[str, Any]] = json.loads(architectures.HEADERS.read_text())
# One of each rule in the usual tests: pairs of heads, norms plus one, stacks of experts, state spaces, fused rows,
# heads in rounds, matrices by columns.
USUAL = ("gemma3", "granitehybrid", "qwen35moe")
_TYPES = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
_PLUS_ONE = {"gemma", "gemma2", "gemma3", "qwen35moe"}
_IN_PAIRS = {"arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "smollm3"}


def write_file(name: str, directory: Path, path: Path, rounds: str = "", unpacks: bool = False) -> None:
    """The checkpoint in ``directory`` as the file ``path``, with the header that the converter wrote. ``rounds``:
    matrices are quantised so where rows allow it, and unpacked again if ``unpacks``."""
    header, architecture = HEADERS[name], architectures.architecture(name)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in header["keys"].items():
        add_value(writer, f"{architecture}.{key}", value)
    write_vocabulary(writer, directory)
    tensors = checkpoint_tensors(name, directory)
    for tensor, shape in header["tensors"].items():
        values = tensors.pop(tensor)
        assert values.size == np.prod(shape), tensor
        stored_dtype = np.int32 if np.issubdtype(values.dtype, np.integer) else np.float32
        values = np.ascontiguousarray(values.reshape(shape), dtype=stored_dtype)
        kind = gguf.GGMLQuantizationType[rounds] if rounds and len(shape) > 1 and "ffn_gate_inp" not in tensor else None
        if kind is None or shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(tensor, values)
            continue
        blocks = quantize(values, kind)
        if unpacks:
            writer.add_tensor(tensor, dequantize(blocks, kind))
        else:
            writer.add_tensor(tensor, blocks, raw_dtype=kind)
    assert not tensors, "all numbers of the checkpoint are in the file"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add ``value`` as the type that it has in JSON."""
    getattr(writer, _TYPES[type(value)])(key, value)


def write_vocabulary(writer: gguf.GGUFWriter, directory: Path) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *(token["content"] for token in added)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(model["vocab"]) + [3] * len(added))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    for number, kind in enumerate(("bos", "eos", "padding")):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", len(model["vocab"]) + number)


def checkpoint_tensors(name: str, directory: Path) -> dict[str, np.ndarray]:
    """The numbers of the checkpoint by the names and in the order of a file."""
    model = language_model(type(AutoConfig.from_pretrained(directory))).from_pretrained(directory, dtype=torch.float32)
    config = model.config
    label = architectures.architecture(name)
    number = next((number for number, architecture in MODEL_ARCH_NAMES.items() if architecture == label), None)
    newer = dict[str, str]()
    if number is None:  # newer than the package
        number = gguf.MODEL_ARCH.DEEPSEEK2
        newer = names_in_file(label, GRAPH_ARCHITECTURES[label], GraphModel(on_meta(config)))
    listed = get_tensor_name_map(number, config.num_hidden_layers)
    result: dict[str, np.ndarray] = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for spelling, part in _parts(key, value, config):
            if spelling.startswith("blk."):
                tensor: str | None = spelling
            else:
                tensor = listed.get_name(_older(spelling), try_suffixes=(".weight", ".bias")) or newer.get(spelling)
            assert tensor is not None, spelling
            result[tensor] = _stored(architectures.architecture(name), key, part, config).numpy()
    return result | _rotary_factors(model)


def _rotary_factors(model: Any) -> dict[str, np.ndarray]:
    """The divisors of rotary frequencies that the converter writes as tensors."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        lists = {length: rope[f"{length}_factor"] for length in ("short", "long")}
        return {f"rope_factors_{length}.weight": np.array(factors) for length, factors in lists.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    exponents = np.arange(len(frequencies)) / len(frequencies)
    return {"rope_freqs.weight": rope["rope_theta"] ** -exponents / frequencies}


def _older(key: str) -> str:
    """The name of a parameter as the converter has it."""
    key = key.replace("e_score_correction_bias", "e_score_correction.bias").replace(".dt_bias", ".dt_proj.bias")
    return key.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")


def _parts(key: str, value: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """``value`` under the names that it, or its parts, have for gguf-py."""
    block = re.match(r"model\.layers\.(\d+)\.", key)
    prefix = f"blk.{block[1]}" if block else ""
    if key.endswith("experts.gate_up_proj") and config.model_type == "mistral4":
        return [(f"{prefix}.ffn_gate_up_exps.weight", value)]
    if key.endswith(("experts.gate_up_proj", "input_linear.weight")):
        stem = "exps" if value.dim() == 3 else "shexp"
        gate, up = value.chunk(2, dim=-2)
        return [(f"{prefix}.ffn_gate_{stem}.weight", gate), (f"{prefix}.ffn_up_{stem}.weight", up)]
    if key.endswith("kv_b_proj.weight"):
        grouped = value.unflatten(0, (config.num_attention_heads, -1))
        keys, values = grouped.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        return [(f"{prefix}.attn_k_b.weight", keys.swapaxes(1, 2)), (f"{prefix}.attn_v_b.weight", values)]
    if key.endswith(("experts.down_proj", "block_sparse_moe.output_linear.weight")):
        return [(f"{prefix}.ffn_down_exps.weight", value)]
    return [(key, value)]


def _stored(name: str, key: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """``value`` as the converter stores it."""
    if name in _IN_PAIRS and re.search(r"[qk]_proj\.(weight|bias)$", key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)
    if name == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", key):
        return value.T
    if name in _PLUS_ONE and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        return value + 1
    if name == "qwen35moe" and ".linear_attn." in key and not key.endswith(".norm.weight"):
        value = _in_rounds(key, value, config)
    return -torch.exp(value) if key.endswith("A_log") else value


def _in_rounds(key: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Heads of values one of each group after another, in rows, or in columns of the last matrix."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if "out_proj" in key:
        return _in_rounds("", value.T, config).T
    before = 2 * groups * config.linear_key_head_dim if "in_proj_qkv" in key or "conv1d" in key else 0
    grouped = value[before:].reshape(groups, heads // groups, -1)
    return torch.cat([value[:before], grouped.swapaxes(0, 1).reshape(value[before:].shape)])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.thorough)
        for name in (
            "arcee",
            "deepseek4",
            "ernie4_5",
            "exaone",
            "gemma2",
            "glm-dsa",
            "mistral4",
            "olmo2",
            "qwen2",
            "qwen3",
            "smollm3",
            "exaone4",
            "llama",
            "phi3",
            "llama (Llama 3)",
            "glm4moe",
            "gpt2",
            "phi3 (128k)",
            *USUAL,
        )
    ],
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architectures.save_checkpoint(name, tmp_path)
    write_file(name, tmp_path, tmp_path / "tiny.gguf")
    wanted = architectures.wanted_tokens(tmp_path)
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert architectures.tokens_of(tmp_path / "tiny.gguf", homes) == wanted
    opened = open_model(str(tmp_path / "tiny.gguf")).profile
    planned = load_model_profile(str(tmp_path / "tiny.gguf"), profile_of_checkpoint)
    assert (opened.num_layers, opened.moe_layers) == (planned.num_layers, planned.moe_layers)
    experts = [profile.stored.total_bytes if profile.stored is not None else 0 for profile in (opened, planned)]
    assert experts[0] == experts[1]
    assert (experts[0] > 0) == any("_exps" in tensor for tensor in HEADERS[name]["tensors"])


def test_the_converter_was_asked_for_every_architecture() -> None:
    written = set(map(architectures.architecture, HEADERS))
    assert {*ARCHITECTURES, *GRAPH_ARCHITECTURES} == {*written, "nemotron_h"}, "run `make gguf` with --update"


@pytest.mark.parametrize("name", thorough(["llama", "glm4moe"], but=["glm4moe"]))
def test_quantised_files_have_the_tokens_of_their_values(name: str, tmp_path: Path) -> None:
    """Pairs of heads in blocks, layers of a dense model that are unpacked as they are read, experts as stored."""
    architectures.save_checkpoint(name, tmp_path)
    for path, unpacks in (("stored.gguf", False), ("values.gguf", True)):
        write_file(name, tmp_path, tmp_path / path, rounds="Q8_0", unpacks=unpacks)
    wanted = architectures.tokens_of(tmp_path / "values.gguf")
    for homes in (Shares(host=1.0), Shares(disk=1.0)):
        assert architectures.tokens_of(tmp_path / "stored.gguf", homes) == wanted


def test_a_key_that_is_not_read_is_refused(tmp_path: Path) -> None:
    """It may change the numbers, as llama.cpp reads it."""
    architectures.save_checkpoint("llama", tmp_path)
    header = HEADERS["llama"]["keys"]
    header["attention.new_limit"] = 3.0
    try:
        write_file("llama", tmp_path, tmp_path / "tiny.gguf")
    finally:
        del header["attention.new_limit"]
    with pytest.raises(ConfigError, match=r"metadata key llama\.attention\.new_limit is not read of this architecture"):
        open_model(str(tmp_path / "tiny.gguf"))
