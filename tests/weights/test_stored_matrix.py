"""Quantised matrices in checkpoints: found, read, and refused by name where their tensors are not as stated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.formats.awq import awq
from moelight.formats.format import SHAPE, Format
from moelight.formats.fp8 import fp8
from moelight.formats.gptq import gptq
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.packed import PackedFormat
from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import read_quantization
from moelight.weights.quantized_checkpoint import as_matrices
from moelight.weights.source import Checkpoint
from moelight.weights.stored_matrix import find_matrix, read_matrix
from moelight.weights.tensor_info import StoredMatrix
from tests.weights.packers import dequantized, pack_awq, pack_gptq

ROWS, COLUMNS, GROUP = 16, 64, 32
MODULE = "model.layers.0.mlp.experts.0.up_proj"
Tensors = dict[str, Tensor]
INT4 = PackedFormat(
    name="int4 in groups of 32",
    bits=4,
    scale="BF16",
    group=GROUP,
    zero_points=True,
    names=(".weight_packed", ".weight_scale", ".weight_zero_point"),
)


def gptq_tensors() -> Tensors:
    codes, zeros = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randint(0, 16, (2, ROWS))
    return pack_gptq(codes, zeros, torch.rand(2, ROWS).half(), torch.arange(COLUMNS) // GROUP, 4, 1)


def awq_tensors() -> Tensors:
    codes, zeros = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randint(0, 16, (2, ROWS))
    return pack_awq(codes, zeros, torch.rand(2, ROWS).half())


def packed() -> Tensors:
    return {
        ".weight_packed": torch.randint(0, 1 << 30, (ROWS, COLUMNS // 8), dtype=torch.int32),
        ".weight_scale": torch.rand(ROWS, 2).bfloat16(),
        ".weight_zero_point": torch.randint(0, 1 << 30, (ROWS // 8, 2), dtype=torch.int32),
        ".weight_shape": torch.tensor([ROWS, COLUMNS]),
    }


def fp8_tensors() -> Tensors:
    return {".weight": torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.rand(1, 2)}


MATRICES: dict[str, tuple[Format, Callable[[], Tensors]]] = {
    "gptq": (gptq(bits=4, group=GROUP), gptq_tensors),
    "awq": (awq(group=GROUP), awq_tensors),
    "int4": (INT4, packed),
    "fp8": (fp8(block=(32, 32), scale="F32"), fp8_tensors),
}


def saved(directory: Path, parts: Tensors) -> Checkpoint:
    save_file(
        {f"{MODULE}{suffix}": part.contiguous() for suffix, part in parts.items()}, directory / "model.safetensors"
    )
    return Checkpoint.open(directory)


def matrix_in(checkpoint: Checkpoint, stored: Format, rows: int = ROWS, columns: int = COLUMNS) -> StoredMatrix:
    return find_matrix(checkpoint.tensors, MODULE, stored, rows, columns, listing=str(checkpoint.listing))


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_found_and_read(name: str, tmp_path: Path) -> None:
    stored, make = MATRICES[name]
    parts = make()
    matrix = matrix_in(saved(tmp_path, parts), stored)
    assert {suffix: info.nbytes for suffix, info in matrix.tensors.items()} == {
        suffix: part.nbytes for suffix, part in parts.items()
    }
    assert sum(part.nbytes for part in parts.values()) == stored.bytes_for(ROWS, COLUMNS)
    read = read_matrix(matrix).tensors
    assert read.keys() == parts.keys() - {SHAPE}
    for suffix, part in ((suffix, parts[suffix]) for suffix in read):
        assert read[suffix].dtype == part.dtype and torch.equal(read[suffix].view(torch.uint8), part.view(torch.uint8))
    assert dequantized(matrix, max_rows=5).shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("name", MATRICES)
def test_every_tensor_is_needed_in_its_shape_and_dtype(name: str, tmp_path: Path) -> None:
    stored, make = MATRICES[name]
    for suffix in make():
        parts = make()
        part = parts.pop(suffix)
        with pytest.raises(CheckpointError, match=rf"tensor '{MODULE}{suffix}' .* is missing, though"):
            matrix_in(saved(tmp_path, parts), stored)
        doubled = torch.cat((part.view(torch.uint8), part.view(torch.uint8))).view(part.dtype)
        with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor '{MODULE}{suffix}' has shape"):
            matrix_in(saved(tmp_path, {**parts, suffix: doubled}), stored)
        with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor '{MODULE}{suffix}' has dtype I16"):
            matrix_in(saved(tmp_path, {**parts, suffix: torch.zeros(part.shape, dtype=torch.int16)}), stored)
        if part.ndim == 2 and part.shape[0] != part.shape[1] and 1 not in part.shape:
            with pytest.raises(CheckpointError, match="has shape"):
                matrix_in(saved(tmp_path, {**parts, suffix: part.t()}), stored)


@pytest.mark.parametrize("name", MATRICES)
def test_a_tensor_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    stored, make = MATRICES[name]
    extra = ".weight_zero_point" if name == "fp8" else ".weight"
    checkpoint = saved(tmp_path, {**make(), extra: torch.zeros(ROWS, COLUMNS)})
    with pytest.raises(CheckpointError, match=rf"tensor '{MODULE}{extra}' has no place in {stored.name}"):
        matrix_in(checkpoint, stored)


@pytest.mark.parametrize(("wrong", "group"), [(-1, -1), (2, 2), (1 << 30, 1 << 30)])
def test_an_order_beyond_the_groups_is_refused(wrong: int, group: int, tmp_path: Path) -> None:
    parts = gptq_tensors()
    parts[".g_idx"][17] = wrong
    matrix = matrix_in(saved(tmp_path, parts), MATRICES["gptq"][0])
    with pytest.raises(CheckpointError, match=rf"'{MODULE}.g_idx' puts a column into group {group}, and there are 2"):
        read_matrix(matrix)


def test_a_shape_that_lies_is_refused(tmp_path: Path) -> None:
    parts = packed()
    parts[".weight_shape"][1] += 1
    with pytest.raises(CheckpointError, match=r"weight_shape' says \[16, 65\], and the matrix is \[16, 64\]"):
        read_matrix(matrix_in(saved(tmp_path, parts), INT4))


def test_a_file_cut_short_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    matrix = matrix_in(saved(tmp_path, fp8_tensors()), MATRICES["fp8"][0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"cut short inside tensor"):
        read_matrix(matrix)


def test_sizes_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, awq_tensors())
    with pytest.raises(CheckpointError, match="needs a multiple of 32 columns, and a matrix has 60"):
        matrix_in(checkpoint, MATRICES["awq"][0], columns=60)


def test_stacked_experts_of_gpt_oss_are_slices(tmp_path: Path) -> None:
    stored, experts = mxfp4(("_blocks", "_scales")), 3
    blocks = torch.randint(0, 256, (experts, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, (experts, ROWS, COLUMNS // 32), dtype=torch.uint8)
    checkpoint = saved(tmp_path, {"_blocks": blocks, "_scales": scales})
    for expert in range(experts):
        matrix = find_matrix(checkpoint.tensors, MODULE, stored, ROWS, COLUMNS, listing="x", expert=(expert, experts))
        read = read_matrix(matrix).tensors
        assert torch.equal(read["_blocks"].flatten(), blocks[expert].flatten())
        assert torch.equal(dequantized(matrix, max_rows=7), dequantized(matrix))
    with pytest.raises(CheckpointError, match="there are 4 experts"):
        find_matrix(checkpoint.tensors, MODULE, stored, ROWS, COLUMNS, listing="x", expert=(0, 4))
    with pytest.raises(CheckpointError, match="has shape"):
        find_matrix(checkpoint.tensors, MODULE, stored, ROWS, 2 * COLUMNS, listing="x", expert=(0, 3))


@pytest.mark.parametrize("method", ["gptq", "mxfp4"])
def test_the_matrices_of_an_expert_are_found_by_the_config(method: str, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32, "head_dim": 16}
    experts = {"moe_intermediate_size": 32, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    family = "qwen3_moe" if method == "gptq" else "gpt_oss"
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    values = {**small, **experts, "model_type": family, "intermediate_size": 32, "quantization_config": settings}
    values |= {"num_key_value_heads": 2, "torch_dtype": "bfloat16"}
    config = HFConfig(values, where="config.json")
    profile, quantization = profile_from_config(config, name="tiny"), read_quantization(config)
    assert quantization is not None and profile.stored is not None
    tensors, inside = {}, "model.layers.1.mlp.experts"
    for expert in range(2):
        for matrix, rows, columns in (("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)):
            codes, zeros = torch.randint(0, 16, (rows, columns)), torch.randint(0, 16, (columns // 32, rows))
            scales, order = torch.rand(columns // 32, rows).half(), torch.arange(columns) // 32
            parts = pack_gptq(codes, zeros, scales, order, 4, 1)
            tensors |= {f"{inside}.{expert}.{matrix}_proj{suffix}": part for suffix, part in parts.items()}
    if method == "mxfp4":
        tensors = {}
        for matrix, rows, columns in (("gate_up", 64, 64), ("down", 64, 32)):
            tensors[f"{inside}.{matrix}_proj_blocks"] = torch.zeros(2, rows, columns // 32, 16, dtype=torch.uint8)
            tensors[f"{inside}.{matrix}_proj_scales"] = torch.zeros(2, rows, columns // 32, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint = as_matrices(checkpoint, quantization.format_of, "BF16")
    suffix = ".weight" if method == "gptq" else ""
    assert {name.rpartition("_proj")[2] for name in checkpoint.tensors} == {suffix}
    matrices = [info.stored() for info in checkpoint.tensors.values()] if method == "gptq" else []
    matrices += [info.part(0, 2).stored() for info in checkpoint.tensors.values() if info.turned]
    page = matrices[: len(checkpoint.tensors) // 2] if method == "gptq" else matrices
    biases = 2 * (64 + 64) if method == "mxfp4" else 0
    assert sum(part.nbytes for matrix in page for part in matrix.tensors.values()) + biases == profile.stored.page_bytes
    assert all(dequantized(matrix).shape == matrix.shape for matrix in matrices)
