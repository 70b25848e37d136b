"""Quantised matrices outside the experts stay as stored in the memory of a CPU: counted so, multiplied so, and by int8
activations where they have integers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moelight.core.dtypes import BFLOAT16, FLOAT32
from moelight.core.policy import Policy, Shares
from moelight.core.units import align_up
from moelight.engine.engine import Engine
from moelight.engine.planning import resolve
from moelight.hrm import costs
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.footprint import footprint
from moelight.hrm.machine_model import speeds_of
from moelight.kernels.matrices import Stack, floats_of
from moelight.kernels.quantized import dense_values, stacked_rows
from moelight.models.checkpoints import open_model
from moelight.models.decoder import NativeDecoder
from moelight.optimizer.explain import activations_text
from moelight.optimizer.runnable import activation_faults
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.tensor_list import dense_tensors
from moelight.weights.load import LayerWeights, ModelWeights
from tests.cases import thorough
from tests.engine.graphs import STREAMED, tokens
from tests.engines import Tiny
from tests.weights.gguf_files import write_gguf
from tests.weights.quantised import METHODS, OF_EACH_FORMAT, quantise

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, Any] = {"batch_size": 3, "micro_batch_size": 2, "micro_batch_tokens": 16, "kv_tokens": 256}


def weights_of(model: Path, device: str = "cpu", **how: Any) -> tuple[ModelWeights, int]:
    """The weights outside the experts of a loaded ``model``, and the bytes of memory that hold them."""
    policy = Policy(model=str(model), **SIZES, weights=Shares(host=1.0), **how)
    with Engine(policy, device=device) as engine:
        loaded = engine._passes.model
        assert isinstance(loaded.operations.decoder, NativeDecoder)
        arena = footprint(loaded.profile, policy, dtype=loaded.dtype)
        return loaded.operations.decoder.weights, next(
            arena.bytes for arena in arena.arenas if arena.purpose == "dense"
        )


def stacked(weights: ModelWeights) -> dict[str, Stack]:
    first: LayerWeights = weights.layers[0]
    result = {"embed": weights.embed, "head": weights.head, "qkv": first.qkv, "o": first.o}
    return {name: item for name, item in result.items() if floats_of(item) is None}


@pytest.mark.parametrize("name", thorough(METHODS, but=OF_EACH_FORMAT))
def test_attention_is_kept_as_every_method_stores_it(name: str, tiny: Tiny, tmp_path: Path) -> None:
    quantised, values = quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, METHODS[name])
    plain, (selected, stored_bytes) = weights_of(values), weights_of(quantised)
    assert set(stacked(selected)) == {"qkv", "o"} and not stacked(plain[0])
    for full, part in zip((plain[0].layers[0].qkv, plain[0].layers[0].o), stacked(selected).values(), strict=True):
        floats = floats_of(full)
        assert floats is not None and torch.equal(
            torch.cat([dense_values(item, floats.dtype) for item in part]), floats
        )
    assert stored_bytes < plain[1]


def test_a_file_keeps_embeddings_and_head_too(tmp_path: Path) -> None:
    """Rows of q and k come into transformers' order; memory is what the plan counts, tensor by tensor."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", experts="Q4_0", vocab=True)
    weights, counted = weights_of(path)
    result = stacked(weights)
    assert set(result) >= {"qkv", "o"}
    model = open_model(str(path)).profile
    assert model.stored is not None and counted == costs.dense_bytes(model, BFLOAT16, as_stored=True)
    retained = sum(size for _, _, size in model.stored.dense_stored)
    assert 0 < retained < counted < costs.dense_bytes(model, BFLOAT16)
    for name, matrix in result.items():
        if name == "embed":
            places = torch.tensor([5, 0, 5, 319])
            out = torch.empty((4, model.hidden_size), dtype=torch.bfloat16)
            assert torch.equal(stacked_rows(matrix, places, out), dense_values(matrix[0], torch.bfloat16)[places])


@pytest.mark.parametrize("device", thorough(["cpu", "twin"], but=["twin"]))
def test_beside_a_device_they_become_numbers(device: str, tiny: Tiny, tmp_path: Path) -> None:
    quantised, _ = quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, METHODS["int4"])
    opened = open_model(str(quantised)).profile
    assert costs.keeps_stored(opened, FLOAT32, discrete=False) and not costs.keeps_stored(
        opened, FLOAT32, discrete=True
    )
    how: dict[str, Any] = {} if device == "cpu" else {"ffn_device": "gpu", "schedule": "cgopipe"}
    homes = Shares(host=1.0)
    policy = resolve(Policy(model=str(quantised), **SIZES, weights=homes, **how), opened, discrete=device != "cpu")
    with Engine(policy, device=device) as engine:
        decoder = engine._passes.model.operations.decoder
        assert isinstance(decoder, NativeDecoder) and bool(stacked(decoder.weights)) == (device == "cpu")


def test_they_are_read_in_their_own_bytes(tiny: Tiny, tmp_path: Path) -> None:
    """A plan's time per pass, too: at one row the bytes of int4 and its scales."""
    quantised, values = quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, METHODS["int4"])
    speeds = speeds_of(load_hardware_profile("cpu-amx"))
    models = [
        cost_model_of(open_model(str(item)).profile, Policy(model="m", **SIZES), speeds) for item in (quantised, values)
    ]
    elements = costs.layer_elements(models[0].model)[0]
    few = [
        model.speeds.cpu.product_s(1, elements.before_attention, costs.kept_dtype(model.model, model.dtype, head=False))
        for model in models
    ]
    dtype = costs.kept_dtype(models[0].model, models[0].dtype, head=False)
    assert few[0] < 0.6 * few[1] and dtype.bits < 8
    matrices = sum(
        tensor.elements for tensor in dense_tensors(models[0].model) if tensor.layer >= 0 and len(tensor.shape) > 1
    )
    layers = [tensor for tensor in dense_tensors(models[0].model) if tensor.layer >= 0 and len(tensor.shape) > 1]
    size = sum(costs.dense_tensor_bytes(models[0].model, item, models[0].dtype, as_stored=True) for item in layers)
    assert size <= dtype.bytes_for(matrices) <= size + matrices // 64
    assert align_up(size, 64) >= size


def test_matrices_without_integers_stay_exact_beside_others(tiny: Tiny, tmp_path: Path) -> None:
    """Experts of the last layer are plain: int8 activations are said, and which formats they leave exact."""
    method = METHODS["int8"]
    groups = method.config["config_groups"]
    (only,) = groups.values()
    mixed = replace(method, config=method.config | {"ignore": [*method.config["ignore"], "re:.*\\.2\\..*experts.*"]})
    quantised, _ = quantise(tiny("mixtral", intermediate_size=96, **SHAPE), tmp_path, mixed)
    model = open_model(str(quantised)).profile
    asked = Policy(model="m", activations="int8")
    assert only and model.stored is not None and model.stored.exact == ("float32",)
    assert not activation_faults(asked, model)
    assert activations_text(asked, model) == "int8 activations (experts in float32 exact)"
    assert activations_text(replace(asked, activations="auto"), model) == ""
    wanted = tokens(quantised, weights=Shares(host=1.0), activations="int8")
    assert tokens(quantised, weights=STREAMED, activations="int8", schedule="serial") == wanted
