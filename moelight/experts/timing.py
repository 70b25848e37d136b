"""Seconds of a routing trace on a machine: what computing takes by the ledger, and what waits for pages.

Knows the ledger (``hrm``) and one clock for one link. Refuses to know who is resident.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.experts.access import FloatArray, IntArray
from moelight.hrm import costs
from moelight.hrm.acts import KERNELS, Acts
from moelight.hrm.estimate import acts_of
from moelight.hrm.speeds import Unit, speeds_of
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile

# A trace does not say how long its sequences are. Attention over so many tokens is what they are taken to cost.
CONTEXT = 512
HOST_SHARE = 0.8  # of host memory that experts may take beside a GPU; what has no room there comes from disk


class Machine:
    """What the tokens of a trace cost on one machine with one model.

    Attributes:
        page_bytes: of one expert. top_k: experts of a token.
        fetch_s: seconds of one page, over the link or from the disk, whichever binds.
        discrete: whether there is a GPU, so that a missing expert may be computed where it lies.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile) -> None:
        """Raises ConfigError: the model has no experts, or the machine nothing that they could come from."""
        if not model.num_moe_layers:
            raise ConfigError(f"the model {model.name} has no experts")
        speeds, self.discrete = speeds_of(hardware), hardware.tier("device") is not None
        near = "gpu" if self.discrete else "cpu"
        self._acts = acts_of(model, Policy(model=model.name, attention_device=near, ffn_device=near), speeds)
        self.model, self.layers = model, tuple(np.flatnonzero(model.moe_layers).tolist())
        self.page_bytes, self.top_k = self._acts.page_bytes(), model.router.top_k
        self.fetch_s = _fetch_s(self._acts, hardware)
        self._near, self._cpu = np.zeros(1), np.zeros(1)
        self.lead_s = lru_cache(maxsize=1 << 14)(self._lead_s)

    def _lead_s(self, row: int, tokens: float) -> float:
        """Seconds between the experts of the layer with experts before and the choice of layer number ``row`` of those
        with experts, for ``tokens``: attention and router, layers without experts, and the head between two passes."""
        acts, layer = self._acts, self.layers[row]
        first = 0 if row == 0 else self.layers[row - 1] + 1
        passed = [*range(self.layers[-1] + 1, self.model.num_layers)] if row == 0 else []
        seconds = float(acts.head_s(tokens)) if row == 0 else 0.0
        for each in (*passed, *range(first, layer + 1)):
            elements = costs.layer_elements(self.model)[each]
            seconds += float(acts.before_s(elements, tokens))
            seconds += float(acts.decode_attention_s(acts.near, tokens, CONTEXT))
            seconds += float(acts.after_s(elements, tokens, moe=self.model.moe_layers[each]))
        return seconds

    def crossing_s(self, tokens: float) -> float:
        """Seconds that the hidden states of ``tokens`` take from a GPU to the CPU and back."""
        size = tokens * costs.residual_bytes(self.model, self._acts.dtype, 1)
        return float(self._acts.down_s(size) + self._acts.up_s(size))

    def near_s(self, counts: IntArray) -> FloatArray:
        """Seconds of experts that are near, [n], for ``counts`` tokens [n] each."""
        if counts.size and int(counts.max()) >= len(self._near):
            self._near = self._table(self._acts.near, int(counts.max()))
        return self._near[counts]

    def cpu_s(self, counts: IntArray) -> FloatArray:
        """The same where the CPU computes them in host memory."""
        if counts.size and int(counts.max()) >= len(self._cpu):
            self._cpu = self._table(self._acts.speeds.cpu, int(counts.max()))
        return self._cpu[counts]

    def _table(self, unit: Unit, most: int) -> FloatArray:
        """Seconds of one expert by its number of tokens, [> most]."""
        rows = np.arange(2 * most + 1, dtype=np.float64)
        each = unit.product_s(rows, costs.page_elements(self.model), self._acts.page_dtype, experts=True)
        launches = 0 if unit.experts is not None else KERNELS["expert"]  # else measured with the experts
        found: FloatArray = np.where(rows > 0, each + launches * unit.launch_s, 0.0)
        return found


