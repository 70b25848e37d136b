"""Policies for `attach`: read from the given form, or built for a model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from moelight.core.errors import BudgetError, ConfigError
from moelight.core.units import format_bytes
from moelight.experts.policy import DEFAULT_POLICY, Capacity, ExpertPolicy
from moelight.experts.profile import Facts, facts_of_model
from moelight.experts.profile_files import load_profile
from moelight.experts.residency import Residency
from moelight.experts.sizing import RESERVE_BYTES, Status, plan_slots
from moelight.integrations.layers import MoeLayer
from moelight.lang.check import read
from moelight.lang.files import load_expert_policy


def residency_of(
    policy: ExpertPolicy, model: nn.Module, layers: Sequence[MoeLayer], page_bytes: int, active: int | None
) -> tuple[Residency, int]:
    """The residency of ``policy`` on ``model``, and the most slots that the policy or one of its rules sets.

    Raises:
        ConfigError: the policy does not fit the model, or its profile is of another model.
    """
    count, experts = len(layers), max(layer.num_experts for layer in layers)
    known = None
    if policy.cache.profile is not None:
        facts = _facts(model, layers, active)
        known = load_profile(Path(policy.cache.profile), model=facts, num_layers=count, num_experts=experts)
    most = max(_capacities(policy, num_layers=count, num_experts=experts, page_bytes=page_bytes))
    residency = Residency(
        policy,
        num_layers=count,
        num_experts=experts,
        active=active,
        page_bytes=page_bytes,
        known=known,
        most_slots=most,
    )
    return residency, most


def _capacities(policy: ExpertPolicy, *, num_layers: int, num_experts: int, page_bytes: int) -> Iterator[int]:
    """Yield the initial slots of the policy, then the slots that its rules may set."""
    yield policy.slots(num_layers, num_experts, page_bytes)
    for rule in policy.adapt:
        if isinstance(rule.action.value, Capacity):
            yield policy.slots_of(rule.action.value, num_layers, num_experts, page_bytes)


def _facts(model: nn.Module, layers: Sequence[MoeLayer], active: int | None) -> Facts:
    """The facts that identify this model in profiles."""
    return facts_of_model(
        model_type=str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)),
        moe_layers=len(layers),
        num_experts=max(layer.num_experts for layer in layers),
        top_k=active,
        expert_numbers=sum(math.prod(piece.shape) for piece in layers[0].pieces),
    )


def policy_for(
    experts: Sequence[int],
    active: Sequence[int | None],
    *,
    page_bytes: int,
    spare_bytes: int,
    free_bytes: int,
    batch: int,
) -> tuple[ExpertPolicy, str]:
    """A policy for layers with ``experts`` experts each, of which a token uses ``active`` (None: unknown), and the
    reason.

    The capacity is twice a token's experts, or the experts that ``batch`` tokens are expected to use
    (`experts.sizing`), as far as ``free_bytes`` suffice beside ``spare_bytes``. Everything else is as in
    `DEFAULT_POLICY`.

    Raises:
        BudgetError: there is no memory for a single expert.
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
    rules = DEFAULT_POLICY
    strategy = "none" if everything else "previous" if None in active else rules.prefetch.strategy
    if plan.status is not Status.OK:
        why = "as many as there is memory for"
    elif everything:
        why = "all of them"
    elif batch == 1:
        why = f"twice the {each} of a token in each of {layers} layers"
    else:
        why = f"what {batch} tokens of {each} experts are expected to meet in each of {layers} layers"
    policy = replace(
        rules,
        name="auto",
        cache=replace(rules.cache, capacity=Capacity(value=slots)),
        prefetch=replace(rules.prefetch, strategy=strategy, budget=each),
        per_layer=None if rules.per_layer is None or slots < layers else replace(rules.per_layer, total_budget=slots),
    )
    reason = (
        f"room for {slots} of {sum(experts)} experts ({format_bytes(slots * page_bytes)}): {why}, with "
        f"{format_bytes(free_bytes)} free; {' | '.join(rules.cache.eviction)}, prefetch {strategy}"
    )
    return policy, reason


def read_expert_policy(policy: ExpertPolicy | str | Path) -> ExpertPolicy:
    """An expert policy given as an object, as the text of a ``.moe`` file (which contains braces), or as a path.

    Raises:
        ConfigError: the file does not exist, the text has errors, or it does not hold exactly one policy.
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
