"""Builds a plan from the user's options and the machine; resolves a hand-written policy to a runnable one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from moelight.core.dtypes import BFLOAT16, FLOAT32, DType, computed_in, dtype_named
from moelight.core.errors import BudgetError, ConfigError, did_you_mean
from moelight.core.policy import INT8, Policy
from moelight.core.units import format_bytes
from moelight.engine.draft_planning import choose_drafts, plan_drafts
from moelight.engine.experts import resident_share
from moelight.engine.options import EngineOptions
from moelight.engine.speculation import drafts_refusal
from moelight.experts.options import ExpertOptions
from moelight.hrm.costs import page_bytes, page_dtype, page_slot_bytes
from moelight.hrm.footprint import Footprint, footprint
from moelight.hrm.machine_model import Speeds, speeds_of
from moelight.hrm.placement import place_pages, with_residents
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES, routed_only
from moelight.kernels import native
from moelight.kernels.device import Device
from moelight.kernels.gpu import serving
from moelight.optimizer.allowed import AUTO, CACHES, CHOOSE, allowed_caches
from moelight.optimizer.fixed_values import check_dtype
from moelight.optimizer.optimize import best_plan, capacities
from moelight.optimizer.plan import Plan
from moelight.optimizer.problem import SEARCHED_SCHEDULES, Fixed, Problem
from moelight.optimizer.runnable import activation_faults, cache_faults, expert_faults, policy_faults
from moelight.paging.arena import PinningError, locks_in_place
from moelight.profiles.hardware import (
    HardwareProfile,
    Tier,
    load_hardware_profile,
    part_of,
    with_gpu_each,
    with_gpus,
)
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import pages
from moelight.profiles.workload import Workload
from moelight.runtime.machine import Machine
from moelight.runtime.machine_profile import accelerator_name, kept_profile, machine_profile, to_stderr
from moelight.runtime.measure import available_bytes, memory_limit_bytes
from moelight.scheduler import SCHEDULES
from moelight.scheduler.requirements import NEEDS, check_policy, misfit
from moelight.weights.tensor_map import OpenCheckpoint

FREE_SHARE = 0.9
_DEFAULT_CONTEXT = 1024
# A measurement takes about ten seconds. Typical machines are fast ones, so the job takes longer than predicted here.
_WORTH_MEASURING_S = 10.0
# Schedules under which an expert policy has an effect.
ON_DEMAND_SEARCHED = tuple(name for name in SEARCHED_SCHEDULES if name in ON_DEMAND_SCHEDULES)
# A typical NVMe drive, for profiles without a disk: the checkpoint is on some disk.
_PLAIN_DISK = Tier(name="disk", capacity_bytes=1 << 40, bandwidth_bytes_per_s=2e9)


def plan_for(name: str, source: OpenCheckpoint, machine: Machine, options: EngineOptions, workload: Workload) -> Plan:
    """The plan for ``source`` on ``machine``: the search of `optimize`, over all that this engine can run there, beside
    the draft model if one is named and pays. Raises BudgetError if nothing fits."""
    limits = _limits(machine, options.host_memory, options.device_memory)
    plan = _plan_within(limits, name, source, machine, options, workload)
    if not options.draft_tokens() or not options.drafts_by_model or drafts_refusal(source.profile) is not None:
        return plan
    drafts, refused = choose_drafts(options, source, plan.policy, machine, speeds_for(plan, discrete=machine.discrete))
    if refused is not None:
        return plan
    left = {tier: max(1, limit - drafts.bytes_on(tier)) for tier, limit in limits.items()}
    try:
        return _plan_within(left, name, source, machine, options, workload)
    except BudgetError as error:  # the draft model may take less beside the smallest plan
        tier, reason = error.tier, error
    least = _plan_within({**left, tier: reason.needed_bytes}, name, source, machine, options, workload)
    dtype_name, speeds = drafts.policy.weight_dtype, speeds_for(least, discrete=machine.discrete)
    beside = plan_drafts(drafts.source, least.policy, machine, speeds, dtype_name=dtype_name)
    need = reason.needed_bytes + beside.bytes_on(tier)
    if need <= limits[tier]:
        return least
    raise BudgetError(
        f"{reason}, beside {format_bytes(beside.bytes_on(tier))} for drafts of {options.draft_model or 'mtp'}",
        tier=tier,
        needed_bytes=need,
    )


def _plan_within(
    limits: Mapping[str, int],
    name: str,
    source: OpenCheckpoint,
    machine: Machine,
    options: EngineOptions,
    workload: Workload,
) -> Plan:
    """`plan_for` without a draft model, within ``limits`` of memory by tier."""
    experts, schedule = options.experts.policy, options.schedule
    asked = _activations(options.activations, source.profile, machine)
    hardware, ranks = hardware_for(options.hw, discrete=machine.discrete), source.profile.ranks
    if ranks > 1:  # of which each has its own device, and a share of the host
        limits = {**limits, "host": limits["host"] // ranks}
        hardware = part_of(with_gpu_each(hardware, ranks), ranks)
    computed = _computed(options.dtype, source, machine)
    sizes = capacities(hardware, limits)
    # The checkpoint holds every page, at most in float32, so any page may be streamed from disk.
    on_disk = len(pages(source.profile)) * page_bytes(source.profile, FLOAT32)
    _check_schedule(schedule, discrete=machine.discrete)
    requested = {name: getattr(options, name) for name in ("batch_size", "micro_batch_size", "schedule")}
    requested["weight_dtype"] = None if options.dtype == AUTO else options.dtype
    fixed: dict[str, Fixed] = asked | {key: value for key, value in requested.items() if value is not None}
    if experts is not None:
        # Which share of the experts is resident and, beside a GPU, whether the CPU may compute missing ones in place.
        tier = "device" if machine.discrete else "host"
        fixed[f"weights.{tier}"] = resident_share(experts, source.profile, computed)
        if machine.discrete:
            in_place = experts.schedule.mode != "gpu_only" and not (schedule and NEEDS[schedule].device_experts)
            fixed["ffn_device"] = "split" if in_place else "gpu"
    problem = Problem(
        name=name,
        model=source.profile,
        speeds=speeds_of(hardware),
        workload=workload,
        capacity_bytes={**sizes, "disk": max(sizes["disk"], on_disk)},
        dtype=computed,
        schedules=SEARCHED_SCHEDULES if experts is None else ON_DEMAND_SEARCHED,
        kv_dtypes=_caches(options.kv_dtype, source.profile),
        fixed=fixed,
        small_rings=None if experts is None else False,  # a small ring streams every expert in every pass
    )
    try:
        plan = best_plan(problem, hardware, limits, proof=False)
        if plan.policy.discrete == machine.discrete:
            return plan
    except BudgetError:
        if not machine.discrete:
            raise
    # A policy that leaves the GPU idle is not run beside one, whether it is the fastest or the smallest.
    return best_plan(replace(problem, needs_gpu=True), hardware, limits, proof=False)


def _limits(machine: Machine, host_memory: int | None, device_memory: int | None) -> dict[str, int]:
    """The limits of memory in bytes, by tier; raises ConfigError for one that ``machine`` has not."""
    limits = {"host": host_memory or int(FREE_SHARE * available_bytes())}
    if machine.discrete:
        limits["device"] = _device_limit(machine, device_memory)
    elif device_memory is not None:
        raise ConfigError("--device-memory: this machine runs without a GPU; bound it with --host-memory")
    return limits


def _check_schedule(schedule: str | None, *, discrete: bool) -> None:
    if schedule is not None:
        SCHEDULES.get(schedule)
        reason = misfit(schedule, discrete=False, attention="cpu", experts="device")
        if reason and not discrete:
            raise ConfigError(f"schedule {schedule!r} {reason}")


def _computed(dtype: str, source: OpenCheckpoint, machine: Machine) -> DType:
    """The format of computation that is asked for; raises ConfigError if ``machine`` or the package has no such."""
    check_dtype(dtype)
    stored = source.weight_map.dtype
    if dtype == AUTO:
        return machine.native_dtype(stored)
    if dtype == BFLOAT16.name and not machine.bf16:
        raise ConfigError(f"--dtype {dtype}: {machine.device} does not compute in it; use float16 or float32")
    return computed_in(dtype_named(dtype), stored)


def _caches(kv_dtype: str, model: ModelProfile) -> tuple[str, ...]:
    """Formats of keys and values that a plan may use; raises ConfigError if the engine does not keep ``kv_dtype``."""
    if kv_dtype == CHOOSE:
        return allowed_caches(model)
    if kv_dtype not in CACHES:
        choices = (AUTO, CHOOSE, *CACHES[1:])
        raise ConfigError(
            f"--kv-dtype {kv_dtype!r} is not one of {', '.join(choices)}{did_you_mean(kv_dtype, choices)}"
        )
    for fault in cache_faults(Policy(model=model.name, kv_dtype=kv_dtype), model):
        raise ConfigError(f"--kv-dtype {kv_dtype}: {fault}")
    return (kv_dtype,)


def _activations(asked: str | None, model: ModelProfile, machine: Machine) -> dict[str, Fixed]:
    """The activations that are asked for, as a fixed value; ConfigError if no policy for ``machine`` has them."""
    if asked in (None, "auto"):
        return {}
    policy = Policy(model=model.name, activations=str(asked), ffn_device="gpu" if machine.discrete else "cpu")
    for fault in (*activation_faults(policy, model), *policy_faults(policy), *_missing(policy, machine.device)):
        raise ConfigError(fault)
    return {"activations": policy.activations}


def _device_limit(machine: Machine, asked: int | None) -> int:
    """The most bytes that torch's allocator may take. The driver's context exists once free memory was asked for, so it
    is not in it, and is not in a limit that the user gives either. Raises ConfigError if less is free."""
    if asked is not None and machine.twin and machine.memory is None:
        return asked
    free = machine.device_memory_bytes()
    if asked is not None and asked > free:
        raise ConfigError(
            f"--device-memory {format_bytes(asked)}: {format_bytes(free)} is free on the device; lower it, or leave it "
            "out for 90 % of that"
        )
    return asked or int(FREE_SHARE * free)


def speeds_for(plan: Plan | None, *, discrete: bool) -> Speeds:
    """Speeds of the machine that was planned for, or of this one."""
    if plan is not None and plan.speeds is not None:
        return plan.speeds
    return speeds_of(hardware_for("auto", discrete=discrete))


def typical_machine(*, discrete: bool) -> str:
    """The shipped hardware profile of a machine of this kind: with a GPU or not, the processor with tiles or not."""
    if discrete:
        return "t4"
    return "cpu-amx" if native.has_tiles() else "cpu-avx2"


def hardware_for(hw: str, *, discrete: bool) -> HardwareProfile:
    """The hardware profile ``hw``, completed with a disk and reduced to one GPU. ``auto``: this machine if it was
    measured (`measured_for`, `moelight profile`), else a typical one of its kind."""
    measured = kept_profile() if hw == "auto" else None
    if measured is not None and (measured.tier("device") is not None) == discrete:
        profile = measured
    else:
        profile = load_hardware_profile(typical_machine(discrete=discrete) if hw == "auto" else hw)
    if (profile.tier("device") is not None) != discrete:
        kind = "with" if discrete else "without"
        raise ConfigError(f"hardware profile {profile.name!r} does not describe a machine {kind} a GPU")
    if profile.tier("disk") is None:
        profile = replace(profile, tiers=(*profile.tiers, _PLAIN_DISK))
    return with_gpus(profile, 1)


def measured_for(seconds: float, machine: Machine, model: Path) -> bool:
    """Measure this machine and keep its profile, for a job that takes ``seconds`` on a typical one; False if there is a
    profile, the measurement would take longer than the job, or ``machine`` is not what `machine_profile` measures."""
    if seconds < _WORTH_MEASURING_S or machine.twin or kept_profile() is not None:
        return False
    if machine.discrete != (accelerator_name("auto") is not None):
        return False
    try:
        machine_profile(disk_dir=model if model.is_dir() else model.parent)
    except ConfigError as error:
        to_stderr(f"warning: {error}")
    return kept_profile() is not None


def resolve_host_pages(policy: Policy, model: ModelProfile, machine: Machine, dtype: DType) -> tuple[Policy, str]:
    """``policy`` with ``host_pages`` resolved, and the reason: ``pinned`` if the machine page-locks memory in place and
    enough remains for the system. Pinned pages save the staging copy and two thirds of the host memory traffic of
    streamed pages."""

    def staged(reason: str) -> tuple[Policy, str]:
        return replace(policy, host_pages="staged"), reason

    if policy.host_pages != "auto":
        return policy, "the policy says so"
    if not place_pages(model, policy).on("host") or policy.ffn_device == "cpu":
        return staged("no expert page is transferred from host memory")
    if machine.twin or not locks_in_place(machine.device):
        return staged(f"{'a twin' if machine.twin else machine.device.type} locks no memory in place")
    pinned = replace(policy, host_pages="pinned")
    need, available = footprint(model, pinned, dtype=dtype).total("host"), memory_limit_bytes()
    if need > FREE_SHARE * available:
        return staged(f"{format_bytes(need)} of {format_bytes(available)} would be too much to lock")
    return pinned, "memory is locked in place, so expert pages are transferred directly"


def stage_pages(
    policy: Policy, plan: Plan | None, model: ModelProfile, dtype: DType, refused: PinningError
) -> tuple[Policy, str]:
    """``policy`` with staged host pages after the system ``refused`` to lock them, and the reason. Raises BudgetError
    if host memory does not hold the staging ring too, or if another region was refused."""
    staged = replace(policy, host_pages="staged")
    need = footprint(model, staged, dtype=dtype).total("host")
    limit = int(FREE_SHARE * memory_limit_bytes()) if plan is None else plan.use_of("host").capacity_bytes
    if refused.purpose != "host_experts":
        raise refused
    if need > limit:
        raise BudgetError(
            f"{refused}; or let pages be staged: with this policy that takes {format_bytes(need)} of host memory, and "
            f"{format_bytes(limit)} is allowed; `moelight optimize --fix host_pages=staged` plans for less",
            tier="host",
            needed_bytes=need,
        )
    return staged, f"expert pages in host memory are staged: {refused}"


def choose_residents(
    policy: Policy, plan: Plan | None, options: ExpertOptions, model: ModelProfile, dtype: DType
) -> tuple[Policy, str]:
    """``policy`` with the expert capacity of ``options`` and ``residents`` resolved, and the reason. The limits are the
    plan's capacities; without a plan, 90 % of host memory."""
    if options.policy is not None:
        policy = with_residents(policy, resident_share(options.policy, model, dtype))
    if not options.learn:
        policy = replace(policy, residents="static")
    limits = {"host": int(FREE_SHARE * memory_limit_bytes())}
    if plan is not None:
        limits = {use.tier: use.capacity_bytes for use in plan.memory if use.tier != "disk"}
    return resolve_residents(policy, model, dtype, limits, requested=options.policy is not None)


