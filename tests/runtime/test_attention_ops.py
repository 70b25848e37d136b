"""Attention of layers that differ: widths, windows, scales, sinks, caps, latents and none, on the host and a device,
over keys and values as they are and as int8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moelight.core.dtypes import FLOAT32, INT8
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Buffer, Lane, Task, TaskKind
from moelight.hrm.costs import kv_token_bytes
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes, staging_token_bytes
from moelight.kernels import reference
from moelight.kernels.attention import cpu_kv_append, cpu_mla_append
from moelight.kernels.gpu.attention import append_in_torch, prompt_form
from moelight.paging.kv import paged_cache, token_cache
from moelight.profiles.model import AttentionSpec, LayerSpec, ModelProfile
from moelight.runtime.attention_ops import DeviceAttention, HostAttention
from moelight.runtime.context import Chunk, find_added, find_context
from moelight.runtime.microbatch import MicroBatch, StagingBuffers, pack
from tests.shapes import ATTENTIONS, small_model, small_policy

BLOCK, BLOCKS = 16, 12
FORM = prompt_form(torch.device("cpu"), torch.float32, 2, 1, 8)
# Decode rows at positions 40 and 3, a prompt, the last part of a prompt, a part of one row.
LENGTHS = ((40, 1, True), (3, 1, True), (0, 9, False), (21, 5, False), (5, 1, False))
TOKENS = sum(count for _, count, _ in LENGTHS)


def mixed_model(*, latents: bool = True) -> ModelProfile:
    specs = [spec for spec in ATTENTIONS if latents or spec.latent is None]
    layers = tuple(LayerSpec(attention=spec, before=1, after=1) for spec in specs)
    return replace(small_model((True,) * len(layers)), attention=specs[0], layers=layers)


def chunks() -> list[Chunk]:
    free, result = iter(range(BLOCKS - 1, -1, -1)), []
    for start, count, decodes in LENGTHS:
        blocks = [next(free) for _ in range(-(-(start + count) // BLOCK))]
        ids = () if decodes else (7,) * count
        result.append(Chunk(token_ids=ids, start=start, blocks=blocks, slot=0, samples=True, decodes=decodes))
    return result


def slots(chunk: Chunk, begin: int, end: int) -> Tensor:
    return torch.tensor([chunk.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, end)], dtype=torch.int64)


class History:
    """Random keys, values and queries of one layer for every position of each sequence of `LENGTHS`; ``quantised``: as
    int8 gives keys and values back."""

    def __init__(self, spec: AttentionSpec, seed: int, *, quantised: bool = False) -> None:
        self.spec, self.quantised, source = spec, quantised, torch.Generator().manual_seed(seed)
        totals = [start + count for start, count, _ in LENGTHS]
        widths = spec.head_dim, spec.head_dim, spec.value_head_dim or spec.head_dim
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        if spec.latent is not None:
            rank, rope = spec.latent.kv_lora_rank, spec.latent.rope_head_dim
            widths, heads = (rank, rope, rank + rope), (spec.num_heads, spec.num_heads, 1)
        # As graphs give them: heads before rows in memory.
        self.every = [
            [torch.randn(h, n, w, generator=source).transpose(0, 1) for h, w in zip(heads, widths, strict=True)]
            for n in totals
        ]
        self.sinks = torch.randn(spec.num_heads, generator=source) if spec.sinks else None

    def ragged(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the graph gives for the rows of the micro-batch."""
        parts = [
            [item[start:] for item in selected] for selected, (start, _, _) in zip(self.every, LENGTHS, strict=True)
        ]
        q, k, v = (torch.cat(item) for item in zip(*parts, strict=True))
        return q, k, v

    def cached(self, number: int) -> tuple[Tensor, Tensor]:
        """Rows of the cache up to the chunk: keys and values, as wide as the cache; or latents twice."""
        start, (_, k, v) = LENGTHS[number][0], self.every[number]
        if self.spec.latent is not None:
            return v[:start], v[:start]
        wide = self.spec.cached_head_dim
        keys, values = (torch.nn.functional.pad(item[:start], (0, wide - item.shape[2])) for item in (k, v))
        return keys, values

    def expected(self) -> Tensor:
        """Rows of all sequences, by the definition, in float64."""
        return torch.cat([self._rows(number) for number in range(len(LENGTHS))]).float()

    def _rows(self, number: int) -> Tensor:
        spec, (start, _, _) = self.spec, LENGTHS[number]
        q, k, v = (item.double() for item in self.every[number])
        if self.quantised and spec.num_heads:
            k, v = (reference.dequantise(*reference.quantise(item), torch.float64) for item in self.every[number][1:])
        if spec.latent is not None:
            q, k, v = torch.cat((q, k), -1), v, v[..., : spec.latent.kv_lora_rank]
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[start:], k) * spec.product_scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        row, key = torch.arange(start, len(k)).unsqueeze(1), torch.arange(len(k))
        seen = (key <= row) & (key > row - (spec.window or len(k)))
        if spec.chunk is not None:
            seen &= key >= row // spec.chunk * spec.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            column = self.sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, column), -1)
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., : len(k)], v)


