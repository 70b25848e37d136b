"""Expert tasks of one micro-batch or of a whole pass, on the compute unit or on the CPU beside it, as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moelight.core.schedule import Task, TaskKind
from moelight.core.units import align_up
from moelight.kernels.activations import Activation
from moelight.kernels.device import Device, on_host
from moelight.kernels.gpu.pages import ExpertTable
from moelight.kernels.products import Workspace
from moelight.models.decoder import Decoder
from moelight.models.expert import LayerExperts
from moelight.models.moe import Experts, SplitMoE, add_experts, grouped_forward, grouped_pages, moe_forward
from moelight.paging.store import PageStore
from moelight.runtime.host_copy import HostCopy
from moelight.runtime.lanes import SKIPPED, Outcome
from moelight.runtime.microbatch import MicroBatch, SavedActivations, require
from moelight.runtime.on_demand import PassPages

CPU_ROWS = 256  # torch caches a CPU kernel per row count, and more rows at once are no faster
_INDEX_ROW = 4  # experts of a row of the index: its address is a multiple of 16 bytes, as the kernels were compiled for

MoEOperation = Callable[[Task, PassPages], Outcome]


class LayerPages:
    """The pages of each layer's experts for the grouped kernels: one index int32 [layers, experts] on the device.

    Only tasks of the device lane call `of_pass` and `of_layer`. Their stream orders each copy into the index behind the
    kernels that read its former contents and ahead of those that read the new ones, so no thread waits for either.
    """

    def __init__(self, tables: Sequence[ExpertTable], activations: Sequence[Activation | None], experts: int) -> None:
        """``tables``, all of the same memory, and ``activations``: of every layer."""
        rows = align_up(experts, _INDEX_ROW)
        self._index = torch.full((len(tables), rows), -1, dtype=torch.int32, device=tables[0].table.device)
        self._layers = [
            table.chosen_by(row[:experts], by) for table, row, by in zip(tables, self._index, activations, strict=True)
        ]
        self._of_pass: tuple[Hashable, np.ndarray] = (None, np.zeros(0, dtype=np.int32))
        self._holds: np.ndarray | None = None  # the numbers that were copied last

    def of_pass(self, layer: int, key: Hashable, find: Callable[[], np.ndarray]) -> ExpertTable:
        """The experts of ``layer``, numbered by ``find()`` int32 [layers, experts]: the same for equal keys."""
        if self._of_pass[0] != key:
            self._of_pass = key, find()
        self._copy(self._index, self._of_pass[1])
        return self._layers[layer]

    def of_layer(self, layer: int, indices: np.ndarray) -> ExpertTable:
        """The experts of ``layer``, numbered by ``indices`` int32 [experts], which must not change later."""
        self._copy(self._index[layer], indices)
        return self._layers[layer]

    def _copy(self, into: Tensor, indices: np.ndarray) -> None:
        if indices is not self._holds:
            rows = np.full(into.shape, -1, dtype=np.int32)
            rows[..., : indices.shape[-1]] = indices
            into.copy_(Device(into.device).pinned(rows), non_blocking=True)
            self._holds = indices


class MoEOps:
    """Operations after attention. ``host_space``: buffers of the CPU's experts beside a device; ``saved``: activations,
    if experts run once per pass, over the first rows of ``hidden`` [T, H]; without grouped kernels at most
    ``most_rows`` rows (on a CPU `CPU_ROWS`) at a time; ``wide_layers``: layers with an expert that float16 does not
    hold, which grow as pages are read and are complete for a task whose pages have been."""

    def __init__(
        self,
        decoder: Decoder,
        pages: PageStore,
        *,
        host_space: Workspace | None,
        saved: SavedActivations | None,
        hidden: Tensor,
        most_rows: int,
        wide_layers: Collection[int] = (),
    ) -> None:
        self._decoder, self._pages, self._kept, self._most_rows = decoder, pages, saved, most_rows
        self._host_space, self._hidden, self._wide_layers = host_space, hidden, wide_layers
        self._moe, self._num_experts = decoder.model.moe_layers, decoder.model.experts.num_experts
        self._top_k, self._discrete = decoder.model.router.top_k, pages.fast_tier == "device"
        tables = self._tables() if self._discrete else None
        self._grouped = None if tables is None else LayerPages(tables, decoder.activations, self._num_experts)
        self._layer_experts: dict[tuple[int, int], list[LayerExperts]] = {}
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

    @property
    def grouped(self) -> bool:
        """True if the grouped kernels compute the experts of the device."""
        return self._grouped is not None

    def _tables(self) -> list[ExpertTable] | None:
        """The addresses of every layer's experts, those of the first with experts for one without; None unless the
        grouped kernels compute all of them, and those of a layer lie alike."""
        decoder, tables = self._decoder, dict[int, ExpertTable]()
        by = [activation for activation, moe in zip(decoder.activations, self._moe, strict=True) if moe]
        if None in by:
            return None
        ids = [decoder.paged.layout_id(layer) if moe else None for layer, moe in enumerate(self._moe)]
        for layout_id, moe in zip(ids, self._moe, strict=True):
            if not moe or layout_id in tables:
                continue
            if layout_id is None:
                return None
            memory = decoder.paged.holding(layout_id, self._pages.memory)
            if not memory:  # the CPU computes all pages of this layout
                continue
            table = grouped_pages(decoder.paged.of_layout(layout_id, memory), decoder.dtype, by)
            if table is None:
                return None
            tables[layout_id] = table
        first = next(iter(tables.values()), None)
        if first is None:
            return None
        return [first if layout_id is None else tables.get(layout_id, first) for layout_id in ids]

    def _post_attention(self, task: Task, pass_pages: PassPages) -> None:
        mb = pass_pages.micro_batches[task.micro_batch]
        experts, attention = self.experts_of(task.layer, pass_pages), self._attended(task.layer, mb)
        wide = task.layer in self._wide_layers
        watch = None if pass_pages.watch is None else partial(pass_pages.watch, task.micro_batch)

        def compute(attention: Tensor | None) -> Sequence[Tensor]:
            running = require(mb.running)
            self._decoder.post_attention(task.layer, mb.hidden, attention, experts, running, watch, wide=wide)
            return ()

        if mb.graphs is None:
            compute(attention)
        else:  # the index of the pages is kept, so its address names no other one
            key = task.kind, task.layer, mb.row, mb.tokens, wide, id(experts) if experts else None
            mb.graphs.run(key, compute, (require(attention),), name="after", row=mb.row, keeps=experts)
        if mb.crossing is None:
            mb.attn = None

    def _attended(self, layer: int, mb: MicroBatch) -> Tensor | None:
        """The attention output of ``layer``; None if it has no attention over the paged cache."""
        return require(mb.attn) if self._decoder.model.attention_of(layer).num_heads else None

    def _route(self, task: Task, pass_pages: PassPages) -> None:
        mb = pass_pages.micro_batches[task.micro_batch]
        routed = self._decoder.route(task.layer, mb.hidden, self._attended(task.layer, mb), require(mb.running))
        if mb.crossing is None:
            mb.attn = None
        if pass_pages.watch is not None:
            pass_pages.watch(task.micro_batch, task.layer, routed)
        routed = routed.on_rank(self._decoder.ranks, self._num_experts)
        if mb.saved is None:
            mb.routed = routed
        else:
            mb.saved.keep(routed)
        if pass_pages.small is not None:
            mb.chosen = HostCopy(routed.ids, routed.weights)
            if not self._discrete and task.micro_batch + 1 == len(pass_pages.micro_batches):
                pass_pages.small.demand(task.layer)  # begin reads at once, before the next task

    def _predict_experts(self, task: Task, pass_pages: PassPages) -> None:
        """Run the router of the next MoE layer on the hidden state without this layer's experts."""
        coming = next(other for other in range(task.layer + 1, len(self._moe)) if self._moe[other])
        mb = pass_pages.micro_batches[task.micro_batch]
        weights, ids = self._decoder.predict_experts(coming, mb.hidden, require(mb.running))
        require(pass_pages.small).predict_experts(coming, task.micro_batch, HostCopy(ids, weights))

    def _resident_experts(self, task: Task, pass_pages: PassPages) -> None:
        mb, small = pass_pages.micro_batches[task.micro_batch], require(pass_pages.small)
        first_row = sum(earlier.tokens for earlier in pass_pages.micro_batches[: task.micro_batch]) * self._top_k
        experts = self._decoder.experts(task.layer, small.pages(task.layer))
        late = small.demand(task.layer).late
        mb.begun = SplitMoE(require(mb.routed), experts, late, self._decoder.space, first_row)

    def _experts(self, task: Task, pass_pages: PassPages) -> None:
        """The task is one micro-batch without the experts left to the CPU, or the whole pass."""
        if task.serves_all:
            self._experts_of_pass(task, pass_pages)
            return
        mb = pass_pages.micro_batches[task.micro_batch]
        if mb.begun is not None:
            mb.begun.end(into=mb.hidden)
            mb.begun = None
        else:
            experts, wide = self.experts_of(task.layer, pass_pages), task.layer in self._wide_layers
            moe_forward(require(mb.routed), experts, self._decoder.space, into=mb.hidden, wide=wide)

    def _experts_of_pass(self, task: Task, pass_pages: PassPages) -> None:
        """All micro-batches at once. The sums of experts in turns are added to the hidden states by the last turn."""
        experts, tokens = self.experts_of(task.layer, pass_pages), sum(mb.tokens for mb in pass_pages.micro_batches)
        if self._kept is None:  # a dense layer, whose micro-batches wait for its page
            for mb in pass_pages.micro_batches:
                moe_forward(require(mb.routed), experts, self._decoder.space)
            return
        everyone, wide, some = require(self._kept).rows(0, tokens), task.layer in self._wide_layers, task.experts
        if isinstance(experts, ExpertTable):
            hidden = self._hidden[:tokens]  # of the micro-batches one after another
            space, sums = self._decoder.space, everyone.sums
            grouped_forward(everyone.routed, experts, space, into=hidden, sums=sums, wide=wide, some=some)
            return
        if some is None or not some.start:
            everyone.sums.zero_()
        on_cpu = on_host(everyone.sums)
        max_rows = min(self._most_rows, CPU_ROWS) if on_cpu else self._most_rows
        if some is not None:
            experts = experts.only(some)
        add_experts(everyone.sums, everyone.routed, experts, self._decoder.space, most_rows=max_rows, wide=wide)
        for mb in pass_pages.micro_batches if some is None or some.stop == self._num_experts else ():
            mb.hidden += require(mb.saved).sums.to(mb.hidden.dtype)

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
            experts = self.experts_of(task.layer, pass_pages)
        elif pass_pages.small is not None:
            experts = self._decoder.experts(task.layer, pass_pages.small.demand(task.layer).on_cpu)
        else:
            computed = self._pages.computed_experts(task.layer, self._num_experts)
            experts = self._decoder.experts(task.layer, computed)
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

    def experts_of(self, layer: int, pass_pages: PassPages) -> Experts:
        """The experts of ``layer`` as the tasks of a pass use them; none of a layer without."""
        small, grouped = pass_pages.small, self._grouped
        if grouped is None or not self._moe[layer]:
            return self.layer_experts(layer, pass_pages)
        if small is not None:
            return grouped.of_layer(layer, small.demand(layer).memory)
        key = (self._pages.phase(pass_pages.position), pass_pages.residents)
        return grouped.of_pass(layer, key, lambda: self._pages.memory_of_experts(pass_pages.position))

    def layer_experts(self, layer: int, pass_pages: PassPages) -> LayerExperts:
        """`experts_of` without grouped kernels."""
        if not self._moe[layer]:
            return LayerExperts(())
        if pass_pages.small is not None:
            return self._decoder.experts(layer, pass_pages.small.pages(layer))
        key = (self._pages.phase(pass_pages.position), pass_pages.residents)
        if key not in self._layer_experts:
            if key[1] != self._residents:
                self._layer_experts, self._residents = {}, key[1]
            memory_indices = self._pages.memory_of_experts(pass_pages.position)
            pages = map(self._pages.pages_at, memory_indices)
            self._layer_experts[key] = [self._decoder.experts(layer, page) for layer, page in enumerate(pages)]
        return self._layer_experts[key][layer]
