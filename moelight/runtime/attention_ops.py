"""Attention tasks, on the host over its paged cache or on the device over copied contexts, as tables of operations.
Legend: T tokens, Hq query heads, Hkv key/value heads, D head size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.schedule import Task, TaskKind
from moelight.hrm.footprint import GATHER_BYTES
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_prefill_attention
from moelight.kernels.prefill import prefill_attention
from moelight.paging.kv import put
from moelight.profiles.model import AttentionSpec
from moelight.runtime.microbatch import MicroBatch, require

Act = Callable[[Task, MicroBatch], None]


class HostAttention:
    """Attention on the CPU over a `paged_cache`. With a link to a device, fresh prompts attend on the device."""

    def __init__(self, spec: AttentionSpec, cache: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._cache, self._scale, self._window = cache, spec.head_dim**-0.5, spec.window
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_QKV: self._offload_qkv,
            TaskKind.CPU_ATTENTION: self._cpu_attention,
            TaskKind.LOAD_HIDDEN: self._load_hidden,
            TaskKind.OFFLOAD_KV: _offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        mb.attn = attend_prefill(mb, self._scale, self._window)

    def _offload_qkv(self, task: Task, mb: MicroBatch) -> None:
        mb.qkv_host = require(mb.crossing).take(*require(mb.qkv))

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = require(mb.qkv_host)
        cpu_kv_append(*self._cache[task.layer], k, v, mb.cache_slots)

    def _cpu_attention(self, task: Task, mb: MicroBatch) -> None:
        """Append this layer's keys and values to the cache before attention: decode rows paged, prompts packed."""
        q, k, v = require(mb.qkv) if mb.crossing is None else require(mb.qkv_host)
        if mb.crossing is None:
            mb.qkv = None  # on a device, streams may still read them
        k_cache, v_cache = self._cache[task.layer]
        cpu_kv_append(k_cache, v_cache, k, v, mb.cache_slots)
        out = torch.empty_like(q) if mb.crossing is None else mb.crossing.attention_output(q.shape)
        if n := mb.decoding:
            tables, lens = mb.block_tables, mb.seq_lens
            cpu_gqa_decode(q[:n], k_cache, v_cache, tables, lens, self._scale, window=self._window, out=out[:n])
        if mb.packed is not None:
            cu_seqlens, tables, contexts = mb.packed
            cache = (k_cache, v_cache, tables, contexts)
            cpu_prefill_attention(
                q[n:], k[n:], v[n:], cu_seqlens, self._scale, window=self._window, cache=cache, out=out[n:]
            )
        mb.attn = out

    def _load_hidden(self, task: Task, mb: MicroBatch) -> None:
        mb.attn = require(mb.attn).to(mb.hidden.device, non_blocking=True)


