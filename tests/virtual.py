"""A virtual machine for schedules: lanes without threads, slots without bytes, any order of events that lanes allow.

It looks pages up as the page store does, by absolute position in the stream, and knows nothing of the validator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from moelight.core.schedule import AHEAD_KINDS, CHOSEN_KINDS, Buffer, Lane, Page, Schedule, Task, TaskKind
from moelight.scheduler.layout import Layout, PassShape


@dataclass(eq=False)
class Errand:
    """One submitted task."""

    task: Task
    position: int
    after: list[Errand]
    state: PassState
    done: bool = False


@dataclass
class PassState:
    """What the micro-batches of one pass hold, as the layer each value belongs to; who is in which layer's cache; and
    whose context is in which of the device's two buffers."""

    shape: PassShape
    holds: dict[tuple[str, int], int] = field(default_factory=dict)
    cached: set[tuple[int, int]] = field(default_factory=set)
    context: dict[Buffer, tuple[int, int]] = field(default_factory=dict)
    computed: set[tuple[int, int]] = field(default_factory=set)
    brought: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    summed: dict[int, int] = field(default_factory=dict)


class VirtualMachine:
    """Runs passes one after another, as the executor does: prefetched pages stay on their way between two passes."""

    def __init__(self, layout: Layout, random: Random) -> None:
        self._layout, self._random = layout, random
        self._lanes: dict[Lane, deque[Errand]] = {lane: deque() for lane in Lane}
        self._slots: dict[tuple[str, int], Page] = {}
        self._prefetched: dict[Page, Errand] = {}
        self._position = 0
        self.moved: dict[Lane, int] = {}

    @property
    def prefetched(self) -> int:
        return len(self._prefetched)

    def run(self, schedule: Schedule, shape: PassShape) -> None:
        """One pass in a random order of events; AssertionError where a task finds what it must not."""
        state, errands = PassState(shape), list[Errand]()
        for task in schedule.tasks:
            if task.kind is TaskKind.PREFETCHED_PAGE:
                assert task.page is not None
                errands.append(self._prefetched[task.page])
            else:
                errand = Errand(task, self._position, [errands[dep] for dep in task.deps], state)
                self._lanes[task.lane].append(errand)
                errands.append(errand)
        self._prefetched = {schedule.tasks[p].page: errands[p] for p in schedule.prefetched_next}  # type: ignore[misc]
        ahead = set(schedule.prefetched_next)
        waited_for = [errand for p, errand in enumerate(errands) if p not in ahead]
        while not all(errand.done for errand in waited_for):
            self._step()
        self._position += schedule.stream_advance
        layers = self._layout.model.num_layers
        for j in range(len(shape.micro_batches)):
            assert state.holds["hidden", j] == layers, f"micro-batch {j} did not get through"
            assert {layer for layer, i in state.cached if i == j} == set(range(layers))
            on_cpu = {layer for layer, crosses in enumerate(self._layout.cpu_layers) if crosses}
            assert {layer for layer, i in state.computed if i == j} == on_cpu

    def _step(self) -> None:
        ready = [lane for lane, queue in self._lanes.items() if queue and all(e.done for e in queue[0].after)]
        assert ready, "the lanes wait for each other for ever"
        errand = self._lanes[self._random.choice(ready)].popleft()
        self._do(errand)
        errand.done = True
        self.moved[errand.task.lane] = self.moved.get(errand.task.lane, 0) + errand.task.bytes

    def _do(self, errand: Errand) -> None:
        task, state = errand.task, errand.state
        if task.page is not None:
            self._move_page(errand, task.page)
            return
        layer, j = task.layer, task.micro_batch
        if task.kind in CHOSEN_KINDS:
            self._bring(task, state)
            return
        if task.kind in AHEAD_KINDS:
            assert layer not in state.brought, f"{task.name} comes too late"
            return
        if task.kind is TaskKind.EMBED:
            state.holds["hidden", j] = 0
            return
        if task.kind is TaskKind.SUM_EXPERTS:
            assert state.holds["hidden", j] == layer + 1, f"{task.name} comes before the experts, or too late"
            assert state.summed.get(j) != layer + 1, f"{task.name} comes twice"
            state.summed[j] = layer + 1
            return
        if task.kind is TaskKind.LOAD_KV:
            self._load_context(task, state)
            return
        if task.layers is not None:
            self._pass_through(task, task.layers, state)
            return
        self._append(task, state)
        if task.kind in (TaskKind.POST_ATTENTION, TaskKind.EXPERTS):
            self._read_experts(errand)
        if task.kind is TaskKind.CPU_EXPERTS:
            state.computed.add((layer, j))
            if self._layout.experts == "host":
                self._read_experts(errand)
        for i in range(len(state.shape.micro_batches)) if j < 0 else (j,):
            self._pass_on(task, state, i)

    def _bring(self, task: Task, state: PassState) -> None:
        """Chosen experts of a layer, once all have chosen; over the link those that were read."""
        for j in range(len(state.shape.micro_batches)):
            assert state.holds.get(("routed", j)) == task.layer, f"{task.name} is not chosen yet"
            assert state.holds["hidden", j] == task.layer, f"{task.name} comes too late"
        if task.lane is not self._layout.page_lanes[0]:
            assert task.layer in state.read, f"{task.name} comes before they were read"
        (state.brought if task.lane is self._layout.page_lanes[-1] else state.read).add(task.layer)

    def _pass_through(self, task: Task, layers: range, state: PassState) -> None:
        """A micro-batch goes through ``layers``, whose experts are in place."""
        j = task.micro_batch
        earlier = all((layer, i) in state.cached for layer in layers for i in range(j))
        assert earlier, f"{task.name} misses earlier keys and values"
        assert state.holds.get(("hidden", j)) == layers.start, f"{task.name} comes too early or too late"
        assert not any(self._layout.layer_pages[layer] for layer in layers), f"{task.name} waits for no page"
        state.cached |= {(layer, j) for layer in layers}
        state.holds["hidden", j] = layers.stop

    def _pass_on(self, task: Task, state: PassState, j: int) -> None:
        """Take the value that micro-batch ``j`` brings to this act, and leave the one it makes."""
        needs, gives = _FLOW[task.kind]
        if task.kind is TaskKind.CPU_ATTENTION and not self._layout.discrete:
            needs, gives = "qkv", "attn"
        model, layers = self._layout.model, self._layout.model.num_layers
        wanted = layers if task.kind is TaskKind.SAMPLE else task.layer
        assert state.holds.get((needs, j)) == wanted, f"{task.name} finds {state.holds.get((needs, j))} in {needs}"
        partial = needs == "hidden" and wanted and model.ranks > 1 and model.moe_layers[wanted - 1]
        assert not partial or state.summed.get(j) == wanted, f"{task.name} finds a part of a sum"
        alone = not self._layout.cpu_layers[task.layer]
        if task.kind is TaskKind.EXPERTS and state.shape.routed_only and not self._layout.discrete:
            assert task.serves_all or state.holds.get(("partial", j)) == wanted, f"{task.name} misses its other part"
        if task.kind is TaskKind.POST_ATTENTION or (task.kind is TaskKind.EXPERTS and alone):
            state.holds["hidden", j] = wanted + 1
        elif task.kind is TaskKind.COMBINE:
            if self._layout.experts == "split":
                assert state.holds["device_part", j] == wanted, f"{task.name} comes before the device's experts"
            state.holds["hidden", j] = wanted + 1
        elif task.kind is TaskKind.EXPERTS:
            state.holds["device_part", j] = wanted
        elif gives is not None:
            state.holds[gives, j] = wanted

    def _append(self, task: Task, state: PassState) -> None:
        """Keys and values enter the cache in order, after the context that the device attends over was brought up."""
        layer, j, selected = task.layer, task.micro_batch, state.shape.micro_batches[task.micro_batch]
        if (
            task.kind is TaskKind.ATTENTION
            and self._layout.context_crosses
            and not selected.prefill_only
            and selected.context
        ):
            (buffer,) = (read for read in task.reads if read.space == "context")
            assert state.context[buffer] == (layer, j), f"{task.name} finds the context of {state.context[buffer]}"
        on_device = self._layout.attention == "gpu" and not self._layout.context_crosses
        if task.kind in (TaskKind.CPU_ATTENTION, TaskKind.STORE_KV) or (task.kind is TaskKind.ATTENTION and on_device):
            earlier = all((layer, i) in state.cached for i in range(j))
            assert earlier, f"{task.name} misses earlier keys and values"
            state.cached.add((layer, j))

    def _load_context(self, task: Task, state: PassState) -> None:
        layer, j = task.layer, task.micro_batch
        if state.shape.micro_batches[j].continues:
            assert all((layer, i) in state.cached for i in range(j)), f"{task.name} comes before what it brings"
        (into,) = task.writes
        state.context[into] = (layer, j)

    def _move_page(self, errand: Errand, page: Page) -> None:
        assert not errand.state.shape.routed_only, f"{errand.task.name} is not chosen yet"
        (into,) = errand.task.writes
        straight = self._layout.pinned_pages and not self._layout.from_disk[self._layout.streamed.index(page)]
        if errand.task.kind is TaskKind.SEND_PAGE:
            assert bool(errand.task.reads) != straight
        assert errand.task.kind is not TaskKind.STAGE_PAGE or not straight
        for source in errand.task.reads:
            result = self._slots.get(self._absolute(source.space, errand.position + source.index))
            assert result == page, f"{errand.task.name} finds {result}"
        self._slots[self._absolute(into.space, errand.position + into.index)] = page

    def _read_experts(self, errand: Errand) -> None:
        if errand.state.shape.routed_only:
            moe = self._layout.model.moe_layers[errand.task.layer]
            assert not moe or errand.task.layer in errand.state.brought, f"{errand.task.name} comes before its pages"
            return
        for k in self._layout.layer_pages[errand.task.layer]:
            if errand.task.experts is not None and self._layout.streamed[k].expert not in errand.task.experts:
                continue
            result = self._slots.get(self._absolute("ring", errand.position + k))
            assert result == self._layout.streamed[k], (
                f"{errand.task.name} finds {result} for {self._layout.streamed[k]}"
            )

    def _absolute(self, space: str, position: int) -> tuple[str, int]:
        return space, position % (self._layout.ring_slots if space == "ring" else self._layout.pinned_slots)


