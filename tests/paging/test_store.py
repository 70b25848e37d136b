"""The page store: every page's bytes where its home or its place in the stream says, whatever the position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy
from moelight.core.schedule import Buffer, Page
from moelight.hrm import costs
from moelight.hrm.footprint import footprint, offloaded_pages
from moelight.hrm.placement import Placement, moved, place_pages, slot_table
from moelight.paging.arena import allocate
from moelight.paging.store import PageStore
from moelight.profiles.model import ModelProfile
from tests.shapes import PARTS_OF_4_KIB, examples, placed, small_model, small_policy, with_pages

CPU = torch.device("cpu")


def mark(page: Page) -> float:
    """A number that only this page is filled with."""
    return 1.0 + page.layer * 100 + page.expert


def fill(page: Page, slot: Tensor, begin: int = 0) -> None:
    assert begin == 0
    slot.view(torch.float32).fill_(mark(page))


def open_store(
    model: ModelProfile, policy: Policy, *, part_bytes: int = costs.PART_BYTES
) -> tuple[PageStore, Placement, dict[str, Tensor]]:
    placement, announced = place_pages(model, policy), footprint(model, policy, dtype=FLOAT32)
    arenas, stored = allocate(announced, CPU), costs.page_dtype(model, FLOAT32)
    store = PageStore(
        arenas,
        slot_table(placement, model),
        fast_tier=placement.fast_tier,
        far=offloaded_pages(placement) if placement.fast_tier == "device" else (),
        parts=costs.page_parts(costs.page_bytes(model, stored), part_bytes),
        slots=announced.slots,
        bytes_of=None if model.stored is None else lambda page: model.stored.pages[page.layer],
    )
    store.follow(placement.streamed, placement.computed)
    return store, placement, arenas


@examples(90)
@given(
    case=placed(),
    part_bytes=st.sampled_from((costs.PAGE_ALIGNMENT, costs.PART_BYTES)),
    sizes=st.none() | st.lists(st.sampled_from((2400, 8192, 12288, 12292)), min_size=4, max_size=4),
    data=st.data(),
)
def test_experts_are_found_wherever_they_are(
    case: tuple[ModelProfile, Policy], part_bytes: int, sizes: list[int] | None, data: st.DataObject
) -> None:
    """Stream pages through the ring for several passes, part by part and in any order of the parts: at each layer every
    expert's page holds that expert, in a slot of its layer's size where pages stay."""
    model, policy = case
    model = model if sizes is None else with_pages(model, sizes)
    store, placement, _ = open_store(model, policy, part_bytes=part_bytes)
    store.load(fill)
    parts = len(costs.page_parts(costs.page_bytes(model, costs.page_dtype(model, FLOAT32)), part_bytes))
    position = data.draw(st.integers(0, 50)) * len(placement.streamed) * parts
    for _ in range(3):
        k = 0
        for layer in range(model.num_layers):
            while k < len(placement.streamed) and placement.streamed[k].layer == layer:
                for part in data.draw(st.permutations(range(parts))):
                    slot = store.slot(Buffer(space="ring", index=k * parts + part), position)
                    fill(placement.streamed[k], slot[: store.bytes_of(replace(placement.streamed[k], part=part))])
                k += 1
            if model.moe_layers[layer]:
                for expert, page in enumerate(store.pages_at(store.memory_of_experts(position)[layer])):
                    assert page is not None
                    size = sum(store.bytes_of(Page(layer=layer, expert=expert, part=part)) for part in range(parts))
                    assert page[:size].view(torch.float32).eq(mark(Page(layer=layer, expert=expert))).all()
        position += len(placement.streamed) * parts


@examples(40)
@given(case=placed())
def test_only_homes_in_memory_are_loaded(case: tuple[ModelProfile, Policy]) -> None:
    model, policy = case
    store, placement, arenas = open_store(model, policy)
    read: list[Page] = []
    store.load(lambda page, slot, begin: (read.append(page), fill(page, slot, begin))[0])
    assert sorted(read) == sorted((*placement.on("device"), *placement.on("host")))
    if policy.ffn_device == "gpu":
        for page in placement.on("host"):
            assert store.offloaded_tier(page).view(torch.float32).eq(mark(page)).all()
            assert (
                store.offloaded_tier(page).untyped_storage().data_ptr()
                == arenas["host_experts"].untyped_storage().data_ptr()
            )


def test_a_part_of_a_page_at_home_is_found_where_the_page_has_it() -> None:
    """Host memory and the ring agree on where a part lies, and the parts of a page are the page."""
    model = small_model((True, True), experts=3, width=PARTS_OF_4_KIB)
    store, placement, _ = open_store(model, small_policy(model, discrete=True, host=4), part_bytes=4096)
    store.load(lambda page, slot, begin: (None, slot.copy_(torch.arange(slot.numel()) % 251))[0])
    (page, *_), size = placement.on("host"), costs.page_bytes(model, FLOAT32)
    full = torch.arange(size).remainder(251).to(torch.uint8)
    result = [store.offloaded_tier(replace(page, part=part)) for part in range(3)]
    assert torch.equal(torch.cat(result), full)
    assert [store.begin(replace(page, part=part)) for part in range(3)] == [0, 4096, 8192]
    for part, piece in enumerate(result):
        assert store.slot(Buffer(space="ring", index=3 + part), 0).numel() == piece.numel()
        assert store.slot(Buffer(space="pinned", index=part), 3).numel() == piece.numel()


@pytest.mark.parametrize("discrete", [True, False])
def test_slots_are_pages_long_and_named_relative_to_the_position(discrete: bool) -> None:
    model = small_model((True, True), experts=3)
    store, _, arenas = open_store(model, small_policy(model, discrete=discrete, resident=2))
    spaces = {"ring": "ring", "pinned": "pinned_ring"} if discrete else {"ring": "ring"}
    stride = costs.page_slot_bytes(model, FLOAT32)
    for space, purpose in spaces.items():
        count = arenas[purpose].numel() // stride
        for position in (0, 1, 7):
            for index in range(2 * count):
                slot = store.slot(Buffer(space=space, index=index), position)
                assert slot.numel() == costs.page_bytes(model, FLOAT32)
                assert slot.data_ptr() == arenas[purpose].data_ptr() + (position + index) % count * stride


def test_equal_phases_find_the_same_pages_in_the_same_slots() -> None:
    model = small_model((True, True, True), experts=3)
    store, _, _ = open_store(model, small_policy(model, discrete=True, resident=2))
    positions = range(0, 70, 7)
    by_phase: dict[int, list[int]] = {}
    for position in positions:
        where = store.memory_of_experts(position)[1].tolist()
        assert by_phase.setdefault(store.phase(position), where) == where
    assert len(by_phase) > 1


def test_nothing_streams_where_everything_stays() -> None:
    model = small_model()
    store, placement, arenas = open_store(model, small_policy(model, discrete=False, resident=8))
    assert arenas["ring"].numel() == 0
    assert store.phase(12345) == 0
    assert not placement.streamed


def test_pages_of_a_device_are_read_through_one_buffer_of_the_host() -> None:
    """Files are read into host memory; what lives on another device is copied there."""
    model = small_model()
    policy = small_policy(model, discrete=True, resident=5, host=3)
    placement = place_pages(model, policy)
    size, slot = costs.page_bytes(model, FLOAT32), costs.page_slot_bytes(model, FLOAT32)
    arenas = {
        "experts": torch.empty(5 * slot, dtype=torch.uint8, device="meta"),
        "ring": torch.empty(0, dtype=torch.uint8, device="meta"),
        "host_experts": torch.empty(3 * slot, dtype=torch.uint8),
        "pinned_ring": torch.empty(0, dtype=torch.uint8),
    }
    store = PageStore(
        arenas,
        slot_table(placement, model),
        fast_tier="device",
        far=offloaded_pages(placement),
        parts=[range(size)],
        slots={"experts": [slot] * 5, "host_experts": [slot] * 3},
    )
    targets: list[int] = []

    def read(page: Page, into: Tensor, begin: int) -> None:
        assert begin == 0
        assert into.device.type == "cpu"
        assert into.numel() == size
        if placement.tiers[page] == "device":
            targets.append(into.data_ptr())

    store.load(read)
    assert len(targets) == 5
    assert len(set(targets)) == 1


def learned_store(model: ModelProfile, policy: Policy) -> tuple[PageStore, Placement]:
    store, _, _ = open_store(model, replace(policy, residents="learned"))
    store.load(fill)
    return store, place_pages(model, replace(policy, residents="learned"))


def test_a_resident_page_with_a_copy_in_host_memory_is_loaded_into_both() -> None:
    model = small_model()
    store, placement = learned_store(model, small_policy(model, discrete=True, resident=5, host=3))
    assert placement.host_copies and placement.resident
    for page in placement.resident:
        assert store.offloaded_tier(page).view(torch.float32).eq(mark(page)).all()
        assert store.resident[store.table[page.layer, page.expert]].page.view(torch.float32).eq(mark(page)).all()


@examples(60)
@given(case=placed(), data=st.data())
def test_experts_are_found_once_others_are_near(case: tuple[ModelProfile, Policy], data: st.DataObject) -> None:
    """Pages change places with those near, by way of the ring; then the stream is laid out anew, and its layers may be
    of any sizes."""
    model, policy = case
    store, before = learned_store(model, policy)
    addresses = [page.data_ptr() for page in store.memory]
    experts, resident = model.experts.num_experts, set(before.resident)
    for _ in range(data.draw(st.integers(0, 6)) if before.streamed else 0):
        far = [page for page in before.tiers if page not in resident]
        gone, come = (
            (data.draw(st.sampled_from(item)) for item in (sorted(resident), far)) if resident else (None, None)
        )
        if gone is None:
            break
        slot, ring = int(store.table[gone.layer, gone.expert]), data.draw(st.integers(0, len(store.ring) - 1))
        fill(come, store.ring[ring].page)
        store.swap(slot, ring)
        store.table[come.layer, come.expert], store.table[gone.layer, gone.expert] = slot, -1
        resident = resident - {gone} | {come}
        assert store.ring[ring].page.view(torch.float32).eq(mark(gone)).all()
    after = moved(before, resident)
    store.follow(after.streamed, after.computed)
    position = data.draw(st.integers(0, 9)) * len(after.streamed)
    for k, page in enumerate(after.streamed):
        fill(page, store.slot(Buffer(space="ring", index=k), position))
        last = k + 1 == len(after.streamed) or after.streamed[k + 1].layer != page.layer
        result = store.pages_at(store.memory_of_experts(position)[page.layer]) if last else []
        for expert, memory in enumerate(result):
            here = Page(layer=page.layer, expert=expert)
            assert (memory is None) == (here in after.computed)
            assert memory is None or memory.view(torch.float32).eq(mark(here)).all()
    assert [page.data_ptr() for page in store.memory] == addresses, "memory never moves"
    for layer in range(model.num_layers):
        computed = store.computed_experts(layer, experts)
        assert (layer in store.layers_computed) == any(page is not None for page in computed)
        for expert, weights in enumerate(computed):
            assert weights is None or weights[0].eq(mark(Page(layer=layer, expert=expert))).all()


def test_exchanged_pages_take_their_parts_along() -> None:
    model = small_model((True, True), experts=3, width=PARTS_OF_4_KIB)
    store, _, _ = open_store(model, small_policy(model, discrete=True, resident=2, host=4), part_bytes=4096)
    resident, ring = store.resident[1], store.ring[2]
    begin = resident.page.data_ptr()
    store.swap(1, 2)
    assert (store.resident[1], store.ring[2]) == (ring, resident)
    starts = [store.slot(Buffer(space="ring", index=6 + part), 0).data_ptr() - begin for part in range(3)]
    assert starts == [0, 4096, 8192]
