"""Budgets of layers: exactly the total, within bounds, contents kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.experts import ExpertCache
from moelight.experts.cache import Selections, share_out
from moelight.experts.policy import PerLayerRules
from tests.shapes import examples


@examples(80)
@given(
    layers=st.lists(st.tuples(st.floats(0, 8), st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=12),
    at=st.floats(0, 1),
)
def test_shares_are_exactly_the_total_within_bounds(layers: list[tuple[float, int, int]], at: float) -> None:
    weights = np.array([weight for weight, _, _ in layers])
    least = np.array([low for _, low, _ in layers])
    maximum = least + [more for _, _, more in layers]
    total = int(least.sum() + round(at * (maximum.sum() - least.sum())))
    shares = share_out(total, weights, least, maximum)
    assert shares.sum() == total
    assert (least <= shares).all()
    assert (shares <= maximum).all()
    free = (shares > least) & (shares < maximum)
    if weights.sum() > 1e-3 and free.sum() > 1 and (weights[free] > 1e-3).all():
        ratios = shares[free] / weights[free]
        assert ((ratios.max() - ratios.min()) * weights[free].min() <= 2.0 + 1e-6).all()  # one of rounding each


def test_largest_remainders() -> None:
    least, maximum = np.full(3, 1), np.full(3, 64)
    assert share_out(17, np.array([3.0, 2.0, 1.0]), least, maximum).tolist() == [8, 6, 3]  # 8.5, 5.67, 2.83
    assert share_out(17, np.zeros(3), least, maximum).tolist() == [6, 6, 5]
    assert share_out(12, np.array([9.0, 1.0, 0.0]), np.full(3, 2), np.full(3, 7)).tolist() == [7, 3, 2]


@pytest.mark.parametrize("total", [5, 25])
def test_what_cannot_be_is_refused(total: int) -> None:
    rules = PerLayerRules(min_capacity=2, max_capacity=8)
    with pytest.raises(ConfigError, match=f"{total} slots cannot be shared out to 3 layers, which take 6 to 24"):
        ExpertCache(capacity=total, num_layers=3, num_experts=16, per_layer=rules)


def test_entropies() -> None:
    selections = Selections(3, 8, window=4)
    selections.add(0, np.array([5, 0, 1, 2, 3]))  # the first has left the window
    selections.add(1, np.array([7]))
    assert selections.entropies().tolist() == [2.0, 0.0, 3.0]


def test_budgets_follow_the_spread_and_contents_stay() -> None:
    left: list[tuple[int, int]] = []
    rules = PerLayerRules(min_capacity=1, max_capacity=8, rebalance_interval=100, entropy_window=30)
    cache = ExpertCache(
        capacity=10, num_layers=2, num_experts=8, eviction="lru", per_layer=rules,
        on_evict=lambda layer, expert, _: left.append((layer, expert)),
    )  # fmt: skip
    assert cache.budgets == [5, 5]
    for at in range(99):
        cache.access(0, [[at % 2]])
        if at < 5:
            cache.access(1, [[at % 5]])
    before = {tuple(key) for key in np.argwhere(cache.slot_table >= 0).tolist()}
    left.clear()
    for at in range(60):
        cache.access(1, [[at % 8]])
    assert sum(cache.budgets) == 10
    assert cache.budgets[1] > cache.budgets[0] >= 1
    assert {(0, 0), (0, 1)} <= before - set(left)


def test_uniform_is_honest() -> None:
    rules = PerLayerRules(allocation="uniform", min_capacity=1, rebalance_interval=1)
    cache = ExpertCache(capacity=8, num_layers=3, num_experts=8, per_layer=rules)
    for at in range(60):
        cache.access(0, [[at % 8]])
    assert cache.budgets == [3, 3, 2]
