"""On-demand passes of the engine: missing pages pass through a ring, and may become resident there.

A layer's resident pages are leased until the experts of the next MoE layer are chosen, which is after the last use. A
page that becomes resident exchanges its memory with the evicted page (`PageStore.swap`), so a later request may find
evicted pages in the ring. One whose slot is shorter than those of the ring is transferred into that slot at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.core.schedule import Page
from moelight.paging.residency import ResidencyManager
from moelight.paging.slots import SlotTable, Transfer, TransferStats
from moelight.paging.store import PageStore, StartPage

Leave = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # layer, missing ids, tokens of each -> ids left to the CPU


@dataclass(slots=True)
class LayerDemand:
    """Pages and weights that one layer of one pass needs.

    Attributes:
        late: experts whose pages were missing when the demand was computed.
        on_cpu: the pages of the experts that the CPU computes in place, beside a GPU; empty if there are none.
        memory: int32 [E], the number (`PageStore.memory`) of the memory of the other routed experts; else -1.
        transfers: pages to transfer, ``read_pages`` of ``read_bytes`` in all from disk, since ``since_s``.
        coming: transfers to wait for, including those that began earlier.
        moves: (destination, source) of pages that go from the ring to host memory of their own once all have arrived.
    """

    stats: TransferStats
    late: frozenset[int]
    on_cpu: tuple[Tensor | None, ...]
    memory: np.ndarray
    transfers: list[Transfer] = field(default_factory=list)
    coming: list[Transfer] = field(default_factory=list)
    moves: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    read_pages: int = 0
    read_bytes: int = 0
    since_s: float = 0.0

    def wait(self) -> None:
        """Block until all pages have been read; raises the error of a read."""
        for transfer in self.coming:
            transfer.wait()
        for into, source in self.moves:
            into.copy_(source)
        if self.read_pages:
            self.stats.pages += self.read_pages
            self.stats.seconds += time.perf_counter() - self.since_s


class RingPager:
    """Pages of on-demand passes, in the state of the last layer demanded by any pass; not thread-safe."""

    def __init__(
        self,
        store: PageStore,
        residency: ResidencyManager,
        start_page: StartPage,
        *,
        leave: Leave | None = None,
        remembers: bool = True,
    ) -> None:
        """``leave`` selects the missing experts that the CPU computes; ``remembers``: reuse pages still in the ring."""
        self.store, self.residency, self.stats = store, residency, TransferStats()
        self._start_page, self._leave, self._remembers = start_page, leave, remembers
        self._num_experts = store.table.shape[1]
        self.ring = SlotTable(len(store.ring), ())
        self.prefetched: dict[Page, int] = {}  # by a whole pass
        self._passing: list[int] = []  # ring slots that the last layer reads
        self._resident: dict[int, Page] = {}
        for layer, expert in np.argwhere(store.table >= 0).tolist():
            self._resident[int(store.table[layer, expert])] = Page(layer=layer, expert=expert)

    def begin(self, prefetched: Mapping[Page, int], left: Mapping[Page, int] | None) -> None:
        """Begin a pass after a whole pass that prefetched ``prefetched`` (ring slots, possibly still in transfer) and
        used ``left`` last; ``left`` None: after an on-demand pass."""
        if left is None:
            return
        present = {slot: page for page, slot in left.items()}
        self.ring, self.prefetched = SlotTable(len(self.store.ring), ()), dict(prefetched)
        for slot in sorted(set(range(len(self.ring.pages))) - set(prefetched.values()), key=present.__contains__):
            self.ring.give(slot, present.get(slot))

    def land(self) -> None:
        """Wait for all pending transfers, after the experts of all layers."""
        self._settle(keep=None)
        self._release()

    def demand(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> LayerDemand:
        """Find the pages of ``layer``, routed to ``ids`` int [T, k] with ``weights`` [T, k], and begin disk reads."""
        self._settle(keep=layer)
        self._release()
        for page in [page for page in self.prefetched if page.layer != layer]:
            self.ring.give(self.prefetched.pop(page), page)
        on_cpu = self._left_to_cpu(layer, ids)
        access = self.residency.use(layer, ids, weights, leave=on_cpu)
        demand = LayerDemand(
            stats=self.stats,
            late=frozenset(access.misses.tolist()),
            on_cpu=tuple(
                self.store.offloaded[Page(layer=layer, expert=expert)].page if expert in on_cpu else None
                for expert in range(self._num_experts if on_cpu else 0)
            ),
            memory=np.full(self._num_experts, -1, dtype=np.int32),
        )
        for expert, slot in zip(access.hits.tolist(), access.hit_slots.tolist(), strict=True):
            demand.memory[expert] = self.store.resident[slot].number
        for expert, slot in zip(access.misses.tolist(), access.slots.tolist(), strict=True):
            demand.memory[expert] = self._bring(Page(layer=layer, expert=expert), slot, demand)
        self._begin_reads(demand)
        return demand

    def prefetch(self, layer: int) -> int:
        """Begin to transfer the predicted pages of ``layer``; return their bytes. A copy across a link is on the
        current stream; one slot of the ring remains for each expert of the layer that is not resident."""
        ring, store, moved = self.ring, self.store, 0
        max_missing = int((store.table[layer] < 0).sum())
        for expert in self.residency.prediction(layer).tolist():
            if min(len(ring.unused), len(ring.unused) + len(self._passing) - max_missing) < 1:
                break
            page = Page(layer=layer, expert=expert)
            far = store.offloaded_page(page)
            if page in self.prefetched or page in ring or (store.fast_tier == "device" and far is None):
                continue
            slot = ring.take()
            transfer = Transfer(page, slot, store.ring_room(slot, page), far)
            if far is not None:
                transfer.into.copy_(far, non_blocking=True)
            else:
                transfer.pending = self._start_page(page, transfer.into, 0)
            ring.begin(transfer)
            self.stats.ahead_pages += 1
            moved += transfer.into.numel()
        return moved

    def _settle(self, keep: int | None) -> None:
        """Read errors are ignored, because a layer that needs the page reads it again."""
        for transfer in [transfer for transfer in self.ring.in_flight.values() if transfer.page.layer != keep]:
            del self.ring.in_flight[transfer.slot]
            try:
                transfer.wait()
                self.ring.give(transfer.slot, transfer.page)
            except MoelightError:
                self.ring.give(transfer.slot, None)

    def _release(self) -> None:
        for slot in self._passing:
            self.ring.give(slot, self.ring.pages[slot])
        self._passing = []
        self.residency.end_use()

    def _bring(self, page: Page, slot: int, demand: LayerDemand) -> int:
        """Number of the memory of ``page``: resident in ``slot``, or in the ring if ``slot`` is negative."""
        store, ring = self.store, self._in_ring(page, demand)
        if slot >= 0 and not store.swaps(slot):
            return self._bring_into(page, slot, ring, demand)
        if ring is None:
            ring = self.ring.take()
            demand.transfers.append(Transfer(page, ring, store.ring_room(ring, page), store.offloaded_page(page)))
        if slot < 0:
            self.ring.pages[ring] = page
            self._passing.append(ring)
            return store.ring[ring].number
        store.swap(slot, ring)
        self.ring.give(ring, self._resident.get(slot))
        self._resident[slot] = page
        return store.resident[slot].number

    def _bring_into(self, page: Page, slot: int, ring: int | None, demand: LayerDemand) -> int:
        """`_bring` where the memory of ``slot`` cannot become the ring's: the evicted page is lost."""
        store, room = self.store, self.store.resident_room(slot, page)
        if ring is None:
            demand.transfers.append(Transfer(page, slot, room, store.offloaded_page(page)))
        else:
            self.ring.pages[ring] = page
            self._passing.append(ring)
            if store.fast_tier == "host":
                demand.moves.append((room, store.ring_room(ring, page)))
            else:
                demand.transfers.append(Transfer(page, slot, room, store.ring_room(ring, page)))
        self._resident[slot] = page
        return store.resident[slot].number

    def _in_ring(self, page: Page, demand: LayerDemand) -> int | None:
        """Ring slot that holds or will hold ``page``; the caller owns the slot."""
        if page in self.prefetched:
            return self.prefetched.pop(page)
        transfer = next((candidate for candidate in self.ring.in_flight.values() if candidate.page == page), None)
        if transfer is None:
            slot = self.ring.find(page) if self._remembers else None
            self.stats.found += slot is not None
            return slot
        del self.ring.in_flight[transfer.slot]
        self.stats.record_useful(transfer)
        if transfer.pending is not None:
            demand.coming.append(transfer)
        return transfer.slot

    def _left_to_cpu(self, layer: int, ids: np.ndarray) -> frozenset[int]:
        if self._leave is None:
            return frozenset()
        chosen, tokens = np.unique(ids[ids < self._num_experts], return_counts=True)  # the others are of other ranks
        pages = [Page(layer=layer, expert=expert) for expert in chosen.tolist()]
        is_offloaded = np.array([page in self.store.offloaded for page in pages], dtype=bool)
        asked = is_offloaded & (self.store.table[layer, chosen] < 0)
        return frozenset(self._leave(layer, chosen[asked], tokens[asked]).tolist())

    def _begin_reads(self, demand: LayerDemand) -> None:
        """Pages are read into the ring, or into pinned memory on the way to a device."""
        store, demand.since_s = self.store, time.perf_counter()
        for transfer in demand.transfers:
            if transfer.source is not None:
                continue
            if store.fast_tier == "device":
                transfer.source = store.pinned[demand.read_pages].page[: transfer.into.numel()]
            into = transfer.into if transfer.source is None else transfer.source
            transfer.pending = self._start_page(transfer.page, into, 0)
            demand.coming.append(transfer)
            demand.read_pages += 1
            demand.read_bytes += transfer.into.numel()
