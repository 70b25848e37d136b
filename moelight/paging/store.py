"""The memory of every expert page of an engine: a resident slot on the fast tier, host memory, or a slot of the ring.

The ``table``, int32 [layers, experts], holds the resident slot of each page, or -1; it changes between passes where
residents are learned. The stream of the other pages is endless: page k of the stream is ``streamed[k % len(streamed)]``
and occupies page k of the ring (modulo its length) from its arrival until a later page overwrites it. Pages are
streamed in parts, so stream positions and ring slots count parts; the parts of a page are contiguous and in order. The
schedule decides when pages are transferred; ``start`` reads files.
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
    """Page bytes in arenas of slots: ``experts`` (resident), ``host_experts`` (offloaded), ``ring`` and
    ``pinned_ring``.

    ``far`` are the pages offloaded to host memory, ``computed`` those that the CPU computes there. ``parts`` are the
    byte ranges of a page's parts; ``view`` returns a page's ``(gate_up [2I, H], down [H, I])``.
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
        """Set the stream to the parts ``streamed`` and the CPU's pages to ``computed``, from the next pass on. All
        other pages are resident, by the table.
        """
        whole = (page for page in streamed if page.part == 0)
        self._position_in_stream = {page: k for k, page in enumerate(whole)}
        self._computed = frozenset(computed)
        self._layers_computed = frozenset(page.layer for page in computed)

    def load(self, start: StartPage) -> None:
        """Fill all resident slots and all offloaded slots in host memory, a few pages at a time."""
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
        """Bytes of a part's slot in the ring or in pinned memory, relative to stream ``position``."""
        ring = self._slots[buffer.space]
        return ring[(position + buffer.index) % len(ring)]

    def swap(self, slot: int, ring: int) -> None:
        """Make the page in ring page ``ring`` resident in ``slot``, by exchanging the memory of the two."""
        self.resident_pages[slot], self.ring_pages[ring] = self.ring_pages[ring], self.resident_pages[slot]
        self.resident_views[slot], self.ring_views[ring] = self.ring_views[ring], self.resident_views[slot]
        each = len(self._parts)
        self._slots["ring"][ring * each : (ring + 1) * each] = self._in_parts(self.ring_pages[ring])

    def ring_page(self, k: int, position: int) -> int:
        """The ring page that holds page k of the stream, counted from ``position``."""
        return (position // len(self._parts) + k) % len(self.ring_pages)

    def phase(self, position: int) -> int:
        """The ring page at stream ``position``; passes with equal phases find the same pages in the same ring pages."""
        return self.ring_page(0, position) if self.ring_pages else 0

    def offloaded_tier(self, page: Page) -> Tensor:
        """Bytes of a part of a page that is offloaded to host memory."""
        part = self._parts[page.part]
        return self._offloaded[replace(page, part=0)][part.start : part.stop]

    def offloaded_page(self, page: Page) -> Tensor | None:
        """Bytes of a whole page that is offloaded to host memory; None for a page that is only on disk."""
        return self._offloaded.get(page)

    def offloaded_view(self, page: Page) -> ExpertWeights:
        """The weights of an expert that is offloaded to host memory."""
        return self._offloaded_views[page]

    def begin(self, page: Page) -> int:
        """Offset of a part in its page, bytes."""
        return self._parts[page.part].start

    def layer_experts(self, layer: int, num_experts: int, position: int) -> list[ExpertWeights | None]:
        """The weights of every expert of ``layer``, resident or in the ring, in the pass that began at ``position``;
        None for experts that the CPU computes in place.
        """
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
        """The weights of the experts of ``layer`` that the CPU computes in place; None for the others."""
        pages = (Page(layer=layer, expert=expert) for expert in range(num_experts))
        return [self._offloaded_views[page] if page in self._computed else None for page in pages]
