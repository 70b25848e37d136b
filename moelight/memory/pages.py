"""Where the bytes of every expert page are: at home beside the compute unit, at a far home, or in a ring slot.

The stream of pages that are not resident never ends: page k of the stream is ``streamed[k % len(streamed)]`` and lies
in page k of the ring, counted round, from its arrival until a later page takes the place. Pages move part by part, so
positions in the stream and slots of the rings are counted in parts; a page's parts lie together, in their order. Knows
bytes and slots; refuses to know when anything moves (the schedule says so) and how files are read (``start`` is given).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from moelight.core.schedule import Buffer, Page
from moelight.hrm.placement import Placement
from moelight.memory.arena import slots

LOADED_AT_ONCE = 4


class Arriving(Protocol):
    """A page on its way."""

    def wait(self) -> None:
        """Return when it is there; raise what went wrong."""
        ...


StartPage = Callable[[Page, Tensor, int], Arriving | None]  # the bytes of a page from the last argument on
ExpertWeights = tuple[Tensor, Tensor]


class PageStore:
    """Page bytes over three regions of slots: ``experts`` (resident), ``host_experts`` and the two rings.

    ``parts`` are the bytes of each part of a page; ``view`` turns a page into an expert's ``(gate_up [2I, H],
    down [H, I])``.
    """

    def __init__(
        self,
        placement: Placement,
        arenas: Mapping[str, Tensor],
        *,
        parts: Sequence[range],
        slot_bytes: int,
        view: Callable[[Tensor], ExpertWeights],
    ) -> None:
        page_bytes = parts[-1].stop

        def cut(purpose: str) -> list[Tensor]:
            return [slot[:page_bytes] for slot in slots(arenas[purpose], slot_bytes)] if purpose in arenas else []

        def in_parts(pages: list[Tensor]) -> list[Tensor]:
            return [page[part.start : part.stop] for page in pages for part in parts]

        ring = cut("ring")
        self._placement, self.near, self._parts = placement, placement.near, parts
        self._slots = {"ring": in_parts(ring), "pinned": in_parts(cut("pinned_ring"))}
        self._home = dict(zip(placement.resident, cut("experts"), strict=True))
        far = placement.on("host") if placement.near != "host" else ()
        self._far = dict(zip(far, cut("host_experts"), strict=True))
        self._resident_views = {page: view(slot) for page, slot in self._home.items()}
        self._computed_views = {page: view(self._far[page]) for page in placement.computed}
        self._ring_views = [view(page) for page in ring]
        self._position_in_stream = {page: k for k, page in enumerate(placement.streamed)}

    def load(self, start: StartPage) -> None:
        """Fill every home that is memory, a few pages at a time."""
        coming: deque[Arriving] = deque()
        bounce: Tensor | None = None
        for page in self._placement.homes:
            home = self._far.get(page, self._home.get(page))
            if home is None:
                continue
            if home.device.type == "cpu":
                _begin(start, page, home, coming)
                continue
            if bounce is None:
                bounce = home.new_empty(home.numel(), device="cpu")
            _begin(start, page, bounce, coming)
            _finish(coming, most=0)
            home.copy_(bounce)
        _finish(coming, most=0)

    def slot(self, buffer: Buffer, position: int) -> Tensor:
        """Bytes of a part's slot in the ring or in pinned memory, named relative to the stream's ``position``."""
        ring = self._slots[buffer.space]
        return ring[(position + buffer.index) % len(ring)]

    def phase(self, position: int) -> int:
        """On which page of the ring the stream stands; equal phases find the same pages in the same places."""
        return position // len(self._parts) % len(self._ring_views) if self._ring_views else 0

    def far_home(self, page: Page) -> Tensor:
        """Bytes of a part of a page whose home is host memory across the link."""
        part = self._parts[page.part]
        return self._far[replace(page, part=0)][part.start : part.stop]

    def begin(self, page: Page) -> int:
        """Where in its page a part begins, in bytes."""
        return self._parts[page.part].start

    def layer_experts(self, layer: int, num_experts: int, position: int) -> list[ExpertWeights | None]:
        """The weights of every expert of ``layer``, wherever they are in the pass that began at ``position``; None for
        those that the CPU computes where they lie."""
        experts: list[ExpertWeights | None] = []
        phase = self.phase(position)
        for expert in range(num_experts):
            page = Page(layer=layer, expert=expert)
            found = self._resident_views.get(page)
            if found is None and page not in self._computed_views:
                found = self._ring_views[(phase + self._position_in_stream[page]) % len(self._ring_views)]
            experts.append(found)
        return experts

    def computed_experts(self, layer: int, num_experts: int) -> list[ExpertWeights | None]:
        """The weights of the experts of ``layer`` that the CPU computes where they lie; None for the others."""
        return [self._computed_views.get(Page(layer=layer, expert=expert)) for expert in range(num_experts)]


def _begin(start: StartPage, page: Page, into: Tensor, coming: deque[Arriving]) -> None:
    arriving = start(page, into, 0)
    if arriving is not None:
        coming.append(arriving)
    _finish(coming, most=LOADED_AT_ONCE)


def _finish(coming: deque[Arriving], *, most: int) -> None:
    while len(coming) > most:
        coming.popleft().wait()
