"""Everything that is in memory, and the running of one pass over it.

Knows how loads become micro-batches, a schedule and a timeline. Refuses to know requests' texts and when they end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from moelight.core.dtypes import DType, dtype_named
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Schedule
from moelight.core.timeline import Timeline
from moelight.engine.batcher import Load, Piece
from moelight.engine.source import Source
from moelight.hrm import costs
from moelight.hrm.footprint import footprint, kv_blocks, pass_tokens
from moelight.hrm.placement import place
from moelight.kernels.products import Workspace
from moelight.memory.arena import allocate, typed
from moelight.memory.kv import BlockPool, KVCache
from moelight.memory.pages import PageStore
from moelight.models.decoder import Decoder
from moelight.runtime.executor import Executor
from moelight.runtime.machine import Machine, open_lanes
from moelight.runtime.microbatch import Chunk, Crossing, MicroBatch, pack
from moelight.runtime.ops import Operations
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from moelight.weights.load import PageReader, load_dense, page_views
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
            self._reader = PageReader(source.weight_map, profile, torch_dtype)
            opened.callback(self._reader.close)
            runners = open_lanes(machine, lanes)
            self.lanes: tuple[Lane, ...] = tuple(runners)
            self._executor = Executor(runners)
            opened.callback(self._executor.close)
            self._load(source, machine.device, torch_dtype)
            self._opened = opened.pop_all()

    def _load(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        policy, profile = self._policy, self._profile
        arenas = allocate(footprint(profile, policy, dtype=self.dtype, kv_dtype=self.dtype), device)
        self._hidden = typed(arenas["hidden"], dtype, (pass_tokens(policy), profile.hidden_size))
        self._crossing = arenas.get("crossing")
        weights = load_dense(source.weight_map, profile, arenas["dense"], dtype)
        pages = PageStore(
            place(profile, policy),
            arenas,
            page_bytes=costs.page_bytes(profile, self.dtype),
            slot_bytes=costs.page_slot_bytes(profile, self.dtype),
            view=lambda slot: page_views(slot, profile, dtype),
        )
        pages.load(self._reader.read)
        cache = KVCache(
            arenas["kv"],
            profile.attention,
            num_layers=profile.num_layers,
            blocks=self.pool.blocks,
            block_size=policy.kv_block_size,
            dtype=dtype,
        )
        sizes = costs.expert_workspace(profile, policy.micro_batch_tokens, self.dtype)
        space = Workspace(arenas["work"], sizes, profile.hidden_size, dtype)
        self.decoder = Decoder(profile, weights, space)
        self._operations = Operations(self.decoder, pages, cache, self._reader.read)

    def run(self, loads: Sequence[Load], choose: Choose, *, follows: bool) -> tuple[Timeline, list[list[int]]]:
        """One pass. ``choose(pieces, logits)`` picks the new tokens of the pieces that complete their sequences.

        Returns the timeline, and for each load the new tokens in the order of its completing pieces. ``follows``:
        another pass will come, so its first pages may be fetched now.
        """
        micro_batches = self._pack(loads)
        shape = PassShape(
            micro_batches=tuple(
                MicroBatchShape(tokens=load.tokens, fresh=load.fresh, samples=len(mb.sample_rows) > 0)
                for load, mb in zip(loads, micro_batches, strict=True)
            ),
            carried=self._executor.carried,
            wraps=follows,
        )
        completing = [[piece for piece in load.pieces if piece.completes] for load in loads]

        def sample(j: int, first: int, logits: Tensor) -> list[int]:
            return choose(completing[j][first : first + len(logits)], logits)

        schedule = self._schedule(shape)
        perform = self._operations.bind(micro_batches, self._position, sample)
        timeline = self._executor.run(schedule, perform)
        self._position += schedule.stream_advance
        return timeline, [micro_batch.sampled for micro_batch in micro_batches]

    def close(self) -> None:
        """Stop the lanes, close the files."""
        self._opened.close()

    def _pack(self, loads: Sequence[Load]) -> list[MicroBatch]:
        packed, row = [], 0
        for load in loads:
            chunks = [
                Chunk(
                    token_ids=piece.generation.token_ids(piece.start, piece.count),
                    start=piece.start,
                    blocks=piece.generation.blocks,
                    samples=piece.completes,
                )
                for piece in load.pieces
            ]
            hidden, crossing = self._hidden[row : row + load.tokens], self._crossing_share(row, load.tokens)
            row += load.tokens
            size = self._policy.kv_block_size
            packed.append(pack(chunks, block_size=size, hidden=hidden, crossing=crossing, fresh=load.fresh))
        return packed

    def _crossing_share(self, row: int, tokens: int) -> Crossing | None:
        if self._crossing is None:
            return None
        up = costs.hidden_bytes(self._profile, self.dtype, 1)
        each = costs.qkv_bytes(self._profile, self.dtype, 1) + up
        return Crossing(self._crossing[row * each : (row + tokens) * each], tokens * up, to_torch(self.dtype))

    def _schedule(self, shape: PassShape) -> Schedule:
        if shape in self._schedules:
            self._schedules.move_to_end(shape)
        else:
            self._schedules[shape] = self._build(self._layout, shape)
            if len(self._schedules) > _SCHEDULES_KEPT:
                self._schedules.popitem(last=False)
        return self._schedules[shape]


def weight_dtype(policy: Policy, source: Source, machine: Machine) -> DType:
    """The format weights have in memory: the policy's, or the checkpoint's own as far as the machine knows it."""
    if policy.weight_dtype == "auto":
        return machine.native_dtype(source.weight_map.dtype)
    return dtype_named(policy.weight_dtype)
