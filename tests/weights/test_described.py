"""Matrices whose size and scales other tensors describe, as bitsandbytes stores them: those that it wrote itself, and
refusals that name tensor, cause and cure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Page
from moelight.formats.bitsandbytes import LLMInt8Format, bitsandbytes
from moelight.models.checkpoints import open_model
from moelight.weights.load import PageReader, dequantised
from moelight.weights.quantized_checkpoint import as_matrices
from moelight.weights.source import Checkpoint
from tests.tiny import save_tiny
from tests.weights.quantised import METHODS, quantise

WRITTEN = Path(__file__).parent / "written" / "bitsandbytes.safetensors"
FORMATS = {"nf4": bitsandbytes("nf4"), "fp4": bitsandbytes("fp4"), "int8": LLMInt8Format()}
STATE = "nf4.weight.quant_state.bitsandbytes__nf4"
Tensors = dict[str, Tensor]


def opened(directory: Path) -> Checkpoint:
    return as_matrices(Checkpoint.open(directory), FORMATS.get, "F32")


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_library(name: str, tmp_path: Path) -> None:
    """To the bit (`written/bitsandbytes_values.py`), blocks that end within a row too; LLM.int8()'s scales are rounded
    where bitsandbytes rounds the product of code and magnitude."""
    shutil.copy(WRITTEN, tmp_path / "model.safetensors")
    tensors = opened(tmp_path).tensors
    assert set(tensors) == {f"{module}.{part}" for module in FORMATS for part in ("weight", "values")}
    wanted = load_file(WRITTEN)[f"{name}.values"]
    matrix = tensors[f"{name}.weight"].stored()
    values = dequantised(matrix, torch.empty(matrix.shape))
    assert values.shape == {"nf4": (130, 128), "fp4": (6, 96), "int8": (4, 64)}[name]
    if name == "int8":
        torch.testing.assert_close(values, wanted, rtol=2e-7, atol=0)
    else:
        assert torch.equal(values[-len(wanted) :], wanted)
    last = matrix.rows_of(matrix.rows - 2, matrix.rows)  # rows by themselves have scales of their own
    assert torch.equal(dequantised(last, torch.empty(last.shape)), values[-2:])


def says(**changes: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        state = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def holding(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(STATE), rf"{STATE}' is missing, and .* is bitsandbytes NF4; correct quantization_config"),
        (holding(STATE, torch.zeros(9, dtype=torch.uint8)), rf"{STATE}' is no JSON object; fetch"),
        (holding(STATE, torch.full((5000,), 91, dtype=torch.uint8)), rf"{STATE}' has 5,000 bytes"),
        (holding(STATE, torch.full((4000,), 91, dtype=torch.uint8)), rf"{STATE}' is no JSON object"),
        (says(quant_type="fp4"), r"says the quant_type 'fp4'"),
        (says(blocksize=48), r"says the blocksize '48', which is no power of two"),
        (says(blocksize=128), r"nf4.weight.absmax' .* needs 130 numbers U8 there"),
        (says(shape=[130]), r"says no shape of a matrix"),
        (says(shape=[1, 3]), r"has an odd number of columns; use a checkpoint that is not quantised"),
        (says(shape=[1 << 70, 2]), r"nf4.weight.absmax' has dtype U8 .* needs"),
        (says(shape=[128, 128]), r"nf4.weight.absmax' .* needs 256 numbers U8 there"),
        (says(nested_offset=float("nan")), r"says no finite nested_offset"),
        (says(nested_offset="1"), r"says no finite nested_offset"),
        (says(nested_dtype="bfloat16"), r"says no float32 scales of blocks"),
        (without("nf4.weight.nested_absmax"), r"nf4.weight.nested_absmax' is missing"),
        (holding("nf4.weight.nested_quant_map", torch.ones(16)), r"nested_quant_map' .* needs 256 numbers F32"),
        (holding("nf4.weight.quant_map", torch.ones(16)), r"quant_map' does not hold the numbers of bitsandbytes NF4"),
        (
            holding("int8.weight_format", torch.tensor(2, dtype=torch.uint8)),
            r"is 2, and only 0, by rows,",
        ),
        (without("int8.SCB"), r"int8.SCB' is missing"),
    ],
)
def test_what_a_matrix_does_not_say_is_refused_by_tensor(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    tensors = load_file(WRITTEN)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path) in str(caught.value) and str(caught.value).isprintable()


def test_a_block_of_scales_may_be_larger_than_the_matrix(tmp_path: Path) -> None:
    tensors = load_file(WRITTEN)
    tensors["nf4.weight.nested_absmax"] = tensors["nf4.weight.nested_absmax"][:1].clone()
    says(nested_blocksize=1 << 70)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    matrix = opened(tmp_path).tensors["nf4.weight"].stored()
    values = dequantised(matrix, torch.empty(matrix.shape))
    assert torch.equal(values[-6:-2].signbit(), tensors["nf4.values"][:4].signbit()) and values.isfinite().all()


def test_codes_may_be_stored_as_wider_words(tmp_path: Path) -> None:
    """``bnb_4bit_quant_storage`` bfloat16, as for training in shards."""
    tensors = load_file(WRITTEN)
    wanted = tensors["nf4.values"]
    tensors["nf4.weight"] = tensors["nf4.weight"].view(-1).view(torch.bfloat16)[:, None]
    save_file(tensors, tmp_path / "model.safetensors")
    matrix = opened(tmp_path).tensors["nf4.weight"].stored()
    assert torch.equal(dequantised(matrix, torch.empty(matrix.shape))[-6:], wanted)


def test_parts_of_a_page_are_those_of_the_whole(tmp_path: Path) -> None:
    """Scales that are computed lie in a page as others do, wherever a part of it begins."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = save_tiny(tmp_path / "plain", "mixtral", num_hidden_layers=2, intermediate_size=96, **sizes)
    quantised, _ = quantise(source, tmp_path, METHODS["nf4"])
    weight_map, page = open_model(str(quantised)).weight_map, Page(layer=1, expert=2)
    size = weight_map.experts.bytes_of(page)
    page_bytes, parts = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    with PageReader(weight_map, torch.float32) as reader:
        assert reader.start(page, page_bytes) is None
        for begin in range(0, size, 1008):
            assert reader.start(page, parts[begin : begin + 1008], begin) is None
    assert torch.equal(page_bytes, parts)
