"""Products of int8 activations with whole numbers: the same bits by every instruction set, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.formats.matrix import Matrix
from moelight.formats.plain import plain
from moelight.kernels import native
from moelight.kernels.ffn import cpu_expert_ffn, cpu_linear
from moelight.kernels.quantized import dense_values, integer_product, round_tokens, whole_numbers
from tests.kernels.conftest import ISAS
from tests.kernels.quantized import FORMATS, garbage, int8, matrix, packed, step
from tests.kernels.stored import generator, serving
from tests.weights.packers import same_bits

FORMS = {
    **{name: stored for name, stored in FORMATS.items() if stored.int8_reason is None},
    "int8 in groups": int8(group=96, zero_points=True),
    "packed int4 in groups of 32": packed(bits=4, group=32, zero_points=True, scale="F16"),
    "packed int4 by rows": packed(bits=4, group=0),
    "packed int8 by rows": packed(bits=8, group=0),
}
NARROW = [f"{isa} without dot products" for isa in ISAS if isa != "scalar"]
PRODUCTS = {"avx512 in dot products": "dots", "avx512 with emulated tiles": "emulated", "avx512 with tiles": "tiles"}


def _runs(name: str, products: str) -> bool:
    """True if the processor multiplies so, but not by itself."""
    if name.split(maxsplit=1)[0] not in ISAS or products == native.int8_products():
        return False
    try:
        native.extension().set_int8_products(products)
    except ValueError:
        return False
    native.extension().set_int8_products("auto")
    return True


FORCED = dict.fromkeys(NARROW, "wide") | {
    name: products for name, products in PRODUCTS.items() if _runs(name, products)
}


@pytest.fixture(params=[*ISAS, *FORCED, "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serves; the two ways to multiply are one where a processor has no dot products of int8."""
    name = request.param
    if name in FORCED:
        native.extension().set_int8_products(FORCED[name])
    with serving(name.split()[0], monkeypatch):
        yield name
    if name in FORCED:
        native.extension().set_int8_products("auto")


