"""Writes tasks one after another. Depends only on lanes, buffers and dependencies, not on the meaning of the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moelight.core.schedule import Buffer, Lane, Task, TaskKind
from moelight.scheduler.layout import Layout, PassShape


class TaskWriter:
    """A growing list of tasks. Methods return task positions.

    ``chained``: every task also waits for the one before. Consecutive disk reads wait for the dependencies of the first
    of them, and the next task waits for all of them.
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

    def buffer(self, space: str, index: int) -> Buffer:
        """Slot ``index`` of ``space``: one object for all tasks that touch it."""
        found = self._buffers.get((space, index))
        if found is None:
            found = self._buffers[space, index] = Buffer(space=space, index=index)
        return found

    def barrier(self) -> None:
        """Make every later task wait for every earlier one: a device-wide synchronisation."""
        if self._since:
            self._waits_for = tuple(self._since.values())
            self._since = {}

    def cross(
        self, kind: TaskKind, lane: Lane, layer: int, j: int, deps: Sequence[int], size: int, source: str, target: str
    ) -> int:
        """Add a transfer of ``size`` bytes of micro-batch ``j`` from buffer ``source`` to ``target``."""
        return self.add(
            Task(
                kind=kind,
                lane=lane,
                layer=layer,
                micro_batch=j,
                bytes=size,
                deps=tuple(deps),
                reads=(self.buffer(source, j),),
                writes=(self.buffer(target, j),),
            )
        )

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
    ) -> int:
        """Add a task on buffers of micro-batch ``j``, on the compute lane unless ``lane`` is given."""
        return self.add(
            Task(
                kind=kind,
                lane=lane or self.layout.compute,
                layer=layer,
                micro_batch=j,
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


def drop_none(*tasks: int | None) -> tuple[int, ...]:
    """The positions among ``tasks`` that are not None."""
    return tuple(task for task in tasks if task is not None)
