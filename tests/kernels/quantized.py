"""Quantised matrices of every format with numbers of a sensible size, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moelight.formats.awq import awq
from moelight.formats.bitsandbytes import bitsandbytes
from moelight.formats.format import Format, TensorSpec
from moelight.formats.fp8 import fp8
from moelight.formats.ggml import GGML_FORMATS
from moelight.formats.gptq import gptq
from moelight.formats.int8 import Int8Format
from moelight.formats.matrix import Matrix
from moelight.formats.mlx import mlx
from moelight.formats.mxfp4 import MX_GROUP, mxfp4
from moelight.formats.nvfp4 import NV_GROUP, nvfp4
from moelight.formats.packed import PackedFormat

_INTS = {"I32": torch.int32, "U32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8}
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Bytes of a ggml block at which its float16 scales begin.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
}


def packed(*, bits: int, group: int, zero_points: bool = False, scale: str = "BF16") -> Format:
    return PackedFormat(
        name=f"int{bits}",
        bits=bits,
        scale=scale,
        group=group,
        zero_points=zero_points,
        names=(".weight_packed", ".weight_scale", ".weight_zero_point"),
    )


def int8(*, group: int, zero_points: bool = False) -> Format:
    return Int8Format(name="int8", scale="F16", group=group, zero_points=zero_points)


FORMATS = {
    "fp8 blocks": fp8(block=(128, 128), scale="F32"),
    "fp8 odd blocks": fp8(block=(5, 48), scale="BF16"),
    "fp8 powers": fp8(block=(128, 128), scale="F8_E8M0"),
    "fp8 rows": fp8(block=(1, 0), scale="F16"),
    "fp8 tensor": fp8(block=(0, 0), scale="F32"),
    "int8 rows": int8(group=0),
    "int8 groups": int8(group=40, zero_points=True),
    "packed int2": packed(bits=2, group=64),
    "packed int4": packed(bits=4, group=128),
    "packed int4 rows": packed(bits=4, group=0, zero_points=True, scale="F32"),
    "packed int4 short": packed(bits=4, group=16, zero_points=True),
    "packed int8": packed(bits=8, group=32, zero_points=True, scale="F16"),
    "packed int8 symmetric": packed(bits=8, group=64),
    **{f"gptq int{bits}": gptq(bits=bits, group=64) for bits in (2, 4, 8)},
    "gptq int4 in order": gptq(bits=4, group=32, order=False, zero_bias=0),
    "gptq int4 rows": gptq(bits=4, group=0, order=False),
    "awq": awq(group=64),
    "awq rows": awq(group=0),
    "mxfp4": mxfp4(("_blocks", "_scales")),
    "nvfp4": nvfp4(divides=False),
    "nvfp4 divided": nvfp4(divides=True),
    "mlx int3": mlx(bits=3, group=32, scale="F16"),
    "mlx int4": mlx(bits=4, group=64),
    "mlx int6": mlx(bits=6, group=128),
    "nf4": bitsandbytes("nf4"),
    "fp4 short": replace(bitsandbytes("fp4"), group=16),
    **{name: stored for name, stored in GGML_FORMATS.items() if stored.key == "ggml"},
}


def step(stored: Format) -> tuple[int, int]:
    """Of rows and columns."""
    if stored.key == "ggml":
        return 1, stored.block
    if stored.key in {"mxfp4", "nvfp4"}:
        return 1, MX_GROUP if stored.key == "mxfp4" else NV_GROUP
    columns = stored.group or 1 if stored.key in {"packed", "awq", "mlx", "bitsandbytes"} else 1
    if stored.key == "gptq":
        return stored.per_word, stored.per_word
    return stored.per_word if stored.key == "awq" else 1, columns


def matrix(stored: Format, rows: int, columns: int, seed: int = 0, *, ordered: bool = True) -> Matrix[Tensor]:
    """A random matrix of numbers around 0.05; ``ordered``: columns of GPTQ are in the order of their groups."""
    source = torch.Generator().manual_seed(seed)
    parts = {part.suffix: _part(stored, part, source) for part in stored.tensors(rows, columns)}
    if stored.order:
        order = torch.arange(columns) // (stored.group or columns)
        parts[stored.names[3]] = order.int() if ordered else order[torch.randperm(columns, generator=source)].int()
    return Matrix(stored=stored, rows=rows, columns=columns, tensors=parts)


def garbage(stored: Format, rows: int, columns: int, seed: int = 0) -> Matrix[Tensor]:
    """A matrix of any bytes."""
    source, parts = torch.Generator().manual_seed(seed), {}
    for part in stored.tensors(rows, columns):
        full = torch.randint(0, 256, (part.nbytes,), generator=source, dtype=torch.uint8)
        parts[part.suffix] = full.view(_dtype(part.dtypes[0])).reshape(part.shape)
    return Matrix(stored=stored, rows=rows, columns=columns, tensors=parts)


def _dtype(name: str) -> torch.dtype:
    eights = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
    return (_INTS | _FLOATS | eights)[name]


def _part(stored: Format, part: TensorSpec, source: torch.Generator) -> Tensor:
    name = part.dtypes[0]
    if part.suffix in stored.names[1:2] and stored.key != "ggml":
        scales = torch.rand(part.shape, generator=source) * 0.01 + 0.001
        if name in _FLOATS:
            return scales.to(_FLOATS[name])
        return torch.randint(118, 123, part.shape, generator=source, dtype=torch.uint8).view(_dtype(name))
    if part.suffix in stored.names[2:3] and name in _FLOATS:
        if stored.key == "nvfp4":
            return torch.full(part.shape, 2.1e4 if stored.native_name == "nvfp4 divided" else 4.7e-5)
        return (torch.rand(part.shape, generator=source) * -0.05).to(_FLOATS[name])
    raw = torch.randint(0, 256, (part.nbytes,), generator=source, dtype=torch.uint8)
    if name == "F8_E4M3":
        raw = torch.where((raw & 127) > 120, raw & 0xF0, raw)
    if stored.key == "ggml":
        blocks = raw.view(-1, stored.block_bytes)
        for at in _HALVES[stored.name]:
            halves = (torch.rand(len(blocks), 1, generator=source) * 0.01 + 0.0001).half()
            blocks[:, at : at + 2] = halves.view(torch.uint8)
        if stored.name == "MXFP4":
            blocks[:, 0] = blocks[:, 0] % 5 + 118
        if stored.name == "IQ1_M":  # four bits of the scale are in every other byte
            blocks[:, 49::2] = (blocks[:, 49::2] & 15) | torch.tensor([0, 128, 0, 16], dtype=torch.uint8)
    return raw.view(_dtype(name)).reshape(part.shape)
