"""Writes a schedule task by task: dependencies, buffers and bytes of each task. The functions of `schedules` and
`on_demand` decide only the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from moelight.core.schedule import Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.hrm import costs
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape

ALL = -1  # the "micro-batch" of a task that serves all micro-batches


def drop_none(*tasks: int | None) -> tuple[int, ...]:
    """The positions among ``tasks`` that are not None."""
    return tuple(task for task in tasks if task is not None)


class ScheduleBuilder:
    """Writes a schedule task by task; methods return task positions. Micro-batches attend layer by layer, in order.
    Page k is in ring slot ``k % ring_slots``; ``k`` runs on into the pages of the next pass. A slot is refilled only
    after the last experts of its former layer have read it.

    ``chained``: every task also waits for the one before; consecutive disk reads count as one.
    """

    def __init__(self, layout: Layout, shape: PassShape, *, chained: bool = False) -> None:
        self.layout = layout
        self.shape = shape
        self.tasks: list[Task] = []
        self._chained = chained
        self._link, self._before_link = 0, range(0)  # the first task of the last link of the chain; the link before
        self._waits_for: tuple[int, ...] = ()
        self._since: dict[Lane, int] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._fetched: dict[int, int] = {}
        self._delivered: dict[int, int] = {}
        self._last_read: dict[int, int] = {}
        self._reads: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._routed: dict[int, int] = {}
        self._brought: dict[int, int] = {}
        self._rings: dict[int, tuple[Buffer, ...]] = {}
        self._ready: dict[int, int] = {}
        self._sent_down: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        self._stored_by_layer: dict[int, list[int]] = {}
        self._attended = 0
        self._context_loaded: dict[int, int] = {}
        self._context_used: dict[int, int] = {}
        self._device_part: dict[int, int] = {}
        self._returning: dict[int, int] = {}
        lane = Lane.H2D if layout.pages_cross else Lane.DISK
        for k in range(shape.prefetched):
            page, slot = self._page_slot(k)
            taken = [self.buffer("ring", slot)]
            if layout.stops(k):  # the page may still be in flight from the pinned slot
                taken.append(self.buffer("pinned", k % layout.pinned_slots))
            kind = TaskKind.PREFETCHED_PAGE
            self._delivered[k] = self.add(Task(kind=kind, lane=lane, page=page, slot=slot, writes=tuple(taken)))

    # ---- tasks

    def buffer(self, space: str, index: int) -> Buffer:
        """One object per slot for all tasks that touch it."""
        found = self._buffers.get((space, index))
        if found is None:
            found = self._buffers[space, index] = Buffer(space=space, index=index)
        return found

    def barrier(self) -> None:
        """Make every later task wait for every earlier one: a device-wide synchronisation."""
        if self._since:
            self._waits_for = tuple(self._since.values())
            self._since = {}

    def compute(
        self,
        kind: TaskKind,
        layer: int,
        j: int,
        deps: Sequence[int],
        *,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
        also_reads: tuple[Buffer, ...] = (),
        lane: Lane | None = None,
        size: int = 0,
    ) -> int:
        """Add a task on buffers of micro-batch ``j``, by default on the compute lane; ``size``: bytes of a transfer."""
        return self.add(
            Task(
                kind=kind,
                lane=lane or self.layout.compute,
                layer=layer,
                micro_batch=j,
                bytes=size,
                deps=tuple(deps),
                reads=(*[self.buffer(space, j) for space in reads], *also_reads),
                writes=tuple([self.buffer(space, j) for space in writes]),
            )
        )

    def add(self, task: Task) -> int:
        """Add ``task`` with the dependencies of the chain and of the last barrier; return its position."""
        position = len(self.tasks)
        extra = [dep for dep in self._waits_for if self.tasks[dep].lane is not task.lane] if self._waits_for else []
        if self._chained and self.tasks and task.kind is not TaskKind.PREFETCHED_PAGE:
            if not self.tasks[-1].lane is task.lane is Lane.DISK:
                self._link, self._before_link = position, range(self._link, position)
            extra.extend(self._before_link)
        if extra:
            task = replace(task, deps=tuple(dict.fromkeys((*task.deps, *extra))))
        self.tasks.append(task)
        self._since[task.lane] = position
        return position

    # ---- pages

    def layer_pages(self, layer: int) -> range:
        """The stream positions of ``layer``; ``num_layers`` stands for layer 0 of the next pass."""
        if layer < self.layout.model.num_layers:
            return self.layout.layer_pages[layer]
        if not self.shape.wraps or self.shape.routed_only:
            return range(0)
        first, total = self.layout.layer_pages[0], len(self.layout.streamed)
        return range(first.start + total, first.stop + total)

    def fetch(self, k: int) -> None:
        """Transfer page ``k`` to a pinned slot, if it needs one and the slot's former page has been sent."""
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
        """Transfer page ``k`` into its ring slot, once the experts that read the slot's former page are written."""
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
        for page in self.layer_pages(layer):
            self.deliver(page)

    def transfer_chosen(self, layer: int) -> None:
        """Transfer the offloaded pages that the routers of ``layer`` chose, in one task per lane that they pass."""
        prefetched = tuple(self._delivered[k] for k in range(self.shape.prefetched))
        routed = self._routed[layer]
        for lane in self.layout.page_lanes:
            first, last = lane is self.layout.page_lanes[0], lane is self.layout.page_lanes[-1]
            self._brought[layer] = self.add(
                Task(
                    kind=TaskKind.SEND_EXPERTS if lane is Lane.H2D else TaskKind.READ_EXPERTS,
                    lane=lane,
                    layer=layer,
                    bytes=self.layout.most_chosen_bytes(layer, lane),
                    deps=(routed, *prefetched) if first else (self._brought[layer],),
                    reads=() if first else (self.buffer("chosen_pinned", layer),),
                    writes=(self.buffer("chosen" if last else "chosen_pinned", layer),),
                )
            )

    def prefetch_predicted(self, layer: int, coming: int) -> None:
        """Begin to fetch the predicted pages of layer ``coming`` after the routers of ``layer`` (and later layers'
        routers, if they predict). No task depends on this one; an expert waits for the transfer of its own page."""
        after = self._routed[layer]
        for j in range(self.count) if self.shape.predict_experts else ():
            after = self.compute(TaskKind.PREDICT_EXPERTS, layer, j, (self._ready[j],), reads=("hidden",))
            self._ready[j] = after
        lane = self.layout.page_lanes[-1]
        kind = TaskKind.SEND_AHEAD if lane is Lane.H2D else TaskKind.READ_AHEAD
        self.add(Task(kind=kind, lane=lane, layer=coming, deps=(after,)))

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
        """The task that the experts of ``layer`` wait for: the last arrival, as pages arrive on one lane in order."""
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
        return self._reads.get(layer, 0) >= len(self.shape.micro_batches)

    def finish(self, builder: str) -> Schedule:
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

    def _layer_of(self, k: int) -> int:
        return self.layout.streamed[k % len(self.layout.streamed)].layer

    # ---- layers

    @property
    def count(self) -> int:
        return len(self.shape.micro_batches)

    def load_kv(self, layer: int, j: int) -> None:
        """Transfer the cached keys and values of micro-batch ``j`` to the device, into the buffer of its step's parity.
        Does nothing if none cross, the transfer is written or too early, or the pass still computes some; `attend`
        calls this again."""
        mine, step = self._of(j), layer * self.count + j
        if step in self._context_loaded or step > self._attended + 1 or not self._context_crosses(mine):
            return
        stored = self._stored_by_layer.get(layer, [])
        earlier = range(j) if mine.continues else range(0)
        if len(stored) < len(earlier):
            return
        self._context_loaded[step] = self.add(
            Task(
                kind=TaskKind.LOAD_KV,
                lane=Lane.H2D,
                layer=layer,
                micro_batch=j,
                bytes=self.layout.context_bytes(mine),
                deps=(*drop_none(self._context_used.get(step % 2)), *(stored[-1:] if earlier else ())),
                reads=tuple(self._cache(layer, i) for i in earlier),
                writes=(self.buffer("context", step % 2),),
            )
        )

    def load_contexts(self, layer: int, j: int) -> None:
        """`load_kv` of this step, if still due, and of the step after it."""
        step = layer * self.count + j
        for each in range(step, min(step + 2, self.count * self.layout.model.num_layers)):
            self.load_kv(*divmod(each, self.count))

    def attend(self, layer: int, j: int) -> None:
        """``pre_attention`` and attention of micro-batch ``j``; `load_hidden` writes the transfer back over a link."""
        if layer == 0:
            self._ready[j] = self.compute(TaskKind.EMBED, 0, j, (), writes=("hidden",))
        self.load_kv(layer, j)
        deps = (self._ready[j], *drop_none(self._sent_down.get(j)))
        before = self.compute(TaskKind.PRE_ATTENTION, layer, j, deps, reads=("hidden",), writes=("qkv",))
        if not self.layout.discrete:
            kind = TaskKind.CPU_ATTENTION
            self._ready[j] = self.compute(kind, layer, j, (before,), reads=("qkv",), writes=("attn",))
        elif self._of(j).prefill_only or self.layout.attention == "gpu":
            self._attend_on_device(layer, j, before)
        else:
            self._attend_on_host(layer, j, before)
        self._attended = layer * self.count + j + 1

    def load_hidden(self, layer: int, j: int) -> None:
        """Transfer the attention output of micro-batch ``j`` to the device, where the host attended across a link."""
        if not self.layout.discrete or self.layout.attention == "gpu" or self._of(j).prefill_only:
            return
        up = costs.hidden_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        deps, reads, writes = (self._ready[j],), ("attn_host",), ("attn",)
        self._ready[j] = self.compute(
            TaskKind.LOAD_HIDDEN, layer, j, deps, reads=reads, writes=writes, lane=Lane.H2D, size=up
        )

    def post_attention(self, layer: int, j: int) -> None:
        """Output projection, router and experts of micro-batch ``j``; `combine` completes experts across a link."""
        if self.layout.cpu_layers[layer]:
            self._experts_over_the_link(layer, j, self._route(layer, j))
            return
        kind, deps = TaskKind.POST_ATTENTION, (self._ready[j], *self.arrived(layer))
        ring = self.ring(layer)
        task = self.compute(kind, layer, j, deps, reads=("attn",), writes=("hidden",), also_reads=ring)
        self._ready[j] = task
        self.read_ring(layer, task)

    def combine(self, layer: int, j: int) -> None:
        """Transfer the outputs of the CPU's experts for micro-batch ``j``, if any, to the device and add them."""
        if j not in self._returning:
            return
        up = costs.residual_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        deps, reads, writes = (self._returning.pop(j),), ("experts_host",), ("experts",)
        loaded = self.compute(TaskKind.LOAD_EXPERTS, layer, j, deps, reads=reads, writes=writes, lane=Lane.H2D, size=up)
        both = (loaded, self._device_part.pop(j))
        self._ready[j] = self.compute(TaskKind.COMBINE, layer, j, both, reads=("experts",), writes=("hidden",))

    def route(self, layer: int, j: int) -> None:
        """Micro-batch ``j`` up to its router, for experts that run later; a layer without experts completely."""
        if self.layout.model.moe_layers[layer]:
            self._ready[j] = self._routed[layer] = self._route(layer, j)
        else:
            self.post_attention(layer, j)

    def experts_of(self, layer: int, j: int) -> None:
        """The experts, if any, of micro-batch ``j`` after its router; `combine` completes those on the CPU."""
        if self.layout.cpu_layers[layer]:
            self._experts_over_the_link(layer, j, self._ready[j])
        elif self.layout.model.moe_layers[layer]:
            deps, ring = (self._ready[j], *self.arrived(layer)), self.ring(layer)
            kind, writes = TaskKind.EXPERTS, ("hidden",)
            reads = ("routed",) if self.layout.discrete else ("routed", "partial")
            self._ready[j] = self.compute(kind, layer, j, deps, reads=reads, writes=writes, also_reads=ring)
            self.read_ring(layer, self._ready[j])

    def resident_experts(self, layer: int, j: int) -> None:
        """The experts of micro-batch ``j`` that need no page in flight, where the CPU computes beside the disk."""
        if self.layout.model.moe_layers[layer] and not self.layout.discrete:
            deps = (self._ready[j],)
            kind, reads, writes = TaskKind.RESIDENT_EXPERTS, ("routed",), ("partial",)
            self._ready[j] = self.compute(kind, layer, j, deps, reads=reads, writes=writes)

    def experts(self, layer: int) -> None:
        """The experts of ``layer``, if any, once for all micro-batches."""
        if not self.layout.model.moe_layers[layer]:
            return
        micro_batches = range(self.count)
        task = self.add(
            Task(
                kind=TaskKind.EXPERTS,
                lane=self.layout.compute,
                layer=layer,
                micro_batch=ALL,
                deps=(self._ready[self.count - 1], *self.arrived(layer)),
                reads=(*(self.buffer("routed", j) for j in micro_batches), *self.ring(layer)),
                writes=tuple(self.buffer("hidden", j) for j in micro_batches),
            )
        )
        self._ready = dict.fromkeys(micro_batches, task)
        self.read_ring(layer, task)

    def sample(self, j: int) -> None:
        """Sample the next token of every sequence of micro-batch ``j`` whose prompt is complete."""
        if self._of(j).samples:
            last = self.layout.model.num_layers - 1
            self.compute(TaskKind.SAMPLE, last, j, (self._ready[j],), reads=("hidden",))

    def _of(self, j: int) -> MicroBatchShape:
        return self.shape.micro_batches[j]

    def _context_crosses(self, micro_batch: MicroBatchShape) -> bool:
        return self.layout.context_crosses and not micro_batch.prefill_only and micro_batch.context > 0

    def _attend_on_device(self, layer: int, j: int, before: int) -> None:
        """Attend over keys and values on the device and those transferred to it; send the new ones to the host."""
        step, layout = layer * self.count + j, self.layout
        loaded = self._context_loaded.get(step)
        context = (self.buffer("context", step % 2),) if loaded is not None else ()
        deps = (before, *drop_none(loaded))
        attention = self.compute(
            TaskKind.ATTENTION, layer, j, deps, reads=("qkv",), writes=("attn",), also_reads=context
        )
        if loaded is not None:
            self._context_used[step % 2] = attention
        self._ready[j] = attention
        if layout.attention == "gpu" and not layout.context_crosses:
            return
        down = layout.kv_down_bytes(self._of(j))
        deps = (before, *drop_none(self._stored.get(j)))
        sent = self.compute(
            TaskKind.OFFLOAD_KV, layer, j, deps, reads=("qkv",), writes=("qkv_host",), lane=Lane.D2H, size=down
        )
        self._sent_down[j] = sent
        self._stored[j] = self.add(
            Task(
                kind=TaskKind.STORE_KV,
                lane=Lane.CPU,
                layer=layer,
                micro_batch=j,
                deps=(sent,),
                reads=(self.buffer("qkv_host", j),),
                writes=(self._cache(layer, j),) if layout.context_crosses else (),
            )
        )
        self._stored_by_layer.setdefault(layer, []).append(self._stored[j])

    def _cache(self, layer: int, j: int) -> Buffer:
        """The keys and values that micro-batch ``j`` adds to the cache of ``layer`` in host memory."""
        return self.buffer("cache", layer * self.count + j)

    def _attend_on_host(self, layer: int, j: int, before: int) -> None:
        down = costs.qkv_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        sent = self.compute(
            TaskKind.OFFLOAD_QKV, layer, j, (before,), reads=("qkv",), writes=("qkv_host",), lane=Lane.D2H, size=down
        )
        reads, writes = ("qkv_host",), ("attn_host",)
        self._ready[j] = self.compute(
            TaskKind.CPU_ATTENTION, layer, j, (sent,), reads=reads, writes=writes, lane=Lane.CPU
        )

    def _route(self, layer: int, j: int) -> int:
        written = ("hidden", "routed")
        return self.compute(TaskKind.ROUTE, layer, j, (self._ready[j],), reads=("attn",), writes=written)

    def _experts_over_the_link(self, layer: int, j: int, routed: int) -> None:
        """Send the CPU's share down and compute it, ready for `combine`; run the device's share, if any, meanwhile."""
        down = costs.routed_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        known = (routed, self._routed[layer]) if self.shape.routed_only else (routed,)
        reads, writes = ("routed",), ("routed_host",)
        sent = self.compute(
            TaskKind.OFFLOAD_HIDDEN, layer, j, known, reads=reads, writes=writes, lane=Lane.D2H, size=down
        )
        here, there = self.ring(layer), self.arrived(layer)
        all_on_cpu = self.layout.experts == "host"
        task = self.compute(
            TaskKind.CPU_EXPERTS,
            layer,
            j,
            (sent, *(there if all_on_cpu else ())),
            reads=("routed_host",),
            writes=("experts_host",),
            also_reads=here if all_on_cpu else (),
            lane=Lane.CPU,
        )
        self._returning[j], self._device_part[j] = task, routed
        if not all_on_cpu:
            deps = (routed, *there)
            task = self.compute(
                TaskKind.EXPERTS, layer, j, deps, reads=("routed",), writes=("hidden",), also_reads=here
            )
            self._device_part[j] = task
        self.read_ring(layer, task)
