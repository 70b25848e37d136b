"""Schedules as data: tasks on lanes, their dependencies, and the buffers they read and write. How a task is carried out
is defined elsewhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ALL = -1  # in the place of a micro-batch, of which there are as many as a pass has


class _Named(str, enum.Enum):
    __hash__ = str.__hash__  # Enum.__hash__ is ten times slower, and every pass does thousands of look-ups

    def __str__(self) -> str:
        return str(self.value)


class Lane(_Named):
    """A resource that runs one task at a time, in schedule order."""

    DISK = "disk"
    STAGE = "stage"
    H2D = "h2d"
    D2H = "d2h"
    DEVICE = "device"
    CPU = "cpu"
    EXCHANGE = "exchange"


class TaskKind(_Named):
    """The operations of the paper's algorithm 1, and those that other schedules add."""

    EMBED = "embed"
    PRE_ATTENTION = "pre_attention"
    ATTENTION = "attention"
    OFFLOAD_QKV = "offload_qkv"
    CPU_ATTENTION = "cpu_attention"
    LOAD_HIDDEN = "load_hidden"
    OFFLOAD_KV = "offload_kv"
    STORE_KV = "store_kv"
    LOAD_KV = "load_kv"
    OFFLOAD_HIDDEN = "offload_hidden"
    CPU_EXPERTS = "cpu_experts"
    LOAD_EXPERTS = "load_experts"
    COMBINE = "combine"
    POST_ATTENTION = "post_attention"
    LAYERS = "layers"  # pre_attention, cpu_attention and post_attention of a micro-batch, layer after layer
    ROUTE = "route"  # post_attention up to the router, where the experts are tasks of their own
    EXPERTS = "experts"  # the experts, on the compute unit, of one micro-batch or of all
    RESIDENT_EXPERTS = "resident_experts"  # the resident experts, while offloaded pages are transferred
    SUM_EXPERTS = "sum_experts"  # the sum over ranks of hidden states to which the experts of a layer were added
    PREDICT_EXPERTS = "predict_experts"  # prediction of the experts of later layers
    SAMPLE = "sample"
    READ_PAGE = "read_page"
    STAGE_PAGE = "stage_page"
    SEND_PAGE = "send_page"
    PREFETCHED_PAGE = "prefetched_page"
    # Transfers of routed misses, and of speculative prefetches: their pages are known only at run time.
    READ_EXPERTS = "read_experts"
    SEND_EXPERTS = "send_experts"
    READ_AHEAD = "read_ahead"
    SEND_AHEAD = "send_ahead"

    @property
    def moves_page(self) -> bool:
        """True if the task transfers expert pages. Tasks that name their page may overlap the previous pass."""
        return self in _PAGE_KINDS or self in CHOSEN_KINDS or self in AHEAD_KINDS


_PAGE_KINDS = frozenset((TaskKind.READ_PAGE, TaskKind.STAGE_PAGE, TaskKind.SEND_PAGE, TaskKind.PREFETCHED_PAGE))
CHOSEN_KINDS = frozenset((TaskKind.READ_EXPERTS, TaskKind.SEND_EXPERTS))
AHEAD_KINDS = frozenset((TaskKind.READ_AHEAD, TaskKind.SEND_AHEAD))


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Page:
    """An expert page, or an aligned ``part`` of one: the unit of weight transfers. Placements refer to part 0."""

    layer: int
    expert: int
    part: int = 0

    @property
    def name(self) -> str:
        """``4:e7``, or ``4:e7.1`` for part 1."""
        return f"{self.layer}:e{self.expert}.{self.part}" if self.part else f"{self.layer}:e{self.expert}"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Buffer:
    """A memory location that two tasks may contend for: slot ``index`` of the arena ``space``."""

    space: str
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One operation on one lane. Tasks on one lane run in schedule order.

    ``deps`` are positions of earlier tasks in the schedule. ``bytes`` is the bytes transferred (0 for compute and for
    prefetch tasks; for tasks that fetch routed experts, the most that the placement can leave to transfer). ``slot`` is
    the ring slot that a page task fills. ``micro_batch`` is `ALL` for a task that serves all of them. ``experts``: the
    numbers of the experts that the task computes; None: of all. ``layers``: those that the task computes, of which
    ``layer`` is the first; None: that one.
    """

    kind: TaskKind
    lane: Lane
    layer: int = -1
    micro_batch: int = ALL
    layers: range | None = None
    page: Page | None = None
    slot: int = -1
    experts: range | None = None
    bytes: int = 0
    deps: tuple[int, ...] = ()
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    @property
    def serves_all(self) -> bool:
        """True if the task is not that of one micro-batch."""
        return self.micro_batch == ALL

    @property
    def name(self) -> str:
        """``post_attention(3,1)``, ``layers(0-15,1)`` or ``read_page(4:e7)``."""
        if self.page is not None:
            return f"{self.kind}({self.page.name})"
        if self.layers is not None:
            return f"{self.kind}({self.layer}-{self.layers[-1]},{self.micro_batch})"
        return f"{self.kind}({self.layer},{self.micro_batch})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A pass as an ordered tuple of tasks; every dependency points backwards.

    Slots are relative to the page stream's position at the start of the pass, which the pass advances by
    ``stream_advance`` page parts. ``prefetched_next`` are the tasks that fetch the first pages of the next pass, in
    ring order.
    """

    builder: str
    tasks: tuple[Task, ...]
    stream_advance: int = 0
    prefetched_next: tuple[int, ...] = ()

    def lanes(self) -> tuple[Lane, ...]:
        used = {task.lane for task in self.tasks}
        return tuple(lane for lane in Lane if lane in used)

    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes transferred on each lane in one pass."""
        totals: dict[Lane, int] = {}
        for task in self.tasks:
            totals[task.lane] = totals.get(task.lane, 0) + task.bytes
        return totals
