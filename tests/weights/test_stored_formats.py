"""Formats of compressed-tensors, FP8 and MXFP4 against the libraries that write them, to the bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.formats.awq import awq
from moelight.formats.format import Format
from moelight.formats.fp8 import fp8
from moelight.formats.matrix import Matrix
from moelight.formats.mlx import mlx
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.nvfp4 import nvfp4
from moelight.kernels.quantized import cpu_dequantize
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import Quantization, read_quantization
from tests.weights.packers import pack_awq, same_bits, unpacked
from tests.weights.quantised import METHODS, NVFP4

ROWS, COLUMNS = 72, 256
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"int{bits} {strategy} {'symmetric' if symmetric else 'with zero points'}": (
        "pack-quantized",
        {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group},
    )
    for bits, symmetric, (strategy, group) in itertools.product(
        (4, 8), (True, False), (("group", 64), ("channel", None))
    )
} | {
    "int8 channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 tensor with zero points": ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def config_of(quantization: dict[str, Any]) -> HFConfig:
    return HFConfig({"torch_dtype": "bfloat16", "quantization_config": quantization}, where="config.json")


def read(quantization: dict[str, Any]) -> Quantization:
    result = read_quantization(config_of(quantization))
    assert result is not None
    return result


def scales_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points in bfloat16 that spread the numbers over all codes, in the strategy's shape."""
    rows, columns = weight.shape
    high, wide = {"tensor": (rows, columns), "channel": (1, columns)}.get(args.strategy, (1, args.group_size or 0))
    if args.strategy == "block":
        high, wide = args.block_structure
    blocks = weight.float().unfold(0, high, high).unfold(1, wide, wide) if rows % high == 0 else None
    grid = blocks.abs().amax((-1, -2)) if blocks is not None else torch.rand(-(-rows // high), columns // wide) + 1
    codes = {8: 240.0 if args.type == "float" else 120.0, 4: 6.0}[args.num_bits]
    scale = (grid / codes).clamp_min(1e-6).bfloat16()
    if args.strategy == "tensor":
        scale = scale.reshape(1)
    zero = None
    if not args.symmetric:
        half = 1 << (args.num_bits - 1)
        zero = torch.randint(-half // 2, half // 2, scale.shape, dtype=torch.int8)
    return scale, zero


@pytest.mark.parametrize("name", WEIGHTS)
def test_compressed_tensors_numbers(name: str) -> None:
    stored_as, arguments = WEIGHTS[name]
    torch.manual_seed(3)
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    scale, zero = scales_of(weight, args)
    if name == "mxfp4":
        scale = torch.exp2(scale.float().log2().floor()).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    state |= {} if zero is None else {"weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    written = compressor.compress(state, scheme)
    wanted = compressor.decompress(dict(written), scheme)["weight"]

    described = QuantizationConfig(config_groups={"group_0": scheme}, format=stored_as).model_dump()
    stored = read(json.loads(json.dumps(described, default=str))).format_of("model.layers.0.mlp.experts.0.up_proj")
    assert stored is not None
    parts = {f".{suffix}": part for suffix, part in written.items()}
    assert {part.suffix for part in stored.tensors(ROWS, COLUMNS)} == parts.keys()
    assert stored.bytes_for(ROWS, COLUMNS) == sum(part.nbytes for part in parts.values())
    result = unpacked(stored, parts, (ROWS, COLUMNS), max_rows=13, dtype=wanted.dtype)
    same_bits(result, wanted)
    assert (result.float() - weight.float()).abs().mean() < 0.5 or zero is not None


def test_nvfp4_of_compressed_tensors() -> None:
    """Scales are divided by the number of the matrix, in float32."""
    torch.manual_seed(6)
    method, weight = METHODS["nvfp4"], torch.randn(ROWS, COLUMNS).bfloat16()
    parts = method.pack(weight)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    wanted = compressor.decompress({suffix[1:]: part for suffix, part in parts.items()}, NVFP4)["weight"]
    stored = read(method.config).format_of("model.layers.0.mlp.experts.0.up_proj")
    assert stored == nvfp4(divides=True)
    assert stored.bytes_for(ROWS, COLUMNS) == sum(part.nbytes for part in parts.values())
    result = unpacked(stored, parts, (ROWS, COLUMNS), max_rows=13, dtype=wanted.dtype)
    same_bits(result, wanted)


WRITTEN = Path(__file__).parent / "written"


def _same_values(stored: Format, parts: dict[str, Tensor], wanted: Tensor) -> None:
    """In plain torch and by the kernels; zeros may have either sign."""
    rows, columns = wanted.shape
    assert stored.bytes_for(rows, columns) == sum(part.nbytes for part in parts.values())
    assert torch.equal(unpacked(stored, parts, (rows, columns)), wanted)
    matrix = Matrix(stored=stored, rows=rows, columns=columns, tensors=parts)
    assert torch.equal(cpu_dequantize(matrix, torch.float32), wanted)


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (4, 64), (4, 128), (5, 128), (6, 64), (8, 32)], ids=str)
def test_mlx_values(bits: int, group: int) -> None:
    """Written by MLX (`written/mlx_values.py`), whose words are uint32."""
    tensors = load_file(WRITTEN / "mlx.safetensors")
    parts = {f".{name}": tensors[f"{bits}.{group}.{name}"] for name in ("weight", "scales", "biases")}
    parts[".weight"] = parts[".weight"].view(torch.int32)
    scale = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[parts[".scales"].dtype]
    _same_values(mlx(bits=bits, group=group, scale=scale), parts, tensors[f"{bits}.{group}.values"])


def test_modelopt_values() -> None:
    """Written by ModelOpt (`written/modelopt_values.py`)."""
    tensors = load_file(WRITTEN / "modelopt.safetensors")
    parts = {f".{name}": tensors[name] for name in ("weight", "weight_scale", "weight_scale_2")}
    _same_values(nvfp4(divides=False), parts, tensors["values"])


def _torchao(kind: str, **values: Any) -> dict[str, Any]:
    """A ``quantization_config`` as transformers 5.24 writes it."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": values}}}


def _enum(kind: str, value: object) -> dict[str, object]:
    return {"_type": kind, "_data": value}


ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
TORCHAO = {
    "int8": _torchao("Int8WeightOnlyConfig", granularity=ROW, group_size=None, set_inductor_config=True),
    "fp8": _torchao("Float8WeightOnlyConfig", granularity=ROW, weight_dtype=_enum("torch.dtype", "float8_e4m3fn")),
    "int4": _torchao(
        "IntxWeightOnlyConfig",
        granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
        intx_packing_format=_enum("IntxPackingFormat", "UNPACKED_TO_INT8"),
        mapping_type=_enum("MappingType", "ASYMMETRIC"),
        weight_dtype=_enum("torch.dtype", "int4"),
    ),
}


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_values(name: str) -> None:
    """Written by torchao (`written/torchao_values.py`)."""
    tensors, stored = load_file(WRITTEN / "torchao.safetensors"), read(TORCHAO[name]).format_of("q_proj")
    assert stored is not None
    parts = {key.removeprefix(name): part for key, part in tensors.items() if key.startswith(f"{name}._")}
    wanted = tensors[f"{name}.values"]
    assert {part.suffix: part.shape for part in stored.tensors(*wanted.shape)} == {
        suffix: tuple(part.shape) for suffix, part in parts.items()
    }
    same_bits(unpacked(stored, parts, wanted.shape, dtype=wanted.dtype), wanted)


def test_awq_numbers_are_those_of_the_converter() -> None:
    group = 64
    torch.manual_seed(1)
    codes, zeros = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randint(0, 16, (COLUMNS // group, ROWS))
    parts = pack_awq(codes, zeros, torch.rand(COLUMNS // group, ROWS).half())
    stored = awq(group=group)
    assert stored.bytes_for(ROWS, COLUMNS) == sum(part.nbytes for part in parts.values())
    converter = AutoAWQConverter(bits=4, group_size=group, zero_point=True, targets=["Linear"])
    theirs = converter.process({f"x{suffix}": part for suffix, part in parts.items()})
    args = QuantizationArgs(num_bits=4, symmetric=False, group_size=group, strategy="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    inner = {name.removeprefix("x."): part for name, part in theirs.items()}
    wanted = BaseCompressor.get_value_from_registry("pack-quantized").decompress(inner, scheme)["weight"]
    result = unpacked(stored, parts, (ROWS, COLUMNS), max_rows=13, dtype=torch.float16)
    same_bits(result, wanted)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_in_blocks_is_what_transformers_dequantises(scale: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(2)
    rows, columns, block = 96, 128, 32
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 3, (rows // block, columns // block)).float())
    scales = (scales * (1 + torch.rand(scales.shape) * (scale == torch.float32))).to(scale)
    stored = fp8(block=(block, block), scale="F8_E8M0" if scale == torch.float8_e8m0fnu else "F32")
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales)
    parts = {".weight": weight, ".weight_scale_inv": scales}
    assert {part.suffix: part.shape for part in stored.tensors(rows, columns)} == {
        suffix: tuple(part.shape) for suffix, part in parts.items()
    }
    result = unpacked(stored, parts, (rows, columns), max_rows=13, dtype=wanted.dtype)
    same_bits(result, wanted)
    if scale == torch.float8_e8m0fnu:  # the same bytes under another name
        parts[".weight_scale_inv"] = scales.view(torch.uint8)
        result = unpacked(stored, parts, (rows, columns), max_rows=13, dtype=wanted.dtype)
        same_bits(result, wanted)


def test_blocks_at_the_edges_of_an_fp8_matrix_are_smaller() -> None:
    stored, rows, columns = fp8(block=(128, 128), scale="F32"), 200, 130
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    parts = {".weight": torch.ones(rows, columns).to(torch.float8_e4m3fn), ".weight_scale_inv": scales}
    result = unpacked(stored, parts, (rows, columns), max_rows=50)
    assert result[:128, :128].unique().tolist() == [1.0] and result[128:, 128:].unique().tolist() == [8.0]
    assert result[:128, 128:].unique().tolist() == [2.0] and result[128:, :128].unique().tolist() == [4.0]


def test_mxfp4_of_gpt_oss_is_what_transformers_dequantises() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(4)
    experts, rows, columns = 2, 64, 96
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(90, 140, (experts, rows, columns // 32), dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)  # they keep it transposed
    stored = mxfp4(("_blocks", "_scales"))
    assert stored.bytes_for(rows, columns) * experts == blocks.nbytes + scales.nbytes
    for expert in range(experts):
        parts = {"_blocks": blocks[expert], "_scales": scales[expert]}
        result = unpacked(stored, parts, (rows, columns), max_rows=13, dtype=torch.bfloat16)
        same_bits(result, wanted[expert].contiguous())


def test_targets_and_ignored_modules_are_those_of_the_config(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    down = {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "strategy": "channel"}}
    result = read(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": group, "b": down},
            "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.0.self_attn.q_proj"],
        }
    )

    def bits(module: str) -> int | None:
        stored = result.format_of(module)
        return None if stored is None else stored.bits

    assert bits("model.layers.3.mlp.experts.5.up_proj") == 4
    assert bits("model.layers.3.mlp.experts.5.down_proj") == 8
    assert bits("model.layers.1.self_attn.q_proj") == 4 and bits("model.layers.0.self_attn.q_proj") is None
    assert bits("lm_head") is None and bits("model.layers.7.mlp.gate") is None
    assert bits("model.embed_tokens") is None


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "mxfp8-quantized"}, "the format 'mxfp8-quantized' is not read"),
        ({"format": "marlin-24"}, "the format 'marlin-24' is not read"),
        ({"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "num_bits": 3}}}}, "3 bits"),
        ({"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "actorder": "group"}}}}, "actorder"),
        ({"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "group_size": -7}}}}, "refuses it"),
        ({"config_groups": 7}, "refuses it"),
        ({"config_groups": {"a": ["Linear"]}}, "refuses it"),
        ({"ignore": ["re:(a+)+b"]}, "no regular expression"),
        ({"ignore": ["re:["]}, "no regular expression"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"sparsity_config": [1]}, "sparse weights"),
        ({"transform_config": {"x": 1}}, "transforms of activations"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(change: dict[str, Any], complaint: str) -> None:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": GROUP}}
    with pytest.raises(ConfigError) as caught:
        read({**config, **change})
    assert complaint in str(caught.value) and str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
