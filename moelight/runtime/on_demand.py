"""On-demand passes: the pages that a layer needs once its routers have run, and their transfers.

The residency manager decides which pages become resident; this module ensures that no slot is written while an expert
reads it or a transfer into it is pending. Does not depend on eviction policies or on the order of tasks.

Resident pages that a layer uses are leased until the experts of the next MoE layer are chosen; until then their slots
are not overwritten. The lease covers every reader, because the routers of the next layer run after the experts of this
one. Missing pages are transferred into the ring, which on-demand passes use exclusively. A page that becomes resident
swaps memory with the evicted page (`PageStore.swap`), so the ring also holds evicted pages and pages that did not
become resident, until their memory is needed; a later request finds them there.
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
from moelight.runtime.lanes import SKIPPED, MovedBytes, Outcome
from moelight.runtime.microbatch import MicroBatch, require


class FreeSlots:
    """Unused pages of the ring, the longest unused first, and the expert pages that they still hold."""

    def __init__(self) -> None:
        self._pages: dict[int, Page | None] = {}
        self._where: dict[Page, int] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def give(self, ring: int, page: Page | None) -> None:
        """Mark page ``ring`` of the ring, which holds ``page``, as unused."""
        self._pages[ring] = page
        if page is not None:
            self._where[page] = ring

    def take(self) -> int:
        """Take the longest unused ring page; its contents are lost."""
        ring = next(iter(self._pages))
        self._forget(ring)
        return ring

    def __contains__(self, page: Page) -> bool:
        return page in self._where

    def find(self, page: Page) -> int | None:
        """Take the unused ring page that still holds ``page``; None if there is none."""
        ring = self._where.get(page)
        if ring is not None:
            self._forget(ring)
        return ring

    def _forget(self, ring: int) -> None:
        page = self._pages.pop(ring)
        if page is not None and self._where.get(page) == ring:
            del self._where[page]


@dataclass(slots=True)
class TransferStats:
    """Statistics of transfers in on-demand passes.

    Attributes:
        pages: pages that were read, one after another, in ``seconds``.
        ahead_pages: prefetched pages; ``ahead_useful`` of them were needed, ``ahead_late`` of those still in transfer
            then.
        spared_s: seconds of transfer that prefetches saved.
        found: needed pages that were still in the ring.
    """

    pages: int = 0
    seconds: float = 0.0
    ahead_pages: int = 0
    ahead_useful: int = 0
    ahead_late: int = 0
    spared_s: float = 0.0
    found: int = 0

    @property
    def page_s(self) -> float:
        """Mean seconds per page."""
        return self.seconds / self.pages if self.pages else 0.0

    def record_hit(self, waited_s: float, *, there: bool) -> None:
        """Record a correct prediction, whose prefetch began ``waited_s`` ago and is complete or not (``there``)."""
        self.ahead_useful += 1
        self.ahead_late += not there
        self.spared_s += self.page_s if there else min(waited_s, self.page_s)


Leave = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # layer, missing ids, tokens of each -> ids left to the CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPages:
    """Micro-batches and page state of one pass, as its tasks use them.

    Attributes:
        position: position of the page stream at the start of the pass.
        small: the on-demand pass; None for a whole pass.
        watch: callback that receives the routing of each layer; None for none.
        residents: a number that changes whenever other pages are resident.
    """

    micro_batches: Sequence[MicroBatch]
    position: int
    small: OnDemandPass | None = None
    watch: Watch | None = None
    residents: int = 0


@dataclass(slots=True)
class PageTransfer:
    """Transfer of one page into ``into``, through page ``pinned`` of pinned memory if it goes from disk to a device."""

    page: Page
    into: Tensor
    pinned: int | None = None


@dataclass(slots=True)
class LayerDemand:
    """Pages and weights that one layer of one pass needs.

    Attributes:
        experts: weights of the routed experts, except those the CPU computes beside a GPU; None for all others.
        late: missing experts among them, whose pages are not transferred yet when the demand is computed.
        on_cpu: weights of the experts that the CPU computes in place, beside a GPU; empty if there are none.
        errands: transfers to begin, ``read_pages`` of them from disk, since ``since_s``.
        coming: pending pages to wait for, including those that were requested earlier.
    """

    experts: MoEWeights
    late: frozenset[int]
    on_cpu: tuple[ExpertWeights | None, ...]
    transfers: list[PageTransfer] = field(default_factory=list)
    coming: list[PendingPage] = field(default_factory=list)
    read_pages: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _PredictedPage:
    """A page that was prefetched into page ``ring`` of the ring because a predictor named it."""

    page: Page
    ring: int
    arriving: PendingPage | None
    since_s: float


class Pager:
    """Pages of on-demand passes.

    The state is that of the last choice made by any pass: a pass may be launched while the previous one still chooses.
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
        """Create a pager.

        Args:
            leave: selects the missing experts that the CPU computes in place; None: none.
            remembers: reuse pages that are still in the ring.
        """
        self.store, self.residency = store, residency
        self.start_page, self.num_experts, self.leave = start_page, store.table.shape[1], leave
        self.remembers = remembers
        self.predictions: list[_PredictedPage] = []
        self.prefetched: dict[Page, int] = {}
        self.transfer_stats = TransferStats()
        self.free_slots = FreeSlots()
        self._held: tuple[int, np.ndarray] | None = None
        self._passing: list[tuple[int, Page]] = []  # ring pages that the last chosen layer reads
        self._resident_pages: dict[int, Page] = {}
        for layer, expert in np.argwhere(store.table >= 0).tolist():
            self._resident_pages[int(store.table[layer, expert])] = Page(layer=layer, expert=expert)

    def begin(
        self, micro_batches: Sequence[MicroBatch], prefetched: Mapping[Page, int], left: Mapping[Page, int] | None
    ) -> OnDemandPass:
        """Begin a pass of ``micro_batches``.

        Args:
            prefetched: ring pages that a whole pass prefetched for this one, possibly still in transfer.
            left: ring pages that the whole pass used last; None after an on-demand pass.
        """
        if left is not None:
            there = {ring: page for page, ring in left.items()}
            free = set(range(len(self.store.ring_pages))) - set(prefetched.values())
            self.free_slots, self.prefetched = FreeSlots(), dict(prefetched)
            for ring in sorted(free, key=lambda ring: ring in there):
                self.free_slots.give(ring, there.get(ring))
        return OnDemandPass(self, micro_batches)

    def land(self) -> None:
        """Wait for all pending transfers; all passes have chosen, and their experts are done."""
        self.settle(keep=None)
        self.release()

    def settle(self, keep: int | None) -> None:
        """Wait for prefetches of layers other than ``keep``, which are no longer needed.

        Read errors are ignored: a layer that needs such a page reads it again.
        """
        for prediction in [prediction for prediction in self.predictions if prediction.page.layer != keep]:
            self.predictions.remove(prediction)
            try:
                if prediction.arriving is not None:
                    prediction.arriving.wait()
                self.free_slots.give(prediction.ring, prediction.page)
            except MoelightError:
                self.free_slots.give(prediction.ring, None)

    def hold(self, layer: int, experts: np.ndarray) -> None:
        """Lease ``experts`` of ``layer``, which are resident, until `release`."""
        self.residency.lease(layer, experts)
        self._held = layer, experts

    def release(self) -> None:
        """Release the leased pages and the ring pages of the previous layer, whose experts are done."""
        for ring, page in self._passing:
            self.free_slots.give(ring, page)
        self._passing = []
        if self._held is not None:
            self.residency.release(*self._held)
            self._held = None

    def room_for_predictions(self, layer: int) -> int:
        """Number of ring pages that may be used to prefetch experts of ``layer``, keeping one for each of its experts
        that is not resident."""
        most = int((self.store.table[layer] < 0).sum())
        return min(len(self.free_slots), len(self.free_slots) + len(self._passing) - most)

    def passes(self, page: Page, ring: int) -> ExpertWeights:
        """Weights of ``page`` in page ``ring`` of the ring, read there by the current layer only."""
        self._passing.append((ring, page))
        return self.store.ring_views[ring]

    def stay(self, page: Page, slot: int, ring: int) -> ExpertWeights:
        """Make ``page``, which is or will be in page ``ring`` of the ring, resident in ``slot``; return its weights.

        The page evicted from ``slot`` remains in the ring until that memory is needed.
        """
        self.store.swap(slot, ring)
        self.free_slots.give(ring, self._resident_pages.get(slot))
        self._resident_pages[slot] = page
        return self.store.resident_views[slot]


