"""Writes the phases of a micro-batch in one layer, task by task: attention, then experts.

A builder decides only the order of the calls; dependencies, buffers and bytes of each task are defined here.
"""

from __future__ import annotations

from moelight.core.schedule import Buffer, Lane, Task, TaskKind
from moelight.hrm import costs
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape
from moelight.scheduler.stream import ALL, PageWriter
from moelight.scheduler.writer import drop_none


class LayerWriter(PageWriter):
    """Writes a schedule. Micro-batches attend layer by layer, first to last."""

    def __init__(self, layout: Layout, shape: PassShape, *, chained: bool = False) -> None:
        super().__init__(layout, shape, chained=chained)
        self._ready: dict[int, int] = {}
        self._sent_down: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        self._stored_by_layer: dict[int, list[int]] = {}
        self._attended = 0
        self._context_loaded: dict[int, int] = {}
        self._context_used: dict[int, int] = {}
        self._device_part: dict[int, int] = {}
        self._returning: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Micro-batches in the pass."""
        return len(self.shape.micro_batches)

    def embed(self, j: int) -> None:
        """Turn the token ids of micro-batch ``j`` into hidden states."""
        self._ready[j] = self.compute(TaskKind.EMBED, 0, j, (), writes=("hidden",))

    def load_kv(self, layer: int, j: int) -> None:
        """Transfer the cached keys and values of micro-batch ``j`` to the device, into the buffer of its step's parity.

        Does nothing where keys and values do not cross, where the transfer is already written or more than one step
        ahead of attention, or while the pass still computes some of them; `attend` calls this again.
        """
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
            self.embed(j)
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
        deps = (self._ready[j],)
        self._ready[j] = self.cross(TaskKind.LOAD_HIDDEN, Lane.H2D, layer, j, deps, up, "attn_host", "attn")

    def post_attention(self, layer: int, j: int) -> None:
        """Output projection, router and experts of micro-batch ``j``; reads every ring slot of the layer.

        Where the CPU computes experts across a link, they are still running afterwards; `combine` completes them.
        """
        if self.layout.cpu_layers[layer]:
            self._experts_over_the_link(layer, j, self._route(layer, j))
            return
        kind, deps = TaskKind.POST_ATTENTION, (self._ready[j], *self.arrived(layer))
        ring = self.ring(layer)
        task = self.compute(kind, layer, j, deps, reads=("attn",), writes=("hidden",), also_reads=ring)
        self._ready[j] = task
        self.read_ring(layer, task)

    def combine(self, layer: int, j: int) -> None:
        """Transfer the outputs of the CPU's experts for micro-batch ``j`` to the device and add them; does nothing
        where there are none."""
        if j not in self._returning:
            return
        up = costs.residual_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        deps = (self._returning.pop(j),)
        loaded = self.cross(TaskKind.LOAD_EXPERTS, Lane.H2D, layer, j, deps, up, "experts_host", "experts")
        both = (loaded, self._device_part.pop(j))
        self._ready[j] = self.compute(TaskKind.COMBINE, layer, j, both, reads=("experts",), writes=("hidden",))

    def route(self, layer: int, j: int) -> None:
        """Micro-batch ``j`` up to its router, for experts that run later; a layer without experts completely."""
        if self.layout.model.moe_layers[layer]:
            self._ready[j] = self._routed[layer] = self._route(layer, j)
        else:
            self.post_attention(layer, j)

    def experts_of(self, layer: int, j: int) -> None:
        """The experts of micro-batch ``j`` after its router; does nothing in a layer without experts.

        Results of the CPU's experts are still in flight afterwards; `combine` completes them.
        """
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

    def routed_task(self, layer: int) -> int:
        """The last router of ``layer``."""
        return self._routed[layer]

    def predict_experts(self, layer: int, j: int) -> int:
        """Run later layers' routers on the hidden states of micro-batch ``j`` at ``layer``, to predict their
        experts."""
        self._ready[j] = self.compute(TaskKind.PREDICT_EXPERTS, layer, j, (self._ready[j],), reads=("hidden",))
        return self._ready[j]

    def experts(self, layer: int) -> None:
        """The experts of ``layer``, once for all micro-batches; does nothing in a layer without experts."""
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
        """Attend over the new keys and values, those on the device, and those transferred to it; send the new ones to
        the host."""
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
        sent = self.cross(TaskKind.OFFLOAD_KV, Lane.D2H, layer, j, deps, down, "qkv", "qkv_host")
        self._sent_down[j] = sent
        self._stored[j] = self._store(layer, j, sent)

    def _store(self, layer: int, j: int, sent: int) -> int:
        task = self.add(
            Task(
                kind=TaskKind.STORE_KV,
                lane=Lane.CPU,
                layer=layer,
                micro_batch=j,
                deps=(sent,),
                reads=(self.buffer("qkv_host", j),),
                writes=(self._cache(layer, j),) if self.layout.context_crosses else (),
            )
        )
        self._stored_by_layer.setdefault(layer, []).append(task)
        return task

    def _cache(self, layer: int, j: int) -> Buffer:
        """The keys and values that micro-batch ``j`` adds to the cache of ``layer`` in host memory."""
        return self.buffer("cache", layer * self.count + j)

    def _attend_on_host(self, layer: int, j: int, before: int) -> None:
        down = costs.qkv_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        sent = self.cross(TaskKind.OFFLOAD_QKV, Lane.D2H, layer, j, (before,), down, "qkv", "qkv_host")
        kind, lane = TaskKind.CPU_ATTENTION, Lane.CPU
        self._ready[j] = self.compute(kind, layer, j, (sent,), reads=("qkv_host",), writes=("attn_host",), lane=lane)

    def _route(self, layer: int, j: int) -> int:
        written = ("hidden", "routed")
        return self.compute(TaskKind.ROUTE, layer, j, (self._ready[j],), reads=("attn",), writes=written)

    def _experts_over_the_link(self, layer: int, j: int, routed: int) -> None:
        """Send the CPU's share down and compute it, ready for `combine`; run the device's share, if any, meanwhile.

        In an on-demand pass the split is decided once all routers of the layer have chosen.
        """
        down = costs.routed_bytes(self.layout.model, self.layout.dtype, self._of(j).tokens)
        known = (routed, self._routed[layer]) if self.shape.routed_only else (routed,)
        sent = self.cross(TaskKind.OFFLOAD_HIDDEN, Lane.D2H, layer, j, known, down, "routed", "routed_host")
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
