"""Choice of a policy: with a recorded trace, the one with the least estimated time for each amount of memory
(`tune_policy`); without a trace, the default policy in the free memory, with the reason for each line
(`auto_policy`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

import numpy as np

from moelight.core.dtypes import dtype_named
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy
from moelight.core.units import format_bytes
from moelight.experts.policy import (
    DEFAULT_POLICY,
    EVICTIONS,
    CacheRules,
    Capacity,
    ExpertPolicy,
    PerLayerRules,
    PrefetchRules,
)
from moelight.experts.replay import Outcome, Replay, Shape
from moelight.experts.sizing import RESERVE_BYTES, SlotPlan, Status, plan_slots
from moelight.experts.timing import MachineCosts
from moelight.experts.trace import TraceRow
from moelight.hrm import costs
from moelight.hrm.footprint import fixed_bytes
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile

# Shares of each layer's experts that are tried, beside the largest possible one.
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# A replay cannot hint next_router, and lookahead predicts the next layer alone in a replay, as history does.
PREDICTORS = ("previous", "frequency", "history", "affinity")
BUDGETS = (2, 4, 8)
# Shares of the trace that the rounds replay. 1,600 rows take some seconds in all.
FIRST, SECOND, PREDICTING = 1 / 8, 1 / 2, 1 / 4
LEAST_PASSES = 8  # least length of a round: caches are cold before
MOST_ROWS = 20_000  # a longer trace is cut; the last round then takes a second for each candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The fastest policy of one capacity, and its replay; ``on_front``: no policy with less memory is as fast."""

    policy: ExpertPolicy
    outcome: Outcome
    on_front: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Result of the search: one entry per capacity, by memory; the fastest of them; and the number of replays."""

    candidates: tuple[Tuned, ...]
    best: Tuned
    replays: int
    rows: int

    @property
    def front(self) -> tuple[Tuned, ...]:
        """Entries of the Pareto front of memory and time."""
        return tuple(tuned for tuned in self.candidates if tuned.on_front)


def tune_policy(
    rows: Sequence[TraceRow], shape: Shape, machine: MachineCosts, *, most_slots: int | None = None
) -> Tuning:
    """Search policies for at most ``most_slots`` experts (None: all), equally many in each layer; raises ValueError for
    no rows, or less than one slot for each layer.

    The rounds for each capacity: each eviction with its parameters, with one cache or a budget per layer, on the first
    eighth of the trace; the best of each eviction on half of it, since some learn longer than others; the best of all
    with each predictor and budget; the last few on the whole trace. The search draws no random numbers, and the first
    of equally fast policies wins.
    """
    rows = rows[:MOST_ROWS]
    max_per_layer = shape.num_experts if most_slots is None else min(shape.num_experts, most_slots // len(shape.layers))
    if not rows or max_per_layer < 1:
        raise ValueError(f"{len(rows)} rows, and room for {max_per_layer} experts of a layer")
    counts = {max(1, round(share * shape.num_experts)) for share in SHARES}
    search = _TuneSearch(rows, shape, machine)
    results: list[Tuned] = []
    for count in sorted({candidate for candidate in counts if candidate < max_per_layer} | {max_per_layer}):
        policy, outcome = search.best(count, results[-1].policy if results else None)
        faster = all(_seconds(outcome) < _seconds(result.outcome) for result in results)
        results.append(Tuned(policy=policy, outcome=outcome, on_front=faster))
    best = min(results, key=lambda result: _seconds(result.outcome))
    return Tuning(candidates=tuple(results), best=best, replays=search.replays, rows=len(rows))


def share_of(count: int, num_experts: int) -> Capacity:
    """Return ``count`` of ``num_experts`` as a percentage that yields exactly ``count`` slots per layer."""
    exact = Decimal(100 * count) / num_experts
    return Capacity(value=float(exact.quantize(Decimal("0.0001"), rounding=ROUND_CEILING)), unit="percent")


def uniform_layers(count: int) -> PerLayerRules:
    """Return rules with a budget of ``count`` for every layer."""
    rules = PerLayerRules(allocation="uniform")
    return replace(rules, min_capacity=min(rules.min_capacity, count), max_capacity=max(rules.max_capacity, count))


def _seconds(outcome: Outcome) -> float:
    return outcome.total_s or 0.0


class _TuneSearch:
    """Replays policies on parts of one trace and counts the replays."""

    def __init__(self, rows: Sequence[TraceRow], shape: Shape, machine: MachineCosts) -> None:
        self._rows, self._shape, self._machine = rows, shape, machine
        self._scored = any(row.scores is not None for row in rows)
        self.replays = 0

    def best(self, count: int, before: ExpertPolicy | None) -> tuple[ExpertPolicy, Outcome]:
        """The best policy with ``count`` experts of each layer; ``before``: the best with less memory, tried again."""
        kinds: dict[tuple[str, ...], list[ExpertPolicy]] = {}
        for policy in self._structures(count):
            kinds.setdefault(policy.cache.eviction, []).append(policy)
        left = self._fastest([self._fastest(kind, FIRST, 1)[0] for kind in kinds.values()], SECOND, 2)
        if count < self._shape.num_experts:
            left += self._fastest(list(self._predicting(left[0])), PREDICTING, 1)
        if before is not None:
            cache = replace(before.cache, capacity=share_of(count, self._shape.num_experts))
            per_layer = None if before.per_layer is None else uniform_layers(count)
            left.append(replace(before, name=f"tuned_{count}", cache=cache, per_layer=per_layer))
        ran = [(policy, self._run(policy, 1.0)) for policy in left]
        return min(ran, key=lambda pair: _seconds(pair[1]))

    def _fastest(self, policies: list[ExpertPolicy], part: float, num_kept: int) -> list[ExpertPolicy]:
        """Return the ``num_kept`` fastest policies on the first ``part`` of the trace."""
        if len(policies) <= num_kept:
            return policies
        return sorted(policies, key=lambda policy: _seconds(self._run(policy, part)))[:num_kept]

    def _run(self, policy: ExpertPolicy, part: float) -> Outcome:
        self.replays += 1
        least = LEAST_PASSES * len(self._shape.layers)
        run = Replay(policy, self._shape, self._machine)
        for row in self._rows[: max(least, round(part * len(self._rows)))]:
            run.step(row)
        return run.outcome()

    def _structures(self, count: int) -> Iterator[ExpertPolicy]:
        """Yield eviction policies per layer and over all layers; with a GPU, with and without misses on the CPU."""
        # hybrid never takes longer for a batch than gpu_only or cpu_fallback.
        modes = ("gpu_only", "hybrid") if self._machine.discrete else ("gpu_only",)
        layers, capacity = len(self._shape.layers), share_of(count, self._shape.num_experts)
        for mode in modes:
            for per_layer in (uniform_layers(count), None):
                window = 100 * (1 if per_layer else layers)
                for rules in _orders(capacity, window, scored=self._scored):
                    # The language requires a predictor beside score (V15).
                    scores = PrefetchRules(strategy="previous", budget=BUDGETS[0])
                    yield ExpertPolicy(
                        name=f"tuned_{count}",
                        cache=rules,
                        prefetch=scores if "score" in rules.eviction else PrefetchRules(),
                        schedule=self._machine.schedule(mode),
                        per_layer=per_layer,
                    )
                    if count == self._shape.num_experts:  # nothing is ever evicted
                        break

    def _predicting(self, policy: ExpertPolicy) -> Iterator[ExpertPolicy]:
        for strategy in PREDICTORS:
            for budget in BUDGETS:
                prefetch = PrefetchRules(strategy=strategy, budget=min(budget, self._shape.num_experts))
                if prefetch != policy.prefetch:
                    yield replace(policy, prefetch=prefetch)


def _orders(capacity: Capacity, window: int, *, scored: bool) -> Iterator[CacheRules]:
    """Yield each eviction with the parameters that are tried."""
    tried: dict[str, tuple[dict[str, Any], ...]] = {
        "lfu": ({"frequency_decay": 0.8}, {"frequency_decay": 0.95}),
        "score": ({"score_ema_alpha": 0.1}, {"score_ema_alpha": 0.3}) if scored else (),
        "frequency_threshold": ({"freq_window": window, "freq_threshold": 1.0 / window},),
    }
    for name in EVICTIONS:
        for parameters in tried.get(name, ({},)):
            yield CacheRules(capacity=capacity, eviction=(name,), **parameters)
    yield CacheRules(capacity=capacity, eviction=("lfu", "lru"))


KV_TOKENS = 1024  # KV cache tokens of a sequence of unknown length, as in `Policy`


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoPolicy:
    """``policy``, its ``header`` comment, and the reason for each (block, key)."""

    policy: ExpertPolicy
    plan: SlotPlan
    header: tuple[str, ...]
    reasons: Mapping[tuple[str, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMemory:
    """Memory of the processor of the experts: ``tier``, capacity, and the bytes ``taken`` from it, by purpose."""

    tier: str
    capacity_bytes: int
    taken: Mapping[str, int]

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - sum(self.taken.values()))


def room_for_experts(model: ModelProfile, hardware: HardwareProfile, batch_size: int = 1) -> ExpertMemory:
    """Return the memory of the compute unit, a GPU's or else the host's, with the part taken by ``batch_size``
    sequences of `KV_TOKENS` tokens and by the ring, which shrinks as more pages are resident."""
    device = hardware.tier("device")
    tier = device or hardware.tier("host")
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
    fixed = fixed_bytes(model, sizes, dtype=dtype)
    dense = fixed["dense", tier.name]
    working = sum(int(size) for (_, where), size in fixed.items() if where == tier.name) - dense
    capacity = tier.capacity_bytes * (1 if device is None or gpu is None else gpu.count)
    taken = {
        "other weights": dense,
        "keys and values": sizes.kv_tokens * costs.kv_token_bytes(model, dtype),
        "work": working,
    }
    page_dtype = costs.page_dtype(model, dtype)
    page, in_ring = costs.mean_slot_bytes(model, page_dtype), costs.page_slot_bytes(model, page_dtype)
    ring = _ring_pages(model, int((capacity - sum(taken.values()) - RESERVE_BYTES) // page), in_ring / page)
    return ExpertMemory(tier=tier.name, capacity_bytes=capacity, taken={**taken, "pages on their way": ring * in_ring})


def _ring_pages(model: ModelProfile, pages: int, size: float) -> int:
    """Ring slots, each as large as ``size`` others, out of ``pages`` (`hrm.footprint.ring_slots`): two layers of
    offloaded pages, and at least one whole layer, since any page may be offloaded; 0 if all pages fit."""
    layers, experts = model.num_moe_layers, model.experts.num_experts
    if pages >= layers * experts:
        return 0
    rings = ((count, max(experts, 2 * (experts - count))) for count in range(experts - 1, -1, -1))
    return next((ring for count, ring in rings if layers * count + size * ring <= pages), 2 * experts)


def auto_policy(model: ModelProfile, hardware: HardwareProfile, *, name: str, batch_size: int = 1) -> AutoPolicy:
    """Return the initial policy for passes of ``batch_size`` tokens; raises BudgetError if not one expert fits.
    ``name``: the user's name of the model."""
    machine = MachineCosts(model, hardware)
    room = room_for_experts(model, hardware, batch_size)
    layers, experts, active = model.num_moe_layers, model.experts.num_experts, model.router.top_k
    page = math.ceil(costs.mean_slot_bytes(model, costs.page_dtype(model, dtype_named(model.dtype))))
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
        + ", ".join(f"{format_bytes(taken)} are for {purpose}" for purpose, taken in room.taken.items() if taken)
        + f", and {format_bytes(RESERVE_BYTES)} are left alone: room for {plan.budget:,} experts. "
        f"{slots:,} take {format_bytes(slots * page)}.",
        f"A miss takes {1e3 * machine.fetch_s:.3g} ms. Made without a trace: record one with generate --routing-trace, "
        "and policy tune finds what suits it.",
    )
    return AutoPolicy(policy=policy, plan=plan, header=header, reasons=reasons)


