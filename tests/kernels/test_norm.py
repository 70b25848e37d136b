"""Norm and rotation: near the truth in every dtype and instruction set, and the same for a row in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import reference
from moelight.kernels.norm import cpu_rms_norm, cpu_rotate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
EPS = 1e-5


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def true_norm(x, weight):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_is_near_the_truth(server, dtype):
    for shape in [(1, 1), (3, 48), (7, 1024), (5, 33), (300, 1100), (4, 6, 128), (9, 3, 40), (0, 64)]:
        x, weight = torch.randn(shape).mul(3).to(dtype), torch.randn(shape[-1]).to(dtype)
        before = x.clone()
        result = cpu_rms_norm(x, weight, EPS)
        assert result.shape == x.shape
        assert torch.equal(x, before)
        assert error(result, true_norm(x, weight)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_added_stays_in_x(server, dtype):
    wide = torch.randn(20, 200).to(dtype)
    x, add, weight = wide[:, 30:130], torch.randn(20, 100).to(dtype), torch.randn(100).to(dtype)
    retained = wide.clone()
    total = x + add
    result = cpu_rms_norm(x, weight, EPS, add=add)
    assert torch.equal(x, total)
    assert torch.equal(wide[:, :30], retained[:, :30])
    assert torch.equal(wide[:, 130:], retained[:, 130:])
    assert error(result, true_norm(total, weight)) <= TOLERANCE[dtype]


def test_norm_in_place(server):
    x, weight = torch.randn(9, 100), torch.randn(100)
    expected = cpu_rms_norm(x, weight, EPS)
    assert cpu_rms_norm(x, weight, EPS, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_the_twins_bit_for_bit(server, dtype):
    for shape in [(1, 1, 2), (5, 4, 40), (33, 8, 128), (6, 3, 66), (2, 1, 256), (0, 4, 64)]:
        tokens, heads, dim = shape
        fused = torch.randn(tokens, heads * dim + 16).to(dtype)
        x = fused[:, 8 : 8 + heads * dim].unflatten(-1, (heads, dim))
        angle = torch.randn(tokens, dim // 2).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        expected = reference.rotate(x, cos, sin)
        assert torch.equal(cpu_rotate(x, cos, sin), expected)
        assert cpu_rotate(x, cos, sin, out=x) is x
        assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_company(isa, dtype):
    x, weight = torch.randn(600, 1000).to(dtype), torch.randn(1000).to(dtype)
    angle = torch.randn(600, 100)
    together = cpu_rms_norm(x, weight, EPS, threads=2)
    turned = cpu_rotate(x.unflatten(-1, (10, 100)), angle.cos().to(dtype), angle.sin().to(dtype), threads=2)
    for row in (0, 1, 299, 599):
        one = slice(row, row + 1)
        assert torch.equal(cpu_rms_norm(x[one], weight, EPS, threads=1), together[one])
        heads = x[one].unflatten(-1, (10, 100))
        alone = cpu_rotate(heads, angle[one].cos().to(dtype), angle[one].sin().to(dtype), threads=1)
        assert torch.equal(alone, turned[one])


def test_what_is_not_a_number_stays_in_its_row(server):
    x, weight = torch.randn(3, 64), torch.ones(64)
    x[1, 5] = torch.nan
    result = cpu_rms_norm(x, weight, EPS)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


GOOD = {"x": torch.zeros(3, 2, 8), "weight": torch.zeros(8), "add": torch.zeros(3, 2, 8), "out": torch.zeros(3, 2, 8)}
WRONG = [
    None,
    7,
    torch.zeros(8),
    torch.zeros(3, 2, 9),
    torch.zeros(4, 2, 8),
    torch.zeros(3, 2, 8, dtype=torch.float64),
    torch.zeros(3, 2, 8, dtype=torch.bfloat16),
    torch.zeros(3, 8, 2).mT,
    torch.zeros(1, 2, 8).expand(3, 2, 8),
    torch.zeros(3, 2, 8, device="meta"),
]


@given(st.sampled_from(["x", "weight", "add", "out"]), st.sampled_from(WRONG))
def test_a_wrong_argument_of_the_norm_is_named(name, wrong):
    if wrong is None and name in ("add", "out"):
        return
    if name == "weight" and wrong is WRONG[2]:
        return
    arguments = GOOD | {name: wrong}
    with pytest.raises(ValueError, match=r"^(x|weight|add|out): "):
        cpu_rms_norm(arguments.pop("x"), arguments.pop("weight"), EPS, **arguments)


@given(st.sampled_from(["x", "cos", "sin", "out"]), st.sampled_from(WRONG))
def test_a_wrong_argument_of_the_rotation_is_named(name, wrong):
    good = {"x": torch.zeros(3, 2, 8), "cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8), "out": None}
    if wrong is None and name == "out":
        return
    arguments = good | {name: wrong}
    with pytest.raises(ValueError, match=r"^(x|cos|sin|out): "):
        cpu_rotate(arguments["x"], arguments["cos"], arguments["sin"], out=arguments["out"])


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), "small"])
def test_a_wrong_eps_is_named(eps):
    with pytest.raises(ValueError, match=r"^eps: "):
        cpu_rms_norm(torch.zeros(1, 4), torch.zeros(4), eps)


@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_a_wrong_number_of_threads_is_named(threads):
    with pytest.raises(ValueError, match=r"^threads: "):
        cpu_rms_norm(torch.zeros(1, 4), torch.zeros(4), EPS, threads=threads)
