"""Seconds of a routing trace on a machine: computation by the ledger (``hrm``), and stalls for pages by one clock for
one link; does not depend on residency."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.experts.eviction import FloatArray, IntArray
from moelight.experts.policy import ScheduleRules
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.machine_model import speeds_of
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile

# Assumed attention context in tokens; a trace does not record sequence lengths.
CONTEXT = 512
HOST_SHARE = 0.8  # of host memory that experts may use beside a GPU; other experts are read from disk


class MachineCosts:
    """Costs of the tokens of a trace, on one machine with one model.

    Attributes:
        page_bytes: bytes of one expert.
        top_k: experts per token.
        fetch_s: seconds of one page over the link or from the disk, whichever is slower.
        discrete: True if there is a GPU, so that a missing expert may be computed where it is stored.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile) -> None:
        """Raises ConfigError if the model has no experts, or the machine has no tier to read them from."""
        if not model.num_moe_layers:
            raise ConfigError(f"the model {model.name} has no experts")
        speeds, self.discrete = speeds_of(hardware), hardware.tier("device") is not None
        near = "gpu" if self.discrete else "cpu"
        self._cost_model = cost_model_of(
            model, Policy(model=model.name, attention_device=near, ffn_device=near), speeds
        )
        self.model, self.layers = model, tuple(np.flatnonzero(model.moe_layers).tolist())
        self.page_bytes, self.top_k = self._cost_model.page_bytes(), model.router.top_k
        self.fetch_s = _fetch_s(self._cost_model, hardware)
        self.lead_s, self._table_s = lru_cache(maxsize=1 << 14)(self._lead_s), lru_cache(self._expert_s)

    def _lead_s(self, row: int, tokens: float) -> float:
        """Seconds for ``tokens`` from the experts of one MoE layer to the routing of the next, MoE layer number
        ``row``: attention and router, layers without experts, and the head between two passes."""
        cost_model, layer = self._cost_model, self.layers[row]
        first = 0 if row == 0 else self.layers[row - 1] + 1
        passed = [*range(self.layers[-1] + 1, self.model.num_layers)] if row == 0 else []
        seconds = float(cost_model.head_s(tokens)) if row == 0 else 0.0
        for index in (*passed, *range(first, layer + 1)):
            elements, kind = costs.layer_elements(self.model)[index], costs.layer_attention(self.model)[index]
            seconds += float(cost_model.before_s(elements, tokens))
            if kind is not None:
                seconds += float(cost_model.decode_attention_s(cost_model.expert_unit, tokens, CONTEXT, kind))
            seconds += float(cost_model.states_s(tokens, CONTEXT, 0.0, 1.0, costs.layer_states(self.model)[index]))
            seconds += float(cost_model.after_s(elements, tokens, moe=self.model.moe_layers[index]))
        return seconds

    def schedule(self, mode: str) -> ScheduleRules:
        """Return ``mode`` with a threshold of half the time of a transfer, so that ``hybrid`` decides by cost alone."""
        if mode != "hybrid":
            return ScheduleRules(mode=mode)
        return ScheduleRules(mode=mode, offload_threshold_ms=float(f"{0.5e3 * self.fetch_s:.2g}"))

    def crossing_s(self, tokens: float) -> float:
        """Seconds to transfer the hidden states of ``tokens`` from a GPU to the CPU and back."""
        size = tokens * costs.residual_bytes(self.model, self._cost_model.dtype, 1)
        return float(self._cost_model.down_s(size) + self._cost_model.up_s(size))

    def resident_s(self, counts: IntArray) -> FloatArray:
        """Seconds of resident experts, [n], for ``counts`` tokens [n] each."""
        return self._table_s(True, int(counts.max(initial=0)).bit_length())[counts]

    def cpu_s(self, counts: IntArray) -> FloatArray:
        """Seconds of experts that the CPU computes in host memory, [n], for ``counts`` tokens [n] each."""
        return self._table_s(False, int(counts.max(initial=0)).bit_length())[counts]

    def _expert_s(self, resident: bool, bits: int) -> FloatArray:
        """Seconds of one expert by its number of tokens, [2^bits]."""
        unit = self._cost_model.expert_unit if resident else self._cost_model.speeds.cpu
        rows = np.arange(1 << bits, dtype=np.float64)
        seconds: FloatArray = np.where(rows > 0, self._cost_model.expert_s(unit, rows), 0.0)
        return seconds