def _with_room(plan: SlotPlan, layers: int, experts: int) -> tuple[ExpertPolicy, dict[tuple[str, str], str]]:
    """Return the default policy with the slots of ``plan``, equally many per layer if possible, and its reasons."""
    count = min(experts, plan.slots // layers)
    default = replace(DEFAULT_POLICY, name="auto")
    if count == experts:
        cache = CacheRules(capacity=share_of(1, 1))
        return replace(default, cache=cache, per_layer=None, prefetch=PrefetchRules()), {}
    reasons = {
        ("prefetch", "predictor"): "each layer's router is asked one layer early, and what it is likely to choose is "
        "fetched while the layer before computes"
    }
    if count == 0:
        cache = replace(default.cache, capacity=Capacity(value=plan.slots))
        reasons["cache", "eviction"] = "fewer places than layers: all layers share them"
        prefetch = replace(default.prefetch, budget=min(default.prefetch.budget, plan.slots))
        return replace(default, cache=cache, prefetch=prefetch, per_layer=None), reasons
    reasons["cache", "eviction"] = (
        "the expert least likely to be used at the layer's next visit is evicted, learned as the job runs; a missing "
        "expert that is less likely still passes through without a slot"
    )
    reasons["per_layer", "allocation"] = (
        f"{count} places for each layer: passes visit layers in turn, so that in a shared cache those of the layer "
        "that comes next would be the oldest, and leave just before they are needed"
    )
    cache = replace(default.cache, capacity=share_of(count, experts))
    return replace(default, cache=cache, per_layer=uniform_layers(count)), reasons


def _why_capacity(model: ModelProfile, plan: SlotPlan, batch_size: int) -> str:
    layers, experts, active = model.num_moe_layers, model.experts.num_experts, model.router.top_k
    per_layer = plan.recommended / layers
    met = f"as many as {batch_size} tokens are expected to meet"
    rule = (
        f"recommended are {per_layer:g} a layer, {met if per_layer > 2 * active else f'twice the {active} of a token'}"
    )
    if plan.slots >= layers * experts:
        return f"all {layers * experts:,} have a slot, so that none is ever evicted; {rule}"
    verdict = "below that, so expect many misses" if plan.status is Status.BELOW_RECOMMENDED else "enough"
    return f"room for {plan.slots:,} of {layers * experts:,}, {plan.slots / layers:.1f} a layer; {rule}: {verdict}"


def _with_schedule(policy: ExpertPolicy, machine: MachineCosts, reasons: dict[tuple[str, str], str]) -> ExpertPolicy:
    """Set the schedule for a GPU: ``hybrid`` if the CPU computes one token's expert before its page is transferred."""
    fetch_s = machine.fetch_s
    cpu_s = float(machine.cpu_s(np.array([1]))[0]) + machine.crossing_s(1.0)
    faster = cpu_s < fetch_s
    compared = f"the CPU takes {1e3 * cpu_s:.3g} ms for one token, the page {1e3 * fetch_s:.3g} ms"
    if faster:
        reasons["schedule", "mode"] = f"a missing expert with few tokens is computed where it lies: {compared}"
        reasons["schedule", "offload_threshold_ms"] = "half of what a fetch takes here, so that estimates alone decide"
    else:
        reasons["schedule", "mode"] = f"missing experts are fetched: {compared}"
    return replace(policy, schedule=machine.schedule("hybrid" if faster else "gpu_only"))
