"""What small passes know of the ring: which of its pages nobody uses, what is still in them, and what fetching took."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.schedule import Page


class FreeSlots:
    """Pages of the ring that nobody uses, the longest unused first, and what is still in them."""

    def __init__(self) -> None:
        self._pages: dict[int, Page | None] = {}
        self._where: dict[Page, int] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def give(self, ring: int, page: Page | None) -> None:
        """Nobody uses ``ring`` any more, in which ``page`` is."""
        self._pages[ring] = page
        if page is not None:
            self._where[page] = ring

    def take(self) -> int:
        """The longest unused one; what was in it is lost."""
        ring = next(iter(self._pages))
        self._forget(ring)
        return ring

    def __contains__(self, page: Page) -> bool:
        return page in self._where

    def find(self, page: Page) -> int | None:
        """Take the one that still holds ``page``; None: none does."""
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
    """What fetching took: ``pages`` and their seconds on the way, one after the other; what guesses spared. ``found``
    were still in the ring."""

    pages: int = 0
    seconds: float = 0.0
    ahead_pages: int = 0
    ahead_useful: int = 0
    ahead_late: int = 0
    spared_s: float = 0.0
    found: int = 0

    @property
    def page_s(self) -> float:
        """Seconds of one page."""
        return self.seconds / self.pages if self.pages else 0.0

    def came_true(self, waited_s: float, *, there: bool) -> None:
        """A guess was right; it had been on its way for ``waited_s``, and was there or not."""
        self.ahead_useful += 1
        self.ahead_late += not there
        self.spared_s += self.page_s if there else min(waited_s, self.page_s)
