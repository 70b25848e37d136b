"""First launches, which compile or load kernels, before the first pass: the device's tasks of a layer over rows of
zeros. Does not know which kernels they launch: a kernel may choose its program by the number of rows, but not more
often than that doubles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from moelight.core.schedule import Buffer, Lane, Task, TaskKind
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.attention import PromptForm
from moelight.paging.kv import BlockPool
from moelight.profiles.model import ModelProfile
from moelight.runtime.context import Chunk, find_added, find_context
from moelight.runtime.microbatch import MicroBatch, SavedActivations, pack
from moelight.runtime.on_demand import PassPages
from moelight.runtime.ops import Operations

_log = logging.getLogger(__name__)


def warm_up(
    operations: Operations,
    model: ModelProfile,
    hidden: Tensor,
    *,
    layers: Iterable[int],
    saved: SavedActivations | None,
    most_rows: int,
    block_size: int,
    form: PromptForm,
    has_experts: bool,
    pool: BlockPool | None,
) -> None:
    """Carry out the device's tasks of ``layers``, one of each kind, and of the head, on the calling thread, on
    micro-batches of 1, 2, 4, … up to ``most_rows`` rows; with ``saved``, experts also on all rows of ``hidden``;
    without ``has_experts``, on the device, up to the router. ``pool``: the blocks to whose contexts the device attends,
    in prompts of ``form`` and in decoding; None if the CPU does. Weights and pages may be unread, and blocks unwritten:
    results are dropped, and the contents of ``hidden``, ``saved`` and of a block are lost.

    Where a kernel of Triton fails, torch serves on this device from then on. Raises torch.OutOfMemoryError.
    """
    after = {layer: _after_attention(model.moe_layers[layer], saved, has_experts) for layer in layers}
    window = model.window

    def play() -> None:
        for rows in doublings(most_rows if saved is None else len(hidden)):
            _play(operations, after, _prompts(hidden, saved, rows, most_rows, block_size, form))
        if pool is None:
            return
        block = pool.host_blocks if pool.host_blocks < pool.blocks else 0  # on the device, if any is
        host_slots = pool.host_blocks * block_size
        for decodes in (True, False):
            chunk = _chunk(1, start=1, blocks=(block,), decodes=decodes)
            _attend(operations, _micro_batch(hidden, None, chunk, block_size, window, form, host_slots=host_slots))

    try:
        play()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not serving.refuse(hidden.device, error):
            raise
        _log.warning("%s: torch computes: %s", hidden.device, serving.serves(hidden.device, hidden.dtype)[1])
        play()
    operations.forget_range()


def _after_attention(moe: bool, saved: SavedActivations | None, has_experts: bool) -> tuple[TaskKind, ...]:
    if not moe or (has_experts and saved is None):
        return (TaskKind.POST_ATTENTION,)
    return (TaskKind.ROUTE, TaskKind.EXPERTS) if has_experts else (TaskKind.ROUTE,)


def doublings(limit: int) -> Iterator[int]:
    """1, 2, 4, … below ``limit``, then ``limit``."""
    rows = 1
    while rows < limit:
        yield rows
        rows *= 2
    yield limit


def _prompts(
    hidden: Tensor, saved: SavedActivations | None, rows: int, max_rows: int, block_size: int, form: PromptForm
) -> list[MicroBatch]:
    """Prompts of ``rows`` tokens in all and at most ``max_rows`` each, whose keys and values have no place in the
    cache."""
    prompts = []
    for first in range(0, rows, max_rows):
        count = min(max_rows, rows - first)
        blocks = (0,) * -(-count // block_size)
        chunk, activations = _chunk(count, blocks=blocks), None if saved is None else saved.rows(first, count)
        into = hidden[first : first + count]
        prompts.append(_micro_batch(into, activations, chunk, block_size, None, form, host_slots=block_size))
    return prompts


def _chunk(count: int, *, start: int = 0, blocks: tuple[int, ...], decodes: bool = False) -> Chunk:
    token_ids = () if decodes else (0,) * count
    return Chunk(token_ids=token_ids, start=start, blocks=blocks, slot=0, samples=True, decodes=decodes)


def _micro_batch(
    hidden: Tensor,
    saved: SavedActivations | None,
    chunk: Chunk,
    block_size: int,
    window: int | None,
    form: PromptForm,
    *,
    host_slots: int,
) -> MicroBatch:
    """``chunk`` alone; the first ``host_slots`` slots of the cache are in host memory."""
    sampled = torch.empty(1, dtype=torch.int64)
    mb = pack(
        [chunk],
        block_size=block_size,
        hidden=hidden[: chunk.count],
        sampled=sampled,
        crossing=None,
        saved=saved,
        prefill_only=True,
    )
    mb.added = find_added(mb.cache_slots, host_slots=host_slots)
    mb.context = find_context([chunk], block_size=block_size, window=window, host_slots=host_slots, form=form)
    return mb


def _nothing(*_: object) -> None:
    """No token is scored, and no hidden state pooled."""


def _attend(operations: Operations, mb: MicroBatch) -> None:
    """Attention over a context alone, in the first layer."""
    perform = operations.bind(
        PassPages(micro_batches=[mb], position=0), lambda *arguments: arguments[-1], _nothing, _nothing
    )
    for kind in (TaskKind.EMBED, TaskKind.PRE_ATTENTION, TaskKind.ATTENTION):
        reads = (Buffer(space="context", index=0),) if kind is TaskKind.ATTENTION else ()
        perform(Task(kind=kind, lane=Lane.DEVICE, layer=0, micro_batch=0, reads=reads))()


def _play(operations: Operations, layers: Mapping[int, tuple[TaskKind, ...]], micro_batches: list[MicroBatch]) -> None:
    """``layers``: the tasks of each after attention; the second is one of the whole pass."""
    pass_pages = PassPages(micro_batches=micro_batches, position=0)
    perform = operations.bind(pass_pages, lambda *arguments: arguments[-1].argmax(-1), _nothing, _nothing)

    def run(kind: TaskKind, layer: int, j: int) -> None:
        perform(Task(kind=kind, lane=Lane.DEVICE, layer=layer, micro_batch=j))()

    for j in range(len(micro_batches)):
        run(TaskKind.EMBED, -1, j)
    for layer, (batch_kind, *pass_kinds) in layers.items():
        for j in range(len(micro_batches)):
            run(TaskKind.PRE_ATTENTION, layer, j)
            run(TaskKind.ATTENTION, layer, j)
            run(batch_kind, layer, j)
        for kind in pass_kinds:
            run(kind, layer, -1)
    for j in range(len(micro_batches)):
        run(TaskKind.SAMPLE, -1, j)