_FLOW: dict[TaskKind, tuple[str, str | None]] = {
    TaskKind.PRE_ATTENTION: ("hidden", "qkv"),
    TaskKind.ATTENTION: ("qkv", "attn"),
    TaskKind.OFFLOAD_QKV: ("qkv", "qkv_host"),
    TaskKind.OFFLOAD_KV: ("qkv", "qkv_host"),
    TaskKind.STORE_KV: ("qkv_host", None),
    TaskKind.CPU_ATTENTION: ("qkv_host", "attn_host"),
    TaskKind.LOAD_HIDDEN: ("attn_host", "attn"),
    TaskKind.POST_ATTENTION: ("attn", None),
    TaskKind.ROUTE: ("attn", "routed"),
    TaskKind.EXPERTS: ("routed", None),
    TaskKind.RESIDENT_EXPERTS: ("routed", "partial"),
    TaskKind.PREDICT_EXPERTS: ("hidden", None),
    TaskKind.OFFLOAD_HIDDEN: ("routed", "routed_host"),
    TaskKind.CPU_EXPERTS: ("routed_host", "experts_host"),
    TaskKind.LOAD_EXPERTS: ("experts_host", "experts"),
    TaskKind.COMBINE: ("experts", None),
    TaskKind.SAMPLE: ("hidden", None),
}
