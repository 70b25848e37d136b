"""Who is near in one engine: a `Residency` in the model's own layer numbers, over the slots that the engine has.

Layers without experts do not exist below it. Knows keys, slots and counters; refuses to know bytes, files and devices.
One thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moelight.core.schedule import Page
from moelight.experts.access import Access, IntArray
from moelight.experts.confidence import PrefetchConfidence, PrefetchDecision
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy
from moelight.experts.profile import ActivationProfile, Facts
from moelight.experts.residency import Residency

MISSING_DECAY = 0.95  # a layer's visit is half forgotten after 14 more
_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What must be known of a model: ``moe_layers`` says which of its layers have experts; ``facts`` tell it from
    others in profiles."""

    moe_layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    page_bytes: int
    facts: Facts


class ResidencyManager:
    """Who is near, as passes go by.

    Attributes:
        residency: the policy at work.
        learns: those who are near make way for others.
        table: int32 [layers, experts], the near slot of each expert or -1.
        version: a number that changes with it.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        model: ModelFacts,
        *,
        resident: Sequence[Page],
        learns: bool = True,
        profile: ActivationProfile | None = None,
        batch: int = 1,
    ) -> None:
        """There is room for as many as are ``resident`` at first; they make way for others if it ``learns``.

        ``profile``: what is known of the model's routing; the busiest experts are the first residents then. ``batch``:
        sequences of a pass.

        Raises:
            ConfigError: the policy cannot be met.
        """
        self.model, self.learns = model, learns
        self._layers = [layer for layer, moe in enumerate(model.moe_layers) if moe]
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        slots, rows = max(1, len(resident)), len(self._layers)
        self._counted = ActivationProfile(model=model.facts, num_layers=rows, num_experts=model.num_experts)
        self.residency = Residency(
            _within(policy, slots) if learns else _unmoved(policy, slots),
            num_layers=rows,
            num_experts=model.num_experts,
            active=model.top_k,
            page_bytes=model.page_bytes,
            known=profile if learns else None,
            counted=self._counted,
            batch=batch,
            most_slots=len(resident),
        )
        self._confidence, self._decision = PrefetchConfidence(), PrefetchDecision(model.num_experts)
        self._missing: dict[int, float] = {}  # by the binary digits of a number of tokens
        self.table = np.full((len(model.moe_layers), model.num_experts), -1, dtype=np.int32)
        self.version = 0
        if profile is None or not learns:
            named = [(self._row[page.layer], page.expert) for page in resident]
            # Budgets of layers need not be what is resident in them: others take the places that are left.
            others = [(row, expert) for expert in range(model.num_experts) for row in range(rows)] if resident else []
            self.residency.cache.fill(np.array([*named, *others], dtype=np.int64).reshape(-1, 2))
        self._follow()

    @property
    def ahead(self) -> bool:
        """Whether anything is guessed at all."""
        return self.learns and self.residency.cache.predictor.is_on

    @property
    def predicts_experts(self) -> bool:
        """Whether guesses need the routers of layers to come."""
        return self.residency.cache.predictor.rules.strategy == "next_router"

    def pages(self) -> frozenset[Page]:
        """Everyone who is near."""
        return frozenset(Page(layer=int(layer), expert=int(e)) for layer, e in np.argwhere(self.table >= 0))

    def choose(
        self, layer: int, ids: NDArray[Any], weights: NDArray[Any], *, leave: frozenset[int] = frozenset()
    ) -> Access:
        """A small pass routes to ``ids`` int [T, k] of ``layer`` with ``weights`` [T, k]: who of them is near, who
        comes, and where to. ``leave``: missing ones that are computed where they lie, and do not come."""
        row, missing_before = self._row[layer], self._away(layer)
        self._confidence.flush(row, ids)
        self._decision.flush(row, ids)
        found = self.residency.access(row, ids, weights, admit=self.learns, keep_out=leave)
        self._follow()
        self._count_missing(len(ids), len(found.misses), missing_before)
        return found

    def note(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """A pass that streams whole layers routed to ``ids`` [T, k]: counted, and nobody comes or goes."""
        found = self.residency.access(self._row[layer], ids, weights, admit=False, rules=False)
        self._count_missing(len(ids), len(found.misses), self._away(layer))

    def missing_share(self, tokens: int) -> float | None:
        """Of the experts that are not near, the share that as many ``tokens`` were routed to of late; None: not known.
        Tokens of one text choose alike, so this is less than chance has it."""
        return self._missing.get(tokens.bit_length())

    def _away(self, layer: int) -> int:
        return int(np.count_nonzero(self.table[layer] < 0))

    def _count_missing(self, tokens: int, misses: int, missing: int) -> None:
        if missing:
            size, now = tokens.bit_length(), misses / missing
            self._missing[size] = now + MISSING_DECAY * (self._missing.get(size, now) - now)

    def prediction(self, layer: int) -> IntArray:
        """Experts of ``layer`` to fetch ahead, the one before having chosen: not near, and likely enough, the likeliest
        first."""
        row, resident = self._row[layer], self.residency.cache.slot_table >= 0
        if self.predicts_experts:
            self.residency.hint(row, *self._decision.likely(row))
        for target, wanted in self.residency.cache.predictor.ahead(row - 1, resident):
            if target == row:
                return wanted if self.predicts_experts else self._confidence.likely(row, wanted)
        return _NOTHING

    def hint(self, layer: int, ids: NDArray[Any], weights: NDArray[Any]) -> None:
        """The router of ``layer`` was asked ahead of time, and would choose ``ids`` [T, k] with ``weights`` [T, k] for
        the next tokens of the pass."""
        self._decision.add(self._row[layer], ids, weights)

    def lease(self, layer: int, ids: IntArray) -> None:
        """Keep ``ids`` of ``layer``, who are near, until `release`."""
        self.residency.cache.lease(self._row[layer], ids.tolist())

    def release(self, layer: int, ids: IntArray) -> None:
        """End one lease of each."""
        self.residency.cache.release(self._row[layer], ids.tolist())

    def profile(self) -> ActivationProfile:
        """How often each expert was chosen, and what else is worth knowing another time."""
        self._counted.transitions = self.residency.transitions
        return self._counted

    def stats(self, stalls: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Everything that is known, for JSON; layers are those with experts, and say their number in the model."""
        found = self.residency.stats(stalls)
        for each in (*found["layers"], *found["pinned"]):
            each["layer"] = self._layers[each["layer"]]
        return found

    def _follow(self) -> None:
        """Take over who is near now."""
        now = self.residency.cache.slot_table
        if not np.array_equal(self.table[self._layers], now):
            self.table[self._layers] = now
            self.version += 1


def _within(policy: ExpertPolicy, slots: int) -> ExpertPolicy:
    """``policy`` with so many slots in all."""
    rules = None if policy.per_layer is None else replace(policy.per_layer, total_budget=slots)
    return replace(policy, cache=replace(policy.cache, capacity=Capacity(value=slots)), per_layer=rules)


def _unmoved(policy: ExpertPolicy, slots: int) -> ExpertPolicy:
    """A policy for who only counts: nobody comes or goes."""
    return ExpertPolicy(name="static", cache=CacheRules(capacity=Capacity(value=slots)), schedule=policy.schedule)
