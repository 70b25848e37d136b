"""Passes over a loaded model: from micro-batch plans to a schedule, a launched pass, its tokens and timeline. Does not
depend on the text of requests or on when sequences finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from moelight.core.policy import Policy
from moelight.core.schedule import Page, Schedule
from moelight.core.timeline import Timeline
from moelight.engine.batcher import MicroBatchPlan, SampledRow, SequenceChunk
from moelight.engine.experts import ExpertRuntime, RoutingWatch
from moelight.engine.loaded_model import LoadedModel, refuse_prediction
from moelight.engine.routing import PassRouting
from moelight.hrm.footprint import pass_tokens
from moelight.hrm.placement import moved
from moelight.kernels.arguments import one_thread_for_torch
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.device import Device
from moelight.kernels.layer import MOST_TOKENS
from moelight.optimizer.adapter import Allocation
from moelight.runtime import ops
from moelight.runtime.context import Chunk, find_added, find_context
from moelight.runtime.executor import PassInFlight
from moelight.runtime.machine import Machine
from moelight.runtime.microbatch import MicroBatch, pack, require
from moelight.runtime.on_demand import OnDemandPass, PassPages
from moelight.scheduler import SCHEDULES, on_demand
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape, layout_of
from moelight.weights.tensor_map import OpenCheckpoint

Choose = Callable[[Sequence[SampledRow], Tensor], Tensor]
Score = Callable[[Sequence[SequenceChunk], int, Tensor, Tensor], None]
PoolHidden = Callable[[Sequence[SequenceChunk], Tensor], None]
Results = tuple[ops.Sample, ops.Score, ops.PoolHidden]
_SCHEDULES_KEPT = 256


@dataclass(kw_only=True, slots=True)
class PackedPass:
    """A pass ready to launch, then in flight; keeps its micro-batches alive until the pass has been collected."""

    plans: Sequence[Any]
    micro_batches: Sequence[MicroBatch]
    shapes: tuple[MicroBatchShape, ...]
    in_flight: PassInFlight | None = None
    watch: RoutingWatch | None = None
    routing: PassRouting | None = None


class PackedPlan(Protocol):
    """What a micro-batch is packed from, beside its rows; as `MicroBatchPlan`."""

    @property
    def tokens(self) -> int: ...
    @property
    def prefill_only(self) -> bool: ...
    @property
    def continues(self) -> bool: ...


class ScheduleCache:
    """The schedules of one layout, kept by the shape of the pass."""

    def __init__(self, name: str, layout: Layout) -> None:
        self._build = SCHEDULES.get(name)
        self.use(layout)

    def use(self, layout: Layout) -> None:
        """Build schedules for ``layout`` from now on; none are kept where contexts cross the link."""
        self.layout = layout
        self.find: Callable[[PassShape], Schedule] = partial(self._build, layout)
        if not layout.context_crosses:
            self.find = lru_cache(_SCHEDULES_KEPT)(self.find)


class PassRunner:
    """Packs, launches and lands passes over a loaded model."""

    def __init__(
        self,
        source: OpenCheckpoint,
        policy: Policy,
        machine: Machine,
        lanes: str,
        experts: ExpertRuntime | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        refuse_prediction(source, experts)
        self.model = model = LoadedModel(source, policy, machine, lanes, experts, cuda_graphs=cuda_graphs)
        self.pool, self.window_pool = model.pool, model.window_pool
        self.dtype, self.close = model.dtype, model.close
        self._policy, self._allocation = policy, Allocation(source.profile, policy, model.dtype)
        self._schedules = ScheduleCache(policy.schedule, model.layout)
        self._experts, self._discrete = experts, machine.discrete
        self.keeps_hidden = False  # all rows have final hidden states, those of unfinished prompts too
        self._residents = 0  # the version of the residents that the layout describes
        self._streaming, self._position = True, 0  # the last pass was a whole one; position of the page stream
        model.pages.follow(model.layout.streamed, model.layout.computed)
        self._follow_residents()
        # New tokens of three passes: one collected, one in flight, one packed.
        self._sampled = cycle(Device(machine.device).host_memory((3, int(pass_tokens(policy))), torch.int64))

    @property
    def policy(self) -> Policy:
        """The policy that passes follow; it may be replaced between passes. Raises ConfigError if the new policy
        changes a fixed value or exceeds the allocation."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._allocation.check(policy)
        self._policy = policy

    def pack(self, plans: Sequence[MicroBatchPlan]) -> PackedPass:
        """Pack ``plans``, before or while an earlier pass runs; generated tokens are read when the pass runs."""
        return self.pack_chunks(plans, [[_chunk(chunk) for chunk in load.chunks] for load in plans])

    def pack_chunks(self, plans: Sequence[PackedPlan], rows: Sequence[Sequence[Chunk]]) -> PackedPass:
        """`pack`, of plans whose ``rows`` are given."""
        model, row, sampled, micro_batches = self.model, 0, next(self._sampled), []
        for load, chunks in zip(plans, rows, strict=True):
            mb = pack(
                chunks,
                block_size=self._policy.kv_block_size,
                hidden=model.hidden[row : row + load.tokens],
                sampled=sampled,
                crossing=model.crossing.share(row, load.tokens) if model.crossing is not None else None,
                saved=model.saved.rows(row, load.tokens) if model.saved is not None else None,
                prefill_only=load.prefill_only,
                row=row,
            )
            row += load.tokens
            sampled = sampled[mb.sampled.numel() :]
            self._find_context(mb, chunks)
            micro_batches.append(mb)
        shapes = tuple(self._shape(load, mb) for load, mb in zip(plans, micro_batches, strict=True))
        return PackedPass(plans=plans, micro_batches=micro_batches, shapes=shapes)

    def launch(
        self,
        packed: PackedPass,
        choose: Choose,
        score: Score | None = None,
        pool_hidden: PoolHidden | None = None,
        *,
        follows: bool,
        captures_routing: bool = False,
    ) -> PackedPass:
        """Launch a pass, possibly behind one in flight; ``follows``: another pass follows, so its first pages may be
        prefetched.

        ``choose(rows, logits)`` picks the tokens that follow these rows of completing chunks on the device of the
        logits; ``score(chunks, first, logits, targets)`` scores prompt tokens of a micro-batch, ``first`` being its
        first scored row; ``pool_hidden(chunks, hidden)`` pools the final hidden states of a micro-batch. With
        ``captures_routing``, ``routing`` of the result has the experts of all tokens once it has landed.
        """
        results = _results(packed.plans, choose, score, pool_hidden)
        return self.launch_with(packed, results, follows=follows, captures_routing=captures_routing)

    def launch_with(
        self,
        packed: PackedPass,
        results: Results,
        *,
        follows: bool,
        on_demand: bool | None = None,
        captures_routing: bool = False,
    ) -> PackedPass:
        """`launch`, with what takes the results of micro-batches by their number (`Operations.bind`); ``on_demand``:
        only routed pages are transferred; None: if that should pay."""
        tokens = sum(load.tokens for load in packed.plans)
        on_demand = self._is_on_demand(packed) if on_demand is None else on_demand
        model, pager = self.model, self.model.pager if on_demand else None
        if pager is None:
            if not self._streaming:
                model.executor.wait()  # until the resident pages are known
                require(model.pager).land()  # the ring now belongs to the streamed pages
            self._follow_residents()
        ahead = pager is not None and self._policy.schedule != "serial" and pager.residency.ahead
        packed.routing = PassRouting() if captures_routing else None
        packed.watch = self._watch(packed.routing, small=pager is not None)
        in_place = pager is None and packed.watch is None and model.operations.whole_layers
        shape = PassShape(
            micro_batches=packed.shapes,
            prefetched=model.executor.prefetched,
            wraps=follows,
            look_ahead=self._policy.look_ahead,
            routed_only=pager is not None,
            ahead=ahead,
            predict_experts=ahead and require(pager).residency.predicts_experts and model.operations.predicts,
            whole_layers=in_place and tokens <= MOST_TOKENS,
        )
        schedule = self._schedules.find(shape)
        if pager is not None:
            pager.begin(*self._in_ring(shape.prefetched))
        self._use_graphs(packed.micro_batches, reads=pager is not None or packed.watch is not None)
        pass_pages = PassPages(
            micro_batches=packed.micro_batches,
            position=self._position,
            small=None if pager is None else OnDemandPass(pager, packed.micro_batches),
            watch=packed.watch,
            residents=self._residents,
        )
        self._position += schedule.stream_advance
        self._streaming = pager is None
        with one_thread_for_torch() if tokens <= MOST_TOKENS else nullcontext():
            packed.in_flight = model.executor.launch(schedule, model.operations.bind(pass_pages, *results))
        return packed

    def _watch(self, routing: PassRouting | None, *, small: bool) -> RoutingWatch | None:
        """The callback for every routing decision of a (``small``: on-demand) pass; None if nothing observes them."""
        experts = self._experts
        records = [] if experts is None else experts.records(small=small)
        if routing is not None:
            records.append(routing.record)
        inputs = None if experts is None else experts.inputs
        return RoutingWatch(records, later=self._discrete, inputs=inputs) if records or inputs is not None else None

    def _use_graphs(self, micro_batches: Sequence[MicroBatch], *, reads: bool) -> None:
        """Launch the pass from CUDA graphs, if they serve it; ``reads``: the host reads its routing."""
        graphs, layers = self.model.graphs, self.model.profile.num_layers
        if graphs is None or reads or any(mb.decoding < mb.tokens for mb in micro_batches):
            return
        rows = sum(mb.tokens for mb in micro_batches)
        if graphs.serves(rows=rows, micro_batches=len(micro_batches), layers=layers):
            for mb in micro_batches:
                mb.graphs = graphs

    def _is_on_demand(self, packed: PackedPass) -> bool:
        """True if the pass should transfer routed pages only."""
        tokens = sum(load.tokens for load in packed.plans)
        policy, layout, missing = self._policy, self._schedules.layout, None
        if self.model.pager is None:
            return False
        if self._experts is not None:
            missing = 0.0 if self._experts.plain else self._experts.residency.missing_share(tokens)
        return on_demand.pays(layout, policy.schedule, tokens, policy.micro_batch_tokens, missing)

    def _in_ring(self, prefetched: int) -> tuple[dict[Page, int], dict[Page, int] | None]:
        """Pages and ring slots left by a whole pass: those of the ``prefetched`` parts, and the last that the pass
        itself used (none before the first). Nothing after an on-demand pass."""
        if not self._streaming:
            return {}, None
        store, layout = self.model.pages, self._schedules.layout
        num_parts, ring = len(layout.parts), len(store.ring)
        pages, ahead = layout.streamed[::num_parts], prefetched // num_parts
        used = range(max(0, len(pages) + ahead - ring) if self._position else len(pages), len(pages))
        at = self._position - len(layout.streamed)
        return (
            {pages[k]: store.ring_page(k, self._position) for k in range(ahead)},
            {pages[k]: store.ring_page(k, at) for k in used},
        )

    def _follow_residents(self) -> None:
        """Rebuild the layout of streamed pages if the resident pages have changed since the last whole pass."""
        model, residency = self.model, None if self._experts is None else self._experts.residency
        if residency is not None and residency.version != self._residents:
            loaded, placement = model.layout, moved(model.placement, residency.pages())
            layout = layout_of(model.profile, self._policy, model.dtype, placement=placement)
            self._schedules.use(replace(layout, ring_slots=loaded.ring_slots, pinned_slots=loaded.pinned_slots))
            self._residents = residency.version
            model.pages.follow(layout.streamed, layout.computed)

    def land(self, launched: PackedPass) -> tuple[Timeline, list[list[int]]]:
        """Wait for a pass; return its timeline and, per micro-batch, the tokens that follow its completing chunks in
        order, `SequenceChunk.samples` each."""
        timeline = self._finish(launched)
        return timeline, [mb.sampled.tolist() for mb in launched.micro_batches]

    def drain(self, launched: PackedPass) -> None:
        """Wait for a pass whose tokens are discarded; returns at once if a failure has ended all passes."""
        if not self.model.executor.broken:
            self._finish(launched)

    def _finish(self, launched: PackedPass) -> Timeline:
        timeline = self.model.executor.finish(require(launched.in_flight))
        RESULTS.release()
        if launched.watch is not None:
            launched.watch.finish()
        return timeline

    @property
    def stalls(self) -> dict[str, float]:
        """Counts and seconds of expert transfers in on-demand passes."""
        return {} if self.model.pager is None else self.model.pager.stats.as_dict()

    def range_lost(self) -> str:
        """Describe where hidden states first exceeded the range of float16, as a clause for an error; empty unless in
        mixed precision. Complete for the tokens of every pass that has landed."""
        finite = self.model.operations.finite
        if finite is None:
            return ""
        lost = (~finite.isfinite()).nonzero().flatten().tolist()
        where = "the head" if not lost else f"layer {lost[0] - 1}" if lost[0] else "the embedding"
        return (
            f" (first in {where}; float16 computes this bfloat16 checkpoint, a policy's weight_dtype float32 is wider)"
        )

    def _shape(self, load: PackedPlan, mb: MicroBatch) -> MicroBatchShape:
        """Context tokens are 0 where keys and values do not cross the link, so that passes share schedules."""
        added = mb.added if self.model.layout.context_crosses else None
        context = mb.context if added is not None else None
        return MicroBatchShape(
            tokens=load.tokens,
            prefill_only=load.prefill_only,
            samples=self.keeps_hidden or mb.sampled.numel() + mb.targets.numel() + mb.pooled_rows.numel() > 0,
            context=0 if context is None else context.tokens,
            continues=context is not None and load.continues,
            device_tokens=0 if added is None else added.device_count,
            device_context=0 if context is None else context.stays,
        )

    def _find_context(self, mb: MicroBatch, chunks: Sequence[Chunk]) -> None:
        on_device, size = self._policy.attention_device == "gpu", self._policy.kv_block_size
        host_slots = self.pool.host_blocks * size
        if on_device:
            mb.added = find_added(mb.cache_slots, host_slots=host_slots)
        if on_device or (mb.prefill_only and mb.crossing is not None):
            window, form = self.model.profile.window, self.model.prompt_form
            mb.context = find_context(chunks, block_size=size, window=window, host_slots=host_slots, form=form)


