"""The choice of a token: greedy, temperature, top-k and top-p against a plain reference; the seed alone decides."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.request import SamplingParams
from moelight.engine.constraints import bits, bits_of, without
from moelight.engine.sampling import Change, change, next_tokens, sample_seed, score, uniform
from tests.shapes import examples

DRAWS = 3000


def params(**fields: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})  # type: ignore[arg-type]


def reference(
    logits: list[float], *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution, spelled out: softmax of what temperature, min-p and top-k leave, cut to the top-p, made
    whole."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    order = [token for token in order if math.exp((logits[token] - best) / temperature) >= min_p]
    retained = order[:top_k] if top_k > 0 else order
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in retained}
    total = sum(weights.values())
    nucleus, reached = list[int](), 0.0
    for token in retained:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    full = sum(weights[token] for token in nucleus)
    return [weights[token] / full if token in nucleus else 0.0 for token in range(len(logits))]


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
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": -1},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"top_k": 5, "top_p": 0.7, "temperature": 1.7},
        {"top_k": 100, "top_p": 0.99},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.15, "top_k": 4, "top_p": 0.8, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_come_with_the_frequency_they_should(fields: dict[str, float]) -> None:
    wanted = reference(LOGITS, **{"temperature": 1.0, **fields})  # type: ignore[arg-type]
    result = frequencies(LOGITS, params(**fields))
    for share, expected in zip(result, wanted, strict=True):
        assert expected > 0 or share == 0
        assert share == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)


@examples(100)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 2),
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
    requests = [(seed, position) for seed in (0, 1, 2**63, 2**64 - 1) for position in (0, 1, 5, 10_000)]
    rows = {request: torch.randn(50, generator=torch.Generator().manual_seed(n)) for n, request in enumerate(requests)}
    how = params()
    alone = {
        request: next_tokens(rows[request][None], [how], [request[0]], [request[1]]).item() for request in requests
    }
    for _ in range(5):
        random.shuffle(requests)
        batch = torch.stack([rows[request] for request in requests])
        seeds, places = [list(column) for column in zip(*requests, strict=True)]
        result = next_tokens(batch, [how] * len(requests), seeds, places).tolist()
        assert result == [alone[request] for request in requests]


@examples(40)
@given(data=st.data(), rows=st.integers(1, 70), vocabulary=st.integers(1, 400))
def test_no_row_depends_on_another(data: st.DataObject, rows: int, vocabulary: int) -> None:
    """Greedy or drawn, under any limits: together as alone."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    one = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.integers(-1, 30),
        top_p=st.sampled_from([0.2, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 0.6]),
    )
    how = data.draw(st.lists(one, min_size=rows, max_size=rows))
    seeds, places = list(range(rows)), [row % 3 for row in range(rows)]
    together = next_tokens(logits, how, seeds, places).tolist()
    alone = [next_tokens(logits[r : r + 1], how[r : r + 1], [seeds[r]], [places[r]]).item() for r in range(rows)]
    assert together == alone


def test_seeds_and_places_give_independent_numbers() -> None:
    values = [uniform(seed, position) for seed in range(60) for position in range(60)]
    assert len(set(values)) == len(values)
    assert all(0 <= number < 1 for number in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)
    neighbours = [(uniform(seed, 7) - 0.5) * (uniform(seed, 8) - 0.5) for seed in range(2000)]
    assert abs(sum(neighbours) / len(neighbours)) < 5 / 12 / math.sqrt(2000)
    seeds = [(uniform(seed, 7) - 0.5) * (uniform(seed + 1, 7) - 0.5) for seed in range(2000)]
    assert abs(sum(seeds) / len(seeds)) < 5 / 12 / math.sqrt(2000)


def test_samples_of_one_request_have_numbers_of_their_own() -> None:
    """And the first one has those of the seed itself."""
    assert sample_seed(7, 0) == 7
    values = [uniform(sample_seed(seed, sample), 0) for seed in (0, 7, 2**64 - 1) for sample in (0, 1, 2, 1000)]
    assert len(set(values)) == len(values)


def changed_slowly(logits: np.ndarray, change: Change) -> np.ndarray:
    """One row float32 [V], token by token."""
    changed, (repetition, frequency, presence) = logits.copy(), change.penalties
    for token, bias in change.biases.items():
        changed[token] += np.float32(bias)
    for token in change.forbidden:
        if token < len(changed):
            changed[token] = -np.inf
    for token, count in change.seen.items():
        value = changed[token]
        value = value / np.float32(repetition) if value > 0 else value * np.float32(repetition)
        changed[token] = value - np.float32(frequency) * np.float32(count) - np.float32(presence) * (count > 0)
    if change.allowed is not None:
        allowed = set(bits_of(change.allowed))
        changed[[token not in allowed for token in range(len(changed))]] = -np.inf
    return changed


@examples(60)
@given(data=st.data(), vocabulary=st.integers(1, 100), rows=st.integers(1, 6))
def test_logits_change_as_they_do_one_by_one(data: st.DataObject, vocabulary: int, rows: int) -> None:
    tokens = st.integers(0, vocabulary - 1)
    one = st.builds(
        Change,
        biases=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4),
        forbidden=st.sets(st.integers(0, vocabulary + 3), max_size=3),
        seen=st.dictionaries(tokens, st.integers(0, 5), max_size=8),
        penalties=st.tuples(st.sampled_from([0.5, 1.0, 1.7]), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)),
        allowed=st.none() | st.sets(tokens).map(lambda some: bits(some, vocabulary)),
    )
    changes = data.draw(st.lists(one, min_size=rows, max_size=rows))
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * 3
    wanted = [changed_slowly(row, item) for row, item in zip(logits.numpy(), changes, strict=True)]
    change(logits, changes)
    np.testing.assert_allclose(logits.numpy(), np.stack(wanted), rtol=1e-5, atol=1e-5)


def test_bits_stand_for_tokens() -> None:
    words = bits([0, 31, 32, 99], 100)
    assert words.shape == (4,)
    assert bits_of(words) == [0, 31, 32, 99]
    assert bits_of(without(words, {31, 99, 5000})) == [0, 32]
    assert bits_of(without(words, {0, 31, 32, 99})) == [0, 31, 32, 99], "something must be left"


@pytest.mark.parametrize("top", [0, 1, 5, -1, 10**6])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (50, 33), (9, 50_000)])
def test_scores_are_log_probabilities_with_ranks(rows: int, vocabulary: int, top: int) -> None:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    tokens = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(4))
    scores = score(logits, tokens, top)
    logprobs = torch.log_softmax(logits.double(), dim=1)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(scores.ranks, (order == tokens[:, None]).int().argmax(1) + 1)
    assert torch.allclose(scores.logprobs.double(), logprobs.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    count = vocabulary if top < 0 else min(top, vocabulary)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (rows, count)
    assert torch.allclose(scores.top_logprobs.double(), logprobs.topk(count, dim=1).values, atol=1e-5)
    assert torch.equal(logprobs.gather(1, scores.top_ids).float(), logprobs.topk(count, dim=1).values.float())
    assert torch.equal(score(logits[-1:], tokens[-1:], top).logprobs, scores.logprobs[-1:]), "a row by itself"
