"""Connects the engine to ``experts``: number of cache slots, cost of a miss, and the routed experts of each pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.core.schedule import Page
from moelight.experts.options import ExpertOptions
from moelight.experts.policy import DEFAULT_POLICY, ExpertPolicy
from moelight.experts.profile import facts_of_model, load_profile
from moelight.experts.trace import RoutingTrace
from moelight.hrm import costs
from moelight.hrm.estimate import cost_model_of
from moelight.hrm.machine_model import Speeds
from moelight.hrm.placement import place_pages
from moelight.models.moe import Routed
from moelight.paging.residency import ModelFacts, ResidencyManager
from moelight.profiles.model import ModelProfile
from moelight.runtime.host_copy import HostCopy

# Called with a micro-batch, a layer, and the expert ids and weights [T, k] of its tokens.
Record = Callable[[int, int, np.ndarray, np.ndarray], None]


class RoutingWatch:
    """Passes the routing decisions of one pass to each of ``records``, on a device (``later``) once the pass has ended:
    tasks of a device wait for nothing that they compute; and the experts' inputs to ``inputs``."""

    def __init__(
        self, records: Sequence[Record], *, later: bool, inputs: Callable[[int, Routed], None] | None = None
    ) -> None:
        self._records, self._later, self._inputs = records, later, inputs
        self._coming: list[tuple[int, int, HostCopy]] = []

    def __call__(self, micro_batch: int, layer: int, routed: Routed) -> None:
        if self._inputs is not None:
            self._inputs(layer, routed)
        self._coming.append((micro_batch, layer, HostCopy(routed.ids, routed.weights)))
        if not self._later:
            self.finish()

    def finish(self) -> None:
        """Record the decisions that were not recorded yet, in their order."""
        coming, self._coming = self._coming, []
        for micro_batch, layer, routing in coming:
            ids, weights = routing.wait()
            for record in self._records:
                record(micro_batch, layer, ids, weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRuntime:
    """Expert residency in one engine, and the observers of routing decisions; ``notes``: whole passes record their
    routing too; ``discrete``: routers run on a device.

    Attributes:
        miss_s: seconds of an expert on the CPU for each of these numbers of tokens; None without a CPU beside a GPU.
        fetch_s: seconds to transfer an expert; ``cross_s``: seconds of hidden states to the CPU and back.
        computed: the pages that the CPU computes where residency is static.
        first_expert: the number in the model of the first expert that this rank has.
    """

    residency: ResidencyManager
    miss_s: Callable[[np.ndarray], np.ndarray] | None
    fetch_s: float
    cross_s: float
    notes: bool
    discrete: bool
    computed: frozenset[Page]
    trace: RoutingTrace | None
    plain: bool
    first_expert: int = 0
    inputs: Callable[[int, Routed], None] | None = None

    def leave(self, layer: int, ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Select from the missing ``ids`` [n] of ``layer``, routed ``tokens`` [n] each, the experts that the CPU
        computes in place: by the expert policy, or by the placement if residency is static."""
        if not self.residency.learns:
            return ids[[Page(layer=layer, expert=expert) in self.computed for expert in ids.tolist()]]
        if self.miss_s is None:
            return ids[:0]
        placed = self.residency.residency.place_missing(
            tokens, fetch_s=self.fetch_s, cpu_s=self.miss_s(tokens), fixed_s=self.cross_s
        )
        return ids[placed.computed]

    def records(self, *, small: bool) -> list[Record]:
        """What receives every routing decision of a (``small``: on-demand) pass."""
        notes, trace = self.notes and not small, self.trace  # an on-demand pass records its own routing

        def note(_: int, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
            with self.residency.turn:
                self.residency.note(layer, ids - self.first_expert, weights)

        def write(_: int, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
            if trace is not None:
                trace.write(layer, ids, weights)

        return [*([note] if notes else ()), *([] if trace is None else [write])]


def resident_share(experts: ExpertPolicy, model: ModelProfile, dtype: DType) -> float:
    """The share of all experts of ``model`` that fit the capacity of ``experts``; raises ConfigError if none fits."""
    layers, experts_per_layer = model.num_moe_layers, model.experts.num_experts
    page = costs.moved_page_bytes(model, costs.page_dtype(model, dtype))
    return experts.slots(layers, experts_per_layer, page) / (layers * experts_per_layer)


def choices_for(
    options: ExpertOptions, policy: Policy, model: ModelProfile, dtype: DType, speeds: Speeds, rank: int = 0
) -> ExpertRuntime | None:
    """The residency of experts under the resolved ``policy``, those of ``rank``; None if all experts are resident and
    no option observes them. On a device, routing of whole passes is recorded only on request: it would cross the link
    in every layer."""
    placement = place_pages(model, policy)
    if not placement.streamed and not options.watches:
        return None
    experts = options.policy or DEFAULT_POLICY
    if options.policy is None and len(placement.resident) < model.num_moe_layers:
        experts = replace(experts, per_layer=None)  # too few slots for a budget per layer
    facts = facts_of(model, dtype)
    profile = None
    path = options.profile or (None if experts.cache.profile is None else Path(experts.cache.profile))
    if path is not None:
        profile = load_profile(path, model=facts.facts, num_layers=model.num_moe_layers, num_experts=facts.num_experts)
    residency = ResidencyManager(
        experts,
        facts,
        resident=placement.resident,
        learns=placement.learned,
        profile=profile,
        batch=policy.batch_size,
    )
    cost_model = cost_model_of(model, policy, speeds, dtype)

    def miss_s(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(cost_model.expert_s(speeds.cpu, tokens.astype(float)))

    return ExpertRuntime(
        residency=residency,
        miss_s=miss_s if policy.discrete else None,
        fetch_s=cost_model.page_bytes() / speeds.h2d if policy.discrete else 0.0,
        cross_s=2 * speeds.transfer_s,
        notes=options.record or (placement.learned and not policy.discrete),
        discrete=policy.discrete,
        computed=frozenset(placement.computed),
        plain=options.plain,
        first_expert=rank * model.experts.num_experts,
        inputs=options.inputs,
        trace=None if options.trace is None else RoutingTrace(options.trace),
    )


def facts_of(model: ModelProfile, dtype: DType) -> ModelFacts:
    """The properties of the model on which the residency of its experts depends, beside a computation in ``dtype``."""
    stored = costs.page_dtype(model, dtype)
    facts = facts_of_model(
        model_type=model.model_type,
        moe_layers=model.num_moe_layers,
        num_experts=model.experts.num_experts,
        top_k=model.router.top_k,
        expert_numbers=costs.page_elements(model),
    )
    return ModelFacts(
        moe_layers=model.moe_layers,
        num_experts=model.experts.num_experts,
        top_k=model.router.top_k,
        page_bytes=costs.moved_page_bytes(model, stored),
        facts=facts,
        slot_bytes=costs.page_slots_by_layer(model, stored),
    )
