"""Replay of a recorded trace under a policy: hits, misses and estimated seconds. A row of the trace is one batch of one
layer; an access is one distinct expert of it, as in `ExpertCache.access`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moelight.core.dtypes import dtype_named
from moelight.core.errors import ConfigError
from moelight.experts.cache import ExpertCache
from moelight.experts.eviction import IntArray
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy
from moelight.experts.predict import PrefetchConfidence
from moelight.experts.residency import Residency
from moelight.experts.timing import Clock, MachineCosts
from moelight.experts.trace import TraceRow, read_rows
from moelight.hrm import costs
from moelight.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """``layers`` of a trace, by their numbers in the model, with ``num_experts`` each; ``page_bytes`` of an expert and
    ``top_k`` of a token are None if no model was given."""

    layers: tuple[int, ...]
    num_experts: int
    page_bytes: int | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, model: ModelProfile) -> Shape:
        """Return the shape of all MoE layers of ``model``."""
        return cls(
            layers=tuple(np.flatnonzero(model.moe_layers).tolist()),
            num_experts=model.experts.num_experts,
            page_bytes=costs.moved_page_bytes(model, costs.page_dtype(model, dtype_named(model.dtype))),
            top_k=model.router.top_k,
        )


class Trace:
    """Re-iterable rows of a trace file, with layers numbered from 0 among the MoE layers.

    A file is read again for each iteration; input that can be read only once, such as a pipe, is kept in memory.
    Without a model, the layers are those that occur, and the largest id gives the number of experts.
    """

    def __init__(self, path: Path, model: ModelProfile | None = None) -> None:
        """Raises ConfigError if the trace cannot be read, does not match ``model``, or has no rows."""
        self.path = path
        self._name = "" if model is None else model.name
        self._kept = None if path.is_file() else list(read_rows(path))
        self.shape = self._seen() if model is None else Shape.of(model)
        self._row_of = {layer: row for row, layer in enumerate(self.shape.layers)}

    def _seen(self) -> Shape:
        layers: set[int] = set()
        highest = -1
        for row in self._read():
            layers.add(row.layer)
            highest = max(highest, int(row.ids.max(initial=-1)))
        if highest < 0:
            raise ConfigError(f"trace {self.path} has no rows with experts; record one with generate --routing-trace")
        return Shape(layers=tuple(sorted(layers)), num_experts=highest + 1)

    def _read(self) -> Iterable[TraceRow]:
        return read_rows(self.path) if self._kept is None else self._kept

    def __iter__(self) -> Iterator[TraceRow]:
        """Raises ConfigError if a row does not match the model."""
        for row in self._read():
            at, highest = self._row_of.get(row.layer), int(row.ids.max(initial=-1))
            if at is None:
                layers = self.shape.layers
                contiguous = len(layers) == layers[-1] - layers[0] + 1
                listing = f"{layers[0]} to {layers[-1]}" if contiguous else ", ".join(map(str, layers))
                self._refuse(row, f"layer {row.layer} is none of {self._name}'s; layers with experts are {listing}")
            if highest >= self.shape.num_experts:
                self._refuse(row, f"expert {highest}: {self._name} has {self.shape.num_experts} a layer")
            yield replace(row, layer=at)

    def _refuse(self, row: TraceRow, complaint: str) -> NoReturn:
        raise ConfigError(f"trace {self.path}:{row.line}: {complaint}; give the model that the trace is of")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one policy on one trace.

    Attributes:
        slots: capacity in experts at the start.
        page_bytes: size of one expert; None without a model.
        bytes: transferred for misses and predictions, each page once; None without a model.
        stall_s: seconds without computation while a page is transferred, of ``total_s``; None without a machine.
        tokens_per_s: tokens of the trace, prompts included, over ``total_s``; None without a machine.
        notes: parts of the policy that the replay could not follow.
    """

    policy: str
    accesses: int
    hits: int
    misses: int
    evictions: int
    max_resident: int
    slots: int
    page_bytes: int | None = None
    bytes: int | None = None
    stall_s: float | None = None
    total_s: float | None = None
    tokens_per_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0 without accesses."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of all slots; None without a model."""
        return None if self.page_bytes is None else self.slots * self.page_bytes

    def as_dict(self) -> dict[str, Any]:
        names = ("policy", "accesses", "hits", "misses", "hit_rate", "evictions", "max_resident", "bytes", "stall_s")
        return {name: getattr(self, name) for name in (*names, "tokens_per_s")}


