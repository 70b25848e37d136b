"""Eviction ``reuse`` against an independent slow model, and that it finds what plain LRU misses."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.experts import ExpertCache
from moelight.experts.policy import PerLayerRules
from tests.cases import thorough
from tests.shapes import examples

UNIFORM = PerLayerRules(allocation="uniform", min_capacity=1)


class SlowReuse:
    """One layer, dictionaries, everything written out."""

    def __init__(self, capacity: int, experts: int) -> None:
        self.capacity = capacity
        self.experts = range(experts)
        self.shares = {e: [0.1] * 3 for e in self.experts}
        self.before: dict[int, tuple[float, ...]] = {}
        self.weights, self.squares = [0.0, 1 / 3, 1 / 3, 1 / 3, 0.5], [1e-3] * 5
        self.visits = 0
        self.resident: dict[int, None] = {}  # the oldest first

    def access(self, ids: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Hits, misses that are brought in, and who leaves, in order."""
        used = set(ids)
        if self.before:
            for at in range(5):
                terms = [
                    ((e in used) - 1 / (1 + exp(-self._dot(self.before[e], self.old)))) * self.before[e][at]
                    for e in self.experts
                ]
                slope = sum(terms) / len(terms)
                self.squares[at] += slope**2
                self.weights[at] += 0.3 * slope / sqrt(self.squares[at])
        self.visits += 1
        for e in self.experts:
            for at, horizon in enumerate((16, 128, 1024)):
                self.shares[e][at] += ((e in used) - self.shares[e][at]) * max(1 / horizon, 1 / (self.visits + 2))
            logits = (log((share + 0.01) / (1.01 - share)) for share in self.shares[e])
            self.before[e] = (1.0, *logits, float(e in used))
        self.old = list(self.weights)
        chance = {e: self._dot(self.before[e], self.weights) for e in self.experts}
        hits, misses = sorted(used & self.resident.keys()), sorted(used - self.resident.keys())
        leaving = sorted((e for e in self.resident if e not in used), key=lambda e: chance[e])
        places = self.capacity - len(hits)
        ranked = sorted((chance[e] for e in [*leaving, *misses]), reverse=True)
        brought, left = [], []
        for e in misses:
            if not places or chance[e] < ranked[min(places, len(ranked)) - 1]:
                continue
            if len(self.resident) == self.capacity:
                if not leaving or chance[leaving[0]] >= chance[e]:
                    continue
                left.append(leaving.pop(0))
                del self.resident[left[-1]]
            self.resident[e] = None
            brought.append(e)
        return hits, brought, left

    @staticmethod
    def _dot(features: tuple[float, ...], weights: list[float]) -> float:
        return sum(feature * weight for feature, weight in zip(features, weights, strict=True))


@examples(60)
@given(st.data())
def test_it_serves_as_the_slow_model_does(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 6))
    capacity = data.draw(st.integers(layers, layers * experts))
    cache = ExpertCache(capacity=capacity, num_layers=layers, num_experts=experts, eviction="reuse", per_layer=UNIFORM)
    models = [SlowReuse(budget, experts) for budget in cache.budgets]
    batch = st.lists(st.integers(0, experts - 1), min_size=1, max_size=4)
    for turn, ids in enumerate(data.draw(st.lists(batch, max_size=40))):
        layer = turn % layers
        got = cache.access(layer, np.array([ids]))
        hits, brought, left = models[layer].access(ids)
        assert got.hits.tolist() == hits
        assert got.misses[got.slots >= 0].tolist() == brought
        assert got.evictions.tolist() == [[layer, e] for e in left]


def test_all_places_are_used_before_anybody_leaves() -> None:
    cache = ExpertCache(capacity=4, num_layers=1, num_experts=8, eviction="reuse")
    for expert in range(4):
        assert cache.access(0, [[expert]]).slots.tolist() != [-1]
    assert len(cache) == 4


def test_pinned_experts_stay_and_return_to_the_order() -> None:
    cache = ExpertCache(capacity=2, num_layers=1, num_experts=4, eviction="reuse")
    cache.access(0, [[0], [1]])
    assert cache.pin(0, 0)
    for _ in range(50):
        cache.access(0, [[2, 3]])
    assert cache.contains(0, 0)
    assert len(cache) == 2
    cache.unpin(0, 0)
    for _ in range(50):
        cache.access(0, [[2, 3]])
    assert not cache.contains(0, 0)


@pytest.mark.parametrize("per_layer", [None, UNIFORM])
def test_it_keeps_the_busy_where_lru_has_nothing_left(per_layer: PerLayerRules | None) -> None:
    """Sweeps over four layers of which each uses more than its part: LRU always evicts what comes next."""
    rng = np.random.default_rng(5)
    busy = rng.permuted(np.tile(1.0 / np.arange(1, 17), (4, 1)), axis=1)
    result = {}
    caches = {
        "lru": ExpertCache(capacity=16, num_layers=4, num_experts=16, eviction="lru"),
        "reuse": ExpertCache(capacity=16, num_layers=4, num_experts=16, eviction="reuse", per_layer=per_layer),
    }
    for _ in range(200):
        for layer in range(4):
            ids = rng.choice(16, size=(1, 6), replace=False, p=busy[layer] / busy[layer].sum())
            for cache in caches.values():
                cache.access(layer, ids)
    result = {name: cache.stats.hit_rate for name, cache in caches.items()}
    assert result["reuse"] > 0.45
    assert result["reuse"] > 1.3 * result["lru"], result


@pytest.mark.parametrize(
    ("experts", "power"), thorough([(64, 1.0), (64, 1.2), (256, 1.0), (8, 1.0)], but=[(64, 1.2), (8, 1.0)])
)
def test_on_steady_skewed_traffic_it_finds_what_lfu_finds(experts: int, power: float) -> None:
    """One id at a time, by Zipf's law, which does not change: a few visits say too little of who is rare."""
    rng = np.random.default_rng(experts)
    shares = np.arange(1, experts + 1) ** -power
    ids = rng.permutation(experts)[rng.choice(experts, 5000, p=shares / shares.sum())]
    result = {}
    for name in ("lfu", "reuse"):
        cache = ExpertCache(capacity=experts // 4, num_layers=1, num_experts=experts, eviction=name, per_layer=UNIFORM)
        result[name] = cache.access_each(np.zeros(len(ids), np.int64), ids).mean()
    assert result["reuse"] >= result["lfu"] - 0.005, result


def test_a_rare_guest_passes_by() -> None:
    cache = ExpertCache(capacity=2, num_layers=1, num_experts=8, eviction="reuse")
    for _ in range(40):
        cache.access(0, [[0, 1]])
    guest = cache.access(0, [[0, 7]])
    assert guest.slots.tolist() == [-1]
    assert cache.contains(0, 1)
    assert cache.stats.bypasses == 1


@pytest.mark.parametrize("eviction", ["reuse", "reuse|lru"])
def test_known_shares_decide_before_anything_was_seen(eviction: str) -> None:
    cache = ExpertCache(capacity=4, num_layers=2, num_experts=8, eviction=eviction, per_layer=UNIFORM)
    shares = np.full((2, 8), 0.05)
    shares[:, 6:] = 0.9
    cache.expect(shares)
    for layer in (0, 1):
        cache.access(layer, [[6, 7]])
        cache.access(layer, [[0, 1]])
        assert cache.contains(layer, 6)
    with pytest.raises(ValueError, match="shares"):
        cache.expect(shares[0])
