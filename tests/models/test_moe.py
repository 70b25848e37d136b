"""Experts, however they are called: the sums of one product per expert and token, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.core.dtypes import BFLOAT16, FLOAT32, MIXED_FLOAT16, DType
from moelight.hrm.costs import expert_workspace
from moelight.kernels import native
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.products import Workspace
from moelight.models.expert import Expert, LayerExperts
from moelight.models.moe import (
    Routed,
    SplitMoE,
    add_experts,
    grouped_forward,
    moe_forward,
    route_tokens,
)
from moelight.profiles.model import RouterSpec
from moelight.weights.torch_dtypes import to_torch
from tests.shapes import examples, small_model

SPEC = RouterSpec(top_k=3, normalize=True, weights_in_model_dtype=False)
MODEL = replace(small_model(experts=5), router=SPEC)
Pair = tuple[Tensor, Tensor]
HIDDEN, WIDTH = MODEL.hidden_size, MODEL.experts.intermediate_size


def space(tokens: int, dtype: DType = FLOAT32) -> Workspace:
    sizes = expert_workspace(MODEL, tokens, dtype, grouped=True)
    arena = torch.full((sizes.bytes,), 255, dtype=torch.uint8)
    return Workspace(arena, sizes, HIDDEN, to_torch(dtype), mixed=bool(dtype.pages))


def experts(dtype: torch.dtype = torch.float32) -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    made = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(5)]
    return [(gate_up, down) for gate_up, down in made]


def layer(weights: Sequence[Pair | None]) -> LayerExperts:
    return LayerExperts(None if pair is None else Expert(gate_up=pair[0], down=pair[1]) for pair in weights)


def routed(tokens: int, dtype: torch.dtype = torch.float32) -> Routed:
    weights, ids = route_tokens(torch.randn(tokens, 5).to(dtype), SPEC)
    return Routed(x=torch.randn(tokens, HIDDEN).to(dtype), weights=weights, ids=ids)


def one_by_one(routing: Routed, weights: Sequence[Pair | None]) -> Tensor:
    """float64, token by token."""
    out = torch.zeros(routing.x.shape, dtype=torch.float64)
    for token, (row, ids) in enumerate(zip(routing.x.double(), routing.ids.tolist(), strict=True)):
        for rank, expert in enumerate(ids):
            pair = weights[expert]
            if pair is not None:
                gate, up = (pair[0].double() @ row).chunk(2)
                out[token] += routing.weights[token, rank] * (pair[1].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@examples(40)
@given(tokens=st.integers(1, 40), here=st.lists(st.booleans(), min_size=5, max_size=5), max_rows=st.integers(1, 40))
def test_experts_are_summed_whoever_computes_them(tokens: int, here: list[bool], max_rows: int) -> None:
    routing, weights = routed(tokens), experts()
    some = [item if selected else None for item, selected in zip(weights, here, strict=True)]
    others = [None if selected else item for item, selected in zip(weights, here, strict=True)]
    for part in (weights, some):
        result = moe_forward(routing, layer(part), space(tokens))
        torch.testing.assert_close(result.double(), one_by_one(routing, part), rtol=1e-4, atol=1e-4)
    sums = torch.zeros(tokens, HIDDEN)
    add_experts(sums, routing, layer(some), space(max_rows), most_rows=max_rows)
    add_experts(sums, routing, layer(others), space(max_rows), most_rows=max_rows)
    torch.testing.assert_close(sums.double(), one_by_one(routing, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("extension", [False, True])
def test_an_expert_that_a_row_names_twice_counts_twice(extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not extension:
        monkeypatch.setattr(native, "available", lambda: False)
    routing, weights = routed(12), experts()
    routing = replace(
        routing, ids=routing.ids.sort(dim=-1).values.index_fill(1, torch.tensor([1]), 4).sort(dim=-1).values
    )
    sums = torch.zeros(12, HIDDEN)
    add_experts(sums, routing, layer(weights), space(12), most_rows=12)
    for result in (sums, moe_forward(routing, layer(weights), space(12))):
        torch.testing.assert_close(result.double(), one_by_one(routing, weights), rtol=1e-4, atol=1e-4)


def pages_of(weights: Sequence[Pair], order: Sequence[int], here: Sequence[bool]) -> ExpertTable:
    """The pages of ``weights`` in ``order``, and where each expert finds its own; -1 where it is not ``here``."""
    table = ExpertTable.of([weights[item][0] for item in order], [weights[item][1] for item in order])
    index = [order.index(index) if here[index] else -1 for index in range(len(weights))]
    return table.chosen_by(torch.tensor(index, dtype=torch.int32))


@examples(4)
@given(
    tokens=st.integers(1, 5),
    order=st.permutations(range(5)),
    here=st.lists(st.booleans(), min_size=5, max_size=5),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    max_rows=st.integers(4, 12),
)
def test_the_way_of_a_gpu_gives_the_same_sums(
    tokens: int, order: list[int], here: list[bool], dtype: DType, max_rows: int
) -> None:
    """Whichever page an expert has, and in however many parts the rows are computed: bit for bit."""
    kind = to_torch(dtype)
    routing, weights = routed(tokens, kind), experts(kind)
    pages = pages_of(weights, order, here)
    expected = one_by_one(routing, [item if selected else None for item, selected in zip(weights, here, strict=True)])
    result = grouped_forward(routing, pages, space(tokens, dtype))
    error = 1e-4 if dtype is FLOAT32 else 0.05
    torch.testing.assert_close(result.double(), expected, rtol=error, atol=error)
    parts, sums = space(tokens, dtype), torch.full((tokens, HIDDEN), torch.nan)
    parts.rows = parts.rows[:max_rows]
    assert torch.equal(grouped_forward(routing, pages, parts), result)
    total = torch.ones_like(routing.x)
    assert grouped_forward(routing, pages, parts, total, sums) is total
    assert torch.equal(total, 1 + result), "rounded, then added, as on the CPU"


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_pass_at_once_gives_the_numbers_of_a_micro_batch(dtype: DType) -> None:
    """Bit for bit where products meet the same rows."""
    kind = to_torch(dtype)
    routing, weights = routed(30, kind), experts(kind)
    sums = torch.zeros(30, HIDDEN)
    add_experts(sums, routing, layer(weights), space(30, dtype), most_rows=30)
    assert torch.equal(sums.to(kind), moe_forward(routing, layer(weights), space(30, dtype)))


@pytest.mark.parametrize("extension", [False, True])
def test_mixed_precision_sums_in_float32(extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 rows over bfloat16 experts, by every way: the residual and the sums may leave float16's range; on one
    machine a micro-batch, a split one and a whole pass get the same numbers, bit for bit."""
    if not extension:
        monkeypatch.setattr(native, "available", lambda: False)
    routing, weights = (
        routed(12, torch.float16),
        [(up, (down * 1e6).bfloat16()) for up, down in experts(torch.bfloat16)],
    )
    wanted = one_by_one(routing, weights)
    assert wanted.abs().max() > 65504
    into, begun, sums = (torch.full((12, HIDDEN), value) for value in (1e5, 1e5, 0.0))
    moe_forward(routing, layer(weights), space(12, MIXED_FLOAT16), into=into)
    SplitMoE(routing, layer(weights), frozenset({1, 3}), space(12, MIXED_FLOAT16)).end(begun)
    add_experts(sums, routing, layer(weights), space(12, MIXED_FLOAT16), most_rows=12)
    assert torch.equal(begun, into)
    assert torch.equal(sums + 1e5, into)
    limits = {"rtol": 1e-3, "atol": 1e-3 * float(wanted.abs().max())}
    torch.testing.assert_close(sums.double(), wanted, **limits)
    pages = ExpertTable.of(*zip(*weights, strict=True))
    for result in (
        grouped_forward(routing, pages, space(5, MIXED_FLOAT16), wide=True),
        moe_forward(routing, layer(weights), space(12, MIXED_FLOAT16), wide=True),
    ):
        torch.testing.assert_close(result.double(), wanted, **limits)


