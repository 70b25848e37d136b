"""``make_plan``: a plan from the profiles of a machine, a model and a workload."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moelight.core.dtypes import BFLOAT16, FLOAT16, DType, computed_in, dtype_named
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.hrm.estimate import cost_model_of, estimate
from moelight.hrm.footprint import Footprint, footprint
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.pass_cost import PlacementCounts
from moelight.hrm.placement import place_pages
from moelight.hrm.workload_model import cache_tokens, cached_sequences
from moelight.optimizer.bound import least_seconds
from moelight.optimizer.explain import explain_policy, infeasible_error, what_if
from moelight.optimizer.fixed_values import check_extent, check_fixes
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.placement import Solution
from moelight.optimizer.plan import Plan, TierUse, key_of, store_plan, stored_plan
from moelight.optimizer.problem import COUNTS, Problem
from moelight.optimizer.runnable import why_not
from moelight.optimizer.search import AS_GOOD, search
from moelight.profiles.hardware import HardwareProfile, with_gpus
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

# The share of a tier without a user's limit that the operating system, a desktop and a driver take.
SYSTEM_SHARE = {"host": 0.05, "device": 0.03}


def make_plan(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    options: PlanOptions | None = None,
    *,
    name: str,
) -> Plan:
    """The best plan for ``model``, called ``name``. Raises BudgetError if nothing fits, with the tier, the missing
    bytes and a sufficient size."""
    options = options or PlanOptions()
    estimator, limits, fix = options.estimator, options.limits, dict(options.fix)
    check_fixes(fix, has_gpu=hardware.tier("device") is not None)
    if "gpus" in fix:
        hardware = with_gpus(hardware, int(fix.pop("gpus")))
    dtypes = options.weight_dtypes, options.kv_dtypes
    key = key_of(hardware, model, workload, name, estimator, limits, fix, *dtypes)
    plan = stored_plan(key) if options.cache else None
    if plan is None:
        began_s = time.perf_counter()
        if estimator == "paper":
            from moelight.optimizer.published import published_plan

            tiers = [
                replace(tier, capacity_bytes=limits.get(tier.name, tier.capacity_bytes)) for tier in hardware.tiers
            ]
            plan = published_plan(replace(hardware, tiers=tuple(tiers)), model, workload, name=name, fix=fix)
        else:
            problem = Problem(
                name=name,
                model=model,
                speeds=speeds_of(hardware),
                workload=workload,
                capacity_bytes=capacities(hardware, limits),
                dtype=compute_dtype(model, hardware),
                weight_dtypes=options.weight_dtypes,
                kv_dtypes=options.kv_dtypes,
                fixed=fix,
            )
            plan = best_plan(problem, hardware, limits, proof=options.proof)
        plan = replace(plan, solve_s=time.perf_counter() - began_s)
        if options.cache and options.proof:
            store_plan(key, plan)
    gpu = hardware.processor("gpu")
    policy = replace(plan.policy, gpus=gpu.count if gpu is not None and plan.policy.discrete else 1)
    speeds = None if estimator == "paper" else speeds_of(hardware)
    return replace(plan, policy=policy, why_not=why_not(policy, model, compute_dtype(model, hardware)), speeds=speeds)


def best_plan(problem: Problem, hardware: HardwareProfile, limits: Mapping[str, int], *, proof: bool = True) -> Plan:
    """The best plan for ``problem``; ``limits``: the user's capacities. Without ``proof`` no what-ifs and no bound."""
    check_extent(problem.model, problem.workload, problem.fixed)
    _check_cache(problem)
    began_s = time.perf_counter()
    result = search(problem)
    if result is None and problem.small_rings is None and problem.has_gpu:
        problem = replace(problem, small_rings=True)
        result = search(problem)
    if result is None:
        raise infeasible_error(problem)
    policy = _simplest(problem, policy_of(problem, result))
    priced = estimate(problem.model, policy, problem.workload, problem.speeds, dtype=problem.dtype)
    tokens = problem.workload.num_requests * problem.workload.gen_len
    bound_s = least_seconds(problem, tokens / priced.tokens_per_s) if proof else 0.0
    plan = Plan(
        policy=policy,
        hardware=hardware.name,
        workload=problem.workload,
        estimator="calibrated",
        estimate=priced,
        memory=memory_of(problem, policy, hardware, limits),
        why="",
        what_if=what_if(problem, result) if proof else (),
        bound_tokens_per_s=tokens / bound_s if proof else 0.0,
        speeds=problem.speeds,
        fixed=tuple(sorted(problem.fixed)),
    )
    return replace(plan, why=explain_policy(plan, problem.model), solve_s=time.perf_counter() - began_s)


def _check_cache(problem: Problem) -> None:
    """Refuse a fixed cache that cannot hold the least number of running sequences."""
    (fewest, maximum), tokens = problem.sequences, problem.count("kv_tokens")
    if tokens is not None and fewest > maximum:
        needed = int(cache_tokens(problem.workload, fewest, problem.block_size, problem.model.max_positions))
        sequences, needs = ("the longest sequence", "needs") if fewest == 1 else (f"{fewest:,} sequences", "need")
        raise ConfigError(
            f"--fix kv_tokens={tokens}: {sequences} of this workload {needs} a cache of {needed:,} tokens at least"
        )


