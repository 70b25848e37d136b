"""The loaded model, and the execution of one pass over it.

Turns micro-batch plans into micro-batches, a schedule and a timeline. Does not depend on the text of requests or on
when sequences finish.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import CheckpointError
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Page, Schedule, TaskKind
from moelight.core.timeline import Timeline
from moelight.engine.batcher import MicroBatchPlan, SequenceChunk, places
from moelight.engine.checkpoint import OpenCheckpoint
from moelight.engine.experts import ExpertRuntime
from moelight.hrm import costs
from moelight.hrm.footprint import (
    KV_BUFFERS,
    footprint,
    kv_blocks,
    kv_buffer_tokens,
    kv_device_blocks,
    offloaded_pages,
    pass_tokens,
)
from moelight.hrm.placement import moved, place, slot_table
from moelight.kernels.products import Workspace
from moelight.kernels.reads import FileReader, ReadPart
from moelight.memory.arena import typed
from moelight.memory.kv import BlockPool, KVCache, TokenCache
from moelight.memory.pages import PageStore
from moelight.models.decoder import Decoder
from moelight.optimizer.adapter import Allocation
from moelight.runtime.attention_ops import Act, DeviceAttention, HostAttention
from moelight.runtime.context import Chunk, Targets, find_added, find_context
from moelight.runtime.executor import Executor, PassInFlight
from moelight.runtime.machine import Machine, allocate_for, cores_for, open_lanes
from moelight.runtime.microbatch import MicroBatch, pack, require
from moelight.runtime.moe_ops import MoEOps, SavedActivationArena
from moelight.runtime.on_demand import Pager, PassPages
from moelight.runtime.ops import Operations
from moelight.runtime.staging import StagingArena
from moelight.scheduler import SCHEDULES, on_demand
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from moelight.weights.load import PageReader, load_dense, page_files, page_views
from moelight.weights.torch_dtypes import to_torch

Choose = Callable[[Sequence[SequenceChunk], Tensor], Tensor]
Score = Callable[[Sequence[SequenceChunk], int, Tensor, Tensor], None]
_SCHEDULES_KEPT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A pass ready to launch: its micro-batch plans, packed."""

    plans: Sequence[MicroBatchPlan]
    micro_batches: Sequence[MicroBatch]
    shapes: tuple[MicroBatchShape, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A pass in flight. Its micro-batches are kept until the pass has been collected."""

    packed: Packed
    in_flight: PassInFlight

    @property
    def plans(self) -> Sequence[MicroBatchPlan]:
        """The micro-batch plans of the pass."""
        return self.packed.plans


class PassRunner:
    """The loaded model: arenas filled, lanes open. A pass runs all layers once; it is packed, launched and
    collected."""

    def __init__(
        self, source: OpenCheckpoint, policy: Policy, machine: Machine, lanes: str, experts: ExpertRuntime | None = None
    ) -> None:
        """``experts``: decides which experts are resident; None: the policy's placement does."""
        profile = source.profile
        self.dtype = weight_dtype(policy, source, machine)
        torch_dtype = to_torch(self.dtype)
        self._policy, self._profile = policy, profile
        self._allocation = Allocation(profile, policy, self.dtype)
        self._layout = layout_of(profile, policy, self.dtype)
        self._placement = place(profile, policy)
        self._experts = experts
        self._residents = 0
        self._streaming = True
        self._build = SCHEDULES.get(policy.schedule)
        self._schedules: OrderedDict[PassShape, Schedule] = OrderedDict()
        self._position = 0
        self.pool = BlockPool(kv_blocks(policy), kv_device_blocks(policy))
        with ExitStack() as opened:
            self._reader = opened.enter_context(_page_reader(source, torch_dtype, opened))
            runners = open_lanes(machine, lanes, cores_for(machine, self._policy))
            self.lanes: tuple[Lane, ...] = tuple(runners)
            self._executor = Executor(runners)
            opened.callback(self._executor.close)
            self._load(source, machine, torch_dtype)
            self._opened = opened.pop_all()

    def _load(self, source: OpenCheckpoint, machine: Machine, dtype: torch.dtype) -> None:
        policy, profile = self._policy, self._profile
        announced = footprint(profile, policy, dtype=self.dtype, kv_dtype=self.dtype)
        arenas = allocate_for(machine, announced, pinned_pages=self._layout.pinned_pages)
        tokens, hidden, top_k = pass_tokens(policy), profile.hidden_size, profile.router.top_k
        running = places(policy, self.pool.blocks)
        self._hidden = typed(arenas["hidden"], dtype, (tokens, hidden))
        self._crossing: StagingArena | None = None
        if "crossing" in arenas:
            self._crossing = StagingArena(arenas["crossing"], profile, policy, self.dtype, tokens)
        self._kept: SavedActivationArena | None = None
        if "mixture" in arenas:
            self._kept = SavedActivationArena(arenas["mixture"], tokens=tokens, hidden=hidden, top_k=top_k, dtype=dtype)
        weights = load_dense(source.weight_map, profile, arenas["dense"], dtype)
        self._pages = PageStore(
            arenas,
            slot_table(self._placement, profile) if self._experts is None else self._experts.residency.table,
            fast_tier=self._placement.fast_tier,
            far=offloaded_pages(self._placement) if self._placement.fast_tier == "device" else (),
            parts=self._layout.parts,
            slot_bytes=costs.page_slot_bytes(profile, self.dtype),
            view=lambda slot: page_views(slot, profile, dtype),
        )
        self._follow_residents()
        self._pages.load(self._reader.start)
        self._pager: Pager | None = None
        if self._experts is not None and self._layout.streamed:
            leave = self._experts.leave if policy.ffn_device == "split" else None
            self._pager = Pager(
                self._pages, self._experts.residency, self._reader.start, leave=leave, remembers=not self._experts.plain
            )
        spaces = {}
        for name in {"work", "host_work"} & set(arenas):
            grouped = name == "work" and policy.discrete
            sizes = costs.expert_workspace(profile, policy.micro_batch_tokens, self.dtype, grouped=grouped)
            spaces[name] = Workspace(arenas[name], sizes, hidden, dtype)
        self.decoder = Decoder(profile, weights, spaces["work"])
        self._operations = Operations(
            self.decoder,
            self._pages,
            attention=self._attention(arenas, dtype),
            moe_ops=MoEOps(
                self.decoder,
                self._pages,
                host_space=spaces.get("host_work"),
                kept=self._kept,
                most_rows=policy.micro_batch_tokens,
            ),
            start_page=self._reader.start,
            pool=torch.zeros(running, dtype=torch.int64, device=machine.device),
            score_rows=policy.micro_batch_size,
        )
        # New tokens of three passes: one collected, one in flight, one packed.
        room = torch.empty((3, running), dtype=torch.int64, pin_memory=machine.device.type != "cpu")
        self._sampled = cycle(room)

    def _attention(self, arenas: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[TaskKind, Act]:
        """The attention operations: on the host over its KV cache, or on the device over blocks in either memory."""
        policy, spec, layers = self._policy, self._profile.attention, self._profile.num_layers
        blocks, size = self.pool.blocks, policy.kv_block_size
        if policy.attention_device == "cpu":
            paged = KVCache(arenas["kv"], spec, num_layers=layers, blocks=blocks, block_size=size, dtype=dtype)
            return HostAttention(spec, paged).table

        def cache(name: str, blocks: int) -> TokenCache:
            return TokenCache(arenas[name], spec, num_layers=layers, slots=blocks * size, dtype=dtype)

        host, there = self.pool.host_blocks, blocks - self.pool.host_blocks
        shape = (KV_BUFFERS, int(kv_buffer_tokens(policy)), 2, spec.num_kv_heads, spec.head_dim)
        return DeviceAttention(
            spec,
            typed(arenas["kv_buffer"], dtype, shape),
            on_host=cache("kv", host) if self._layout.context_crosses else None,
            on_device=cache("device_kv", there) if there else None,
        ).table

    @property
    def policy(self) -> Policy:
        """The policy that passes follow. It may be replaced between two passes, within what was allocated.

        Raises:
            ConfigError: the new policy changes a fixed value or needs more memory.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._allocation.check(policy)
        self._policy = policy

    def pack(self, plans: Sequence[MicroBatchPlan]) -> Packed:
        """Pack ``plans`` into micro-batches, before or while an earlier pass runs; generated tokens are read when the
        pass runs."""
        micro_batches = self._pack(plans)
        shapes = tuple(self._shape(load, mb) for load, mb in zip(plans, micro_batches, strict=True))
        return Packed(plans=plans, micro_batches=micro_batches, shapes=shapes)

    def launch(self, packed: Packed, choose: Choose, score: Score | None = None, *, follows: bool) -> Launched:
        """Launch a pass, possibly behind one in flight.

        ``choose(pieces, logits)`` picks the new tokens of the completing chunks, on the device of the logits.
        ``score(pieces, first, logits, targets)`` scores prompt tokens of a micro-batch from its scored row ``first``
        on. ``follows``: another pass will follow, so its first pages may be prefetched.
        """
        small = self._small(sum(load.tokens for load in packed.plans))
        if small is None:
            if self._pager is not None and not self._streaming:
                self._executor.wait()  # until the resident pages are known
                self._pager.land()  # the ring now belongs to the streamed pages
            self._follow_residents()
        ahead = small is not None and self._policy.schedule != "serial" and small.residency.ahead
        shape = PassShape(
            micro_batches=packed.shapes,
            prefetched=self._executor.prefetched,
            wraps=follows,
            look_ahead=self._policy.look_ahead,
            routed_only=small is not None,
            ahead=ahead,
            predict_experts=ahead and require(small).residency.predicts_experts,
        )
        completing = [
            [chunk for chunk in load.chunks if chunk.completes and chunk.sequence.max_tokens] for load in packed.plans
        ]

        def sample(j: int, first: int, logits: Tensor) -> Tensor:
            return choose(completing[j][first : first + len(logits)], logits)

        def note(j: int, first: int, logits: Tensor, targets: Tensor) -> None:
            require(score)(packed.plans[j].chunks, first, logits, targets)

        schedule = self._schedule(shape)
        pass_pages = PassPages(
            micro_batches=packed.micro_batches,
            position=self._position,
            small=None if small is None else small.begin(packed.micro_batches, *self._in_ring(shape.prefetched)),
            watch=None if self._experts is None else self._experts.watch(small=small is not None),
            residents=self._residents,
        )
        self._position += schedule.stream_advance
        self._streaming = small is None
        return Launched(
            packed=packed, in_flight=self._executor.launch(schedule, self._operations.bind(pass_pages, sample, note))
        )

    def _small(self, tokens: int) -> Pager | None:
        """The pager, if a pass of ``tokens`` should run on demand; None for a whole pass."""
        policy = self._policy
        missing = None
        if self._experts is not None:
            missing = 0.0 if self._experts.plain else self._experts.residency.missing_share(tokens)
        pays = on_demand.pays(self._layout, policy.schedule, tokens, policy.micro_batch_tokens, missing)
        return self._pager if pays else None

    def _in_ring(self, prefetched: int) -> tuple[dict[Page, int], dict[Page, int] | None]:
        """The pages that the previous pass, if a whole pass, left in the ring, with their slots: the pages of the
        ``prefetched`` parts it fetched for this pass, and the last pages it used itself (none before the first whole
        pass)."""
        if not self._streaming:
            return {}, None
        each, ring = len(self._layout.parts), len(self._pages.ring_pages)
        pages, ahead = self._layout.streamed[::each], prefetched // each
        used = range(max(0, len(pages) + ahead - ring) if self._position else len(pages), len(pages))
        at = self._position - len(self._layout.streamed)
        return (
            {pages[k]: self._pages.ring_page(k, self._position) for k in range(ahead)},
            {pages[k]: self._pages.ring_page(k, at) for k in used},
        )

    def _follow_residents(self) -> None:
        """Rebuild the layout of streamed pages if the resident pages have changed since the last whole pass."""
        found = None if self._experts is None else self._experts.residency
        if found is not None and found.version != self._residents:
            placement = moved(self._placement, found.pages())
            layout = layout_of(self._profile, self._policy, self.dtype, placement=placement)
            self._layout = replace(layout, ring_slots=self._layout.ring_slots, pinned_slots=self._layout.pinned_slots)
            self._residents = found.version
            self._schedules.clear()
        self._pages.follow(self._layout.streamed, self._layout.computed)

    def land(self, launched: Launched) -> tuple[Timeline, list[list[int]]]:
        """Wait for a pass. Returns its timeline and, for each micro-batch, the new tokens in the order of its
        completing chunks."""
        timeline = self._executor.finish(launched.in_flight)
        return timeline, [mb.sampled.tolist() for mb in launched.packed.micro_batches]

    def drain(self, launched: Launched) -> None:
        """Wait for a pass whose tokens are discarded; returns at once if a failure has ended all passes."""
        if not self._executor.broken:
            self._executor.finish(launched.in_flight)

    @property
    def stalls(self) -> dict[str, float]:
        """Counts and seconds of expert transfers in on-demand passes."""
        return {} if self._pager is None else asdict(self._pager.transfer_stats)

    def close(self) -> None:
        """Stop the lanes and close the files."""
        if self._pager is not None:
            self._pager.land()
        self._opened.close()

    def _shape(self, load: MicroBatchPlan, mb: MicroBatch) -> MicroBatchShape:
        """The shape of a micro-batch. Context tokens are exact only where keys and values cross the link; elsewhere
        they are left out, so that passes share schedules."""
        samples = mb.sampled.numel() + mb.targets.numel() > 0
        if mb.added is None or not self._layout.context_crosses:
            return MicroBatchShape(tokens=load.tokens, prefill_only=load.prefill_only, samples=samples)
        shape = MicroBatchShape(
            tokens=load.tokens, prefill_only=load.prefill_only, samples=samples, device_tokens=mb.added.there
        )
        if mb.context is None:
            return shape
        continues = any(chunk.start > chunk.sequence.computed for chunk in load.chunks)
        return replace(shape, context=mb.context.tokens, device_context=mb.context.there, continues=continues)

    def _pack(self, plans: Sequence[MicroBatchPlan]) -> list[MicroBatch]:
        packed, row, sampled = [], 0, next(self._sampled)
        for load in plans:
            chunks = [_chunk(chunk) for chunk in load.chunks]
            mb = pack(
                chunks,
                block_size=self._policy.kv_block_size,
                hidden=self._hidden[row : row + load.tokens],
                sampled=sampled,
                crossing=self._crossing.share(row, load.tokens) if self._crossing is not None else None,
                kept=self._kept.rows(row, load.tokens) if self._kept is not None else None,
                prefill_only=load.prefill_only,
            )
            row += load.tokens
            sampled = sampled[mb.sampled.numel() :]
            if self._policy.attention_device == "gpu":
                self._find_context(mb, chunks)
            packed.append(mb)
        return packed

    def _find_context(self, mb: MicroBatch, chunks: Sequence[Chunk]) -> None:
        """Locate the cached context that the device reads, and the slots for the new keys and values."""
        device, size = mb.hidden.device, self._policy.kv_block_size
        host_slots = self.pool.host_blocks * size
        mb.added = find_added(mb.cache_slots, host_slots=host_slots, device=device)
        if not mb.prefill_only:
            window = self._profile.attention.window
            mb.context = find_context(chunks, block_size=size, window=window, device=device, host_slots=host_slots)

    def _schedule(self, shape: PassShape) -> Schedule:
        """The schedule of a pass; cached by shape unless contexts cross the link, since those differ from pass to
        pass."""
        if self._layout.context_crosses:
            return self._build(self._layout, shape)
        if shape in self._schedules:
            self._schedules.move_to_end(shape)
        else:
            self._schedules[shape] = self._build(self._layout, shape)
            if len(self._schedules) > _SCHEDULES_KEPT:
                self._schedules.popitem(last=False)
        return self._schedules[shape]


def _chunk(chunk: SequenceChunk) -> Chunk:
    sequence = chunk.sequence
    plain = sequence.request.sampling.prompt_logprobs is None
    return Chunk(
        token_ids=chunk.token_ids,
        start=chunk.start,
        blocks=sequence.blocks,
        place=sequence.place,
        samples=chunk.completes and sequence.max_tokens > 0,
        decodes=chunk.decodes,
        targets=None if plain else _targets(chunk),
    )


def _targets(chunk: SequenceChunk) -> Targets | None:
    scored, token_ids = chunk.scored, chunk.sequence.request.token_ids
    if not scored:
        return None
    return Targets(row=scored.start - 1 - chunk.start, token_ids=token_ids[scored.start : scored.stop])


def _page_reader(source: OpenCheckpoint, dtype: torch.dtype, opened: ExitStack) -> PageReader:
    """A reader that bypasses the page cache, unless weights are converted while they are read."""
    weight_map = source.weight_map
    if to_torch(weight_map.dtype) != dtype:
        return PageReader(weight_map, source.profile, dtype)
    try:
        files = opened.enter_context(FileReader(page_files(weight_map)))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be opened ({error.strerror})") from None
    return PageReader(
        weight_map, source.profile, dtype, lambda parts: files.submit([ReadPart(*each) for each in parts])
    )


def weight_dtype(policy: Policy, source: OpenCheckpoint, machine: Machine) -> DType:
    """The dtype of weights in memory: the policy's, or the checkpoint's as far as the machine supports it."""
    if policy.weight_dtype == "auto":
        return machine.native_dtype(source.weight_map.dtype)
    return dtype_named(policy.weight_dtype)
