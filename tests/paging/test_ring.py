"""Small passes over a store of numbers: every expert that is chosen finds its own page, whatever is kept, guessed,
carried over or thrown out, and nothing is written where somebody reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moelight.core.errors import CheckpointError
from moelight.core.schedule import Lane, Page, Task, TaskKind
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy
from moelight.paging.residency import ModelFacts, ResidencyManager
from moelight.paging.ring import RingPager
from moelight.paging.store import PageStore
from moelight.runtime.host_copy import HostCopy
from moelight.runtime.lanes import SKIPPED, MovedBytes
from moelight.runtime.on_demand import OnDemandPass
from tests.shapes import examples

LAYERS, EXPERTS, NEAR, SIZE = 3, 4, 4, 8
EVERYONE = [Page(layer=layer, expert=expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def mark(page: Page) -> int:
    return 1 + page.layer * EXPERTS + page.expert


@dataclass
class Read:
    """A page on its way: its bytes are garbage until somebody waited, and are written then."""

    page: Page
    into: Tensor
    fails: bool = False
    over: bool = False

    def wait(self) -> None:
        if self.fails:
            raise CheckpointError(f"{self.page.name}: torn")
        if not self.over:
            self.into.fill_(mark(self.page))
        self.over = True

    def done(self) -> bool:
        return self.over


@dataclass
class Batch:
    """What a micro-batch has of its routers."""

    chosen: HostCopy | None = None


@dataclass
class World:
    """A pager over ``ring`` pages of ring, a disk that counts, and guesses that are dictated. ``sizes``: the bytes of
    the pages of each layer."""

    ring: int = EXPERTS
    fast_tier: int = NEAR
    sizes: tuple[int, ...] = (SIZE,) * LAYERS
    reads: list[Read] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)
    torn: set[Page] = field(default_factory=set)

    def __post_init__(self) -> None:
        facts = ModelFacts(
            moe_layers=(True,) * LAYERS,
            num_experts=EXPERTS,
            top_k=1,
            page_bytes=SIZE,
            facts={},
            slot_bytes=self.sizes,
        )
        policy = ExpertPolicy(name="mine", cache=CacheRules(capacity=Capacity(value=self.fast_tier)))
        resident = EVERYONE[:: -(-len(EVERYONE) // self.fast_tier)][: self.fast_tier]
        self.experts, longest = ResidencyManager(policy, facts, resident=resident), max(self.sizes)
        slots = {"experts": [self.sizes[page.layer] for page in resident], "ring": [longest] * self.ring}
        self.store = PageStore(
            {name: torch.zeros(sum(sizes), dtype=torch.uint8) for name, sizes in slots.items()},
            self.experts.table,
            fast_tier="host",
            far=(),
            parts=[range(longest)],
            slots=slots,
            bytes_of=lambda page: self.sizes[page.layer],
        )
        self.store.load(lambda page, slot, _: (slot.fill_(mark(page)), None)[1])
        self.experts.prediction = self.guessed  # type: ignore[method-assign]
        self.pager = RingPager(self.store, self.experts, self.start)
        self.batch = Batch()
        self.reading: list[tuple[Page, Tensor]] = []  # what experts read until the next layer has chosen

    def guessed(self, layer: int) -> np.ndarray:
        return np.array([item for item in self.prediction if self.experts.table[layer, item] < 0], dtype=np.int64)

    def start(self, page: Page, into: Tensor, begin: int) -> Read:
        assert begin == 0
        for other, bytes_ in self.reading:
            assert bytes_.data_ptr() != into.data_ptr(), f"{page.name} overwrites {other.name}"
        for read in self.reads:
            assert read.over or read.fails or read.into.data_ptr() != into.data_ptr(), (
                f"{page.name} and {read.page.name}"
            )
        into.fill_(255)
        self.reads.append(Read(page, into, fails=page in self.torn))
        return self.reads[-1]

    def begin(self, prefetched: dict[Page, int] | None = None, left: dict[Page, int] | None = None) -> OnDemandPass:
        self.pager.begin(prefetched or {}, left)
        return OnDemandPass(self.pager, [self.batch])  # type: ignore[list-item]

    def choose(self, small: OnDemandPass, layer: int, *chosen: int) -> Any:
        """One layer as the lanes run it: routers, fetch, experts; what these find is checked."""
        ids = torch.tensor([[item] for item in chosen], dtype=torch.int32)
        self.batch.chosen = HostCopy(ids, torch.ones(len(chosen), 1))
        self.reading = []
        outcome = small.fetch(Task(kind=TaskKind.READ_EXPERTS, lane=Lane.DISK, layer=layer))
        pages = small.pages(layer)
        here = [expert for expert in set(chosen) if expert not in small.demand(layer).late]
        self.check(pages, layer, here)  # before anything has come
        if isinstance(outcome, MovedBytes) and outcome.rest is not None:
            outcome.rest.wait()
        self.check(pages, layer, sorted(set(chosen)))
        self.reading = [(Page(layer=layer, expert=item), pages[item]) for item in set(chosen)]
        return outcome

    def check(self, result: Any, layer: int, experts: list[int]) -> None:
        for expert in experts:
            page = Page(layer=layer, expert=expert)
            in_page = result[expert][: self.sizes[layer]]
            assert in_page.numel() == self.sizes[layer] and in_page.eq(mark(page)).all(), f"{page.name} is {in_page}"

    def ahead(self, small: OnDemandPass, layer: int, *prediction: int) -> Any:
        self.prediction = list(prediction)
        return small.fetch_ahead(Task(kind=TaskKind.READ_AHEAD, lane=Lane.DISK, layer=layer))

    def count(self, layer: int, expert: int) -> int:
        return sum(read.page == Page(layer=layer, expert=expert) for read in self.reads)


def far(world: World, layer: int) -> list[int]:
    return np.flatnonzero(world.experts.table[layer] < 0).tolist()


def test_only_what_is_missing_is_read_and_once() -> None:
    world = World()
    small = world.begin(left={})
    one, other = far(world, 0)[:2]
    fast_tier = next(iter(set(range(EXPERTS)) - set(far(world, 0))))
    outcome = world.choose(small, 0, one, fast_tier, one, other)
    assert (outcome.bytes, len(world.reads)) == (2 * SIZE, 2)
    assert small.demand(0) is small.demand(0)
    assert world.choose(world.begin(), 0, one, other) is SKIPPED


def test_a_guess_in_flight_that_comes_true_is_waited_for_and_not_read_twice() -> None:
    world = World(ring=2 * EXPERTS)
    small = world.begin(left={})
    world.choose(small, 0, 0)
    right, wrong = far(world, 1)[:2]
    assert world.ahead(small, 1, right, wrong).bytes == 2 * SIZE
    outcome = world.choose(small, 1, right)
    assert (outcome.bytes, world.count(1, right)) == (0, 1)
    stats = world.pager.stats
    assert (stats.ahead_pages, stats.ahead_useful, stats.ahead_late) == (2, 1, 1)
    world.choose(small, 2, 0)
    assert world.pager.ring.in_flight == {}
    assert all(read.over for read in world.reads)  # the wrong one has landed: its place is somebody else's now


def test_what_a_wrong_guess_brought_is_found_later() -> None:
    world = World(ring=2 * EXPERTS)
    small = world.begin(left={})
    wrong = far(world, 1)[0]
    world.choose(small, 0, 0)
    world.ahead(small, 1, wrong)
    world.choose(small, 1, *(set(range(EXPERTS)) - set(far(world, 1))))
    world.choose(small, 2, 0)
    world.choose(world.begin(), 1, wrong)
    assert world.count(1, wrong) == 1
    assert world.pager.stats.found == 1


def test_a_layer_that_has_chosen_is_not_guessed_about() -> None:
    world = World()
    small = world.begin(left={})
    world.choose(small, 0, 0)
    assert world.ahead(small, 0, *far(world, 0)) is SKIPPED


@pytest.mark.parametrize("needed", [True, False])
def test_a_guess_that_cannot_be_read_matters_only_to_who_needs_it(needed: bool) -> None:
    world = World()
    small = world.begin(left={})
    world.choose(small, 0, 0)
    torn, fine = far(world, 1)[:2]
    world.torn = {Page(layer=1, expert=torn)}
    world.ahead(small, 1, torn)
    if needed:
        with pytest.raises(CheckpointError, match=f"1:e{torn}: torn"):
            world.choose(small, 1, torn)
        return
    world.choose(small, 1, fine)
    world.choose(small, 2, 0)
    world.torn = set()
    world.choose(world.begin(), 1, torn)
    assert world.count(1, torn) == 2
    world.pager.land()


def test_pages_of_a_pass_of_whole_layers_are_used_where_they_lie() -> None:
    """Those that it fetched ahead for the next one, and those that it used last."""
    world = World()
    ahead, used = Page(layer=0, expert=far(world, 0)[0]), Page(layer=2, expert=far(world, 2)[-1])
    for position, page in ((1, ahead), (3, used)):
        world.store.ring[position].page.fill_(mark(page))
    small = world.begin({ahead: 1}, {used: 3})
    world.ahead(small, 0, ahead.expert)
    assert world.choose(small, 0, ahead.expert) is SKIPPED
    assert world.choose(small, 2, used.expert) is SKIPPED
    assert world.reads == []


def test_a_page_goes_from_the_ring_into_a_shorter_slot_of_its_own() -> None:
    """One that was guessed and is still coming, and one that a pass of whole layers left; neither is read again."""
    world = World(ring=2 * EXPERTS, sizes=(SIZE, 2 * SIZE, SIZE))
    used = Page(layer=2, expert=far(world, 2)[-1])
    world.store.ring[3].page.fill_(mark(used))
    small = world.begin(left={used: 3})
    world.choose(small, 1, 0)
    guess = far(world, 2)[0]
    world.ahead(small, 2, guess)
    world.choose(small, 2, guess, used.expert)
    assert (world.count(2, guess), world.count(2, used.expert)) == (1, 0)
    stays = [expert for expert in (guess, used.expert) if world.experts.table[2, expert] >= 0]
    assert stays, "the cache holds as many of the layer as before"
    for expert in stays:
        memory = world.store.resident[world.experts.table[2, expert]].page
        assert memory.numel() == SIZE and memory.eq(mark(Page(layer=2, expert=expert))).all()


def test_what_is_held_by_the_last_layer_is_let_go_by_the_first_of_the_next_pass() -> None:
    world = World()
    for number in range(5):
        small = world.begin(left=None if number else {})
        for layer in range(LAYERS):
            world.choose(small, layer, 0, 1)
            assert set(world.experts.residency.cache._leases) <= {layer * EXPERTS, layer * EXPERTS + 1}
    world.pager.land()
    assert not world.experts.residency.cache._leases


def test_a_pass_may_begin_while_the_one_before_chooses() -> None:
    """As on a device, where it is launched ahead: what the first still takes and gives is not the second's."""
    world = World()
    first = world.begin(left={})
    world.choose(first, 0, 0, 3)
    second = world.begin()
    world.ahead(first, 1, *range(EXPERTS))
    world.choose(first, 1, 2, 3)
    world.ahead(first, 2, *range(EXPERTS))
    world.choose(first, 2, 2, 3)
    for layer in range(LAYERS):
        world.choose(second, layer, 1, 2, 3)
        world.ahead(second, layer + 1, *range(EXPERTS)) if layer + 1 < LAYERS else None
    _no_place_is_lost(world)


def _no_place_is_lost(world: World) -> None:
    pager = world.pager
    used = [
        *pager.ring.unused,
        *pager._passing,
        *pager.ring.in_flight,
    ]
    assert sorted((*used, *pager.prefetched.values())) == list(range(world.ring))
    memory = [memory.page.data_ptr() for memory in (*world.store.resident, *world.store.ring)]
    assert len(set(memory)) == len(memory)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    some = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS)
    one = st.tuples(st.sampled_from(["pass", "pass", "pass", "whole"]), st.integers(0, 6), some)
    return draw(st.lists(one, min_size=1, max_size=7))


@examples(120)
@given(
    plan=steps(),
    ring=st.integers(EXPERTS, 2 * EXPERTS + 1),
    fast_tier=st.integers(1, 9),
    sizes=st.sampled_from([(SIZE,) * LAYERS, (SIZE, 2 * SIZE, SIZE), (2 * SIZE, SIZE, 3 * SIZE)]),
    data=st.data(),
)
def test_whatever_is_chosen_every_expert_finds_its_page(
    plan: list[tuple[str, int, list[int]]], ring: int, fast_tier: int, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    """Guesses right, wrong and torn, passes of whole layers between; no page of the ring is ever two pages' place."""
    world, left = World(ring=ring, fast_tier=fast_tier, sizes=sizes), dict[Page, int]()
    some = st.lists(st.integers(0, EXPERTS - 1), max_size=EXPERTS, unique=True)
    prefetched = dict[Page, int]()
    after_whole = True
    for kind, number, chosen in plan:
        if kind == "whole":
            world.pager.land()
            offloaded_pages = [page for page in EVERYONE if world.experts.table[page.layer, page.expert] < 0]
            first = [page for page in offloaded_pages if page.layer == 0]
            places = dict(zip([*first, *(page for page in offloaded_pages if page.layer)], range(ring), strict=False))
            for page, position in places.items():
                world.store.ring[position].page.fill_(mark(page))
            prefetched = {page: places[page] for page in first if page in places and number % 2}
            left = {page: position for page, position in places.items() if page not in prefetched}
            after_whole, world.reading = True, []
            continue
        small = world.begin(prefetched if after_whole else {}, left if after_whole else None)
        after_whole, prefetched, left = False, {}, {}
        for layer in range(LAYERS):
            world.torn = set()
            world.choose(small, layer, *((item + layer * number) % EXPERTS for item in chosen))
            _no_place_is_lost(world)
            if layer + 1 < LAYERS:
                coming = (layer + 1) * number
                selected = {Page(layer=layer + 1, expert=(item + coming) % EXPERTS) for item in chosen}
                world.torn = {page for page in EVERYONE if number == 3 and page not in selected}
                world.ahead(small, layer + 1, *data.draw(some))
                for read in world.reads[-data.draw(st.integers(0, 2)) :]:
                    if not read.fails:
                        read.wait()
    world.pager.land()
