"""Quantised copies of small checkpoints, and what their numbers are: matrices of rounded codes with scales, packed by
`tests.weights.packers` or by compressed-tensors' own compressors, in each method that is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelight.formats.bitsandbytes import CODE_VALUES
from moelight.formats.rules import TORCHAO_NAMES
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.quantization import read_quantization
from tests.weights.packers import pack_awq, pack_gptq, pack_rows, unpacked

GROUP = 32
Pack = Callable[[Tensor], dict[str, Tensor]]  # a matrix [rows, columns] -> its tensors by suffix


@dataclass(frozen=True)
class Method:
    """``quantization_config`` of a config.json, and how a matrix is packed under it. ``values``: those of tensors that
    describe themselves, in float32; else the format says them."""

    config: dict[str, Any]
    pack: Pack
    values: Callable[[dict[str, Tensor]], Tensor] | None = None


def _rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, C], zero points and scales [G, R], a scale for each `GROUP` columns."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).clamp_min(1e-4).half().float()
    zero = (-low / scale).round().clamp(0, (1 << bits) - 1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.flatten(1).int(), zero.t().int().contiguous(), scale.t().half().contiguous()


def _gptq(bits: int, *, ordered: bool) -> Method:
    def pack(weight: Tensor) -> dict[str, Tensor]:
        codes, zeros, scales = _rounded(weight, bits)
        order = torch.arange(weight.shape[1]) // GROUP
        if ordered:  # of the columns: those of the groups as they are, in another order
            moved = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            codes, order = codes[:, moved], order[moved]
        return pack_gptq(codes, zeros, scales, order, bits, 1)

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
    return Method(config, pack)


def _packed(bits: int) -> Method:
    """The numbers of `_gptq` and `_awq` as packed integers of compressed-tensors."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        codes, zeros, scales = _rounded(weight, bits)
        return {
            ".weight_packed": pack_rows(codes.t(), bits).t().contiguous(),
            ".weight_scale": scales.t().contiguous(),
            ".weight_zero_point": pack_rows(zeros.t(), bits),
            ".weight_shape": torch.tensor(weight.shape),
        }

    method = _compressed("pack-quantized", num_bits=bits, strategy="group", group_size=GROUP, symmetric=False)
    return Method(method.config, pack)


def _awq(weight: Tensor) -> dict[str, Tensor]:
    return pack_awq(*_rounded(weight, 4))