def policy_of(problem: Problem, result: Solution) -> Policy:
    """Convert the candidate to a policy whose shares give every page the tier that the search chose."""
    candidate, placed, total = result.candidate, result.placed, problem.pages
    disk, device = placed.from_disk / total, (total - placed.offloaded) / total
    if candidate.ffn_device == "cpu":
        weights = Shares(host=1.0 - disk, disk=disk)
    elif placed.from_host + placed.computed:
        weights = Shares(device=device, host=1.0 - device - disk, disk=disk)
    else:
        weights = Shares(device=1.0 - disk, disk=disk)
    return Policy(
        **{
            **{name: getattr(candidate, name) for name in Policy.__dataclass_fields__},
            **{name: int(getattr(candidate, name)) for name in COUNTS},
            "ring_pages": _ring_pages(problem, placed, int(candidate.ring_pages)),
            "weights": weights,
            "cpu_experts": placed.computed / total,
            "kv": Shares(device=placed.device_kv, host=1.0 - placed.device_kv),
        }
    )


def _ring_pages(problem: Problem, placed: PlacementCounts, max_pages: int) -> int:
    """``Policy.ring_pages`` of a ring of at most ``max_pages`` pages: 0 where it holds those that two layers stream."""
    streamed = placed.from_host + placed.from_disk
    return max_pages if max_pages < 2 * math.ceil(streamed / problem.model.num_moe_layers) else 0


def _simplest(problem: Problem, policy: Policy) -> Policy:
    """``policy`` with the default of every key that gains nothing: host pages, larger blocks, less look-ahead."""
    plain = Policy(model=policy.model)
    blocks = {"kv_block_size": plain.kv_block_size}
    if "kv_tokens" not in problem.fixed:
        sizes = (policy.batch_size, plain.kv_block_size, problem.model.max_positions)
        blocks["kv_tokens"] = int(cache_tokens(problem.workload, *sizes))
    usual: dict[str, list[dict[str, Any]]] = {
        "host_pages": [{"host_pages": plain.host_pages}],
        "kv_block_size": [blocks],
        "look_ahead": [{"look_ahead": steps} for steps in range(plain.look_ahead, policy.look_ahead)],
    }
    least = _tokens_per_s(problem, policy) * (1 - AS_GOOD)
    for key, changes in usual.items():
        simpler = (replace(policy, **change) for change in changes if key not in problem.fixed)
        good = (other for other in simpler if _fits(problem, other) and _tokens_per_s(problem, other) >= least)
        policy = next(good, policy)
    return policy


def _tokens_per_s(problem: Problem, policy: Policy) -> float:
    return estimate(problem.model, policy, problem.workload, problem.speeds, dtype=problem.dtype).tokens_per_s


def _fits(problem: Problem, policy: Policy) -> bool:
    taken = _footprint(problem, policy)
    needed = {tier: taken.total(tier) for tier in ("device", "host") if tier in problem.capacity_bytes}
    held = cached_sequences(problem.workload, policy.kv_tokens, policy.kv_block_size, problem.model.max_positions)
    return held >= policy.batch_size and all(size <= problem.capacity_bytes[tier] for tier, size in needed.items())


def _footprint(problem: Problem, policy: Policy) -> Footprint:
    types = cost_model_of(problem.model, policy, problem.speeds, problem.dtype)
    return footprint(problem.model, policy, dtype=types.dtype, page_dtype=types.page_dtype)


def memory_of(
    problem: Problem, policy: Policy, hardware: HardwareProfile, limits: Mapping[str, int]
) -> tuple[TierUse, ...]:
    """The use of every tier of the machine: the bytes of ``policy`` by purpose, and the bytes left to the system; of
    the disk the pages that every pass reads, without the checkpoint itself."""
    taken, uses = _footprint(problem, policy), []
    for tier, capacity in problem.capacity_bytes.items():
        total = tier_bytes(hardware, tier, limits)
        purposes = [(arena.purpose, arena.bytes) for arena in taken.arenas if arena.tier == tier and arena.bytes]
        if tier == "disk" and (streamed := len(place_pages(problem.model, policy).on("disk"))):
            page = cost_model_of(problem.model, policy, problem.speeds, problem.dtype).page_bytes()
            purposes = [("disk_experts", streamed * page)]
        if total > capacity and tier in SYSTEM_SHARE:  # a checkpoint may bound the disk, but reserves nothing
            purposes.append(("system", total - capacity))
        if total:
            uses.append(TierUse(tier=tier, capacity_bytes=total, by_purpose=tuple(purposes)))
    return tuple(uses)


def tier_bytes(hardware: HardwareProfile, tier: str, limits: Mapping[str, int]) -> int:
    """Bytes of ``tier`` on the machine, all GPUs together, or the user's limit."""
    memory, gpu = hardware.tier(tier), hardware.processor("gpu")
    count = gpu.count if tier == "device" and gpu is not None else 1
    if tier in limits:
        return limits[tier] * count
    return 0 if memory is None else memory.capacity_bytes * count


def capacities(hardware: HardwareProfile, limits: Mapping[str, int]) -> dict[str, int]:
    """Usable bytes of every tier: the user's limit in full, or the whole tier less the system's share."""
    present = [tier for tier in ("device", "host", "disk") if tier != "device" or hardware.tier("device") is not None]
    sizes = {tier: tier_bytes(hardware, tier, limits) for tier in present}
    kept_back = {tier: 0.0 if tier in limits else SYSTEM_SHARE.get(tier, 0.0) for tier in present}
    return {tier: size - int(size * kept_back[tier]) for tier, size in sizes.items()}


def compute_dtype(model: ModelProfile, hardware: HardwareProfile) -> DType:
    """The dtype of computation: the model's own unless it is quantised in groups, else bfloat16; on a GPU without that,
    float16 in mixed precision."""
    model_dtype, gpu = dtype_named(model.dtype), hardware.processor("gpu")
    model_dtype = model_dtype if model_dtype.group == 0 else BFLOAT16
    return (
        computed_in(FLOAT16, model_dtype)
        if model_dtype == BFLOAT16 and gpu is not None and not gpu.bfloat16
        else model_dtype
    )
