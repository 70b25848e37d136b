"""Attention tasks, on the host over its paged cache or on the device over copied contexts, as tables of operations.
Legend: T tokens, Hq query heads, Hkv key/value heads, D head size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelight.core.schedule import Task, TaskKind
from moelight.kernels.attention import cpu_gqa_decode, cpu_kv_append, cpu_prefill_attention
from moelight.kernels.gpu import attention as gpu_attention
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.attention import append_in_torch, attend_in_torch
from moelight.profiles.model import AttentionSpec
from moelight.runtime.microbatch import MicroBatch, require

Act = Callable[[Task, MicroBatch], None]
MOST_COPIES = 16  # of a context; more are one kernel's, where it reads host memory


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
        (q, k, v), attend = require(mb.qkv), kernels_of(mb.hidden.device).attend
        mb.attn = attend(q, k, v, require(mb.context).batch, self._scale, window=self._window)

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
    """Attention on the device: blocks in its memory are read in place, others in one of two ``buffers``, to which they
    are transferred, by at most `MOST_COPIES` copies for a layer and micro-batch where kernels read host memory."""

    def __init__(
        self, spec: AttentionSpec, buffers: Tensor, *, on_host: Tensor | None, on_device: Tensor | None
    ) -> None:
        """``buffers`` [2, tokens, 2, Hkv, D]; at least one `token_cache` is given."""
        self._host, self._device, self._buffers = on_host, on_device, buffers
        self._scale, self._window = spec.head_dim**-0.5, spec.window
        self._kernels = kernels_of(buffers.device)
        self._fetches = on_host is not None and self._kernels.fetches(on_host, buffers.device)[0]
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.LOAD_KV: self._load_kv,
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_KV: self._offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def _load_kv(self, task: Task, mb: MicroBatch) -> None:
        (into,), context = task.writes, require(mb.context)
        buffer, cache = self._buffers[into.index], require(self._host)[task.layer]
        if self._fetches and len(context.runs) > MOST_COPIES:
            gpu_attention.fetch(cache, buffer, context.pieces_on(buffer.device))
            return
        for slot, place, count in context.runs:
            buffer[place : place + count].copy_(cache[slot : slot + count], non_blocking=True)

    def _offload_kv(self, task: Task, mb: MicroBatch) -> None:
        (q, k, v), rows = require(mb.qkv), require(mb.added).host_rows
        mb.qkv_host = require(mb.crossing).take(q[:0], _picked(k, rows), _picked(v, rows))

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        _, k, v = require(mb.qkv_host)
        append_in_torch(k, v, require(self._host)[task.layer], require(mb.added).host_slots)

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        (q, k, v), batch, added = require(mb.qkv), require(mb.context).batch, require(mb.added)
        if added.device_slots is not None:
            self._kernels.append(k, v, require(self._device)[task.layer], added.device_slots, rows=added.device_rows)
        in_cache, in_buffer = batch.tiers
        (index,) = (each.index for each in task.reads if each.space == "context") if in_buffer else (0,)
        mb.attn = self._kernels.attend(
            q,
            k,
            v,
            batch,
            self._scale,
            window=self._window,
            cache=require(self._device)[task.layer] if in_cache else None,
            buffer=self._buffers[index] if in_buffer else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """Implementations of attention on one device: `attend`, `append`, and whether kernels `fetch` from host memory."""

    attend: Callable[..., Tensor]
    append: Callable[..., None]
    fetches: Callable[[Tensor, torch.device], tuple[bool, str]]


def kernels_of(device: torch.device) -> AttentionKernels:
    """Those of ``device``; of the emulated one, torch's."""
    if device.type == "cpu":
        return AttentionKernels(attend=attend_in_torch, append=append_in_torch, fetches=lambda *_: (False, "no link"))
    return AttentionKernels(attend=gpu_attention.attend, append=gpu_attention.append, fetches=serving.reads_host)


def _picked(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """``rows`` None: all."""
    return tensor if rows is None else tensor.index_select(0, rows)


def _offload_kv(task: Task, mb: MicroBatch) -> None:
    q, k, v = require(mb.qkv)
    mb.qkv_host = require(mb.crossing).take(q[:0], k, v)
