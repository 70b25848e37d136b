"""Expert tasks of one micro-batch or of a whole pass, on the compute unit or on the CPU beside it, as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from moelight.core.schedule import Task, TaskKind
from moelight.kernels.products import Workspace
from moelight.models.decoder import Decoder
from moelight.models.moe import MoEWeights, SplitMoE, add_experts, moe_forward
from moelight.paging.store import PageStore
from moelight.runtime.lanes import SKIPPED, Outcome
from moelight.runtime.microbatch import SavedActivations, require
from moelight.runtime.on_demand import PassPages

CPU_ROWS = 256  # torch caches a CPU kernel per row count, and more rows at once are no faster

MoEOperation = Callable[[Task, PassPages], Outcome]


class MoEOps:
    """Operations after attention. ``host_space``: buffers of the CPU's experts beside a device; ``kept``: activations,
    if experts run once per pass, at most ``most_rows`` rows (on a CPU `CPU_ROWS`) at a time; ``wide_layers``: layers
    with an expert that float16 does not hold, which grow as pages are read."""

    def __init__(
        self,
        decoder: Decoder,
        pages: PageStore,
        *,
        host_space: Workspace | None,
        kept: SavedActivations | None,
        most_rows: int,
        wide_layers: Collection[int] = (),
    ) -> None:
        self._decoder, self._pages, self._kept, self._most_rows = decoder, pages, kept, most_rows
        self._host_space, self._wide_layers = host_space, wide_layers
        self._moe, self._num_experts = decoder.model.moe_layers, decoder.model.experts.num_experts
        self._top_k, self._discrete = decoder.model.router.top_k, pages.fast_tier == "device"
        self._found: dict[tuple[int, int, int], MoEWeights] = {}
        self._residents = 0
        self.table: Mapping[TaskKind, MoEOperation] = {
            TaskKind.POST_ATTENTION: self._post_attention,
            TaskKind.ROUTE: self._route,
            TaskKind.PREDICT_EXPERTS: self._predict_experts,
            TaskKind.RESIDENT_EXPERTS: self._resident_experts,
            TaskKind.EXPERTS: self._experts,
            TaskKind.OFFLOAD_HIDDEN: self._offload_hidden,
            TaskKind.CPU_EXPERTS: self._cpu_experts,
            TaskKind.LOAD_EXPERTS: self._load_experts,
            TaskKind.COMBINE: self._combine,
        }

    def _post_attention(self, task: Task, pass_pages: PassPages) -> None:
        mb = pass_pages.micro_batches[task.micro_batch]
        experts = self._layer_experts(task.layer, pass_pages)
        self._decoder.post_attention(task.layer, mb.hidden, require(mb.attn), experts, pass_pages.watch)
        if mb.crossing is None:
            mb.attn = None

    def _route(self, task: Task, pass_pages: PassPages) -> None:
        mb = pass_pages.micro_batches[task.micro_batch]
        routed = self._decoder.route(task.layer, mb.hidden, require(mb.attn))
        if mb.crossing is None:
            mb.attn = None
        if pass_pages.watch is not None:
            pass_pages.watch(task.layer, routed)
        if mb.kept is None:
            mb.routed = routed
        else:
            mb.kept.keep(routed)
        last = task.micro_batch + 1 == len(pass_pages.micro_batches)
        if pass_pages.small is not None and last and not self._discrete:
            pass_pages.small.demand(task.layer)  # begin reads at once, before the next task

    def _predict_experts(self, task: Task, pass_pages: PassPages) -> None:
        """Run the router of the next MoE layer on the hidden state without this layer's experts."""
        coming = next(other for other in range(task.layer + 1, len(self._moe)) if self._moe[other])
        weights, ids = self._decoder.predict_experts(coming, pass_pages.micro_batches[task.micro_batch].hidden)
        require(pass_pages.small).predict_experts(coming, task.micro_batch, ids.cpu().numpy(), weights.cpu().numpy())

    def _resident_experts(self, task: Task, pass_pages: PassPages) -> None:
        mb, small = pass_pages.micro_batches[task.micro_batch], require(pass_pages.small)
        first_row = sum(earlier.tokens for earlier in pass_pages.micro_batches[: task.micro_batch]) * self._top_k
        experts, late = small.experts(task.layer), small.demand(task.layer).late
        mb.begun = SplitMoE(require(mb.routed), experts, late, self._decoder.space, first_row)

    def _experts(self, task: Task, pass_pages: PassPages) -> None:
        """The task is one micro-batch without the experts left to the CPU, or the whole pass."""
        if task.micro_batch >= 0:
            mb = pass_pages.micro_batches[task.micro_batch]
            if mb.begun is not None:
                mb.begun.end(into=mb.hidden)
                mb.begun = None
            else:
                experts = self._layer_experts(task.layer, pass_pages)
                moe_forward(require(mb.routed), experts, self._decoder.space, into=mb.hidden)
            return
        experts = self._layer_experts(task.layer, pass_pages)
        everyone = require(self._kept).rows(0, sum(mb.tokens for mb in pass_pages.micro_batches))
        on_cpu = everyone.sums.device.type == "cpu"
        most = min(self._most_rows, CPU_ROWS) if on_cpu else self._most_rows
        add_experts(everyone.sums, everyone.routed, experts, self._decoder.space, most_rows=most)
        for mb in pass_pages.micro_batches:
            mb.hidden += require(mb.kept).sums.to(mb.hidden.dtype)

    def _offload_hidden(self, task: Task, pass_pages: PassPages) -> Outcome:
        mb = pass_pages.micro_batches[task.micro_batch]
        if not self._some_on_cpu(task.layer, pass_pages):
            return SKIPPED
        mb.routed_host = require(mb.crossing).take_routed(require(mb.routed))
        return None

    def _cpu_experts(self, task: Task, pass_pages: PassPages) -> Outcome:
        if not self._some_on_cpu(task.layer, pass_pages):
            return SKIPPED
        mb = pass_pages.micro_batches[task.micro_batch]
        routed, space = require(mb.routed_host), require(self._host_space)
        if self._pages.fast_tier == "host":
            experts = self._layer_experts(task.layer, pass_pages)
        elif pass_pages.small is not None:
            experts = MoEWeights(pass_pages.small.demand(task.layer).on_cpu)
        else:
            experts = MoEWeights(self._pages.computed_experts(task.layer, self._num_experts))
        routed = replace(routed, x=routed.x.to(space.inputs.dtype))  # mixed precision: the CPU computes in bfloat16
        mb.experts_host = require(mb.crossing).experts_output(routed.x.shape, routed.x.dtype)
        mb.experts_host.copy_(moe_forward(routed, experts, space))
        return None

    def _load_experts(self, task: Task, pass_pages: PassPages) -> Outcome:
        mb = pass_pages.micro_batches[task.micro_batch]
        if not self._some_on_cpu(task.layer, pass_pages):
            return SKIPPED
        mb.experts = require(mb.experts_host).to(mb.hidden.device, non_blocking=True)
        return None

    def _combine(self, task: Task, pass_pages: PassPages) -> Outcome:
        """``experts`` is kept until it is replaced, because streams may still read it."""
        mb = pass_pages.micro_batches[task.micro_batch]
        mb.routed = None
        if not self._some_on_cpu(task.layer, pass_pages):
            return SKIPPED
        mb.hidden += require(mb.experts)
        return None

    def _some_on_cpu(self, layer: int, pass_pages: PassPages) -> bool:
        if self._pages.fast_tier == "host":
            return True
        if pass_pages.small is None:
            return layer in self._pages.layers_computed
        return bool(pass_pages.small.demand(layer).on_cpu)

    def _layer_experts(self, layer: int, pass_pages: PassPages) -> MoEWeights:
        """The pages of the layer have been read, so ``wide`` is known."""
        if not self._moe[layer]:
            return MoEWeights()
        experts = self._placed_experts(layer, pass_pages)
        if layer in self._wide_layers:
            experts.wide = True
        return experts

    def _placed_experts(self, layer: int, pass_pages: PassPages) -> MoEWeights:
        if pass_pages.small is not None:
            return pass_pages.small.experts(layer)
        key = (layer, self._pages.phase(pass_pages.position), pass_pages.residents)
        if key not in self._found:
            if key[2] != self._residents:
                self._found, self._residents = {}, key[2]
            self._found[key] = MoEWeights(self._pages.layer_experts(layer, self._num_experts, pass_pages.position))
        return self._found[key]
