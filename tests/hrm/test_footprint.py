"""What is announced: every purpose once, sizes that are those of the things themselves, totals that add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from moelight.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, MIXED_FLOAT16, DType
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.footprint import Footprint, footprint, kv_blocks, pass_tokens, pinned_slots, ring_slots
from moelight.hrm.placement import in_turn, place_pages, unevenness
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import dense_tensors, pages
from tests.shapes import examples, placed, small_model, small_policy, with_pages


def of(model: ModelProfile, policy: Policy, dtype: DType = FLOAT32) -> Footprint:
    return footprint(model, policy, dtype=dtype)


@examples(150)
@given(case=placed())
def test_every_purpose_is_announced_once_and_tiers_sum(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    taken = of(model, policy)
    assert all(count == 1 for count in Counter(arena.purpose for arena in taken.arenas).values())
    assert all(arena.bytes >= 0 for arena in taken.arenas)
    tiers = {arena.tier for arena in taken.arenas}
    assert tiers == ({"device", "host"} if policy.ffn_device == "gpu" else {"host"})
    assert sum(taken.total(tier) for tier in tiers) == sum(taken.bytes_of(a.purpose) for a in taken.arenas)


@examples(150)
@given(case=placed())
def test_pages_and_rings_have_the_slots_they_need(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    taken, placement = of(model, policy), place_pages(model, policy)
    slot, on_host = costs.page_slot_bytes(model, FLOAT32), len(placement.on("host"))
    assert slot >= costs.page_bytes(model, FLOAT32)
    assert slot % costs.PAGE_ALIGNMENT == 0
    assert taken.bytes_of("experts") == len(placement.resident) * slot
    assert taken.bytes_of("ring") == 2 * placement.most_streamed_per_layer * slot
    if policy.ffn_device == "gpu":
        assert taken.bytes_of("host_experts") == on_host * slot
        assert taken.bytes_of("pinned_ring") == pinned_slots(placement) * slot
        assert 0 < pinned_slots(placement) <= ring_slots(placement) or not placement.streamed
    else:
        assert "host_experts" not in {arena.purpose for arena in taken.arenas}


@pytest.mark.parametrize("discrete", [True, False])
def test_a_page_that_stays_trades_its_ring_slots_for_a_home(discrete: bool) -> None:
    """With everything resident there is no ring, and one page away from that there are two slots of it."""
    model = small_model((True, True, True), experts=4)
    slot = costs.page_slot_bytes(model, FLOAT32)
    sizes = [of(model, small_policy(model, discrete=discrete, resident=resident)) for resident in range(13)]
    rings = [taken.bytes_of("ring") // slot for taken in sizes]
    assert rings == [2 * -(-(12 - resident) // 3) for resident in range(13)]
    assert [taken.bytes_of("experts") // slot for taken in sizes] == list(range(13))


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_pages_that_stay_take_their_own_bytes(discrete: bool, learned: bool) -> None:
    """What stays is the sum of its own pages; only what pages of all layers pass through has the largest slots."""
    bytes_of_layer = {0: 40_000, 1: 8_192, 3: 12_289}
    model = with_pages(small_model((True, True, False, True), experts=5), tuple(bytes_of_layer.values()))
    slots = {0: 40_960, 1: 8_192, 3: 16_384}
    for resident in range(1, 16):
        policy = small_policy(model, discrete=discrete, resident=resident, host=(15 - resident) // 2 if discrete else 0)
        policy = replace(policy, residents="learned" if learned else "static")
        taken, placement = of(model, policy), place_pages(model, policy)
        assert taken.bytes_of("experts") == sum(slots[page.layer] for page in placement.resident)
        assert taken.bytes_of("ring") == ring_slots(placement) * 40_960
        assert len(taken.slots.get("experts", ())) == len(placement.resident)
        if discrete:
            copies = placement.resident if placement.host_copies else ()
            assert taken.bytes_of("host_experts") == sum(slots[page.layer] for page in (*placement.on("host"), *copies))
            assert taken.bytes_of("pinned_ring") == pinned_slots(placement) * 40_960
    every = of(model, small_policy(model, discrete=discrete, resident=15))
    assert every.bytes_of("experts") == 5 * sum(slots.values()) and every.bytes_of("ring") == 0


def test_any_pages_in_a_row_differ_little_from_average_ones() -> None:
    """Where large layers are spread out, as by `in_turn`, any pages take about the average."""
    sizes = [40_960 if layer in (3, 4, 5, 6) else 20_480 for layer in range(32)]
    turn, mean = in_turn(range(32)), sum(sizes) / 32
    rows = [sizes[layer] for layer in turn] * 2
    worst = max(abs(sum(rows[a:b]) - (b - a) * mean) for a in range(32) for b in range(a, 64))
    assert unevenness(sizes) == pytest.approx(worst)
    assert worst < 2 * 20_480
    assert unevenness([12_288, 0, 12_288, 12_288]) == 0.0


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_dense_weights_and_cache_are_what_is_stored(dtype: DType) -> None:
    model = small_model((True, False), tie=True)
    taken = of(model, small_policy(model, discrete=True), dtype)
    elements = sum(tensor.elements for tensor in dense_tensors(model))
    count = len(list(dense_tensors(model)))
    assert 0 <= taken.bytes_of("dense") - elements * dtype.itemsize < count * costs.TENSOR_ALIGNMENT
    kv_token = 2 * model.num_layers * model.attention.num_kv_heads * model.attention.head_dim * dtype.itemsize
    assert taken.bytes_of("kv") == 512 * kv_token


def test_mixed_precision_widens_hidden_states_and_outputs_of_experts_alone() -> None:
    model = small_model()
    policy = replace(small_policy(model, discrete=True, resident=3), ffn_device="split")
    plain, mixed = (of(model, policy, dtype) for dtype in (FLOAT16, MIXED_FLOAT16))
    wider = {arena.purpose for arena, other in zip(mixed.arenas, plain.arenas, strict=True) if arena != other}
    assert wider == {"hidden", "work"}
    assert mixed.bytes_of("hidden") == 2 * plain.bytes_of("hidden")
    tokens = policy.micro_batch_tokens * model.router.top_k + costs.ROW_PADDING
    assert mixed.bytes_of("work") - plain.bytes_of("work") == pytest.approx(2 * tokens * model.hidden_size, abs=64)


def test_the_cache_is_whole_blocks() -> None:
    model = small_model()
    policy = replace(small_policy(model, discrete=False), kv_tokens=33, kv_block_size=32)
    assert kv_blocks(policy) == 2
    assert of(model, policy).bytes_of("kv") == 64 * costs.kv_token_bytes(model, FLOAT32)


def test_hidden_states_and_crossings_hold_a_whole_pass() -> None:
    model = small_model()
    policy = small_policy(model, discrete=True)
    taken, maximum = of(model, policy), pass_tokens(policy)
    assert maximum >= policy.batch_size + policy.micro_batch_tokens
    assert taken.bytes_of("hidden") == maximum * model.hidden_size * 4
    crossing = costs.qkv_bytes(model, FLOAT32, maximum) + costs.hidden_bytes(model, FLOAT32, maximum)
    assert taken.bytes_of("crossing") == crossing


def test_larger_micro_batches_and_more_sequences_never_take_less() -> None:
    model = small_model()
    policy = small_policy(model, discrete=True)
    base = of(model, policy)
    for wider in (
        replace(policy, micro_batch_tokens=64),
        replace(policy, batch_size=64),
        replace(policy, micro_batch_size=16),
        replace(policy, kv_tokens=1024),
    ):
        taken = of(model, wider)
        assert all(taken.total(tier) >= base.total(tier) for tier in ("device", "host"))


def test_a_page_is_gate_up_and_down() -> None:
    model = small_model(experts=2)
    assert costs.page_bytes(model, FLOAT32) == 3 * 8 * 12 * 4
    assert costs.page_bytes(model, BFLOAT16) == 3 * 8 * 12 * 2
    assert len(pages(model)) == 4
