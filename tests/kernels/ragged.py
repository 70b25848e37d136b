"""Ragged batches over caches of two tiers for the tests of the device's attention, and what they should give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelight.kernels import reference
from moelight.kernels.gpu.attention import PromptForm, RaggedBatch, in_buffer, prompt_form

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """``count`` new tokens after ``start`` cached ones."""

    start: int
    count: int
    decodes: bool = False


@dataclass(kw_only=True)
class Ragged:
    """Queries, new keys and values, caches in which the sequences' blocks are shuffled, and arguments of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: RaggedBatch
    rest: dict[str, Any]
    full_kv: list[tuple[Tensor, Tensor]]  # keys and values of each sequence, float64 [start + count, Hkv, D]
    scale: float = 0.3

    def call(self, function: Any) -> Tensor:
        return function(self.q, self.k, self.v, self.batch, self.scale, **self.rest)

    def truth(self) -> Tensor:
        """In float64, densely."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        sinks, softcap = (self.rest.get(name) for name in ("sinks", "softcap"))
        for (first, last, start, _), (k, v) in zip(self.batch.spans, self.full_kv, strict=True):
            query, key = torch.arange(start, start + last - first)[:, None], torch.arange(len(k))
            seen = (key <= query) & (key > query - (self.rest.get("window") or 1 << 40))
            wide = None if sinks is None else sinks.double().cpu()
            values = self.q[first:last].double().cpu()
            out[first:last] = reference.attend(values, k, v, self.scale, seen, sinks=wide, softcap=softcap)
        return out


def ragged(
    sequences: list[Sequence],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    tiers: str = "both",
    int8: bool = False,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    form: PromptForm | None = None,
    seed: int = 0,
) -> Ragged:
    """Decoding sequences first. Cached tokens in the cache by whole blocks, in the buffer without gaps; what is unused
    is NaN, or the largest code."""
    random = torch.Generator().manual_seed(seed)
    spots = np.random.default_rng(seed)
    sequences = sorted(sequences, key=lambda item: not item.decodes)
    width = 2, kv_heads, head_dim
    blocks = sum(-(-sequence.start // block_size) for sequence in sequences)
    slots = max(1, blocks + 2) * block_size, max(1, sum(sequence.start for sequence in sequences))
    pools = [torch.full((count, *width), float("nan")) for count in slots]
    factors = [torch.full((count, 2, kv_heads), float("nan")) for count in slots]
    free, position, entries, full, seen_from = spots.permutation(slots[0] // block_size).tolist(), 0, [], [], []
    for sequence in sequences:
        values = torch.randn(sequence.start + sequence.count, *width, generator=random).to(dtype).float()
        stored, scales = reference.quantise(values)
        if int8:
            values[: sequence.start] = (stored * scales.unsqueeze(-1))[: sequence.start].to(dtype).float()
        full.append((values[:, 0].double(), values[:, 1].double()))
        stored = stored if int8 else values
        lowest = 0 if window is None else max(0, sequence.start - window + 1)
        seen_from.append(lowest)
        for first in range(
            lowest // block_size * block_size, sequence.start if lowest < sequence.start else 0, block_size
        ):
            begin, end = max(first, lowest), min(first + block_size, sequence.start)
            if tiers == "cache" or (tiers == "both" and spots.random() < 0.5):
                slot = free.pop() * block_size
                entries.append(slot)
                tier, at = 0, slot + begin - first
            else:
                entries.append(in_buffer(position - (begin - first)))
                tier, at = 1, position
                position += end - begin
            pools[tier][at : at + end - begin] = stored[begin:end]
            factors[tier][at : at + end - begin] = scales[begin:end]
    new = torch.cat([(torch.stack(kv, 1)[item.start :]) for item, kv in zip(sequences, full, strict=True)])
    k, v = (item.to(dtype).to(device).contiguous() for item in new.unbind(1))
    q = torch.randn(len(new), heads, head_dim, generator=random).to(dtype).to(device)
    if form is None:
        form = prompt_form(device, dtype, heads, kv_heads, head_dim)
    batch = RaggedBatch(
        [sequence.count for sequence in sequences],
        [sequence.start for sequence in sequences],
        seen_from,
        entries,
        decoding=sum(sequence.decodes for sequence in sequences),
        block_size=block_size,
        form=form,
    )
    batch.land(batch.table.to(device))
    rest: dict[str, Any] = {"window": window, "softcap": softcap}
    rest["sinks"] = torch.randn(heads, generator=random).to(device) if sinks else None
    for name, pool, scales in zip(("cache", "buffer"), pools, factors, strict=True):
        rest[name] = (pool.nan_to_num(127.0).to(torch.int8) if int8 else pool.to(dtype)).to(device)
        if int8:
            rest[f"{name}_scale"] = scales.to(device)
    return Ragged(q=q, k=k, v=v, batch=batch, rest=rest, full_kv=full)
