"""From what the user asked and what the machine has to a plan, and from a hand-written policy to one that can run."""

from __future__ import annotations

from dataclasses import replace

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.engine.source import Source
from moelight.hrm.estimate import Rates
from moelight.optimizer.plan import Budgets, Plan, Wishes, fit
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.runtime.machine import Machine
from moelight.runtime.measure import available_bytes
from moelight.scheduler import SCHEDULES

FREE_SHARE = 0.9
_TYPICAL = {True: "t4", False: "cpu-amx"}
_DEFAULT_CONTEXT = 1024
_DISK_BYTES_PER_S = 2e9  # a plain NVMe drive, for profiles that name no disk


def plan_for(
    name: str,
    source: Source,
    machine: Machine,
    *,
    hw: str,
    host_memory: int | None,
    device_memory: int | None,
    wishes: Wishes,
    workload: Workload,
) -> Plan:
    """The plan for ``source`` on ``machine``; memory limits that are None are 90 % of what is free now.

    Raises:
        BudgetError, ConfigError: see `fit`.
    """
    SCHEDULES.get(wishes.schedule)
    device = None
    if machine.discrete:
        device = device_memory or int(FREE_SHARE * machine.device_memory_bytes())
    elif device_memory is not None:
        raise ConfigError("--device-memory: this machine runs without a GPU; bound it with --host-memory")
    host = host_memory or int(FREE_SHARE * available_bytes())
    return fit(
        name,
        source.profile,
        workload,
        Budgets(host=host, device=device),
        dtype=machine.native_dtype(source.weight_map.dtype),
        rates=rates_of(hw, discrete=machine.discrete),
        wishes=wishes,
    )


def rates_of(hw: str, *, discrete: bool) -> Rates:
    """Rates of the hardware profile ``hw``; ``auto`` takes those of a typical machine of this kind."""
    profile = load_hardware_profile(_TYPICAL[discrete] if hw == "auto" else hw)
    return _rates(profile, discrete=discrete)


def resolve(policy: Policy, model: ModelProfile, *, discrete: bool) -> Policy:
    """``policy`` with nothing left open, or a refusal.

    ``kv_tokens`` 0 becomes room for every sequence to reach 1024 tokens (or the model's context, if shorter).

    Raises:
        ConfigError: the policy needs a device that is not there, or something this engine does not do.
    """
    SCHEDULES.get(policy.schedule)
    if (policy.ffn_device == "gpu") != discrete:
        there = "a GPU" if discrete else "no GPU"
        raise ConfigError(f"ffn_device is {policy.ffn_device!r}, but the machine has {there}")
    if policy.attention_device != "cpu" or policy.kv.host != 1.0:
        raise ConfigError("the KV cache lives in host memory, so attention_device must be 'cpu' and kv host=1")
    if policy.weights.device and not discrete:
        raise ConfigError("weights: a share on 'device' needs a GPU")
    if policy.kv_dtype not in ("auto", policy.weight_dtype):
        raise ConfigError(f"kv_dtype {policy.kv_dtype!r} must be the weights' dtype; leave it at auto")
    if policy.kv_tokens:
        return policy
    return replace(policy, kv_tokens=policy.batch_size * min(model.max_positions, _DEFAULT_CONTEXT))


def _rates(profile: HardwareProfile, *, discrete: bool) -> Rates:
    near = profile.tier("device" if discrete else "host")
    unit = profile.processor("gpu" if discrete else "cpu")
    host, disk, link = profile.tier("host"), profile.tier("disk"), profile.link("host", "device")
    if near is None or unit is None or host is None or (discrete and link is None):
        kind = "with" if discrete else "without"
        raise ConfigError(f"hardware profile {profile.name!r} does not describe a machine {kind} a GPU")
    return Rates(
        disk=disk.bandwidth_bytes_per_s if disk else _DISK_BYTES_PER_S,
        link=link.bandwidth_bytes_per_s if link else host.bandwidth_bytes_per_s,
        near_memory=near.bandwidth_bytes_per_s * unit.count,
        host_memory=host.bandwidth_bytes_per_s,
        flops=unit.peak_flops * unit.count,
    )
