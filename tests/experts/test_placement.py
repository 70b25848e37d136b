"""Where missing experts are computed: the hybrid split against every subset there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.experts.policy import ScheduleRules
from moelight.experts.residency import place_misses
from tests.shapes import examples

HYBRID = ScheduleRules(mode="hybrid", offload_threshold_ms=0.0)


@examples(60)
@given(
    tokens=st.lists(st.integers(1, 40), max_size=7),
    fetch_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    each_s=st.sampled_from([0.0, 0.25, 1.0]),
    base_s=st.sampled_from([0.0, 0.5]),
    fixed_s=st.sampled_from([0.0, 2.0]),
)
def test_hybrid_is_the_best_of_all_subsets(
    tokens: list[int], fetch_s: float, each_s: float, base_s: float, fixed_s: float
) -> None:
    n, many = len(tokens), np.array(tokens, dtype=np.int64)
    cpu_s = base_s + each_s * many
    result = place_misses(many, HYBRID, fetch_s=fetch_s, cpu_s=cpu_s, fixed_s=fixed_s)
    seconds = {
        (max(fetch_s * size, fixed_s + sum(cpu_s[i] for i in range(n) if i not in chosen) if size < n else 0.0), size)
        for size in range(n + 1)
        for chosen in combinations(range(n), size)
    }
    least = min(took for took, _ in seconds)
    assert result.seconds == pytest.approx(least)
    assert len(result.fetched) == max(size for took, size in seconds if took == pytest.approx(least))
    assert sorted([*result.fetched.tolist(), *result.computed.tolist()]) == list(range(n))


def test_products_that_cost_anything_are_placed_by_cost_not_by_tokens() -> None:
    schedule = replace(HYBRID, priority_routing=True)
    result = place_misses(np.array([1, 2, 3]), schedule, fetch_s=1.0, cpu_s=np.array([9.0, 0.5, 0.5]))
    assert result.fetched.tolist() == [0]
    assert result.computed.tolist() == [2, 1]
    assert (result.link_s, result.cpu_s) == (1.0, 1.0)


def test_the_other_modes_do_not_weigh() -> None:
    tokens, cpu_s = np.array([5, 1, 7, 5]), np.array([5.0, 1.0, 7.0, 5.0])
    fetched = place_misses(tokens, ScheduleRules(), fetch_s=100.0, cpu_s=cpu_s, fixed_s=1.0)
    assert (fetched.fetched.tolist(), fetched.computed.tolist()) == ([0, 1, 2, 3], [])
    assert (fetched.link_s, fetched.cpu_s, fetched.seconds) == (400.0, 0.0, 400.0)
    computed = place_misses(tokens, ScheduleRules(mode="cpu_fallback"), fetch_s=0.0, cpu_s=cpu_s, fixed_s=1.0)
    assert (computed.fetched.tolist(), computed.computed.tolist()) == ([], [2, 0, 3, 1])
    assert (computed.link_s, computed.cpu_s) == (0.0, 19.0)


def test_fetches_below_the_threshold_are_never_avoided() -> None:
    tokens, cpu_s = np.array([1, 1]), np.array([1e-6, 1e-6])
    for threshold_ms, computed in ((40.0, 0), (39.0, 2)):
        schedule = ScheduleRules(mode="hybrid", offload_threshold_ms=threshold_ms)
        assert len(place_misses(tokens, schedule, fetch_s=0.04, cpu_s=cpu_s).computed) == computed


def test_the_busiest_are_fetched_first_where_that_is_asked_for() -> None:
    tokens = np.array([3, 8, 1, 8])
    for priority, order in ((True, [1, 3, 0, 2]), (False, [0, 1, 2, 3])):
        result = place_misses(tokens, ScheduleRules(priority_routing=priority), fetch_s=1.0, cpu_s=np.zeros(4))
        assert result.fetched.tolist() == order


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'hybird' \(did you mean 'hybrid'\?\)"):
        place_misses(np.array([1]), ScheduleRules(mode="hybird"), fetch_s=1.0, cpu_s=np.array([1.0]))
    with pytest.raises(ValueError, match="one length"):
        place_misses(np.array([1]), ScheduleRules(), fetch_s=1.0, cpu_s=np.array([1.0, 2.0]))
