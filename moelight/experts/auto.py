"""Policy for a model and a machine without a recorded trace, with the reason for each line.

Uses the sizing rule, the memory ledger and `DEFAULT_POLICY`; with a recorded trace, ``tune`` finds a better policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moelight.core.dtypes import dtype_named
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy
from moelight.core.units import format_bytes
from moelight.experts.policy import DEFAULT_POLICY, CacheRules, Capacity, ExpertPolicy, PrefetchRules
from moelight.experts.sizing import RESERVE_BYTES, SlotPlan, Status, plan_slots
from moelight.experts.timing import MachineCosts
from moelight.experts.tune import share_of, uniform_layers
from moelight.hrm import costs
from moelight.hrm.footprint import fixed_bytes
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile

KV_TOKENS = 1024  # KV cache tokens of a sequence of unknown length, as in `Policy`
_WHY_EVICTION = {
    "lru": "the least recently used expert is evicted: on recorded traces no other fixed order was faster for all",
    "slru": "experts used twice are protected from those used once; of these, the least used are evicted first",
    "reuse": "the expert least likely to be used at the layer's next visit is evicted, learned as the job runs; a "
    "missing expert that is less likely still passes through without a slot",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoPolicy:
    """``policy``, its ``header`` comment, and the reason for each (block, key)."""

    policy: ExpertPolicy
    plan: SlotPlan
    header: tuple[str, ...]
    reasons: Mapping[tuple[str, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMemory:
    """Memory of the processor of the experts: ``tier``, its capacity, and the bytes not available for experts, by
    purpose."""

    tier: str
    capacity_bytes: int
    taken: Mapping[str, int]

    @property
    def free_bytes(self) -> int:
        """Bytes left for experts."""
        return max(0, self.capacity_bytes - sum(self.taken.values()))


def room_for_experts(model: ModelProfile, hardware: HardwareProfile, batch_size: int = 1) -> ExpertMemory:
    """Return the memory of the compute unit, a GPU's or else the host's, with the part taken by ``batch_size``
    sequences of `KV_TOKENS` tokens and by the ring for pages in transfer, which shrinks as more pages are resident."""
    device = hardware.tier("device")
    tier = device if device is not None else hardware.tier("host")
    if tier is None:
        raise ConfigError(f"hardware profile {hardware.name!r} lacks tiers.host")
    gpu, dtype = hardware.processor("gpu"), dtype_named(model.dtype)
    near = "cpu" if device is None else "gpu"
    sizes = Policy(
        model=model.name,
        batch_size=batch_size,
        micro_batch_size=batch_size,
        micro_batch_tokens=max(batch_size, min(KV_TOKENS, model.max_positions)),
        prompt_micro_batches=1,
        kv_tokens=batch_size * min(KV_TOKENS, model.max_positions),
        attention_device=near,
        ffn_device=near,
    )
    found = fixed_bytes(model, sizes, dtype=dtype, kv_dtype=dtype)
    dense = costs.dense_bytes(model, dtype)
    working = sum(int(size) for (_, where), size in found.items() if where == tier.name) - dense
    capacity = tier.capacity_bytes * (1 if device is None or gpu is None else gpu.count)
    taken = {
        "other weights": dense,
        "keys and values": sizes.kv_tokens * costs.kv_token_bytes(model, dtype),
        "work": working,
    }
    page = costs.page_slot_bytes(model, dtype)
    ring = _ring_pages(model, (capacity - sum(taken.values()) - RESERVE_BYTES) // page)
    return ExpertMemory(tier=tier.name, capacity_bytes=capacity, taken={**taken, "pages on their way": ring * page})


def _ring_pages(model: ModelProfile, pages: int) -> int:
    """Return the ring slots out of ``pages``: two layers of offloaded pages, and at least one whole layer, since any
    page may be offloaded (`hrm.footprint.ring_slots`); 0 if all pages fit."""
    layers, experts = model.num_moe_layers, model.experts.num_experts
    if pages >= layers * experts:
        return 0
    rings = ((count, max(experts, 2 * (experts - count))) for count in range(experts - 1, -1, -1))
    return next((ring for count, ring in rings if layers * count + ring <= pages), 2 * experts)


def met_experts(model: ModelProfile, tokens: int) -> int:
    """Return the expected number of distinct experts of a layer for ``tokens``, rounded up."""
    return math.ceil(float(costs.distinct_experts(model, tokens)) - 1e-9)


def auto_policy(model: ModelProfile, hardware: HardwareProfile, *, name: str, batch_size: int = 1) -> AutoPolicy:
    """Return the initial policy for passes of ``batch_size`` tokens. ``name``: the user's name of the model.

    Raises:
        BudgetError: not one expert fits.
        ConfigError: the model has no experts, or the hardware profile lacks a required entry.
    """
    machine = MachineCosts(model, hardware)
    room = room_for_experts(model, hardware, batch_size)
    layers, experts, active = model.num_moe_layers, model.experts.num_experts, model.router.top_k
    page = costs.page_slot_bytes(model, dtype_named(model.dtype))
    plan = plan_slots(
        layers=layers,
        num_experts=experts,
        active=active,
        free_bytes=room.free_bytes,
        per_expert_bytes=page,
        batch=batch_size,
    )
    if plan.status is Status.BUDGET_EXHAUSTED:
        needed = sum(room.taken.values()) + RESERVE_BYTES + page
        raise BudgetError(
            f"no expert of {name} has room in {hardware.name}'s {room.tier} memory beside the rest: "
            f"{format_bytes(room.capacity_bytes)}, and {format_bytes(needed, round_up=True)} would do for one; "
            "take a smaller batch, or generate without a policy, which streams them",
            tier=room.tier,
            needed_bytes=needed,
        )
    policy, reasons = _with_room(plan, layers, experts)
    reasons["cache", "capacity"] = _why_capacity(model, plan, batch_size)
    if machine.discrete and plan.slots < layers * experts:
        policy = _with_schedule(policy, machine, reasons)
    slots = policy.slots(layers, experts, page)
    header = (
        f"{name} on {hardware.name}, passes of {batch_size} token{'s' if batch_size > 1 else ''}: {layers} layers of "
        f"{experts} experts, {active} a token, {format_bytes(page)} each ({format_bytes(layers * experts * page)}).",
        f"Of {format_bytes(room.capacity_bytes)} {room.tier} memory, "
        + ", ".join(f"{format_bytes(taken)} are for {what}" for what, taken in room.taken.items() if taken)
        + f", and {format_bytes(RESERVE_BYTES)} are left alone: room for {plan.budget:,} experts. "
        f"{slots:,} take {format_bytes(slots * page)}.",
        f"A miss takes {1e3 * machine.fetch_s:.3g} ms. Made without a trace: record one with generate --routing-trace, "
        "and policy tune finds what suits it.",
    )
    return AutoPolicy(policy=policy, plan=plan, header=header, reasons=reasons)


def _with_room(plan: SlotPlan, layers: int, experts: int) -> tuple[ExpertPolicy, dict[tuple[str, str], str]]:
    """Return the default policy with the slots of ``plan``, equally many for each layer if there are enough, and its
    reasons."""
    count = min(experts, plan.slots // layers)
    reasons: dict[tuple[str, str], str] = {}
    default = replace(DEFAULT_POLICY, name="auto")
    if count == experts:
        cache = CacheRules(capacity=share_of(1, 1))
        return replace(default, cache=cache, per_layer=None, prefetch=PrefetchRules()), reasons
    if default.prefetch.strategy == "next_router":
        reasons["prefetch", "predictor"] = (
            "each layer's router is asked one layer early, and what it is likely to choose is fetched while the layer "
            "before computes"
        )
    if count == 0:
        cache = replace(default.cache, capacity=Capacity(value=plan.slots))
        reasons["cache", "eviction"] = "fewer places than layers: all layers share them"
        prefetch = replace(default.prefetch, budget=min(default.prefetch.budget, plan.slots))
        return replace(default, cache=cache, prefetch=prefetch, per_layer=None), reasons
    cache = replace(default.cache, capacity=share_of(count, experts))
    reasons["cache", "eviction"] = _WHY_EVICTION.get(cache.eviction[0], "the default")
    reasons["per_layer", "allocation"] = (
        f"{count} places for each layer: passes visit layers in turn, so that in a shared cache those of the layer "
        "that comes next would be the oldest, and leave just before they are needed"
    )
    return replace(default, cache=cache, per_layer=uniform_layers(count)), reasons


def _why_capacity(model: ModelProfile, plan: SlotPlan, batch_size: int) -> str:
    layers, experts, active = model.num_moe_layers, model.experts.num_experts, model.router.top_k
    each, met = plan.recommended / layers, met_experts(model, batch_size)
    rule = f"recommended are {each:g} a layer, twice the {active} of a token"
    if met > 2 * active:
        rule = f"recommended are {each:g} a layer, as many as {batch_size} tokens are expected to meet"
    if plan.slots >= layers * experts:
        return f"all {layers * experts:,} have a slot, so that none is ever evicted; {rule}"
    verdict = "below that, so expect many misses" if plan.status is Status.BELOW_RECOMMENDED else "enough"
    return f"room for {plan.slots:,} of {layers * experts:,}, {plan.slots / layers:.1f} a layer; {rule}: {verdict}"


def _with_schedule(policy: ExpertPolicy, machine: MachineCosts, reasons: dict[tuple[str, str], str]) -> ExpertPolicy:
    """Set the schedule for a machine with a GPU: ``hybrid`` if the CPU computes one token's expert before its page is
    transferred."""
    fetch_s = machine.fetch_s
    cpu_s = float(machine.cpu_s(np.array([1]))[0]) + machine.crossing_s(1.0)
    faster = cpu_s < fetch_s
    compared = f"the CPU takes {1e3 * cpu_s:.3g} ms for one token, the page {1e3 * fetch_s:.3g} ms"
    reasons["schedule", "mode"] = (
        f"a missing expert with few tokens is computed where it lies: {compared}"
        if faster
        else f"missing experts are fetched: {compared}"
    )
    if faster:
        reasons["schedule", "offload_threshold_ms"] = "half of what a fetch takes here, so that estimates alone decide"
    return replace(policy, schedule=machine.schedule("hybrid" if faster else "gpu_only"))
