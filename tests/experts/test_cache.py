"""The cache around its evictions: places, leases, pins, callbacks, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.experts import ExpertCache
from moelight.experts.cache import MemoryPressure
from moelight.experts.eviction import EvictionRules, FloatArray, IntArray
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy, PerLayerRules, PrefetchRules
from moelight.experts.predict import NoPredictor, Prefetcher
from tests.shapes import examples

LAYERS, EXPERTS = 3, 6
EVICTIONS = (
    "lru",
    "lfu",
    "slru",
    "score",
    "frequency_threshold",
    "lfu|lru",
    "slru|lfu",
    "score|frequency_threshold",
    "reuse",
    "reuse|lru",
)
RULES = EvictionRules(decay=0.9, threshold=0.1, window=16)


def make(capacity: int, eviction: str = "lru", **more: Any) -> ExpertCache:
    return ExpertCache(
        capacity=capacity, num_layers=LAYERS, num_experts=EXPERTS, eviction=eviction, **{"rules": RULES, **more}
    )


def counted(cache: ExpertCache) -> dict[str, Any]:
    """All counters."""
    return {name: np.asarray(value).tolist() for name, value in vars(cache.stats).items()}


class Watched:
    """A cache and what one can see of it from outside: who is there, where, and who was said to leave."""

    def __init__(self, capacity: int, eviction: str, **more: Any) -> None:
        self.heard: list[tuple[int, int, int]] = []
        self.cache = make(capacity, eviction, on_evict=lambda *who: self.heard.append(who), **more)
        self.where = {(layer, expert): slot for layer, expert, slot in self.cache.preload}
        self.leases: Counter[tuple[int, int]] = Counter()
        self.max_slots = self.cache.capacity

    def flush(self, brought: dict[tuple[int, int], int], evictions: np.ndarray | None) -> None:
        """An operation is over that reported ``brought`` and ``evictions``."""
        guarded = {key for key in (*self.cache.pinned, *self.leases) if key in self.where}
        for layer, expert, slot in self.heard:
            assert self.where.pop((layer, expert)) == slot  # exactly once, with its slot
        if evictions is not None:
            assert [who[:2] for who in self.heard] == [tuple(row) for row in evictions.tolist()]
        self.heard.clear()
        assert guarded <= set(self.where)
        self.where |= brought
        table = self.cache.slot_table
        present = {(int(at), int(e)): int(table[at, e]) for at, e in np.argwhere(table >= 0)}
        assert present == self.where
        assert len(self.cache) == len(present) <= self.cache.capacity
        assert len(set(present.values())) == len(present)
        assert all(slot < self.max_slots for slot in present.values())

    def access(self, layer: int, ids: list[int], admit: bool) -> None:
        before = dict(self.where)
        result = self.cache.access(layer, [[e] for e in ids], [[(e + 1) / 9] for e in ids], admit=admit)
        assert sorted([*result.hits.tolist(), *result.misses.tolist()]) == sorted(set(ids))
        for expert, slot in zip(result.hits.tolist(), result.hit_slots.tolist(), strict=True):
            assert before[layer, expert] == slot == self.cache.slot_table[layer, expert]
        pairs = zip(result.misses.tolist(), result.slots.tolist(), strict=True)
        brought = {(layer, expert): slot for expert, slot in pairs if slot >= 0}
        assert admit or not brought
        self.flush(brought, result.evictions)

    def prefetch(self, layer: int, ids: list[int], just_used: list[tuple[int, int]]) -> None:
        hits = self.cache.stats.accesses
        result = self.cache.prefetch(layer, ids)
        assert not {tuple(row) for row in result.evictions.tolist()} & set(just_used)
        assert self.cache.stats.accesses == hits
        pairs = zip(result.ids.tolist(), result.slots.tolist(), strict=True)
        self.flush({(layer, expert): slot for expert, slot in pairs}, result.evictions)

    def lease(self, layer: int, ids: list[int]) -> None:
        self.cache.lease(layer, ids)
        self.leases.update((layer, expert) for expert in ids)

    def release(self) -> None:
        for (layer, expert), times in self.leases.items():
            self.cache.release(layer, [expert] * times)
        self.leases.clear()

    def resize(self, capacity: int) -> None:
        if capacity < max(1, sum(key in self.where for key in self.leases)):
            with pytest.raises(ValueError, match="leased"):
                self.cache.resize(capacity)
            return
        self.max_slots = max(self.max_slots, capacity)
        pins = self.cache.pinned
        gone = self.cache.resize(capacity)
        retained = self.cache.pinned
        assert retained == pins[: len(retained)]  # the latest pins end first
        self.flush({}, gone)


some_ids = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5)
operations = st.lists(
    st.tuples(
        st.sampled_from(["access"] * 6 + ["look", "prefetch", "lease", "release", "pin", "unpin", "swap", "resize"]),
        st.integers(0, LAYERS - 1),
        some_ids,
    ),
    min_size=20,
    max_size=50,
)


@pytest.mark.parametrize("layered", [False, True], ids=["shared", "per_layer"])
@examples(60)
@given(
    drawn=operations, eviction=st.sampled_from(EVICTIONS), capacity=st.integers(1, 12),
    ttl=st.sampled_from([None, None, 3, 9]), pressed=st.booleans(),
)  # fmt: skip
def test_whatever_happens_places_are_conserved(
    layered: bool, drawn: list, eviction: str, capacity: int, ttl: int | None, pressed: bool
) -> None:
    more: dict[str, Any] = {"ttl": ttl}
    if pressed:
        more["pressure"] = MemoryPressure(threshold=0.8, headroom=0.5, budget_gb=capacity, expert_gb=1.0)
    if layered:
        capacity += LAYERS
        more["per_layer"] = PerLayerRules(
            min_capacity=1, max_capacity=EXPERTS, rebalance_interval=7, entropy_window=5, total_budget=capacity
        )
    watched = Watched(capacity, eviction, **more)
    cache, last, last_of = watched.cache, [], {}
    for word, layer, ids in drawn:
        if word in {"access", "look"}:
            watched.access(layer, ids, admit=word == "access")
            last = last_of[layer] = [(layer, expert) for expert in ids]
        elif word == "prefetch":
            watched.prefetch(layer, ids, [*last, *last_of.get(layer, [])])
        elif word == "lease":
            watched.lease(layer, ids[:2])
        elif word == "release":
            watched.release()
        elif word == "pin":
            if cache.pin(layer, ids[0]):
                assert (layer, ids[0]) in cache.pinned
            watched.flush({}, None)
        elif word == "unpin":
            cache.unpin(layer, ids[0])
        elif word == "swap":
            present = dict(watched.where)
            cache.swap(EVICTIONS[sum(ids) % len(EVICTIONS)])
            assert watched.where == present
            watched.flush({}, None)
        elif not layered:
            watched.resize(sum(ids))
        if layered:
            assert sum(cache.budgets) == cache.capacity
    watched.release()
    watched.flush({}, cache.clear())
    assert not watched.where


def test_a_batch_needs_more_than_there_is() -> None:
    cache = make(2)
    cache.access(0, [[5]])
    result = cache.access(0, [[3, 1], [4, 3]])
    assert (result.hits.tolist(), result.misses.tolist()) == ([], [1, 3, 4])
    assert (result.slots >= 0).tolist() == [True, True, False]
    assert result.evictions.tolist() == [[0, 5]]
    assert result.counts.tolist() == [0, 1, 0, 2, 1, 0]
    assert cache.stats.bypasses == 1


def test_counters() -> None:
    cache = make(4)
    cache.access(1, [[0, 1], [1, 2]])
    cache.access(1, [[1, 5]], admit=False)
    assert cache.stats.hits[1].tolist() == [0, 1, 0, 0, 0, 0]
    assert cache.stats.misses[1].tolist() == [1, 1, 1, 0, 0, 1]
    assert cache.stats.tokens[1].tolist() == [1, 3, 1, 0, 0, 1]
    assert not cache.contains(1, 5)
    assert (cache.stats.accesses, cache.stats.hits.sum(), cache.stats.hit_rate) == (5, 1, 0.2)
    assert (cache.stats.hits + cache.stats.misses).sum(axis=1).tolist() == [0, 5, 0]


def test_kept_out_is_counted_as_missing_and_does_not_come() -> None:
    """Who is there already is not: it is a hit."""
    seen: list[tuple[list[int], list[int], list[float]]] = []

    class Watching(NoPredictor):
        def observe(self, layer: int, ids: IntArray, counts: IntArray, mass: FloatArray | None) -> None:
            seen.append((ids.tolist(), counts.tolist(), [] if mass is None else mass.tolist()))

    watching = Prefetcher(PrefetchRules(strategy="previous"), num_layers=3, num_experts=6)
    watching._predictors["previous"] = Watching(3, 6)
    cache = make(4, predictor=watching)
    cache.access(1, [[0, 2]])
    result = cache.access(1, [[0, 3], [3, 5], [1, 3]], [[0.5, 0.25]] * 3, keep_out={0, 3, 4})
    assert result.hits.tolist() == [0]
    assert (result.misses.tolist(), result.kept_out.tolist()) == ([1, 5], [3])
    assert len(result.slots) == 2 and (result.slots >= 0).all()
    assert result.counts.tolist() == [1, 1, 0, 3, 0, 1]
    assert not cache.contains(1, 3)
    assert cache.stats.misses[1].tolist() == [1, 1, 1, 1, 0, 1]
    assert (cache.stats.bypasses, cache.clock) == (1, 6)
    assert seen[1] == ([0, 1, 3, 5], [1, 1, 3, 1], [0.5, 0.5, 1.0, 0.25])
    assert watching.quality.used == 6
    nobody = cache.access(2, [[1]], keep_out=(1,))
    assert (len(nobody.misses), len(nobody.slots), nobody.kept_out.tolist()) == (0, 0, [1])


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_keeping_all_out_is_bringing_nothing_in(eviction: str) -> None:
    rng, one, other = np.random.default_rng(3), make(5, eviction), make(5, eviction)
    for number in range(60):
        layer, ids, scores = int(rng.integers(3)), rng.integers(6, size=(2, 2)), rng.random((2, 2))
        some = number % 3 == 0
        selected = one.access(layer, ids, scores, admit=not some)
        its = other.access(layer, ids, scores, keep_out=range(6) if some else ())
        assert selected.hits.tolist() == its.hits.tolist()
        assert selected.misses.tolist() == [*its.misses, *its.kept_out]
        assert counted(one) == counted(other)
        assert (one.slot_table == other.slot_table).all()


def test_scores_of_a_batch_are_means() -> None:
    cache = make(2, "score")
    cache.access(0, [[0, 1], [0, 1]], [[0.2, 0.3], [0.6, 0.3]])  # 0.4 and 0.3
    assert cache.access(1, [[0]], [[1.0]]).evictions.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_ids_of_any_integer_type(dtype: type) -> None:
    assert make(4).access(0, np.array([[1, 2]], dtype)).misses.tolist() == [1, 2]


def test_an_empty_batch() -> None:
    cache = make(4)
    result = cache.access(0, np.zeros((0, 2), np.int64))
    assert (len(result.hits), len(result.misses), result.evictions.shape) == (0, 0, (0, 2))
    assert cache.clock == 0


@pytest.mark.parametrize(
    ("layer", "ids", "scores", "says"),
    [
        (0, [1, 2], None, "tokens, k"),
        (0, [[1, 6]], None, "1 to 6 are not all among the 6"),
        (0, [[-1, 2]], None, "-1 to 2 are not all among the 6"),
        (0, [[1 << 40]], None, "not all among"),
        (0, [[0.5]], None, "integers"),
        (0, [[True]], None, "integers"),
        (3, [[1]], None, "layer 3"),
        (0, [[1, 2]], [[0.5]], "shape of ids"),
        (0, [[1]], [[float("nan")]], "finite"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(layer: int, ids: Any, scores: Any, says: str) -> None:
    cache = make(4, "score")
    with pytest.raises(ValueError, match=says):
        cache.access(layer, ids, scores)
    assert (len(cache), cache.stats.accesses) == (0, 0)


def test_pins_are_preloaded_layer_by_layer_as_far_as_there_is_room() -> None:
    cache = make(5, pins=(4, 2, 4))
    assert [row[:2] for row in cache.preload] == [(0, 4), (0, 2), (1, 4), (1, 2), (2, 4)]
    result = cache.access(2, [[0, 4]])
    assert (result.hits.tolist(), result.slots.tolist(), len(result.evictions)) == ([4], [-1], 0)
    assert len(make(12, "slru", pins=range(6)).preload) == 9  # what slru protects
    budgets = PerLayerRules(allocation="uniform", min_capacity=1)
    item = make(6, per_layer=budgets, pins=(1, 2, 3))
    assert [row[:2] for row in item.preload] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_who_may_be_pinned() -> None:
    cache = make(2)
    assert not cache.pin(0, 3)
    cache.access(0, [[3]])
    assert cache.pin(0, 3)
    for expert in range(3):
        cache.access(1, [[expert]])
    assert cache.contains(0, 3)
    assert cache.unpin(0, 3)
    assert not cache.unpin(0, 3)


def test_leases_add_up_and_end_once() -> None:
    cache = make(1)
    cache.access(0, [[1]])
    cache.lease(0, [1])
    cache.lease(0, [1])
    cache.release(0, [1])
    assert cache.access(0, [[2]]).slots.tolist() == [-1]
    with pytest.raises(ValueError, match="leased"):
        cache.clear()
    cache.release(0, [1])
    assert cache.access(0, [[2]]).evictions.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="no lease"):
        cache.release(0, [1])


def test_a_guess_takes_no_place_of_who_was_just_used() -> None:
    cache = make(3)
    cache.access(1, [[0]])
    cache.access(0, [[1]])
    cache.access(2, [[2]])
    result = cache.prefetch(1, [5, 4])
    assert (result.ids.tolist(), result.evictions.tolist()) == ([5], [[0, 1]])
    assert cache.contains(1, 0)
    assert cache.access(1, [[5]]).hits.tolist() == [5]
    assert cache.stats.prefetched == 1


def test_swapping_keeps_the_order() -> None:
    cache = make(4)
    for expert in (3, 1, 2, 0):
        cache.access(0, [[expert]])
    cache.swap("slru")
    assert (len(cache), cache.stats.accesses) == (4, 4)
    assert cache.access(0, [[5]]).evictions.tolist() == [[0, 3]]
    cache.swap("lfu|lru")
    assert cache.eviction == ("lfu", "lru")
    assert len(cache) == 4
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        cache.swap("lrx")
    assert cache.eviction == ("lfu", "lru")


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_filled_ahead_of_the_first_access(eviction: str) -> None:
    """All places are taken, nobody leaves for it, and the most wanted is not the first to leave."""
    cache = make(9, eviction)
    cache.access(1, [[5]])
    wanted = [(0, expert) for expert in range(EXPERTS)] + [(1, 5)] + [(2, expert) for expert in range(EXPERTS)]
    result = cache.fill(wanted).tolist()
    assert [(layer, expert) for layer, expert, _ in result] == wanted[:6] + wanted[7:9]
    assert len({slot for _, _, slot in result}) == 8
    assert (len(cache), cache.stats.accesses, cache.stats.evictions) == (9, 1, 0)
    cache.access(1, [[0]])
    assert cache.access(0, [[0]]).hits.tolist() == [0]
    assert len(cache.fill([(2, 5)])) == (eviction == "frequency_threshold")  # where some were too rare to stay


def test_how_many_may_be_pinned() -> None:
    assert [len(make(12, name, pins=range(EXPERTS)).preload) for name in ("lru", "slru", "lfu|lru")] == [12, 9, 8]


def test_made_from_a_policy() -> None:
    rules = CacheRules(capacity=Capacity(value=50, unit="percent"), eviction=("slru",), pin=(1,), ttl=5)
    shared = ExpertCache.of(ExpertPolicy(name="p", cache=rules), num_layers=4, num_experts=8)
    assert (shared.capacity, len(shared.preload)) == (16, 4)
    layered = ExpertPolicy(
        name="p", cache=CacheRules(capacity=Capacity(value=5)), per_layer=PerLayerRules(allocation="uniform")
    )
    assert ExpertCache.of(layered, num_layers=4, num_experts=8).budgets == [5, 5, 5, 5]


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"num_layers": 0}, {"num_experts": 0}])
def test_sizes_are_positive(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ExpertCache(**{"capacity": 1, "num_layers": 1, "num_experts": 1, **bad})
