"""Activation profiles: counting, forgetting, merging, comparing, and what to begin with."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.eviction import FloatArray
from moelight.experts.predict import AffinityPredictor, Transitions, likeliest
from moelight.experts.profile import ActivationProfile, fingerprint_of, merge

MODEL = {"model_type": "mixtral", "num_layers": 3, "num_experts": 5, "top_k": 2, "hidden_size": 64}


def profile(counts: object = None, **changes: object) -> ActivationProfile:
    result = ActivationProfile(model={**MODEL, **changes}, num_layers=3, num_experts=5)
    if counts is not None:
        result.add(np.asarray(counts, dtype=np.float64), 7)
    return result


def test_half_lives_one_access_at_a_time() -> None:
    """Batch by batch with exact powers of a half; and so many that counts are written down anew several times."""
    rng, half_life = np.random.default_rng(1), 3.0
    fast = ActivationProfile(model=MODEL, num_layers=3, num_experts=5, half_life=half_life)
    slow: dict[tuple[int, int], float] = defaultdict(float)
    for _ in range(900):
        layer, ids = int(rng.integers(3)), rng.choice(5, size=rng.integers(0, 5), replace=False)
        counts = rng.integers(1, 9, size=len(ids))
        fast.record(layer, ids, counts)
        for key in slow:
            slow[key] *= 0.5 ** (len(ids) / half_life)
        for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
            slow[layer, expert] += count
    np.testing.assert_allclose(fast.counts, [[slow[n, e] for e in range(5)] for n in range(3)], rtol=1e-9, atol=1e-12)


def test_without_a_half_life_counts_are_whole() -> None:
    result = profile()
    result.record(1, np.array([4, 0]), np.array([3, 2]))
    result.record(1, np.array([4]), np.array([1]))
    assert result.counts.tolist() == [[0] * 5, [2, 0, 0, 0, 4], [0] * 5]
    assert result.accesses == 3
    with pytest.raises(ConfigError, match="half_life must be above 0"):
        ActivationProfile(model=MODEL, num_layers=1, num_experts=1, half_life=0.0)


def test_the_busiest_first_and_equal_ones_by_id() -> None:
    result = profile([[2, 5, 2, 0, 5], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert likeliest(result.counts[0], 9).tolist() == [1, 4, 0, 2]
    assert likeliest(result.counts[1], 3).tolist() == []
    assert likeliest(result.counts[2], 3).tolist() == [0, 1, 2]


def test_residents_are_each_layers_busiest() -> None:
    result = profile([[2, 5, 3, 0, 0], [90, 80, 70, 60, 0], [0, 0, 1, 0, 0]])
    ranked = [[1, 0], [0, 1], [2, 2], [1, 1], [0, 2], [1, 2], [0, 0], [1, 3]]
    assert result.residents(4).tolist() == ranked[:4]
    assert result.residents(100).tolist() == ranked
    assert result.residents(0).tolist() == []
    assert result.residents(np.array([1, 3, 0])).tolist() == [[1, 0], [0, 1], [1, 1], [1, 2]]


def test_fingerprints_follow_the_values_and_not_their_order() -> None:
    assert fingerprint_of(MODEL) == fingerprint_of(dict(reversed(MODEL.items())))
    assert fingerprint_of(MODEL) != fingerprint_of({**MODEL, "top_k": 3})


def test_merging_adds_up_and_weighs_transitions() -> None:
    one, two, three = profile(np.eye(3, 5)), profile(np.ones((3, 5))), profile()
    times = np.zeros((3, 5), dtype=np.int64)
    matrix = np.zeros((3, 5, 5), dtype=np.float32)
    times[0, 1], matrix[0, 1, 2] = 3, 1.0
    one.transitions = Transitions(matrix=matrix, times=times)
    times, matrix = np.zeros_like(times), np.zeros_like(matrix)
    times[0, 1], matrix[0, 1, 2], matrix[0, 1, 3] = 1, 0.0, 0.5
    two.transitions = Transitions(matrix=matrix, times=times)
    merged = merge([one, two, three])
    assert merged.counts.tolist() == (np.eye(3, 5) + 1).tolist()
    assert merged.accesses == 14
    assert merged.transitions is not None
    assert merged.transitions.times[0, 1] == 4
    assert merged.transitions.matrix[0, 1].tolist() == [0, 0, 0.75, 0.125, 0]
    assert merge([three]).transitions is None


def test_only_profiles_of_one_model_are_merged_or_compared() -> None:
    with pytest.raises(ConfigError, match=r"different models \(hidden_size 64 and 128, top_k 2 and None\)"):
        merge([profile(), profile(hidden_size=128, top_k=None)])
    with pytest.raises(ConfigError, match="give at least one"):
        merge([])
    with pytest.raises(ConfigError, match="3 layers x 5 experts and 2 x 5"):
        profile().distance(ActivationProfile(model=MODEL, num_layers=2, num_experts=5), 2)


def test_distance_layer_by_layer() -> None:
    one = profile([[8, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    two = profile([[0, 5, 5, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    result = one.distance(two, 2)
    assert result.total_variation.tolist() == pytest.approx([0.8, 1.0, 0.0])
    assert result.overlap.tolist() == [0.5, 0.0, 1.0]
    same = one.distance(profile(one.counts * 3), 2)
    assert (same.total_variation.max(), same.overlap.min()) == (0.0, 1.0)


def test_transitions_of_a_predictor_are_a_profiles() -> None:
    """What the predictor holds is what a profile keeps: shapes and dtypes agree."""
    affinity = AffinityPredictor(3, 5)
    one: FloatArray = np.ones(1)
    affinity.observe(0, np.array([2]), one.astype(np.int64), one)
    affinity.observe(1, np.array([4]), one.astype(np.int64), one)
    again = AffinityPredictor(3, 5)
    retained = merge([profile()])
    retained.transitions = Transitions(matrix=affinity.matrix, times=affinity.times)
    merged = merge([retained, profile()]).transitions
    assert merged is not None
    again.learned(merged)
    assert again.matrix[0, 2].tolist() == [0, 0, 0, 0, 1]
