"""What each kind of task does, on the tensors of one engine. One table; the executor only looks things up in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moelight.core.errors import ScheduleError
from moelight.core.schedule import Task, TaskKind
from moelight.hrm.footprint import sample_rows
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append
from moelight.kernels.prefill import prefill_attention
from moelight.memory.kv import KVCache
from moelight.memory.pages import ExpertWeights, PageStore, ReadPage
from moelight.models.decoder import Decoder
from moelight.models.rope import rotation
from moelight.runtime.executor import Perform
from moelight.runtime.lanes import Work
from moelight.runtime.microbatch import MicroBatch

T = TypeVar("T")
Sample = Callable[[int, int, Tensor], list[int]]


class Operations:
    """The work of every task of one engine: its decoder, its pages, its cache."""

    def __init__(self, decoder: Decoder, pages: PageStore, cache: KVCache, read_page: ReadPage) -> None:
        self._decoder, self._pages, self._cache, self._read_page = decoder, pages, cache, read_page
        self._experts: dict[tuple[int, int], list[ExpertWeights]] = {}
        spec = decoder.model.attention
        self._scale, self._window = spec.head_dim**-0.5, spec.window
        self._table: dict[TaskKind, Callable[[Task, MicroBatch], None]] = {
            TaskKind.PRE_ATTENTION: self._pre_attention,
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_QKV: self._offload_qkv,
            TaskKind.CPU_ATTENTION: self._cpu_attention,
            TaskKind.LOAD_HIDDEN: self._load_hidden,
            TaskKind.OFFLOAD_KV: self._offload_kv,
            TaskKind.STORE_KV: self._store_kv,
            TaskKind.EMBED: self._embed,
        }

    def bind(self, micro_batches: Sequence[MicroBatch], position: int, sample: Sample) -> Perform:
        """The work of a pass whose page stream stands at ``position``; ``sample(j, first, logits)`` gives the
        tokens that follow sample rows ``first`` and on of micro-batch j."""

        def perform(task: Task) -> Work:
            if task.page is not None:
                return partial(self._move_page, task, position)
            micro_batch = micro_batches[task.micro_batch]
            if task.kind is TaskKind.POST_ATTENTION:
                return partial(self._post_attention, task, micro_batch, self._layer_experts(task.layer, position))
            if task.kind is TaskKind.SAMPLE:
                return partial(self._sample, task, micro_batch, sample)
            return partial(self._table[task.kind], task, micro_batch)

        return perform

    def _layer_experts(self, layer: int, position: int) -> list[ExpertWeights]:
        model = self._decoder.model
        if not model.moe_layers[layer]:
            return []
        key = (layer, self._pages.phase(position))
        if key not in self._experts:
            self._experts[key] = self._pages.layer_experts(layer, model.experts.num_experts, position)
        return self._experts[key]

    def _move_page(self, task: Task, position: int) -> None:
        page, (into,) = _present(task.page), task.writes
        target = self._pages.slot(into, position)
        if task.kind is TaskKind.READ_PAGE:
            self._read_page(page, target)
        elif task.kind is TaskKind.STAGE_PAGE:
            target.copy_(self._pages.far_home(page))
        else:
            (source,) = task.reads
            target.copy_(self._pages.slot(source, position), non_blocking=True)

    def _embed(self, task: Task, mb: MicroBatch) -> None:
        self._decoder.embed(mb.token_ids, mb.hidden)
        mb.rope = rotation(self._decoder.model.attention, mb.positions, mb.hidden.dtype)

    def _pre_attention(self, task: Task, mb: MicroBatch) -> None:
        mb.qkv = self._decoder.pre_attention(task.layer, mb.hidden, _present(mb.rope))

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        """Fresh prompts over their own keys and values, on the compute device."""
        q, k, v = _present(mb.qkv)
        mb.attn = torch.empty_like(q)
        for first, last, _, _ in self._spans(mb):
            part = prefill_attention(q[first:last], k[first:last], v[first:last], self._scale, window=self._window)
            mb.attn[first:last] = part

    def _spans(self, mb: MicroBatch) -> list[tuple[int, int, int, Tensor]]:
        return [(row, row + 1, 0, mb.block_tables[row]) for row in range(mb.decoding)] + mb.prompts

    def _offload_qkv(self, task: Task, mb: MicroBatch) -> None:
        mb.qkv_host = _present(mb.crossing).down(*_present(mb.qkv))

    def _offload_kv(self, task: Task, mb: MicroBatch) -> None:
        q, k, v = _present(mb.qkv)
        mb.qkv_host = _present(mb.crossing).down(q[:0], k, v)

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = _present(mb.qkv_host)
        cpu_kv_append(*self._cache.layer(task.layer), k, v, mb.cache_slots)

    def _cpu_attention(self, task: Task, mb: MicroBatch) -> None:
        """Append this layer's keys and values to the cache, then attend: decoding rows paged, prompts packed."""
        q, k, v = _present(mb.qkv) if mb.crossing is None else _present(mb.qkv_host)
        if mb.crossing is None:
            mb.qkv = None  # on a device, streams may still read them
        k_cache, v_cache = self._cache.layer(task.layer)
        cpu_kv_append(k_cache, v_cache, k, v, mb.cache_slots)
        out = torch.empty_like(q) if mb.crossing is None else mb.crossing.up(q.shape)
        if n := mb.decoding:
            tables, lens = mb.block_tables, mb.seq_lens
            cpu_gqa_decode(q[:n], k_cache, v_cache, tables, lens, self._scale, window=self._window, out=out[:n])
        for first, last, start, table in mb.prompts:
            rows, cache = slice(first, last), (k_cache, v_cache, table)
            out[rows] = prefill_attention(
                q[rows], k[rows], v[rows], self._scale, window=self._window, context=start, cache=cache
            )
        mb.attn = out

    def _load_hidden(self, task: Task, mb: MicroBatch) -> None:
        mb.attn = _present(mb.attn).to(mb.hidden.device, non_blocking=True)

    def _post_attention(self, task: Task, mb: MicroBatch, experts: list[ExpertWeights]) -> None:
        self._decoder.post_attention(task.layer, mb.hidden, _present(mb.attn), experts)
        if mb.crossing is None:
            mb.attn = None

    def _sample(self, task: Task, mb: MicroBatch, sample: Sample) -> None:
        hidden, rows = mb.hidden[mb.sample_rows], sample_rows(self._decoder.model)
        mb.sampled = []
        for first in range(0, len(hidden), rows):
            mb.sampled += sample(task.micro_batch, first, self._decoder.logits(hidden[first : first + rows]))


def _present(value: T | None) -> T:
    """What an earlier task of the same pass left behind."""
    if value is None:
        raise ScheduleError("a task ran before the one that feeds it")
    return value
