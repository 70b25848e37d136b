"""On-demand passes as tasks; the first task that needs the demand of a layer computes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moelight.core.schedule import Task, TaskKind
from moelight.models.decoder import Watch
from moelight.models.moe import MoEWeights
from moelight.paging.ring import LayerDemand, RingPager
from moelight.runtime.lanes import SKIPPED, MovedBytes, Outcome
from moelight.runtime.microbatch import MicroBatch, require


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPages:
    """Micro-batches and page state of one pass, as its tasks use them.

    Attributes:
        position: position of the page stream at the start of the pass.
        small: None for a whole pass.
        residents: a number that changes whenever other pages are resident.
    """

    micro_batches: Sequence[MicroBatch]
    position: int
    small: OnDemandPass | None = None
    watch: Watch | None = None
    residents: int = 0


class OnDemandPass:
    """One on-demand pass that ``pager`` has begun; thread-safe."""

    def __init__(self, pager: RingPager, micro_batches: Sequence[MicroBatch]) -> None:
        self._pager, self._micro_batches = pager, micro_batches
        self._demands: dict[int, tuple[LayerDemand, MoEWeights]] = {}
        self._ahead: dict[int, int] = {}  # bytes prefetched for each layer
        self._turn = threading.Lock()

    def demand(self, layer: int) -> LayerDemand:
        """Demand of ``layer``, whose routers were the last to run."""
        return self._demand(layer)[0]

    def experts(self, layer: int) -> MoEWeights:
        return self._demand(layer)[1]

    def _demand(self, layer: int) -> tuple[LayerDemand, MoEWeights]:
        with self._turn:
            if layer not in self._demands:
                demand = self._pager.demand(layer, *routed_of(self._micro_batches))
                self._demands[layer] = demand, MoEWeights(demand.experts)
            return self._demands[layer]

    def fetch(self, task: Task) -> Outcome:
        """Transfer the missing pages of the layer over the task's lane; disk reads began with the demand."""
        demand, size = self.demand(task.layer), self._pager.store.page_bytes
        if task.kind is TaskKind.SEND_EXPERTS:
            for transfer in demand.transfers:
                transfer.into.copy_(require(transfer.source), non_blocking=True)
            return MovedBytes(len(demand.transfers) * size) if demand.transfers else SKIPPED
        if not demand.coming:
            return SKIPPED
        return MovedBytes(demand.read_pages * size, demand, demand.since_s)

    def fetch_ahead(self, task: Task) -> Outcome:
        """Prefetch the predicted pages of the layer over the task's lane; the prefetch may have begun before."""
        moved = self._begin_ahead(task.layer)
        return MovedBytes(moved) if moved else SKIPPED

    def predict_experts(self, layer: int, j: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Record the predicted routing ``ids`` and ``weights`` [T, k] of ``layer`` for micro-batch ``j``."""
        with self._turn:
            self._pager.residency.hint(layer, ids, weights)
        if j + 1 == len(self._micro_batches) and self._pager.store.fast_tier == "host":
            self._begin_ahead(layer)

    def _begin_ahead(self, layer: int) -> int:
        """The prefetch begins once, after the demand of the previous layer."""
        with self._turn:
            if layer not in self._ahead:
                self._ahead[layer] = 0 if layer in self._demands else self._pager.prefetch(layer)
            return self._ahead[layer]


def routed_of(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids int [T, k] and weights float32 [T, k] of the last routers, over all micro-batches."""
    routed = [require(mb.kept.routed if mb.kept is not None else mb.routed) for mb in micro_batches]
    ids = np.concatenate([each.ids.cpu().numpy() for each in routed])
    return ids, np.concatenate([each.weights.cpu().numpy() for each in routed])