def resolve_residents(
    policy: Policy, model: ModelProfile, dtype: DType, limits: Mapping[str, int], *, requested: bool
) -> tuple[Policy, str]:
    """``policy`` with ``residents`` resolved, and the reason: ``learned`` if on-demand passes can occur and their
    memory fits ``limits``. A ring smaller than a layer must grow at the expense of resident experts; that happens only
    if ``requested``, or if all decode passes are on-demand."""

    def static(reason: str) -> tuple[Policy, str]:
        return replace(policy, residents="static"), reason

    if policy.residents == "static":
        return static("the policy says so")
    if model.dense:
        return static("every pass uses every layer of a dense model")
    placement = place_pages(model, policy)
    if not placement.streamed or not placement.resident:
        return static("every expert is resident" if placement.resident else "no expert is resident")
    if placement.small_ring:
        return static(f"a ring of {policy.ring_pages} pages, less than two layers, moves every expert in every pass")
    if policy.schedule not in ON_DEMAND_SCHEDULES:
        return static(f"{policy.schedule} moves every expert in every pass")
    learned = replace(policy, residents="learned")
    before = footprint(model, policy, dtype=dtype)
    requested = requested or policy.residents == "learned"
    decodes_on_demand = routed_only(model, policy.schedule, policy.batch_size, policy.micro_batch_tokens)
    fitting = _fit_ring(learned, model, dtype, before)
    if fitting is None or (fitting != learned and not requested and not decodes_on_demand):
        return static("the ring beside the experts holds less than a layer")
    for tier, limit in limits.items():
        need = footprint(model, fitting, dtype=dtype).total(tier)
        if need > max(limit, before.total(tier)):
            return static(f"copies of the experts on the device take {format_bytes(need)} of {tier} memory")
    return fitting, "on-demand passes exchange resident experts for routed ones"