def _results(
    plans: Sequence[MicroBatchPlan], choose: Choose, score: Score | None, pool_hidden: PoolHidden | None
) -> Results:
    """What takes the results of micro-batches by their number, for `Operations.bind`."""
    completing = [[SampledRow(chunk, at) for chunk in load.chunks for at in range(chunk.samples)] for load in plans]

    def sample(j: int, first: int, logits: Tensor) -> Tensor:
        return choose(completing[j][first : first + len(logits)], logits)

    def note(j: int, first: int, logits: Tensor, targets: Tensor) -> None:
        require(score)(plans[j].chunks, first, logits, targets)

    def pool(j: int, hidden: Tensor) -> None:
        require(pool_hidden)(plans[j].chunks, hidden)

    return sample, note, pool


def _chunk(chunk: SequenceChunk) -> Chunk:
    sequence, scored, pooled = chunk.sequence, chunk.scored, chunk.pooled
    return Chunk(
        token_ids=chunk.token_ids,
        start=chunk.start,
        blocks=sequence.blocks,
        slot=sequence.slot,
        samples=chunk.samples,
        decodes=chunk.decodes,
        targets=sequence.request.token_ids[scored.start : scored.stop] if scored else (),
        first_scored=scored.start - 1 - chunk.start if scored else 0,
        reaches=chunk.reaches,
        pooled=range(pooled.start - chunk.start, pooled.stop - chunk.start) if pooled else range(0),
        window_blocks=() if sequence.window is None else sequence.window.blocks,
        window_first=0 if sequence.window is None else sequence.window.first,
    )
