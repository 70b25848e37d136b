"""Attention as tasks: on the host over its paged cache, or on the device over contexts that are brought to it.

Each class holds one table from task kind to work. Refuses to know projections, experts and pages.

Legend: T tokens, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.schedule import Task, TaskKind
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_prefill_attention
from moelight.kernels.prefill import prefill_attention
from moelight.memory.kv import KVCache, TokenCache, put
from moelight.profiles.model import AttentionSpec
from moelight.runtime.microbatch import MicroBatch, present

Act = Callable[[Task, MicroBatch], None]


class HostAttention:
    """Attention where the cache is: in host memory. Across a link, fresh prompts attend on the device."""

    def __init__(self, spec: AttentionSpec, cache: KVCache) -> None:
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
        """Fresh prompts over their own keys and values."""
        mb.attn = attend_fresh(mb, self._scale, self._window)

    def _offload_qkv(self, task: Task, mb: MicroBatch) -> None:
        mb.qkv_host = present(mb.crossing).take(*present(mb.qkv))

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = present(mb.qkv_host)
        cpu_kv_append(*self._cache.layer(task.layer), k, v, mb.cache_slots)

    def _cpu_attention(self, task: Task, mb: MicroBatch) -> None:
        """Append this layer's keys and values to the cache, then attend: decoding rows paged, prompts packed."""
        q, k, v = present(mb.qkv) if mb.crossing is None else present(mb.qkv_host)
        if mb.crossing is None:
            mb.qkv = None  # on a device, streams may still read them
        k_cache, v_cache = self._cache.layer(task.layer)
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
        mb.attn = present(mb.attn).to(mb.hidden.device, non_blocking=True)


class DeviceAttention:
    """Attention on the device. The cache is in host memory, whose contexts cross into one of two ``buffers``, or on
    the device itself, where they are gathered into the first."""

    def __init__(self, spec: AttentionSpec, cache: TokenCache, buffers: Tensor, *, cached_there: bool) -> None:
        """``buffers`` [2, tokens, 2, Hkv, D]; ``cached_there``: the cache is on the device."""
        self._cache, self._buffers, self._cached_there = cache, buffers, cached_there
        self._scale, self._window = spec.head_dim**-0.5, spec.window
        self._only_block = torch.zeros(1, dtype=torch.int32, device=buffers.device)
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.LOAD_KV: self._load_kv,
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_KV: _offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def _load_kv(self, task: Task, mb: MicroBatch) -> None:
        (into,) = task.writes
        buffer, cache = self._buffers[into.index], self._cache.layer(task.layer)
        for place, slot, count in present(mb.context).runs:
            buffer[place : place + count].copy_(cache[slot : slot + count], non_blocking=True)

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = present(mb.qkv_host)
        put(self._cache.layer(task.layer), k, v, mb.cache_slots)

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        if self._cached_there:
            _, k, v = present(mb.qkv)
            put(self._cache.layer(task.layer), k, v, present(mb.device_slots))
        if mb.context is None or not mb.context.tokens:
            mb.attn = attend_fresh(mb, self._scale, self._window)
        elif (slots := mb.context.slots) is not None:
            buffer = self._buffers[0, : slots.numel()]
            torch.index_select(self._cache.layer(task.layer), 0, slots, out=buffer)
            mb.attn = self._attend(mb, buffer)
        else:
            (index,) = (each.index for each in task.reads if each.space == "context")
            _, k, v = present(mb.qkv)
            put(self._buffers[index], k, v, mb.context.own)
            mb.attn = self._attend(mb, self._buffers[index])

    def _attend(self, mb: MicroBatch, buffer: Tensor) -> Tensor:
        """Every sequence over its run in ``buffer`` [places, 2, Hkv, D], which holds its own tokens too."""
        q, k, v = present(mb.qkv)
        out = torch.empty_like(q)
        for first, last, place, cached in present(mb.context).spans:
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
    """One token over keys and values ``run`` [L, 2, Hkv, D], its own the last: q [Hq, D] -> [Hq, D]."""
    keys, values = run.permute(1, 2, 0, 3).unsqueeze(1)
    grouped = q.unflatten(0, (keys.shape[1], -1)).unsqueeze(0)  # the queries of a group are rows of one product
    return functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).flatten(0, 2)


def attend_fresh(mb: MicroBatch, scale: float, window: int | None) -> Tensor:
    """Every sequence over its own new keys and values alone -> [T, Hq, D]."""
    q, k, v = present(mb.qkv)
    out = torch.empty_like(q)
    spans = [(row, row + 1) for row in range(mb.decoding)] + [(first, last) for first, last, _, _ in mb.prompts]
    for first, last in spans:
        out[first:last] = prefill_attention(q[first:last], k[first:last], v[first:last], scale, window=window)
    return out


def _offload_kv(task: Task, mb: MicroBatch) -> None:
    q, k, v = present(mb.qkv)
    mb.qkv_host = present(mb.crossing).take(q[:0], k, v)
