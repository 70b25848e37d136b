"""Small passes: which pages a layer's experts need once its routers have chosen, and how those that are not near come.

Asks ``experts`` which of them stay; sees to it that no slot is written while an expert reads it or a page is on its way
to it. Refuses to know what makes an expert worth keeping, and in which order tasks run.

What is chosen in a layer is held (leased) from the choice until the experts of the next layer have chosen: until then
nothing else is written to its slots. That covers every reader, for the routers of the next layer run behind the experts
of this one. A page that was fetched ahead is held until its layer has chosen, or longer if it is still on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.core.schedule import Page, Task, TaskKind
from moelight.experts.residency import Residency
from moelight.memory.pages import Arriving, ExpertWeights, PageStore, StartPage
from moelight.models.decoder import Watch
from moelight.models.moe import Experts
from moelight.runtime.lanes import SKIPPED, Moved, Outcome
from moelight.runtime.microbatch import MicroBatch, present

PlaceMisses = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (ids, tokens of each) that are missing -> those to fetch


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
    """One page that is to come: from ``ring`` (a page of it), else from its far home, into ``into``."""

    page: Page
    into: Tensor
    ring: int | None = None
    pinned: int | None = None
    arriving: Arriving | None = None


@dataclass(slots=True)
class Choice:
    """What one layer of one pass needs.

    Attributes:
        experts: the weights of every expert that is computed beside the pages; None for the others.
        late: those of them that are not there yet when the choice is made.
        on_cpu: weights of those that the CPU computes where they lie, beside a GPU.
        errands: what must be fetched; ``awaited``: what is on its way already and must be there.
    """

    experts: Experts
    late: frozenset[int]
    on_cpu: tuple[ExpertWeights | None, ...] = ()
    errands: list[Errand] = field(default_factory=list)
    awaited: list[Arriving] = field(default_factory=list)


@dataclass(slots=True)
class _Flying:
    """A page that was fetched ahead and may still be on its way."""

    page: Page
    arriving: Arriving | None
    since_s: float


class Pager:
    """The pages of small passes. ``place_misses``: which missing experts are fetched, where the CPU may compute others
    where they lie (None: all)."""

    def __init__(
        self,
        store: PageStore,
        residency: Residency,
        start_page: StartPage,
        *,
        place_misses: PlaceMisses | None = None,
    ) -> None:
        self.store, self.residency = store, residency
        self.start_page, self.num_experts, self.place_misses = start_page, store.table.shape[1], place_misses
        self.flying: list[_Flying] = []
        self.counts: dict[str, float] = dict.fromkeys(("pages", "bytes", "ahead_pages", "ahead_bytes", "read_s"), 0)

    def begin(self, micro_batches: Sequence[MicroBatch], carried: Mapping[Page, int]) -> SmallPass:
        """A pass of ``micro_batches``. ``carried``: pages that the pass before left in the ring, and where."""
        return SmallPass(self, micro_batches, carried)

    def land(self) -> None:
        """Wait for everything that is on its way, wanted or not."""
        self.settle(lambda _: True)

    def settle(self, which: Callable[[_Flying], bool]) -> None:
        """Wait for those of the pages fetched ahead, and let go of them. One that cannot be read is forgotten: who asks
        for it finds it missing, and hears why."""
        staying = []
        for each in self.flying:
            if not which(each):
                staying.append(each)
                continue
            expert = np.array([each.page.expert])
            self.residency.release(each.page.layer, expert)
            try:
                if each.arriving is not None:
                    each.arriving.wait()
            except MoelightError:
                self.residency.forget(each.page.layer, each.page.expert)
        self.flying = staying


class SmallPass:
    """One pass on its way: each layer's choice, made once, by whoever asks first."""

    def __init__(self, pager: Pager, micro_batches: Sequence[MicroBatch], carried: Mapping[Page, int]) -> None:
        self._pager, self._micro_batches, self._carried = pager, micro_batches, dict(carried)
        self._choices: dict[int, Choice] = {}
        self._held: tuple[int, np.ndarray] | None = None
        self._turn = threading.Lock()

    def choice(self, layer: int) -> Choice:
        """What ``layer`` needs, whose routers were the last to run."""
        with self._turn:
            if layer not in self._choices:
                self._choices[layer] = self._choose(layer)
            return self._choices[layer]

    def fetch(self, task: Task) -> Outcome:
        """Bring what the layer of ``task`` misses over its lane."""
        choice, store = self.choice(task.layer), self._pager.store
        if task.kind is TaskKind.READ_EXPERTS:
            return self._read(choice, direct=store.near != "device")
        return self._send(choice)

    def fetch_ahead(self, task: Task) -> Outcome:
        """Begin to bring what the layer of ``task`` may choose; nobody waits for it but who turns out to need it."""
        pager, moved = self._pager, 0
        with self._turn:
            ids, slots = pager.residency.guess(task.layer)
            for expert, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                page, into = Page(layer=task.layer, expert=expert), pager.store.near_pages[slot]
                far, arriving = pager.store.far_page(page), None
                if pager.store.near == "device" and far is not None:
                    into.copy_(far, non_blocking=True)
                else:
                    arriving = pager.start_page(page, into, 0)
                pager.flying.append(_Flying(page, arriving, time.perf_counter()))
                moved += pager.store.page_bytes
        pager.counts["ahead_pages"] += len(ids)
        pager.counts["ahead_bytes"] += moved
        return Moved(moved) if moved else SKIPPED

    def foresee(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Tell that ``layer`` may choose ``ids`` [T, k], with ``weights``."""
        with self._turn:
            self._pager.residency.hint(layer, ids, weights)

    def _choose(self, layer: int) -> Choice:
        pager, store, residency = self._pager, self._pager.store, self._pager.residency
        ids, weights = routed_of(self._micro_batches)
        pager.settle(lambda each: each.page.layer != layer)
        if self._held is not None:
            residency.release(*self._held)
        on_cpu = self._leave_to_cpu(layer, ids)
        found = residency.choose(layer, ids, weights, leave=on_cpu)
        held = np.concatenate([found.hits, found.misses[found.slots >= 0]])
        residency.lease(layer, held)
        self._held = (layer, held)
        experts: list[ExpertWeights | None] = [None] * pager.num_experts
        choice = Choice(experts=Experts(), late=frozenset())
        flying = {each.page.expert: each for each in pager.flying if each.page.layer == layer}
        late = set()
        for expert, slot in zip(found.hits.tolist(), found.hit_slots.tolist(), strict=True):
            experts[expert] = store.near_views[slot]
            if expert in flying:
                late.add(expert)
                if (arriving := flying[expert].arriving) is not None:
                    choice.awaited.append(arriving)
        free = self._free_ring()
        for expert, slot in zip(found.misses.tolist(), found.slots.tolist(), strict=True):
            if expert in on_cpu:
                continue
            page, ring = Page(layer=layer, expert=expert), self._carried.get(Page(layer=layer, expert=expert))
            late.add(expert)
            if slot < 0 and ring is not None:
                experts[expert] = store.ring_views[ring]
                continue
            if slot < 0:
                place = next(free)
                experts[expert], into = store.ring_views[place], store.ring_pages[place]
            else:
                experts[expert], into = store.near_views[slot], store.near_pages[slot]
            choice.errands.append(Errand(page, into, ring))
        choice.experts, choice.late = Experts(experts), frozenset(late)
        choice.on_cpu = tuple(
            store.far_view(Page(layer=layer, expert=expert)) if expert in on_cpu else None
            for expert in range(pager.num_experts if on_cpu else 0)
        )
        return choice

    def _leave_to_cpu(self, layer: int, ids: np.ndarray) -> frozenset[int]:
        """The missing experts that the CPU computes where they lie."""
        pager = self._pager
        if pager.place_misses is None:
            return frozenset()
        chosen, tokens = np.unique(ids, return_counts=True)
        missing = pager.store.table[layer, chosen] < 0
        there = np.array([pager.store.far_page(Page(layer=layer, expert=int(e))) is not None for e in chosen], bool)
        asked = missing & there
        fetched = pager.place_misses(chosen[asked], tokens[asked])
        return frozenset(chosen[asked].tolist()) - frozenset(fetched.tolist())

    def _free_ring(self) -> Iterator[int]:
        taken = frozenset(self._carried.values())
        return (place for place in range(len(self._pager.store.ring_pages)) if place not in taken)

    def _read(self, choice: Choice, *, direct: bool) -> Outcome:
        """From the disk: into place, or into pinned memory on the way to a device."""
        pager, store = self._pager, self._pager.store
        coming, moved, pinned = list(choice.awaited) if direct else [], 0, 0
        for errand in choice.errands:
            if errand.ring is not None or store.far_page(errand.page) is not None:
                if direct and errand.ring is not None:
                    errand.into.copy_(store.ring_pages[errand.ring])
                continue
            into = errand.into
            if not direct:
                into, errand.pinned, pinned = store.pinned_pages[pinned], pinned, pinned + 1
            moved += store.page_bytes
            arriving = pager.start_page(errand.page, into, 0)
            if arriving is not None:
                coming.append(arriving)
        self._count(moved)
        if not coming:
            return Moved(moved) if moved else SKIPPED
        return Moved(moved, _All(coming, pager, moved, time.perf_counter()))

    def _send(self, choice: Choice) -> Outcome:
        """Over the link, from pinned memory, from a home, or from the ring beside it."""
        store, moved = self._pager.store, 0
        for errand in choice.errands:
            if errand.ring is not None:
                source = store.ring_pages[errand.ring]
            elif errand.pinned is not None:
                source = store.pinned_pages[errand.pinned]
            else:
                source = present(store.far_page(errand.page))
            errand.into.copy_(source, non_blocking=True)
            moved += store.page_bytes if errand.ring is None else 0
        self._count(moved)
        return Moved(moved) if moved else SKIPPED

    def _count(self, moved: int) -> None:
        self._pager.counts["bytes"] += moved
        self._pager.counts["pages"] += moved // self._pager.store.page_bytes


class _All:
    """Pages on their way together."""

    def __init__(self, coming: Sequence[Arriving], pager: Pager, moved: int, since_s: float) -> None:
        self._coming, self._pager, self._moved, self._since_s = coming, pager, moved, since_s

    def wait(self) -> None:
        for arriving in self._coming:
            arriving.wait()
        if self._moved:
            self._pager.counts["read_s"] += time.perf_counter() - self._since_s


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """ids int64 [T, k] and weights float32 [T, k] that the last routers chose, over all micro-batches."""
    routed = [present(mb.kept.routed if mb.kept is not None else mb.routed) for mb in micro_batches]
    ids = np.concatenate([each.ids.cpu().numpy() for each in routed])
    return ids, np.concatenate([each.weights.cpu().numpy() for each in routed])
