"""Who is near in an engine: the model's own layer numbers, the places there are, and nobody twice in one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.schedule import Page
from moelight.experts.policy import (
    EVICTIONS,
    FALLBACK,
    CacheRules,
    Capacity,
    ExpertPolicy,
    MonitorRules,
    PerLayerRules,
    PrefetchRules,
)
from moelight.experts.profile import ActivationProfile
from moelight.paging.residency import ModelFacts, ResidencyManager
from tests.shapes import examples

MOE = (False, True, True, False, True)
LAYERS = (1, 2, 4)
EXPERTS = 6
MODEL = ModelFacts(moe_layers=MOE, num_experts=EXPERTS, top_k=2, page_bytes=100, facts={"type": "tiny"})
EVERYONE = [Page(layer=layer, expert=expert) for expert in range(EXPERTS) for layer in LAYERS]


def near(
    *, resident: int = 6, eviction: tuple[str, ...] = ("lru",), learns: bool = True, **more: object
) -> ResidencyManager:
    profile = more.pop("profile", None)
    cache = CacheRules(capacity=Capacity(value=3), eviction=eviction)
    policy = ExpertPolicy(name="mine", cache=cache, **more)
    return ResidencyManager(policy, MODEL, resident=EVERYONE[:resident], learns=learns, profile=profile)


def places(result: ResidencyManager) -> list[int]:
    return sorted(result.table[result.table >= 0].tolist())


def test_at_first_those_are_near_that_the_plan_placed_there() -> None:
    result = near()
    assert result.pages() == set(EVERYONE[:6])
    assert places(result) == list(range(6))
    assert result.table.shape == (5, EXPERTS)
    assert (result.table[[0, 3]] < 0).all()


@pytest.mark.parametrize("allocation", ["uniform", "entropy"])
@pytest.mark.parametrize("resident", [4, 7, 17])
def test_every_place_is_taken_whatever_the_budgets_of_layers_are(allocation: str, resident: int) -> None:
    """The plan may have placed more in one layer than its budget is."""
    rules = PerLayerRules(allocation=allocation, min_capacity=1)
    result = near(resident=resident, per_layer=rules)
    assert places(result) == list(range(resident))
    by_layer = ResidencyManager(
        ExpertPolicy(name="mine", cache=CacheRules(capacity=Capacity(value=3)), per_layer=rules),
        MODEL,
        resident=sorted(EVERYONE)[:resident],
    )
    assert places(by_layer) == list(range(resident))


def test_who_only_counts_moves_nobody() -> None:
    result = near(learns=False, prefetch=PrefetchRules(strategy="previous"))
    version, before = result.version, result.pages()
    for layer in LAYERS:
        chosen = result.choose(layer, np.array([[4, 5]]), np.array([[0.5, 0.5]]))
        assert (chosen.slots == -1).all()
    assert (result.version, result.pages(), result.ahead) == (version, before, False)
    assert result.profile().counts.sum() == 6


def test_passes_of_whole_layers_count_and_move_nobody() -> None:
    result = near()
    version = result.version
    result.note(4, np.array([[1, 2], [1, 5]]), np.full((2, 2), 0.5))
    assert result.version == version
    assert result.profile().counts[2].tolist() == [0, 2, 1, 0, 0, 1]
    assert [stat["layer"] for stat in result.stats()["layers"]] == list(LAYERS)


def test_a_profile_says_who_is_near_first() -> None:
    counted = ActivationProfile(model=MODEL.facts, num_layers=3, num_experts=EXPERTS)
    for row in range(3):
        counted.record(row, np.array([5, 3]), np.array([9, 4]))
    assert near(profile=counted).pages() == {Page(layer=layer, expert=e) for layer in LAYERS for e in (3, 5)}


def test_guesses_and_hints_name_layers_of_the_model() -> None:
    """Routers that chose as clearly before and were right are believed; who is near already is not fetched."""
    result = near(prefetch=PrefetchRules(strategy="next_router", budget=2))
    assert (result.ahead, result.predicts_experts) == (True, True)
    weights = np.array([[0.8, 0.2]])
    for _ in range(7):
        result.hint(4, np.array([[0, 1]]), weights)
        assert result.prediction(4).tolist() == []
        result.choose(4, np.array([[0, 1]]), weights)
    result.hint(4, np.array([[3, 0]]), weights)
    assert result.prediction(2).tolist() == []
    assert result.prediction(4).tolist() == [3]


def test_those_that_are_computed_where_they_lie_are_counted_and_do_not_come() -> None:
    result = near()
    chosen = result.choose(1, np.array([[0, 4], [4, 5]]), np.full((2, 2), 0.5), leave=frozenset((4,)))
    assert chosen.hits.tolist() == [0]
    assert (chosen.misses.tolist(), chosen.kept_out.tolist()) == ([5], [4])
    assert result.table[1, 4] < 0 <= result.table[1, 5]
    assert result.profile().counts[0].tolist() == [1, 0, 0, 0, 2, 1]


def test_what_is_left_to_the_cpu_is_part_of_the_one_visit() -> None:
    """Rules, predictors and their quality meet each choice once, whole."""
    result = near(prefetch=PrefetchRules(strategy="previous", budget=6), monitor=MonitorRules())
    chosen = np.array([[3, 4], [3, 5]])
    result.choose(2, chosen, np.array([[0.75, 0.25], [0.5, 0.5]]), leave=frozenset((3, 4)))
    predictor = result.residency.cache.predictor
    assert predictor.predictor.predict(1, 6).tolist() == [3, 5, 4]
    assert predictor.quality.used == 3
    predictor.quality.predicted(1, np.array([3, 4, 5]))
    result.choose(2, chosen, np.full((2, 2), 0.5), leave=frozenset((3, 4)))
    assert (predictor.quality.useful, predictor.quality.unused) == (3, 0)
    assert result.residency.monitor is not None
    assert result.residency.monitor.accesses == 6


@examples(60)
@given(
    batches=st.lists(
        st.tuples(st.sampled_from(LAYERS), st.lists(st.integers(0, 5), min_size=1, max_size=5)), max_size=30
    ),
    eviction=st.sampled_from([*((item,) for item in EVICTIONS), FALLBACK]),
    resident=st.integers(1, 17),
    budgets=st.booleans(),
)
def test_the_table_is_who_came_less_who_left(
    batches: list[tuple[int, list[int]]], eviction: tuple[str, ...], resident: int, budgets: bool
) -> None:
    """Leased ones stay; a place has one expert; the version changes whenever the table does."""
    more = {"per_layer": PerLayerRules(allocation="uniform", min_capacity=1)} if budgets and resident > 2 else {}
    result = near(resident=resident, eviction=eviction, **more)
    held: tuple[int, np.ndarray] | None = None
    for layer, ids in batches:
        before, version = result.table.copy(), result.version
        chosen = result.choose(layer, np.array(ids)[:, None], np.full((len(ids), 1), 0.5))
        for expert, slot in zip(chosen.hits.tolist(), chosen.hit_slots.tolist(), strict=True):
            assert before[layer, expert] == slot == result.table[layer, expert]
        for expert, slot in zip(chosen.misses.tolist(), chosen.slots.tolist(), strict=True):
            assert before[layer, expert] < 0
            assert result.table[layer, expert] == slot
        assert set(chosen.hits.tolist()) | set(chosen.misses.tolist()) == set(ids)
        assert (result.version == version) == np.array_equal(before, result.table)
        assert len(set(places(result))) == len(places(result)) <= resident
        assert not places(result) or places(result)[-1] < resident
        if held is not None:
            assert np.array_equal(before[held[0], held[1]], result.table[held[0], held[1]])
            result.release(*held)
        stays = np.concatenate([chosen.hits, chosen.misses[chosen.slots >= 0]])
        result.lease(layer, stays)
        held = layer, stays


@examples(80)
@given(
    eviction=st.sampled_from([*((item,) for item in EVICTIONS), FALLBACK]),
    rules=st.sampled_from(
        [
            None,
            PerLayerRules(allocation="uniform", min_capacity=1),
            PerLayerRules(entropy_window=4, rebalance_interval=5, min_capacity=1),
        ]
    ),
    resident=st.integers(1, len(EVERYONE)),
    visits=st.lists(st.tuples(st.sampled_from(LAYERS), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3))),
    capacity=st.integers(1, len(EVERYONE)),
)
def test_a_page_is_only_in_slots_of_its_size(
    eviction: tuple[str, ...],
    rules: PerLayerRules | None,
    resident: int,
    visits: list[tuple[int, list[int]]],
    capacity: int,
) -> None:
    """Also while the capacity falls and rises, and whatever is prefetched; all slots are in use at first."""
    sizes = (0, 4096, 8192, 0, 4096)
    if rules is not None and resident < len(LAYERS):
        rules = None
    policy = ExpertPolicy(
        name="mine",
        cache=CacheRules(capacity=Capacity(value=3), eviction=eviction),
        per_layer=rules,
        prefetch=PrefetchRules(strategy="previous"),
    )
    slots = EVERYONE[:resident]
    result = ResidencyManager(policy, replace(MODEL, slot_bytes=sizes), resident=slots)
    assert places(result) == list(range(resident))
    for number, (layer, experts) in enumerate(visits):
        result.use(layer, np.array([experts]), np.full((1, len(experts)), 1.0 / len(experts)))
        result.end_use()
        result.admit_ahead(layer)
        if rules is None and number % 3 == 2:
            result.residency.cache.resize(capacity if number % 2 else resident)
        for at, expert in np.argwhere(result.table >= 0).tolist():
            assert sizes[slots[result.table[at, expert]].layer] == sizes[at]
        assert len(set(places(result))) == len(places(result))
