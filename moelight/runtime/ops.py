"""Implementation of every task kind on the tensors of one engine, as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moelight.core.schedule import AHEAD_KINDS, CHOSEN_KINDS, Task, TaskKind
from moelight.hrm.footprint import sample_rows
from moelight.kernels.copies import copy_pages
from moelight.kernels.device import Device
from moelight.kernels.layer import PagedCache
from moelight.models.decoder import Decoder
from moelight.paging.store import PageStore, StartPage
from moelight.runtime.attention_ops import Act
from moelight.runtime.executor import Perform
from moelight.runtime.lanes import Work
from moelight.runtime.microbatch import MicroBatch, require
from moelight.runtime.moe_ops import MoEOps
from moelight.runtime.on_demand import PassPages

Sample = Callable[[int, int, Tensor], Tensor]
Score = Callable[[int, int, Tensor, Tensor], None]
PoolHidden = Callable[[int, Tensor], None]


class Operations:
    """Work of every task of one engine. ``pool`` int64 holds the newest token of every running sequence; the compute
    lane writes and reads it in the order of passes, so a pass can be launched before the host has all tokens."""

    def __init__(
        self,
        decoder: Decoder,
        pages: PageStore,
        *,
        attention: Mapping[TaskKind, Act],
        caches: Sequence[PagedCache],
        moe_ops: MoEOps,
        start_page: StartPage,
        pool: Tensor,
        head_rows: int,
        windowed: Collection[int] = (),
    ) -> None:
        """``caches``: of all layers for `Decoder.decode_layers`, or none; ``head_rows``: the most rows whose logits
        are in memory at once; ``windowed``: as of `HostAttention`."""
        self._windowed = windowed
        self.decoder, self._pages, self._moe_ops, self._start_page = decoder, pages, moe_ops, start_page
        self._caches = caches
        self.whole_layers = bool(caches) and decoder.whole_layers
        self._pool = pool
        self._head_rows = min(head_rows, sample_rows(decoder.model))
        self.predicts = (
            decoder.predicts and decoder.ranks is None
        )  # others have no hidden states before they are summed
        self.finite: Tensor | None = None  # `Decoder.finite` in host memory, as of the newest tokens
        if decoder.finite is not None:
            self.finite = Device(pool.device).host_memory(decoder.finite.shape, torch.float32).zero_()
        self._table: dict[TaskKind, Act] = {
            TaskKind.EMBED: self._embed,
            TaskKind.PRE_ATTENTION: self._pre_attention,
            TaskKind.SUM_EXPERTS: self._sum_experts,
            **attention,
        }

    def forget_range(self) -> None:
        """Forget that hidden states were not finite, on the current stream."""
        if self.finite is not None:
            self.finite.copy_(require(self.decoder.finite).zero_(), non_blocking=True)

    def bind(self, pass_pages: PassPages, sample: Sample, score: Score, pool_hidden: PoolHidden) -> Perform:
        """The function that maps a task of ``pass_pages`` to its work.

        Args:
            sample: ``(j, first, logits)`` -> the tokens int64 of micro-batch j's sample rows from ``first`` on.
            score: ``(j, first, logits, targets)`` scores the targets int64 of scored rows from ``first`` on.
            pool_hidden: ``(j, hidden)`` pools the final hidden states [P, H] of all pooled rows.
        """

        def perform(task: Task) -> Work:
            if task.page is not None:
                return self._mover(task, pass_pages.position)
            if task.kind in CHOSEN_KINDS:
                return partial(require(pass_pages.small).fetch, task)
            if task.kind in AHEAD_KINDS:
                return partial(require(pass_pages.small).fetch_ahead, task)
            if task.kind is TaskKind.LAYERS:
                return partial(self._layers, task, pass_pages)
            if task.kind in self._moe_ops.table:
                return partial(self._moe_ops.table[task.kind], task, pass_pages)
            micro_batch = pass_pages.micro_batches[task.micro_batch]
            if task.kind is TaskKind.SAMPLE:
                return partial(self._sample, task, micro_batch, sample, score, pool_hidden)
            return partial(self._table[task.kind], task, micro_batch)

        return perform

    def _mover(self, task: Task, position: int) -> Work:
        """The addresses are resolved now: an on-demand pass may swap the page's memory before the transfer begins."""
        page, (into,) = require(task.page), task.writes
        target = self._pages.slot(into, position)
        if task.kind is TaskKind.READ_PAGE:
            return partial(self._start_page, replace(page, part=0), target, self._pages.begin(page))
        if target.numel() > (size := self._pages.bytes_of(page)):
            target = target[:size]
        if task.kind is TaskKind.STAGE_PAGE:
            return partial(copy_pages, target, self._pages.offloaded_tier(page))
        # from a pinned staging slot, or from an offloaded page in pinned memory
        stop = next(iter(task.reads), None)
        source = self._pages.offloaded_tier(page) if stop is None else self._pages.slot(stop, position)[:size]
        return partial(_send, target, source)

    def _embed(self, task: Task, mb: MicroBatch) -> None:
        mb.land()
        if n := len(mb.places):
            torch.index_select(self._pool, 0, mb.places, out=mb.token_ids[:n])
        mb.running = self.decoder.begin(mb.token_ids, mb.positions, mb.hidden, mb.chunks)
        if mb.graphs is not None:
            mb.running = [
                mb.graphs.placed(f"running {index}", mb.row, tensor) for index, tensor in enumerate(mb.running)
            ]

    def _pre_attention(self, task: Task, mb: MicroBatch) -> None:
        def compute() -> Sequence[Tensor]:
            return self.decoder.pre_attention(task.layer, mb.hidden, require(mb.running))

        if mb.graphs is None:
            projected = compute()
        else:
            key = task.kind, task.layer, mb.row, mb.tokens
            projected = mb.graphs.run(key, compute, (), name="before", row=mb.row)
        mb.qkv = self.decoder.split_heads(projected)

    def _sum_experts(self, task: Task, mb: MicroBatch) -> None:
        self.decoder.sum_experts(mb.hidden, require(mb.running))

    def _layers(self, task: Task, pass_pages: PassPages) -> None:
        """All of them in one call where every row decodes, if there is one for their experts; else phase by phase."""
        mb, layers = pass_pages.micro_batches[task.micro_batch], require(task.layers)
        experts = [self._moe_ops.layer_experts(layer, pass_pages) for layer in layers]
        running = require(mb.running)
        if mb.packed is None:
            caches = self._caches[layers.start : layers.stop]
            places = [require(mb.windowed) if layer in self._windowed else mb for layer in layers]
            tables = [one.block_tables for one in places]
            if self.decoder.decode_layers(layers, mb.hidden, caches, tables, mb.seq_lens, experts, running):
                return
        else:
            self.decoder.bind_layers(layers, mb.hidden, experts, running)
        for layer in layers:
            one = replace(task, layer=layer)
            self._pre_attention(one, mb)
            self._table[TaskKind.CPU_ATTENTION](one, mb)
            self._moe_ops.table[TaskKind.POST_ATTENTION](one, pass_pages)

    def _sample(self, task: Task, mb: MicroBatch, sample: Sample, score: Score, pool_hidden: PoolHidden) -> None:
        """Sample into the pool, begin the copy to the host (complete when the lane's ticket is), then score and pool. A
        token below 0 is no token: the host drops what is computed for it."""
        self.decoder.end(mb.hidden, require(mb.running))
        drafted = len(mb.sample_places) < len(mb.sample_rows)  # more rows than a plan counts on
        hidden, rows = mb.hidden, self._head_rows if drafted else sample_rows(self.decoder.model)
        if len(mb.sample_rows) < len(hidden):
            hidden = hidden[mb.sample_rows]
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            tokens = sample(task.micro_batch, first, self.decoder.logits(hidden[part]))
            if not drafted:
                self._pool.index_copy_(0, mb.sample_places[part], tokens.clamp(min=0))
            mb.sampled[part].copy_(tokens, non_blocking=True)
        for first in range(0, len(mb.targets), self._head_rows):
            part = slice(first, first + self._head_rows)
            logits = self.decoder.logits(mb.hidden[mb.scored_rows[part]])
            score(task.micro_batch, first, logits, mb.targets[part])
        if len(mb.pooled_rows):  # in the memory that a norm of all rows takes
            pool_hidden(task.micro_batch, self.decoder.final_hidden(mb.hidden[mb.pooled_rows]))
        if self.finite is not None:
            self.finite.copy_(require(self.decoder.finite), non_blocking=True)


def _send(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
