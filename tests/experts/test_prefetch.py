"""What is worth fetching, and what guesses were worth."""

from __future__ import annotations

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.policy import PrefetchRules
from moelight.experts.predict import Prefetcher, Quality


def test_quality_against_sets() -> None:
    """A guess counts once until its layer is visited, and is useful if that visit chose it."""
    layers, experts, rng = 3, 9, np.random.default_rng(1)
    quality = Quality(layers, experts)
    pending: list[set[int]] = [set() for _ in range(layers)]
    issued = useful = unused = used = 0
    for _ in range(500):
        layer = int(rng.integers(layers))
        ids = rng.choice(experts, size=rng.integers(0, 5), replace=False)
        if rng.random() < 0.6:
            quality.predicted(layer, ids)
            issued += len(set(ids.tolist()) - pending[layer])
            pending[layer] |= set(ids.tolist())
        else:
            quality.visited(layer, ids)
            useful += len(pending[layer] & set(ids.tolist()))
            unused += len(pending[layer] - set(ids.tolist()))
            used += len(ids)
            pending[layer].clear()
        assert (quality.issued, quality.useful, quality.unused, quality.used) == (issued, useful, unused, used)
    assert quality.precision == useful / (useful + unused)
    assert quality.recall == useful / used
    assert quality.as_dict()["late"] == 0


def test_rates_before_anything_are_zero() -> None:
    assert (Quality(1, 1).precision, Quality(1, 1).recall) == (0.0, 0.0)


def observed(prefetcher: Prefetcher, layer: int, *ids: int) -> None:
    prefetcher.observe(layer, np.array(ids, dtype=np.int64), np.arange(len(ids), 0, -1))


def test_what_is_there_costs_nothing_of_the_budget() -> None:
    """What the next layer does not need of it goes to the layer behind."""
    prefetcher = Prefetcher(PrefetchRules(strategy="lookahead", lookahead=2, budget=3), num_layers=4, num_experts=8)
    for layer in range(4):
        observed(prefetcher, layer, 1, 2, 5, 6)
    near = np.zeros((4, 8), dtype=np.bool_)
    assert [(at, ids.tolist()) for at, ids in prefetcher.ahead(2, near)] == [(3, [1, 2, 5])]
    near[3, [1, 5]] = True
    assert [(at, ids.tolist()) for at, ids in prefetcher.ahead(2, near)] == [(3, [2, 6]), (0, [1])]
    near[3] = True
    assert [(at, ids.tolist()) for at, ids in prefetcher.ahead(2, near)] == [(0, [1, 2, 5])]
    # Those that are near count as guesses too, as far as they come before one that is not.
    assert prefetcher.quality.issued == 7
    prefetcher.allow(0)
    assert list(prefetcher.ahead(2)) == []


@pytest.mark.parametrize("strategy", ["previous", "frequency", "history", "affinity", "next_router"])
def test_whoever_guesses_the_likeliest_that_are_not_there_are_fetched(strategy: str) -> None:
    rules = PrefetchRules(strategy=strategy, budget=2, affinity_threshold=0.1)
    prefetcher = Prefetcher(rules, num_layers=2, num_experts=9)
    for _ in range(3):
        for layer in range(2):
            observed(prefetcher, layer, 7, 1, 4, 2)
    observed(prefetcher, 0, 7, 1, 4, 2)
    prefetcher.hint(1, np.array([7, 1, 4, 2]), np.array([0.4, 0.3, 0.2, 0.1]))
    ((_, likeliest),) = prefetcher.ahead(0)
    near = np.zeros((2, 9), dtype=np.bool_)
    near[1, likeliest] = True
    ((at, others),) = prefetcher.ahead(0, near)
    assert at == 1
    assert sorted([*likeliest, *others]) == [1, 2, 4, 7]


def test_another_strategy_takes_over_and_the_first_comes_back_as_it_was() -> None:
    prefetcher = Prefetcher(PrefetchRules(strategy="previous", budget=2), num_layers=2, num_experts=8)
    observed(prefetcher, 0, 3, 4)
    assert [ids.tolist() for _, ids in prefetcher.ahead(1)] == [[3, 4]]
    observed(prefetcher, 0, 3, 5)
    prefetcher.use("frequency")
    assert list(prefetcher.ahead(1)) == []
    observed(prefetcher, 0, 7)
    prefetcher.allow(1)
    assert [ids.tolist() for _, ids in prefetcher.ahead(1)] == [[7]]
    prefetcher.use("previous")
    assert [ids.tolist() for _, ids in prefetcher.ahead(1)] == [[3]]
    assert prefetcher.qualities["previous"].useful == 1
    assert prefetcher.qualities["frequency"].issued == 1
    with pytest.raises(ConfigError, match="unknown predictor 'oracle'"):
        prefetcher.use("oracle")
    assert prefetcher.rules.strategy == "previous"


def test_a_single_layer_is_its_own_next() -> None:
    prefetcher = Prefetcher(PrefetchRules(strategy="affinity", affinity_threshold=0.5), num_layers=1, num_experts=4)
    for expert in (0, 1, 2, 3) * 3:
        observed(prefetcher, 0, expert)
    assert [(at, ids.tolist()) for at, ids in prefetcher.ahead(0)] == [(0, [0])]
    assert prefetcher.affinity is not None
    assert prefetcher.affinity.times.sum() == 11


def test_none_is_never_asked() -> None:
    prefetcher = Prefetcher(PrefetchRules(), num_layers=2, num_experts=4)
    observed(prefetcher, 0, 1)
    assert list(prefetcher.ahead(0)) == []
    assert prefetcher.affinity is None
    assert prefetcher.quality.used == 0