class OnDemandPass:
    """One on-demand pass: the demand of each layer, computed once, by the first task that requests it."""

    def __init__(self, pager: Pager, micro_batches: Sequence[MicroBatch]) -> None:
        self._pager, self._micro_batches = pager, micro_batches
        self._choices: dict[int, LayerDemand] = {}
        self._ahead: dict[int, int] = {}  # bytes prefetched for each layer
        self._turn = threading.Lock()

    def choice(self, layer: int) -> LayerDemand:
        """Demand of ``layer``, whose routers were the last to run."""
        with self._turn:
            if layer not in self._choices:
                self._choices[layer] = self._choose(layer)
            return self._choices[layer]

    def fetch(self, task: Task) -> Outcome:
        """Transfer the missing pages of the task's layer over its lane; disk reads have begun with the choice."""
        choice = self.choice(task.layer)
        if task.kind is TaskKind.SEND_EXPERTS:
            return self._send(choice)
        moved = choice.read_pages * self._pager.store.page_bytes
        if not choice.coming:
            return MovedBytes(moved) if moved else SKIPPED
        return MovedBytes(moved, _All(choice, self._pager.transfer_stats), choice.since_s)

    def fetch_ahead(self, task: Task) -> Outcome:
        """Prefetch the predicted pages of the task's layer over its lane; the prefetch may have begun before."""
        self.begin_ahead(task.layer)
        moved = self._ahead[task.layer]
        return MovedBytes(moved) if moved else SKIPPED

    def begin_ahead(self, layer: int) -> None:
        """Begin to prefetch the predicted pages of ``layer``, after the choice of the previous layer.

        Only a layer that needs such a page waits for it. Pages that cross a link are copied on the lane of the link.
        """
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
                pager.predictions.append(_PredictedPage(page, ring, arriving, time.perf_counter()))
                moved += store.page_bytes
                pager.transfer_stats.ahead_pages += 1
            self._ahead[layer] = moved

    def predict_experts(self, layer: int, j: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Record the prediction that ``layer`` chooses ``ids`` [T, k] with ``weights`` for micro-batch ``j``."""
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
        """Weights of ``page`` at its destination: resident in ``slot``, or in the ring."""
        pager, ring = self._pager, self._in_ring(page, choice)
        if ring is None:
            ring = pager.free_slots.take()
            choice.transfers.append(PageTransfer(page, pager.store.ring_pages[ring]))
        if slot >= 0:
            return pager.stay(page, slot, ring)
        return pager.passes(page, ring)

    def _in_ring(self, page: Page, choice: LayerDemand) -> int | None:
        """Ring page that holds or will hold ``page``, from now on owned by the caller; None if there is none."""
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
        pager.transfer_stats.record_hit(time.perf_counter() - prediction.since_s, there=there)
        if prediction.arriving is not None:
            choice.coming.append(prediction.arriving)
        return prediction.ring

    def _leave_to_cpu(self, layer: int, ids: np.ndarray) -> frozenset[int]:
        """Missing experts that the CPU computes in place."""
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
        """Begin the reads from disk: into the ring, or into pinned memory on the way to a device."""
        pager, store = self._pager, self._pager.store
        choice.since_s = time.perf_counter()
        for transfer in choice.transfers:
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
        """Copy pages over the link, from pinned staging memory or from the host tier."""
        store = self._pager.store
        for transfer in choice.transfers:
            pinned = transfer.pinned
            source = require(store.offloaded_page(transfer.page)) if pinned is None else store.pinned_pages[pinned]
            transfer.into.copy_(source, non_blocking=True)
        return MovedBytes(len(choice.transfers) * store.page_bytes) if choice.transfers else SKIPPED


class _All:
    """The pending pages of one choice."""

    def __init__(self, choice: LayerDemand, transfer_stats: TransferStats) -> None:
        self._choice, self._transfer_stats = choice, transfer_stats

    def wait(self) -> None:
        for arriving in self._choice.coming:
            arriving.wait()
        if self._choice.read_pages:
            self._transfer_stats.pages += self._choice.read_pages
            self._transfer_stats.seconds += time.perf_counter() - self._choice.since_s


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids int [T, k] and weights float32 [T, k] of the last routers, over all micro-batches."""
    routed = [require(mb.kept.routed if mb.kept is not None else mb.routed) for mb in micro_batches]
    ids = np.concatenate([each.ids.cpu().numpy() for each in routed])
    return ids, np.concatenate([each.weights.cpu().numpy() for each in routed])
