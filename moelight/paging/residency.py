"""Which experts of a model are resident: a `Residency` addressed by layer numbers of the model. Not thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.core.schedule import Page
from moelight.experts.cache import Access, Prefetch, SlotKinds
from moelight.experts.eviction import IntArray
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy
from moelight.experts.predict import PrefetchConfidence, RouterConfidence
from moelight.experts.profile import ActivationProfile, Facts
from moelight.experts.residency import Residency

MISSING_DECAY = 0.95  # a visit has half its weight after 14 more of its size
_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Model properties that residency depends on; ``facts`` identify the model in profiles. ``page_bytes``: of an
    expert on average; ``slot_bytes``: of its slot in each layer, if not all are as large."""

    moe_layers: tuple[bool, ...]
    num_experts: int
    top_k: int | None
    page_bytes: int
    facts: Facts
    slot_bytes: tuple[int, ...] = ()


class ResidencyManager:
    """Tracks the resident experts over the passes of an engine or an attached model.

    Attributes:
        learns: True if residents may be evicted for other experts.
        table: int32 [layers, experts], the slot of each resident expert, else -1.
        version: number that changes whenever ``table`` does.
        turn: held by the threads of an engine while they call this object.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        model: ModelFacts,
        *,
        resident: Sequence[Page] | None,
        learns: bool = True,
        profile: ActivationProfile | None = None,
        batch: int = 1,
        most_slots: int | None = None,
    ) -> None:
        """Create a cache; raises ConfigError if the policy cannot be met.

        Args:
            resident: first residents, one slot each; None: the policy's capacity, with only `first_pages` resident.
            profile: known routing; if the cache ``learns``, the most used experts are the first residents instead.
            batch: sequences of a pass.
            most_slots: largest number of slots that will be allocated; None: as many as ``resident``.
        """
        self.model, self.learns = model, learns
        self._layers = [layer for layer, moe in enumerate(model.moe_layers) if moe]
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        rows = len(self._layers)
        if resident is not None:
            policy = (_within if learns else _unmoved)(policy, max(1, len(resident)))
            most_slots = len(resident)
        self._counted = ActivationProfile(model=model.facts, num_layers=rows, num_experts=model.num_experts)
        self.residency = Residency(
            policy,
            num_layers=rows,
            num_experts=model.num_experts,
            active=model.top_k,
            page_bytes=model.page_bytes,
            profile=profile if learns else None,
            counted=self._counted,
            batch=batch,
            most_slots=most_slots,
            kinds=self._slot_kinds(resident),
        )
        self._confidence, self._decision = PrefetchConfidence(), RouterConfidence(model.num_experts)
        self._missing: dict[int, float] = {}  # by the bit length of the number of tokens
        self._in_use: list[tuple[int, list[int]]] = []
        self.table = np.full((len(model.moe_layers), model.num_experts), -1, dtype=np.int32)
        self.version, self.turn = 0, threading.Lock()
        if resident and (profile is None or not learns):
            named = [(self._row[page.layer], page.expert) for page in resident]
            # Layer budgets may differ from the residents of the layers: other experts fill the remaining slots.
            others = [(row, expert) for expert in range(model.num_experts) for row in range(rows)]
            self.residency.cache.fill(np.array([*named, *others], dtype=np.int64).reshape(-1, 2))
        self._follow()

    def _slot_kinds(self, resident: Sequence[Page] | None) -> SlotKinds | None:
        """A kind for each size of the slots of ``resident``; None if all are as large."""
        sizes = self.model.slot_bytes
        kinds = {size: kind for kind, size in enumerate(sorted({sizes[layer] for layer in self._layers if sizes}))}
        if not resident or len(kinds) < 2:
            return None
        return SlotKinds(
            layers=[kinds[sizes[layer]] for layer in self._layers],
            slots=[kinds[sizes[page.layer]] for page in resident],
        )

    @property
    def ahead(self) -> bool:
        """True if experts are prefetched by prediction."""
        return self.learns and self.residency.cache.predictor.is_on

    @property
    def predicts_experts(self) -> bool:
        """True if predictions need the routers of coming layers."""
        return self.residency.cache.predictor.rules.strategy == "next_router"

    def pages(self) -> frozenset[Page]:
        return frozenset(Page(layer=int(layer), expert=int(e)) for layer, e in np.argwhere(self.table >= 0))

    def choose(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], *, leave: frozenset[int] = frozenset()
    ) -> Access:
        """Access the cache for ``ids`` int [T, k] with ``weights`` [T, k], of which those of no expert are of other
        ranks; missing experts in ``leave`` get no slot."""
        row = self._row[layer]
        self._confidence.flush(row, ids)
        self._decision.flush(row, ids)
        access = self._access(layer, ids, weights, admit=self.learns, keep_out=leave)
        self._follow()
        return access

    def use(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], *, leave: frozenset[int] = frozenset()
    ) -> Access:
        """`choose`, and lease every expert with a slot until `end_use`."""
        access = self.choose(layer, ids, weights, leave=leave)
        here = [*access.hits.tolist(), *access.misses[access.slots >= 0].tolist()]
        self.lease(layer, here)
        self._in_use.append((layer, here))
        return access

    def end_use(self) -> None:
        while self._in_use:
            self.release(*self._in_use.pop())

    def first_pages(self) -> list[tuple[Page, int]]:
        """Pages to load before the first pass, with their slots."""
        return [
            (Page(layer=self._layers[row], expert=expert), slot)
            for row, expert, slot in self.residency.begin_with.tolist()
        ]

    def note(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """Count the routing ``ids`` [T, k] of a whole pass; no expert is admitted or evicted."""
        self._access(layer, ids, weights, admit=False, rules=False)

    def missing_share(self, tokens: int) -> float | None:
        """Share of the offloaded experts that passes of about ``tokens`` tokens recently routed to; None if unknown."""
        return self._missing.get(tokens.bit_length())

    def _access(self, layer: int, ids: NDArray[Any], weights: NDArray[Any], **how: Any) -> Access:
        offloaded, size = int(np.count_nonzero(self.table[layer] < 0)), len(ids).bit_length()
        here = (ids >= 0) & (ids < self.model.num_experts)
        if not here.all():
            ids, weights = ids[here][:, None], weights[here][:, None]
        access = self.residency.access(self._row[layer], ids, weights, **how)
        if offloaded:
            now = len(access.misses) / offloaded
            self._missing[size] = now + MISSING_DECAY * (self._missing.get(size, now) - now)
        return access

    def prediction(self, layer: int) -> IntArray:
        """Offloaded experts of ``layer`` worth a prefetch once the layer before has routed, the likeliest first."""
        row, resident = self._row[layer], self.residency.cache.slot_table >= 0
        if self.predicts_experts:
            self.residency.hint(row, *self._decision.likely(row))
        for target, wanted in self.residency.cache.predictor.ahead(row - 1, resident):
            if target == row:
                return wanted if self.predicts_experts else self._confidence.likely(row, wanted)
        return _NOTHING

    def hint(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """Record an early evaluation of the router of ``layer`` for the next tokens of the pass."""
        self._decision.add(self._row[layer], ids, weights)

    def expect(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """Give the predictor the probable choice of the router of ``layer``."""
        distinct, places = np.unique(ids, return_inverse=True)
        mass = np.asarray(np.bincount(places.ravel(), weights.ravel(), minlength=len(distinct)), np.float64)
        self.residency.hint(self._row[layer], distinct, mass)

    def admit_ahead(self, layer: int) -> list[tuple[int, Prefetch]]:
        """Admit the experts that are predicted for coming layers after ``layer`` was served."""
        prefetches = [(self._layers[row], prefetch) for row, prefetch in self.residency.ahead(self._row[layer])]
        self._follow()
        return prefetches

    def lease(self, layer: int, ids: Sequence[int]) -> None:
        """Forbid the eviction of the resident ``ids`` of ``layer`` until `release`."""
        self.residency.cache.lease(self._row[layer], ids)

    def release(self, layer: int, ids: Sequence[int]) -> None:
        """End one lease of each of ``ids``."""
        self.residency.cache.release(self._row[layer], ids)

    def profile(self) -> ActivationProfile:
        """Routing counts and learned affinities of this run."""
        self._counted.transitions = self.residency.transitions
        return self._counted

    def stats(self, stalls: Mapping[str, float] | None = None) -> dict[str, Any]:
        """All statistics for JSON, by the model's layer numbers."""
        stats = self.residency.stats(stalls)
        for layer_stats in (*stats["layers"], *stats["pinned"]):
            layer_stats["layer"] = self._layers[layer_stats["layer"]]
        return stats

    def _follow(self) -> None:
        now = self.residency.cache.slot_table
        if not np.array_equal(self.table[self._layers], now):
            self.table[self._layers] = now
            self.version += 1


def _within(policy: ExpertPolicy, slots: int) -> ExpertPolicy:
    rules = None if policy.per_layer is None else replace(policy.per_layer, total_budget=slots)
    return replace(policy, cache=replace(policy.cache, capacity=Capacity(value=slots)), per_layer=rules)


def _unmoved(policy: ExpertPolicy, slots: int) -> ExpertPolicy:
    """``policy`` with static residents, for counting only."""
    return ExpertPolicy(name="static", cache=CacheRules(capacity=Capacity(value=slots)), schedule=policy.schedule)
