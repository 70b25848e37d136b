"""A virtual machine for schedules: lanes without threads, slots without bytes, any order of events that lanes allow.

It looks pages up as the page store does, by absolute position in the stream, and knows nothing of the validator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from moelight.core.schedule import Lane, Page, Schedule, Task, TaskKind
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
    """What the micro-batches of one pass hold, as the layer each value belongs to; who is in which layer's cache."""

    holds: dict[tuple[str, int], int] = field(default_factory=dict)
    cached: set[tuple[int, int]] = field(default_factory=set)


class VirtualMachine:
    """Runs passes one after another, as the executor does: carried pages stay on their way between two passes."""

    def __init__(self, layout: Layout, random: Random) -> None:
        self._layout, self._random = layout, random
        self._lanes: dict[Lane, deque[Errand]] = {lane: deque() for lane in Lane}
        self._slots: dict[tuple[str, int], Page] = {}
        self._carried: dict[Page, Errand] = {}
        self._position = 0
        self.moved: dict[Lane, int] = {}

    @property
    def carried(self) -> int:
        return len(self._carried)

    def run(self, schedule: Schedule, shape: PassShape) -> None:
        """One pass in a random order of events; AssertionError where a task finds what it must not."""
        state, errands = PassState(), list[Errand]()
        for task in schedule.tasks:
            if task.kind is TaskKind.CARRIED_PAGE:
                assert task.page is not None
                errands.append(self._carried[task.page])
            else:
                errand = Errand(task, self._position, [errands[dep] for dep in task.deps], state)
                self._lanes[task.lane].append(errand)
                errands.append(errand)
        self._carried = {schedule.tasks[p].page: errands[p] for p in schedule.carried_out}  # type: ignore[misc]
        ahead = set(schedule.carried_out)
        waited_for = [errand for p, errand in enumerate(errands) if p not in ahead]
        while not all(errand.done for errand in waited_for):
            self._step()
        self._position += schedule.stream_advance
        layers = self._layout.model.num_layers
        for j in range(len(shape.micro_batches)):
            assert state.holds["hidden", j] == layers, f"micro-batch {j} did not get through"
            assert {layer for layer, i in state.cached if i == j} == set(range(layers))

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
        if task.kind is TaskKind.EMBED:
            state.holds["hidden", j] = 0
            return
        needs, gives = _FLOW[task.kind]
        if task.kind is TaskKind.CPU_ATTENTION and not self._layout.discrete:
            needs, gives = "qkv", "attn"
        wanted = self._layout.model.num_layers if task.kind is TaskKind.SAMPLE else layer
        assert state.holds.get((needs, j)) == wanted, f"{task.name} finds {state.holds.get((needs, j))} in {needs}"
        if task.kind in (TaskKind.CPU_ATTENTION, TaskKind.STORE_KV):
            assert all((layer, i) in state.cached for i in range(j)), f"{task.name} misses earlier keys and values"
            state.cached.add((layer, j))
        if task.kind is TaskKind.POST_ATTENTION:
            self._read_experts(errand)
            layer += 1
        if gives is not None:
            state.holds[gives, j] = layer

    def _move_page(self, errand: Errand, page: Page) -> None:
        (into,) = errand.task.writes
        for source in errand.task.reads:
            found = self._slots.get(self._absolute(source.space, errand.position + source.index))
            assert found == page, f"{errand.task.name} finds {found}"
        self._slots[self._absolute(into.space, errand.position + into.index)] = page

    def _read_experts(self, errand: Errand) -> None:
        for k in self._layout.layer_pages[errand.task.layer]:
            found = self._slots.get(self._absolute("ring", errand.position + k))
            assert found == self._layout.streamed[k], f"{errand.task.name} finds {found} for {self._layout.streamed[k]}"

    def _absolute(self, space: str, place: int) -> tuple[str, int]:
        return space, place % (self._layout.ring_slots if space == "ring" else self._layout.pinned_slots)


_FLOW: dict[TaskKind, tuple[str, str | None]] = {
    TaskKind.PRE_ATTENTION: ("hidden", "qkv"),
    TaskKind.ATTENTION: ("qkv", "attn"),
    TaskKind.OFFLOAD_QKV: ("qkv", "qkv_host"),
    TaskKind.OFFLOAD_KV: ("qkv", "qkv_host"),
    TaskKind.STORE_KV: ("qkv_host", None),
    TaskKind.CPU_ATTENTION: ("qkv_host", "attn_host"),
    TaskKind.LOAD_HIDDEN: ("attn_host", "attn"),
    TaskKind.POST_ATTENTION: ("attn", "hidden"),
    TaskKind.SAMPLE: ("hidden", None),
}
