"""Planning as published: the best policy by MoE-Lightning's own estimator, over its own grid. Only the parts of a
policy that the published model has can be fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.core.units import format_bytes
from moelight.hrm.estimate import Estimate, Phase
from moelight.optimizer.explain import why, worth_saying
from moelight.optimizer.fixed_values import check_fixes
from moelight.optimizer.plan import Plan, TierUse, WhatIf
from moelight.optimizer.published import formulas
from moelight.optimizer.published.formulas import LayerTime, PaperPolicy, PaperSetting
from moelight.optimizer.published.grid import (
    Limits,
    Range,
    best_cell,
    device_rows,
    fits,
    host_row,
    largest,
    least_shares,
)
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

# The schedule that T = max(…) models, by the device of decode attention: S1 and S4 of section 4.1.
SCHEDULE = {"cpu": "cgopipe", "gpu": "flexgen"}
_SIZES = ("batch_size", "micro_batch_size", "num_micro_batches")
_DEVICES = ("attention_device", "ffn_device", "cpu_experts", "schedule", "weight_dtype", "kv_dtype")
_SHARES = ("weights.device", "weights.host", "weights.disk", "kv.device", "kv.host")
_SLACK = 1e-9


def published_plan(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    name: str,
    fix: Mapping[str, Any],
    what_ifs: bool = True,
) -> Plan:
    """The plan of least T / N for the model called ``name``, with the values of ``fix``; raises BudgetError if nothing
    fits.

    ``workload.prompt_len`` is s and ``workload.gen_len`` n; its other fields are not used. The bound is the decode
    rate, which no cell of the grid exceeds. A tier's capacity is the whole memory, all GPUs together, of which the
    estimator uses at most 0.86 (device) and 0.8 (host).
    """
    if workload.gen_len < 2:
        raise ConfigError(
            f"the paper estimator prices decode steps, and gen_len {workload.gen_len} has none: the first token comes "
            "with the prompt; use the calibrated estimator"
        )
    limits = read_limits(fix)
    dtypes = {key: _dtype(fix, key, model) for key in ("weight_dtype", "kv_dtype")}
    setting = formulas.setting_of(hardware, model, workload, **dtypes)
    found = best_cell(setting, limits)
    if found is None:
        raise published_infeasible_error(setting, limits, hardware, model)
    attention_device, estimate = "gpu" if found.gpu_attention else "cpu", _estimate(setting, found)
    policy = Policy(
        model=name,
        batch_size=found.batch_size,
        micro_batch_size=found.micro_batch_size,
        micro_batch_tokens=found.micro_batch_size * setting.prompt_len,
        kv_tokens=found.batch_size * setting.context,
        attention_device=attention_device,
        ffn_device="gpu",
        weights=_shares(fix, "weights", found.weights_host),
        kv=_shares(fix, "kv", found.kv_host),
        schedule=SCHEDULE[attention_device],
        weight_dtype=dtypes["weight_dtype"].name,
        kv_dtype=dtypes["kv_dtype"].name,
    )
    plan = Plan(
        policy=policy,
        hardware=hardware.name,
        workload=workload,
        estimator="paper",
        estimate=estimate,
        memory=_memory(setting, found, hardware),
        why="",
        bound_tokens_per_s=estimate.decode_tokens_per_s,
    )
    found_what_ifs = _what_if(hardware, model, plan, fix) if what_ifs else ()
    return replace(plan, why=why(plan, model), what_if=found_what_ifs)


def _estimate(setting: PaperSetting, policy: PaperPolicy) -> Estimate:
    """Decoding and prompts as two kinds of passes; ``decode_tokens_per_s`` as the artifact reports it."""
    decode, prefill = formulas.decode_time(setting, policy), formulas.prefill_time(setting, policy)
    layer_s, prefill_s, size = float(decode.layer_s), float(prefill.layer_s), policy.batch_size
    rows, later = float(size), float(setting.gen_len - 1)
    prompts = _phase(setting, prefill, name="prompts", passes=1.0, prompt_tokens=rows * setting.prompt_len)
    steps = _phase(setting, decode, name="decode", passes=later, decode_tokens=rows)
    return Estimate(
        layer_s=layer_s,
        pass_s=steps.seconds,
        decode_tokens_per_s=formulas.decode_tokens_per_s(setting, size, layer_s),
        tokens_per_s=formulas.job_tokens_per_s(setting, size, prefill_s, layer_s),
        lanes=steps.lanes,
        binding=max(steps.lanes, key=steps.lanes.__getitem__),
        phases=(prompts, steps),
    )


def _phase(
    setting: PaperSetting,
    time: LayerTime,
    *,
    name: str,
    passes: float,
    decode_tokens: float = 0.0,
    prompt_tokens: float = 0.0,
) -> Phase:
    lanes = {Lane.H2D: time.link_s, Lane.DEVICE: time.gpu_s, Lane.CPU: time.cpu_s}
    return Phase(
        name=name,
        passes=passes,
        decode_tokens=decode_tokens,
        prompt_tokens=prompt_tokens,
        seconds=float(time.layer_s) * setting.num_layers,
        lanes={str(lane): float(seconds) * setting.num_layers for lane, seconds in lanes.items()},
    )


def _memory(setting: PaperSetting, policy: PaperPolicy, hardware: HardwareProfile) -> tuple[TierUse, ...]:
    """Bytes by tier and purpose; of the device, those of the larger phase."""
    phases = (formulas.device_decode_bytes(setting, policy), formulas.device_prefill_bytes(setting, policy))
    device = max(phases, key=lambda use: float(sum(use.values())))
    disk = hardware.tier("disk")
    uses = [
        ("device", setting.device_bytes, device),
        ("host", setting.host_bytes, formulas.host_use_bytes(setting, policy)),
        *([] if disk is None else [("disk", disk.capacity_bytes, {})]),
    ]
    return tuple(
        TierUse(tier=tier, capacity_bytes=size, by_purpose=tuple((what, round(float(b))) for what, b in use.items()))
        for tier, size, use in uses
    )


def _what_if(hardware: HardwareProfile, model: ModelProfile, plan: Plan, fix: Mapping[str, Any]) -> tuple[WhatIf, ...]:
    """The gain in decode rate of doubling each part of the machine and planning anew; best first."""
    plans = {
        what: published_plan(better, model, plan.workload, name=model.name, fix=fix, what_ifs=False)
        for what, better in _better(hardware)
    }
    rates = {what: found.estimate.decode_tokens_per_s for what, found in plans.items()}
    now = plan.estimate.decode_tokens_per_s
    return worth_saying({f"twice the {what}": rate / now - 1.0 for what, rate in rates.items()})


def _better(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    """Yield each change and the machine with this part doubled."""

    def doubled(items: str, value: str, *names: str) -> HardwareProfile:
        changed = (
            replace(item, **{value: 2 * getattr(item, value)}) if not names or item.name in names else item
            for item in getattr(hardware, items)
        )
        return replace(hardware, **{items: tuple(changed)})  # type: ignore[arg-type]

    for tier in hardware.tiers:
        if tier.name in ("device", "host"):
            yield f"{tier.name} memory", doubled("tiers", "capacity_bytes", tier.name)
            yield f"{tier.name} memory bandwidth", doubled("tiers", "bandwidth_bytes_per_s", tier.name)
    for unit in hardware.processors:
        yield f"{unit.name.upper()} arithmetic", doubled("processors", "peak_flops", unit.name)
    yield "link bandwidth", doubled("links", "bandwidth_bytes_per_s")


def _shares(fix: Mapping[str, Any], what: str, host: float) -> Shares:
    """Shares of device and host memory: fixed values exactly as given, the others from ``host``."""
    return Shares(device=fix.get(f"{what}.device", 1.0 - host), host=fix.get(f"{what}.host", host))


def read_limits(fix: Mapping[str, Any]) -> Limits:
    """The part of the grid that ``fix`` leaves free."""
    check_fixes(fix, has_gpu=True)
    for key in fix:
        if key not in (*_SIZES, *_DEVICES, *_SHARES):
            raise _refused(fix, key, why="the published model has no such choice")
    if fix.get("ffn_device", "gpu") != "gpu" or fix.get("cpu_experts", 0) > 0:
        key = "cpu_experts" if fix.get("ffn_device", "gpu") == "gpu" else "ffn_device"
        raise _refused(fix, key, why="the published model computes all experts on the GPU")
    if fix.get("weights.disk", 0) > 0:
        raise _refused(fix, "weights.disk", why="the published model has no disk")
    device = fix.get("attention_device", "cpu")
    if fix.get("schedule", SCHEDULE[device]) != SCHEDULE[device]:
        keys = ("schedule", "attention_device") if "attention_device" in fix else ("schedule",)
        why = f"the published model is of {SCHEDULE['cpu']}, and of {SCHEDULE['gpu']} with attention on the GPU"
        raise _refused(fix, *keys, why=why)
    mu, n_ub, batch = (fix.get(key) for key in ("micro_batch_size", "num_micro_batches", "batch_size"))
    for key, part in (("micro_batch_size", mu), ("num_micro_batches", n_ub)):
        if batch is not None and part is not None and batch % part:
            why = "in the published model the batch is a whole number of equal micro-batches"
            raise _refused(fix, "batch_size", key, why=why)
    if batch is not None and (mu or n_ub):  # two of the three determine the third, since N = μ n_ub
        mu, n_ub = mu or batch // n_ub, batch // mu if mu else n_ub
    return Limits(
        gpu_attention=device == "gpu",
        weights_host=_host_share(fix, "weights"),
        kv_host=_kv_host(fix, device),
        micro_batch_size=mu,
        num_micro_batches=n_ub,
        batch_size=batch,
    )


def _host_share(fix: Mapping[str, Any], what: str) -> Range:
    """The range of w_c or c_c: a point if fixed."""
    host, device = fix.get(f"{what}.host"), fix.get(f"{what}.device")
    if host is not None and device is not None and abs(host + device - 1.0) > _SLACK:
        raise _refused(fix, f"{what}.device", f"{what}.host", why="in the published model they sum to 1")
    if host is None and device is not None:
        host = 1.0 - device
    return (0.0, 1.0) if host is None else (host, host)


def _kv_host(fix: Mapping[str, Any], attention_device: str) -> Range:
    """The range of c_c: 1 for attention on the CPU."""
    if attention_device == "gpu":
        return _host_share(fix, "kv")
    for key, only in (("kv.device", 0.0), ("kv.host", 1.0)):
        if abs(float(fix.get(key, only)) - only) > _SLACK:
            keys = (key, "attention_device") if "attention_device" in fix else (key,)
            why = "the CPU attends over host memory alone; fix attention_device=gpu for a cache on the device"
            raise _refused(fix, *keys, why=why)
    return 1.0, 1.0


def _dtype(fix: Mapping[str, Any], key: str, model: ModelProfile) -> DType:
    """The fixed dtype, else that of quantised experts, else the model's own if it has 16 bits, else float16."""
    if key in fix:
        return dtype_named(fix[key])
    own = dtype_named(model.dtype)
    if key == "weight_dtype" and model.stored is not None:
        return model.stored.dtype
    return own if own.bits == 16 else dtype_named("float16")


