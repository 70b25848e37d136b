"""Pages the experts of a model that computes elsewhere into a few slots, in time for each layer.

A `Residency` decides which experts are resident and which are prefetched; the pager transfers them. Every slot is
tagged with the (layer, expert) whose bytes it holds or receives, and is only handed out under that tag. Does not depend
on what an expert computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moelight.core.errors import MoelightError
from moelight.experts.residency import Residency
from moelight.integrations.links import PageLink, SlotTransfer
from moelight.integrations.page_stores import OffloadStore

# Streamed pages (experts without a slot) in flight at once.
STAGED = 4

Ids = NDArray[np.int64]
Slots = dict[int, int]  # expert -> slot


@dataclass(slots=True)
class PagerStats:
    """Counts so far: layer visits (``turns``), pages transferred, and the time that the computation waited for them.
    ``streamed``: misses without a slot. ``issued``: prefetched pages; ``useful``: prefetched pages that were in their
    slot, or in flight, when their layer used them."""

    turns: int = 0
    streamed: int = 0
    transfers: int = 0
    bytes: int = 0
    transfer_s: float = 0.0
    stall_s: float = 0.0
    issued: int = 0
    useful: int = 0


class ExpertPager:
    """Slots of one size for the experts of all layers: uint8 ``slots`` [largest capacity + `STAGED`, slot bytes].

    One thread at a time has a turn; other threads wait for its end.
    """

    def __init__(self, residency: Residency, home: OffloadStore, link: PageLink, slots: Tensor) -> None:
        self.residency, self.cache, self.home, self.slots = residency, residency.cache, home, slots
        self.moved = PagerStats()
        self.link = link
        self._turn = threading.RLock()
        self._resident = slots.shape[0] - STAGED
        self._tags: list[tuple[int, int] | None] = [None] * slots.shape[0]
        self._flights: dict[int, SlotTransfer] = {}
        self._prefetched: set[int] = set()
        self._ahead: list[tuple[int, Ids, list[SlotTransfer]]] = []

    def turn(self, layer: int) -> Turn:
        """The turn of one layer, a context manager."""
        return Turn(self, layer)

    def held(self) -> threading.RLock:
        """A lock that keeps every turn from beginning while it is held."""
        return self._turn

    def begin(self) -> None:
        """Prefetch the experts that are resident before the first turn."""
        with self._turn:
            for layer, expert, slot in self.residency.begin_with.tolist():
                self._fetch_ahead(layer, np.array([expert]), np.array([slot]))

    def hint(self, layer: int, ids: Ids, scores: NDArray[np.float32]) -> None:
        """Record that the router of ``layer`` would choose ``ids`` [tokens, k] with weights ``scores``."""
        distinct, places = np.unique(ids, return_inverse=True)
        mass = np.asarray(np.bincount(places.ravel(), scores.ravel(), minlength=len(distinct)), np.float64)
        self.residency.hint(layer, distinct, mass)

    @property
    def predicts_experts(self) -> bool:
        """True if predictions require the routers of later layers to be evaluated."""
        return self.cache.predictor.rules.strategy == "next_router"

    def end(self) -> None:
        """Wait for all transfers in flight; no turn may begin afterwards."""
        with self._turn:
            self.link.close()

    def _start(self, layer: int, expert: int, slot: int) -> SlotTransfer:
        before = self._flights.get(slot)
        if before is not None and not before.arrived:
            before.wait()  # the old page is obsolete, but two transfers must not write to one slot
        in_flight = self.link.start(self.home, layer, expert, [(0, self.slots[slot])])
        self._tags[slot], self._flights[slot] = (layer, expert), in_flight
        self._prefetched.discard(slot)
        self.moved.transfers += 1
        self.moved.bytes += self.slots.shape[1]
        return in_flight

    def _await(self, layer: int, expert: int, slot: int) -> None:
        """Return when the slot holds the expert."""
        if self._tags[slot] != (layer, expert):
            raise MoelightError(f"slot {slot} holds {self._tags[slot]}, expert {expert} of layer {layer} was expected")
        in_flight = self._flights.get(slot)
        if in_flight is None:
            return
        began = time.perf_counter()
        in_flight.wait()  # also if it has arrived: its times are valid only after the wait
        self.moved.stall_s += time.perf_counter() - began
        del self._flights[slot]
        if self.link.held:
            self.moved.transfer_s += in_flight.seconds()

    def _there(self, slot: int) -> bool:
        in_flight = self._flights.get(slot)
        return in_flight is None or in_flight.arrived

    def _settle(self) -> None:
        """Release the leases of prefetched pages that have arrived; a slot in flight is not evicted before."""
        going = []
        for layer, ids, flights in self._ahead:
            if self.link.held and not all(in_flight.arrived for in_flight in flights):
                going.append((layer, ids, flights))
            else:
                self.cache.release(layer, ids.tolist())
        self._ahead = going

    def _fetch_ahead(self, layer: int, ids: Ids, slots: Ids) -> None:
        """Start the transfer of experts of a later layer into slots that the cache assigned."""
        self.cache.lease(layer, ids.tolist())
        flights = [self._start(layer, expert, slot) for expert, slot in zip(ids.tolist(), slots.tolist(), strict=True)]
        self._ahead.append((layer, ids, flights))


class Turn:
    """One layer's use of experts while it computes: `need` requests experts, then `arriving` or `slot` returns them."""

    def __init__(self, pager: ExpertPager, layer: int) -> None:
        self.layer = layer
        self._pager = pager
        self._slots: Slots = {}
        self._asked = 0
        self._leases: list[Ids] = []
        self._waiting: deque[int] = deque()  # streamed experts whose reads have not started
        self._staged: deque[tuple[int, int]] = deque()  # (expert, slot) of started reads, in order
        self._free = deque(range(pager._resident, pager._resident + STAGED))

    def __enter__(self) -> Turn:
        self._pager._turn.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            for ids in self._leases:
                self._pager.cache.release(self.layer, ids.tolist())
            self._leases, self._slots = [], {}
            self._waiting.clear()
            self._staged.clear()
        finally:
            self._pager._turn.release()

    def need(self, ids: Ids, scores: NDArray[np.float32]) -> None:
        """Request the experts ``ids`` [tokens, k] that the layer is about to compute, with their router weights."""
        pager = self._pager
        pager._settle()
        access = pager.residency.access(self.layer, ids, scores)
        self._asked += len(access.hits) + len(access.misses)
        pager.moved.turns += 1
        table = pager.cache.slot_table[self.layer]  # a rule may have revoked slots of this turn
        self._slots = {expert: slot for expert, slot in self._slots.items() if table[expert] == slot}
        here = np.concatenate([access.hits, access.misses[access.slots >= 0]])
        pager.cache.lease(self.layer, here.tolist())
        self._leases.append(here)
        for expert, slot in zip(access.hits.tolist(), access.hit_slots.tolist(), strict=True):
            self._slots[expert] = slot
            if slot in pager._prefetched:
                pager._prefetched.discard(slot)
                pager.moved.useful += 1
        for expert, slot in zip(access.misses.tolist(), access.slots.tolist(), strict=True):
            if slot >= 0:
                self._slots[expert] = slot
                pager._start(self.layer, expert, slot)
            else:
                self._waiting.append(expert)
        pager.moved.streamed += len(self._waiting)
        self._stage()

    def __len__(self) -> int:
        """Number of distinct experts requested."""
        return self._asked

    def has(self, expert: int) -> bool:
        """True if the expert was requested in this turn."""
        return expert in self._slots or expert in self._waiting or any(expert == each for each, _ in self._staged)

    def look_ahead(self) -> None:
        """Prefetch the predicted experts of later layers, queued behind everything this layer needs."""
        pager = self._pager
        if not self._all_resident():
            return
        for layer, found in pager.residency.ahead(self.layer):
            pager._fetch_ahead(layer, found.ids, found.slots)
            pager._prefetched.update(found.slots.tolist())
            pager.moved.issued += len(found.ids)

    def _all_resident(self) -> bool:
        """True if this turn's experts still have their slots. A policy rule may have revoked some; their bytes remain
        valid until the end of the turn unless the slots are reassigned."""
        table = self._pager.cache.slot_table[self.layer]
        return all(table[expert] == slot for expert, slot in self._slots.items())

    def slot(self, expert: int) -> int:
        """The slot of ``expert``, after its page has arrived. A streamed expert's slot is valid until the next call for
        another expert."""
        found = self._slots.get(expert)
        if found is None:
            found = self._staged_slot(expert)
        self._pager._await(self.layer, expert, found)
        return found

    def arriving(self, *, together: bool) -> Iterator[Slots]:
        """Yield all requested experts in groups, those that have arrived first; with ``together``, all that have slots
        of their own at once. A group is valid until the next one is requested."""
        pager = self._pager
        left = dict(self._slots)
        while left:
            ready = left if together else {expert: slot for expert, slot in left.items() if pager._there(slot)}
            if not ready:
                expert = next(iter(left))
                ready = {expert: left[expert]}
            for expert, slot in ready.items():
                pager._await(self.layer, expert, slot)
            yield ready
            left = {expert: slot for expert, slot in left.items() if expert not in ready}
        while self._staged:
            count = len(self._staged) if together else 1
            ready = dict(list(self._staged)[:count])
            for expert, slot in ready.items():
                pager._await(self.layer, expert, slot)
            yield ready
            for _ in ready:
                self._free.append(self._staged.popleft()[1])
            self._stage()

    def _staged_slot(self, expert: int) -> int:
        """The slot of a streamed expert. Streamed experts are used in request order, so those before ``expert`` are
        dropped; one requested out of order is read again."""
        if all(each != expert for each, _ in self._staged):
            if expert in self._waiting:
                self._waiting.remove(expert)
            self._waiting.appendleft(expert)
            self._drop(len(self._staged))
        while self._staged[0][0] != expert:
            self._drop(1)
        return self._staged[0][1]

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._free.append(self._staged.popleft()[1])
        self._stage()

    def _stage(self) -> None:
        while self._waiting and self._free:
            expert, slot = self._waiting.popleft(), self._free.popleft()
            self._pager._start(self.layer, expert, slot)
            self._staged.append((expert, slot))
