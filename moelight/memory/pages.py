"""Where the bytes of every expert page are: in a resident slot beside the compute unit, at a far home, or in a ring slot.

Which pages are in resident slots is the ``table``'s matter: int32 [layers, experts], the slot of each or -1. It changes
between passes where residents are learned. The stream of the pages that are not resident never ends: page k of it is
``streamed[k % len(streamed)]`` and lies in page k of the ring, counted round, from its arrival until a later page takes
the place. Streamed pages move part by part, so positions in the stream and slots of the rings are counted in parts; a
page's parts lie together, in their order. Knows bytes and slots; refuses to know when anything moves and how files are
read (``start`` is given).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from moelight.core.schedule import Buffer, Page
from moelight.memory.arena import slots

LOADED_AT_ONCE = 4


class PendingPage(Protocol):
    """A page on its way."""

    def wait(self) -> None:
        """Return when it is there; raise what went wrong."""
        ...

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...


StartPage = Callable[[Page, Tensor, int], PendingPage | None]  # the bytes of a page from the last argument on
ExpertWeights = tuple[Tensor, Tensor]


class PageStore:
    """Page bytes over regions of slots: ``experts`` (resident), ``host_experts`` (far) and the two rings.

    ``far`` are the pages with a home in host memory across the link, ``computed`` those that the CPU computes there.
    ``parts`` are the bytes of each part of a page; ``view`` turns a page into an expert's ``(gate_up [2I, H],
    down [H, I])``.
    """

    def __init__(
        self,
        arenas: Mapping[str, Tensor],
        table: np.ndarray,
        *,
        fast_tier: str,
        far: Sequence[Page],
        parts: Sequence[range],
        slot_bytes: int,
        view: Callable[[Tensor], ExpertWeights],
    ) -> None:
        page_bytes = parts[-1].stop

        def cut(purpose: str) -> list[Tensor]:
            return [slot[:page_bytes] for slot in slots(arenas[purpose], slot_bytes)] if purpose in arenas else []

        def in_parts(pages: list[Tensor]) -> list[Tensor]:
            return [page[part.start : part.stop] for page in pages for part in parts]

        self.fast_tier, self.table, self._parts = fast_tier, table, parts
        self.resident_pages, self.ring_pages, self.pinned_pages = cut("experts"), cut("ring"), cut("pinned_ring")
        self._slots = {"ring": in_parts(self.ring_pages), "pinned": in_parts(self.pinned_pages)}
        self._offloaded = dict(zip(far, cut("host_experts"), strict=True))
        self.resident_views = [view(page) for page in self.resident_pages]
        self.ring_views = [view(page) for page in self.ring_pages]
        self._offloaded_views = {page: view(slot) for page, slot in self._offloaded.items()}
        self._computed: frozenset[Page] = frozenset()
        self._layers_computed: frozenset[int] = frozenset()
        self._position_in_stream: dict[Page, int] = {}

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return self._parts[-1].stop

    def follow(self, streamed: Sequence[Page], computed: Sequence[Page]) -> None:
        """From the next pass on the stream is made of the parts ``streamed``; the CPU computes ``computed`` where they
        lie. All others are resident, as the table says."""
        whole = (page for page in streamed if page.part == 0)
        self._position_in_stream = {page: k for k, page in enumerate(whole)}
        self._computed = frozenset(computed)
        self._layers_computed = frozenset(page.layer for page in computed)

    def load(self, start: StartPage) -> None:
        """Fill every home that is memory, a few pages at a time."""
        coming: deque[PendingPage] = deque()
        bounce: Tensor | None = None
        for page, home in self._homes():
            if home.device.type == "cpu":
                _begin(start, page, home, coming)
                continue
            if bounce is None:
                bounce = home.new_empty(home.numel(), device="cpu")
            _begin(start, page, bounce, coming)
            _finish(coming, most=0)
            home.copy_(bounce)
        _finish(coming, most=0)

    def _homes(self) -> Sequence[tuple[Page, Tensor]]:
        resident = [
            (Page(layer=int(layer), expert=int(expert)), self.resident_pages[self.table[layer, expert]])
            for layer, expert in np.argwhere(self.table >= 0)
        ]
        return sorted([*resident, *self._offloaded.items()], key=lambda each: each[0])

    def slot(self, buffer: Buffer, position: int) -> Tensor:
        """Bytes of a part's slot in the ring or in pinned memory, named relative to the stream's ``position``."""
        ring = self._slots[buffer.space]
        return ring[(position + buffer.index) % len(ring)]

    def swap(self, slot: int, ring: int) -> None:
        """Let the page that is in page ``ring`` of the ring be resident, in ``slot``: the two exchange their memory."""
        self.resident_pages[slot], self.ring_pages[ring] = self.ring_pages[ring], self.resident_pages[slot]
        self.resident_views[slot], self.ring_views[ring] = self.ring_views[ring], self.resident_views[slot]
        page, each = self.ring_pages[ring], len(self._parts)
        self._slots["ring"][ring * each : (ring + 1) * each] = [page[part.start : part.stop] for part in self._parts]

    def ring_page(self, k: int, position: int) -> int:
        """The page of the ring in which page k of the stream lies, counted from ``position``."""
        return (position // len(self._parts) + k) % len(self.ring_pages)

    def phase(self, position: int) -> int:
        """On which page of the ring the stream stands; equal phases find the same pages in the same places."""
        return self.ring_page(0, position) if self.ring_pages else 0

    def offloaded_tier(self, page: Page) -> Tensor:
        """Bytes of a part of a page whose home is host memory across the link."""
        part = self._parts[page.part]
        return self._offloaded[replace(page, part=0)][part.start : part.stop]

    def offloaded_page(self, page: Page) -> Tensor | None:
        """Bytes of a whole page with such a home; None for one that only the disk has."""
        return self._offloaded.get(page)

    def offloaded_view(self, page: Page) -> ExpertWeights:
        """The weights of an expert with a home in host memory across the link."""
        return self._offloaded_views[page]

    def begin(self, page: Page) -> int:
        """Where in its page a part begins, in bytes."""
        return self._parts[page.part].start

    def layer_experts(self, layer: int, num_experts: int, position: int) -> list[ExpertWeights | None]:
        """The weights of every expert of ``layer``, wherever they are in the pass that began at ``position``; None for
        those that the CPU computes where they lie."""
        experts: list[ExpertWeights | None] = []
        for expert in range(num_experts):
            page, slot = Page(layer=layer, expert=expert), self.table[layer, expert]
            if slot >= 0:
                experts.append(self.resident_views[slot])
            elif page in self._computed:
                experts.append(None)
            else:
                experts.append(self.ring_views[self.ring_page(self._position_in_stream[page], position)])
        return experts

    def computes(self, layer: int) -> bool:
        """Whether the CPU computes any experts of ``layer`` where they lie."""
        return layer in self._layers_computed

    def computed_experts(self, layer: int, num_experts: int) -> list[ExpertWeights | None]:
        """The weights of the experts of ``layer`` that the CPU computes where they lie; None for the others."""
        pages = (Page(layer=layer, expert=expert) for expert in range(num_experts))
        return [self._offloaded_views[page] if page in self._computed else None for page in pages]


def _begin(start: StartPage, page: Page, into: Tensor, coming: deque[PendingPage]) -> None:
    arriving = start(page, into, 0)
    if arriving is not None:
        coming.append(arriving)
    _finish(coming, most=LOADED_AT_ONCE)


def _finish(coming: deque[PendingPage], *, most: int) -> None:
    while len(coming) > most:
        coming.popleft().wait()
