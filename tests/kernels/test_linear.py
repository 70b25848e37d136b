"""The face of linear layers: right for every stored weight, dtype and odd shape, and the same in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import native, reference
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


def truth(x, kept, bias=None):
    kept = kept.double()
    bias = None if bias is None else bias.double()
    return reference.linear(x.double(), kept.weight, bias, scale=kept.scale, group_size=kept.group_size)


def linear(x, kept, bias=None, **rest):
    return cpu_linear(x, kept.weight, bias, scale=kept.scale, group_size=kept.group_size, **rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_form_and_shape(server, kind, dtype):
    for tokens, rows, depth in SHAPES:
        x, kept = generator(1)(tokens, depth).to(dtype), stored(kind, rows, depth)
        found = linear(x, kept, threads=2)
        assert found.dtype == dtype
        assert found.shape == (tokens, rows)
        assert relative_error(found, truth(x, kept)) <= TOLERANCE[dtype], (tokens, rows, depth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_scales_of_groups(server, kind, dtype):
    for group_size, depth in product((32, 64, 96, 1024, 8192), (64, 1100, 4224)):
        x, kept = generator(1)(9, depth).to(dtype), stored(kind, 37, depth, group_size=group_size)
        assert relative_error(linear(x, kept), truth(x, kept)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias(server, dtype):
    for wide in [False, True]:
        x, kept = generator(1)(11, 70).to(dtype), stored("bfloat16", 90, 70)
        bias = generator(2)(90).to(torch.float32 if wide else dtype)
        assert relative_error(linear(x, kept, bias), truth(x, kept, bias)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_exact(server, kind):
    """Sums of small integers have one float32 value whatever the order: every element must meet its own weight."""
    source = torch.Generator().manual_seed(0)
    for tokens, rows, depth in ((5, 41, 2146), (8, 12, 96)):
        x = torch.randint(-4, 5, (tokens, depth), generator=source).float()
        kept = stored(kind, rows, depth)
        if kept.scale is None:
            weight = torch.randint(-4, 5, (rows, depth), generator=source).to(KINDS[kind])
        else:
            weight = kept.weight
        scale = None if kept.scale is None else torch.full((rows,), 0.5)
        expected = reference.linear(x.double(), weight.double() if scale is None else weight, scale=scale)
        assert torch.equal(cpu_linear(x, weight, scale=scale).double(), expected)
        found = cpu_linear(x.bfloat16(), weight, scale=scale)
        assert torch.equal(found, expected.bfloat16())


def test_rows_may_be_strided(server):
    randn = generator(3)
    x, weight = randn(9, 50)[:, :40], randn(30, 64)[:, 3:43]
    out = torch.zeros(9, 31)[:, :30]
    expected = reference.linear(x.double(), weight.double())
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
        found = cpu_linear(x, weight).isfinite()
        expected = torch.ones(20, 30, dtype=torch.bool)
        expected[13], expected[:, 7] = False, False
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [None, 64])
def test_tokens_of_any_size_meet_integers(server, kind, group_size):
    """Each on its own scale: nothing, very small and very large ones, one large element, and what is not finite."""
    x, kept = generator(1)(7, 320), stored(kind, 24, 320, group_size=group_size)
    x[0], x[1], x[2] = 0.0, x[1] * 1e-25, x[2] * 1e25
    x[3, 77], x[4, 5], x[5, 319] = 1e4, float("nan"), float("inf")
    x = x.bfloat16()
    found, expected = linear(x, kept), truth(x, kept)
    assert not found[0].any()
    assert not found[4:6].isfinite().any()
    for row in (1, 2, 3, 6):
        assert relative_error(found[row], expected[row]) <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_company(lanes, kind, dtype):
    depth = 2176
    group_size = 64 if kind == "int4" else None
    x, kept = generator(1)(530, depth).to(dtype), stored(kind, 70, depth, group_size=group_size)
    together = linear(x, kept, threads=2)
    for row in (0, 5, 6, 95, 96, 383, 511, 512, 529):
        assert torch.equal(linear(x[row : row + 1], kept, threads=1)[0], together[row])
    order = torch.randperm(530, generator=torch.Generator().manual_seed(4))
    for count, threads in ((2, 1), (7, 2), (17, 3), (100, 1), (385, 2)):
        chosen = order[:count]
        assert torch.equal(linear(x[chosen], kept, threads=threads), together[chosen])


@pytest.mark.parametrize("shape", [(70, 1024), (33, 4096), (64, 384), (3, 32)], ids=str)
def test_as_many_tokens_as_a_cache_holds_are_the_same_alone(lanes, shape):
    rows, depth = shape
    x, kept = generator(1)(97, depth).bfloat16(), stored("bfloat16", rows, depth)
    alone = torch.cat([linear(x[row : row + 1], kept, threads=1) for row in range(len(x))])
    for count, threads in ((2, 1), (7, 1), (8, 2), (9, 1), (13, 1), (16, 2), (33, 1), (64, 2), (97, 1)):
        assert torch.equal(linear(x[:count], kept, threads=threads), alone[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_agree(lanes, kind):
    x, kept = generator(1)(9, 3000), stored(kind, 50, 3000)
    found = linear(x, kept)
    native.extension().set_isa("scalar")
    assert relative_error(found, linear(x, kept).double()) <= 1e-5


ARGUMENTS = {
    "x": lambda: generator(0)(3, 64),
    "weight": lambda: stored("int4", 10, 64, group_size=32).weight,
    "bias": lambda: torch.zeros(10),
    "scale": lambda: torch.ones(10, 2),
    "group_size": lambda: 32,
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


@pytest.mark.parametrize("name", ["x", "weight", "bias", "scale", "out"])
def test_linear_names_the_wrong_argument(checker, name):
    for damage in DAMAGES.values():
        arguments = {key: make() for key, make in ARGUMENTS.items()}
        arguments[name] = damage(arguments[name])
        refused(cpu_linear, arguments, {"x", "weight", "bias", "scale", "out"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 0),
        ("group_size", -32),
        ("group_size", 48),
        ("group_size", 32.0),
        ("group_size", "all"),
        ("threads", 0),
        ("threads", 1.5),
        ("scale", None),
    ],
)
def test_linear_refuses_numbers_out_of_range(checker, name, value):
    refused(cpu_linear, {key: make() for key, make in ARGUMENTS.items()} | {name: value}, {name})


def test_linear_refuses_what_only_looks_right(checker):
    x = torch.zeros(3, 63)
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 31, dtype=torch.uint8), "scale": torch.ones(4)}, {"weight"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 63), "scale": torch.ones(4)}, {"scale"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(0, 63)}, {"weight"})
    refused(cpu_linear, {"x": torch.zeros(3, 0), "weight": torch.zeros(4, 0)}, {"weight"})
    refused(cpu_linear, {"x": x, "weight": torch.zeros(4, 63), "out": torch.zeros(3, 4).half()}, {"out"})


@fuzz(60)
@given(data=st.data())
def test_linear_refuses_or_is_right(server, data):
    size = st.sampled_from((3, 10, 32, 64, 0, 1))
    kinds = st.sampled_from((*KINDS.values(), torch.float64, torch.int32))
    tokens, rows, depth = data.draw(size), data.draw(size), data.draw(size)
    kind = data.draw(kinds, label="kind")
    columns = data.draw(st.sampled_from((depth, depth // 2, depth + 1)), label="columns")
    arguments: dict[str, Any] = {
        "x": torch.ones(tokens, depth).to(data.draw(st.sampled_from((*DTYPES, torch.float64)), label="x")),
        "weight": torch.ones(rows, columns).to(kind),
        "bias": data.draw(st.sampled_from((None, torch.ones(rows), torch.ones(rows).half(), torch.ones(3)))),
        "scale": data.draw(st.sampled_from((None, torch.ones(rows), torch.ones(rows, 1), torch.ones(rows, 2)))),
        "group_size": data.draw(st.sampled_from((None, 32, 64, 31, 2**70))),
    }
    try:
        found = cpu_linear(**arguments, threads=2)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
        return
    expected = reference.linear(**arguments)
    assert found.shape == expected.shape
    assert relative_error(found, expected.double()) <= 1e-2
