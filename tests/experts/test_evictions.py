"""Every eviction against its slow model: one id at a time, and whole batches."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.experts.cache import ExpertCache
from moelight.experts.eviction import EVICTIONS, EvictionRules, split
from tests.experts import slow
from tests.experts.test_cache import counted
from tests.shapes import examples

RULES = EvictionRules(decay=0.5, threshold=0.15, window=12, alpha=0.3)
LAYERS, EXPERTS = 3, 8
NAMES = ("lru", "lfu", "slru", "score", "frequency_threshold")
LAYERED = ("lfu|lru", "lru|lfu", "slru|score", "frequency_threshold|lru", "score|frequency_threshold", "lru|slru")


def slow_one(
    name: str, capacity: int, rules: EvictionRules = RULES, population: int = LAYERS * EXPERTS
) -> slow.SlowLru:
    if name == "lfu":
        return slow.SlowLfu(capacity, rules.decay)
    if name == "slru":
        return slow.SlowSlru(capacity, population)
    if name == "score":
        return slow.SlowScore(capacity, rules.alpha)
    if name == "frequency_threshold":
        return slow.SlowFrequencyThreshold(capacity, rules.threshold, rules.window)
    return slow.SlowLru(capacity)


def slow_of(name: str, capacity: int, rules: EvictionRules = RULES) -> slow.Slow:
    if "|" not in name or capacity == 1:
        return slow_one(name.partition("|")[0], capacity, rules)
    first, second = split(capacity)
    one, other = name.split("|")
    return slow.SlowLayered(slow_one(one, first, rules), slow_one(other, second, rules))


def compare(cache: ExpertCache, model: slow.Slow, layer: int, ids: np.ndarray, scores: np.ndarray | None) -> None:
    """One batch through both."""
    distinct = np.unique(ids)
    means = [1.0 if scores is None else float(scores[ids == i].sum() / (ids == i).sum()) for i in distinct]
    expected = slow.serve(model, (distinct + layer * EXPERTS).tolist(), means)
    result = cache.access(layer, ids, scores)
    base = layer * EXPERTS
    assert ((result.hits + base).tolist(), (result.misses + base).tolist(), (result.slots >= 0).tolist()) == expected
    assert (result.evictions[:, 0] * EXPERTS + result.evictions[:, 1]).tolist() == model.left
    assert sorted(model.residents()) == np.flatnonzero(cache.slot_table >= 0).tolist()


batches = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.tuples(st.integers(0, EXPERTS - 1), st.integers(0, 8)), min_size=1, max_size=9),
    ),
    min_size=20,
    max_size=40,
)


@pytest.mark.parametrize("name", NAMES + LAYERED)
@examples(20)
@given(drawn=batches, capacity=st.sampled_from([1, 2, 3, 5, 8, 13, 23, 24]), scored=st.booleans())
def test_batches_are_served_as_by_the_slow_model(name: str, drawn: list, capacity: int, scored: bool) -> None:
    cache = ExpertCache(capacity=capacity, num_layers=LAYERS, num_experts=EXPERTS, eviction=name, rules=RULES)
    model = slow_of(name, capacity)
    for layer, pairs in drawn:
        ids = np.array([[expert] for expert, _ in pairs])
        compare(cache, model, layer, ids, np.array([[mark / 8] for _, mark in pairs]) if scored else None)


@pytest.mark.parametrize("name", NAMES + LAYERED)
def test_one_id_at_a_time_over_a_long_trace(name: str) -> None:
    """Long enough for decays, sliding windows and many evictions; the two ways to count decay agree but for rounding,
    which meets no tie here."""
    rng = np.random.default_rng(7)
    rules = EvictionRules(decay=0.95, threshold=0.04, window=40, alpha=0.3)
    cache = ExpertCache(capacity=9, num_layers=LAYERS, num_experts=EXPERTS, eviction=name, rules=rules)
    model = slow_of(name, 9, rules)
    for _ in range(800):
        ids = np.array([[min(EXPERTS - 1, int(rng.zipf(1.3)) - 1)]])
        compare(cache, model, int(rng.integers(LAYERS)), ids, rng.random((1, 1)))


def test_an_access_of_one_id_spares_nobody_who_lacks_accesses() -> None:
    """As the description has it: the accessed expert is kept by its own share, not because it is in use."""
    rng = np.random.default_rng(3)
    cache = ExpertCache(
        capacity=4, num_layers=1, num_experts=EXPERTS, eviction="frequency_threshold",
        rules=EvictionRules(threshold=0.1, window=20),
    )  # fmt: skip
    history: list[int] = []
    for _ in range(400):
        key = min(EXPERTS - 1, int(rng.zipf(1.4)) - 1)
        cache.access(0, [[key]])
        history = [*history, key][-20:]
        retained = np.flatnonzero(cache.slot_table[0] >= 0).tolist()
        assert all(history.count(other) / len(history) >= 0.1 for other in retained)


@pytest.mark.parametrize("name", [*EVICTIONS.names(), *LAYERED])
@examples(20)
@given(keys=st.lists(st.integers(0, 5), min_size=5, max_size=25), capacity=st.integers(1, 4))
def test_nobody_finds_more_than_belady(name: str, keys: list[int], capacity: int) -> None:
    future = [(0, [key]) for key in keys]
    cache = ExpertCache(capacity=capacity, num_layers=1, num_experts=6, eviction=name, future=future)
    hits = int(cache.access_each(np.zeros(len(keys), int), keys).sum())
    maximum = slow.most_hits([[key] for key in keys], capacity)
    assert hits == maximum if name == "belady" else hits <= maximum


@pytest.mark.parametrize("name", [*NAMES, "reuse", *LAYERED])
def test_accesses_of_one_id_in_one_call(name: str) -> None:
    """`access_each` leaves what as many calls of `access` leave, slots included."""
    rng = np.random.default_rng(5)
    layers, experts = rng.integers(LAYERS, size=400), np.minimum(rng.zipf(1.3, 400) - 1, EXPERTS - 1)
    scores = rng.random(400)
    left: list[list[tuple[int, ...]]] = [[], []]
    one, other = (
        ExpertCache(
            capacity=7, num_layers=LAYERS, num_experts=EXPERTS, eviction=name, rules=RULES,
            on_evict=lambda *who, heard=heard: heard.append(who),
        )
        for heard in left
    )  # fmt: skip
    hits = [len(one.access(int(at), [[int(e)]], [[s]]).hits) for at, e, s in zip(layers, experts, scores, strict=True)]
    assert other.access_each(layers, experts, scores).astype(int).tolist() == hits
    assert left[0] == left[1]
    assert (one.slot_table == other.slot_table).all()
    assert counted(one) == counted(other)
    compared = one.access(0, [[0, 1, 2, 3]]), other.access(0, [[0, 1, 2, 3]])
    assert compared[0].slots.tolist() == compared[1].slots.tolist()


def test_lfu_counts_survive_being_brought_back_from_overflow() -> None:
    rules = EvictionRules(decay=1e-30)
    cache = ExpertCache(capacity=2, num_layers=1, num_experts=4, eviction="lfu", rules=rules)
    model = slow.SlowLfu(2, 1e-30)
    for at in range(1200):
        compare(cache, model, 0, np.array([[at % 97 % 3]]), None)


@pytest.mark.parametrize("name", ["lru", "lfu", "score", "lfu|lru", "score|lru"])
@pytest.mark.parametrize("share", [1, 4])
def test_what_a_batch_costs_does_not_grow_with_its_experts(name: str, share: int) -> None:
    """Calls of Python functions for a batch, once the cache is full: no more for 64 experts than for 16."""

    def calls(experts: int) -> float:
        cache = ExpertCache(capacity=8 * experts // share, num_layers=8, num_experts=experts, eviction=name)
        ids, scores = np.tile(np.arange(experts), 4)[:, None], np.random.default_rng(0).random((4 * experts, 1))
        total = 0

        def count(_frame: object, event: str, _arg: object) -> None:
            nonlocal total
            total += event == "call"

        for turn in range(48):
            sys.setprofile(count if turn >= 16 else None)
            try:
                cache.access(turn % 8, ids, scores)
            finally:
                sys.setprofile(None)
        return total / 32

    few, many = calls(16), calls(64)
    assert many < few + 16 < 90, (few, many)  # at every hundredth access an lfu's counts shrink