class Replay:
    """Replay of one policy over a trace; at the start (``begins_with``) only the pins of the policy are resident.

    The CPU computes misses only on a machine with a GPU to compare costs; otherwise every miss is transferred.
    Predicted experts are prefetched beside the cache, as in the engine: a prefetch shortens misses and adds no hits.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        shape: Shape,
        machine: MachineCosts | None = None,
        *,
        cache: ExpertCache | None = None,
    ) -> None:
        """``cache`` replaces the cache that ``policy`` describes."""
        self.policy, self.shape = policy, shape
        layers, experts = len(shape.layers), shape.num_experts
        self._slots, self._most = policy.slots(layers, experts, shape.page_bytes), 0
        self._residency = Residency(
            policy,
            num_layers=layers,
            num_experts=experts,
            active=shape.top_k,
            page_bytes=shape.page_bytes,
            most_slots=self._slots,
        )
        if cache is not None:
            self._residency.cache = cache
        self._pages, self._tokens, self._confidence = 0, 0.0, PrefetchConfidence()
        self._predicted: IntArray = np.zeros(0, np.int64)  # predicted keys of the next layer
        self._clock = None if machine is None else Clock(machine, overlap=policy.schedule.overlap)
        self._cpu = machine if machine is not None and machine.discrete else None  # computes misses
        if self._cpu is not None and self._mode == "cpu_fallback":
            # No miss is admitted, so the first experts of each layer remain resident.
            self._residency.cache.fill([(layer, expert) for expert in range(experts) for layer in range(layers)])
        self.begins_with = frozenset(map(tuple, np.argwhere(self._residency.cache.slot_table >= 0).tolist()))

    @property
    def _mode(self) -> str:
        return self._residency.controls.schedule.mode

    def step(self, row: TraceRow) -> None:
        """Replay one batch; ``row.layer`` counts MoE layers."""
        tokens = len(row.ids) / (self.shape.top_k or 1)
        self._tokens += tokens
        if self._clock is not None:
            self._clock.route(row.layer, tokens)
        ids, scores = row.ids[:, None], None if row.scores is None else row.scores[:, None]
        self._confidence.flush(row.layer, row.ids)
        leave, computed_s = self._leave(row, tokens)
        access = self._residency.access(row.layer, ids, scores, keep_out=leave.tolist())
        missing = access.misses + row.layer * self.shape.num_experts
        self._pages += len(missing) - (int(np.isin(missing, self._predicted).sum()) if self._predicted.size else 0)
        if self._clock is not None:
            self._clock.serve(access.counts[access.hits], access.counts[access.misses], missing.tolist(), computed_s)
        self._prediction(row.layer + 1)
        if len(access.misses):
            self._most = max(self._most, len(self._residency.cache))

    def _leave(self, row: TraceRow, tokens: float) -> tuple[IntArray, float]:
        """Return the missing experts that the CPU computes where they are stored, and the seconds that takes."""
        if self._cpu is None or self._mode == "gpu_only":
            return row.ids[:0], 0.0
        counts = np.bincount(row.ids, minlength=self.shape.num_experts)
        missing = np.flatnonzero((counts > 0) & (self._residency.cache.slot_table[row.layer] < 0))
        placed = self._residency.place_missing(
            counts[missing],
            fetch_s=self._cpu.fetch_s,
            cpu_s=self._cpu.cpu_s(counts[missing]),
            fixed_s=self._cpu.crossing_s(tokens),
        )
        return missing[placed.computed], placed.cpu_s

    def _prediction(self, coming: int) -> None:
        """Prefetch the predicted experts of the layer ``coming`` of this pass that are likely enough."""
        predictor = self._residency.cache.predictor
        if not predictor.is_on:
            return
        self._predicted = self._predicted[:0]
        if coming == len(self.shape.layers):
            return
        for target, wanted in predictor.ahead(coming - 1, self._residency.cache.slot_table >= 0):
            if target == coming:
                self._predicted = self._confidence.likely(target, wanted) + target * self.shape.num_experts
        self._pages += len(self._predicted)
        if self._clock is not None:
            self._clock.prediction(self._predicted.tolist())

    def outcome(self) -> Outcome:
        clock, page = self._clock, self.shape.page_bytes
        stats = self._residency.cache.stats
        tokens = self._tokens / len(self.shape.layers)
        return Outcome(
            policy=self.policy.name,
            accesses=stats.accesses,
            hits=int(stats.hits.sum()),
            misses=int(stats.misses.sum()),
            evictions=stats.evictions,
            max_resident=max(self._most, len(self._residency.cache)),
            slots=self._slots,
            page_bytes=page,
            bytes=None if page is None else self._pages * page,
            stall_s=None if clock is None else clock.stall_s,
            total_s=None if clock is None else clock.now,
            tokens_per_s=None if clock is None else tokens / clock.now if clock.now else 0.0,
            notes=tuple(_notes(self.policy, self._cpu is not None)),
        )


def _notes(policy: ExpertPolicy, may_compute: bool) -> Iterator[str]:
    if policy.prefetch.strategy == "next_router":
        yield "next_router predicts from hidden states, which a trace does not hold; here it predicts nothing"
    if policy.cache.profile is not None:
        yield f"profile {policy.cache.profile!r} is not read; every replay begins with no resident expert"
    if policy.schedule.mode != "gpu_only" and not may_compute:
        yield f"{policy.schedule.mode} needs a GPU's --hw (and --model) to decide by; here every miss is fetched"


def replay_trace(
    rows: Iterable[TraceRow], shape: Shape, policies: Sequence[ExpertPolicy], machine: MachineCosts | None = None
) -> list[Outcome]:
    """Replay ``rows`` under each of ``policies``; the rows are read once and not kept."""
    replays = []
    for policy in policies:
        try:
            replays.append(Replay(policy, shape, machine))
        except ConfigError as error:
            raise ConfigError(f"policy {policy.name}: {error}") from None
    for row in rows:
        for replay in replays:
            replay.step(row)
    return [replay.outcome() for replay in replays]


def bound(
    rows: Iterable[TraceRow],
    shape: Shape,
    slots: int,
    machine: MachineCosts | None = None,
    *,
    policies: Sequence[ExpertPolicy] = (),
) -> Outcome:
    """Replay Belady's eviction with ``slots`` slots shared by all layers: an upper bound of the hits of any replay with
    as many slots, whatever its batches, and with or without bypassing.

    The replay starts with no resident, or with the best subset of the experts with which ``policies`` start. The
    seconds assume that every miss is transferred, so a policy that predicts or computes misses on the CPU may take
    less. The rows are kept in memory, because the eviction reads ahead.
    """
    rows = list(rows)
    policy = ExpertPolicy(name=f"belady@{slots}", cache=CacheRules(capacity=Capacity(value=slots)))
    future = [(row.layer, np.unique(row.ids).tolist()) for row in rows]
    layers, experts = len(shape.layers), shape.num_experts
    cache = ExpertCache(capacity=slots, num_layers=layers, num_experts=experts, eviction="belady", future=future)
    begun = {key for expert_policy in policies for key in Replay(expert_policy, shape, machine).begins_with}
    if begun:
        first = dict.fromkeys((layer, expert) for layer, ids in future for expert in ids)
        cache.fill([key for key in first if key in begun])
    replay = Replay(policy, shape, machine, cache=cache)
    for row in rows:
        replay.step(row)
    return replay.outcome()
