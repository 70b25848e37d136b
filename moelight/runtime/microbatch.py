"""The one mutable traveller: a micro-batch on its way through the layers of one pass.

Legend: T tokens, D decoding sequences (one token each, the first rows), B block-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moelight.models.rope import Rotation


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + len(token_ids)`` of one sequence, which owns ``blocks`` of the cache."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool

    @property
    def decodes(self) -> bool:
        """One token: served by the decode kernel."""
        return len(self.token_ids) == 1


class Crossing:
    """A micro-batch's share of the pinned buffers beside the link: ``[q | k | v]`` going down, attention going up."""

    def __init__(self, share: Tensor, up_bytes: int, dtype: torch.dtype) -> None:
        """``share`` uint8; its last ``up_bytes`` carry the attention output, of ``dtype``."""
        self._down, self._up, self._dtype = share[: share.numel() - up_bytes], share[share.numel() - up_bytes :], dtype

    def down(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of q, k and v in host memory; complete when the lane's event is."""
        start, landed = 0, []
        for part in (q, k, v):
            size = part.numel() * part.element_size()
            target = self._down[start : start + size].view(part.dtype).view(part.shape)
            landed.append(target.copy_(part, non_blocking=True))
            start += size
        return landed[0], landed[1], landed[2]

    def up(self, shape: torch.Size) -> Tensor:
        """Where the attention output ``[T, Hq, D]`` waits for the link."""
        return self._up.view(self._dtype).view(shape)


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Packed rows without padding: decoding sequences first, then prompts one after another.

    ``cache_slots int64 [T]``: where each token's key and value go. ``block_tables int32 [D, B]`` and
    ``seq_lens int32 [D]`` serve the decode kernel; ``prompts`` are (first row, last row, start, block table) each.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    prompts: list[tuple[int, int, int, Tensor]]
    sample_rows: Tensor
    fresh: bool
    hidden: Tensor
    rope: Rotation | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    qkv_host: tuple[Tensor, Tensor, Tensor] | None = None
    attn: Tensor | None = None
    crossing: Crossing | None = None
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
    chunks: Sequence[Chunk], *, block_size: int, hidden: Tensor, crossing: Crossing | None, fresh: bool
) -> MicroBatch:
    """A micro-batch of ``chunks`` (decoding ones first). ``hidden`` [T, H] is its share of the hidden arena, and
    ``crossing`` its share of the crossing buffers where there is a link."""
    device = hidden.device
    ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
    positions, slots, prompts, rows, row = [], [], [], [], 0
    decoding = [chunk for chunk in chunks if chunk.decodes]
    for chunk in chunks:
        where = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        table = np.asarray(chunk.blocks, dtype=np.int32)
        positions.append(where)
        slots.append(table[where // block_size].astype(np.int64) * block_size + where % block_size)
        if not chunk.decodes:
            prompts.append((row, row + len(where), chunk.start, torch.from_numpy(table)))
        row += len(where)
        if chunk.samples:
            rows.append(row - 1)
    return MicroBatch(
        token_ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        cache_slots=torch.from_numpy(np.concatenate(slots)),
        block_tables=_tables(decoding),
        seq_lens=torch.tensor([chunk.start + 1 for chunk in decoding], dtype=torch.int32),
        prompts=prompts,
        sample_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        fresh=fresh,
        hidden=hidden,
        crossing=crossing,
    )


def _tables(chunks: Sequence[Chunk]) -> Tensor:
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    return torch.from_numpy(tables)
