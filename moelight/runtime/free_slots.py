"""Free list of the ring in on-demand passes, and statistics of their transfers."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.schedule import Page


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