def micro_batch(crossing: StagingBuffers | None) -> MicroBatch:
    return pack(
        chunks(),
        block_size=BLOCK,
        hidden=torch.zeros(TOKENS, 8),
        sampled=torch.empty(len(LENGTHS), dtype=torch.int64),
        crossing=crossing,
        prefill_only=False,
    )


def staging(model: ModelProfile, policy: Policy) -> StagingBuffers:
    arena = torch.zeros(TOKENS * staging_token_bytes(model, policy, FLOAT32), dtype=torch.uint8)
    return StagingBuffers.in_arena(arena, model, policy, FLOAT32, TOKENS)


def task(kind: TaskKind, layer: int, **more: tuple[Buffer, ...]) -> Task:
    return Task(kind=kind, lane=Lane.CPU, layer=layer, micro_batch=0, **more)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("crosses", [False, True])
def test_the_host_attends_in_layers_that_differ(crosses: bool, kv_dtype: str) -> None:
    quantised = kv_dtype == "int8"
    model = mixed_model(latents=not quantised)
    sizes = {"attention_device": "cpu", "kv_block_size": BLOCK, "kv_dtype": kv_dtype}
    policy = replace(small_policy(model, discrete=True), **sizes)
    specs = [model.attention_of(layer) for layer in range(model.num_layers)]
    dtype = INT8 if quantised else FLOAT32
    arena = torch.zeros(BLOCKS * BLOCK * kv_token_bytes(model, dtype), dtype=torch.uint8)
    cache = paged_cache(arena, specs, blocks=BLOCKS, block_size=BLOCK, dtype=dtype)
    histories = [History(spec, seed, quantised=quantised) for seed, spec in enumerate(specs)]
    sinks = {layer: history.sinks for layer, history in enumerate(histories) if history.sinks is not None}
    table = HostAttention(specs, cache, form=FORM, sinks=sinks).table
    for layer, history in enumerate(histories):
        for number, chunk in enumerate(chunks()):
            if specs[layer].latent is not None:
                cpu_mla_append(*cache[layer], history.cached(number)[1][:, 0], slots(chunk, 0, chunk.start))
            elif specs[layer].num_heads:
                keys, values = (item.contiguous() for item in history.cached(number))
                k_cache, v_cache, *scales = cache[layer]
                named = dict(zip(("k_scale", "v_scale"), scales, strict=False))
                cpu_kv_append(k_cache, v_cache, keys, values, slots(chunk, 0, chunk.start), **named)
        mb = micro_batch(staging(model, policy) if crosses else None)
        mb.qkv = history.ragged() if specs[layer].num_heads else None
        kinds = (TaskKind.OFFLOAD_QKV, TaskKind.CPU_ATTENTION, TaskKind.LOAD_HIDDEN)
        for kind in kinds if crosses else kinds[1:2]:
            table[kind](task(kind, layer), mb)
        if not specs[layer].num_heads:
            assert mb.attn is None
            continue
        assert mb.attn is not None
        torch.testing.assert_close(mb.attn, history.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("on_host", [0, 5, BLOCKS])
def test_the_device_attends_in_layers_that_differ(on_host: int, kv_dtype: str) -> None:
    """``on_host`` blocks of the cache in host memory; afterwards every cache holds the new tokens."""
    quantised = kv_dtype == "int8"
    model = mixed_model(latents=not quantised)
    policy = replace(
        small_policy(model, discrete=True),
        kv_dtype=kv_dtype,
        attention_device="gpu",
        kv_block_size=BLOCK,
        kv=Shares(host=on_host / BLOCKS, device=1 - on_host / BLOCKS),
    )
    specs, host_slots = [model.attention_of(layer) for layer in range(model.num_layers)], on_host * BLOCK
    size, dtype = kv_block_bytes(model, policy, FLOAT32), INT8 if quantised else FLOAT32
    caches = [
        token_cache(torch.zeros(blocks * size, dtype=torch.uint8), specs, slots=blocks * BLOCK, dtype=dtype)
        for blocks in (on_host, BLOCKS - on_host)
    ]
    buffers = torch.zeros(fixed_bytes(model, policy, dtype=FLOAT32)["kv_buffer", "device"], dtype=torch.uint8)
    histories = [History(spec, seed, quantised=quantised) for seed, spec in enumerate(specs)]
    sinks = {layer: history.sinks for layer, history in enumerate(histories) if history.sinks is not None}
    on = {"on_host": caches[0], "on_device": caches[1]}
    attention = DeviceAttention(specs, buffers.view(2, -1), form=FORM, kv_dtype=dtype, sinks=sinks, **on)

    def write(layer: int, rows: tuple[Tensor, Tensor], where: Tensor) -> None:
        for cache, selected, first in (
            (caches[0], where < host_slots, 0),
            (caches[1], where >= host_slots, host_slots),
        ):
            if specs[layer].latent is not None:
                cache[layer].values[:, 0].index_copy_(0, where[selected] - first, rows[1][selected])
            else:
                into, scales = cache[layer].values, cache[layer].scales
                append_in_torch(rows[0][selected], rows[1][selected], into, where[selected] - first, cache_scale=scales)

    for layer, history in enumerate(histories):
        if specs[layer].num_heads:
            for number, chunk in enumerate(chunks()):
                write(layer, history.cached(number), slots(chunk, 0, chunk.start))
        mb = micro_batch(staging(model, policy))
        mb.added = find_added(mb.cache_slots, host_slots=host_slots)
        mb.context = find_context(chunks(), block_size=BLOCK, window=model.window, host_slots=host_slots, form=FORM)
        mb.qkv = history.ragged() if specs[layer].num_heads else None
        buffer = (Buffer(space="context", index=1),)
        attention.table[TaskKind.LOAD_KV](task(TaskKind.LOAD_KV, layer, writes=buffer), mb)
        attention.table[TaskKind.ATTENTION](task(TaskKind.ATTENTION, layer, reads=buffer), mb)
        if on_host:
            attention.table[TaskKind.OFFLOAD_KV](task(TaskKind.OFFLOAD_KV, layer), mb)
            attention.table[TaskKind.STORE_KV](task(TaskKind.STORE_KV, layer), mb)
        if not specs[layer].num_heads:
            assert mb.attn is None
            continue
        assert mb.attn is not None
        torch.testing.assert_close(mb.attn, history.expected(), rtol=1e-4, atol=1e-5)
        _, keys, values = history.ragged()
        for slot, key, value in zip(mb.cache_slots.tolist(), keys, values, strict=True):
            rows, at = (caches[0][layer], slot) if slot < host_slots else (caches[1][layer], slot - host_slots)
            retained = rows.values[at]
            new = {0: key, -1: value} if specs[layer].latent is None else {-1: value}
            for which, array in new.items():
                wanted, factors = reference.quantise(array) if rows.scales is not None else (array, None)
                assert torch.equal(retained[which, :, : wanted.shape[-1]], wanted)
                assert rows.scales is None or torch.equal(rows.scales[at, which], factors)


def test_a_window_of_some_layers_hides_nothing_from_the_others() -> None:
    model = mixed_model()
    assert model.window is None
    windowed = replace(model.layers[0], attention=replace(ATTENTIONS[0], window=30))
    assert replace(model, layers=(model.layers[0], windowed, model.layers[-1])).window == 30
