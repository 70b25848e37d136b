"""Homes of pages: the shares exactly, page by page, and evenly over the layers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.policy import Policy, Shares
from moelight.hrm.placement import Placement, place
from moelight.profiles.model import ModelProfile
from moelight.profiles.stored import pages
from tests.shapes import examples, models, placed, small_model, small_policy


def per_layer(model: ModelProfile, placement: Placement, tier: str) -> list[int]:
    counts = Counter(page.layer for page in placement.on(tier))
    return [counts[layer] for layer, sparse in enumerate(model.moe_layers) if sparse]


@examples(200)
@given(case=placed())
def test_shares_are_realised_exactly(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    placement, total = place(model, policy), len(pages(model))
    assert set(placement.homes) == set(pages(model))
    for tier in ("device", "host", "disk"):
        assert len(placement.on(tier)) == round(getattr(policy.weights, tier) * total)


@examples(200)
@given(case=placed())
def test_no_layer_has_more_than_one_page_more_than_another(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    placement = place(model, policy)
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
    placement = place(model, policy)
    assert placement.near == ("device" if policy.ffn_device == "gpu" else "host")
    assert sorted((*placement.resident, *placement.streamed)) == list(pages(model))
    assert list(placement.streamed) == sorted(placement.streamed)
    assert all(placement.homes[page] == placement.near for page in placement.resident)


@examples(200)
@given(model=models(), shares=st.lists(st.integers(0, 7), min_size=3, max_size=3).filter(any))
def test_any_shares_place_every_page_within_one_page_of_what_was_asked(model: ModelProfile, shares: list[int]) -> None:
    """A share of zero gets nothing, and rounding never makes or loses a page."""
    device, host, disk = (share / sum(shares) for share in shares)
    weights = Shares(device=device, host=host, disk=disk)
    policy = Policy(model="m", kv_tokens=64, ffn_device="gpu", weights=weights)
    placement, total = place(model, policy), len(pages(model))
    for tier, share in (("device", device), ("host", host), ("disk", disk)):
        count = len(placement.on(tier))
        assert abs(count - share * total) <= 1
        assert share > 0 or count == 0
    assert len(placement.homes) == total


@pytest.mark.parametrize("experts", [1, 3, 5])
def test_halves_of_an_odd_number_of_pages(experts: int) -> None:
    model = small_model((True,), experts=experts)
    policy = Policy(model="m", kv_tokens=64, ffn_device="gpu", weights=Shares(device=0.5, disk=0.5))
    placement = place(model, policy)
    assert len(placement.on("host")) == 0
    assert len(placement.on("device")) + len(placement.on("disk")) == experts


def test_the_first_experts_of_every_layer_stay() -> None:
    model = small_model((True, False, True), experts=3)
    placement = place(model, small_policy(model, discrete=True, near=3, host=2))
    homes = {(page.layer, page.expert): home for page, home in placement.homes.items()}
    assert homes == {
        (0, 0): "device",
        (2, 0): "device",
        (0, 1): "device",
        (2, 1): "host",
        (0, 2): "host",
        (2, 2): "disk",
    }
