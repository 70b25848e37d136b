"""Homes of pages: the shares exactly, page by page, and evenly over the layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Page
from moelight.hrm.footprint import offloaded_pages, pinned_slots, ring_slots
from moelight.hrm.placement import Placement, moved, place_pages, slot_table, with_residents
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import pages
from tests.shapes import examples, models, placed, small_model, small_policy


def per_layer(model: ModelProfile, placement: Placement, tier: str) -> list[int]:
    counts = Counter(page.layer for page in placement.on(tier))
    return [counts[layer] for layer, sparse in enumerate(model.moe_layers) if sparse]


@examples(200)
@given(case=placed())
def test_shares_are_realised_exactly(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    placement, total = place_pages(model, policy), len(pages(model))
    assert set(placement.tiers) == set(pages(model))
    for tier in ("device", "host", "disk"):
        assert len(placement.on(tier)) == round(getattr(policy.weights, tier) * total)


@examples(200)
@given(case=placed())
def test_no_layer_has_more_than_one_page_more_than_another(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    placement = place_pages(model, policy)
    for tier in ("device", "host", "disk"):
        counts = per_layer(model, placement, tier)
        assert max(counts) - min(counts) <= 1
    streamed = Counter(page.layer for page in placement.streamed)
    assert placement.most_streamed_per_layer == max(streamed.values(), default=0)
    assert placement.most_streamed_per_layer == -(-len(placement.streamed) // model.num_moe_layers)


@examples(100)
@given(case=placed())
def test_what_is_not_near_is_streamed_in_order_of_use(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    placement = place_pages(model, policy)
    assert placement.fast_tier == ("device" if policy.ffn_device == "gpu" else "host")
    assert sorted((*placement.resident, *placement.streamed)) == list(pages(model))
    assert list(placement.streamed) == sorted(placement.streamed)
    assert all(placement.tiers[page] == placement.fast_tier for page in placement.resident)


@examples(200)
@given(model=models(), shares=st.lists(st.integers(0, 7), min_size=3, max_size=3).filter(any))
def test_any_shares_place_every_page_within_one_page_of_what_was_asked(model: ModelProfile, shares: list[int]) -> None:
    """A share of zero gets nothing, and rounding never makes or loses a page."""
    device, host, disk = (share / sum(shares) for share in shares)
    weights = Shares(device=device, host=host, disk=disk)
    policy = Policy(model="m", kv_tokens=64, ffn_device="gpu", weights=weights)
    placement, total = place_pages(model, policy), len(pages(model))
    for tier, share in (("device", device), ("host", host), ("disk", disk)):
        count = len(placement.on(tier))
        assert abs(count - share * total) <= 1
        assert share > 0 or count == 0
    assert len(placement.tiers) == total


@pytest.mark.parametrize("experts", [1, 3, 5])
def test_halves_of_an_odd_number_of_pages(experts: int) -> None:
    model = small_model((True,), experts=experts)
    policy = Policy(model="m", kv_tokens=64, ffn_device="gpu", weights=Shares(device=0.5, disk=0.5))
    placement = place_pages(model, policy)
    assert len(placement.on("host")) == 0
    assert len(placement.on("device")) + len(placement.on("disk")) == experts


def test_the_first_experts_of_every_layer_stay() -> None:
    model = small_model((True, False, True), experts=3)
    placement = place_pages(model, small_policy(model, discrete=True, resident=3, host=2))
    placed = {(page.layer, page.expert): home for page, home in placement.tiers.items()}
    assert placed == {
        (0, 0): "device",
        (2, 0): "device",
        (0, 1): "device",
        (2, 1): "host",
        (0, 2): "host",
        (2, 2): "disk",
    }


def drawn_near(placement: Placement, order: list[int]) -> frozenset[Page]:
    """As many pages as are near, others; ``order`` ranks them."""
    return frozenset(page for _, page in sorted(zip(order, placement.tiers, strict=True))[: len(placement.resident)])


@examples(100)
@given(case=placed(), data=st.data())
def test_others_that_are_near_change_places_with_those_that_were(
    case: tuple[ModelProfile, Policy], data: st.DataObject
) -> None:
    """Nobody is lost: as many are near, all others stream from where they are, or are computed there."""
    model, policy = case
    learned = replace(policy, residents="learned")
    before = place_pages(model, learned)
    resident = drawn_near(before, data.draw(st.permutations(range(len(before.tiers)))))
    after = moved(before, resident)
    assert set(after.resident) == resident
    assert list(after.tiers) == list(before.tiers)
    assert sorted((*after.resident, *after.streamed, *after.computed)) == list(after.tiers)
    assert after.computed == tuple(page for page in before.computed if page not in resident)
    for page, home in after.tiers.items():
        if page not in resident:
            was = before.tiers[page]
            assert home == (was if was != before.fast_tier else "host" if before.host_copies else "disk")
            assert home != "host" or page in offloaded_pages(before)  # it has bytes there
    assert moved(before, frozenset(before.resident)) == before


@examples(100)
@given(case=placed(), data=st.data())
def test_the_ring_and_pinned_memory_hold_any_layer_of_any_residents(
    case: tuple[ModelProfile, Policy], data: st.DataObject
) -> None:
    """Whatever a layer may miss that may come from the disk fits beside the link at once, and all of it into the
    ring."""
    model, policy = case
    before = place_pages(model, replace(policy, residents="learned"))
    after = moved(before, drawn_near(before, data.draw(st.permutations(range(len(before.tiers))))))
    if not before.streamed:
        return
    assert ring_slots(before) >= max(after.most_streamed_per_layer, before.most_per_layer)
    assert ring_slots(before) >= ring_slots(place_pages(model, policy))
    if before.fast_tier == "device":
        from_disk = Counter(page.layer for page in after.streamed if after.tiers[page] == "disk")
        assert pinned_slots(before) >= max(from_disk.values(), default=0)


def test_copies_are_kept_of_what_is_near_a_device_where_others_are_in_host_memory() -> None:
    model = small_model((True, True), experts=4)
    for host, copies in ((3, True), (0, False)):
        policy = replace(small_policy(model, discrete=True, resident=2, host=host), residents="learned")
        placement = place_pages(model, policy)
        assert placement.host_copies == copies
        assert set(offloaded_pages(placement)) == {*placement.on("host"), *(placement.resident if copies else ())}
        static = place_pages(model, replace(policy, residents="static"))
        assert offloaded_pages(static) == static.on("host")
        assert not static.host_copies


@examples(60)
@given(case=placed(), stay=st.integers(0, 20))
def test_a_share_near_leaves_the_others_where_they_stream_from(case: tuple[ModelProfile, Policy], stay: int) -> None:
    model, policy = case
    total = len(pages(model))
    result = with_residents(policy, min(stay, total) / total)
    placement = place_pages(model, result)
    assert len(placement.resident) == min(stay, total)
    if policy.ffn_device == "cpu":
        assert not result.weights.device
    elif policy.weights.host:
        assert result.weights.disk <= policy.weights.disk + 1e-12
    else:
        assert result.weights.host == pytest.approx(0.0, abs=1e-12)


def test_the_table_of_places_counts_residents_in_order() -> None:
    model = small_model((True, False, True), experts=3)
    placement = place_pages(model, small_policy(model, discrete=False, resident=4))
    table = slot_table(placement, model)
    assert (table[1] == -1).all()
    assert [int(table[page.layer, page.expert]) for page in placement.resident] == [0, 1, 2, 3]
    assert (table >= 0).sum() == 4
