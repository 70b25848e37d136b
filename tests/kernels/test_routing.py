"""Router, sort, gather and weighted sum: as models have them, the same bits everywhere, nothing wrong let in."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import native, reference
from moelight.kernels.routing import cpu_gather_rows, cpu_route, cpu_scatter_sum, cpu_sort_by_expert
from moelight.models.moe import route_tokens
from moelight.profiles.model import RouterSpec
from tests.fuzz import fuzz
from tests.kernels.paged import TOLERANCE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUZZ = fuzz(60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routes_as_the_models_do(server, dtype):
    for normalize in [False, True]:
        for tokens, experts, top_k in [(0, 8, 2), (1, 8, 2), (70, 8, 8), (50, 129, 8), (3, 1, 1)]:
            logits = torch.randn(tokens, experts).mul(4).to(dtype)
            for rounded in (False, True):
                weights, ids = cpu_route(logits, top_k, normalize=normalize, round_weights=rounded)
                spec = RouterSpec(top_k=top_k, normalize=normalize, weights_in_model_dtype=rounded)
                expected, expected_ids = route_tokens(logits, spec)
                assert weights.dtype == torch.float32
                assert torch.equal(ids, expected_ids)
                atol = 0.0 if not rounded or dtype == torch.float32 else torch.finfo(dtype).eps
                torch.testing.assert_close(weights, expected, rtol=1e-5, atol=max(atol, 1e-7))


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_against_float64(server, normalize):
    logits = torch.randn(200, 60) * 5
    weights, ids = cpu_route(logits, 6, normalize=normalize)
    truth, true_ids = reference.route_topk(logits.double(), 6, normalize)
    true_ids, rank = true_ids.sort(-1)
    assert torch.equal(ids.long(), true_ids)
    assert ((weights - truth.gather(-1, rank)) / truth.gather(-1, rank)).abs().max() <= 1e-5


def test_the_lowest_id_wins_a_tie(server):
    logits = torch.zeros(3, 9)
    logits[1, 4] = 1.0
    logits[2, [2, 7, 8]] = 1.0
    _, ids = cpu_route(logits, 3, normalize=True)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 4], [2, 7, 8]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_logit_breaks_its_token_alone(server, bad):
    logits = torch.randn(4, 12)
    logits[2, 5] = bad
    weights, ids = cpu_route(logits, 3, normalize=False)
    assert weights[2].isnan().all()
    assert ids[2].tolist() == [0, 1, 2]
    assert weights[[0, 1, 3]].isfinite().all()


def test_minus_infinity_is_no_expert(server):
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]])
    weights, ids = cpu_route(logits, 3, normalize=True)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights[0, 1] == 0
    assert weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routing_is_the_same_everywhere(isa, dtype):
    logits = torch.randn(333, 60).to(dtype)
    everyone = cpu_route(logits, 4, normalize=True, threads=2)
    for row in (0, 17, 332):
        alone = cpu_route(logits[row : row + 1], 4, normalize=True, threads=1)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, everyone, strict=True))
    native.extension().set_isa("scalar")
    assert all(torch.equal(a, b) for a, b in zip(cpu_route(logits, 4, normalize=True), everyone, strict=True))


def test_sorted_rows(server):
    for tokens, experts, top_k in [(0, 8, 2), (1, 8, 2), (300, 7, 3), (40, 200, 8), (5, 3, 0)]:
        ids = torch.randint(0, max(1, experts - 1), (tokens, top_k)).int()  # the last expert stays empty
        result = cpu_sort_by_expert(ids, experts)
        assert torch.equal(result.order.long(), ids.flatten().argsort(stable=True))
        assert torch.equal(result.token, result.order // max(1, top_k))
        assert torch.equal(result.order[result.position.flatten().long()].long(), torch.arange(tokens * top_k))
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert torch.equal(result.offsets.diff(), counts.int())
        assert result.offsets[0] == 0
        assert all(tensor.dtype == torch.int32 for tensor in result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(server, dtype):
    for hidden in [0, 1, 40, 4097]:
        x = torch.randn(50, hidden + 3).to(dtype)[:, :hidden]
        index = torch.randint(0, 50, (333,)).int()
        assert torch.equal(cpu_gather_rows(x, index, threads=2), x[index.long()])
        out = torch.empty(333, hidden + 5, dtype=dtype)[:, :hidden]
        assert cpu_gather_rows(x, index, out=out) is out
        assert torch.equal(out, x[index.long()])
        assert cpu_gather_rows(x, index[:0]).shape == (0, hidden)


def routed(tokens: int, hidden: int, dtype: torch.dtype, experts: int = 11, top_k: int = 4) -> tuple[Any, ...]:
    weights, ids = cpu_route(torch.randn(tokens, experts), top_k, normalize=True)
    position = cpu_sort_by_expert(ids, experts).position
    return torch.randn(tokens * top_k, hidden).to(dtype), position, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_scatter_sum(server, dtype, residual):
    for hidden, tokens in product((1, 31, 40, 64, 517), (0, 1, 90)):
        rows, position, weights = routed(tokens, hidden, dtype)
        start = torch.randn(tokens, hidden).to(dtype)
        truth = (rows.double()[position.long()] * weights.double().unsqueeze(-1)).sum(1)
        truth = truth + start.double() if residual else truth
        out = start.clone()
        assert cpu_scatter_sum(rows, position, weights, out, residual=residual) is out
        terms = rows.double().norm() + start.double().norm()  # of which little may be left
        assert (out.double() - truth).norm() <= TOLERANCE[dtype] * terms
        expected = reference.scatter_sum(rows, position, weights, start.clone(), residual=residual)
        assert torch.equal(out, expected)
        if residual:
            assert torch.equal(out, start + cpu_scatter_sum(rows, position, weights))


def test_a_row_that_is_elsewhere_adds_nothing(server):
    rows, position, weights = routed(20, 72, torch.bfloat16)
    zeroed = weights.clone()
    zeroed[position % 3 == 0] = 0
    missing = position.clone()
    missing[position % 3 == 0] = -1
    assert torch.equal(cpu_scatter_sum(rows, missing, weights), cpu_scatter_sum(rows, position, zeroed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_summed_the_same_in_any_company(isa, dtype):
    rows, position, weights = routed(3000, 136, dtype)
    together = cpu_scatter_sum(rows, position, weights, threads=2)
    for pick in (slice(7, 8), slice(100, 2900, 3)):
        assert torch.equal(cpu_scatter_sum(rows, position[pick], weights[pick], threads=1), together[pick])
    native.extension().set_isa("scalar")
    assert torch.equal(cpu_scatter_sum(rows, position, weights), together)


def call(name: str) -> tuple[Any, dict[str, Any]]:
    rows, position, weights = routed(6, 24, torch.float32)
    calls = {
        "route": (functools.partial(cpu_route, normalize=True), {"logits": torch.randn(5, 8), "top_k": 2}),
        "sort": (cpu_sort_by_expert, {"ids": torch.randint(0, 8, (5, 2)).int(), "experts": 8}),
        "gather": (
            cpu_gather_rows,
            {"x": torch.randn(5, 8), "token_of_row": torch.tensor([0, 4, 4]).int(), "out": torch.empty(3, 8)},
        ),
        "scatter": (
            functools.partial(cpu_scatter_sum, residual=True),
            {"rows": rows, "position": position, "weights": weights, "out": torch.zeros(6, 24)},
        ),
    }
    return calls[name]


CALLS = ("route", "sort", "gather", "scatter")
WRONG = {
    "missing": lambda _: None,
    "a list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "float64": lambda t: t.double(),
    "complex": lambda t: t.to(torch.complex64),
    "a dimension more": lambda t: t.unsqueeze(0),
    "no dimension": lambda t: t.flatten()[0],
    "every other element": lambda t: torch.stack((t, t), dim=-1)[..., 0],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_wrong_argument_is_named(checker, name):
    face, arguments = call(name)
    for label, (item, value) in product(WRONG, arguments.items()):
        if not isinstance(value, torch.Tensor) or (item == "out" and label == "missing" and name == "gather"):
            continue
        with pytest.raises(ValueError, match=r"^(\w+): ") as refusal:
            face(**arguments | {item: WRONG[label](value)})
        assert str(refusal.value).split(":")[0] in {item, "out", "weights"}


def test_values_out_of_range(checker):
    for name, argument, value in [
        ("route", "top_k", 0),
        ("route", "top_k", 9),
        ("route", "top_k", 2**70),
        ("route", "top_k", 1.5),
        ("route", "threads", 0),
        ("sort", "experts", -1),
        ("sort", "experts", 2**40),
        ("sort", "experts", "8"),
        ("sort", "ids", torch.tensor([[0, 8]]).int()),
        ("sort", "ids", torch.tensor([[-1, 2]]).int()),
        ("gather", "token_of_row", torch.tensor([0, 1, 5]).int()),
        ("gather", "token_of_row", torch.tensor([0, -1, 2]).int()),
        ("scatter", "position", torch.full((6, 4), 24).int()),
        ("scatter", "threads", -2),
    ]:
        face, arguments = call(name)
        with pytest.raises(ValueError, match=f"^{argument}: "):
            face(**arguments | {argument: value})


def test_out_may_not_be_what_is_read(checker):
    rows = torch.randn(24, 24)
    _, arguments = call("scatter")
    with pytest.raises(ValueError, match=r"^out: "):
        cpu_scatter_sum(rows, arguments["position"], arguments["weights"], rows[:6])
    with pytest.raises(ValueError, match=r"^out: "):
        cpu_gather_rows(rows, torch.tensor([1, 0]).int(), out=rows[3:5])


@FUZZ
@given(data=st.data())
def test_refuses_or_is_right(server, data):
    name = data.draw(st.sampled_from(CALLS))
    face, arguments = call(name)
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            arguments[argument] = data.draw(st.sampled_from((value, value, 1, 3, -1, 2**40)), label=argument)
        elif data.draw(st.booleans(), label=f"damage {argument}"):
            shape = [data.draw(st.sampled_from((n, n, 0, 1, n + 1))) for n in value.shape]
            filling = data.draw(st.sampled_from((0, 1, -1, 7, 2**31 - 1)))
            dtype = data.draw(st.sampled_from((value.dtype, value.dtype, torch.bfloat16, torch.int64, torch.uint8)))
            arguments[argument] = torch.full(shape, filling % 256 if dtype == torch.uint8 else filling, dtype=dtype)
            if data.draw(st.integers(0, 3)) == 0:
                arguments[argument] = arguments[argument].transpose(0, -1)
    retained = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    try:
        result = face(**arguments)
    except ValueError as refusal:
        assert str(refusal).split(":")[0] in arguments
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "extension", lambda: None)
        expected = face(**retained)
    for a, b in zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
