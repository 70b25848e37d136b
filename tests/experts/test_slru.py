"""What segmented LRU promises, and that layers demote and promote."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.experts import ExpertCache
from moelight.experts.eviction import Layered, Slru
from tests.shapes import examples

EXPERTS = 40


def make(capacity: int, eviction: str = "slru") -> ExpertCache:
    return ExpertCache(capacity=capacity, num_layers=1, num_experts=EXPERTS, eviction=eviction)


def pool(cache: ExpertCache) -> Slru:
    result = cache._pools[0]
    assert isinstance(result, Slru)
    return result


def probation(cache: ExpertCache) -> list[int]:
    """Least recent first."""
    return [key for _, _, key in sorted(pool(cache).rank.values(), key=lambda entry: entry[1])]


def protected(cache: ExpertCache) -> list[int]:
    """Least recent first, without the pinned."""
    return list(pool(cache)._protected)


def ask(cache: ExpertCache, *experts: int) -> list[int]:
    """One after the other; who left."""
    return [row[1] for expert in experts for row in cache.access(0, [[expert]]).evictions.tolist()]


@pytest.mark.parametrize(("capacity", "few", "many"), [(1, 1, 0), (2, 1, 1), (3, 1, 2), (8, 2, 6), (12, 3, 9)])
def test_a_quarter_is_probation(capacity: int, few: int, many: int) -> None:
    assert (pool(make(capacity)).probation_cap, pool(make(capacity)).protected_cap) == (few, many)


@examples(40)
@given(
    capacity=st.integers(1, 12),
    drawn=st.lists(st.tuples(st.sampled_from("aaaaapu"), st.integers(0, 15)), min_size=20, max_size=80),
)
def test_segments(capacity: int, drawn: list[tuple[str, int]]) -> None:
    cache = make(capacity)
    pinned: set[int] = set()
    for word, expert in drawn:
        if word == "a":
            ask(cache, expert)
        elif word == "p" and cache.pin(0, expert):
            pinned.add(expert)
        elif word == "u":
            cache.unpin(0, expert)
            pinned.discard(expert)
        segments = pool(cache)
        first, second = set(probation(cache)), {*protected(cache), *segments.pinned}
        assert len(first) <= segments.probation_cap
        assert len(second) <= segments.protected_cap
        assert not first & second
        assert set(segments.pinned) == pinned
        assert len(cache) == len(first) + len(second) <= capacity


def test_promotion_and_demotion_keep_recency() -> None:
    cache = make(8)
    for expert in range(6):
        ask(cache, expert, expert)
    assert protected(cache) == [0, 1, 2, 3, 4, 5]
    ask(cache, 1)
    ask(cache, 6, 7)
    ask(cache, 6)
    assert protected(cache) == [2, 3, 4, 5, 1, 6]
    assert probation(cache) == [7, 0]  # 0 came back at the head


def test_the_fewest_accesses_leave_and_of_equals_the_least_recent() -> None:
    cache = make(12)  # three on probation
    for expert in (30, 31):  # known from before, long gone
        ask(cache, expert)
    cache.clear()
    ask(cache, 30, 5, 31)
    assert ask(cache, 6) == [5]
    assert ask(cache, 7) == [6]
    assert ask(cache, 30) == []
    assert ask(cache, 8, 9) == [7]
    assert ask(cache, 10) == [8]


def test_the_newest_stays_though_it_was_never_asked_for() -> None:
    cache = make(12)
    ask(cache, 0, 1, 2)
    result = cache.prefetch(0, [20])
    assert result.evictions.tolist() == [[0, 0]]
    assert probation(cache) == [1, 2, 20]
    assert ask(cache, 3) == [20]


def test_pins() -> None:
    cache = make(8)
    assert not cache.pin(0, 3)
    for expert in range(6):
        ask(cache, expert, expert)
    ask(cache, 6)
    assert cache.pin(0, 6)
    assert probation(cache) == [0]  # made room
    for expert in range(1, 6):
        assert cache.pin(0, expert)
    ask(cache, 7)
    assert not cache.pin(0, 7)  # all that is protected is pinned
    assert ask(cache, 7, 0) == []
    assert probation(cache) == [7, 0]  # no promotion, but recency
    ask(cache, *range(10, 30))
    assert all(cache.contains(0, expert) for expert in range(1, 7))
    cache.unpin(0, 3)
    ask(cache, 30, 30)
    assert not {3} & set(protected(cache))
    assert cache.contains(0, 3)
    assert 3 in ask(cache, *range(31, 35))


def test_unpinned_it_has_its_old_place() -> None:
    cache = make(8)
    for expert in range(6):
        ask(cache, expert, expert)
    cache.pin(0, 2)
    cache.pin(0, 4)
    ask(cache, 4, 3)
    cache.unpin(0, 4)
    cache.unpin(0, 2)
    assert protected(cache) == [0, 1, 2, 5, 4, 3]


def test_who_has_room_for_all_never_evicts() -> None:
    cache = make(EXPERTS)
    rng = np.random.default_rng(0)
    assert ask(cache, *rng.integers(EXPERTS, size=500).tolist()) == []
    cache.access(0, np.arange(EXPERTS)[None])
    assert len(cache) == EXPERTS


def layers(cache: ExpertCache) -> tuple[set[int], set[int]]:
    result = cache._pools[0]
    assert isinstance(result, Layered)
    return set(result.first.order()), set(result.second.order())


def test_layers_demote_and_promote() -> None:
    cache = make(6, "lfu|lru")
    ask(cache, 0, 0, 1, 1, 2, 2, 3, 3)
    assert ask(cache, 4, 5) == []
    assert layers(cache) == ({1, 2, 3, 5}, {0, 4})  # the oldest of the twice used first, then the once used
    assert ask(cache, 4) == []
    assert layers(cache) == ({1, 2, 3, 4}, {0, 5})
    assert ask(cache, 6) == [0]
    assert layers(cache) == ({1, 2, 3, 6}, {5, 4})


def test_one_place_is_the_first_levels() -> None:
    cache = make(1, "lru|lfu")
    assert ask(cache, 0, 1, 1, 2) == [0, 1]


def test_levels_fill_completely() -> None:
    cache = make(12, "lfu|lru")
    ask(cache, *range(EXPERTS))
    first, second = layers(cache)
    assert (len(first), len(second)) == (8, 4)
