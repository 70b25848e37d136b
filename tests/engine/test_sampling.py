"""The choice of a token: greedy, temperature, top-k and top-p against a plain reference; the seed alone decides."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.request import SamplingParams
from moelight.engine.sampling import next_tokens, uniform
from tests.shapes import examples

DRAWS = 3000


def params(**fields: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})  # type: ignore[arg-type]


def reference(logits: list[float], *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The distribution, spelled out: softmax of what temperature and top-k leave, cut to the top-p, made whole."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[:top_k] if top_k > 0 else order
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in kept}
    total = sum(weights.values())
    nucleus, reached = list[int](), 0.0
    for token in kept:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    whole = sum(weights[token] for token in nucleus)
    return [weights[token] / whole if token in nucleus else 0.0 for token in range(len(logits))]


def frequencies(logits: list[float], how: SamplingParams) -> list[float]:
    rows = torch.tensor([logits] * DRAWS)
    tokens = next_tokens(rows, [how] * DRAWS, list(range(DRAWS)), [0] * DRAWS).tolist()
    return [tokens.count(token) / DRAWS for token in range(len(logits))]


LOGITS = [0.3, 2.0, -1.0, 1.9, 0.0, 1.2, -4.0, 0.9]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": -1},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"top_k": 5, "top_p": 0.7, "temperature": 1.7},
        {"top_k": 100, "top_p": 0.99},
    ],
    ids=str,
)
def test_tokens_come_with_the_frequency_they_should(fields: dict[str, float]) -> None:
    wanted = reference(LOGITS, **{"temperature": 1.0, **fields})  # type: ignore[arg-type]
    found = frequencies(LOGITS, params(**fields))
    for share, expected in zip(found, wanted, strict=True):
        assert expected > 0 or share == 0
        assert share == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)


@examples(100)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 10),
    top_k=st.integers(-1, 14),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_only_tokens_inside_the_limits_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    how = params(temperature=temperature, top_k=top_k, top_p=top_p)
    wide = reference(logits, temperature=temperature, top_k=max(top_k, 0), top_p=min(1.0, top_p + 1e-9))
    (token,) = next_tokens(torch.tensor([logits]), [how], [seed], [3]).tolist()
    assert wide[token] > 0


def test_greedy_takes_the_first_of_the_largest() -> None:
    rows = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0], [-2.0, -3.0, -1.0]])
    assert next_tokens(rows, [SamplingParams()] * 3, [1, 2, 3], [0, 0, 0]).tolist() == [1, 0, 2]


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    rows = torch.tensor([LOGITS] * 4)
    hows = [SamplingParams(), params(), SamplingParams(), params(top_k=1)]
    tokens = next_tokens(rows, hows, [1, 2, 3, 4], [0] * 4).tolist()
    assert [tokens[at] for at in (0, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    rows = torch.tensor([[40.0, 41.0, -3.0]] * 20)
    how = params(temperature=temperature)
    assert next_tokens(rows, [how] * 20, list(range(20)), [0] * 20).tolist() == [1] * 20


def test_the_seed_and_the_place_alone_decide() -> None:
    """Whatever else is in the batch, in whatever order."""
    random = Random(0)
    requests = [(seed, place) for seed in (0, 1, 2**63, 2**64 - 1) for place in (0, 1, 5, 10_000)]
    rows = {request: torch.randn(50, generator=torch.Generator().manual_seed(n)) for n, request in enumerate(requests)}
    how = params()
    alone = {each: next_tokens(rows[each][None], [how], [each[0]], [each[1]]).item() for each in requests}
    for _ in range(5):
        random.shuffle(requests)
        batch = torch.stack([rows[each] for each in requests])
        seeds, places = [list(column) for column in zip(*requests, strict=True)]
        found = next_tokens(batch, [how] * len(requests), seeds, places).tolist()
        assert found == [alone[each] for each in requests]


@examples(40)
@given(data=st.data(), rows=st.integers(1, 70), vocabulary=st.integers(1, 400))
def test_no_row_depends_on_another(data: st.DataObject, rows: int, vocabulary: int) -> None:
    """Greedy or drawn, under any limits: together as alone."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    one = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        top_k=st.integers(-1, 30),
        top_p=st.sampled_from([0.2, 0.9, 1.0]),
    )
    how = data.draw(st.lists(one, min_size=rows, max_size=rows))
    seeds, places = list(range(rows)), [row % 3 for row in range(rows)]
    together = next_tokens(logits, how, seeds, places).tolist()
    alone = [next_tokens(logits[r : r + 1], how[r : r + 1], [seeds[r]], [places[r]]).item() for r in range(rows)]
    assert together == alone


def test_seeds_and_places_give_independent_numbers() -> None:
    numbers = [uniform(seed, place) for seed in range(60) for place in range(60)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)
    neighbours = [(uniform(seed, 7) - 0.5) * (uniform(seed, 8) - 0.5) for seed in range(2000)]
    assert abs(sum(neighbours) / len(neighbours)) < 5 / 12 / math.sqrt(2000)
    seeds = [(uniform(seed, 7) - 0.5) * (uniform(seed + 1, 7) - 0.5) for seed in range(2000)]
    assert abs(sum(seeds) / len(seeds)) < 5 / 12 / math.sqrt(2000)
