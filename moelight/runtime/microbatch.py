"""The micro-batch: packed tokens and their intermediate tensors on the way through the layers of one pass.

Legend: T tokens, D decoding sequences (one token each, the first rows), B block-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from moelight.core.errors import ScheduleError
from moelight.models.moe import Routed, SplitMoE
from moelight.models.rope import Rotation
from moelight.runtime.context import Added, Chunk, Context, slots_of
from moelight.runtime.staging import StagingBuffers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedActivations:
    """A micro-batch's share of the activations saved for experts that run once per pass: their inputs ``routed``, and
    the sums of their outputs, ``sums`` float32 [T, H]."""

    routed: Routed
    sums: Tensor

    def keep(self, routed: Routed) -> None:
        """Copy ``routed`` and clear the sums."""
        self.routed.x.copy_(routed.x)
        self.routed.weights.copy_(routed.weights)
        self.routed.ids.copy_(routed.ids)
        self.sums.zero_()


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Packed rows without padding: decoding sequences first, then prompts one after another.

    Attributes:
        token_ids: int64 [T]; those of decode rows are read from the token pool at ``places`` when the pass runs.
        cache_slots: int64 [T], the cache slot of each token's key and value.
        block_tables: int32 [D, B], and ``seq_lens`` int32 [D]: arguments of the decode kernel.
        prompts: (first row, last row, start, block table) of each prompt.
        packed: (ends int32 [P + 1], block tables, earlier positions) of all P prompts; None without prompts.
        places: int64 [D], places of the decode rows in the token pool.
        sample_rows: rows that sample a token, which is written to ``sample_places`` of the token pool.
        sampled: int64 [S] in host memory, for the new tokens.
        scored_rows: int64 [R], rows that score the prompt tokens after them, ``targets`` int64 [R].
        crossing: staging buffers, if a link separates device and host.
        kept: saved activations, where experts run once per pass.
        context: layout of the cached tokens, for attention on the device.
        added: destinations of the new keys and values, for attention on the device.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    prompts: list[tuple[int, int, int, Tensor]]
    packed: tuple[Tensor, Tensor, Tensor] | None
    places: Tensor
    sample_rows: Tensor
    sample_places: Tensor
    sampled: Tensor
    scored_rows: Tensor
    targets: Tensor
    prefill_only: bool
    hidden: Tensor
    rope: Rotation | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    qkv_host: tuple[Tensor, Tensor, Tensor] | None = None
    attn: Tensor | None = None
    crossing: StagingBuffers | None = None
    kept: SavedActivations | None = None
    context: Context | None = None
    added: Added | None = None
    routed: Routed | None = None
    routed_host: Routed | None = None
    experts_host: Tensor | None = None
    experts: Tensor | None = None
    begun: SplitMoE | None = None

    @property
    def tokens(self) -> int:
        """T, the number of rows."""
        return self.token_ids.numel()

    @property
    def decoding(self) -> int:
        """D, the number of decode rows."""
        return self.seq_lens.numel()

    def land(self) -> None:
        """Copy the host's index tensors to the device without waiting; called on the compute lane."""
        if (device := self.hidden.device).type != "cpu":
            names = ("token_ids", "positions", "places", "sample_rows", "sample_places", "scored_rows", "targets")
            parts = [getattr(self, name) for name in names]
            moved = torch.cat(parts).pin_memory().to(device, non_blocking=True)
            for name, part in zip(names, moved.split([part.numel() for part in parts]), strict=True):
                setattr(self, name, part)


def pack(
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    hidden: Tensor,
    sampled: Tensor,
    crossing: StagingBuffers | None,
    prefill_only: bool,
    kept: SavedActivations | None = None,
) -> MicroBatch:
    """Pack ``chunks`` (decoding ones first) into a micro-batch.

    Args:
        hidden: [T, H], its share of the hidden arena.
        sampled: host memory for the new tokens.
        crossing: its staging buffers, if a link separates device and host.
        kept: its saved activations, where experts run once per pass.
    """
    decoding = [chunk for chunk in chunks if chunk.decodes]
    rest = chunks[len(decoding) :]
    first = len(decoding)
    starts = np.array([chunk.start for chunk in decoding], dtype=np.int64)
    tables = _tables(decoding)
    ids, positions = [np.zeros(first, dtype=np.int64)], [starts]
    slots = [tables[np.arange(first), starts // block_size] * np.int64(block_size) + starts % block_size]
    prompts, ends = [], [first]
    scored, targets = [np.zeros(0, dtype=np.int64)], list[int]()
    for chunk in rest:
        row, end = ends[-1], ends[-1] + chunk.count
        ids.append(np.asarray(chunk.token_ids, dtype=np.int64))
        positions.append(np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int64))
        slots.append(slots_of(chunk, chunk.start, chunk.start + chunk.count, block_size))
        table = torch.from_numpy(np.asarray(chunk.blocks, dtype=np.int32))
        prompts.append((row, end, chunk.start, table))
        if chunk.targets is not None:
            first_row = row + chunk.targets.row
            scored.append(np.arange(first_row, first_row + len(chunk.targets.token_ids), dtype=np.int64))
            targets += chunk.targets.token_ids
        ends.append(end)
    last = [*range(first), *(end - 1 for end in ends[1:])]
    sampling = [(row, chunk.place) for row, chunk in zip(last, chunks, strict=True) if chunk.samples]
    rows = np.array(sampling, dtype=np.int64).reshape(-1, 2).T.copy()
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(ids)),
        positions=torch.from_numpy(np.concatenate(positions)),
        cache_slots=torch.from_numpy(np.concatenate(slots)),
        block_tables=torch.from_numpy(tables),
        seq_lens=torch.from_numpy((starts + 1).astype(np.int32)),
        prompts=prompts,
        packed=_packed(rest),
        places=torch.from_numpy(np.array([chunk.place for chunk in decoding], dtype=np.int64)),
        sample_rows=torch.from_numpy(rows[0]),
        sample_places=torch.from_numpy(rows[1]),
        sampled=sampled[: rows.shape[1]],
        scored_rows=torch.from_numpy(np.concatenate(scored)),
        targets=torch.tensor(targets, dtype=torch.int64),
        prefill_only=prefill_only,
        hidden=hidden,
        crossing=crossing,
        kept=kept,
    )


def require(value: T | None) -> T:
    """Return ``value``, which an earlier task of the same pass has set.

    Raises:
        ScheduleError: ``value`` is None.
    """
    if value is None:
        raise ScheduleError("a task ran before the one that feeds it")
    return value


def _packed(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Arguments of the host's prefill kernel for all prompts in one call: their ends, block tables and earlier
    positions."""
    if not chunks:
        return None
    ends = np.cumsum([0, *(chunk.count for chunk in chunks)]).astype(np.int32)
    contexts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32)
    return torch.from_numpy(ends), torch.from_numpy(_tables(chunks)), contexts


def _tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """Block tables int32 [sequences, B], padded with zeros."""
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    rows = [(*chunk.blocks, *(0,) * (width - len(chunk.blocks))) for chunk in chunks]
    return np.array(rows, dtype=np.int32).reshape(-1, width)
