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
from moelight.kernels.device import on_host
from moelight.paging.slots import PendingPage

LOADED_AT_ONCE = 4

StartPage = Callable[[Page, Tensor, int], PendingPage | None]  # (page, destination, offset in the page)


class SlotMemory(NamedTuple):
    """The bytes of one page, those of its parts, and the ``number`` of this memory among that of all slots that experts
    are computed from (`PageStore.memory`)."""

    page: Tensor
    parts: Sequence[Tensor]
    number: int


class PageStore:
    """Page bytes in arenas of ``slots`` (bytes of each): ``experts`` (``resident``), ``host_experts`` (``offloaded``
    pages ``far``), ``ring`` and ``pinned_ring``. ``parts`` are byte ranges of the longest page, ``bytes_of`` the bytes
    of a page where not all are as long. Slots through which pages of all layers pass hold the longest; those in which
    pages stay may be shorter, and hold pages of layers whose slots are as long. ``memory`` has the bytes of every
    resident and ring slot; memory never moves, so its number and its addresses hold as long as the store, whichever
    slot it becomes (`swap`)."""

    def __init__(
        self,
        arenas: Mapping[str, Tensor],
        table: np.ndarray,
        *,
        fast_tier: str,
        far: Sequence[Page],
        parts: Sequence[range],
        slots: Mapping[str, Sequence[int]],
        bytes_of: Callable[[Page], int] | None = None,
    ) -> None:
        longest = parts[-1].stop
        self._bytes_of = bytes_of or (lambda _: longest)

        def cut(purpose: str, first: int) -> list[SlotMemory]:
            sizes = list(slots.get(purpose, ()))
            pages = [slot[:longest] for slot in arenas[purpose].split(sizes)] if sizes else []
            return [
                SlotMemory(page, [page[part.start : part.stop] for part in parts], number)
                for number, page in enumerate(pages, first)
            ]

        self.fast_tier, self.table, self._parts = fast_tier, table, parts
        self.resident, self.pinned = cut("experts", 0), cut("pinned_ring", 0)
        self.ring = cut("ring", len(self.resident))
        self.memory = [memory.page for memory in (*self.resident, *self.ring)]
        self._resident_numbers = np.arange(len(self.resident), dtype=np.int32)
        self.offloaded = dict(zip(far, cut("host_experts", 0), strict=True))
        # Looked up for every page of every pass.
        self._sizes: dict[Page, int] = {}
        self._offloaded_parts: dict[Page, Tensor] = {}
        self._computed: frozenset[Page] = frozenset()
        self.layers_computed: frozenset[int] = frozenset()  # layers with experts that the CPU computes in place
        self._streamed: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def follow(self, streamed: Sequence[Page], computed: Sequence[Page]) -> None:
        """Set the streamed parts and the pages that the CPU computes from the next pass on."""
        pairs = [(page.layer, page.expert) for page in streamed if page.part == 0]
        layers, experts = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._streamed = layers, experts
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
        for page, (home, *_) in sorted([*resident, *self.offloaded.items()], key=lambda entry: entry[0]):
            into = home
            if not on_host(home):
                bounce = home.new_empty(self._parts[-1].stop, device="cpu") if bounce is None else bounce
                into = bounce[: home.numel()]
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
        pages, num_parts = self.pinned if buffer.space == "pinned" else self.ring, len(self._parts)
        page, part = divmod(position + buffer.index, num_parts)
        return pages[page % len(pages)].parts[part]

    def swaps(self, slot: int) -> bool:
        """True if resident ``slot`` may exchange its memory with a page of the ring: it is as long."""
        return self.resident[slot].page.numel() == self._parts[-1].stop

    def swap(self, slot: int, ring: int) -> None:
        """Exchange the memory of ring page ``ring`` and resident ``slot``, so that the ring's page becomes resident."""
        self.resident[slot], self.ring[ring] = self.ring[ring], self.resident[slot]
        self._resident_numbers[slot] = self.resident[slot].number

    def ring_page(self, k: int, position: int) -> int:
        """Ring page of page k of the stream, counted from ``position``."""
        return (position // len(self._parts) + k) % len(self.ring)

    def phase(self, position: int) -> int:
        """Ring page at ``position``; passes of equal phase find the same pages in the same ring pages."""
        return self.ring_page(0, position) if self.ring else 0

    def bytes_of(self, page: Page) -> int:
        """Bytes of a part."""
        size = self._sizes.get(page)
        if size is None:
            total, part = self._bytes_of(replace(page, part=0)), self._parts[page.part]
            size = self._sizes[page] = len(range(min(part.start, total), min(part.stop, total)))
        return size

    def offloaded_tier(self, page: Page) -> Tensor:
        """Bytes of a part that is offloaded to host memory."""
        tier = self._offloaded_parts.get(page)
        if tier is None:
            location = self.offloaded[replace(page, part=0)]
            tier = self._offloaded_parts[page] = location.parts[page.part][: self.bytes_of(page)]
        return tier

    def offloaded_page(self, page: Page) -> Tensor | None:
        """Bytes of a whole page; None if it is only on disk."""
        return self.offloaded[page].page[: self._bytes_of(page)] if page in self.offloaded else None

    def ring_room(self, ring: int, page: Page) -> Tensor:
        """The bytes of ring page ``ring`` that ``page`` fills."""
        return self.ring[ring].page[: self._bytes_of(page)]

    def resident_room(self, slot: int, page: Page) -> Tensor:
        """The bytes of resident ``slot`` that ``page`` fills."""
        return self.resident[slot].page[: self._bytes_of(page)]

    def begin(self, page: Page) -> int:
        """Offset of a part in its page in bytes."""
        return self._parts[page.part].start

    def memory_of_experts(self, position: int) -> np.ndarray:
        """int32 [layers, experts]: the number of the memory of each expert in the pass begun at ``position``; -1 for
        experts that the CPU computes in place, and where a layer has none."""
        memory_indices = np.full(self.table.shape, -1, dtype=np.int32)
        if len(self._streamed[0]):
            ring = np.array([memory.number for memory in self.ring], dtype=np.int32)
            first = position // len(self._parts)
            memory_indices[self._streamed] = ring[(first + np.arange(len(self._streamed[0]))) % len(ring)]
        here = self.table >= 0
        memory_indices[here] = self._resident_numbers[self.table[here]]
        return memory_indices

    def pages_at(self, memory_indices: np.ndarray) -> list[Tensor | None]:
        """The pages of the experts whose memory has ``memory_indices`` int [experts]; None where it is negative."""
        return [self.memory[number] if number >= 0 else None for number in memory_indices.tolist()]

    def computed_experts(self, layer: int, num_experts: int) -> list[Tensor | None]:
        """The pages of the experts that the CPU computes in place; None for the others."""
        pages = (Page(layer=layer, expert=expert) for expert in range(num_experts))
        return [self.offloaded[page].page if page in self._computed else None for page in pages]
