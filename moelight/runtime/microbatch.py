"""The one mutable traveller: a micro-batch on its way through the layers of one pass.

Legend: T tokens, D decoding sequences (one token each, the first rows), B block-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from moelight.core.errors import ScheduleError
from moelight.models.moe import Routed
from moelight.models.rope import Rotation
from moelight.runtime.context import Added, Chunk, Context, slots_of
from moelight.runtime.crossing import Crossing

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A micro-batch's share of what a pass keeps for experts that run once: what they need, and their ``sums``
    float32 [T, H]."""

    routed: Routed
    sums: Tensor

    def keep(self, routed: Routed) -> None:
        """Copy ``routed``; no expert has been added yet."""
        self.routed.x.copy_(routed.x)
        self.routed.weights.copy_(routed.weights)
        self.routed.ids.copy_(routed.ids)
        self.sums.zero_()


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Packed rows without padding: decoding sequences first, then prompts one after another.

    ``cache_slots int64 [T]``: where each token's key and value go. ``block_tables int32 [D, B]`` and
    ``seq_lens int32 [D]`` serve the decode kernel; ``prompts`` are (first row, last row, start, block table) each, and
    ``packed`` is (ends int32 [P + 1], block tables, earlier positions) of all of them.
    For attention on the device ``added`` says where new keys and values go, and ``context`` where what came before
    lies.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    prompts: list[tuple[int, int, int, Tensor]]
    packed: tuple[Tensor, Tensor, Tensor] | None
    sample_rows: Tensor
    fresh: bool
    hidden: Tensor
    rope: Rotation | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    qkv_host: tuple[Tensor, Tensor, Tensor] | None = None
    attn: Tensor | None = None
    crossing: Crossing | None = None
    kept: Kept | None = None
    context: Context | None = None
    added: Added | None = None
    routed: Routed | None = None
    routed_host: Routed | None = None
    experts_host: Tensor | None = None
    experts: Tensor | None = None
    sampled: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """T."""
        return self.token_ids.numel()

    @property
    def decoding(self) -> int:
        """D."""
        return self.seq_lens.numel()


def pack(
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    hidden: Tensor,
    crossing: Crossing | None,
    fresh: bool,
    kept: Kept | None = None,
) -> MicroBatch:
    """A micro-batch of ``chunks`` (decoding ones first). ``hidden`` [T, H] is its share of the hidden arena,
    ``crossing`` of the crossing buffers where there is a link, ``kept`` of what a pass keeps where experts run once."""
    device = hidden.device
    ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
    positions, slots, prompts, rows, row = [], [], [], [], 0
    decoding = [chunk for chunk in chunks if chunk.decodes]
    for chunk in chunks:
        count = len(chunk.token_ids)
        positions.append(np.arange(chunk.start, chunk.start + count, dtype=np.int64))
        slots.append(slots_of(chunk, chunk.start, chunk.start + count, block_size))
        if not chunk.decodes:
            table = torch.from_numpy(np.asarray(chunk.blocks, dtype=np.int32))
            prompts.append((row, row + count, chunk.start, table))
        row += count
        if chunk.samples:
            rows.append(row - 1)
    return MicroBatch(
        token_ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        cache_slots=torch.from_numpy(np.concatenate(slots)),
        block_tables=_tables(decoding),
        seq_lens=torch.tensor([chunk.start + 1 for chunk in decoding], dtype=torch.int32),
        prompts=prompts,
        packed=_packed([chunk for chunk in chunks if not chunk.decodes]),
        sample_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        fresh=fresh,
        hidden=hidden,
        crossing=crossing,
        kept=kept,
    )


def present(value: T | None) -> T:
    """What an earlier task of the same pass left behind."""
    if value is None:
        raise ScheduleError("a task ran before the one that feeds it")
    return value


def _packed(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Prompts as one call of the host's kernel takes them: their ends, block tables and earlier positions."""
    if not chunks:
        return None
    ends = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)]).astype(np.int32)
    contexts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32)
    return torch.from_numpy(ends), _tables(chunks), contexts


def _tables(chunks: Sequence[Chunk]) -> Tensor:
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    return torch.from_numpy(tables)
