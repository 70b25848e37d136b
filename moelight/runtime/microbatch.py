"""The micro-batch: packed tokens and their tensors on the way through a pass, and the arenas that micro-batches share.
Legend: T tokens, D rows of decoding sequences (the newest token of each and its drafts, the first rows), B block-table
width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moelight.core.dtypes import DType
from moelight.core.errors import ScheduleError
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.kernels.device import Device
from moelight.models.decoder import Running
from moelight.models.moe import Routed, SplitMoE
from moelight.paging.kv import CachedRows
from moelight.profiles.model import ModelProfile
from moelight.runtime.context import Added, Chunk, Context, slots_of
from moelight.runtime.graphs import Graphs
from moelight.runtime.host_copy import HostCopy
from moelight.weights.torch_dtypes import to_torch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingBuffers:
    """Pinned staging buffers through which activations cross between device and CPU, each uint8 [T, bytes per token]:
    ``down`` and ``up`` of attention, ``routing``, ``routed`` (inputs) and ``experts`` (output) of the CPU's experts."""

    dtype: torch.dtype
    down: Tensor
    up: Tensor
    routing: Tensor
    routed: Tensor
    experts: Tensor

    @classmethod
    def in_arena(cls, arena: Tensor, model: ModelProfile, policy: Policy, dtype: DType, tokens: int) -> StagingBuffers:
        """Buffers of a whole pass; ``arena`` uint8, of `staging_token_bytes` for each of ``tokens``."""
        on_host, beside = policy.attention_device == "cpu", policy.ffn_device != "gpu"
        kv_dtype = costs.kv_dtype(policy, dtype)
        residual = costs.residual_bytes(model, dtype, 1) if beside else 0
        token_bytes = {  # bytes per token; the region of the widest elements first
            "routing": costs.routing_bytes(model) if beside else 0,
            "down": costs.qkv_bytes(model, dtype, 1) if on_host else costs.kv_layer_bytes(model, kv_dtype),
            "up": costs.hidden_bytes(model, dtype, 1) if on_host else 0,
            "routed": residual,
            "experts": residual,
        }
        return cls(dtype=to_torch(dtype), **_regions(arena, tokens, token_bytes))

    def share(self, row: int, tokens: int) -> StagingBuffers:
        """The buffers of one micro-batch."""
        names = ("down", "up", "routing", "routed", "experts")
        return replace(self, **{name: getattr(self, name)[row : row + tokens] for name in names})

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy [T, heads, D] each to host memory, those that lie side by side in the rows of one product at once; the
        copies are complete when the lane's event is."""
        buffer, landed = self.down.view(-1), list[Tensor]()
        for run in _side_by_side((q, k, v)):
            heads = [part.shape[1] for part in run]
            joined = run[0].as_strided((len(run[0]), sum(heads), run[0].shape[2]), run[0].stride())
            landed += _land(buffer[: joined.nbytes], joined).split(heads, dim=1)
            buffer = buffer[joined.nbytes :]
        return landed[0], landed[1], landed[2]

    def take_cached(self, new: CachedRows) -> CachedRows:
        """Copy ``new`` to host memory, as the cache keeps it; the copies are complete when the lane's event is."""
        buffer, scales = self.down.view(-1), require(new.scales)
        return CachedRows(
            values=_land(buffer[: new.values.nbytes], new.values),
            scales=_land(buffer[new.values.nbytes :][: scales.nbytes], scales),
        )

    def take_routed(self, routed: Routed) -> Routed:
        """Copy ``routed`` (ids int32) to host memory; the copy is complete when the lane's event is."""
        weights, ids = self.routing.view(-1).chunk(2)
        return replace(
            routed, x=_land(self.routed, routed.x), weights=_land(weights, routed.weights), ids=_land(ids, routed.ids)
        )

    def attention_output(self, shape: torch.Size) -> Tensor:
        """View of ``up`` as ``[T, Hq, D]``."""
        return self.up.view(-1).view(self.dtype)[: shape.numel()].view(shape)

    def experts_output(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """View of ``experts`` as ``[T, H]`` in ``dtype``, as wide as that of the inputs."""
        return self.experts.view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedActivations:
    """Inputs ``routed`` and sums of experts ``sums`` float32 [T, H], for experts that run once per pass."""

    routed: Routed
    sums: Tensor

    @classmethod
    def in_arena(cls, arena: Tensor, model: ModelProfile, *, tokens: int, dtype: torch.dtype) -> SavedActivations:
        """Activations of a whole pass; ``arena`` uint8, the ``mixture`` of `footprint` for ``tokens``."""
        hidden, top_k = model.hidden_size, model.router.top_k
        token_bytes = {"sums": hidden * 4, "weights": top_k * 4, "ids": top_k * 4, "x": hidden * dtype.itemsize}
        regions = _regions(arena, tokens, token_bytes)
        weights, ids = regions["weights"].view(torch.float32), regions["ids"].view(torch.int32)
        routed = Routed(x=regions["x"].view(dtype), weights=weights, ids=ids, elsewhere=model.ranks > 1)
        return cls(routed=routed, sums=regions["sums"].view(torch.float32))

    def rows(self, first: int, count: int) -> SavedActivations:
        """The activations of one micro-batch, or of several."""
        rows, all_rows = slice(first, first + count), self.routed
        routed = replace(all_rows, x=all_rows.x[rows], weights=all_rows.weights[rows], ids=all_rows.ids[rows])
        return SavedActivations(routed=routed, sums=self.sums[rows])

    def keep(self, routed: Routed) -> None:
        self.routed.x.copy_(routed.x)
        self.routed.weights.copy_(routed.weights)
        self.routed.ids.copy_(routed.ids)


def _regions(arena: Tensor, tokens: int, token_bytes: Mapping[str, int]) -> dict[str, Tensor]:
    """Consecutive regions ``[tokens, bytes per token]`` by name."""
    parts = arena[: tokens * sum(token_bytes.values())].split([tokens * size for size in token_bytes.values()])
    return {name: part.view(tokens, size) for (name, size), part in zip(token_bytes.items(), parts, strict=True)}


def _side_by_side(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """``parts`` [T, heads, D] in runs of consecutive columns of the same rows."""
    runs: list[list[Tensor]] = []
    for part in parts:
        last = runs[-1][-1] if runs else part
        follows = part.storage_offset() == last.storage_offset() + last.shape[1] * last.stride(1)
        same = part.untyped_storage().data_ptr() == last.untyped_storage().data_ptr() and len(part) == len(last)
        if follows and same and last.stride() == part.stride():
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _land(target: Tensor, source: Tensor) -> Tensor:
    return target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


@dataclass(kw_only=True, slots=True)
class WindowPlaces:
    """Where the rows of a micro-batch are in the cache of layers with a window: as in `MicroBatch`."""

    cache_slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    packed: tuple[Tensor, Tensor, Tensor] | None
    rows: tuple[Tensor, Tensor] | None = None


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Packed rows without padding: decoding sequences first, then prompts one after another.

    Attributes:
        token_ids: int64 [T]; the first rows are read from the token pool at ``places`` when the pass runs.
        cache_slots: int64 [T], slots of the new keys and values.
        block_tables: int32 [D, B], with ``seq_lens`` int32 [D] the arguments of the decode kernel, to which each row of
            a sequence is one of its own.
        packed: (ends int32 [P + 1], block tables, earlier positions) of all P prompts.
        places: int64, places in the token pool of the decode rows whose tokens the host has not.
        sample_rows: rows that sample a token.
        sample_places: for which places of the token pool; empty if a sequence has several, of which the host picks.
        sampled: int64 [S] in host memory, the new tokens.
        chunks: whose rows these are, in order.
        scored_rows: int64 [R], rows that score ``targets`` int64 [R].
        pooled_rows: int64 [P], rows of which the final hidden states are pooled.
        crossing: only if a link separates device and host.
        saved: only where experts run once per pass.
        row: of the first token among those of the pass.
        running: what the model keeps of the micro-batch from task to task.
        kv_host: new keys and values on their way into a quantised cache in host memory.
        graphs: only in a pass that they serve.
        context: only for attention on the device.
        added: only where the cache is for attention on the device.
        chosen: ids and weights [T, k] of the last router, in an on-demand pass.
        rows: of `row_tables`.
        windowed: places in the cache of layers with a window; None if those layers have none of their own.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    packed: tuple[Tensor, Tensor, Tensor] | None
    places: Tensor
    sample_rows: Tensor
    sample_places: Tensor
    sampled: Tensor
    scored_rows: Tensor
    targets: Tensor
    pooled_rows: Tensor
    chunks: Sequence[Chunk]
    prefill_only: bool
    hidden: Tensor
    row: int = 0
    graphs: Graphs | None = None
    running: Running | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    qkv_host: tuple[Tensor, Tensor, Tensor] | None = None
    kv_host: CachedRows | None = None
    attn: Tensor | None = None
    crossing: StagingBuffers | None = None
    saved: SavedActivations | None = None
    context: Context | None = None
    added: Added | None = None
    routed: Routed | None = None
    chosen: HostCopy | None = None
    routed_host: Routed | None = None
    experts_host: Tensor | None = None
    experts: Tensor | None = None
    begun: SplitMoE | None = None
    rows: tuple[Tensor, Tensor] | None = None
    windowed: WindowPlaces | None = None

    @property
    def tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def decoding(self) -> int:
        return self.seq_lens.numel()

    def land(self) -> None:
        """Copy index tensors to the device in one transfer without waiting; called on the compute lane."""
        if (device := Device(self.hidden.device)).host:
            return
        placed, of_rows = ("token_ids", "positions", "places"), ("sample_rows", "sample_places")
        names = (*placed, *of_rows, "scored_rows", "targets", "pooled_rows")
        owners: list[tuple[MicroBatch | Added, str]] = [(self, name) for name in names]
        if (added := self.added) is not None:
            rows = ("host_rows", "device_rows", "device_slots")
            owners += [(added, name) for name in rows if getattr(added, name) is not None]
        parts = [getattr(owner, name) for owner, name in owners]
        if self.context is not None:
            parts.append(self.context.batch.table.view(torch.int64))
        moved = device.landed(torch.cat(parts)).split([part.numel() for part in parts])
        for (owner, name), part in zip(owners, moved, strict=False):
            setattr(owner, name, part)
        if self.context is not None:
            self.context.batch.land(moved[-1].view(torch.int32))


def row_tables(places: MicroBatch | WindowPlaces) -> tuple[Tensor, Tensor]:
    """Block tables int32 [T, B] and lengths int32 [T] of the contexts of all rows, each with its own token."""
    if places.packed is None:
        return places.block_tables, places.seq_lens
    if places.rows is None:
        ends, tables, contexts = places.packed
        counts = ends.diff()
        first = torch.repeat_interleave(ends[:-1] - contexts, counts)
        lens = torch.arange(1, int(ends[-1]) + 1, dtype=torch.int32) - first
        width = max(places.block_tables.shape[1], tables.shape[1])
        parts = [places.block_tables, tables.repeat_interleave(counts, 0)]
        padded = [functional.pad(part, (0, width - part.shape[1])) for part in parts]
        places.rows = torch.cat(padded), torch.cat((places.seq_lens, lens))
    return places.rows


def pack(
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    hidden: Tensor,
    sampled: Tensor,
    crossing: StagingBuffers | None,
    prefill_only: bool,
    saved: SavedActivations | None = None,
    row: int = 0,
) -> MicroBatch:
    """Pack ``chunks``, decoding ones first and of these the ones whose tokens are in the pool, with their shares of the
    arenas (``sampled`` in host memory)."""
    decoding = [chunk for chunk in chunks if chunk.decodes]
    from_pool = [chunk for chunk in decoding if not chunk.token_ids]
    starts = [chunk.start for chunk in from_pool]
    slots = [chunk.blocks[chunk.start // block_size] * block_size + chunk.start % block_size for chunk in from_pool]
    rows = _numbers([0] * len(from_pool), starts, slots)
    if rest := chunks[len(from_pool) :]:
        rows = np.concatenate((rows, _rows_of_tokens(rest, block_size)), axis=1)
    end, sampling, scored, targets, pooled = 0, list[int](), list[int](), list[int](), list[int]()
    for chunk in chunks:
        scored += range(end + chunk.first_scored, end + chunk.first_scored + len(chunk.targets))
        targets += chunk.targets
        pooled += range(end + chunk.pooled.start, end + chunk.pooled.stop)
        end += chunk.count
        sampling += range(end - chunk.samples, end)
    sample_places = [chunk.slot for chunk in chunks if chunk.samples]
    if len(sampling) > len(sample_places):
        sample_places = []
    counts = [chunk.count for chunk in decoding]
    tables = _tables(decoding)
    if sum(counts) > len(decoding):
        tables = tables.repeat_interleave(torch.tensor(counts), 0)
    decode_rows = sum(counts)
    scoring = _numbers(scored, targets)
    packed = _packed(chunks[len(decoding) :])
    return MicroBatch(
        token_ids=torch.from_numpy(rows[0]),
        positions=torch.from_numpy(rows[1]),
        cache_slots=torch.from_numpy(rows[2]),
        block_tables=tables,
        seq_lens=torch.from_numpy((rows[1][:decode_rows] + 1).astype(np.int32)),
        packed=packed,
        windowed=_windowed(chunks, rows[1], block_size, packed),
        places=torch.from_numpy(_numbers([chunk.slot for chunk in from_pool])[0]),
        sample_rows=torch.from_numpy(_numbers(sampling)[0]),
        sample_places=torch.from_numpy(_numbers(sample_places)[0]),
        sampled=sampled[: len(sampling)],
        scored_rows=torch.from_numpy(scoring[0]),
        targets=torch.from_numpy(scoring[1]),
        pooled_rows=torch.from_numpy(_numbers(pooled)[0]),
        chunks=chunks,
        prefill_only=prefill_only,
        hidden=hidden,
        row=row,
        crossing=crossing,
        saved=saved,
    )


def require(value: T | None) -> T:
    """``value``, which an earlier task of the pass has set; raises ScheduleError if it is None."""
    if value is None:
        raise ScheduleError("a task ran before the one that feeds it")
    return value


def _windowed(
    chunks: Sequence[Chunk], positions: np.ndarray, block_size: int, packed: tuple[Tensor, Tensor, Tensor] | None
) -> WindowPlaces | None:
    """Places of rows at ``positions`` int64 [T] in the cache of layers with a window; None where ``chunks`` have no
    blocks there. ``packed``: of prompts in that of the others."""
    held = np.array([len(chunk.window_blocks) for chunk in chunks])
    if not held.any():
        return None
    first = np.array([chunk.window_first for chunk in chunks])
    tables = np.zeros((len(chunks), int((first + held).max())), dtype=np.int32)  # zeros: blocks that are free again
    columns = np.arange(held.sum()) - np.repeat(held.cumsum() - held - first, held)
    blocks = chain.from_iterable(chunk.window_blocks for chunk in chunks)
    tables[np.repeat(np.arange(len(chunks)), held), columns] = np.fromiter(blocks, np.int32, len(columns))
    owners = np.repeat(np.arange(len(chunks)), [chunk.count for chunk in chunks])
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    decoding = sum(chunk.decodes for chunk in chunks)
    rows = sum(chunk.count for chunk in chunks[:decoding])
    return WindowPlaces(
        cache_slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables[owners[:rows]]),
        seq_lens=torch.from_numpy((positions[:rows] + 1).astype(np.int32)),
        packed=None if packed is None else (packed[0], torch.from_numpy(tables[decoding:]), packed[2]),
    )


def _packed(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Ends, block tables and earlier positions of all prompts, for the host's prefill kernel."""
    if not chunks:
        return None
    ends = np.cumsum([0, *(chunk.count for chunk in chunks)]).astype(np.int32)
    contexts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32)
    return torch.from_numpy(ends), _tables(chunks), contexts


def _numbers(*rows: Sequence[int]) -> np.ndarray:
    """int64, of ``rows`` of one length."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


def _rows_of_tokens(chunks: Sequence[Chunk], block_size: int) -> np.ndarray:
    """Token ids, positions and cache slots of all rows of chunks with their tokens, int64 [3, rows]."""
    spans = [(chunk, chunk.start, chunk.start + chunk.count) for chunk in chunks]
    ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
    return np.stack((ids, positions, np.concatenate([slots_of(*span, block_size) for span in spans])))


def _tables(chunks: Sequence[Chunk]) -> Tensor:
    """int32 [sequences, B], padded with zeros."""
    width = max((len(chunk.blocks) for chunk in chunks), default=1)
    rows = [(*chunk.blocks, *(0,) * (width - len(chunk.blocks))) for chunk in chunks]
    return torch.from_numpy(np.array(rows, dtype=np.int32).reshape(-1, width))
