"""Attention tasks, on the host over its paged cache or on the device over copied contexts, as tables of operations.

Each layer has its own widths, window and scale; a layer without attention over the paged cache does nothing. Narrower
keys, queries and values are padded with zeros to the width of the cache (`AttentionSpec.cached_head_dim`).

Over an int8 cache every row attends to what the cache keeps of a token, its own and those of the same micro-batch
included: codes of a token and head alone, so no result depends on how prompts are cut into micro-batches.

Legend: T tokens, Hq query heads, Hkv key/value heads, D head size, Dv that of values; of latent attention H heads, R
the size of the latent, Rr of the rotary part: q [T, H, R] absorbed, k [T, H, Rr] the queries' rotary part, v
[T, 1, R + Rr] the new rows of the cache; the output [T, H, R].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.dtypes import DType
from moelight.core.schedule import Task, TaskKind
from moelight.kernels import native, reference
from moelight.kernels.attention import (
    cpu_gqa_decode,
    cpu_kv_append,
    cpu_mla_append,
    cpu_mla_decode,
    cpu_prefill_attention,
)
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.device import Device
from moelight.kernels.gpu import attention as gpu_attention
from moelight.kernels.gpu import serving
from moelight.kernels.gpu.attention import (
    PromptForm,
    append_in_torch,
    attend_in_torch,
    latents_in_torch,
    prompt_form,
    through_int8_in_torch,
)
from moelight.kernels.layer import PagedCache
from moelight.paging.kv import CachedRows, rows_of
from moelight.profiles.model import AttentionSpec
from moelight.runtime.microbatch import MicroBatch, WindowPlaces, require, row_tables

Act = Callable[[Task, MicroBatch], None]
QKV = tuple[Tensor, Tensor, Tensor]
MOST_COPIES = 16  # of a context; more are one kernel's, where it reads host memory


class _Layers:
    """The attention of each layer, and its ``sinks``, float [Hq] by layer, which may be given after the first pass
    began."""

    def __init__(self, specs: Sequence[AttentionSpec], sinks: Mapping[int, Tensor] | None) -> None:
        self.specs, self._sinks = specs, {} if sinks is None else sinks
        self._landed: dict[tuple[int, torch.device], Tensor] = {}
        self._taken: dict[int, bool] = {}

    def sinks(self, layer: int, device: torch.device) -> Tensor | None:
        """float32 [Hq] on ``device``; copied there at the first call."""
        if not self.specs[layer].sinks:
            return None
        if (tensor := self._landed.get((layer, device))) is None:
            tensor = self._landed[layer, device] = self._sinks[layer].to(device, torch.float32)
        return tensor

    def as_cached(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Return the tensors that the cache stores; those that it does not store have no rows."""
        return q[:0], k if self.specs[layer].latent is None else k[:0], v

    def kernels_take(self, layer: int, q: Tensor, k: Tensor, form: PromptForm) -> bool:
        """Whether the kernel of the device takes the heads of ``layer``, with prompts of ``form``."""
        if (served := self._taken.get(layer)) is None:
            layer_form = prompt_form(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
            served = self._taken[layer] = layer_form == form and q.shape[2] <= gpu_attention.MOST_HEAD_DIM
        return served

    def qkv(self, layer: int, mb: MicroBatch) -> QKV | None:
        """Queries, keys and values of ``layer`` as kernels take them; None without attention."""
        spec = self.specs[layer]
        if not spec.num_heads:
            return None
        width = 0 if spec.latent is not None else spec.cached_head_dim
        q, k, v = (_as_wide(tensor, width) for tensor in require(mb.qkv))
        return q, k, v


class HostAttention:
    """Attention on the CPU over a `paged_cache`. With a link to a device, fresh prompts attend on the device."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: Sequence[tuple[Tensor, ...]],
        *,
        form: PromptForm,
        sinks: Mapping[int, Tensor] | None = None,
        windowed: Collection[int] = (),
    ) -> None:
        """``form``: of prompts that attend on a device. ``windowed``: layers in whose cache rows are at
        `MicroBatch.windowed`."""
        self._layers, self._cache, self._form = _Layers(specs, sinks), cache, form
        self.windowed = frozenset(windowed)
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_QKV: self._offload_qkv,
            TaskKind.CPU_ATTENTION: self._cpu_attention,
            TaskKind.LOAD_HIDDEN: self._load_hidden,
            TaskKind.OFFLOAD_KV: self._offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def bound(self) -> list[PagedCache]:
        """The caches of all layers for `Decoder.decode_layers`; none where a layer attends otherwise."""
        caches = [_bound(spec, cache) for spec, cache in zip(self._layers.specs, self._cache, strict=True)]
        some = [cache for cache in caches if cache is not None]
        return some if len(some) == len(caches) else []

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        quantised = self._layers.specs[task.layer].num_heads > 0 and len(self._cache[task.layer]) > 2
        _attend_on_device(self._layers, task.layer, mb, self._form, quantised=quantised)

    def _offload_qkv(self, task: Task, mb: MicroBatch) -> None:
        qkv = self._layers.qkv(task.layer, mb)
        mb.qkv_host = None if qkv is None else require(mb.crossing).take(*qkv)

    def _offload_kv(self, task: Task, mb: MicroBatch) -> None:
        if (qkv := self._layers.qkv(task.layer, mb)) is not None:
            mb.qkv_host = require(mb.crossing).take(*self._layers.as_cached(task.layer, *qkv))

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        if self._layers.specs[task.layer].num_heads:
            self._append(task.layer, mb, *require(mb.qkv_host)[1:])

    def _places(self, layer: int, mb: MicroBatch) -> MicroBatch | WindowPlaces:
        """Where the rows of ``mb`` are in the cache of ``layer``."""
        return require(mb.windowed) if layer in self.windowed else mb

    def _append(self, layer: int, mb: MicroBatch, k: Tensor, v: Tensor) -> None:
        slots = self._places(layer, mb).cache_slots
        if self._layers.specs[layer].latent is None:
            k_cache, v_cache, *scales = self._cache[layer]
            cpu_kv_append(k_cache, v_cache, k, v, slots, **_by_name(scales))
        else:
            cpu_mla_append(self._cache[layer][0], v[:, 0], slots)

    def _cpu_attention(self, task: Task, mb: MicroBatch) -> None:
        """Append this layer's keys and values to the cache before attention: decode rows paged, prompts packed."""
        spec = self._layers.specs[task.layer]
        if not spec.num_heads:
            return
        q, k, v = require(self._layers.qkv(task.layer, mb) if mb.crossing is None else mb.qkv_host)
        if mb.crossing is None:
            mb.qkv = None  # on a device, streams may still read them
            if mb.packed is None and spec.latent is None and spec.chunk is None:
                mb.attn = self._decode(task.layer, mb, q, k, v)
                return
        self._append(task.layer, mb, k, v)
        out = RESULTS.empty(q.shape, q.dtype) if mb.crossing is None else mb.crossing.attention_output(q.shape)
        if spec.latent is not None:
            tables, lens = row_tables(mb)
            (cache,) = self._cache[task.layer]
            mb.attn = cpu_mla_decode(q, k, cache, tables, lens, spec.product_scale, out=out)
            return
        k_cache, v_cache, *scales = self._cache[task.layer]
        scale, window, softcap = spec.product_scale, spec.window, spec.softcap
        sinks = self._layers.sinks(task.layer, q.device)
        if spec.chunk is not None and int(mb.positions.max()) >= spec.chunk:
            mb.attn = self._attend_in_chunks(task.layer, mb, q, out, sinks)
            return
        places = self._places(task.layer, mb)
        if n := mb.decoding:
            arguments = (q[:n], k_cache, v_cache, places.block_tables, mb.seq_lens, scale)
            cpu_gqa_decode(*arguments, window=window, sinks=sinks, softcap=softcap, **_by_name(scales), out=out[:n])
        if places.packed is not None:
            cu_seqlens, tables, contexts = places.packed
            cpu_prefill_attention(
                *(q[n:], *self._as_cached(task.layer, k[n:], v[n:], places.cache_slots[n:]), cu_seqlens, scale),
                window=window,
                sinks=sinks,
                softcap=softcap,
                cache=(k_cache, v_cache, tables, contexts),
                **_by_name(scales),
                out=out[n:],
            )
        mb.attn = out if mb.crossing is not None else _narrowed(out, spec)

    def _decode(self, layer: int, mb: MicroBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All rows decode: their keys and values are appended by the call that attends."""
        spec, (k_cache, v_cache, *scales) = self._layers.specs[layer], self._cache[layer]
        out = cpu_gqa_decode(
            *(q, k_cache, v_cache, self._places(layer, mb).block_tables, mb.seq_lens, spec.product_scale),
            window=spec.window,
            sinks=self._layers.sinks(layer, q.device),
            softcap=spec.softcap,
            **_by_name(scales),
            k_new=k,
            v_new=v,
        )
        return _narrowed(out, spec)

    def _as_cached(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [T, Hkv, D] as the cache of ``layer`` stores them in ``slots``, in their dtype."""
        k_cache, v_cache, *scales = self._cache[layer]
        if not scales:
            return k, v
        at = slots // k_cache.shape[2], slice(None), slots % k_cache.shape[2]
        pairs = zip((k_cache, v_cache), scales, strict=True)
        keys, values = (reference.dequantise(codes[at], factors[at], k.dtype) for codes, factors in pairs)
        return keys, values

    def _attend_in_chunks(self, layer: int, mb: MicroBatch, q: Tensor, out: Tensor, sinks: Tensor | None) -> Tensor:
        """Rows by the positions that they see of their chunk, each row by itself: prompts this long are rare."""
        spec, (tables, lens) = self._layers.specs[layer], row_tables(self._places(layer, mb))
        windows, (k_cache, v_cache, *scales) = (lens - 1) % require(spec.chunk) + 1, self._cache[layer]
        for window in windows.unique().tolist():
            rows = (windows == window).nonzero().flatten()
            arguments = (q[rows], k_cache, v_cache, tables[rows], lens[rows], spec.product_scale)
            out[rows] = cpu_gqa_decode(*arguments, window=window, sinks=sinks, softcap=spec.softcap, **_by_name(scales))
        return out if mb.crossing is not None else _narrowed(out, spec)

    def _load_hidden(self, task: Task, mb: MicroBatch) -> None:
        if (spec := self._layers.specs[task.layer]).num_heads:
            mb.attn = _narrowed(require(mb.attn).to(mb.hidden.device, non_blocking=True), spec)


class DeviceAttention:
    """Attention on the device: blocks in its memory are read in place, others in one of two ``buffers``, to which they
    are transferred, by at most `MOST_COPIES` copies for a layer and micro-batch where kernels read host memory."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        buffers: Tensor,
        *,
        form: PromptForm,
        kv_dtype: DType,
        on_host: Sequence[CachedRows] | None,
        on_device: Sequence[CachedRows] | None,
        sinks: Mapping[int, Tensor] | None = None,
    ) -> None:
        """``buffers`` uint8 [2, bytes]: of the tokens of a context in the widest layer; at least one `token_cache` is
        given, in ``kv_dtype``; ``form``: of prompts."""
        self._layers, self._host, self._device, self._buffers = _Layers(specs, sinks), on_host, on_device, buffers
        self._form, self._kernels, self._kv_dtype = form, kernels_of(buffers.device), kv_dtype
        some = next((cache.values for cache in on_host or () if len(cache)), None)
        self._fetches = some is not None and self._kernels.fetches(some, buffers.device)[0]
        self.table: Mapping[TaskKind, Act] = {
            TaskKind.LOAD_KV: self._load_kv,
            TaskKind.ATTENTION: self._attention,
            TaskKind.OFFLOAD_KV: self._offload_kv,
            TaskKind.STORE_KV: self._store_kv,
        }

    def _buffer(self, index: int, layer: int) -> CachedRows:
        """One of the two buffers as the tokens of ``layer`` lie in it (`rows_of`)."""
        return rows_of(self._buffers[index], self._layers.specs[layer], self._kv_dtype)

    def _load_kv(self, task: Task, mb: MicroBatch) -> None:
        (into,), context = task.writes, require(mb.context)
        if not self._layers.specs[task.layer].num_heads:
            return
        buffer, cache = self._buffer(into.index, task.layer), require(self._host)[task.layer]
        for source, target in ((cache.values, buffer.values), (cache.scales, buffer.scales)):
            if source is None or target is None:
                continue
            if self._fetches and len(context.runs) > MOST_COPIES:
                gpu_attention.fetch(source, target, context.pieces_on(target.device))
                continue
            for slot, offset, count in context.runs:
                target[offset : offset + count].copy_(source[slot : slot + count], non_blocking=True)

    def _offload_kv(self, task: Task, mb: MicroBatch) -> None:
        qkv, crossing = self._layers.qkv(task.layer, mb), require(mb.crossing)
        if qkv is None:
            return
        (q, k, v), rows = self._layers.as_cached(task.layer, *qkv), require(mb.added).host_rows
        if self._kv_dtype.group:
            mb.kv_host = crossing.take_cached(self._quantised(k, v, rows))
        else:
            mb.qkv_host = crossing.take(q, _picked(k, rows) if len(k) else k, _picked(v, rows))

    def _quantised(self, k: Tensor, v: Tensor, rows: Tensor | None) -> CachedRows:
        """Rows ``rows`` (None: all) of k and v as the cache keeps them, in their order."""
        count, shape = len(k) if rows is None else len(rows), (2, *k.shape[1:])
        codes = torch.empty((count, *shape), dtype=torch.int8, device=k.device)
        scales = torch.empty((count, *shape[:2]), dtype=torch.float32, device=k.device)
        places = torch.arange(count, device=k.device)
        self._kernels.append(k, v, codes, places, rows=rows, cache_scale=scales)
        return CachedRows(values=codes, scales=scales)

    def _store_kv(self, task: Task, mb: MicroBatch) -> None:
        if not self._layers.specs[task.layer].num_heads:
            return
        cache, slots = require(self._host)[task.layer], require(mb.added).host_slots
        if cache.scales is not None:
            new = require(mb.kv_host)
            cache.values.index_copy_(0, slots, new.values)
            cache.scales.index_copy_(0, slots, require(new.scales))
        elif self._layers.specs[task.layer].latent is None:
            append_in_torch(*require(mb.qkv_host)[1:], cache.values, slots)
        else:
            cache.values[:, 0].index_copy_(0, slots, require(mb.qkv_host)[2])

    def _attention(self, task: Task, mb: MicroBatch) -> None:
        qkv, added = self._layers.qkv(task.layer, mb), require(mb.added)
        if qkv is None:
            return
        _, k, v = qkv
        if (slots := added.device_slots) is not None:
            cache, rows = require(self._device)[task.layer], added.device_rows
            if self._layers.specs[task.layer].latent is None:
                self._kernels.append(k, v, cache.values, slots, rows=rows, cache_scale=cache.scales)
            else:
                cache.values[:, 0].index_copy_(0, slots, _picked(v, rows))
        in_cache, in_buffer = require(mb.context).batch.tiers
        (index,) = (read.index for read in task.reads if read.space == "context") if in_buffer else (0,)
        _attend_on_device(
            self._layers,
            task.layer,
            mb,
            self._form,
            cache=require(self._device)[task.layer] if in_cache else None,
            buffer=self._buffer(index, task.layer) if in_buffer else None,
            quantised=self._kv_dtype.group > 0,
        )


def _attend_on_device(
    layers: _Layers,
    layer: int,
    mb: MicroBatch,
    form: PromptForm,
    *,
    cache: CachedRows | None = None,
    buffer: CachedRows | None = None,
    quantised: bool,
) -> None:
    """Attention of one layer by the kernels of the device; by torch where they do not take heads of this size, or take
    prompts in tiles of another form than that of the micro-batch. ``quantised``: the cache is."""
    qkv, spec = layers.qkv(layer, mb), layers.specs[layer]
    if qkv is None:
        return
    q, k, v = qkv
    kernels, batch = kernels_of(q.device), require(mb.context).batch
    attend, pools = kernels.attend, {"cache": cache, "buffer": buffer}
    rest: dict[str, Any] = {name: None if pool is None else pool.values for name, pool in pools.items()}
    if spec.latent is not None:
        mb.attn = latents_in_torch(q, k, v, batch, spec.product_scale, **rest)
        return
    if quantised:
        k, v = kernels.through_int8(k, v)
        rest |= {f"{name}_scale": None if pool is None else pool.scales for name, pool in pools.items()}
    rest |= {"window": spec.window, "sinks": layers.sinks(layer, q.device), "softcap": spec.softcap}
    if spec.chunk is not None and any(start + last - first > spec.chunk for first, last, start, _ in batch.spans):
        attend, rest["chunk"] = attend_in_torch, spec.chunk
    elif not layers.kernels_take(layer, q, k, form):
        attend = attend_in_torch
    mb.attn = _narrowed(attend(q, k, v, batch, spec.product_scale, **rest), spec)


def _bound(spec: AttentionSpec, cache: Sequence[Tensor]) -> PagedCache | None:
    plain = spec.num_heads and spec.latent is None and spec.chunk is None and not spec.sinks
    if not plain or not native.available() or spec.head_dim != spec.cached_head_dim or spec.value_head_dim:
        return None
    k_cache, v_cache, *scales = cache
    how: dict[str, Any] = {"window": spec.window, "softcap": spec.softcap, **_by_name(scales)}
    return PagedCache(k_cache, v_cache, spec.product_scale, **how)


def _by_name(scales: Sequence[Tensor]) -> dict[str, Any]:
    """Return the scales of keys and values as arguments of kernels; empty if the cache is not quantised."""
    return dict(zip(("k_scale", "v_scale"), scales, strict=False))


def _as_wide(tensor: Tensor, width: int) -> Tensor:
    """``tensor`` [T, heads, n], padded to heads of ``width`` numbers (0: as they are), contiguous within a row."""
    if 0 < tensor.shape[2] < width:
        return functional.pad(tensor, (0, width - tensor.shape[2]))
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()


def _narrowed(out: Tensor, spec: AttentionSpec) -> Tensor:
    """``out`` [T, Hq, D] without the padding of values."""
    width = spec.value_head_dim or spec.head_dim
    return out if spec.latent is not None or out.shape[2] == width else out[..., :width]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """Implementations of attention on one device: `attend`, `append`, `through_int8`, and whether kernels `fetch` from
    host memory."""

    attend: Callable[..., Tensor]
    append: Callable[..., None]
    through_int8: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    fetches: Callable[[Tensor, torch.device], tuple[bool, str]]


def kernels_of(device: torch.device) -> AttentionKernels:
    """Return the kernels of ``device``; torch's for the emulated one."""
    if Device(device).host:
        return AttentionKernels(
            attend=attend_in_torch,
            append=append_in_torch,
            through_int8=through_int8_in_torch,
            fetches=lambda *_: (False, "no link"),
        )
    return AttentionKernels(
        attend=gpu_attention.attend,
        append=gpu_attention.append,
        through_int8=gpu_attention.through_int8,
        fetches=serving.reads_host,
    )


def _picked(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """``rows`` None: all."""
    return tensor if rows is None else tensor.index_select(0, rows)