def _fetch_s(acts: Acts, hardware: HardwareProfile) -> float:
    """Seconds of a page that is not near: from the disk; or over the link, with the share that host memory has no room
    for as slow as the disk."""
    size, disk, host = acts.page_bytes(), acts.speeds.disk, hardware.tier("host")
    if not acts.discrete:
        if not disk:
            raise ConfigError(f"the machine {hardware.name} has no tier 'disk' for experts to come from; describe it")
        return size / disk
    pages = acts.model.num_moe_layers * acts.model.experts.num_experts
    room = HOST_SHARE * (host.capacity_bytes if host is not None else 0) / (pages * size)
    link = float(acts.up_s(size))
    away = max(0.0, 1.0 - room)
    if away and not disk:
        raise ConfigError(f"the experts of {acts.model.name} fit neither {hardware.name}'s host memory nor a disk")
    return link if not away else (1.0 - away) * link + away * max(link, size / disk)


class Clock:
    """The time of one run: a unit that computes, and a link that brings one page after the other.

    What a batch misses comes before guesses that have not begun; a guess under way is not broken off. Experts that are
    near are computed while the others come, and those when all of them are there.

    Attributes:
        now: seconds since the run began. stall_s: of those, the ones in which nothing could be computed.
        guessed: pages that came because of a guess, or are on their way.
    """

    def __init__(self, machine: Machine, *, overlap: bool) -> None:
        self._machine, self._overlap = machine, overlap
        self.now, self.stall_s, self.guessed = 0.0, 0.0, 0
        self._link_free, self._routed = 0.0, 0.0
        self._waiting: deque[int] = deque()  # guessed, not begun
        self._issued: dict[int, float] = {}  # and when
        self._arrivals: dict[int, float] = {}  # of guesses under way

    def route(self, row: int, tokens: float) -> None:
        """Until the router of layer number ``row`` has chosen for ``tokens``."""
        self.now += self._machine.lead_s(row, tokens)
        self._routed = self.now
        while self._waiting:
            begin = max(self._link_free, self._issued[self._waiting[0]])
            if begin >= self.now:
                break
            self._begin(self._waiting.popleft(), begin)

    def forget(self, keys: Iterable[int]) -> None:
        """``keys`` are no longer resident; guesses of them that have not begun never will."""
        for key in keys:
            self._arrivals.pop(key, None)
            if self._issued.pop(key, None) is not None:
                self._waiting.remove(key)

    def guess(self, keys: Iterable[int]) -> None:
        """Fetch ``keys`` when the link has nothing else to do; they were asked for when the last router had chosen."""
        for key in keys:
            self._waiting.append(key)
            self._issued[key] = self._routed
        if not self._overlap:
            while self._waiting:
                self._begin(self._waiting.popleft(), max(self._link_free, self.now))
            self._wait(max(self.now, self._link_free))

    def serve(
        self, hits: list[int], hit_counts: IntArray, fetched: IntArray, computed_s: float = 0.0
    ) -> None:
        """The experts of one batch.

        Args:
            hits: resident keys, with ``hit_counts`` [n] tokens each; some may still be on their way.
            fetched: tokens [m] of each expert that is fetched now.
            computed_s: seconds that the CPU takes for the others.
        """
        seconds = self._machine.near_s(hit_counts)
        late, there = self._late(hits)
        if len(fetched):
            self._link_free = max(self._link_free, self.now) + len(fetched) * self._machine.fetch_s
            there = self._link_free
        ready_s, rest_s = float(seconds.sum()), float(self._machine.near_s(fetched).sum())
        if late:
            after = float(seconds[late].sum())
            ready_s, rest_s = ready_s - after, rest_s + after
        if not self._overlap:
            self._wait(there)
        begun = self.now
        self.now += ready_s
        self._wait(max(there, begun + computed_s if computed_s else 0.0))
        self.now += rest_s

    def _late(self, hits: list[int]) -> tuple[list[int], float]:
        """Places of ``hits`` that are not there yet, and when the last of them will be."""
        if not self._arrivals and not self._issued:
            return [], self.now
        late, there = [], self.now
        for place, key in enumerate(hits):
            if key in self._issued:
                self._waiting.remove(key)
                self._begin(key, max(self._link_free, self.now))
            arrival = self._arrivals.pop(key, 0.0)
            if arrival > self.now:
                late.append(place)
                there = max(there, arrival)
        return late, there

    def _begin(self, key: int, at: float) -> None:
        del self._issued[key]
        self._link_free = self._arrivals[key] = at + self._machine.fetch_s
        self.guessed += 1

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.stall_s += until - self.now
            self.now = until
