"""Experts of an attached model: a cache assigns slots, and prefetches experts into them; experts without a slot are
streamed through a ring of `STAGED` slots, or computed where they are stored."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.core.schedule import Page
from moelight.paging.offload import HostStore, OffloadStore
from moelight.paging.residency import ResidencyManager
from moelight.paging.slots import SlotTable, Transfer, TransferStats

STAGED = 4

Ids = NDArray[np.int64]
Slots = dict[int, int]  # expert -> slot
_KEPT_SHARE = 7 / 8  # of the weight of earlier experts in how long one takes


class ComputeSeconds:
    """Seconds in which the CPU computes an expert where it is stored, by the bit length of its number of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        before = self._seconds.get(size, seconds)
        self._seconds[size] = _KEPT_SHARE * before + (1 - _KEPT_SHARE) * seconds

    def expected(self, tokens: Ids) -> NDArray[np.float64]:
        """Seconds float64 [n] of experts with ``tokens`` [n]: those of the nearest size that was computed; 0 if none
        was, so that one is."""
        if not self._seconds:
            return np.zeros(len(tokens))
        sizes = [min(self._seconds, key=lambda size: abs(size - count.bit_length())) for count in tokens.tolist()]
        return np.array([self._seconds[size] for size in sizes], dtype=float)


class SlotPager:
    """Slots of the experts of all layers: uint8 ``slots`` [largest capacity + `STAGED`, slot bytes]. One thread at a
    time has a turn; while ``lock`` is held, no turn begins."""

    def __init__(self, residency: ResidencyManager, store: OffloadStore, slots: Tensor) -> None:
        self.residency, self.store, self.slots = residency, store, slots
        self.table = SlotTable(len(slots), range(len(slots) - STAGED, len(slots)))
        self.stats = TransferStats()
        self.compute_s = ComputeSeconds()
        self.lock = threading.RLock()
        self._prefetched: dict[Page, Transfer] = {}  # not needed yet
        self._leased: list[Transfer] = []  # prefetches, whose slots must not be reassigned before they arrived

    def turn(self, layer: int) -> Turn:
        return Turn(self, layer)

    def begin(self) -> None:
        """Start to transfer the experts that are resident before the first turn."""
        with self.lock:
            for page, slot in self.residency.first_pages():
                self._start_ahead(page, slot)

    def end(self) -> None:
        """Wait for all transfers; no turn may begin afterwards."""
        with self.lock:
            for transfer in self.table.in_flight.values():
                with suppress(MoelightError):  # the page is no longer needed
                    transfer.wait()

    def prefetch(self, layer: int) -> None:
        for coming, fetched in self.residency.admit_ahead(layer):
            for expert, slot in zip(fetched.ids.tolist(), fetched.slots.tolist(), strict=True):
                page = Page(layer=coming, expert=expert)
                self._prefetched[page] = self._start_ahead(page, slot)
                self.stats.ahead_pages += 1

    def left_in_place(self, layer: int, ids: Ids) -> frozenset[int]:
        """The experts among ``ids`` [tokens, k] to compute where they are stored, which is host memory."""
        schedule = self.residency.residency.controls.schedule
        if not isinstance(self.store, HostStore) or schedule.mode == "gpu_only":
            return frozenset()
        experts, tokens = np.unique(ids, return_counts=True)
        missing = self.residency.table[layer][experts] < 0
        experts, tokens = experts[missing], tokens[missing]
        placed = self.residency.residency.place_missing(
            tokens, fetch_s=self.store.copy_s(layer), cpu_s=self.compute_s.expected(tokens)
        )
        return frozenset(experts[placed.computed].tolist())

    def settle(self) -> None:
        """Release the leases of prefetched pages that arrived."""
        for transfer in [transfer for transfer in self._leased if transfer.done()]:
            self._leased.remove(transfer)
            self.residency.release(transfer.page.layer, [transfer.page.expert])

    def start(self, page: Page, slot: int) -> Transfer:
        before = self.table.in_flight.get(slot)
        if before is not None and not before.done():
            before.wait()  # the old page is obsolete, but two transfers must not write to one slot
        into = self.slots[slot][: self.store.slot_bytes[page.layer]]
        transfer = Transfer(page, slot, into, pending=self.store.start(page, [(0, into)]))
        self.table.begin(transfer)
        self._prefetched.pop(page, None)
        self.stats.pages += 1
        self.stats.bytes += into.numel()
        return transfer

    def count_hit(self, page: Page) -> None:
        """Update the statistics if ``page``, which is needed now, was prefetched."""
        transfer = self._prefetched.pop(page, None)
        if transfer is not None:
            self.stats.record_useful(transfer)

    def wait(self, page: Page, slot: int) -> None:
        """Return when ``slot`` holds ``page``."""
        if self.table.pages[slot] != page:
            raise MoelightError(f"slot {slot} holds {self.table.pages[slot]}, {page} was expected")
        transfer = self.table.in_flight.get(slot)
        if transfer is not None:
            began = time.perf_counter()
            transfer.wait()
            self.stats.stall_s += time.perf_counter() - began
            del self.table.in_flight[slot]

    def arrived(self, slot: int) -> bool:
        """True if no transfer into ``slot`` is in flight."""
        transfer = self.table.in_flight.get(slot)
        return transfer is None or transfer.done()

    def _start_ahead(self, page: Page, slot: int) -> Transfer:
        self.residency.lease(page.layer, [page.expert])
        self._leased.append(self.start(page, slot))
        return self._leased[-1]