def _refused(fix: Mapping[str, Any], *keys: str, why: str) -> ConfigError:
    named = " and ".join(f"--fix {key}={fix[key]}" for key in keys)
    return ConfigError(f"{named} cannot be planned by the paper estimator: {why}; or use the calibrated one")


def published_infeasible_error(
    setting: PaperSetting, limits: Limits, hardware: HardwareProfile, model: ModelProfile
) -> BudgetError:
    """The error that names the memory too small for the smallest cell, the missing bytes, and a sufficient change."""
    mu = limits.micro_batch_size or 1
    n_ub = limits.num_micro_batches or max(1, (limits.batch_size or 1) // mu)
    device_needed = -(-_device_needed(setting, limits, mu, n_ub) // setting.gpus)
    enough = replace(setting, device_bytes=max(setting.device_bytes, device_needed * setting.gpus))
    host_needed = _host_needed(enough, limits, mu, n_ub)
    if enough.device_bytes > setting.device_bytes:
        tier, needed, capacity = "device", device_needed, setting.device_bytes // setting.gpus
        share = formulas.DEVICE_SHARE
        also = host_needed > setting.host_bytes
        others = [f", and --host-memory {format_bytes(host_needed, round_up=True)}"] if also else []
    else:
        tier, needed, capacity, share = "host", host_needed, setting.host_bytes, formulas.HOST_SHARE
        others = [_more_device(setting, limits, mu, n_ub)]
    short = needed - capacity
    return BudgetError(
        f"--{tier}-memory {format_bytes(capacity)} is too small for {model.name} on {hardware.name}: the paper "
        f"estimator uses {share:.0%} of it and needs at least {format_bytes(needed, round_up=True)} for "
        f"batch_size {mu * n_ub} and micro_batch_size {mu}, {format_bytes(short, round_up=True)} ({short} bytes) more"
        + "".join([*others, _fewer(setting, limits)]),
        tier=tier,
        needed_bytes=needed,
    )


def _device_needed(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> int:
    """The least m_g with which the device's rules hold for some shares, in bytes."""
    rows = device_rows(setting, limits, mu, n_ub)
    ends = [(w, c) for w in limits.weights_host for c in limits.kv_host]
    return _capacity(min(max(float(row.use(w, c)) for row in rows) for w, c in ends), formulas.DEVICE_SHARE)


def _host_needed(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> int:
    """The least m_c with which all rules hold for the given device, in bytes; 0 if the device's rules do not hold."""
    host = host_row(setting, limits, mu, n_ub)
    shares = least_shares(device_rows(setting, limits, np.asarray(mu), np.asarray(n_ub)), limits, host.use)
    if not shares.feasible:
        return 0
    return _capacity(float(host.use(shares.weights_host, shares.kv_host)), formulas.HOST_SHARE)


def _capacity(use: float, share: float) -> int:
    """The least whole capacity with ``share`` of it at least ``use``."""
    capacity = math.floor(use / share)
    while share * capacity < use:
        capacity += 1
    return capacity


def _more_device(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> str:
    """A hint at the additional device memory that takes enough weights off the host; empty if none suffices."""
    host = host_row(setting, limits, mu, n_ub)
    low, high = limits.weights_host
    weights_host = min(high, float(host.room(limits.kv_host[0]) / host.weights))
    if weights_host < low:
        return ""
    rows = device_rows(setting, limits, mu, n_ub)
    needed = max(float(row.use(weights_host, limits.kv_host[0])) for row in rows)
    more = -(-(_capacity(needed, formulas.DEVICE_SHARE) - setting.device_bytes) // setting.gpus)
    return f"; or {format_bytes(more, round_up=True)} more --device-memory"


def _fewer(setting: PaperSetting, limits: Limits) -> str:
    """A hint at the largest batch that fits in place of the fixed one; empty if none fits."""
    size, number = limits.micro_batch_size, limits.num_micro_batches
    one = np.array([1], dtype=np.int64)
    if (size, number, limits.batch_size) == (None, None, None) or not fits(setting, limits, one, one)[0]:
        return ""
    if size is not None and number is None:
        most = largest(lambda sizes: fits(setting, limits, sizes, one), one)
        return f"; or a micro_batch_size of at most {most[0]}"
    mu = one * (size or 1)
    mu = mu if fits(setting, limits, mu, one)[0] else one
    most = largest(lambda counts: fits(setting, limits, mu, counts), one)
    return f"; or a batch_size of at most {most[0] * mu[0]} in micro-batches of {mu[0]}"
