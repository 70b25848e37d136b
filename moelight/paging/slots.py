"""The contents of slots, transfers in flight, and their statistics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moelight.core.schedule import Page


class PendingPage(Protocol):
    """A read or a copy in flight."""

    def wait(self) -> None:
        """Block the computation until the bytes have arrived; raises the error of the read."""
        ...

    def done(self) -> bool:
        """True if the destination may be overwritten: the bytes have arrived, or later copies are ordered behind."""
        ...


@dataclass(slots=True, eq=False)
class Transfer:
    """One page on its way ``into`` the memory of ``slot``, from host memory ``source`` across a link if given;
    ``pending`` None: nothing to wait for."""

    page: Page
    slot: int
    into: Tensor
    source: Tensor | None = None
    pending: PendingPage | None = None
    since_s: float = field(default_factory=time.perf_counter)

    def done(self) -> bool:
        return self.pending is None or self.pending.done()

    def wait(self) -> None:
        """Block the computation until the page has arrived; raises the error of the transfer."""
        if self.pending is not None:
            self.pending.wait()


@dataclass(slots=True)
class TransferStats:
    """Statistics of transfers.

    Attributes:
        pages: transferred pages, in ``seconds``; ``bytes`` of an attached model.
        ahead_pages: prefetched pages; ``ahead_useful`` were needed, ``ahead_late`` of those still in transfer then.
        spared_s: seconds of transfer that prefetches saved.
        found: needed pages that were still in the ring.
        visits: layers that used experts.
        streamed: needed pages that got no slot of their own.
        in_place: experts that were computed where they are stored.
        stall_s: seconds that the computation waited for pages.
    """

    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ahead_pages: int = 0
    ahead_useful: int = 0
    ahead_late: int = 0
    spared_s: float = 0.0
    found: int = 0
    visits: int = 0
    streamed: int = 0
    in_place: int = 0
    stall_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Figures of on-demand passes, for JSON."""
        names = ("pages", "seconds", "ahead_pages", "ahead_useful", "ahead_late", "spared_s", "found")
        return {name: getattr(self, name) for name in names}

    def record_useful(self, transfer: Transfer) -> None:
        page_s, late = self.seconds / self.pages if self.pages else 0.0, not transfer.done()
        self.ahead_useful += 1
        self.ahead_late += late
        self.spared_s += min(time.perf_counter() - transfer.since_s, page_s) if late else page_s


class SlotTable:
    """Pages of slots, transfers into slots, and unused ring slots, whose pages can be found until the slot is taken.

    Attributes:
        pages: what each slot holds or receives; None: nothing valid.
        in_flight: prefetched or awaited pages, by slot.
        unused: the longest unused first.
    """

    def __init__(self, slots: int, ring: Iterable[int]) -> None:
        self.pages: list[Page | None] = [None] * slots
        self.in_flight: dict[int, Transfer] = {}
        self.unused = dict.fromkeys(ring)
        self._where: dict[Page, int] = {}

    def __contains__(self, page: Page) -> bool:
        """True if an unused slot holds ``page``."""
        return page in self._where

    def begin(self, transfer: Transfer) -> None:
        self.pages[transfer.slot], self.in_flight[transfer.slot] = transfer.page, transfer

    def give(self, slot: int, page: Page | None) -> None:
        """Mark ``slot``, which holds ``page``, as unused."""
        self.pages[slot], self.unused[slot] = page, None
        if page is not None:
            self._where[page] = slot

    def take(self) -> int:
        """Take the longest unused slot; its contents are lost."""
        slot = next(iter(self.unused))
        self._forget(slot)
        return slot

    def find(self, page: Page) -> int | None:
        """Take the unused slot that holds ``page``, if any."""
        slot = self._where.get(page)
        if slot is not None:
            self._forget(slot)
        return slot

    def _forget(self, slot: int) -> None:
        del self.unused[slot]
        page = self.pages[slot]
        if page is not None and self._where.get(page) == slot:
            del self._where[page]
