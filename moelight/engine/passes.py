"""Everything that is in memory, and the running of one pass over it.

Knows how loads become micro-batches, a schedule and a timeline. Refuses to know requests' texts and when they end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import CheckpointError
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Schedule, TaskKind
from moelight.core.timeline import Timeline
from moelight.engine.batcher import Load, Piece
from moelight.engine.source import Source
from moelight.hrm import costs
from moelight.hrm.footprint import KV_BUFFERS, footprint, kv_blocks, kv_buffer_tokens, pass_tokens
from moelight.hrm.placement import place
from moelight.kernels.products import Workspace
from moelight.kernels.reads import FileReader, Part
from moelight.memory.arena import allocate, typed
from moelight.memory.kv import BlockPool, KVCache, TokenCache
from moelight.memory.pages import PageStore
from moelight.models.decoder import Decoder
from moelight.runtime.attending import Act, DeviceAttention, HostAttention
from moelight.runtime.context import Chunk, find_context
from moelight.runtime.crossing import CrossingArena
from moelight.runtime.executor import Executor
from moelight.runtime.machine import Machine, open_lanes
from moelight.runtime.microbatch import MicroBatch, pack
from moelight.runtime.mixing import KeptArena, Mixing
from moelight.runtime.ops import Operations
from moelight.scheduler import SCHEDULES, routed
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from moelight.weights.load import PageReader, load_dense, page_files, page_views
from moelight.weights.torch_dtypes import to_torch

Choose = Callable[[Sequence[Piece], Tensor], list[int]]
_SCHEDULES_KEPT = 256


class PassRunner:
    """The loaded model: arenas filled, lanes open. ``run`` is one sweep through all layers."""

    def __init__(self, source: Source, policy: Policy, machine: Machine, lanes: str) -> None:
        profile = source.profile
        self.dtype = weight_dtype(policy, source, machine)
        torch_dtype = to_torch(self.dtype)
        self._policy, self._profile = policy, profile
        self._layout = layout_of(profile, policy, self.dtype)
        self._build = SCHEDULES.get(policy.schedule)
        self._schedules: OrderedDict[PassShape, Schedule] = OrderedDict()
        self._position = 0
        self.pool = BlockPool(kv_blocks(policy))
        with ExitStack() as opened:
            self._reader = opened.enter_context(_page_reader(source, torch_dtype, opened))
            runners = open_lanes(machine, lanes)
            self.lanes: tuple[Lane, ...] = tuple(runners)
            self._executor = Executor(runners)
            opened.callback(self._executor.close)
            self._load(source, machine.device, torch_dtype)
            self._opened = opened.pop_all()

    def _load(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        policy, profile = self._policy, self._profile
        arenas = allocate(footprint(profile, policy, dtype=self.dtype, kv_dtype=self.dtype), device)
        tokens, hidden, top_k = pass_tokens(policy), profile.hidden_size, profile.router.top_k
        self._hidden = typed(arenas["hidden"], dtype, (tokens, hidden))
        self._crossing: CrossingArena | None = None
        if "crossing" in arenas:
            self._crossing = CrossingArena(arenas["crossing"], profile, policy, self.dtype, tokens)
        self._kept: KeptArena | None = None
        if "mixture" in arenas:
            self._kept = KeptArena(arenas["mixture"], tokens=tokens, hidden=hidden, top_k=top_k, dtype=dtype)
        weights = load_dense(source.weight_map, profile, arenas["dense"], dtype)
        pages = PageStore(
            place(profile, policy),
            arenas,
            parts=self._layout.parts,
            slot_bytes=costs.page_slot_bytes(profile, self.dtype),
            view=lambda slot: page_views(slot, profile, dtype),
        )
        pages.load(self._reader.start)
        spaces = {}
        for name in {"work", "host_work"} & set(arenas):
            grouped = name == "work" and policy.discrete
            sizes = costs.expert_workspace(profile, policy.micro_batch_tokens, self.dtype, grouped=grouped)
            spaces[name] = Workspace(arenas[name], sizes, hidden, dtype)
        self.decoder = Decoder(profile, weights, spaces["work"])
        self._operations = Operations(
            self.decoder,
            pages,
            attention=self._attention(arenas, dtype),
            mixing=Mixing(
                self.decoder,
                pages,
                host_space=spaces.get("host_work"),
                kept=self._kept,
                most_rows=policy.micro_batch_tokens,
            ),
            start_page=self._reader.start,
        )

    def _attention(self, arenas: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[TaskKind, Act]:
        """What attention does, on the host or on the device, over a cache on the host or on the device."""
        policy, spec, layers = self._policy, self._profile.attention, self._profile.num_layers
        blocks, size = self.pool.blocks, policy.kv_block_size
        if policy.attention_device == "cpu":
            paged = KVCache(arenas["kv"], spec, num_layers=layers, blocks=blocks, block_size=size, dtype=dtype)
            return HostAttention(spec, paged).table
        there = policy.kv.device > 0
        cache = TokenCache(
            arenas["device_kv" if there else "kv"], spec, num_layers=layers, slots=blocks * size, dtype=dtype
        )
        shape = (KV_BUFFERS, int(kv_buffer_tokens(policy)), 2, spec.num_kv_heads, spec.head_dim)
        return DeviceAttention(spec, cache, typed(arenas["kv_buffer"], dtype, shape), cached_there=there).table

    def run(self, loads: Sequence[Load], choose: Choose, *, follows: bool) -> tuple[Timeline, list[list[int]]]:
        """One pass. ``choose(pieces, logits)`` picks the new tokens of the pieces that complete their sequences.

        Returns the timeline, and for each load the new tokens in the order of its completing pieces. ``follows``:
        another pass will come, so its first pages may be fetched now.
        """
        micro_batches = self._pack(loads)
        shape = PassShape(
            micro_batches=tuple(self._shape(load, mb) for load, mb in zip(loads, micro_batches, strict=True)),
            carried=self._executor.carried,
            wraps=follows,
            look_ahead=self._policy.look_ahead,
            routed_only=self._routed_only(sum(load.tokens for load in loads)),
        )
        completing = [[piece for piece in load.pieces if piece.completes] for load in loads]

        def sample(j: int, first: int, logits: Tensor) -> list[int]:
            return choose(completing[j][first : first + len(logits)], logits)

        schedule = self._schedule(shape)
        perform = self._operations.bind(micro_batches, self._position, sample, routed_only=shape.routed_only)
        timeline = self._executor.run(schedule, perform)
        self._position += schedule.stream_advance
        return timeline, [micro_batch.sampled for micro_batch in micro_batches]

    def close(self) -> None:
        """Stop the lanes, close the files."""
        self._opened.close()

    def _routed_only(self, tokens: int) -> bool:
        return routed.pays(self._layout, self._policy.schedule, tokens, self._policy.micro_batch_tokens)

    def _shape(self, load: Load, mb: MicroBatch) -> MicroBatchShape:
        samples = len(mb.sample_rows) > 0
        if mb.context is None or not self._layout.context_crosses:
            return MicroBatchShape(tokens=load.tokens, fresh=load.fresh, samples=samples)
        continues = any(piece.start > piece.generation.computed for piece in load.pieces)
        return MicroBatchShape(tokens=load.tokens, samples=samples, context=mb.context.tokens, continues=continues)

    def _pack(self, loads: Sequence[Load]) -> list[MicroBatch]:
        packed, row = [], 0
        for load in loads:
            chunks = [
                Chunk(
                    token_ids=piece.generation.token_ids(piece.start, piece.count),
                    start=piece.start,
                    blocks=piece.generation.blocks,
                    samples=piece.completes,
                    decodes=piece.decodes,
                )
                for piece in load.pieces
            ]
            mb = pack(
                chunks,
                block_size=self._policy.kv_block_size,
                hidden=self._hidden[row : row + load.tokens],
                crossing=self._crossing.share(row, load.tokens) if self._crossing is not None else None,
                kept=self._kept.rows(row, load.tokens) if self._kept is not None else None,
                fresh=load.fresh,
            )
            row += load.tokens
            if self._policy.attention_device == "gpu":
                self._find_context(mb, chunks)
            packed.append(mb)
        return packed

    def _find_context(self, mb: MicroBatch, chunks: Sequence[Chunk]) -> None:
        """Where the device finds what came before, and puts what is new if it holds the cache."""
        device, there = mb.hidden.device, self._policy.kv.device > 0
        if there:
            mb.device_slots = mb.cache_slots.to(device)
        if not mb.fresh:
            size, window = self._policy.kv_block_size, self._profile.attention.window
            mb.context = find_context(chunks, block_size=size, window=window, device=device, cached_there=there)

    def _schedule(self, shape: PassShape) -> Schedule:
        """Kept by shape, but where contexts cross: those differ from pass to pass."""
        if self._layout.context_crosses:
            return self._build(self._layout, shape)
        if shape in self._schedules:
            self._schedules.move_to_end(shape)
        else:
            self._schedules[shape] = self._build(self._layout, shape)
            if len(self._schedules) > _SCHEDULES_KEPT:
                self._schedules.popitem(last=False)
        return self._schedules[shape]


def _page_reader(source: Source, dtype: torch.dtype, opened: ExitStack) -> PageReader:
    """Past the page cache, unless numbers are converted on their way."""
    weight_map = source.weight_map
    if to_torch(weight_map.dtype) != dtype:
        return PageReader(weight_map, source.profile, dtype)
    try:
        files = opened.enter_context(FileReader(page_files(weight_map)))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be opened ({error.strerror})") from None
    return PageReader(weight_map, source.profile, dtype, lambda parts: files.submit([Part(*each) for each in parts]))


def weight_dtype(policy: Policy, source: Source, machine: Machine) -> DType:
    """The format weights have in memory: the policy's, or the checkpoint's own as far as the machine knows it."""
    if policy.weight_dtype == "auto":
        return machine.native_dtype(source.weight_map.dtype)
    return dtype_named(policy.weight_dtype)
