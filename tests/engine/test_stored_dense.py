"""Matrices of dense GGUF files stay as they are stored: tokens of their numbers in every type, bytes of the file in
memory and in plans, rows of embeddings, heads in llama.cpp's order, activations rounded to int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from transformers import LlamaConfig

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from moelight.engine.planning import resolve
from moelight.hrm import costs
from moelight.hrm.footprint import footprint
from moelight.hrm.inventory import inventory
from moelight.kernels import native
from moelight.models.checkpoints import GraphSource, open_model
from moelight.models.graph import self_test
from moelight.models.profiles import profile_of_checkpoint
from moelight.profiles.model_files import load_model_profile
from tests.cases import thorough
from tests.engine.gguf_architectures import PROMPTS, save_tokenizer
from tests.engine.test_gguf_architectures import checkpoint_tensors, write_vocabulary
from tests.weights.gguf_files import blocks_of

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS")
MIX = {"attn_v": "Q6_K", "ffn_down": "Q8_0", "token_embd": "Q5_K", "blk.1.ffn_up": "Q4_1"}
RESIDENT, DISK = Shares(host=1.0), Shares(disk=1.0)
SIZES: dict[str, Any] = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 512}
native_kernels = pytest.mark.skipif(not native.available(), reason="the extension is not built")
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a tiny Llama in a type; ``unpacked``: the file holds its numbers in float32."""
    directory = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=320,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    self_test.random_model(config, 0).save_pretrained(directory)
    save_tokenizer(directory, config.vocab_size)
    tensors = checkpoint_tensors("llama", directory)

    def written(kind: str, *, unpacked: bool = False, tied: bool = False) -> Path:
        path = directory / f"{kind}-{unpacked}-{tied}.gguf"
        if path.exists():
            return path
        writer = gguf.GGUFWriter(path, "llama")
        _metadata(writer, config)
        write_vocabulary(writer, directory)
        for name, values in tensors.items():
            if tied and name == "output.weight":
                continue
            stated = (
                next((type_name for part, type_name in MIX.items() if part in name), "Q4_K") if kind == "mix" else kind
            )
            number = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else stated]
            blocks = blocks_of(np.ascontiguousarray(values, dtype=np.float32), number)
            if unpacked and values.ndim > 1:
                writer.add_tensor(name, dequantize(blocks, number))
            else:
                writer.add_tensor(name, blocks, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return written


def _metadata(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def answers(path: Path, device: str = "cpu", dtype: str = "float32", **policy: Any) -> list[list[int]]:
    how = {**SIZES, "weights": RESIDENT, "ffn_device": "cpu", "weight_dtype": dtype, **policy}
    with Engine(Policy(model=str(path), **how), device=device) as engine:
        rows = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
        return [list(row.token_ids) for row in rows]


@pytest.mark.parametrize("kind", thorough((*TYPES, "mix"), but=("Q4_K", "mix")))
def test_tokens_are_those_of_the_numbers(kind: str, write: Write) -> None:
    """In float32, layers in memory and read from disk in every pass."""
    wanted = answers(write(kind, unpacked=True))
    assert answers(write(kind)) == wanted
    assert answers(write(kind), weights=DISK) == wanted


def test_a_tied_head_is_the_stored_embedding(write: Write) -> None:
    wanted = answers(write("mix", unpacked=True, tied=True))
    path = write("mix", tied=True)
    assert answers(path) == wanted
    source = open_model(str(path)).source
    assert isinstance(source, GraphSource)
    tensors = {name: tensor for tensor in source.weights.dense for name in tensor.names}
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    assert [matrix.stored.name for matrix in tensors["lm_head.weight"].stack] == ["Q5_K"]


def test_beside_a_device_layers_are_stored_too(write: Write) -> None:
    wanted = answers(write("mix", unpacked=True))
    device = {"ffn_device": "gpu", "attention_device": "gpu", "schedule": "flexgen"}
    for homes in (Shares(device=1.0), Shares(device=0.5, disk=0.5)):
        assert answers(write("mix"), "twin", weights=homes, **device) == wanted


def test_without_the_extension_some_rows_are_numbers_at_a_time(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(write("mix", unpacked=True))
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "extension", lambda: None)
    assert answers(write("mix")) == wanted


@native_kernels
def test_activations_are_rounded_where_they_are_asked_for(write: Write) -> None:
    """The result does not depend on the order of work, and the rounding shows in it."""
    path = write("Q4_K")
    wanted = answers(path, activations="int8")
    small = {"batch_size": 1, "micro_batch_size": 1}
    for how in ({"weights": DISK}, {"schedule": "serial"}, small):
        assert answers(path, activations="int8", **how) == wanted


def test_activations_are_refused_by_name(write: Write) -> None:
    def asked(kind: str, **policy: Any) -> Policy:
        return resolve(Policy(model="m", activations="int8", **policy), open_model(str(write(kind))).profile, **where)

    where = {"discrete": False}
    with pytest.raises(ConfigError, match="the layers are Q3_K; int8 activations are served for"):
        asked("Q3_K")
    with pytest.raises(ConfigError, match="layers stored as integers, and those here are"):
        resolve(Policy(model="m", activations="int8"), open_model(str(write("Q4_K", unpacked=True))).profile, **where)
    where = {"discrete": True}
    with pytest.raises(ConfigError, match="a GPU computes the layers of a dense model with activations as they are"):
        asked("Q4_K", ffn_device="gpu", attention_device="gpu", schedule="flexgen")


def test_a_plan_counts_the_bytes_of_the_file(write: Write) -> None:
    """Of its header alone what it counts once the file is open: layers, embedding and head as they are stored."""
    path = write("mix")
    opened = open_model(str(path)).profile
    assert load_model_profile(str(path), profile_of_checkpoint).stored == opened.stored
    assert opened.stored is not None
    tensors = gguf.GGUFReader(path).tensors
    stored = sum(int(tensor.n_bytes) for tensor in tensors)
    assert inventory(opened).total_bytes == stored
    in_layers = {"attn_v.", "attn_q.", "attn_k.", "attn_output.", "ffn_down.", "ffn_gate.", "ffn_up."}
    of_layers = sum(int(tensor.n_bytes) for tensor in tensors if any(part in tensor.name for part in in_layers))
    first = sum(
        int(tensor.n_bytes)
        for tensor in tensors
        if tensor.name.startswith(("blk.0.attn_q", "blk.0.attn_k.", "blk.0.attn_v"))
    )
    assert opened.stored.total_bytes == of_layers - first, "queries, keys and values of layer 0 precede every page"
    policy, page = Policy(model=str(path), **SIZES, weights=RESIDENT), costs.page_dtype(opened, FLOAT32)
    memory = {
        region.purpose: region.bytes for region in footprint(opened, policy, dtype=FLOAT32, page_dtype=page).arenas
    }
    assert memory["dense"] == costs.dense_bytes(opened, FLOAT32, as_stored=True)
    assert memory["dense"] + memory["experts"] < 1.1 * stored + opened.num_layers * 4096
