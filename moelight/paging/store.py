"""The memory of every expert page of an engine: a resident slot on the fast tier, host memory, or a slot of the ring.

``table``, int32 [layers, experts], holds the resident slot of each page, or -1. The stream of the other pages is
endless: page k is ``streamed[k % len(streamed)]`` and occupies page k of the ring (modulo its length) until a later
page overwrites it. Stream positions and ring slots count the parts of pages, which are contiguous and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moelight.core.schedule import Buffer, Page
from moelight.paging.arena import slots
from moelight.paging.slots import PendingPage

LOADED_AT_ONCE = 4

StartPage = Callable[[Page, Tensor, int], PendingPage | None]  # (page, destination, offset in the page)
ExpertWeights = tuple[Tensor, Tensor]


class SlotMemory(NamedTuple):
    """The bytes of one page, those of its parts, and its weights."""

    page: Tensor
    parts: Sequence[Tensor]
    weights: ExpertWeights


class PageStore:
    """Page bytes in arenas of slots: ``experts`` (``resident``), ``host_experts`` (``offloaded`` pages ``far``),
    ``ring`` and ``pinned_ring``. ``parts`` are byte ranges of a page; ``view`` returns ``(gate_up [2I, H], down
    [H, I])``."""

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

        def cut(purpose: str) -> list[SlotMemory]:
            arena = arenas.get(purpose)
            pages = () if arena is None else (slot[: self.page_bytes] for slot in slots(arena, slot_bytes))
            return [SlotMemory(page, [page[part.start : part.stop] for part in parts], view(page)) for page in pages]

        self.fast_tier, self.table, self._parts = fast_tier, table, parts
        self.resident, self.ring, self.pinned = cut("experts"), cut("ring"), cut("pinned_ring")
        self.offloaded = dict(zip(far, cut("host_experts"), strict=True))
        self._computed: frozenset[Page] = frozenset()
        self.layers_computed: frozenset[int] = frozenset()  # layers with experts that the CPU computes in place
        self._position_in_stream: dict[Page, int] = {}

    def follow(self, streamed: Sequence[Page], computed: Sequence[Page]) -> None:
        """Set the streamed parts and the pages that the CPU computes from the next pass on."""
        whole = (page for page in streamed if page.part == 0)
        self._position_in_stream = {page: k for k, page in enumerate(whole)}
        self._computed = frozenset(computed)
        self.layers_computed = frozenset(page.layer for page in computed)

    def load(self, start: StartPage) -> None:
        """Fill all resident and all host slots, a few pages at a time."""
        coming: deque[PendingPage] = deque()
        bounce: Tensor | None = None
        resident = [
            (Page(layer=layer, expert=expert), self.resident[self.table[layer, expert]])
            for layer, expert in np.argwhere(self.table >= 0).tolist()
        ]  # of which some may be offloaded too
        for page, (home, _, _) in sorted([*resident, *self.offloaded.items()], key=lambda each: each[0]):
            into = home
            if home.device.type != "cpu":
                into = bounce = home.new_empty(home.numel(), device="cpu") if bounce is None else bounce
            arriving = start(page, into, 0)
            if arriving is not None:
                coming.append(arriving)
            while len(coming) > (LOADED_AT_ONCE if into is home else 0):
                coming.popleft().wait()
            if into is not home:
                home.copy_(into)
        for arriving in coming:
            arriving.wait()

    def slot(self, buffer: Buffer, position: int) -> Tensor:
        """A part's slot in the ring or in pinned memory, relative to stream ``position``."""
        pages, each = self.pinned if buffer.space == "pinned" else self.ring, len(self._parts)
        page, part = divmod(position + buffer.index, each)
        return pages[page % len(pages)].parts[part]

    def swap(self, slot: int, ring: int) -> None:
        """Exchange the memory of ring page ``ring`` and resident ``slot``, so that the ring's page becomes resident."""
        self.resident[slot], self.ring[ring] = self.ring[ring], self.resident[slot]

    def ring_page(self, k: int, position: int) -> int:
        """Ring page of page k of the stream, counted from ``position``."""
        return (position // len(self._parts) + k) % len(self.ring)

    def phase(self, position: int) -> int:
        """Ring page at ``position``; passes of equal phase find the same pages in the same ring pages."""
        return self.ring_page(0, position) if self.ring else 0

    def offloaded_tier(self, page: Page) -> Tensor:
        """Bytes of a part that is offloaded to host memory."""
        return self.offloaded[replace(page, part=0)].parts[page.part]

    def offloaded_page(self, page: Page) -> Tensor | None:
        """Bytes of a whole page; None if it is only on disk."""
        return self.offloaded[page].page if page in self.offloaded else None

    def begin(self, page: Page) -> int:
        """Offset of a part in its page in bytes."""
        return self._parts[page.part].start

    def layer_experts(self, layer: int, num_experts: int, position: int) -> list[ExpertWeights | None]:
        """Weights of the experts of ``layer`` in the pass begun at ``position``; None for experts of the CPU."""
        experts: list[ExpertWeights | None] = []
        for expert in range(num_experts):
            page, slot = Page(layer=layer, expert=expert), self.table[layer, expert]
            if slot >= 0:
                experts.append(self.resident[slot].weights)
            elif page in self._computed:
                experts.append(None)
            else:
                experts.append(self.ring[self.ring_page(self._position_in_stream[page], position)].weights)
        return experts

    def computed_experts(self, layer: int, num_experts: int) -> list[ExpertWeights | None]:
        """Weights of the experts that the CPU computes in place; None for the others."""
        pages = (Page(layer=layer, expert=expert) for expert in range(num_experts))
        return [self.offloaded[page].weights if page in self._computed else None for page in pages]
