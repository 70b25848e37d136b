"""Predictors against models made of dictionaries and lists, batch by batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.eviction import FloatArray, IntArray
from moelight.experts.policy import STRATEGIES, PrefetchRules
from moelight.experts.predict import (
    AffinityPredictor,
    FrequencyPredictor,
    HistoryPredictor,
    NextRouterPredictor,
    PreviousPredictor,
    Transitions,
    make_predictor,
)

LAYERS, EXPERTS = 3, 7
BUDGETS = (0, 1, 3, EXPERTS + 2)


def batches(seed: int, passes: int = 40) -> Iterator[tuple[int, IntArray, IntArray, FloatArray]]:
    """Passes through all layers; experts unevenly liked, in no order, sometimes none."""
    rng = np.random.default_rng(seed)
    liked = rng.dirichlet(np.full(EXPERTS, 0.5), size=LAYERS) * 0.9 + 0.1 / EXPERTS
    for _ in range(passes):
        for layer in range(LAYERS):
            ids = rng.choice(EXPERTS, size=rng.integers(0, 5), replace=False, p=liked[layer])
            yield layer, ids, rng.integers(1, 4, size=len(ids)), rng.integers(1, 9, size=len(ids)) / 8.0


def best(scores: dict[int, float], budget: int) -> list[int]:
    return sorted((expert for expert in scores if scores[expert] > 0), key=lambda e: (-scores[e], e))[:budget]


@pytest.mark.parametrize("weighted", [True, False])
def test_previous_is_the_last_batch_of_the_layer(weighted: bool) -> None:
    predictor, last = PreviousPredictor(LAYERS, EXPERTS), defaultdict[int, dict[int, float]](dict)
    for layer, ids, counts, mass in batches(1):
        for budget in BUDGETS:
            assert predictor.predict(layer, budget).tolist() == best(last[layer], budget)
        predictor.observe(layer, ids, counts, mass if weighted else None)
        last[layer] = dict(zip(ids.tolist(), (mass if weighted else counts).tolist(), strict=True))


def test_frequency_is_a_decayed_share() -> None:
    predictor, shares = FrequencyPredictor(LAYERS, EXPERTS, decay=0.75), [Counter[int]() for _ in range(LAYERS)]
    for layer, ids, counts, mass in batches(2):
        for budget in BUDGETS:
            rounded = {expert: round(share, 12) for expert, share in shares[layer].items()}
            result = predictor.predict(layer, budget).tolist()
            assert [rounded[expert] for expert in result] == [rounded[expert] for expert in best(rounded, budget)]
        predictor.observe(layer, ids, counts, mass)
        for expert in shares[layer]:
            shares[layer][expert] *= 0.75  # type: ignore[assignment]
        for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
            shares[layer][expert] += 0.25 * count / int(counts.sum())


@pytest.mark.parametrize("window", [1, 4, 100])
def test_history_is_a_window_of_each_layer(window: int) -> None:
    predictor, seen = HistoryPredictor(LAYERS, EXPERTS, window=window), defaultdict[int, list[list[int]]](list)
    for layer, ids, counts, mass in batches(3):
        scores = Counter(expert for batch in seen[layer][-window:] for expert in batch)
        for budget in BUDGETS:
            assert predictor.predict(layer, budget).tolist() == best(dict(scores), budget)
        predictor.observe(layer, ids, counts, mass)
        seen[layer].append(ids.tolist())


class SlowAffinity:
    """One pair of experts at a time; the same rule in double precision."""

    def __init__(self, decay: float) -> None:
        self.share: dict[tuple[int, int, int], float] = defaultdict(float)
        self.times: Counter[tuple[int, int]] = Counter()
        self.least = 1.0 - decay
        self.last: tuple[int, dict[int, float]] | None = None

    def observe(self, layer: int, mass: dict[int, float]) -> None:
        if self.last is not None and (self.last[0] + 1) % LAYERS == layer:
            before = self.last[0]
            few = max(len(self.last[1]), len(mass)) <= EXPERTS // 2
            for i in self.last[1] if few else ():
                self.times[before, i] += 1
                rate = max(self.least, 1.0 / self.times[before, i])
                for j in range(EXPERTS):
                    self.share[before, i, j] += rate * ((j in mass) - self.share[before, i, j])
        self.last = layer, mass

    def predict(self, layer: int, threshold: float) -> dict[int, float]:
        if self.last is None or (self.last[0] + 1) % LAYERS != layer:
            return {}
        before, chosen = self.last
        scores = {}
        for j in range(EXPERTS):
            if any(self.share[before, i, j] >= threshold for i in chosen):
                scores[j] = sum(weight * self.share[before, i, j] for i, weight in chosen.items())
        return scores


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_affinity_is_learned_like_a_dictionary(decay: float) -> None:
    # No threshold on which a rounded share could lie.
    fast, slow = AffinityPredictor(LAYERS, EXPERTS, threshold=0.30137, decay=decay), SlowAffinity(decay)
    predicted = 0
    for step, (layer, ids, counts, mass) in enumerate(batches(4)):
        scores = slow.predict(layer, 0.30137)
        for budget in BUDGETS:
            result, wanted = fast.predict(layer, budget).tolist(), best(scores, budget)
            predicted += len(result)
            assert len(result) == len(wanted)
            assert [scores[e] for e in result] == pytest.approx([scores[e] for e in wanted], abs=1e-5)
        if step % 17 == 5:
            continue  # a batch that nobody told of: what follows is no neighbour of what was
        fast.observe(layer, ids, counts, mass)
        slow.observe(layer, dict(zip(ids.tolist(), mass.tolist(), strict=True)))
    shares = [[[slow.share[n, i, j] for j in range(EXPERTS)] for i in range(EXPERTS)] for n in range(LAYERS)]
    np.testing.assert_allclose(fast.matrix, shares, atol=1e-5)
    assert fast.times.tolist() == [[slow.times[n, i] for i in range(EXPERTS)] for n in range(LAYERS)]
    assert predicted > 100


def test_affinity_finds_a_rule_that_others_cannot_see() -> None:
    """What follows depends on what was before, and every expert is equally frequent."""
    predictor, rng = AffinityPredictor(2, 8), np.random.default_rng(5)
    one = np.ones(1, dtype=np.int64)
    for _ in range(200):
        expert = rng.integers(0, 8, size=1)
        predictor.observe(0, expert, one, None)
        if predictor.times[0, expert[0]] > 3:
            assert predictor.predict(1, 2).tolist() == [(int(expert[0]) * 3 + 1) % 8]
        predictor.observe(1, (expert * 3 + 1) % 8, one, None)


def test_a_batch_that_chose_most_experts_teaches_nothing() -> None:
    predictor = AffinityPredictor(2, 4)
    chosen = [[0], [1], [0, 1, 2], [2], [0], [1, 2, 3], [0, 1], [1, 3]]
    for step, ids in enumerate(chosen):
        predictor.observe(step % 2, np.array(ids), np.ones(len(ids), dtype=np.int64), None)
    assert predictor.times[0].tolist() == [2, 1, 0, 0]
    assert predictor.matrix[0].tolist() == [[0, 1, 0, 0.5], [0, 1, 0, 1], [0] * 4, [0] * 4]


def test_affinity_goes_on_from_what_was_saved() -> None:
    first, second = AffinityPredictor(LAYERS, EXPERTS), AffinityPredictor(LAYERS, EXPERTS)
    rows = list(batches(6))
    for row in rows[:60]:
        first.observe(*row)
    second.learned(Transitions(matrix=first.matrix, times=first.times))
    for row in rows[1:20]:  # layer 1 after the last layer: nothing is learned of that
        first.observe(*row)
        second.observe(*row)
    np.testing.assert_array_equal(first.matrix, second.matrix)
    with pytest.raises(ConfigError, match=r"affinity of shape \(3, 7, 7\)"):
        AffinityPredictor(LAYERS, EXPERTS + 1).learned(Transitions(matrix=first.matrix, times=first.times))


def test_a_hint_is_good_for_one_batch_of_its_layer() -> None:
    predictor = NextRouterPredictor(LAYERS, EXPERTS)
    ids, mass = np.array([4, 2, 6]), np.array([0.2, 0.5, 0.2])
    assert predictor.predict(1, 3).size == 0
    predictor.hint(1, ids, mass)
    predictor.observe(0, ids, np.ones(3, dtype=np.int64), mass)
    assert predictor.predict(1, 2).tolist() == [2, 4]
    predictor.hint(1, ids[:1], mass[:1])
    assert predictor.predict(1, 2).tolist() == [4]
    assert predictor.predict(2, 2).size == 0
    predictor.observe(1, ids, np.ones(3, dtype=np.int64), mass)
    assert predictor.predict(1, 2).size == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_predictor(strategy: str) -> None:
    predictor = make_predictor(PrefetchRules(strategy=strategy, lookahead=2), num_layers=LAYERS, num_experts=EXPERTS)
    assert predictor.steps == (2 if strategy == "lookahead" else 1)
    for row in batches(7):
        predictor.observe(*row)
        predictor.hint((row[0] + 1) % LAYERS, np.array([1]), np.array([1.0]))
    assert any(predictor.predict(layer, 3).size for layer in range(LAYERS)) == (strategy != "none")


def test_an_unknown_strategy_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'afinity' \(did you mean 'affinity'\?\)"):
        make_predictor(PrefetchRules(strategy="afinity"), num_layers=1, num_experts=1)