def _fit_ring(policy: Policy, model: ModelProfile, dtype: DType, before: Footprint) -> Policy | None:
    """``policy`` with the most resident experts (at least one, else None) that fit, with the ring, into ``before``."""
    total = len(place_pages(model, policy).tiers)
    max_bytes = before.bytes_of("experts") + before.bytes_of("ring")
    stay = len(place_pages(model, policy).resident)
    while stay > 0:
        candidate = with_residents(policy, stay / total)
        sizes = footprint(model, candidate, dtype=dtype)
        over = sizes.bytes_of("experts") + sizes.bytes_of("ring") - max_bytes
        if over <= 0:
            return candidate
        stay -= max(1, over // page_slot_bytes(model, page_dtype(model, dtype)))
    return None


def _missing(policy: Policy, device: torch.device | None) -> Iterator[str]:
    """Yield what ``policy`` requires and the installation or ``device`` lacks, one clause each."""
    if policy.activations != INT8:
        return
    card = None if device is None or Device(device).host or policy.ffn_device == "cpu" else device
    if (policy.ffn_device != "gpu" or card is None) and not native.available():
        yield f"activations int8 need the native kernels ({native.reason()})"
    served, cause = (True, "") if card is None else serving.serves_integers(card)
    if not served:
        yield f"activations int8 are not served on {card}: {cause}"


def resolve(policy: Policy, model: ModelProfile, *, discrete: bool, device: torch.device | None = None) -> Policy:
    """``policy`` with nothing left open: ``kv_tokens`` 0 becomes 1024 tokens per sequence, or the model's context if
    shorter. ``device``: the GPU, if there is a real one. Raises ConfigError if a device is missing or the engine does
    not support the policy."""
    SCHEDULES.get(policy.schedule)
    if policy.discrete != discrete:
        device_text = "a GPU" if discrete else "no GPU"
        name = "attention_device" if policy.ffn_device == "cpu" != policy.attention_device else "ffn_device"
        raise ConfigError(f"{name} is {getattr(policy, name)!r}, but the machine has {device_text}")
    check_policy(policy, discrete=discrete, small_ring=place_pages(model, policy).small_ring)
    if model.dense and discrete and policy.ffn_device != "gpu":
        raise ConfigError(
            f"ffn_device is {policy.ffn_device!r}, but {model.model_type} is dense, and a dense layer runs where its "
            "projections do: beside a GPU, ffn_device gpu"
        )
    if policy.weights.device and not discrete:
        raise ConfigError("weights: a share on 'device' needs a GPU")
    faults = (*policy_faults(policy), *cache_faults(policy, model), *expert_faults(policy, model))
    for fault in (*faults, *_missing(policy, device)):
        raise ConfigError(f"this policy cannot be run: {fault}")
    if policy.kv_tokens:
        return policy
    return replace(policy, kv_tokens=policy.batch_size * min(model.max_positions, _DEFAULT_CONTEXT))
