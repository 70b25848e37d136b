"""The memory of every expert page of an engine: a resident slot on the fast tier, host memory, or a slot of the ring.

``table``, int32 [layers, experts], holds the resident slot of each page, or -1. The stream of the other pages is
endless: page k is ``streamed[k % len(streamed)]`` and occupies page k of the ring (modulo its length) until a later
page overwrites it. Stream positions and ring slots count the parts of pages, which are contiguous and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from moelight.core.schedule import Buffer, Page
from moelight.paging.arena import slots
from moelight.paging.slots import PendingPage

LOADED_AT_ONCE = 4

StartPage = Callable[[Page, Tensor, int], PendingPage | None]  # (page, destination, offset in the page)
ExpertWeights = tuple[Tensor, Tensor]


class PageStore:
    """Page bytes in arenas of slots: ``experts`` (resident), ``host_experts`` (pages ``far``), ``ring`` and
    ``pinned_ring``. ``parts`` are byte ranges of a page; ``view`` returns ``(gate_up [2I, H], down [H, I])``."""

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
        self.page_bytes = parts[-1].stop

        def cut(purpose: str) -> list[Tensor]:
            arena = arenas.get(purpose)
            return [] if arena is None else [slot[: self.page_bytes] for slot in slots(arena, slot_bytes)]

        self.fast_tier, self.table, self._parts = fast_tier, table, parts
        self.resident_pages, self.ring_pages, self.pinned_pages = cut("experts"), cut("ring"), cut("pinned_ring")
        self._slots = {
            space: [part for page in pages for part in self._in_parts(page)]
            for space, pages in (("ring", self.ring_pages), ("pinned", self.pinned_pages))
        }
        self._offloaded = dict(zip(far, cut("host_experts"), strict=True))
        self.resident_views = [view(page) for page in self.resident_pages]
        self.ring_views = [view(page) for page in self.ring_pages]
        self._offloaded_views = {page: view(slot) for page, slot in self._offloaded.items()}
        self._computed: frozenset[Page] = frozenset()
        self._layers_computed: frozenset[int] = frozenset()
        self._position_in_stream: dict[Page, int] = {}

    def _in_parts(self, page: Tensor) -> list[Tensor]:
        return [page[part.start : part.stop] for part in self._parts]

    def follow(self, streamed: Sequence[Page], computed: Sequence[Page]) -> None:
        """Set the streamed parts and the pages that the CPU computes from the next pass on."""
        whole = (page for page in streamed if page.part == 0)
        self._position_in_stream = {page: k for k, page in enumerate(whole)}
        self._computed = frozenset(computed)
        self._layers_computed = frozenset(page.layer for page in computed)

    def load(self, start: StartPage) -> None:
        """Fill all resident and all host slots, a few pages at a time."""
        coming: deque[PendingPage] = deque()
        bounce: Tensor | None = None
        resident = [
            (Page(layer=int(layer), expert=int(expert)), self.resident_pages[self.table[layer, expert]])
            for layer, expert in np.argwhere(self.table >= 0)
        ]
        for page, home in sorted([*resident, *self._offloaded.items()], key=lambda each: each[0]):
            beside = home.device.type != "cpu"
            if beside and bounce is None:
                bounce = home.new_empty(home.numel(), device="cpu")
            into = bounce if beside and bounce is not None else home
            arriving = start(page, into, 0)
            if arriving is not None:
                coming.append(arriving)
            while len(coming) > (0 if beside else LOADED_AT_ONCE):
                coming.popleft().wait()
            if beside:
                home.copy_(into)
        while coming:
            coming.popleft().wait()

    def slot(self, buffer: Buffer, position: int) -> Tensor:
        """A part's slot in the ring or in pinned memory, relative to stream ``position``."""
        ring = self._slots[buffer.space]
        return ring[(position + buffer.index) % len(ring)]

    def swap(self, slot: int, ring: int) -> None:
        """Exchange the memory of ring page ``ring`` and resident ``slot``, so that the ring's page becomes resident."""
        self.resident_pages[slot], self.ring_pages[ring] = self.ring_pages[ring], self.resident_pages[slot]
        self.resident_views[slot], self.ring_views[ring] = self.ring_views[ring], self.resident_views[slot]
        each = len(self._parts)
        self._slots["ring"][ring * each : (ring + 1) * each] = self._in_parts(self.ring_pages[ring])

    def ring_page(self, k: int, position: int) -> int:
        """Ring page of page k of the stream, counted from ``position``."""
        return (position // len(self._parts) + k) % len(self.ring_pages)

    def phase(self, position: int) -> int:
        """Ring page at ``position``; passes of equal phase find the same pages in the same ring pages."""
        return self.ring_page(0, position) if self.ring_pages else 0

    def offloaded_tier(self, page: Page) -> Tensor:
        """Bytes of a part that is offloaded to host memory."""
        part = self._parts[page.part]
        return self._offloaded[replace(page, part=0)][part.start : part.stop]

    def offloaded_page(self, page: Page) -> Tensor | None:
        """Bytes of a whole page; None if it is only on disk."""
        return self._offloaded.get(page)

    def offloaded_view(self, page: Page) -> ExpertWeights:
        return self._offloaded_views[page]

    def begin(self, page: Page) -> int:
        """Offset of a part in its page in bytes."""
        return self._parts[page.part].start

    def layer_experts(self, layer: int, num_experts: int, position: int) -> list[ExpertWeights | None]:
        """Weights of the experts of ``layer`` in the pass begun at ``position``; None for experts of the CPU."""
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
        """True if the CPU computes any experts of ``layer`` in place."""
        return layer in self._layers_computed

    def computed_experts(self, layer: int, num_experts: int) -> list[ExpertWeights | None]:
        """Weights of the experts that the CPU computes in place; None for the others."""
        pages = (Page(layer=layer, expert=expert) for expert in range(num_experts))
        return [self._offloaded_views[page] if page in self._computed else None for page in pages]
