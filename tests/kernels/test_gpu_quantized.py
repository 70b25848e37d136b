"""Quantised matrices in the GPU's kernels: unpacked tiles hold the numbers of `kernels.quantized`, and products are
those with the numbers (on a device but for the order of sums); interpreted on the CPU, by torch, and on a device where
there is one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.formats.fp8 import fp8
from moelight.formats.matrix import Matrix
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.packed import PackedFormat
from moelight.kernels.activations import SILU, Activation
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.grouped import expert_ffn
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.quantized import dense_values
from tests.kernels.gpu_layers import distance, rows_of
from tests.kernels.quantized import FORMATS, matrix, packed, step

TILES = FORMATS | {"packed int8 rows": packed(bits=8, group=0)}
UNGATED = Activation(gated=False)
# On a device, between two orders of sums: twice that of `test_gpu_kernels` from the truth.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def sizes(name: str, rows: int, columns: int) -> tuple[int, int]:
    """About so many, as the format allows."""
    row_step, column_step = step(TILES[name])
    return -(-rows // row_step) * row_step, -(-columns // column_step) * column_step


def moved(weight: Matrix[Tensor], device: torch.device) -> Matrix[Tensor]:
    parts = {name: part.to(device) for name, part in weight.tensors.items()}
    return Matrix(stored=weight.stored, rows=weight.rows, columns=weight.columns, tensors=parts)


def unpacked(weight: Matrix[Tensor], depth: int, device: torch.device) -> Tensor:
    """The numbers of ``weight``, tile by tile of ``depth`` inputs."""
    from moelight.kernels.gpu.programs import TileForm
    from tests.kernels.unpacked_tiles import write_tile

    here = moved(weight, device)
    outward = torch.zeros(weight.columns, weight.rows, device=device)
    table = ExpertTable.of([here], [outward], activation=UNGATED)
    form = TileForm.of(table.forms["gate_up"], depth)
    out = torch.full((weight.columns, weight.rows), torch.nan, device=device)
    inputs = (table.table, table.table.stride(0), out, weight.rows, weight.columns, here.stored.groups(weight.columns))
    grid = (-(-weight.columns // depth), -(-weight.rows // 32))
    write_tile[grid](*inputs, FORM=form, EVEN=weight.columns % depth == 0, BN=32, BK=depth)
    return out.t().cpu()


BY_TRITON = pytest.mark.parametrize(
    "device", ["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@BY_TRITON
@pytest.mark.usefixtures("checks_overflow")
@pytest.mark.parametrize("name", TILES)
def test_tiles_are_the_numbers(name: str, device: torch.device) -> None:
    """Bit for bit, in steps of 64 inputs and of 32; the last one reaches beyond the matrix where the format allows. Of
    formats with a codebook one in both steps: the others have its functions."""
    weight = matrix(TILES[name], *sizes(name, 24, 104), seed=3, ordered=False)
    for depth in (64, 32) if name == "IQ2_XXS" or not TILES[name].codebook else (64,):
        assert torch.equal(unpacked(weight, depth, device), dense_values(weight, torch.float32))


@BY_TRITON
def test_every_code_of_narrow_floats(device: torch.device) -> None:
    """All numbers of E4M3, and E2M1 times all powers of two, those below the normal numbers too."""
    every = torch.arange(256, dtype=torch.uint8)
    eights = fp8(block=(0, 0), scale="F32")
    parts = {".weight": every.view(torch.float8_e4m3fn).repeat(2, 1), ".weight_scale_inv": torch.ones(1, 1)}
    weight = Matrix(stored=eights, rows=2, columns=256, tensors=parts)
    assert torch.equal(
        unpacked(weight, 64, device).nan_to_num(1e9), dense_values(weight, torch.float32).nan_to_num(1e9)
    )
    pairs = (torch.arange(16) | (15 - torch.arange(16)) << 4).to(torch.uint8).repeat(253, 1)
    fours = mxfp4(("_blocks", "_scales"))
    parts = {"_blocks": pairs, "_scales": every[:253, None].contiguous()}
    weight = Matrix(stored=fours, rows=253, columns=32, tensors=parts)
    assert torch.equal(unpacked(weight, 32, device), dense_values(weight, torch.float32))


def layer(form: str, pairing: str, device: torch.device, dtype: torch.dtype, biased: bool) -> tuple[Any, Any]:
    """Three experts, quantised and as the numbers in ``dtype``; the second is elsewhere."""
    unit = max(step(TILES[form]))
    inner, hidden = -(-40 // unit) * unit, -(-96 // unit) * unit
    wide = inner if pairing == "apart" else 2 * inner
    lists = {"gate_up": (wide, hidden), "down": (hidden, inner)}
    if pairing == "apart":
        lists["up"] = (inner, hidden)
    drawn = {
        name: [matrix(TILES[form], *size, seed=e * 7 + len(name)) for e in range(3)] for name, size in lists.items()
    }
    rest: dict[str, Any] = {"activation": Activation("silu", 1.702, 7.0, 1.0), "interleaved": pairing == "interleaved"}
    if biased:
        rest |= {
            f"{name}_bias": [torch.randn(item.rows).to(dtype).to(device) for item in drawn[name]] for name in drawn
        }

    def without(item: list[Any]) -> list[Any]:
        return [item[0], None, item[2]]

    rest = {name: without(item) if isinstance(item, list) else item for name, item in rest.items()}
    inputs = {name: without([moved(item, device) for item in all_]) for name, all_ in drawn.items()}
    quantised = ExpertTable.of(**inputs, **rest)
    if pairing == "apart":  # tables of plain numbers want up as far behind in every page
        values = {name: [dense_values(item, dtype).to(device) for item in all_] for name, all_ in drawn.items()}
        joined = [torch.cat(item) for item in zip(values["gate_up"], values.pop("up"), strict=True)]
        values["gate_up"] = joined
        if biased:
            pairs = zip(rest["gate_up_bias"], rest.pop("up_bias"), strict=True)
            rest["gate_up_bias"] = [None if gate is None else torch.cat((gate, up)) for gate, up in pairs]
    else:
        values = {name: [dense_values(item, dtype).to(device) for item in all_] for name, all_ in drawn.items()}
    return quantised, ExpertTable.of(**{name: without(number) for name, number in values.items()}, **rest)


def alike(result: Tensor, wanted: Tensor) -> bool:
    """Bit for bit; on a device but for the order of sums within a tensor unit's product, which Triton permutes by the
    width of the codes as they are loaded."""
    if result.device.type == "cpu":
        return torch.equal(result, wanted)
    return result.dtype == wanted.dtype and distance(result, wanted.double().cpu()) <= TOLERANCES[result.dtype]


@pytest.mark.parametrize(
    ("form", "pairing", "dtype", "biased"),
    [
        ("packed int4", "joined", torch.bfloat16, False),
        ("mxfp4", "interleaved", torch.bfloat16, True),
        ("fp8 blocks", "apart", torch.float16, True),
        ("gptq int4", "apart", torch.float32, False),
        ("awq", "joined", torch.float16, False),
        ("Q8_0", "apart", torch.bfloat16, False),
    ],
    ids=str,
)
def test_products_are_those_of_the_numbers(
    form: str, pairing: str, dtype: torch.dtype, biased: bool, device: torch.device
) -> None:
    """As tiles are alike; rows gathered, and of an expert elsewhere."""
    quantised, values = layer(form, pairing, device, dtype, biased)
    x, offsets = rows_of((3, 1, 18), quantised.hidden, dtype, device)
    tokens = torch.arange(len(x), device=device).flip(0)
    result, wanted = (expert_ffn(x, pages, offsets, tokens=tokens) for pages in (quantised, values))
    assert alike(result, wanted)
    assert wanted[:3].any() and not result[3].any()


def test_mixed_precision_asks_for_float32(device: torch.device) -> None:
    """float16 rows: activations are shrunk where the outputs are float32, so that louder ones fit."""
    quantised, _ = layer("packed int4", "joined", device, torch.float16, biased=False)
    x, offsets = rows_of((3, 0, 2), quantised.hidden, torch.float16, device)
    wide = torch.empty(len(x), quantised.hidden, device=device)
    assert expert_ffn(x, quantised, offsets, out=wide) is wide
    exact = expert_ffn(x.float(), quantised, offsets).double().cpu()
    assert distance(wide, exact) <= 2e-3
    assert expert_ffn(x, quantised, offsets).dtype == torch.float16


def test_experts_of_plain_numbers_beside_quantised_ones(device: torch.device) -> None:
    quantised, values = layer("packed int4", "joined", device, torch.float32, biased=False)
    pages = ExpertTable.of(quantised.parts["gate_up"], values.parts["down"], activation=quantised.activation)
    x, offsets = rows_of((2, 1, 3), pages.hidden, torch.float32, device)
    assert alike(expert_ffn(x, pages, offsets), expert_ffn(x, values, offsets))


class CPUFormat(PackedFormat):
    """A format that has no Triton unpacker."""

    unpacker = None


def test_formats_have_an_unpacker_or_say_that_they_have_none() -> None:
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    from moelight.kernels.gpu.unpackers import UNPACKERS

    assert all(stored.unpacker in UNPACKERS or stored.cpu_reason for stored in FORMATS.values())
    stored = packed(bits=4, group=64)
    assert stored.cpu_reason is None
    alone = CPUFormat(**{field.name: getattr(stored, field.name) for field in fields(stored)})
    matrices = [matrix(alone, 64, 64)]
    with pytest.raises(ValueError, match=r"^gate_up: is int4, which no program of a GPU unpacks$"):
        ExpertTable.of(matrices, matrices, activation=UNGATED)


def test_tables_name_the_wrong_argument() -> None:
    cpu = torch.device("cpu")
    right, _ = layer("packed int4", "apart", cpu, torch.float32, biased=True)
    parts = {name: list(part) for name, part in right.parts.items()}
    other, short = matrix(TILES["mxfp4"], 40, 128), matrix(TILES["packed int4"], 40, 256)
    for name, wrong in (
        ("gate_up", None),
        ("gate_up", [None, None, None]),
        ("gate_up", [parts["gate_up"][0], None, short]),
        ("gate_up", [parts["gate_up"][0], 3, None]),
        ("up", [other, None, other]),
        ("up", parts["up"][:2]),
        ("down", [short, None, short]),
        ("down_bias", [torch.zeros(3), None, None]),
        ("gate_up_bias", [torch.zeros(40)] * 2),
    ):
        with pytest.raises(ValueError, match=rf"^{name.removesuffix('_bias')}"):
            ExpertTable.of(**(parts | {name: wrong}), activation=SILU)
    with pytest.raises(ValueError, match=r"multiple of 16 bytes"):
        shifted = {
            name: torch.cat((part[:1].flatten()[:1], part.flatten()))[1:].view(part.shape)
            for name, part in short.tensors.items()
        }
        ExpertTable.of([Matrix(stored=short.stored, rows=40, columns=256, tensors=shifted)], [short])