def test_experts_come_in_the_order_of_their_ids_with_the_weights_that_are_theirs() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [5.0, 1.0, 1.0, 1.0, 1.0]])
    weights, ids = route_tokens(logits, replace(SPEC, normalize=False))
    assert ids.tolist() == [[1, 3, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids.long()))


@examples(40)
@given(
    tokens=st.integers(1, 12),
    here=st.lists(st.booleans(), min_size=5, max_size=5),
    late=st.sets(st.integers(0, 4)),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
)
def test_what_is_begun_ends_as_if_all_had_been_there(
    tokens: int, here: list[bool], late: set[int], dtype: DType
) -> None:
    """Bit for bit; late experts have no numbers before the end, and rows of others beside it are left alone."""
    kind = to_torch(dtype)
    routing, weights = routed(tokens, kind), experts(kind)
    some = [item if selected else None for item, selected in zip(weights, here, strict=True)]
    expected = moe_forward(routing, layer(some), space(tokens, dtype), into=torch.ones_like(routing.x))
    values = {at: [part.clone() for part in weights[at]] for at in late}
    for at in late:
        for part in weights[at]:
            part.fill_(torch.nan)
    first_row, room = 4 * SPEC.top_k, space(tokens + 4, dtype)
    room.rows[:first_row] = 7
    begun = SplitMoE(routing, layer(some), frozenset(late), room, first_row)
    for at, parts in values.items():
        for part, right in zip(weights[at], parts, strict=True):
            part.copy_(right)
    result = torch.ones_like(routing.x)
    begun.end(into=result)
    assert torch.equal(result, expected)
    assert native.available() is False or room.rows[:first_row].eq(7).all()
