"""On-demand passes as tasks; the first task that needs the demand of a layer computes it.

Which pages move depends on what the routers choose, so some thread must wait for the choice: on a device the one that
fetches, and beside it those whose work needs the fetched pages. Tasks of the device only launch the copy of the choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moelight.core.schedule import Task, TaskKind
from moelight.models.moe import Routed
from moelight.paging.ring import LayerDemand, RingPager
from moelight.runtime.host_copy import HostCopy
from moelight.runtime.lanes import SKIPPED, MovedBytes, Outcome
from moelight.runtime.microbatch import MicroBatch, require


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPages:
    """Micro-batches and page state of one pass, as its tasks use them.

    Attributes:
        position: position of the page stream at the start of the pass.
        small: None for a whole pass.
        watch: called with a micro-batch, a layer and its routing.
        residents: a number that changes whenever other pages are resident.
    """

    micro_batches: Sequence[MicroBatch]
    position: int
    small: OnDemandPass | None = None
    watch: Callable[[int, int, Routed], None] | None = None
    residents: int = 0


class OnDemandPass:
    """One on-demand pass that ``pager`` has begun; thread-safe. No lock is held while the device is waited for."""

    def __init__(self, pager: RingPager, micro_batches: Sequence[MicroBatch]) -> None:
        self._pager, self._micro_batches = pager, micro_batches
        self._demands: dict[int, LayerDemand] = {}
        self._pages: dict[int, Sequence[Tensor | None]] = {}
        self._hints: defaultdict[int, list[HostCopy]] = defaultdict(list)  # predicted routing of each layer
        self._ahead: dict[int, int] = {}  # bytes prefetched for each layer
        self._turn = pager.residency.turn

    def demand(self, layer: int) -> LayerDemand:
        """Demand of ``layer``, whose routers were the last to run; the first call waits for what they chose."""
        if layer not in self._demands:
            ids, weights = routed_of(self._micro_batches)
            self._wait_for_hints(layer)
            with self._turn:
                if layer not in self._demands:
                    self._give_hints(layer)
                    self._demands[layer] = self._pager.demand(layer, ids, weights)
        return self._demands[layer]

    def pages(self, layer: int) -> Sequence[Tensor | None]:
        """The pages of the demanded experts of ``layer``; None for the others."""
        if layer not in self._pages:
            self._pages[layer] = self._pager.store.pages_at(self.demand(layer).memory)
        return self._pages[layer]

    def fetch(self, task: Task) -> Outcome:
        """Transfer the missing pages of the layer over the task's lane; disk reads began with the demand."""
        demand = self.demand(task.layer)
        if task.kind is TaskKind.SEND_EXPERTS:
            for transfer in demand.transfers:
                transfer.into.copy_(require(transfer.source), non_blocking=True)
            moved = sum(transfer.into.numel() for transfer in demand.transfers)
            return MovedBytes(moved) if demand.transfers else SKIPPED
        if not demand.coming and not demand.moves:
            return SKIPPED
        return MovedBytes(demand.read_bytes, demand, demand.since_s)

    def fetch_ahead(self, task: Task) -> Outcome:
        """Prefetch the predicted pages of the layer over the task's lane; the prefetch may have begun before."""
        moved = self._begin_ahead(task.layer)
        return MovedBytes(moved) if moved else SKIPPED

    def predict_experts(self, layer: int, j: int, routing: HostCopy) -> None:
        """Keep the predicted ``routing`` of ``layer`` for micro-batch ``j``, ids and weights [T, k], until something is
        fetched for the layer."""
        self._hints[layer].append(routing)
        if j + 1 == len(self._micro_batches) and self._pager.store.fast_tier == "host":
            self._begin_ahead(layer)

    def _begin_ahead(self, layer: int) -> int:
        """The prefetch begins once, after the demand of the previous layer."""
        self._wait_for_hints(layer)
        with self._turn:
            if layer not in self._ahead:
                self._give_hints(layer)
                self._ahead[layer] = 0 if layer in self._demands else self._pager.prefetch(layer)
            return self._ahead[layer]

    def _wait_for_hints(self, layer: int) -> None:
        for routing in tuple(self._hints[layer]):
            routing.wait()

    def _give_hints(self, layer: int) -> None:
        for routing in self._hints.pop(layer, ()):
            self._pager.residency.hint(layer, *routing.wait())


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids int [T, k] and weights float32 [T, k] of the last routers, over all micro-batches."""
    ids, weights = zip(*(require(mb.chosen).wait() for mb in micro_batches), strict=True)
    return np.concatenate(ids), np.concatenate(weights)