def sizes(name: str, rows: int, columns: int) -> tuple[int, int]:
    """About so many, as the format allows."""
    row_step, column_step = step(FORMS[name])
    return -(-rows // row_step) * row_step, -(-columns // column_step) * column_step


def product(x: Tensor, weight: Matrix[Tensor], threads: int = 1, **options: Any) -> Tensor:
    return cpu_linear(x, weight, activations="int8", threads=threads, **options)


@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_whole_numbers(name: str, server: str) -> None:
    for rows, columns in ((67, 300), (33, 1500)):
        weight = matrix(FORMS[name], *sizes(name, rows, columns))
        x = generator(1)(37, weight.columns)
        wanted = integer_product(x, weight)
        same_bits(product(x, weight), wanted)
        for dtype in (torch.bfloat16, torch.float16):
            few = x[:3].to(dtype)
            same_bits(product(few, weight, threads=2), integer_product(few, weight).to(dtype))


def test_whole_numbers_are_those_of_the_matrix() -> None:
    """Of every format: whole numbers times scales are its numbers, and rounded tokens are within half a step."""
    for name, stored in FORMS.items():
        weight = matrix(stored, *sizes(name, 40, 200))
        result = whole_numbers(weight)
        group, part = (torch.arange(weight.columns) // item for item in (result.group, result.part))
        values = result.values * result.scales[:, group]
        if result.steps is not None:
            values = values * result.steps[:, part]
        if result.lows is not None and result.least is not None:
            values = values - result.lows[:, part] * result.least[:, group]
        torch.testing.assert_close(values, dense_values(weight, torch.float32), rtol=1e-6, atol=1e-5)
        assert result.values.abs().max() < 1 << 9 and result.group % result.part == 0
    x = generator(0)(5, 200)
    values, scales = round_tokens(x, 64)
    near = (values * scales.unsqueeze(-1)).flatten(1)[:, :200]
    assert ((near - x).abs() <= scales.repeat_interleave(64, 1)[:, :200] * 0.5001).all()
    assert values.abs().max() == 127


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_alone_in_any_company(name: str) -> None:
    weight = matrix(FORMS[name], *sizes(name, 70, 1100))
    x = generator(2)(100, weight.columns).bfloat16()
    together = product(x, weight, threads=2)
    for first, last in ((0, 1), (3, 5), (7, 20), (20, 99)):
        same_bits(product(x[first:last], weight), together[first:last])


@pytest.mark.parametrize("name", FORMS)
def test_few_rows_are_those_of_many(name: str) -> None:
    """One to four meet rows as they are stored, by whole lines and where the last line is a part, more meet panels."""
    for rows, columns in ((41, 1152), (64, 2304), (38, 4128)):
        weight = matrix(FORMS[name], *sizes(name, rows, columns))
        x = generator(6)(16, weight.columns).bfloat16()
        together = product(x, weight)
        for count in range(1, 6):
            same_bits(product(x[:count], weight), together[:count])


EXPERTS = ("packed int4", "packed int8", "gptq int4 in order", "mxfp4")
EXPERTS += ("Q8_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "awq", "IQ3_S")


@pytest.mark.parametrize("pairing", ["joined", "interleaved", "apart"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, pairing: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of plain code, to the bit: also curves and biases are computed alike."""
    width, depth = sizes(name, 40, 300), sizes(name, 300, 40)
    hidden, inner, randn = max(width[1], depth[0]), max(width[0], depth[1]), generator(3)
    wide = inner if pairing == "apart" else 2 * inner
    up = [matrix(FORMS[name], wide, hidden, seed=e) for e in range(2)]
    more = [matrix(FORMS[name], inner, hidden, seed=9 + e) for e in range(2)] if pairing == "apart" else None
    down = [matrix(FORMS[name], hidden, inner, seed=20 + e) for e in range(2)]
    biases: dict[str, Any] = {"gate_up_bias": [randn(wide) for _ in up], "down_bias": [randn(hidden) for _ in up]}
    if more is not None:
        biases["up_bias"] = [randn(inner) for _ in up]
    options = {"interleaved": pairing == "interleaved", "activation": "swiglu_oai", "up": more} | biases
    x, offsets = randn(9, hidden).bfloat16(), torch.tensor([0, 4, 9], dtype=torch.int32)
    result = cpu_expert_ffn(x, up, down, offsets, activations="int8", threads=2, **options)
    exact = cpu_expert_ffn(x, up, down, offsets, **options)
    coarse = FORMS[name].integer_groups(256)[0] == 256  # columns that share a scale: what is small is lost beside them
    assert 0 < (result - exact).float().norm() < (0.05 if coarse else 0.03) * exact.float().norm()
    if server != "torch":  # whose exponential function is another
        with serving("scalar", monkeypatch):
            same_bits(result, cpu_expert_ffn(x, up, down, offsets, activations="int8", threads=1, **options))


@pytest.mark.parametrize("pair", [("IQ2_XXS", "IQ2_XS"), ("Q4_K", "IQ1_S"), ("Q8_0", "packed int4")])
def test_gate_and_up_may_have_two_formats(pair: tuple[str, str], server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that round tokens alike, and those that do not; with biases, and an expert without rows."""
    randn, inner, hidden = generator(5), 40, 768
    gate, up = ([matrix(FORMS[name], inner, hidden, seed=10 * i + e) for e in range(3)] for i, name in enumerate(pair))
    down = [matrix(FORMS["packed int8 by rows"], hidden, inner, seed=30 + e) for e in range(3)]
    biases = {name: [randn(inner) for _ in gate] for name in ("gate_up_bias", "up_bias")}
    x, offsets = randn(27, hidden), torch.tensor([0, 4, 4, 27], dtype=torch.int32)
    options: dict[str, Any] = {"up": up, "activations": "int8"} | biases
    result = cpu_expert_ffn(x, gate, down, offsets, threads=2, **options)
    for e, rows in ((0, slice(0, 4)), (2, slice(4, 27))):
        first, second = (
            product(x[rows], weight[e], bias=biases[name][e])
            for weight, name in ((gate, "gate_up_bias"), (up, "up_bias"))
        )
        wanted = product(torch.nn.functional.silu(first) * second, down[e])
        assert (result[rows] - wanted).norm() < 0.01 * wanted.norm(), "int8 of what is between may differ by a step"
    if server != "torch":
        with serving("scalar", monkeypatch):
            same_bits(result, cpu_expert_ffn(x, gate, down, offsets, threads=1, **options))


def test_gate_and_up_may_have_two_formats_where_tokens_are_as_they_are(server: str) -> None:
    """Equal to experts of the values, of which one matrix lies by columns or is wider, too."""
    randn, inner, hidden = generator(5), 40, 512
    gate, up = matrix(FORMATS["IQ2_XXS"], inner, hidden), matrix(FORMATS["IQ3_XXS"], inner, hidden, seed=1)
    down, offsets = [randn(hidden, inner).bfloat16()], torch.tensor([0, 5], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        x = randn(5, hidden).to(dtype)
        first, second = dense_values(gate, dtype), dense_values(up, dtype)
        wanted = cpu_expert_ffn(x, [first], down, offsets, up=[second])
        same_bits(cpu_expert_ffn(x, [gate], down, offsets, up=[up], threads=2), wanted)
        if server == "torch":
            continue
        by_columns = first.t().contiguous().t()
        for pair in ((gate, second), (first, up), (by_columns, up), (gate, by_columns), (first.float(), up)):
            result = cpu_expert_ffn(x, [pair[0]], down, offsets, up=[pair[1]], threads=2)
            close = cpu_expert_ffn(x, [first], down, offsets, up=[second if pair[1] is not by_columns else first])
            assert (result - close).float().norm() < 0.01 * close.float().norm()


def test_gate_and_up_may_be_rounded_where_down_is_not(server: str) -> None:
    """And the other way round: each side is what it is alone."""
    x, offsets = generator(4)(5, 256).bfloat16(), torch.tensor([0, 5], dtype=torch.int32)
    up, down = matrix(FORMATS["Q4_K"], 512, 256, seed=1), matrix(FORMATS["Q3_K"], 256, 256, seed=2)
    result = cpu_expert_ffn(x, [up], [down], offsets, activations=("int8", "auto"))
    gate, wide = cpu_linear(x, up, activations="int8").float().chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gate) * wide).bfloat16()
    torch.testing.assert_close(result, cpu_linear(inner, down), rtol=0.02, atol=0.02 * float(result.abs().max()))
    other = cpu_expert_ffn(
        x,
        [matrix(FORMATS["Q3_K"], 512, 256)],
        [matrix(FORMATS["Q4_K"], 256, 256)],
        offsets,
        activations=("auto", "int8"),
    )
    assert other.isfinite().all()
    with pytest.raises(ValueError, match=r"^down: .*int8 activations"):
        cpu_expert_ffn(x, [up], [down], offsets, activations="int8")


def test_tokens_of_any_size(server: str) -> None:
    """Groups that are zero or nearly so give zero, those that are not finite no number, and others are untouched."""
    weight = matrix(packed(bits=4, group=32), 40, 96)
    x = generator(0)(5, 96)
    x[0, :32], x[1, 40], x[2, 70], x[3] = 1e-38, torch.inf, torch.nan, 0
    x[4] *= 1e30
    result = product(x, weight)
    same_bits(result, integer_product(x, weight))
    assert result[[1, 2]].isnan().all() and not result[3].any() and result[[0, 4]].isfinite().all()


@pytest.mark.parametrize("name", FORMS)
def test_any_bytes_are_read(name: str, server: str) -> None:
    weight = garbage(FORMS[name], *sizes(name, 67, 300))
    if FORMS[name].order:
        weight.tensors[".g_idx"].copy_(torch.arange(weight.columns) // FORMS[name].group)
    for tokens in (1, 17):
        assert product(generator(0)(tokens, weight.columns), weight).shape == (tokens, weight.rows)


def test_refusals(server: str) -> None:
    x = torch.zeros(2, 512)
    for name in ("fp8 blocks", "packed int2", "packed int4 short", "Q3_K", "gptq int2"):
        with pytest.raises(ValueError, match=r"^weight: .*int8 activations"):
            product(x, matrix(FORMATS[name], *sizes_of(name)))
    with pytest.raises(ValueError, match="columns in the order of their groups"):
        product(x, matrix(FORMATS["gptq int4"], 64, 512, ordered=False))
    for weight in (torch.zeros(3, 512), torch.zeros(3, 512, dtype=torch.int8)):
        with pytest.raises(ValueError, match=r"^weight: "):
            cpu_linear(x, weight, activations="int8")
    with pytest.raises(ValueError, match="activations: must be auto or int8, is 'int4'"):
        cpu_linear(x, matrix(FORMATS["Q8_0"], 3, 512), activations="int4")
    assert plain("BF16").int8_reason is not None


def sizes_of(name: str) -> tuple[int, int]:
    rows, _ = step(FORMATS[name])
    return 8 * rows, 512


def test_int8_products_are_forced_by_name() -> None:
    extension = native.extension()
    if extension is None:
        assert native.int8_products() is None
        return
    with pytest.raises(ValueError, match="must be auto, wide, dots, tiles or emulated"):
        extension.set_int8_products("narrow")
    extension.set_int8_products("wide")
    assert native.int8_products() == "wide"
    extension.set_int8_products("auto")
    features = native.cpu_features()
    best = "dots" if features["avx512_vnni"] or features["avx_vnni"] or features["dotprod"] else "wide"
    assert native.int8_products() == ("tiles" if features["avx512_vnni"] and features["amx_int8"] else best)