def _fetch_s(cost_model: CostModel, hardware: HardwareProfile) -> float:
    """Seconds to transfer an offloaded page: from the disk; or over the link, where the share that exceeds host memory
    is limited by the disk."""
    size, disk, host = cost_model.page_bytes(), cost_model.speeds.disk, hardware.tier("host")
    if not cost_model.discrete:
        if not disk:
            raise ConfigError(f"the machine {hardware.name} has no tier 'disk' for experts to come from; describe it")
        return size / disk
    pages = cost_model.model.num_moe_layers * cost_model.model.experts.num_experts
    room = HOST_SHARE * (host.capacity_bytes if host is not None else 0) / (pages * size)
    link = float(cost_model.up_s(size))
    on_disk = max(0.0, 1.0 - room)
    if on_disk and not disk:
        raise ConfigError(
            f"the experts of {cost_model.model.name} fit neither {hardware.name}'s host memory nor a disk"
        )
    return link if not on_disk else (1.0 - on_disk) * link + on_disk * max(link, size / disk)


class Clock:
    """Simulated time of one run: a compute unit, and a link that transfers one page after the other, in request order.

    Resident experts are computed while the missing ones are transferred; the missing ones are computed when all have
    arrived. Predictions are for the layer visited next; the transfer of a wrong page is not aborted, and the page is
    dropped when that layer has routed.

    Attributes:
        now: seconds since the run began.
        stall_s: seconds of ``now`` without computation.
        pages: pages transferred over the link.
    """

    def __init__(self, machine: MachineCosts, *, overlap: bool) -> None:
        self._machine, self._overlap = machine, overlap
        self.now, self.stall_s, self.pages = 0.0, 0.0, 0
        self._link_free, self._routed = 0.0, 0.0
        self._arrivals: dict[int, float] = {}  # arrival of predicted pages, by key

    def route(self, row: int, tokens: float) -> None:
        """Advance to the time at which the router of MoE layer number ``row`` has chosen for ``tokens``."""
        self.now += self._machine.lead_s(row, tokens)
        self._routed = self.now

    def serve(self, hits: IntArray, misses: IntArray, missing: Iterable[int], computed_s: float = 0.0) -> None:
        """Advance by the experts of one batch: ``hits`` [n] and ``misses`` [m] are tokens per expert, ``missing`` the
        keys of the misses; the CPU computes all other experts in ``computed_s``."""
        begun = arrived_s = self.now
        fetched = len(misses)
        if self._arrivals:
            arrivals = [self._arrivals[key] for key in missing if key in self._arrivals]
            fetched -= len(arrivals)
            arrived_s = max(arrivals, default=arrived_s)
            self._arrivals.clear()
        if fetched:
            arrived_s = self._fetch(fetched, self.now)
        if not self._overlap:
            self._wait(arrived_s)
            begun = self.now
        self.now += float(self._machine.resident_s(hits).sum())
        self._wait(max(arrived_s, begun + computed_s))
        self.now += float(self._machine.resident_s(misses).sum())

    def prediction(self, keys: Iterable[int]) -> None:
        """Prefetch ``keys`` after the misses of the last batch, requested at the time its router had chosen."""
        for key in keys:
            self._arrivals[key] = self._fetch(1, self._routed)
        if not self._overlap:
            self._wait(self._link_free)

    def _fetch(self, pages: int, at: float) -> float:
        self.pages += pages
        self._link_free = max(self._link_free, at) + pages * self._machine.fetch_s
        return self._link_free

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.stall_s += until - self.now
            self.now = until
