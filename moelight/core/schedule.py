"""The order of work as a value: tasks on lanes, with what they wait for and what they touch.

A schedule is priced, validated, simulated, executed and drawn from these fields alone. It refuses to know how any
task is carried out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Lane(str, enum.Enum):
    """Something that does one thing at a time, in the order given."""

    DISK = "disk"
    STAGE = "stage"
    H2D = "h2d"
    D2H = "d2h"
    DEVICE = "device"
    CPU = "cpu"

    __hash__ = str.__hash__  # an enumeration's own is ten times slower, and every pass looks up thousands

    def __str__(self) -> str:
        return self.value


class TaskKind(str, enum.Enum):
    """The paper's verbs, and the few that passes add."""

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
    ROUTE = "route"  # the first part of post_attention, up to the router, where experts run apart from it
    EXPERTS = "experts"  # the second part: experts on the compute unit, of one micro-batch or (-1) of all of them
    RESIDENT_EXPERTS = "resident_experts"  # those of them that are there already, while the others are on their way
    PREDICT_EXPERTS = "predict_experts"  # a guess which experts the layers to come will be asked for
    SAMPLE = "sample"
    READ_PAGE = "read_page"
    STAGE_PAGE = "stage_page"
    SEND_PAGE = "send_page"
    PREFETCHED_PAGE = "prefetched_page"
    # What a layer's routers chose and is not there, and what was foreseen: known only when they run.
    READ_EXPERTS = "read_experts"
    SEND_EXPERTS = "send_experts"
    READ_AHEAD = "read_ahead"
    SEND_AHEAD = "send_ahead"

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value

    @property
    def moves_page(self) -> bool:
        """True for what moves pages of weights; those that name theirs may run ahead into the pass before."""
        return self in _PAGE_KINDS or self in CHOSEN_KINDS or self in AHEAD_KINDS


_PAGE_KINDS = frozenset((TaskKind.READ_PAGE, TaskKind.STAGE_PAGE, TaskKind.SEND_PAGE, TaskKind.PREFETCHED_PAGE))
CHOSEN_KINDS = frozenset((TaskKind.READ_EXPERTS, TaskKind.SEND_EXPERTS))
AHEAD_KINDS = frozenset((TaskKind.READ_AHEAD, TaskKind.SEND_AHEAD))


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Page:
    """One expert of one layer, or an aligned ``part`` of it: the unit of weight movement. Homes are of part 0."""

    layer: int
    expert: int
    part: int = 0

    @property
    def name(self) -> str:
        """``4:e7``, and ``4:e7.1`` for the part that follows."""
        return f"{self.layer}:e{self.expert}.{self.part}" if self.part else f"{self.layer}:e{self.expert}"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Buffer:
    """A place two tasks may contend for: ``space`` names the arena, ``index`` the slot in it."""

    space: str
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One step of work on one lane.

    ``deps`` are positions of earlier tasks in the same schedule. Tasks on one lane also run in schedule order.
    ``bytes`` is what crosses a link (0 for compute); of tasks that fetch chosen experts, the most that may be missing
    by the placement, and of those that fetch ahead, 0. ``slot`` is the ring slot a page task fills.
    """

    kind: TaskKind
    lane: Lane
    layer: int = -1
    micro_batch: int = -1
    page: Page | None = None
    slot: int = -1
    bytes: int = 0
    deps: tuple[int, ...] = ()
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()

    @property
    def name(self) -> str:
        """A short label: ``post_attention(3,1)`` or ``read_page(4:e7)``."""
        if self.page is not None:
            return f"{self.kind}({self.page.name})"
        return f"{self.kind}({self.layer},{self.micro_batch})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A pass as an ordered tuple of tasks; every dependency points backwards.

    Slots are relative to the page stream's position when the pass starts; the pass moves that position on by
    ``stream_advance`` parts of pages. ``prefetched_next`` are the tasks that fetch the first pages of the next pass, in
    ring order.
    """

    builder: str
    tasks: tuple[Task, ...]
    stream_advance: int = 0
    prefetched_next: tuple[int, ...] = ()

    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in use, in the order of the enumeration."""
        used = {task.lane for task in self.tasks}
        return tuple(lane for lane in Lane if lane in used)

    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes that cross each lane in one pass."""
        totals: dict[Lane, int] = {}
        for task in self.tasks:
            totals[task.lane] = totals.get(task.lane, 0) + task.bytes
        return totals
