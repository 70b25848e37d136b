"""Small passes: which pages a layer's experts need once its routers have chosen, and how those that are not resident come.

Asks ``experts`` which of them stay; sees to it that no slot is written while an expert reads it or a page is on its way
to it. Refuses to know what makes an expert worth keeping, and in which order tasks run.

What is resident and chosen in a layer is held (leased) until the experts of the next layer have chosen: until then nothing
else is written to its slots. That covers every reader, for the routers of the next layer run behind the experts of this
one. Everything that comes goes into the ring, which small passes have to themselves. What is to stay resident exchanges
its memory with what leaves (`PageStore.swap`), so the ring also holds what has left, and what only passed, until that
memory is needed: whoever asks for it meanwhile finds it there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.core.schedule import Page, Task, TaskKind
from moelight.experts.residency_manager import ResidencyManager
from moelight.memory.pages import ExpertWeights, PageStore, PendingPage, StartPage
from moelight.models.decoder import Watch
from moelight.models.moe import MoEWeights
from moelight.runtime.free_slots import FreeSlots, TransferStats
from moelight.runtime.lanes import SKIPPED, MovedBytes, Outcome
from moelight.runtime.microbatch import MicroBatch, require

Leave = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # layer, missing ids, tokens of each -> the CPU's


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPages:
    """One pass as its tasks see it.

    Attributes:
        position: where the stream of pages stands when it begins.
        small: its choices, where only routed pages move.
        watch: to be told who is routed where, if anybody wants to know.
        residents: a number that changes whenever other pages are resident.
    """

    micro_batches: Sequence[MicroBatch]
    position: int
    small: OnDemandPass | None = None
    watch: Watch | None = None
    residents: int = 0


@dataclass(slots=True)
class PageTransfer:
    """One page that is to come into ``into``, by way of page ``pinned`` of pinned memory where it crosses from disk."""

    page: Page
    into: Tensor
    pinned: int | None = None


@dataclass(slots=True)
class LayerDemand:
    """What one layer of one pass needs.

    Attributes:
        experts: the weights of every expert that is computed beside the pages; None for the others.
        late: those of them that are not there yet when the choice is made.
        on_cpu: weights of those that the CPU computes where they lie, beside a GPU; empty where it computes none.
        errands: what must be fetched, ``read_pages`` of it from disk, since ``since_s``; ``coming``: what must arrive,
            also of what had been on its way before.
    """

    experts: MoEWeights
    late: frozenset[int]
    on_cpu: tuple[ExpertWeights | None, ...]
    errands: list[PageTransfer] = field(default_factory=list)
    coming: list[PendingPage] = field(default_factory=list)
    read_pages: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _Guess:
    """A page that was fetched ahead, into page ``ring`` of the ring."""

    page: Page
    ring: int
    arriving: PendingPage | None
    since_s: float


class Pager:
    """The pages of small passes. ``leave``: which missing experts are left to the CPU, where it may compute them where
    they lie (None: none).

    What it knows is that of the last choice made, whichever pass made it: one pass may be launched while the one before
    still chooses.
    """

    def __init__(
        self,
        store: PageStore,
        residency: ResidencyManager,
        start_page: StartPage,
        *,
        leave: Leave | None = None,
        remembers: bool = True,
    ) -> None:
        """``remembers``: what is still in the ring is found there."""
        self.store, self.residency = store, residency
        self.start_page, self.num_experts, self.leave = start_page, store.table.shape[1], leave
        self.remembers = remembers
        self.predictions: list[_Guess] = []
        self.prefetched: dict[Page, int] = {}
        self.transfer_stats = TransferStats()
        self.free_slots = FreeSlots()
        self._held: tuple[int, np.ndarray] | None = None
        self._passing: list[tuple[int, Page]] = []  # pages of the ring that the last choice reads
        self._resident_pages: dict[int, Page] = {}
        for layer, expert in np.argwhere(store.table >= 0).tolist():
            self._resident_pages[int(store.table[layer, expert])] = Page(layer=layer, expert=expert)

    def begin(
        self, micro_batches: Sequence[MicroBatch], prefetched: Mapping[Page, int], left: Mapping[Page, int] | None
    ) -> OnDemandPass:
        """A pass of ``micro_batches``. After one that streamed whole layers: ``prefetched`` are pages of the ring that it
        fetched for this one, which may be on their way, ``left`` those that it used last; None after another."""
        if left is not None:
            there = {ring: page for page, ring in left.items()}
            free = set(range(len(self.store.ring_pages))) - set(prefetched.values())
            self.free_slots, self.prefetched = FreeSlots(), dict(prefetched)
            for ring in sorted(free, key=lambda ring: ring in there):
                self.free_slots.give(ring, there.get(ring))
        return OnDemandPass(self, micro_batches)

    def land(self) -> None:
        """Wait for everything that is on its way, wanted or not; all passes have chosen, and their experts are done."""
        self.settle(keep=None)
        self.release()

    def settle(self, keep: int | None) -> None:
        """Wait for guesses of other layers than ``keep``, which nobody wants any more. Whether one could be read is no
        matter: who needs its page reads it again."""
        for prediction in [prediction for prediction in self.predictions if prediction.page.layer != keep]:
            self.predictions.remove(prediction)
            try:
                if prediction.arriving is not None:
                    prediction.arriving.wait()
                self.free_slots.give(prediction.ring, prediction.page)
            except MoelightError:
                self.free_slots.give(prediction.ring, None)

    def hold(self, layer: int, experts: np.ndarray) -> None:
        """The experts of ``layer`` read ``experts``, which are resident, until the next layer lets go of them."""
        self.residency.lease(layer, experts)
        self._held = layer, experts

    def release(self) -> None:
        """The experts of the layer before are done."""
        for ring, page in self._passing:
            self.free_slots.give(ring, page)
        self._passing = []
        if self._held is not None:
            self.residency.release(*self._held)
            self._held = None

    def room_for_predictions(self, layer: int) -> int:
        """How many pages of the ring may be taken for experts that ``layer`` may choose: each of those that are not
        resident may need one in its turn."""
        most = int((self.store.table[layer] < 0).sum())
        return min(len(self.free_slots), len(self.free_slots) + len(self._passing) - most)

    def passes(self, page: Page, ring: int) -> ExpertWeights:
        """``page``, in page ``ring`` of the ring, is read there by this layer alone."""
        self._passing.append((ring, page))
        return self.store.ring_views[ring]

    def stay(self, page: Page, slot: int, ring: int) -> ExpertWeights:
        """``page``, which is or will be in page ``ring`` of the ring, is resident from now on; whoever it takes ``slot``
        from is in the ring, for as long as that place is not needed."""
        self.store.swap(slot, ring)
        self.free_slots.give(ring, self._resident_pages.get(slot))
        self._resident_pages[slot] = page
        return self.store.resident_views[slot]


class OnDemandPass:
    """One pass on its way: each layer's choice, made once, by whoever asks first."""

    def __init__(self, pager: Pager, micro_batches: Sequence[MicroBatch]) -> None:
        self._pager, self._micro_batches = pager, micro_batches
        self._choices: dict[int, LayerDemand] = {}
        self._ahead: dict[int, int] = {}  # layers whose guesses are on their way, and how many bytes
        self._turn = threading.Lock()

    def choice(self, layer: int) -> LayerDemand:
        """What ``layer`` needs, whose routers were the last to run."""
        with self._turn:
            if layer not in self._choices:
                self._choices[layer] = self._choose(layer)
            return self._choices[layer]

    def fetch(self, task: Task) -> Outcome:
        """What the layer of ``task`` misses comes over its lane; reads have begun with the choice."""
        choice = self.choice(task.layer)
        if task.kind is TaskKind.SEND_EXPERTS:
            return self._send(choice)
        moved = choice.read_pages * self._pager.store.page_bytes
        if not choice.coming:
            return MovedBytes(moved) if moved else SKIPPED
        return MovedBytes(moved, _All(choice, self._pager.transfer_stats), choice.since_s)

    def fetch_ahead(self, task: Task) -> Outcome:
        """What the layer of ``task`` may choose comes over its lane; it may have been begun before."""
        self.begin_ahead(task.layer)
        moved = self._ahead[task.layer]
        return MovedBytes(moved) if moved else SKIPPED

    def begin_ahead(self, layer: int) -> None:
        """Begin to bring what ``layer`` may choose, the one before having chosen; nobody waits for it but who turns out
        to need it. Where pages cross a link, on the lane of the link."""
        pager, store, moved = self._pager, self._pager.store, 0
        with self._turn:
            if layer in self._ahead:
                return
            for expert in [] if layer in self._choices else pager.residency.prediction(layer).tolist():
                if pager.room_for_predictions(layer) < 1:
                    break
                page = Page(layer=layer, expert=expert)
                far = store.offloaded_page(page)
                if (
                    page in pager.prefetched
                    or page in pager.free_slots
                    or (store.fast_tier == "device" and far is None)
                ):
                    continue
                ring, arriving = pager.free_slots.take(), None
                if far is not None:
                    store.ring_pages[ring].copy_(far, non_blocking=True)
                else:
                    arriving = pager.start_page(page, store.ring_pages[ring], 0)
                pager.predictions.append(_Guess(page, ring, arriving, time.perf_counter()))
                moved += store.page_bytes
                pager.transfer_stats.ahead_pages += 1
            self._ahead[layer] = moved

    def predict_experts(self, layer: int, j: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Tell that ``layer`` may choose ``ids`` [T, k] for micro-batch ``j``, with ``weights``."""
        with self._turn:
            self._pager.residency.hint(layer, ids, weights)
        if j + 1 == len(self._micro_batches) and self._pager.store.fast_tier == "host":
            self.begin_ahead(layer)

    def _choose(self, layer: int) -> LayerDemand:
        pager, store, residency = self._pager, self._pager.store, self._pager.residency
        ids, weights = routed_of(self._micro_batches)
        pager.settle(keep=layer)
        pager.release()
        for page in [page for page in pager.prefetched if page.layer != layer]:
            pager.free_slots.give(pager.prefetched.pop(page), page)
        on_cpu = self._leave_to_cpu(layer, ids)
        found = residency.choose(layer, ids, weights, leave=on_cpu)
        held = np.concatenate([found.hits, found.misses[found.slots >= 0]])
        pager.hold(layer, held)
        choice = LayerDemand(
            experts=MoEWeights(), late=frozenset(found.misses.tolist()), on_cpu=self._offloaded_views(layer, on_cpu)
        )
        experts: list[ExpertWeights | None] = [None] * pager.num_experts
        for expert, slot in zip(found.hits.tolist(), found.hit_slots.tolist(), strict=True):
            experts[expert] = store.resident_views[slot]
        for expert, slot in zip(found.misses.tolist(), found.slots.tolist(), strict=True):
            experts[expert] = self._bring(Page(layer=layer, expert=expert), slot, choice)
        choice.experts = MoEWeights(experts)
        self._begin_reads(choice)
        return choice

    def _bring(self, page: Page, slot: int, choice: LayerDemand) -> ExpertWeights:
        """Where ``page`` is going to be: resident, in ``slot``, or in the ring."""
        pager, ring = self._pager, self._in_ring(page, choice)
        if ring is None:
            ring = pager.free_slots.take()
            choice.errands.append(PageTransfer(page, pager.store.ring_pages[ring]))
        if slot >= 0:
            return pager.stay(page, slot, ring)
        return pager.passes(page, ring)

    def _in_ring(self, page: Page, choice: LayerDemand) -> int | None:
        """The page of the ring in which ``page`` is, or will be; it is the caller's then."""
        pager = self._pager
        if page in pager.prefetched:
            return pager.prefetched.pop(page)
        prediction = next((each for each in pager.predictions if each.page == page), None)
        if prediction is None:
            found = pager.free_slots.find(page) if pager.remembers else None
            pager.transfer_stats.found += found is not None
            return found
        pager.predictions.remove(prediction)
        there = prediction.arriving is None or prediction.arriving.done()
        pager.transfer_stats.came_true(time.perf_counter() - prediction.since_s, there=there)
        if prediction.arriving is not None:
            choice.coming.append(prediction.arriving)
        return prediction.ring

    def _leave_to_cpu(self, layer: int, ids: np.ndarray) -> frozenset[int]:
        """The missing experts that the CPU computes where they lie."""
        pager = self._pager
        if pager.leave is None:
            return frozenset()
        chosen, tokens = np.unique(ids, return_counts=True)
        pages = [Page(layer=layer, expert=expert) for expert in chosen.tolist()]
        there = np.array([pager.store.offloaded_page(page) is not None for page in pages], dtype=bool)
        asked = there & (pager.store.table[layer, chosen] < 0)
        return frozenset(pager.leave(layer, chosen[asked], tokens[asked]).tolist())

    def _offloaded_views(self, layer: int, on_cpu: frozenset[int]) -> tuple[ExpertWeights | None, ...]:
        view = self._pager.store.offloaded_view
        every = range(self._pager.num_experts if on_cpu else 0)
        return tuple(view(Page(layer=layer, expert=expert)) if expert in on_cpu else None for expert in every)

    def _begin_reads(self, choice: LayerDemand) -> None:
        """From the disk: into place, or into pinned memory on the way to a device."""
        pager, store = self._pager, self._pager.store
        choice.since_s = time.perf_counter()
        for transfer in choice.errands:
            if store.offloaded_page(transfer.page) is not None:
                continue
            into = transfer.into
            if store.fast_tier == "device":
                transfer.pinned = choice.read_pages
                into = store.pinned_pages[choice.read_pages]
            arriving = pager.start_page(transfer.page, into, 0)
            if arriving is not None:
                choice.coming.append(arriving)
            choice.read_pages += 1

    def _send(self, choice: LayerDemand) -> Outcome:
        """Over the link, from pinned memory or from a home."""
        store = self._pager.store
        for transfer in choice.errands:
            pinned = transfer.pinned
            source = require(store.offloaded_page(transfer.page)) if pinned is None else store.pinned_pages[pinned]
            transfer.into.copy_(source, non_blocking=True)
        return MovedBytes(len(choice.errands) * store.page_bytes) if choice.errands else SKIPPED


class _All:
    """The pages of one choice, on their way together."""

    def __init__(self, choice: LayerDemand, transfer_stats: TransferStats) -> None:
        self._choice, self._transfer_stats = choice, transfer_stats

    def wait(self) -> None:
        for arriving in self._choice.coming:
            arriving.wait()
        if self._choice.read_pages:
            self._transfer_stats.pages += self._choice.read_pages
            self._transfer_stats.seconds += time.perf_counter() - self._choice.since_s


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """ids int [T, k] and weights float32 [T, k] that the last routers chose, over all micro-batches."""
    routed = [require(mb.kept.routed if mb.kept is not None else mb.routed) for mb in micro_batches]
    ids = np.concatenate([each.ids.cpu().numpy() for each in routed])
    return ids, np.concatenate([each.weights.cpu().numpy() for each in routed])
