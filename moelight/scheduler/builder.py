"""Writes a schedule task by task: dependencies, buffers and bytes of each task. The functions of `schedules` and
`on_demand` decide only the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from moelight.core.schedule import ALL, Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.hrm import costs
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.requirements import check_layout

Buffers = tuple[str | Buffer, ...]  # one given by name is that of the task's micro-batch


class ScheduleBuilder:
    """Writes a schedule task by task. Micro-batches (``j``) attend layer by layer, in order. Page k is in ring slot
    ``k % ring_slots``; ``k`` runs on into the pages of the next pass. A slot is refilled only after the last experts
    of its former turn (`Layout.turns`: a layer, or with a small ring some pages of one) have read it.

    ``chained``: every task also waits for the one before; consecutive disk reads count as one. ``apart``: attention and
    experts of a layer are never one task. Raises ConfigError for a layout or shape that schedule ``name`` does not
    support.
    """

    def __init__(
        self, name: str, layout: Layout, shape: PassShape, *, chained: bool = False, apart: bool = False
    ) -> None:
        check_layout(name, layout, shape)
        self.name, self.layout, self.shape = name, layout, shape
        self.tasks: list[Task] = []
        self._chained, self._apart = chained, apart
        self._link, self._before_link = 0, range(0)  # the first task of the last link of the chain; the link before
        self._waits_for: tuple[int, ...] = ()  # at the last barrier
        self._since: dict[Lane, int] = {}  # the last task of each lane after it
        self._buffers: dict[tuple[str, int], Buffer] = {}
        # Positions of tasks: of pages, by k
        self._fetched: dict[int, int] = {}
        self._delivered: dict[int, int] = {}
        self._waiting: deque[int] = deque()  # deferred deliveries, by k
        # by layer and turn
        self._last_read: dict[tuple[int, int], int] = {}
        self._reads: dict[tuple[int, int], int] = {}  # the number of micro-batches that have read the turn's slots
        # by layer
        self._routed: dict[int, int] = {}
        self._brought: dict[int, int] = {}
        self._rings: dict[tuple[int, int], tuple[Buffer, ...]] = {}
        self._stored_by_layer: dict[int, list[int]] = {}
        # by micro-batch; ``_ready``: its last task
        self._ready: dict[int, int] = {}
        self._sent_down: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        self._whole: dict[int, int] = {}  # the first of the layers that its next task computes
        self._split: dict[int, tuple[int, int]] = {}  # experts on the CPU and on the device, for `combine`
        # by step: layer x micro-batches + micro-batch; by its parity
        self._attended = 0
        self._context_loaded: dict[int, int] = {}
        self._context_used: dict[int, int] = {}
        lane = Lane.H2D if layout.pages_cross else Lane.DISK
        for k in range(shape.prefetched):
            page, slot = self._page(k), k % layout.ring_slots
            taken: Buffers = (self.buffer("ring", slot),)
            if layout.stops(k):  # the page may still be in flight from the pinned slot
                taken = (*taken, self.buffer("pinned", k % layout.pinned_slots))
            self._delivered[k] = self.add(TaskKind.PREFETCHED_PAGE, lane, writes=taken, page=page, slot=slot)

    # ---- tasks

    def buffer(self, space: str, index: int) -> Buffer:
        """One object per slot for all tasks that touch it."""
        buffer = self._buffers.get((space, index))
        if buffer is None:
            buffer = self._buffers[space, index] = Buffer(space=space, index=index)
        return buffer

    def barrier(self) -> None:
        """Make every later task wait for every earlier one: a device-wide synchronisation."""
        if self._since:
            self._waits_for = tuple(self._since.values())
            self._since = {}

    def add(
        self,
        kind: TaskKind,
        lane: Lane,
        layer: int = -1,
        j: int = -1,
        deps: tuple[int | None, ...] = (),
        *,
        reads: Buffers = (),
        writes: Buffers = (),
        size: int = 0,
        page: Page | None = None,
        slot: int = -1,
        experts: range | None = None,
        layers: range | None = None,
    ) -> int:
        """Add a task with the dependencies of the chain and of the last barrier; return its position. ``deps``
        may hold None; ``size``: bytes of a transfer."""
        position = len(self.tasks)
        present = tuple([dep for dep in deps if dep is not None])
        extra = [dep for dep in self._waits_for if self.tasks[dep].lane is not lane] if self._waits_for else []
        if self._chained and self.tasks and kind is not TaskKind.PREFETCHED_PAGE:
            if not self.tasks[-1].lane is lane is Lane.DISK:
                self._link, self._before_link = position, range(self._link, position)
            extra.extend(self._before_link)
        task = Task(
            kind=kind,
            lane=lane,
            layer=layer,
            micro_batch=j,
            layers=layers,
            page=page,
            slot=slot,
            experts=experts,
            bytes=size,
            deps=tuple(dict.fromkeys((*present, *extra))) if extra else present,
            reads=tuple([self.buffer(read, j) if isinstance(read, str) else read for read in reads]),
            writes=tuple([self.buffer(write, j) if isinstance(write, str) else write for write in writes]),
        )
        self.tasks.append(task)
        self._since[lane] = position
        return position

    def compute(
        self,
        kind: TaskKind,
        layer: int,
        j: int,
        *more: int | None,
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> int:
        """`add` the next task of micro-batch ``j`` on the compute lane, after its last one and those in ``more``."""
        deps = (self._ready[j], *more)
        self._ready[j] = self.add(kind, self.layout.compute, layer, j, deps, reads=reads, writes=writes)
        return self._ready[j]

    def finish(self) -> Schedule:
        """The schedule of all tasks added."""
        total = len(self.layout.streamed)
        ahead = tuple(self._delivered[k] for k in sorted(self._delivered) if k >= total)
        return Schedule(builder=self.name, tasks=tuple(self.tasks), stream_advance=total, prefetched_next=ahead)

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
        from_disk = self.layout.from_disk[k % len(self.layout.streamed)]
        self._fetched[k] = self.add(
            TaskKind.READ_PAGE if from_disk else TaskKind.STAGE_PAGE,
            Lane.DISK if from_disk else Lane.STAGE,
            deps=(self._delivered.get(former_k),),
            writes=(self.buffer("pinned", slot),),
            size=self.layout.bytes_at(k),
            page=self._page(k),
            slot=slot,
        )

    def deliver(self, k: int) -> None:
        """Transfer page ``k`` into its ring slot, once the experts that read the slot's former page are written."""
        if k in self._delivered or k in self._waiting:
            return
        former_k = k - self.layout.ring_slots
        if self._waiting or (former_k >= 0 and not self._is_read(self._turn(former_k))):
            self._waiting.append(k)
            return
        self.fetch(k)
        crosses, stops = self.layout.pages_cross, self.layout.stops(k)
        former = self._last_read.get(self._turn(former_k)) if former_k >= 0 else None
        self._delivered[k] = self.add(
            TaskKind.SEND_PAGE if crosses else TaskKind.READ_PAGE,
            Lane.H2D if crosses else Lane.DISK,
            deps=(self._fetched.get(k) if stops else None, former),
            reads=(self.buffer("pinned", k % self.layout.pinned_slots),) if stops else (),
            writes=(self.buffer("ring", k % self.layout.ring_slots),),
            size=self.layout.bytes_at(k),
            page=self._page(k),
            slot=k % self.layout.ring_slots,
        )
        ahead = k + self.layout.pinned_slots
        if self.layout.turn_parts and ahead < len(self.layout.streamed):
            self.fetch(ahead)  # the pinned ring is filled while the ring's slots are read

    def deliver_layer(self, layer: int) -> None:
        for page in self.layer_pages(layer):
            self.deliver(page)

    def fetch_layer(self, layer: int) -> None:
        """`fetch` as many first pages of ``layer`` as there are pinned slots."""
        if layer <= self.layout.model.num_layers:
            for page in self.layer_pages(layer)[: self.layout.pinned_slots]:
                self.fetch(page)

    def transfer_chosen(self, layer: int) -> None:
        """Transfer the offloaded pages that the routers of ``layer`` chose, in one task per lane that they pass."""
        deps = (self._routed[layer], *(self._delivered[k] for k in range(self.shape.prefetched)))
        lanes, pinned = self.layout.page_lanes, self.buffer("chosen_pinned", layer)
        for lane in lanes:
            self._brought[layer] = self.add(
                TaskKind.SEND_EXPERTS if lane is Lane.H2D else TaskKind.READ_EXPERTS,
                lane,
                layer,
                deps=deps,
                reads=() if lane is lanes[0] else (pinned,),
                writes=(self.buffer("chosen", layer) if lane is lanes[-1] else pinned,),
                size=self.layout.most_chosen_bytes(layer, lane),
            )
            deps = (self._brought[layer],)

    def prefetch_predicted(self, layer: int, coming: int) -> None:
        """Begin to fetch the predicted pages of layer ``coming`` after the routers of ``layer`` (and later layers'
        routers, if they predict). No task depends on this one; an expert waits for the transfer of its own page."""
        after = self._routed[layer]
        for j in range(self.count) if self.shape.predict_experts else ():
            after = self.compute(TaskKind.PREDICT_EXPERTS, layer, j, reads=("hidden",))
        lane = self.layout.page_lanes[-1]
        self.add(TaskKind.SEND_AHEAD if lane is Lane.H2D else TaskKind.READ_AHEAD, lane, coming, deps=(after,))

    def ring(self, layer: int, turn: int = 0) -> tuple[Buffer, ...]:
        """The slots of transferred pages that the experts of ``layer`` read in their ``turn``."""
        if self.shape.routed_only:
            return (self.buffer("chosen", layer),) if layer in self._brought else ()
        if (layer, turn) not in self._rings:  # every micro-batch reads all of the slots
            slots, (pages, _) = self.layout.ring_slots, self.layout.turns(layer)[turn]
            self._rings[layer, turn] = tuple([self.buffer("ring", k % slots) for k in pages])
        return self._rings[layer, turn]

    def arrived(self, layer: int, turn: int = 0) -> tuple[int, ...]:
        """The task that the experts of ``layer`` wait for: the last arrival, as pages arrive on one lane in order."""
        if self.shape.routed_only:
            return (self._brought[layer],) if layer in self._brought else ()
        positions, _ = self.layout.turns(layer)[turn]
        return (self._delivered[positions[-1]],) if positions else ()

    def read_ring(self, layer: int, task: int, turn: int = 0) -> None:
        """Record that ``task`` read the slots of ``layer`` and ``turn``; deliver the pages deferred until then."""
        read = layer, turn
        self._last_read[read] = task
        self._reads[read] = self.count if self.tasks[task].serves_all else self._reads.get(read, 0) + 1
        if self._waiting and self._is_read(read):
            waiting, self._waiting = self._waiting, deque()
            for k in waiting:
                self.deliver(k)

    def _is_read(self, turn: tuple[int, int]) -> bool:
        return self._reads.get(turn, 0) >= self.count

    def _turn(self, k: int) -> tuple[int, int]:
        """Layer and turn that read page ``k``; ``num_layers`` stands for those of the next pass."""
        if k >= len(self.layout.streamed):
            return self.layout.model.num_layers, 0
        return self.layout.streamed[k].layer, self.layout.turn_of(k)

    def _page(self, k: int) -> Page:
        return self.layout.streamed[k % len(self.layout.streamed)]

    # ---- layers

    @property
    def count(self) -> int:
        return len(self.shape.micro_batches)

    def load_kv(self, layer: int, j: int) -> None:
        """Transfer the cached keys and values of micro-batch ``j`` to the device, into the buffer of its step's parity.
        Does nothing if none cross, the transfer is written or too early, or the pass still computes some; `attend`
        calls this again."""
        micro_batch, step = self.shape.micro_batches[j], layer * self.count + j
        crosses = self.layout.context_crosses and not micro_batch.prefill_only and micro_batch.context > 0
        if step in self._context_loaded or step > self._attended + 1 or not crosses:
            return
        stored = self._stored_by_layer.get(layer, [])
        earlier = range(j) if micro_batch.continues else range(0)
        if len(stored) < len(earlier):
            return
        self._context_loaded[step] = self.add(
            TaskKind.LOAD_KV,
            Lane.H2D,
            layer,
            j,
            (self._context_used.get(step % 2), *(stored[-1:] if earlier else ())),
            reads=tuple(self._cache(layer, i) for i in earlier),
            writes=(self.buffer("context", step % 2),),
            size=self.layout.context_bytes(micro_batch, layer),
        )

    def load_contexts(self, layer: int, j: int) -> None:
        """`load_kv` of this step, if still due, and of the step after it."""
        step = layer * self.count + j
        for position in range(step, min(step + 2, self.count * self.layout.model.num_layers)):
            self.load_kv(*divmod(position, self.count))

    def attend(self, layer: int, j: int) -> None:
        """``pre_attention`` and attention of micro-batch ``j``; `load_hidden` writes the transfer back over a link, and
        `post_attention` a whole layer."""
        if layer == 0:
            self._ready[j] = self.add(TaskKind.EMBED, self.layout.compute, 0, j, writes=("hidden",))
        else:
            self._sum_experts(layer - 1, j)
        if self.shape.whole_layers and self._is_whole(layer):
            return
        self.load_kv(layer, j)
        sent = self._sent_down.get(j)
        self.compute(TaskKind.PRE_ATTENTION, layer, j, sent, reads=("hidden",), writes=("qkv",))
        if not self.layout.discrete:
            self.compute(TaskKind.CPU_ATTENTION, layer, j, reads=("qkv",), writes=("attn",))
        elif self._attends_on_host(j):
            self._transfer(TaskKind.OFFLOAD_QKV, Lane.D2H, layer, j, "qkv", partial(costs.qkv_bytes, layer=layer))
            deps, reads, writes = (self._ready[j],), ("qkv_host",), ("attn_host",)
            self._ready[j] = self.add(TaskKind.CPU_ATTENTION, Lane.CPU, layer, j, deps, reads=reads, writes=writes)
        else:
            self._attend_on_device(layer, j)
        self._attended = layer * self.count + j + 1

    def load_hidden(self, layer: int, j: int) -> None:
        """Transfer the attention output of micro-batch ``j`` to the device, where the host attended across a link."""
        if self._attends_on_host(j):
            self._transfer(TaskKind.LOAD_HIDDEN, Lane.H2D, layer, j, "attn", partial(costs.hidden_bytes, layer=layer))

    def post_attention(self, layer: int, j: int) -> None:
        """Output projection, router and experts of micro-batch ``j``; `combine` completes experts across a link."""
        if self.layout.cpu_layers[layer]:
            self._route(layer, j)
            self._experts_over_the_link(layer, j)
            return
        if self.shape.whole_layers and self._is_whole(layer):
            self._whole_layers(layer, j)
            return
        reads: Buffers = ("attn", *self.ring(layer))
        kind, arrived = TaskKind.POST_ATTENTION, self.arrived(layer)
        self.read_ring(layer, self.compute(kind, layer, j, *arrived, reads=reads, writes=("hidden",)))

    def combine(self, layer: int, j: int) -> None:
        """Transfer the outputs of the CPU's experts for micro-batch ``j``, if any, to the device and add them."""
        if j in self._split:
            self._ready[j], on_device = self._split.pop(j)
            self._transfer(TaskKind.LOAD_EXPERTS, Lane.H2D, layer, j, "experts", costs.residual_bytes)
            self.compute(TaskKind.COMBINE, layer, j, on_device, reads=("experts",), writes=("hidden",))

    def route(self, layer: int, j: int) -> None:
        """Micro-batch ``j`` up to its router, for experts that run later; a layer without experts completely."""
        if self.layout.model.moe_layers[layer]:
            self._routed[layer] = self._route(layer, j)
        else:
            self.post_attention(layer, j)

    def experts_of(self, layer: int, j: int) -> None:
        """The experts, if any, of micro-batch ``j`` after its router; `combine` completes those on the CPU."""
        if self.layout.cpu_layers[layer]:
            self._experts_over_the_link(layer, j)
        elif self.layout.model.moe_layers[layer]:
            reads: Buffers = ("routed", *(() if self.layout.discrete else ("partial",)), *self.ring(layer))
            kind, arrived = TaskKind.EXPERTS, self.arrived(layer)
            self.read_ring(layer, self.compute(kind, layer, j, *arrived, reads=reads, writes=("hidden",)))

    def resident_experts(self, layer: int, j: int) -> None:
        """The experts of micro-batch ``j`` that need no page in flight, where the CPU computes beside the disk."""
        if self.layout.model.moe_layers[layer] and not self.layout.discrete:
            self.compute(TaskKind.RESIDENT_EXPERTS, layer, j, reads=("routed",), writes=("partial",))

    def experts(self, layer: int) -> None:
        """The experts of ``layer``, if any, once for all micro-batches: all of them, or turn by turn."""
        if not self.layout.model.moe_layers[layer]:
            return
        micro_batches = range(self.count)
        turns: tuple[tuple[range, range | None], ...] = ((range(0), None),)
        if not self.shape.routed_only:
            turns = self.layout.turns(layer)
        for turn, (_, experts) in enumerate(turns):
            task = self.add(
                TaskKind.EXPERTS,
                self.layout.compute,
                layer,
                ALL,
                (self._ready[self.count - 1], *self.arrived(layer, turn)),
                reads=(*(self.buffer("routed", j) for j in micro_batches), *self.ring(layer, turn)),
                writes=tuple(self.buffer("hidden", j) for j in micro_batches),
                experts=experts,
            )
            self._ready = dict.fromkeys(micro_batches, task)
            self.read_ring(layer, task, turn)

    def sample(self, *micro_batches: int) -> None:
        """Sample the next token of every sequence, with a complete prompt, of these micro-batches (none: of all)."""
        for j in micro_batches or range(self.count):
            if self.shape.micro_batches[j].samples:
                self._sum_experts(self.layout.model.num_layers - 1, j)
                self.compute(TaskKind.SAMPLE, self.layout.model.num_layers - 1, j, reads=("hidden",))

    def _sum_experts(self, layer: int, j: int) -> None:
        """Sum the hidden states of micro-batch ``j`` over ranks, if there are several, after the experts of ``layer``,
        if there are any."""
        model, micro_batch = self.layout.model, self.shape.micro_batches[j]
        if model.ranks == 1 or not model.moe_layers[layer]:
            return
        size, buffers = costs.sent_bytes(model, self.layout.dtype, micro_batch.tokens), (self.buffer("hidden", j),)
        deps, kind = (self._ready[j],), TaskKind.SUM_EXPERTS
        self._ready[j] = self.add(kind, Lane.EXCHANGE, layer, j, deps, reads=buffers, writes=buffers, size=size)

    def _is_whole(self, layer: int) -> bool:
        """True if nothing moves between the phases of ``layer``, which are one task with those of layers beside it in
        a pass of whole layers."""
        if self._apart or self.layout.model.ranks > 1 or layer >= len(self.layout.layer_pages):
            return False
        return not self.layout.layer_pages[layer]

    def _whole_layers(self, layer: int, j: int) -> None:
        """The task of the last of consecutive whole layers; its first was the first that was asked for."""
        first = self._whole.setdefault(j, layer)
        if self._is_whole(layer + 1):
            return
        layers, buffers = range(self._whole.pop(j), layer + 1), (self.buffer("hidden", j),)
        deps, kind = (self._ready[j],), TaskKind.LAYERS
        self._ready[j] = self.add(
            kind, self.layout.compute, first, j, deps, reads=buffers, writes=buffers, layers=layers
        )

    def _attends_on_host(self, j: int) -> bool:
        """True if keys and values of micro-batch ``j`` cross a link to the CPU's attention."""
        layout = self.layout
        return layout.discrete and layout.attention != "gpu" and not self.shape.micro_batches[j].prefill_only

    def _transfer(
        self, kind: TaskKind, lane: Lane, layer: int, j: int, name: str, size_of: Callable[..., int], *more: int
    ) -> None:
        """The next task of micro-batch ``j``, also after ``more``: move buffer ``name`` between device and host."""
        reads, writes = (f"{name}_host", name) if lane is Lane.H2D else (name, f"{name}_host")
        size = size_of(self.layout.model, self.layout.dtype, self.shape.micro_batches[j].tokens)
        deps = (self._ready[j], *more)
        self._ready[j] = self.add(kind, lane, layer, j, deps, reads=(reads,), writes=(writes,), size=size)

    def _attend_on_device(self, layer: int, j: int) -> None:
        """Attend over keys and values on the device and those transferred to it; send the new ones to the host."""
        step, layout, before = layer * self.count + j, self.layout, self._ready[j]
        loaded = self._context_loaded.get(step)
        reads: Buffers = ("qkv",) if loaded is None else ("qkv", self.buffer("context", step % 2))
        attention = self.compute(TaskKind.ATTENTION, layer, j, loaded, reads=reads, writes=("attn",))
        if loaded is not None:
            self._context_used[step % 2] = attention
        if layout.attention == "gpu" and not layout.context_crosses:
            return
        down = layout.kv_down_bytes(self.shape.micro_batches[j], layer)
        deps: tuple[int | None, ...] = (before, self._stored.get(j))
        kind, reads, writes = TaskKind.OFFLOAD_KV, ("qkv",), ("qkv_host",)
        self._sent_down[j] = self.add(kind, Lane.D2H, layer, j, deps, reads=reads, writes=writes, size=down)
        cache_writes = (self._cache(layer, j),) if layout.context_crosses else ()
        deps, reads = (self._sent_down[j],), ("qkv_host",)
        self._stored[j] = self.add(TaskKind.STORE_KV, Lane.CPU, layer, j, deps, reads=reads, writes=cache_writes)
        self._stored_by_layer.setdefault(layer, []).append(self._stored[j])

    def _cache(self, layer: int, j: int) -> Buffer:
        """The keys and values that micro-batch ``j`` adds to the cache of ``layer`` in host memory."""
        return self.buffer("cache", layer * self.count + j)

    def _route(self, layer: int, j: int) -> int:
        return self.compute(TaskKind.ROUTE, layer, j, reads=("attn",), writes=("hidden", "routed"))

    def _experts_over_the_link(self, layer: int, j: int) -> None:
        """Send the CPU's share down and compute it, ready for `combine`; run the device's share, if any, meanwhile."""
        routed, all_on_cpu = self._ready[j], self.layout.experts == "host"
        last_routed = (self._routed[layer],) if self.shape.routed_only else ()
        self._transfer(TaskKind.OFFLOAD_HIDDEN, Lane.D2H, layer, j, "routed", costs.routed_bytes, *last_routed)
        ring, arrived = self.ring(layer), self.arrived(layer)
        deps = (self._ready[j], *(arrived if all_on_cpu else ()))
        reads: Buffers = ("routed_host", *(ring if all_on_cpu else ()))
        kind, writes = TaskKind.CPU_EXPERTS, ("experts_host",)
        task = on_cpu = self.add(kind, Lane.CPU, layer, j, deps, reads=reads, writes=writes)
        self._ready[j] = routed
        if not all_on_cpu:
            task = self.compute(TaskKind.EXPERTS, layer, j, *arrived, reads=("routed", *ring), writes=("hidden",))
        self._split[j] = on_cpu, self._ready[j]
        self.read_ring(layer, task)
