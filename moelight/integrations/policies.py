"""Policies for `attach`: read as they were given, made for a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.schedule import Page
from moelight.core.units import format_bytes
from moelight.experts.cache import ExpertCache
from moelight.experts.policy import CacheRules, Capacity, ExpertPolicy, PerLayerRules, PrefetchRules
from moelight.experts.profile_files import load_profile
from moelight.experts.residency import ModelFacts, Residency
from moelight.experts.sizing import RESERVE_BYTES, Status, plan_slots
from moelight.integrations.layers import MoeLayer
from moelight.lang.check import read
from moelight.lang.files import load_expert_policy

_EVICTION = ("lru",)


def model_facts(model: nn.Module, layers: Sequence[MoeLayer], page_bytes: int, active: int) -> ModelFacts:
    """What residency must know of ``model``; layers without experts do not count."""
    config = getattr(model, "config", None)
    most = max(layer.num_experts for layer in layers)
    return ModelFacts(
        moe_layers=(True,) * len(layers),
        num_experts=most,
        top_k=active,
        page_bytes=page_bytes,
        facts={
            "model_type": str(getattr(config, "model_type", type(model).__name__)),
            "num_layers": len(layers),
            "num_experts": most,
            "expert": " ".join(f"{piece.name}{list(piece.shape)}" for piece in layers[0].pieces),
        },
    )


def residency_of(policy: ExpertPolicy, model: ModelFacts) -> Residency:
    """``policy`` at work, as large as it says: the experts of its profile are there at first, else the first of every
    layer.

    Raises:
        ConfigError: the policy does not fit the model, or its profile is of another one.
    """
    layers, experts = len(model.moe_layers), model.num_experts
    capacity = ExpertCache.of(policy, num_layers=layers, num_experts=experts, page_bytes=model.page_bytes).capacity
    first = [Page(layer=layer, expert=expert) for expert in range(experts) for layer in range(layers)][:capacity]
    kept = policy.cache.profile
    profile = (
        None if kept is None else load_profile(Path(kept), model=model.facts, num_layers=layers, num_experts=experts)
    )
    return Residency(policy, model, resident=first, profile=profile)


def policy_for(
    experts: Sequence[int],
    active: Sequence[int | None],
    *,
    page_bytes: int,
    spare_bytes: int,
    free_bytes: int,
    batch: int,
    across_link: bool,
) -> tuple[ExpertPolicy, str]:
    """A policy for layers with so many ``experts`` each, of which a token has ``active`` (None: nobody says), and why.

    Room is for twice a token's experts, or for what ``batch`` tokens are expected to meet (`experts.sizing`), as far as
    there are ``free_bytes`` besides ``spare_bytes``. It is shared out evenly: from one cache for all layers, a pass
    evicts just those experts that the next pass needs first. Guesses are for links (``across_link``), which idle more
    often than disks.

    Raises:
        BudgetError: there is no room for a single one.
    """
    layers, most, each = len(experts), max(experts), max((k or 1 for k in active), default=1)
    plan = plan_slots(
        layers=layers,
        num_experts=most,
        active=each,
        free_bytes=free_bytes,
        per_expert_bytes=page_bytes,
        reserve_bytes=RESERVE_BYTES + spare_bytes,
        batch=batch,
    )
    if plan.status is Status.BUDGET_EXHAUSTED:
        needed = RESERVE_BYTES + spare_bytes + page_bytes
        raise BudgetError(
            f"{format_bytes(free_bytes)} are free, {format_bytes(needed, round_up=True)} is the least to attach with",
            tier="host",
            needed_bytes=needed,
        )
    slots = min(plan.slots, plan.recommended, sum(experts))
    everything = slots >= sum(experts)
    guesses = across_link and not everything
    strategy = "none" if not guesses else "previous" if None in active else "next_router"
    if plan.status is not Status.OK:
        why = "as many as there is memory for"
    elif everything:
        why = "all of them"
    elif batch == 1:
        why = f"twice the {each} of a token in each of {layers} layers"
    else:
        why = f"what {batch} tokens of {each} experts are expected to meet in each of {layers} layers"
    even = PerLayerRules(allocation="uniform", min_capacity=1, max_capacity=most, total_budget=slots)
    policy = ExpertPolicy(
        name="auto",
        cache=CacheRules(capacity=Capacity(value=slots), eviction=_EVICTION),
        prefetch=PrefetchRules(strategy=strategy, budget=each),
        per_layer=even if slots >= layers else None,
    )
    reason = (
        f"room for {slots} of {sum(experts)} experts ({format_bytes(slots * page_bytes)}): {why}, with "
        f"{format_bytes(free_bytes)} free; {' | '.join(_EVICTION)} layer by layer, prefetch {strategy}"
    )
    return policy, reason


def read_policy(policy: ExpertPolicy | str | Path) -> ExpertPolicy:
    """A policy as it is, from the text of a ``.moe`` file (which has braces), or from the path of one.

    Raises:
        ConfigError: there is no such file, it has errors, or another number of policies than one.
    """
    if isinstance(policy, ExpertPolicy):
        return policy
    if not isinstance(policy, (str, os.PathLike)):
        raise ConfigError(f"policy: an ExpertPolicy, .moe text or a path, not {type(policy).__name__}")
    if not isinstance(policy, str) or "{" not in policy:
        return load_expert_policy(policy)
    reading = read(policy)
    if reading.errors:
        raise ConfigError("policy: " + "; ".join(f"{e.line}:{e.column}: {e.message}" for e in reading.errors))
    if len(reading.policies) != 1:
        raise ConfigError(f"policy: the text has {len(reading.policies)} policies, attach takes one")
    return reading.policies[0]