class Turn:
    """One layer's use of experts while it computes: `need`, then `in_place` and `arriving`, or `page`."""

    def __init__(self, pager: SlotPager, layer: int) -> None:
        self.layer = layer
        self._pager, self._ring = pager, pager.table
        self._slots: Slots = {}
        self._in_place: dict[int, Tensor] = {}  # pages of experts to compute where they are stored
        self._asked = 0
        self._waiting: deque[int] = deque()  # streamed experts whose transfers have not started
        self._staged: deque[tuple[int, int]] = deque()  # (expert, slot) of started transfers, in order

    def __enter__(self) -> Turn:
        self._pager.lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._waiting.clear()
            self._drop(len(self._staged))
            self._slots, self._in_place = {}, {}
            self._pager.residency.end_use()
        finally:
            self._pager.lock.release()

    def __len__(self) -> int:
        return self._asked

    def need(self, ids: Ids, scores: NDArray[np.float32]) -> None:
        """Request ``ids`` [tokens, k] with their router weights."""
        pager, stats = self._pager, self._pager.stats
        pager.settle()
        access = pager.residency.use(self.layer, ids, scores, leave=pager.left_in_place(self.layer, ids))
        self._asked += len(access.hits) + len(access.misses) + len(access.kept_out)
        stats.visits += 1
        table = pager.residency.table[self.layer]  # a rule may have revoked slots of this turn
        self._slots = {expert: slot for expert, slot in self._slots.items() if table[expert] == slot}
        for expert, slot in zip(access.hits.tolist(), access.hit_slots.tolist(), strict=True):
            self._slots[expert] = slot
            pager.count_hit(self._page(expert))
        for expert, slot in zip(access.misses.tolist(), access.slots.tolist(), strict=True):
            if slot >= 0:
                self._slots[expert] = slot
                pager.start(self._page(expert), slot)
            else:
                self._waiting.append(expert)
        for expert in access.kept_out.tolist():
            assert isinstance(pager.store, HostStore)
            self._in_place[expert] = pager.store.stored(self._page(expert))
        stats.in_place += len(access.kept_out)
        stats.streamed += len(self._waiting)
        self._stage()

    def has(self, expert: int) -> bool:
        staged = any(expert == other for other, _ in self._staged)
        return expert in self._slots or expert in self._in_place or expert in self._waiting or staged

    def look_ahead(self) -> None:
        """Prefetch the predicted experts of later layers. Slots of this turn that a policy rule has revoked remain
        valid until its end, because nothing is prefetched into them."""
        table = self._pager.residency.table[self.layer]
        if all(table[expert] == slot for expert, slot in self._slots.items()):
            self._pager.prefetch(self.layer)

    @property
    def in_place(self) -> Mapping[int, Tensor]:
        """Pages in host memory, uint8 [page bytes], of the requested experts that are computed where they are."""
        return self._in_place

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Record that an expert of `in_place` was computed for so many ``tokens``."""
        self._pager.compute_s.note(tokens, seconds)

    def page(self, expert: int) -> Tensor:
        """The page of ``expert``, uint8 [page bytes]: in host memory if it is computed there; else in its slot, where
        it has arrived; valid until the next expert if ``expert`` is streamed."""
        if (page := self._in_place.get(expert)) is not None:
            return page
        slot = self._slots.get(expert)
        return self._pager.slots[self._wait(expert, self._staged_slot(expert) if slot is None else slot)]

    def arriving(self, *, together: bool) -> Iterator[Slots]:
        """Yield all requested experts but those `in_place` in groups, those that have arrived first, each valid until
        the next; ``together``: all that have slots of their own at once."""
        left = dict(self._slots)
        while left:
            ready = left if together else {expert: slot for expert, slot in left.items() if self._pager.arrived(slot)}
            ready = ready or dict([next(iter(left.items()))])
            yield {expert: self._wait(expert, slot) for expert, slot in ready.items()}
            left = {expert: slot for expert, slot in left.items() if expert not in ready}
        while self._staged:
            ready = dict(list(self._staged)[: len(self._staged) if together else 1])
            yield {expert: self._wait(expert, slot) for expert, slot in ready.items()}
            self._drop(len(ready))

    def _page(self, expert: int) -> Page:
        return Page(layer=self.layer, expert=expert)

    def _wait(self, expert: int, slot: int) -> int:
        self._pager.wait(self._page(expert), slot)
        return slot

    def _staged_slot(self, expert: int) -> int:
        """Streamed in request order: experts before ``expert`` are dropped, one out of order is transferred again."""
        if all(other != expert for other, _ in self._staged):
            if expert in self._waiting:
                self._waiting.remove(expert)
            self._waiting.appendleft(expert)
            self._drop(len(self._staged))
        while self._staged[0][0] != expert:
            self._drop(1)
        return self._staged[0][1]

    def _drop(self, count: int) -> None:
        """Give back the first ``count`` ring slots and start the next transfers."""
        for _ in range(count):
            expert, slot = self._staged.popleft()
            self._ring.give(slot, self._page(expert))
        self._stage()

    def _stage(self) -> None:
        while self._waiting and self._ring.unused:
            expert, slot = self._waiting.popleft(), self._ring.take()
            self._pager.start(self._page(expert), slot)
            self._staged.append((expert, slot))
