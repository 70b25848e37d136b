"""The parts every builder is made of: the page stream and the three acts of a micro-batch, appended task by task.

A builder decides only the order of the calls; what each task waits for, touches and carries is written here once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moelight.core.schedule import Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.hrm import costs
from moelight.scheduler.layout import Layout, PassShape


class Draft:
    """A schedule being written. Positions returned by its methods are task positions.

    Page k of the pass lives in ring slot ``k % ring_slots``; ``k`` runs on past the pass's own pages into those of
    the next pass. A slot is refilled only after the last micro-batch of its former layer has read it.
    """

    def __init__(self, layout: Layout, shape: PassShape, *, chained: bool = False) -> None:
        self.layout = layout
        self.shape = shape
        self.tasks: list[Task] = []
        self._chained = chained
        self._fetched: dict[int, int] = {}
        self._delivered: dict[int, int] = {}
        self._last_post: dict[int, int] = {}
        self._ready: dict[int, int] = {}
        self._sent_down: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        lane = Lane.H2D if layout.discrete else Lane.DISK
        for k in range(shape.carried):
            page, slot = self._page_slot(k)
            taken = [Buffer(space="ring", index=slot)]
            if layout.discrete:  # it may still be on its way out of there
                taken.append(Buffer(space="pinned", index=k % layout.pinned_slots))
            kind = TaskKind.CARRIED_PAGE
            self._delivered[k] = self._add(Task(kind=kind, lane=lane, page=page, slot=slot, writes=tuple(taken)))

    def layer_pages(self, layer: int) -> range:
        """The stream positions of ``layer``; ``num_layers`` stands for layer 0 of the next pass."""
        if layer < self.layout.model.num_layers:
            return self.layout.layer_pages[layer]
        if not self.shape.wraps:
            return range(0)
        first, total = self.layout.layer_pages[0], len(self.layout.streamed)
        return range(first.start + total, first.stop + total)

    def fetch(self, k: int) -> None:
        """Bring page ``k`` from its far home to the last stop before the link.

        Nothing to do without a link, or while the page before it in that stop has not been sent on.
        """
        if not self.layout.discrete or k in self._fetched or k in self._delivered:
            return
        slot, former_k = k % self.layout.pinned_slots, k - self.layout.pinned_slots
        if former_k >= 0 and former_k not in self._delivered:
            return
        page, _ = self._page_slot(k)
        from_disk = self.layout.from_disk[k % len(self.layout.streamed)]
        self._fetched[k] = self._add(
            Task(
                kind=TaskKind.READ_PAGE if from_disk else TaskKind.STAGE_PAGE,
                lane=Lane.DISK if from_disk else Lane.STAGE,
                page=page,
                slot=slot,
                bytes=self.layout.page_bytes,
                deps=_present(self._delivered.get(former_k)),
                writes=(Buffer(space="pinned", index=slot),),
            )
        )

    def deliver(self, k: int) -> None:
        """Bring page ``k`` into its ring slot."""
        if k in self._delivered:
            return
        self.fetch(k)
        page, slot = self._page_slot(k)
        discrete = self.layout.discrete
        former_k = k - self.layout.ring_slots
        former = self._last_post.get(self._layer_of(former_k)) if former_k >= 0 else None
        self._delivered[k] = self._add(
            Task(
                kind=TaskKind.SEND_PAGE if discrete else TaskKind.READ_PAGE,
                lane=Lane.H2D if discrete else Lane.DISK,
                page=page,
                slot=slot,
                bytes=self.layout.page_bytes,
                deps=_present(self._fetched.get(k), former),
                reads=(Buffer(space="pinned", index=k % self.layout.pinned_slots),) if discrete else (),
                writes=(Buffer(space="ring", index=slot),),
            )
        )

    def embed(self, j: int) -> None:
        """Token ids of micro-batch ``j`` become hidden states."""
        self._ready[j] = self._compute(TaskKind.EMBED, 0, j, (), writes=("hidden",))

    def attend(self, layer: int, j: int) -> None:
        """``pre_attention`` and attention of micro-batch ``j``; what a link brings back is `load_hidden`'s."""
        if layer == 0:
            self.embed(j)
        deps = (self._ready[j], *_present(self._sent_down.get(j)))
        before = self._compute(TaskKind.PRE_ATTENTION, layer, j, deps, reads=("hidden",), writes=("qkv",))
        if not self.layout.discrete:
            kind = TaskKind.CPU_ATTENTION
            self._ready[j] = self._compute(kind, layer, j, (before,), reads=("qkv",), writes=("attn",))
        elif self.shape.micro_batches[j].fresh:
            self._attend_on_device(layer, j, before)
        else:
            self._attend_on_host(layer, j, before)

    def load_hidden(self, layer: int, j: int) -> None:
        """Bring the attention output of micro-batch ``j`` up, where the host attended across a link."""
        if not self.layout.discrete or self.shape.micro_batches[j].fresh:
            return
        up = costs.hidden_bytes(self.layout.model, self.layout.dtype, self.shape.micro_batches[j].tokens)
        deps = (self._ready[j],)
        self._ready[j] = self._cross(TaskKind.LOAD_HIDDEN, Lane.H2D, layer, j, deps, up, "attn_host", "attn")

    def post_attention(self, layer: int, j: int) -> None:
        """Output projection, router and experts of micro-batch ``j``; reads every ring slot of the layer."""
        mine = self.layer_pages(layer)
        ring = tuple(Buffer(space="ring", index=self._page_slot(k)[1]) for k in mine)
        # Pages arrive on one lane in stream order, so the last one's arrival is everyone's.
        arrived = (self._delivered[mine[-1]],) if mine else ()
        kind, deps = TaskKind.POST_ATTENTION, (self._ready[j], *arrived)
        task = self._compute(kind, layer, j, deps, reads=("attn",), writes=("hidden",), ring=ring)
        self._ready[j] = task
        self._last_post[layer] = task

    def sample(self, j: int) -> None:
        """The next token of every sequence of micro-batch ``j`` whose prompt is complete."""
        if self.shape.micro_batches[j].samples:
            last = self.layout.model.num_layers - 1
            self._compute(TaskKind.SAMPLE, last, j, (self._ready[j],), reads=("hidden",))

    def finish(self, builder: str) -> Schedule:
        """The finished schedule."""
        total = len(self.layout.streamed)
        ahead = sorted(k for k in self._delivered if k >= total)
        return Schedule(
            builder=builder,
            tasks=tuple(self.tasks),
            stream_advance=total,
            carried_out=tuple(self._delivered[k] for k in ahead),
        )

    def _attend_on_device(self, layer: int, j: int, before: int) -> None:
        tokens = self.shape.micro_batches[j].tokens
        attention = self._compute(TaskKind.ATTENTION, layer, j, (before,), reads=("qkv",), writes=("attn",))
        down = costs.kv_bytes(self.layout.model, self.layout.dtype, tokens)
        deps = (before, *_present(self._stored.get(j)))
        sent = self._cross(TaskKind.OFFLOAD_KV, Lane.D2H, layer, j, deps, down, "qkv", "qkv_host")
        stored = self._compute(TaskKind.STORE_KV, layer, j, (sent,), reads=("qkv_host",), lane=Lane.CPU)
        self._sent_down[j], self._stored[j] = sent, stored
        self._ready[j] = attention

    def _attend_on_host(self, layer: int, j: int, before: int) -> None:
        down = costs.qkv_bytes(self.layout.model, self.layout.dtype, self.shape.micro_batches[j].tokens)
        sent = self._cross(TaskKind.OFFLOAD_QKV, Lane.D2H, layer, j, (before,), down, "qkv", "qkv_host")
        kind, lane = TaskKind.CPU_ATTENTION, Lane.CPU
        self._ready[j] = self._compute(kind, layer, j, (sent,), reads=("qkv_host",), writes=("attn_host",), lane=lane)

    def _cross(
        self, kind: TaskKind, lane: Lane, layer: int, j: int, deps: tuple[int, ...], size: int, source: str, target: str
    ) -> int:
        return self._add(
            Task(
                kind=kind,
                lane=lane,
                layer=layer,
                micro_batch=j,
                bytes=size,
                deps=deps,
                reads=(Buffer(space=source, index=j),),
                writes=(Buffer(space=target, index=j),),
            )
        )

    def _compute(
        self,
        kind: TaskKind,
        layer: int,
        j: int,
        deps: Sequence[int],
        *,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
        ring: tuple[Buffer, ...] = (),
        lane: Lane | None = None,
    ) -> int:
        return self._add(
            Task(
                kind=kind,
                lane=lane or self.layout.compute,
                layer=layer,
                micro_batch=j,
                deps=tuple(deps),
                reads=(*(Buffer(space=space, index=j) for space in reads), *ring),
                writes=tuple(Buffer(space=space, index=j) for space in writes),
            )
        )

    def _page_slot(self, k: int) -> tuple[Page, int]:
        return self.layout.streamed[k % len(self.layout.streamed)], k % self.layout.ring_slots

    def _layer_of(self, k: int) -> int:
        return self.layout.streamed[k % len(self.layout.streamed)].layer

    def _add(self, task: Task) -> int:
        if self._chained and self.tasks:
            previous = len(self.tasks) - 1
            if previous not in task.deps and task.kind is not TaskKind.CARRIED_PAGE:
                task = replace(task, deps=(*task.deps, previous))
        self.tasks.append(task)
        return len(self.tasks) - 1


def _present(*tasks: int | None) -> tuple[int, ...]:
    return tuple(task for task in tasks if task is not None)