def _fp8(weight: Tensor, block: int = GROUP) -> dict[str, Tensor]:
    rows, columns = -(-weight.shape[0] // block) * block, -(-weight.shape[1] // block) * block
    padded = torch.zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows // block, block, -1, block)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448
    codes = (blocks / scale[:, None, :, None]).view(rows, columns)[: weight.shape[0], : weight.shape[1]]
    return {".weight": codes.to(torch.float8_e4m3fn), ".weight_scale_inv": scale}


def _compressed(stored_as: str, **arguments: Any) -> Method:
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def pack(weight: Tensor) -> dict[str, Tensor]:
        width = weight.shape[1] if args.strategy == "channel" else GROUP
        maximum = {8: 448.0 if args.type == "float" else 127.0, 4: 6.0 if args.type == "float" else 7.0}[args.num_bits]
        scale = weight.float().unflatten(1, (-1, width)).abs().amax(-1).clamp_min(1e-4) / maximum
        if stored_as.startswith("mxfp4"):
            scale = torch.exp2(scale.log2().ceil())
        state = {"weight": weight, "weight_scale": scale.bfloat16()}
        if not args.symmetric:
            state["weight_zero_point"] = torch.randint(-3, 3, scale.shape, dtype=torch.int8)
        written = BaseCompressor.get_value_from_registry(stored_as).compress(state, scheme)
        return {f".{suffix}": part.contiguous() for suffix, part in written.items()}

    config = QuantizationConfig(config_groups={"group_0": scheme}, format=stored_as, ignore=["lm_head", "re:.*gate$"])
    return Method(json.loads(json.dumps(config.model_dump(), default=str)), pack)


def _nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """By compressed-tensors, after the number of the matrix and the scales of its groups."""
    number = 448 * 6 / weight.float().abs().amax().reshape(1)
    scale = (weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * number).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": number}
    written = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(state, NVFP4)
    return {f".{suffix}": part.contiguous() for suffix, part in written.items()}


def pack_mlx(weight: Tensor, bits: int = 4, group: int = GROUP) -> dict[str, Tensor]:
    """Affine groups as MLX stores them: the code of the lowest number of a group is 0."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    scale, bias = (((high - low) / ((1 << bits) - 1)).clamp_min(1e-4)).to(weight.dtype), low.to(weight.dtype)
    codes = ((groups - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, (1 << bits) - 1)
    places = (codes.flatten(1).int()[..., None] >> torch.arange(bits)) & 1
    words = (places.reshape(len(weight), -1, 32).long() << torch.arange(32)).sum(-1)
    return {".weight": words.to(torch.uint32), ".scales": scale, ".biases": bias}


BLOCK = 64  # of bitsandbytes: numbers of a matrix, whatever its rows
_NESTED_BLOCK = 256


def _bitsandbytes(code_type: str, *, nested: bool) -> Method:
    """Of transformers 4: routers and experts are linear layers. ``nested``: magnitudes of blocks are codes, too."""
    table, state = torch.tensor(CODE_VALUES[code_type]), f".weight.quant_state.bitsandbytes__{code_type}"

    def pack(weight: Tensor) -> dict[str, Tensor]:
        flat = weight.float().flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        codes = (blocks / largest.clamp_min(1e-9)[:, None]).flatten()[: len(flat), None].sub(table).abs().argmin(1)
        says: dict[str, Any] = {"quant_type": code_type, "blocksize": BLOCK, "shape": list(weight.shape)}
        parts = {
            ".weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            ".weight.quant_map": table.clone(),
        }
        if nested:
            says |= {
                "nested_blocksize": _NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": float(largest.mean()),
            }
            rest, map_ = largest - largest.mean(), torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(rest, (0, -len(rest) % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
            scales = padded.abs().amax(1)
            largest = (padded / scales[:, None]).flatten()[: len(rest), None].sub(map_).abs().argmin(1).to(torch.uint8)
            parts |= {".weight.nested_absmax": scales, ".weight.nested_quant_map": map_}
        text = torch.tensor(list(json.dumps(says).encode()), dtype=torch.uint8)
        return {**parts, ".weight.absmax": largest, state: text}

    def values(parts: dict[str, Tensor]) -> Tensor:
        says, scales = json.loads(bytes(parts[state].tolist())), parts[".weight.absmax"]
        if nested:
            of_blocks = parts[".weight.nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(scales)]
            scales = parts[".weight.nested_quant_map"][scales.int()] * of_blocks + says["nested_offset"]
        pairs = parts[".weight"].int()
        codes = torch.cat((pairs >> 4, pairs & 15), 1).flatten()
        return (table[codes] * scales.repeat_interleave(BLOCK)[: len(codes)]).view(says["shape"])

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": code_type}
    return Method(config, pack, values)


def _llm_int8(weight: Tensor) -> dict[str, Tensor]:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / largest)[:, None]).round().to(torch.int8)
    return {".weight": codes, ".SCB": largest, ".weight_format": torch.zeros((), dtype=torch.uint8)}


def _llm_int8_values(parts: dict[str, Tensor]) -> Tensor:
    return parts[".weight"].float() * (parts[".SCB"] * torch.tensor(1 / 127))[:, None]


def _torchao(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127.5
    codes = (weight.float() / scales).round().clamp(-128, 127).to(torch.int8)
    return dict(zip(TORCHAO_NAMES, (codes, scales, torch.zeros(scales.shape, dtype=torch.int8)), strict=True))


# As transformers 5 writes it: attention in int8, experts and routers plain.
TORCHAO = Method(
    {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
    },
    _torchao,
)

_NVFP4_ARGUMENTS: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 = QuantizationScheme(
    targets=["Linear"], weights=QuantizationArgs(**_NVFP4_ARGUMENTS, scale_dtype=torch.float8_e4m3fn)
)

METHODS = {
    "gptq int4": _gptq(4, ordered=False),
    "gptq int4 ordered": _gptq(4, ordered=True),
    "gptq int8": _gptq(8, ordered=False),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "fp8 blocks": Method({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, _fp8),
    "int4": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    "int4 zero points": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
    "int8": _compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8 channels": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "nvfp4": Method(_compressed("nvfp4-pack-quantized", **_NVFP4_ARGUMENTS).config, _nvfp4),
    "mlx int4": Method({"bits": 4, "group_size": GROUP, "mode": "affine", "lm_head": False}, pack_mlx),
    "nf4": _bitsandbytes("nf4", nested=True),
    "fp4": _bitsandbytes("fp4", nested=False),
    "llm int8": Method({"quant_method": "bitsandbytes", "load_in_8bit": True}, _llm_int8, _llm_int8_values),
    "mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=GROUP),
}
# One for each row of `moelight.formats.registry.FORMATS` that they are stored in.
OF_EACH_FORMAT = ("gptq int4 ordered", "awq", "fp8 blocks", "int4", "int8", "nvfp4", "mlx int4", "nf4", "mxfp4")

# Methods whose matrices lie by columns, and the same numbers by rows.
BY_ROWS = {"gptq int4": _packed(4), "gptq int8": _packed(8), "awq": _packed(4)}


def quantise(source: Path, out: Path, method: Method, packs: Callable[[str], Pack] | None = None) -> tuple[Path, Path]:
    """The checkpoint ``source``, a single file, quantised by ``method``, and one of the numbers that it then has; both
    in folders of ``out``. ``packs``: how the matrix of a module is packed, where the config has several formats."""
    config = json.loads((source / "config.json").read_text())
    stored = config | {"quantization_config": method.config}
    if method.values is not None:
        stored["transformers_version"] = "4.57.6"
    quantization = read_quantization(HFConfig(stored, where="config.json"))
    assert quantization is not None
    tensors, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        fits = tensor.ndim == 2 and name.endswith(".weight") and tensor.shape[0] % 8 == tensor.shape[1] % GROUP == 0
        form = quantization.format_of(module) if fits else None
        if form is None:
            tensors[name] = values[name] = tensor
            continue
        parts = (method.pack if packs is None else packs(module))(tensor)
        tensors |= {module + suffix: part for suffix, part in parts.items()}
        values[name] = (
            unpacked(form, parts, tensor.shape, dtype=tensor.dtype)
            if method.values is None
            else method.values(parts).to(tensor.dtype)
        )
    return _save(source, out / "quantised", tensors, stored), _save(source, out / "numbers", values, config)


def quantise_stacks(source: Path, out: Path) -> tuple[Path, Path]:
    """A gpt_oss checkpoint ``source`` with random experts in MXFP4, as released, and one of their code_type, which are
    transformers' own."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(4)
    config = json.loads((source / "config.json").read_text())
    tensors, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=draw)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=tensor.dtype).contiguous()
        assert values[name].shape == tensor.shape
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored = config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain}}
    return _save(source, out / "quantised", tensors, stored), _save(source, out / "numbers", values, config)


def _save(source: Path, directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for path in source.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory
