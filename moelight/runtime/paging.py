"""Small passes: which pages a layer's experts need once its routers have chosen, and how those that are not near come.

Asks ``experts`` which of them stay; sees to it that no slot is written while an expert reads it or a page is on its way
to it. Refuses to know what makes an expert worth keeping, and in which order tasks run.

What is near and chosen in a layer is held (leased) until the experts of the next layer have chosen: until then nothing
else is written to its slots. That covers every reader, for the routers of the next layer run behind the experts of this
one. What is not to stay near, and what is fetched ahead on a guess, lies in slots of the ring, which small passes have
to themselves; a guess that comes true and is to stay takes its buffer along (`PageStore.swap`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.core.schedule import Page, Task, TaskKind
from moelight.experts.near import NearExperts
from moelight.memory.pages import Arriving, ExpertWeights, PageStore, StartPage
from moelight.models.decoder import Watch
from moelight.models.moe import Experts
from moelight.runtime.lanes import SKIPPED, Moved, Outcome
from moelight.runtime.microbatch import MicroBatch, present

Leave = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # layer, missing ids, tokens of each -> the CPU's


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One pass as its tasks see it.

    Attributes:
        position: where the stream of pages stands when it begins.
        small: its choices, where only routed pages move.
        watch: to be told who is routed where, if anybody wants to know.
        residents: a number that changes whenever other pages are near.
    """

    micro_batches: Sequence[MicroBatch]
    position: int
    small: SmallPass | None = None
    watch: Watch | None = None
    residents: int = 0


@dataclass(slots=True)
class Errand:
    """One page that is to come into ``into``, by way of page ``pinned`` of pinned memory where it crosses from disk."""

    page: Page
    into: Tensor
    pinned: int | None = None


@dataclass(slots=True)
class Choice:
    """What one layer of one pass needs.

    Attributes:
        experts: the weights of every expert that is computed beside the pages; None for the others.
        late: those of them that are not there yet when the choice is made.
        on_cpu: weights of those that the CPU computes where they lie, beside a GPU; empty where it computes none.
        errands: what must be fetched; ``awaited``: what is on its way already and must be there.
    """

    experts: Experts
    late: frozenset[int]
    on_cpu: tuple[ExpertWeights | None, ...]
    errands: list[Errand] = field(default_factory=list)
    awaited: list[Arriving] = field(default_factory=list)


@dataclass(slots=True)
class _Guess:
    """A page that was fetched ahead, into page ``ring`` of the ring."""

    page: Page
    ring: int
    arriving: Arriving | None
    since_s: float


class Pager:
    """The pages of small passes. ``leave``: which missing experts are left to the CPU, where it may compute them where
    they lie (None: none).

    Its state is that of the last choice made, whichever pass made it: one pass may be launched while the one before it
    still chooses.

    Attributes:
        carried: pages that a pass of whole layers left in the ring, and where; ``guesses``: those fetched ahead.
        free: pages of the ring that nobody needs; ``passing``: those that the last choice reads.
        held: what the last choice leased.
    """

    def __init__(
        self,
        store: PageStore,
        near: NearExperts,
        start_page: StartPage,
        *,
        leave: Leave | None = None,
    ) -> None:
        self.store, self.near = store, near
        self.start_page, self.num_experts, self.leave = start_page, store.table.shape[1], leave
        self.guesses: list[_Guess] = []
        self.carried: dict[Page, int] = {}
        self.free, self.passing = list(range(len(store.ring_pages))), list[int]()
        self.held: tuple[int, np.ndarray] | None = None
        self.stall = Stall()
        self.turn = threading.Lock()

    def begin(self, micro_batches: Sequence[MicroBatch], carried: Mapping[Page, int]) -> SmallPass:
        """A pass of ``micro_batches``. ``carried``: pages that the pass before left in the ring, and where; none if
        that was a small one."""
        with self.turn:
            self.carried |= carried
            self.free = [place for place in self.free if place not in carried.values()]
        return SmallPass(self, micro_batches)

    def land(self) -> None:
        """Wait for everything that is on its way, wanted or not, once all passes have chosen: the ring is empty then,
        and nobody reads what is near."""
        self.settle(keep=None)
        self.carried, self.free, self.passing = {}, list(range(len(self.store.ring_pages))), []
        if self.held is not None:
            self.near.release(*self.held)
            self.held = None

    def settle(self, keep: int | None) -> list[int]:
        """Wait for guesses of other layers than ``keep``, which nobody wants any more; the pages of the ring that are
        free then. Whether one could be read is no matter: who needs its page reads it again."""
        gone = [guess for guess in self.guesses if guess.page.layer != keep]
        for guess in gone:
            if guess.arriving is not None:
                with suppress(MoelightError):
                    guess.arriving.wait()
        self.guesses = [guess for guess in self.guesses if guess.page.layer == keep]
        return [guess.ring for guess in gone]


@dataclass(slots=True)
class Stall:
    """What fetching took: ``pages`` and their seconds on the way, one after the other; what guesses spared."""

    pages: int = 0
    seconds: float = 0.0
    ahead_pages: int = 0
    ahead_useful: int = 0
    ahead_late: int = 0
    spared_s: float = 0.0

    @property
    def page_s(self) -> float:
        """Seconds of one page."""
        return self.seconds / self.pages if self.pages else 0.0

    def came_true(self, waited_s: float, *, there: bool) -> None:
        """A guess was right; it had been on its way for ``waited_s``, and was there or not."""
        self.ahead_useful += 1
        self.ahead_late += not there
        self.spared_s += self.page_s if there else min(waited_s, self.page_s)


class SmallPass:
    """One pass on its way: each layer's choice, made once, by whoever asks first."""

    def __init__(self, pager: Pager, micro_batches: Sequence[MicroBatch]) -> None:
        self._pager, self._micro_batches = pager, micro_batches
        self._choices: dict[int, Choice] = {}

    def choice(self, layer: int) -> Choice:
        """What ``layer`` needs, whose routers were the last to run."""
        with self._pager.turn:
            if layer not in self._choices:
                self._choices[layer] = self._choose(layer)
            return self._choices[layer]

    def fetch(self, task: Task) -> Outcome:
        """Bring what the layer of ``task`` misses over its lane."""
        choice = self.choice(task.layer)
        return self._read(choice) if task.kind is TaskKind.READ_EXPERTS else self._send(choice)

    def fetch_ahead(self, task: Task) -> Outcome:
        """Begin to bring what the layer of ``task`` may choose, the layer before having chosen; nobody waits for it but
        who turns out to need it."""
        pager, store, moved = self._pager, self._pager.store, 0
        with self._pager.turn:
            if task.layer in self._choices:
                return SKIPPED
            most = int((store.table[task.layer] < 0).sum())  # of which each may need a page of the ring in its turn
            for expert in pager.near.guess(task.layer).tolist():
                if len(pager.free) + len(pager.passing) <= most:
                    break
                page = Page(layer=task.layer, expert=expert)
                far = store.far_page(page)
                if not pager.free or page in pager.carried or (store.near == "device" and far is None):
                    continue
                ring, arriving = pager.free.pop(), None
                if far is not None:
                    store.ring_pages[ring].copy_(far, non_blocking=True)
                else:
                    arriving = pager.start_page(page, store.ring_pages[ring], 0)
                pager.guesses.append(_Guess(page, ring, arriving, time.perf_counter()))
                moved += store.page_bytes
                pager.stall.ahead_pages += 1
        return Moved(moved) if moved else SKIPPED

    def foresee(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Tell that ``layer`` may choose ``ids`` [T, k], with ``weights``."""
        with self._pager.turn:
            self._pager.near.hint(layer, ids, weights)

    def _choose(self, layer: int) -> Choice:
        pager, store, near = self._pager, self._pager.store, self._pager.near
        ids, weights = routed_of(self._micro_batches)
        past = [page for page in pager.carried if page.layer != layer]
        pager.free += [*pager.passing, *pager.settle(keep=layer), *(pager.carried.pop(page) for page in past)]
        pager.passing = []
        if pager.held is not None:
            near.release(*pager.held)
        on_cpu = self._leave_to_cpu(layer, ids)
        found = near.choose(layer, ids, weights, leave=on_cpu)
        held = np.concatenate([found.hits, found.misses[found.slots >= 0]])
        near.lease(layer, held)
        pager.held = (layer, held)
        choice = Choice(experts=Experts(), late=frozenset(found.misses.tolist()), on_cpu=self._far_views(layer, on_cpu))
        experts: list[ExpertWeights | None] = [None] * pager.num_experts
        for expert, slot in zip(found.hits.tolist(), found.hit_slots.tolist(), strict=True):
            experts[expert] = store.near_views[slot]
        for expert, slot in zip(found.misses.tolist(), found.slots.tolist(), strict=True):
            experts[expert] = self._bring(Page(layer=layer, expert=expert), slot, choice)
        choice.experts = Experts(experts)
        return choice

    def _bring(self, page: Page, slot: int, choice: Choice) -> ExpertWeights:
        """Where ``page`` is going to be: near, in ``slot``, or in the ring."""
        pager, store, ring = self._pager, self._pager.store, self._in_ring(page, choice)
        if ring is None and slot >= 0:
            choice.errands.append(Errand(page, store.near_pages[slot]))
            return store.near_views[slot]
        if ring is None:
            ring = pager.free.pop()
            choice.errands.append(Errand(page, store.ring_pages[ring]))
        if slot < 0:
            pager.passing.append(ring)
            return store.ring_views[ring]
        store.swap(slot, ring)
        pager.free.append(ring)
        return store.near_views[slot]

    def _in_ring(self, page: Page, choice: Choice) -> int | None:
        """The page of the ring in which ``page`` is, or will be; it is the caller's then."""
        pager = self._pager
        if page in pager.carried:
            return pager.carried.pop(page)
        guess = next((each for each in pager.guesses if each.page == page), None)
        if guess is None:
            return None
        pager.guesses.remove(guess)
        there = guess.arriving is None or guess.arriving.done()
        pager.stall.came_true(time.perf_counter() - guess.since_s, there=there)
        if guess.arriving is not None:
            choice.awaited.append(guess.arriving)
        return guess.ring

    def _leave_to_cpu(self, layer: int, ids: np.ndarray) -> frozenset[int]:
        """The missing experts that the CPU computes where they lie."""
        pager = self._pager
        if pager.leave is None:
            return frozenset()
        chosen, tokens = np.unique(ids, return_counts=True)
        pages = [Page(layer=layer, expert=expert) for expert in chosen.tolist()]
        there = np.array([pager.store.far_page(page) is not None for page in pages], dtype=bool)
        asked = there & (pager.store.table[layer, chosen] < 0)
        return frozenset(pager.leave(layer, chosen[asked], tokens[asked]).tolist())

    def _far_views(self, layer: int, on_cpu: frozenset[int]) -> tuple[ExpertWeights | None, ...]:
        view = self._pager.store.far_view
        every = range(self._pager.num_experts if on_cpu else 0)
        return tuple(view(Page(layer=layer, expert=expert)) if expert in on_cpu else None for expert in every)

    def _read(self, choice: Choice) -> Outcome:
        """From the disk: into place, or into pinned memory on the way to a device."""
        pager, store = self._pager, self._pager.store
        coming, pages = list(choice.awaited), 0
        for errand in choice.errands:
            if store.far_page(errand.page) is not None:
                continue
            into = errand.into
            if store.near == "device":
                errand.pinned = pages
                into = store.pinned_pages[pages]
            arriving = pager.start_page(errand.page, into, 0)
            if arriving is not None:
                coming.append(arriving)
            pages += 1
        if not coming:
            return Moved(pages * store.page_bytes) if pages else SKIPPED
        return Moved(pages * store.page_bytes, _All(coming, pager.stall, pages))

    def _send(self, choice: Choice) -> Outcome:
        """Over the link, from pinned memory or from a home."""
        store = self._pager.store
        for errand in choice.errands:
            pinned = errand.pinned
            source = present(store.far_page(errand.page)) if pinned is None else store.pinned_pages[pinned]
            errand.into.copy_(source, non_blocking=True)
        return Moved(len(choice.errands) * store.page_bytes) if choice.errands else SKIPPED


class _All:
    """Pages on their way together."""

    def __init__(self, coming: Sequence[Arriving], stall: Stall, pages: int) -> None:
        self._coming, self._stall, self._pages = coming, stall, pages
        self._since_s = time.perf_counter()

    def wait(self) -> None:
        for arriving in self._coming:
            arriving.wait()
        self._stall.pages += self._pages
        self._stall.seconds += time.perf_counter() - self._since_s if self._pages else 0.0


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """ids int [T, k] and weights float32 [T, k] that the last routers chose, over all micro-batches."""
    routed = [present(mb.kept.routed if mb.kept is not None else mb.routed) for mb in micro_batches]
    ids = np.concatenate([each.ids.cpu().numpy() for each in routed])
    return ids, np.concatenate([each.weights.cpu().numpy() for each in routed])