class DeviceAttention:
    """Attention on the device: cached tokens are transferred from host memory, or gathered from device memory, into one
    of two ``buffers``; one buffer is enough if the whole cache is on the device."""

    def __init__(
        self, spec: AttentionSpec, buffers: Tensor, *, on_host: Tensor | None, on_device: Tensor | None
    ) -> None:
        """``buffers`` [2, tokens, 2, Hkv, D]; at least one `token_cache` is given."""
        self._host, self._device, self._buffers = on_host, on_device, buffers
        self._gathered = max(1, GATHER_BYTES // (buffers[0, :1].numel() * buffers.element_size()))
        self._scale, self._window = spec.head_dim**-0.5, spec.window
        self._only_block = torch.zeros(1, dtype=torch.int32, device=buffers.device)
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.LOAD_KV: self._load_kv,
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_KV: self._offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def _load_kv(self, task: Task, mb: MicroBatch) -> None:
        (into,) = task.writes
        buffer, cache = self._buffers[into.index], require(self._host)[task.layer]
        for place, slot, count in require(mb.context).runs:
            buffer[place : place + count].copy_(cache[slot : slot + count], non_blocking=True)

    def _offload_kv(self, task: Task, mb: MicroBatch) -> None:
        (q, k, v), rows = require(mb.qkv), require(mb.added).host_rows
        mb.qkv_host = require(mb.crossing).take(q[:0], _picked(k, rows), _picked(v, rows))

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = require(mb.qkv_host)
        put(require(self._host)[task.layer], k, v, require(mb.added).host_slots)

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        added = require(mb.added)
        if added.device_slots is not None:
            _, k, v = require(mb.qkv)
            cache, rows = require(self._device)[task.layer], added.device_rows
            put(cache, _picked(k, rows), _picked(v, rows), added.device_slots)
        if mb.context is None or not mb.context.tokens:
            mb.attn = attend_prefill(mb, self._scale, self._window)
        elif self._host is None:
            slots = require(mb.context.slots)
            buffer = self._buffers[0, : slots.numel()]
            torch.index_select(require(self._device)[task.layer], 0, slots, out=buffer)
            mb.attn = self._attend(mb, buffer)
        else:
            (index,) = (each.index for each in task.reads if each.space == "context")
            self._complete(self._buffers[index], task, mb)
            mb.attn = self._attend(mb, self._buffers[index])

    def _complete(self, buffer: Tensor, task: Task, mb: MicroBatch) -> None:
        """``buffer`` holds the transferred part of the context; the rest is gathered in pieces of bounded size."""
        (_, k, v), context = require(mb.qkv), require(mb.context)
        put(buffer, k, v, context.own)
        if context.slots is None:
            return
        cache = require(self._device)[task.layer]
        for places, slots in zip(
            require(context.places).split(self._gathered), context.slots.split(self._gathered), strict=True
        ):
            buffer.index_copy_(0, places, cache.index_select(0, slots))

    def _attend(self, mb: MicroBatch, buffer: Tensor) -> Tensor:
        """``buffer`` [places, 2, Hkv, D] includes the new tokens."""
        q, k, v = require(mb.qkv)
        out = torch.empty_like(q)
        for first, last, place, cached in require(mb.context).spans:
            rows, run = slice(first, last), buffer[place : place + cached + last - first]
            if last - first == 1:
                out[first] = attend_one(q[first], run, self._scale)
            else:
                blocks = run[:cached].permute(1, 2, 0, 3).unsqueeze(1)  # [2, one block, Hkv, cached, D]
                out[rows] = prefill_attention(
                    q[rows],
                    k[rows],
                    v[rows],
                    self._scale,
                    window=self._window,
                    context=cached,
                    cache=(blocks[0], blocks[1], self._only_block),
                )
        return out


def attend_one(q: Tensor, run: Tensor, scale: float) -> Tensor:
    """Attention of one token over keys and values ``run`` [L, 2, Hkv, D], the last its own: q [Hq, D] -> [Hq, D]."""
    keys, values = run.permute(1, 2, 0, 3).unsqueeze(1)
    grouped = q.unflatten(0, (keys.shape[1], -1)).unsqueeze(0)  # the queries of a group are rows of one product
    return functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).flatten(0, 2)


def attend_prefill(mb: MicroBatch, scale: float, window: int | None) -> Tensor:
    """Attention of every sequence over its own new keys and values only -> [T, Hq, D]."""
    q, k, v = require(mb.qkv)
    out = torch.empty_like(q)
    spans = [(row, row + 1) for row in range(mb.decoding)] + [(first, last) for first, last, _, _ in mb.prompts]
    for first, last in spans:
        out[first:last] = prefill_attention(q[first:last], k[first:last], v[first:last], scale, window=window)
    return out


def _picked(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """``rows`` None: all."""
    return tensor if rows is None else tensor.index_select(0, rows)


def _offload_kv(task: Task, mb: MicroBatch) -> None:
    q, k, v = require(mb.qkv)
    mb.qkv_host = require(mb.crossing).take(q[:0], k, v)
