"""Writes the page stream of a pass, task by task: from the offloaded tiers into the ring on the fast tier."""

from __future__ import annotations

from collections import deque

from moelight.core.schedule import Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.writer import TaskWriter, drop_none

ALL = -1  # the "micro-batch" of a task that serves all micro-batches


class PageWriter(TaskWriter):
    """Writes page transfers. Page k of the pass is in ring slot ``k % ring_slots``; ``k`` runs on past the pass's own
    pages into those of the next pass.

    A slot is refilled only after the last experts of its former layer have read it.
    """

    def __init__(self, layout: Layout, shape: PassShape, *, chained: bool = False) -> None:
        super().__init__(layout, shape, chained=chained)
        self._fetched: dict[int, int] = {}
        self._delivered: dict[int, int] = {}
        self._last_read: dict[int, int] = {}
        self._reads: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._routed: dict[int, int] = {}
        self._brought: dict[int, int] = {}
        self._rings: dict[int, tuple[Buffer, ...]] = {}
        lane = Lane.H2D if layout.pages_cross else Lane.DISK
        for k in range(shape.prefetched):
            page, slot = self._page_slot(k)
            taken = [self.buffer("ring", slot)]
            if layout.stops(k):  # the page may still be in flight from the pinned slot
                taken.append(self.buffer("pinned", k % layout.pinned_slots))
            kind = TaskKind.PREFETCHED_PAGE
            self._delivered[k] = self.add(Task(kind=kind, lane=lane, page=page, slot=slot, writes=tuple(taken)))

    def layer_pages(self, layer: int) -> range:
        """The stream positions of ``layer``; ``num_layers`` stands for layer 0 of the next pass."""
        if layer < self.layout.model.num_layers:
            return self.layout.layer_pages[layer]
        if not self.shape.wraps or self.shape.routed_only:
            return range(0)
        first, total = self.layout.layer_pages[0], len(self.layout.streamed)
        return range(first.start + total, first.stop + total)

    def fetch(self, k: int) -> None:
        """Transfer page ``k`` from its tier to a pinned slot.

        Does nothing where the page needs no pinned slot, or while the slot's former page has not been sent on.
        """
        if not self.layout.stops(k) or k in self._fetched or k in self._delivered:
            return
        slot, former_k = k % self.layout.pinned_slots, k - self.layout.pinned_slots
        while former_k >= 0 and not self.layout.stops(former_k):
            former_k -= self.layout.pinned_slots
        if former_k >= 0 and former_k not in self._delivered:
            return
        page, _ = self._page_slot(k)
        from_disk = self.layout.from_disk[k % len(self.layout.streamed)]
        self._fetched[k] = self.add(
            Task(
                kind=TaskKind.READ_PAGE if from_disk else TaskKind.STAGE_PAGE,
                lane=Lane.DISK if from_disk else Lane.STAGE,
                page=page,
                slot=slot,
                bytes=self.layout.bytes_at(k),
                deps=drop_none(self._delivered.get(former_k)),
                writes=(self.buffer("pinned", slot),),
            )
        )

    def deliver(self, k: int) -> None:
        """Transfer page ``k`` into its ring slot. Where two layers do not fit the ring, the transfer is deferred until
        the experts that read the slot's former page are written."""
        if k in self._delivered or k in self._waiting:
            return
        former_k = k - self.layout.ring_slots
        if self._waiting or (former_k >= 0 and not self._is_read(self._layer_of(former_k))):
            self._waiting.append(k)
            return
        self.fetch(k)
        page, slot = self._page_slot(k)
        crosses, stops = self.layout.pages_cross, self.layout.stops(k)
        former = self._last_read.get(self._layer_of(former_k)) if former_k >= 0 else None
        self._delivered[k] = self.add(
            Task(
                kind=TaskKind.SEND_PAGE if crosses else TaskKind.READ_PAGE,
                lane=Lane.H2D if crosses else Lane.DISK,
                page=page,
                slot=slot,
                bytes=self.layout.bytes_at(k),
                deps=drop_none(self._fetched.get(k) if stops else None, former),
                reads=(self.buffer("pinned", k % self.layout.pinned_slots),) if stops else (),
                writes=(self.buffer("ring", slot),),
            )
        )

    def deliver_layer(self, layer: int) -> None:
        """Deliver all pages of ``layer`` as one block."""
        for page in self.layer_pages(layer):
            self.deliver(page)

    def transfer_chosen(self, layer: int) -> None:
        """Transfer the offloaded pages that the routers of ``layer`` chose, in one task per lane that they pass."""
        prefetched = tuple(self._delivered[k] for k in range(self.shape.prefetched))
        routed = self._routed[layer]
        for lane in self.layout.page_lanes:
            first = lane is self.layout.page_lanes[0]
            self._brought[layer] = self.add(
                Task(
                    kind=TaskKind.SEND_EXPERTS if lane is Lane.H2D else TaskKind.READ_EXPERTS,
                    lane=lane,
                    layer=layer,
                    bytes=self.layout.most_chosen_bytes(layer, lane),
                    deps=(routed, *prefetched) if first else (self._brought[layer],),
                    reads=() if first else (self.buffer("chosen_pinned", layer),),
                    writes=(self._chosen_buffer(layer, lane),),
                )
            )

    def prefetch_predicted(self, layer: int, after: int) -> None:
        """Begin to fetch the predicted pages of ``layer`` once ``after`` is done.

        No task depends on this one; an expert that needs one of its pages waits for that page's transfer.
        """
        lane = self.layout.page_lanes[-1]
        kind = TaskKind.SEND_AHEAD if lane is Lane.H2D else TaskKind.READ_AHEAD
        self.add(Task(kind=kind, lane=lane, layer=layer, deps=(after,)))

    def fetch_layer(self, layer: int) -> None:
        """`fetch` as many first pages of ``layer`` as there are pinned slots."""
        if layer <= self.layout.model.num_layers:
            for page in self.layer_pages(layer)[: self.layout.pinned_slots]:
                self.fetch(page)

    def ring(self, layer: int) -> tuple[Buffer, ...]:
        """The slots of transferred pages that the experts of ``layer`` read."""
        if self.shape.routed_only:
            return (self.buffer("chosen", layer),) if layer in self._brought else ()
        if layer not in self._rings:  # every micro-batch reads all of the slots
            slots = self.layout.ring_slots
            self._rings[layer] = tuple([self.buffer("ring", k % slots) for k in self.layer_pages(layer)])
        return self._rings[layer]

    def arrived(self, layer: int) -> tuple[int, ...]:
        """The task that the experts of ``layer`` wait for: pages arrive on one lane in stream order, so the last
        arrival implies all others."""
        if self.shape.routed_only:
            return drop_none(self._brought.get(layer))
        mine = self.layer_pages(layer)
        return (self._delivered[mine[-1]],) if mine else ()

    def read_ring(self, layer: int, task: int) -> None:
        """Record that ``task`` read the slots of ``layer``, and deliver the pages that were deferred until then."""
        self._last_read[layer] = task
        micro_batches = self.tasks[task].micro_batch == ALL
        self._reads[layer] = len(self.shape.micro_batches) if micro_batches else self._reads.get(layer, 0) + 1
        if self._waiting and self._is_read(layer):
            waiting, self._waiting = self._waiting, deque()
            for k in waiting:
                self.deliver(k)

    def _is_read(self, layer: int) -> bool:
        """True if all experts of ``layer`` of this pass are written."""
        return self._reads.get(layer, 0) >= len(self.shape.micro_batches)

    def finish(self, builder: str) -> Schedule:
        """The finished schedule."""
        total = len(self.layout.streamed)
        ahead = sorted(k for k in self._delivered if k >= total)
        return Schedule(
            builder=builder,
            tasks=tuple(self.tasks),
            stream_advance=total,
            prefetched_next=tuple(self._delivered[k] for k in ahead),
        )

    def _page_slot(self, k: int) -> tuple[Page, int]:
        return self.layout.streamed[k % len(self.layout.streamed)], k % self.layout.ring_slots

    def _chosen_buffer(self, layer: int, lane: Lane) -> Buffer:
        """The buffer of the chosen experts of ``layer`` after ``lane``."""
        return Buffer(space="chosen" if lane is self.layout.page_lanes[-1] else "chosen_pinned", index=layer)

    def _layer_of(self, k: int) -> int:
        return self.layout.streamed[k % len(self.layout.streamed)].layer
