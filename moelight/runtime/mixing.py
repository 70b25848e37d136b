"""Experts as tasks: of one micro-batch or of a whole pass at once, on the compute unit or on the CPU beside it.

Holds one table from task kind to work. Refuses to know attention and when pages move.

Legend: T tokens, H hidden, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moelight.core.schedule import Task, TaskKind
from moelight.kernels.products import Workspace
from moelight.memory.pages import PageStore
from moelight.models.decoder import Decoder
from moelight.models.moe import Experts, Routed, accumulate, mixture
from moelight.runtime.microbatch import Kept, MicroBatch, present

CPU_ROWS = 256  # torch keeps a kernel for every row count it meets on a CPU, and more rows at once are no faster there

MixingAct = Callable[[Task, Sequence[MicroBatch], int], None]


class KeptArena:
    """The ``mixture`` arena: what a pass keeps for experts that run once for all its micro-batches."""

    def __init__(self, arena: Tensor, *, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
        """``arena`` uint8, as large as `mixture_bytes` says for ``tokens``."""
        parts: list[Tensor] = []
        start = 0
        for width, kind in ((hidden, torch.float32), (top_k, torch.float32), (top_k, torch.int32), (hidden, dtype)):
            size = tokens * width * kind.itemsize
            parts.append(arena[start : start + size].view(kind).view(tokens, width))
            start += size
        self._sums, self._weights, self._ids, self._x = parts

    def rows(self, first: int, count: int) -> Kept:
        """The part of ``count`` tokens from row ``first`` of the pass on."""
        rows = slice(first, first + count)
        return Kept(
            routed=Routed(x=self._x[rows], weights=self._weights[rows], ids=self._ids[rows]), sums=self._sums[rows]
        )


class Mixing:
    """The acts after attention. ``host_space``: the CPU's own buffers, where it computes experts beside a device;
    ``kept``: where experts run once for a whole pass. They take ``most_rows`` rows at a time, on a CPU at most
    `CPU_ROWS`."""

    def __init__(
        self,
        decoder: Decoder,
        pages: PageStore,
        *,
        host_space: Workspace | None,
        kept: KeptArena | None,
        most_rows: int,
    ) -> None:
        self._decoder, self._pages, self._kept, self._most_rows = decoder, pages, kept, most_rows
        self._host_space = host_space
        self._found: dict[tuple[int, int], Experts] = {}
        self.table: Mapping[TaskKind, MixingAct] = {
            TaskKind.POST_ATTENTION: self._post_attention,
            TaskKind.ROUTE: self._route,
            TaskKind.EXPERTS: self._experts,
            TaskKind.OFFLOAD_HIDDEN: self._offload_hidden,
            TaskKind.CPU_EXPERTS: self._cpu_experts,
            TaskKind.LOAD_EXPERTS: self._load_experts,
            TaskKind.COMBINE: self._combine,
        }

    def _post_attention(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        mb = batch[task.micro_batch]
        experts = self._layer_experts(task.layer, position)
        self._decoder.post_attention(task.layer, mb.hidden, present(mb.attn), experts)
        if mb.crossing is None:
            mb.attn = None

    def _route(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        mb = batch[task.micro_batch]
        routed = self._decoder.route(task.layer, mb.hidden, present(mb.attn))
        if mb.crossing is None:
            mb.attn = None
        if mb.kept is None:
            mb.routed = routed
        else:
            mb.kept.keep(routed)

    def _experts(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        """On the compute unit: those of one micro-batch that the CPU leaves, or all of the whole pass."""
        experts = self._layer_experts(task.layer, position)
        if task.micro_batch >= 0:
            mb = batch[task.micro_batch]
            mixture(present(mb.routed), experts, self._decoder.space, into=mb.hidden)
            return
        everyone = present(self._kept).rows(0, sum(mb.tokens for mb in batch))
        on_cpu = everyone.sums.device.type == "cpu"
        most = min(self._most_rows, CPU_ROWS) if on_cpu else self._most_rows
        accumulate(everyone.sums, everyone.routed, experts, self._decoder.space, most_rows=most)
        for mb in batch:
            mb.hidden += present(mb.kept).sums.to(mb.hidden.dtype)

    def _offload_hidden(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        mb = batch[task.micro_batch]
        mb.routed_host = present(mb.crossing).take_routed(present(mb.routed))

    def _cpu_experts(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        mb, routed = batch[task.micro_batch], present(batch[task.micro_batch].routed_host)
        if self._pages.near == "host":
            experts = self._layer_experts(task.layer, position)
        else:
            experts = Experts(self._pages.computed_experts(task.layer, self._decoder.model.experts.num_experts))
        mb.experts_host = present(mb.crossing).experts_output(routed.x.shape)
        mb.experts_host.copy_(mixture(routed, experts, present(self._host_space)))

    def _load_experts(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        mb = batch[task.micro_batch]
        mb.experts = present(mb.experts_host).to(mb.hidden.device, non_blocking=True)

    def _combine(self, task: Task, batch: Sequence[MicroBatch], position: int) -> None:
        """``routed`` has been read by all; ``experts`` stays until its successor, for streams may still read it."""
        mb = batch[task.micro_batch]
        mb.hidden += present(mb.experts)
        mb.routed = None

    def _layer_experts(self, layer: int, position: int) -> Experts:
        model = self._decoder.model
        if not model.moe_layers[layer]:
            return Experts()
        key = (layer, self._pages.phase(position))
        if key not in self._found:
            self._found[key] = Experts(self._pages.layer_experts(layer, model.experts.num_experts, position))
        return self._found[key]
