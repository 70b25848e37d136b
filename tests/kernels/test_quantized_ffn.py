"""Products with quantised matrices equal those with their numbers, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.kernels import quantized
from moelight.kernels.ffn import cpu_expert_ffn, cpu_linear
from moelight.kernels.quantized import cpu_dequantize, dense_values
from tests.kernels.quantized import FORMATS, garbage, matrix, packed, step
from tests.kernels.stored import LANES, generator, serving
from tests.weights.packers import same_bits

SERVERS = [*LANES, "torch"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


def sizes(name: str, rows: int, columns: int) -> tuple[int, int]:
    """About so many, as the format allows."""
    row_step, column_step = step(FORMATS[name])
    return -(-rows // row_step) * row_step, -(-columns // column_step) * column_step


@pytest.mark.parametrize("name", FORMATS)
def test_linear_equals_that_of_the_numbers(name: str, server: str) -> None:
    for rows, columns in ((67, 300), (9, 1500)):
        weight = matrix(FORMATS[name], *sizes(name, rows, columns), ordered=rows > 9)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            values = dense_values(weight, dtype)
            for tokens in (1, 3, 17, 65) if dtype == torch.bfloat16 else (1, 2):
                x = generator(tokens)(tokens, weight.columns).to(dtype)
                same_bits(cpu_linear(x, weight, threads=1), cpu_linear(x, values, threads=1))
                same_bits(cpu_linear(x, weight, threads=2), cpu_linear(x, values, threads=1))


FEW = ("packed int4 rows", "packed int8", "packed int8 symmetric", "int8 rows", "fp8 blocks", "mxfp4", "Q4_0", "Q4_1")


@pytest.mark.parametrize(
    "name", [*FEW, "Q8_0", "Q2_K", "Q4_K", "IQ4_XS", "IQ2_XS", "IQ3_S", "IQ1_M", "mlx int3", "mlx int4", "nvfp4", "nf4"]
)
def test_few_tokens_meet_rows_as_they_are_unpacked(name: str, server: str) -> None:
    """Rows and tokens that are multiplied at once, blocks of columns, subnormals, scales that are no numbers."""
    for rows, columns in ((1, 256), (7, 1792), (66, 1280)):
        sane = matrix(FORMATS[name], *sizes(name, rows, columns))
        for weight in (sane, garbage(FORMATS[name], sane.rows, sane.columns)):
            values = dense_values(weight, torch.bfloat16)
            for tokens in range(1, 10):
                x = generator(tokens)(tokens, weight.columns).bfloat16()
                x.view(-1)[::7] = 1e-39  # subnormal
                same_bits(cpu_linear(x, weight, threads=1), cpu_linear(x, values, threads=1))


def experts(form: str, server: str, pairing: str, inner: int = 40, hidden: int = 300) -> None:
    """Quantised experts and those with their numbers, with biases."""
    width, depth = sizes(form, inner, hidden), sizes(form, hidden, inner)
    hidden, inner = max(width[1], depth[0]), max(width[0], depth[1])
    stored, count, randn = FORMATS[form], 3, generator(3)
    wide = inner if pairing == "apart" else 2 * inner
    up = [matrix(stored, wide, hidden, seed=e) for e in range(count)]
    more = [matrix(stored, inner, hidden, seed=9 + e) for e in range(count)] if pairing == "apart" else None
    down = [matrix(stored, hidden, inner, seed=20 + e) for e in range(count)]
    biases: dict[str, Any] = {
        "gate_up_bias": [randn(wide).bfloat16() for _ in range(count)],
        "down_bias": [randn(hidden).bfloat16() for _ in range(count)],
    }
    if more is not None:
        biases["up_bias"] = [randn(inner).bfloat16() for _ in range(count)]
    offsets = torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    options = biases | {"interleaved": pairing == "interleaved", "activation": "swiglu_oai"}
    x = randn(40, hidden).bfloat16()

    def dequantized(matrices: list[Matrix[Tensor]] | None) -> list[Tensor] | None:
        return None if matrices is None else [dense_values(matrix, x.dtype) for matrix in matrices]

    wanted = cpu_expert_ffn(
        x, dequantized(up) or [], dequantized(down) or [], offsets, up=dequantized(more), threads=1, **options
    )
    for threads in (1, 2):
        inputs = [item if e != 1 else None for e, item in enumerate(up)]  # an expert without tokens
        same_bits(cpu_expert_ffn(x, inputs, down, offsets, up=more, threads=threads, **options), wanted)


@pytest.mark.parametrize("pairing", ["joined", "interleaved", "apart"])
@pytest.mark.parametrize("form", ["mxfp4", "packed int4", "gptq int4", "awq", "fp8 blocks", "Q8_0"])
def test_experts_equal_those_of_the_numbers(form: str, pairing: str, server: str) -> None:
    experts(form, server, pairing)


def test_experts_may_have_two_formats(server: str) -> None:
    randn, up, down = generator(0), matrix(FORMATS["Q4_K"], 64, 256), matrix(FORMATS["Q8_0"], 256, 32)
    x, offsets, dtype = randn(7, 256).bfloat16(), torch.tensor([0, 7]).int(), torch.bfloat16
    wanted = cpu_expert_ffn(x, [dense_values(up, dtype)], [dense_values(down, dtype)], offsets)
    same_bits(cpu_expert_ffn(x, [up], [down], offsets), wanted)
    same_bits(cpu_expert_ffn(x, [up], [dense_values(down, dtype)], offsets), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", ["Q8_0", "mxfp4", "IQ2_XXS"])
def test_gate_and_up_may_have_two_formats(
    other: str, dtype: torch.dtype, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Natively where there are kernels, never by torch, whose matrices of numbers no plan counts."""
    randn, down = generator(0), matrix(FORMATS["Q8_0"], 256, 32)
    gate, up = matrix(FORMATS["Q4_K"], 32, 256), matrix(FORMATS[other], 32, 256, seed=1)
    x, offsets = randn(7, 256).to(dtype), torch.tensor([0, 7]).int()
    dense = [dense_values(weight, torch.float32) for weight in (gate, up, down)]
    wanted = cpu_expert_ffn(x.float(), [dense[0]], [dense[2]], offsets, up=[dense[1]])
    if server != "torch":
        monkeypatch.setattr(quantized, "dense_values", None)
    result = cpu_expert_ffn(x, [gate], [down], offsets, up=[up])
    assert result.dtype == dtype
    error = (result.float() - wanted).norm() / wanted.norm()
    assert error < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize(name: str, server: str) -> None:
    for rows, columns in ((67, 300), (9, 1500)):
        sane = matrix(FORMATS[name], *sizes(name, rows, columns), ordered=rows > 9)
        wild = garbage(FORMATS[name], sane.rows, sane.columns)
        if FORMATS[name].order:
            wild = replace(wild, tensors={**wild.tensors, ".g_idx": sane.tensors[".g_idx"]})
        for weight in (sane, wild):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                wanted = dense_values(weight, dtype)
                same_bits(cpu_dequantize(weight, dtype, threads=2), wanted)
                room = torch.zeros(weight.rows, weight.columns + 3, dtype=dtype)
                assert cpu_dequantize(weight, dtype, out=room[:, : weight.columns]).data_ptr() == room.data_ptr()
                same_bits(room[:, : weight.columns].contiguous(), wanted)
                assert not room[:, weight.columns :].any()


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_are_read(name: str, server: str) -> None:
    """Scales that are not numbers, groups that are not there: no matter what, nothing else is touched."""
    weight = garbage(FORMATS[name], *sizes(name, 67, 300))
    if server == "torch" and FORMATS[name].order:
        return  # whose indices the caller has checked
    for tokens in (1, 17):
        for dtype in (torch.bfloat16, torch.float32):
            assert cpu_linear(generator(0)(tokens, weight.columns).to(dtype), weight).shape == (tokens, weight.rows)


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_parts_are_refused(name: str, server: str) -> None:
    weight = matrix(FORMATS[name], *sizes(name, 67, 300))
    x = torch.zeros(2, weight.columns)
    for suffix, part in weight.tensors.items():
        if suffix == ".weight_shape":
            continue
        if part.numel() > 1:
            short = part.flatten()[:-1].clone()
            refuses(x, replace(weight, tensors={**weight.tensors, suffix: short}))
            apart = torch.stack((part, part), dim=-1)[..., 0]
            refuses(x, replace(weight, tensors={**weight.tensors, suffix: apart}))
        refuses(x, replace(weight, tensors={key: part for key, part in weight.tensors.items() if key != suffix}))
    refuses(x[:, :-1].contiguous(), weight)


def refuses(x: Tensor, weight: Matrix[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"^(weight|x): "):
        cpu_linear(x, weight)


def test_lists_have_one_format(server: str) -> None:
    x, offsets = torch.zeros(2, 128).bfloat16(), torch.tensor([0, 1, 2]).int()
    down = [matrix(FORMATS["Q8_0"], 128, 32) for _ in range(2)]
    up = matrix(packed(bits=4, group=32), 64, 128)
    for other in (matrix(FORMATS["mxfp4"], 64, 128), dense_values(up, torch.float32), matrix(up.stored, 32, 128)):
        with pytest.raises(ValueError, match=r"^gate_up: "):
            cpu_expert_ffn(x, [up, other], down, offsets)
    with pytest.raises(ValueError, match=r"^(down|gate_up): "):
        cpu_expert_ffn(x, [up, up], [down[0], dense_values(down[0], torch.float32)], offsets)


def test_kinds_are_all_there() -> None:
    assert {stored.key for stored in FORMATS.values()} >= {"fp8", "int8", "gptq", "packed", "awq", "mxfp4", "ggml"}
