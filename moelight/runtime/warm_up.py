"""First launches, which compile or load kernels, before the first pass: the device's tasks of a layer over rows of
zeros. Does not know which kernels they launch: a kernel may choose its program by the number of rows, but not more
often than that doubles."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moelight.core.schedule import Lane, Task, TaskKind
from moelight.kernels.gpu import serving
from moelight.profiles.model import ModelProfile
from moelight.runtime.context import Chunk, find_added
from moelight.runtime.microbatch import MicroBatch, SavedActivations, pack
from moelight.runtime.on_demand import PassPages
from moelight.runtime.ops import Operations

_log = logging.getLogger(__name__)


def warm_up(
    operations: Operations,
    model: ModelProfile,
    hidden: Tensor,
    *,
    kept: SavedActivations | None,
    most_rows: int,
    block_size: int,
    has_experts: bool,
) -> None:
    """Carry out the device's tasks of a first layer of each kind and of the head, on the calling thread, on
    micro-batches of 1, 2, 4, … up to ``most_rows`` rows; with ``kept``, experts also on all rows of ``hidden``; without
    ``has_experts``, on the device, up to the router. Weights and pages may be unread: results are dropped, and the
    contents of ``hidden`` and ``kept`` are lost.

    Where a kernel of Triton fails, torch serves on this device from then on. Raises torch.OutOfMemoryError.
    """
    layers = {model.moe_layers.index(moe): _after_attention(moe, kept, has_experts) for moe in set(model.moe_layers)}

    def play() -> None:
        for rows in doublings(most_rows if kept is None else len(hidden)):
            _play(operations, layers, _micro_batches(hidden, kept, rows, most_rows, block_size))

    try:
        play()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not serving.refuse(hidden.device, error):
            raise
        _log.warning("%s: torch computes: %s", hidden.device, serving.serves(hidden.device, hidden.dtype)[1])
        play()


def _after_attention(moe: bool, kept: SavedActivations | None, has_experts: bool) -> tuple[TaskKind, ...]:
    if not moe or (has_experts and kept is None):
        return (TaskKind.POST_ATTENTION,)
    return (TaskKind.ROUTE, TaskKind.EXPERTS) if has_experts else (TaskKind.ROUTE,)


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4, … below ``most``, then ``most``."""
    rows = 1
    while rows < most:
        yield rows
        rows *= 2
    yield most


def _micro_batches(
    hidden: Tensor, kept: SavedActivations | None, rows: int, most: int, block_size: int
) -> list[MicroBatch]:
    """Prompts of ``rows`` tokens in all and at most ``most`` each, whose keys and values have no place in the cache."""
    found = []
    for first in range(0, rows, most):
        count = min(most, rows - first)
        blocks = (0,) * -(-count // block_size)
        chunk = Chunk(token_ids=(0,) * count, start=0, blocks=blocks, place=0, samples=True, decodes=False)
        mb = pack(
            [chunk],
            block_size=block_size,
            hidden=hidden[first : first + count],
            sampled=torch.empty(1, dtype=torch.int64),
            crossing=None,
            kept=None if kept is None else kept.rows(first, count),
            prefill_only=True,
        )
        mb.added = find_added(mb.cache_slots, host_slots=block_size, device=hidden.device)
        found.append(mb)
    return found


def _play(operations: Operations, layers: Mapping[int, tuple[TaskKind, ...]], micro_batches: list[MicroBatch]) -> None:
    """``layers``: the tasks of each after attention; the second is one of the whole pass."""
    perform = operations.bind(
        PassPages(micro_batches=micro_batches, position=0), lambda *given: given[-1].argmax(-1), lambda *_: None
    )

    def run(kind: TaskKind, layer: int, j: int) -> None:
        perform(Task(kind=kind, lane=Lane.DEVICE, layer=layer, micro_batch=j))()

    for j in range(len(micro_batches)):
        run(TaskKind.EMBED, -1, j)
    for layer, (each, *whole) in layers.items():
        for j in range(len(micro_batches)):
            run(TaskKind.PRE_ATTENTION, layer, j)
            run(TaskKind.ATTENTION, layer, j)
            run(each, layer, j)
        for kind in whole:
            run(kind, layer, -1)
    for j in range(len(micro_batches)):
        run(TaskKind.SAMPLE, -1, j)
