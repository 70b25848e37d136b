"""The face of linear layers: right for every stored weight, dtype and odd shape, and the same in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import native, quantized
from moelight.kernels.ffn import cpu_linear
from tests.fuzz import fuzz
from tests.kernels.paged import TOLERANCE, relative_error
from tests.kernels.stored import KINDS, LANES, generator, refused, serving, stored

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    (0, 5, 64),
    (1, 1, 2),
    (1, 33, 64),
    (2, 3, 30),
    (7, 66, 100),
    (13, 70, 2050),
    (5, 129, 4200),
    (97, 6, 96),
    (400, 9, 34),
    (600, 3, 64),
)


@pytest.fixture(params=[*LANES, "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


@pytest.fixture(params=LANES or [pytest.param("none", marks=pytest.mark.skip(reason="the extension is not built"))])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(request.param, monkeypatch):
        yield request.param


def truth(x, weight, bias=None):
    return quantized.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_form_and_shape(server, kind, dtype):
    for tokens, rows, depth in SHAPES:
        x, retained = generator(1)(tokens, depth).to(dtype), stored(kind, rows, depth)
        result = cpu_linear(x, retained, threads=2)
        assert result.dtype == dtype
        assert result.shape == (tokens, rows)
        assert relative_error(result, truth(x, retained)) <= TOLERANCE[dtype], (tokens, rows, depth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias(server, dtype):
    for wide in [False, True]:
        x, retained = generator(1)(11, 70).to(dtype), stored("bfloat16", 90, 70)
        bias = generator(2)(90).to(torch.float32 if wide else dtype)
        assert relative_error(cpu_linear(x, retained, bias), truth(x, retained, bias)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_exact(server, kind):
    """Sums of small integers have one float32 value whatever the order: every element must meet its own weight."""
    source = torch.Generator().manual_seed(0)
    for tokens, rows, depth in ((5, 41, 2146), (8, 12, 96)):
        x = torch.randint(-4, 5, (tokens, depth), generator=source).float()
        weight = torch.randint(-4, 5, (rows, depth), generator=source).to(KINDS[kind])
        expected = truth(x, weight)
        assert torch.equal(cpu_linear(x, weight).double(), expected)
        assert torch.equal(cpu_linear(x.bfloat16(), weight), expected.bfloat16())


def test_rows_may_be_strided(server):
    randn = generator(3)
    x, weight = randn(9, 50)[:, :40], randn(30, 64)[:, 3:43]
    out = torch.zeros(9, 31)[:, :30]
    expected = quantized.linear(x.double(), weight.double())
    assert cpu_linear(x, weight, out=out) is out
    assert relative_error(out, expected) <= 1e-5
    half = torch.zeros(9, 31, dtype=torch.bfloat16)
    cpu_linear(x.bfloat16(), weight.bfloat16(), out=half[:, 1:])
    assert relative_error(half[:, 1:], expected) <= 1e-2
    assert not half[:, 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_stays_where_it_is(server, dtype):
    for poison in [float("nan"), float("inf")]:
        x, weight = generator(1)(20, 70).to(dtype), generator(2)(30, 70).to(dtype)
        x[13, 69] = poison
        weight[7, 3] = poison
        result = cpu_linear(x, weight).isfinite()
        expected = torch.ones(20, 30, dtype=torch.bool)
        expected[13], expected[:, 7] = False, False
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_company(lanes, kind, dtype):
    depth = 2176
    x, retained = generator(1)(530, depth).to(dtype), stored(kind, 70, depth)
    together = cpu_linear(x, retained, threads=2)
    for row in (0, 5, 6, 95, 96, 383, 511, 512, 529):
        assert torch.equal(cpu_linear(x[row : row + 1], retained, threads=1)[0], together[row])
    order = torch.randperm(530, generator=torch.Generator().manual_seed(4))
    for count, threads in ((2, 1), (7, 2), (17, 3), (100, 1), (385, 2)):
        chosen = order[:count]
        assert torch.equal(cpu_linear(x[chosen], retained, threads=threads), together[chosen])


@pytest.mark.parametrize("shape", [(70, 1024), (33, 4096), (64, 384), (3, 32)], ids=str)
def test_as_many_tokens_as_a_cache_holds_are_the_same_alone(lanes, shape):
    rows, depth = shape
    x, retained = generator(1)(97, depth).bfloat16(), stored("bfloat16", rows, depth)
    alone = torch.cat([cpu_linear(x[row : row + 1], retained, threads=1) for row in range(len(x))])
    for count, threads in ((2, 1), (7, 1), (8, 2), (9, 1), (13, 1), (16, 2), (33, 1), (64, 2), (97, 1)):
        assert torch.equal(cpu_linear(x[:count], retained, threads=threads), alone[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_agree(lanes, kind):
    x, retained = generator(1)(9, 3000), stored(kind, 50, 3000)
    result = cpu_linear(x, retained)
    native.extension().set_isa("scalar")
    assert relative_error(result, cpu_linear(x, retained).double()) <= 1e-5


ARGUMENTS = {
    "x": lambda: generator(0)(3, 64),
    "weight": lambda: stored("bfloat16", 10, 64),
    "bias": lambda: torch.zeros(10),
    "out": lambda: torch.zeros(3, 10),
    "threads": lambda: 2,
}
DAMAGES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda t: t.tolist(),
    "a number": lambda _: 3,
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "one row more": lambda t: torch.cat((t, t[:1])),
    "one row for all": lambda t: t[:1].expand(t.shape),
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
    "more columns": lambda t: torch.cat((t, t), dim=-1),
    "upright": lambda t: t.t().contiguous().t() if t.ndim == 2 else t[::2],
}


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
def test_linear_names_the_wrong_argument(checker, name):
    for damage in DAMAGES.values():
        arguments = {key: make() for key, make in ARGUMENTS.items()}
        arguments[name] = damage(arguments[name])
        refused(cpu_linear, arguments, {"x", "weight", "bias", "out"})


def test_linear_refuses_numbers_out_of_range(checker):
    for threads in (0, 1.5):
        refused(cpu_linear, {key: make() for key, make in ARGUMENTS.items()} | {"threads": threads}, {"threads"})


def test_linear_refuses_what_only_looks_right(checker):
    x = torch.zeros(3, 63)
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 63, dtype=torch.int8)}, {"weight"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 63, dtype=torch.uint8)}, {"weight"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(0, 63)}, {"weight"})
    refused(cpu_linear, {"x": torch.zeros(3, 0), "weight": torch.zeros(4, 0)}, {"weight"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 63), "out": torch.zeros(3, 4).half()}, {"out"})


@fuzz(60)
@given(data=st.data())
def test_linear_refuses_or_is_right(server, data):
    size = st.sampled_from((3, 10, 32, 64, 0, 1))
    kinds = st.sampled_from((*KINDS.values(), torch.float64, torch.int8))
    tokens, rows, depth = data.draw(size), data.draw(size), data.draw(size)
    kind = data.draw(kinds, label="kind")
    columns = data.draw(st.sampled_from((depth, depth, depth + 1)), label="columns")
    arguments: dict[str, Any] = {
        "x": torch.ones(tokens, depth).to(data.draw(st.sampled_from((*DTYPES, torch.float64)), label="x")),
        "weight": torch.ones(rows, columns).to(kind),
        "bias": data.draw(st.sampled_from((None, torch.ones(rows), torch.ones(rows).half(), torch.ones(3)))),
    }
    try:
        result = cpu_linear(**arguments, threads=2)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
        return
    expected = quantized.linear(**arguments)
    assert result.shape == expected.shape
    assert relative_error(result, expected.double()) <= 1e-2
