"""Planning as published: the best policy by MoE-Lightning's own estimator, the best cell of its own grid of μ and n_ub
with the linear programmes in closed form. Only the parts of a
policy that the published model has can be fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.core.units import format_bytes
from moelight.hrm.estimate import Estimate, Phase
from moelight.optimizer.explain import explain_policy, worth_saying
from moelight.optimizer.fixed_values import check_fixes
from moelight.optimizer.plan import Plan, TierUse, WhatIf
from moelight.optimizer.published import formulas
from moelight.optimizer.published.formulas import LayerTime, PaperPolicy, PaperSetting
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

# The schedule that T = max(…) models, by the device of decode attention: S1 and S4 of section 4.1.
SCHEDULE = {"cpu": "cgopipe", "gpu": "flexgen"}
_SIZES = ("batch_size", "micro_batch_size", "num_micro_batches")
_DEVICES = ("attention_device", "ffn_device", "cpu_experts", "schedule", "weight_dtype", "kv_dtype")
_SHARES = ("weights.device", "weights.host", "weights.disk", "kv.device", "kv.host")
_SLACK = 1e-9
FIRST_SIZES, STEP = 4, 32  # μ of the artifact: 1, 2, 3, 4, 36, 68, 100, …
TIE = 1e-12  # relative; closer times differ by rounding only
_CELL_SLACK = 1e-12
_AT_ONCE = 1 << 10  # sizes

Range = tuple[float, float]


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
    cell = best_cell(setting, limits)
    if cell is None:
        raise published_infeasible_error(setting, limits, hardware, model)
    attention_device, estimate = "gpu" if cell.gpu_attention else "cpu", _estimate(setting, cell)
    policy = Policy(
        model=name,
        batch_size=cell.batch_size,
        micro_batch_size=cell.micro_batch_size,
        micro_batch_tokens=cell.micro_batch_size * setting.prompt_len,
        kv_tokens=cell.batch_size * setting.context,
        attention_device=attention_device,
        ffn_device="gpu",
        weights=_shares(fix, "weights", cell.weights_host),
        kv=_shares(fix, "kv", cell.kv_host),
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
        memory=_memory(setting, cell, hardware),
        why="",
        bound_tokens_per_s=estimate.decode_tokens_per_s,
    )
    found_what_ifs = _what_if(hardware, model, plan, fix) if what_ifs else ()
    return replace(plan, why=explain_policy(plan, model), what_if=found_what_ifs)


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
        TierUse(
            tier=tier, capacity_bytes=size, by_purpose=tuple((purpose, round(float(b))) for purpose, b in use.items())
        )
        for tier, size, use in uses
    )


def _what_if(hardware: HardwareProfile, model: ModelProfile, plan: Plan, fix: Mapping[str, Any]) -> tuple[WhatIf, ...]:
    """The gain in decode rate of doubling each part of the machine and planning anew; best first."""
    plans = {
        label: published_plan(better, model, plan.workload, name=model.name, fix=fix, what_ifs=False)
        for label, better in _better(hardware)
    }
    rates = {label: planned.estimate.decode_tokens_per_s for label, planned in plans.items()}
    now = plan.estimate.decode_tokens_per_s
    return worth_saying({f"twice the {label}": rate / now - 1.0 for label, rate in rates.items()})


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


def _shares(fix: Mapping[str, Any], prefix: str, host: float) -> Shares:
    """Shares of device and host memory: fixed values exactly as given, the others from ``host``."""
    return Shares(device=fix.get(f"{prefix}.device", 1.0 - host), host=fix.get(f"{prefix}.host", host))


def read_limits(fix: Mapping[str, Any]) -> Limits:
    """The part of the grid that ``fix`` leaves free."""
    check_fixes(fix, has_gpu=True)
    for key in fix:
        if key not in (*_SIZES, *_DEVICES, *_SHARES):
            raise _refused(fix, key, reason="the published model has no such choice")
    if fix.get("ffn_device", "gpu") != "gpu" or fix.get("cpu_experts", 0) > 0:
        key = "cpu_experts" if fix.get("ffn_device", "gpu") == "gpu" else "ffn_device"
        raise _refused(fix, key, reason="the published model computes all experts on the GPU")
    if fix.get("weights.disk", 0) > 0:
        raise _refused(fix, "weights.disk", reason="the published model has no disk")
    device = fix.get("attention_device", "cpu")
    if fix.get("schedule", SCHEDULE[device]) != SCHEDULE[device]:
        keys = ("schedule", "attention_device") if "attention_device" in fix else ("schedule",)
        reason = f"the published model is of {SCHEDULE['cpu']}, and of {SCHEDULE['gpu']} with attention on the GPU"
        raise _refused(fix, *keys, reason=reason)
    mu, n_ub, batch = (fix.get(key) for key in ("micro_batch_size", "num_micro_batches", "batch_size"))
    for key, part in (("micro_batch_size", mu), ("num_micro_batches", n_ub)):
        if batch is not None and part is not None and batch % part:
            reason = "in the published model the batch is a whole number of equal micro-batches"
            raise _refused(fix, "batch_size", key, reason=reason)
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


def _host_share(fix: Mapping[str, Any], prefix: str) -> Range:
    """The range of w_c or c_c: a point if fixed."""
    host, device = fix.get(f"{prefix}.host"), fix.get(f"{prefix}.device")
    if host is not None and device is not None and abs(host + device - 1.0) > _SLACK:
        raise _refused(fix, f"{prefix}.device", f"{prefix}.host", reason="in the published model they sum to 1")
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
            reason = "the CPU attends over host memory alone; fix attention_device=gpu for a cache on the device"
            raise _refused(fix, *keys, reason=reason)
    return 1.0, 1.0


def _dtype(fix: Mapping[str, Any], key: str, model: ModelProfile) -> DType:
    """The fixed dtype, else that of quantised experts, else the model's own if it has 16 bits, else float16."""
    if key in fix:
        return dtype_named(fix[key])
    model_dtype = dtype_named(model.dtype)
    if key == "weight_dtype" and model.stored is not None:
        return model.stored.dtype
    return model_dtype if model_dtype.bits == 16 else dtype_named("float16")


def _refused(fix: Mapping[str, Any], *keys: str, reason: str) -> ConfigError:
    named = " and ".join(f"--fix {key}={fix[key]}" for key in keys)
    return ConfigError(f"{named} cannot be planned by the paper estimator: {reason}; or use the calibrated one")


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
        maximum = largest(lambda sizes: fits(setting, limits, sizes, one), one)
        return f"; or a micro_batch_size of at most {maximum[0]}"
    mu = one * (size or 1)
    mu = mu if fits(setting, limits, mu, one)[0] else one
    maximum = largest(lambda counts: fits(setting, limits, mu, counts), one)
    return f"; or a batch_size of at most {maximum[0] * mu[0]} in micro-batches of {mu[0]}"


# The published search


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The search space: A_g, the ranges of w_c and c_c, and fixed sizes (None: free, over the grid)."""

    gpu_attention: bool = False
    weights_host: Range = (0.0, 1.0)
    kv_host: Range = (1.0, 1.0)
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRow:
    """``base + weights w_c + kv c_c <= cap``, over arrays of cells."""

    base: Any
    weights: Any
    kv: Any
    cap: float

    def room(self, kv_host: Any) -> Any:
        """The bytes of the cap left for w_c."""
        return self.cap - self.base - self.kv * kv_host

    def use(self, weights_host: Any, kv_host: Any) -> Any:
        return self.base + self.weights * weights_host + self.kv * kv_host


@dataclass(frozen=True, kw_only=True, slots=True)
class GridShares:
    """Solutions of the linear programme: w_c, c_c, and whether it is feasible."""

    weights_host: Any
    kv_host: Any
    feasible: Any


def device_rows(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> list[CapacityRow]:
    """home_d + work <= 0.86 m_g and home_p + work <= 0.86 m_g."""
    cap = formulas.DEVICE_SHARE * setting.device_bytes
    uses = (formulas.device_decode_bytes, formulas.device_prefill_bytes)
    return [_row(setting, limits, sizes, counts, use, cap) for use in uses]


def host_row(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> CapacityRow:
    """use_host <= 0.8 m_c."""
    return _row(setting, limits, sizes, counts, formulas.host_use_bytes, formulas.HOST_SHARE * setting.host_bytes)


def _row(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any, use: Any, cap: float) -> CapacityRow:
    """The row of ``use``, which is linear in the shares: three points determine it."""
    base, weights, kv = (
        sum(use(setting, _policy(limits, sizes, counts, *shares)).values()) for shares in ((0, 0), (1, 0), (0, 1))
    )
    return CapacityRow(base=base, weights=weights - base, kv=kv - base, cap=cap)


def _policy(limits: Limits, sizes: Any, counts: Any, weights_host: Any, kv_host: Any) -> PaperPolicy:
    return PaperPolicy(
        micro_batch_size=sizes,
        num_micro_batches=counts,
        weights_host=weights_host,
        kv_host=kv_host,
        gpu_attention=limits.gpu_attention,
    )


def solve_cells(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> GridShares:
    """Solve the artifact's linear programme for arrays of cells. T depends on w_c and c_c through the link alone: the
    shares of least link time are optimal."""
    rows = [*device_rows(setting, limits, sizes, counts), host_row(setting, limits, sizes, counts)]

    def link_s(weights_host: Any, kv_host: Any) -> Any:
        return formulas.decode_link_s(setting, _policy(limits, sizes, counts, weights_host, kv_host))

    return least_shares(rows, limits, link_s)


def least_shares(rows: list[CapacityRow], limits: Limits, cost: Callable[[Any, Any], Any]) -> GridShares:
    """The (w_c, c_c) of least ``cost``, which is linear and decreases in neither. For a given c_c the least feasible
    w_c is best, a maximum of linear functions of c_c; so the best c_c is an end of its range, or a crossing of two
    bounds on w_c."""
    low, high = limits.weights_host
    bounds = [
        *rows,
        CapacityRow(base=0.0, weights=-1.0, kv=0.0, cap=-low),
        CapacityRow(base=0.0, weights=1.0, kv=0.0, cap=high),
    ]
    best = GridShares(weights_host=np.inf, kv_host=np.inf, feasible=False)
    best_cost: Any = np.inf
    for kv_host in _vertices(bounds, limits.kv_host):
        least, maximum = _weights_range(bounds, kv_host)
        feasible = least <= maximum + _CELL_SLACK
        price = np.where(feasible, cost(np.where(feasible, least, 0.0), kv_host), np.inf)
        better = price < best_cost
        best = GridShares(
            weights_host=np.where(better, np.minimum(least, high), best.weights_host),
            kv_host=np.where(better, kv_host, best.kv_host),
            feasible=best.feasible | feasible,
        )
        best_cost = np.minimum(price, best_cost)
    return best


def _vertices(bounds: list[CapacityRow], kv_host: Range) -> Iterator[Any]:
    low, high = kv_host
    yield low
    if low == high:
        return
    yield high
    for one, other in combinations(bounds, 2):
        with np.errstate(divide="ignore", invalid="ignore"):
            across = one.kv * other.weights - other.kv * one.weights
            crossing = np.divide(one.room(0.0) * other.weights - other.room(0.0) * one.weights, across)
        yield np.clip(np.where(np.isfinite(crossing), crossing, low), low, high)


def _weights_range(bounds: list[CapacityRow], kv_host: Any) -> tuple[Any, Any]:
    """The least and the most w_c that all bounds allow; the least exceeds the most if none is feasible."""
    least: Any = -np.inf
    maximum: Any = np.inf
    for row in bounds:
        room = row.room(kv_host)
        flat = np.abs(row.weights) <= _CELL_SLACK * (np.abs(row.base) + np.abs(row.cap))  # rounding, no slope
        slope = np.where(flat, 1.0, row.weights)
        edge = room / slope
        least = np.maximum(least, np.where(~flat & (slope < 0), edge, -np.inf))
        maximum = np.minimum(
            maximum, np.where(flat, np.where(room < 0, -np.inf, np.inf), np.where(slope > 0, edge, np.inf))
        )
    return least, maximum


def best_cell(setting: PaperSetting, limits: Limits) -> PaperPolicy | None:
    """The cell of least T / N; of equals the last in the artifact's order: the largest μ, then the largest n_ub. None
    if nothing fits.

    Memory grows with μ and n_ub, so the cells that fit have the least numbers. The least link time of N sequences is
    convex in N and the other times per sequence do not depend on n_ub, so for each μ T / N falls to its minimum and
    rises after it.
    """
    best, best_s = None, np.inf
    sizes = _sizes(setting, limits)
    while len(sizes):
        some, sizes = sizes[-_AT_ONCE:], sizes[:-_AT_ONCE]
        counts, shares, each_s = _best_of_each(setting, limits, some)
        at = int(np.flatnonzero(each_s <= each_s.min() * (1 + TIE))[-1])
        if each_s[at] < best_s * (1 - TIE):
            weights_host, kv_host = float(shares.weights_host[at]), float(shares.kv_host[at])
            best, best_s = _policy(limits, int(some[at]), int(counts[at]), weights_host, kv_host), each_s[at]
        alone = formulas.decode_time(setting, _policy(limits, sizes, 1, 0.0, 0.0))
        sizes = sizes[np.maximum(alone.cpu_s, alone.gpu_s) / sizes < best_s * (1 - TIE)]
    return best


def _best_of_each(setting: PaperSetting, limits: Limits, sizes: Any) -> tuple[Any, GridShares, Any]:
    """For each of ``sizes`` its n_ub of least T / N, the shares of this cell, and T / N."""
    first = _first(limits, sizes)
    last = first
    if limits.num_micro_batches is None and limits.batch_size is None:
        last = largest(lambda counts: fits(setting, limits, sizes, counts), first)

    def each_s(counts: Any) -> tuple[GridShares, Any]:
        shares = solve_cells(setting, limits, sizes, counts)
        policy = _policy(limits, sizes, counts, shares.weights_host, shares.kv_host)
        return shares, formulas.decode_time(setting, policy).layer_s / policy.batch_size

    low, high = first, last
    while (low < high).any():
        middle = (low + high) // 2
        rises = each_s(np.minimum(middle + 1, last))[1] > each_s(middle)[1] * (1 + TIE)
        low, high = np.where(rises | (low >= high), low, middle + 1), np.where(rises, middle, high)
    return low, *each_s(low)


def fits(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> Any:
    """True for each feasible cell."""
    return np.broadcast_to(solve_cells(setting, limits, sizes, counts).feasible, np.shape(sizes))


def largest(fitting: Callable[[Any], Any], first: Any) -> Any:
    """The largest whole numbers that are ``fitting``, by doubling and bisection from ``first``, which fits."""
    low, high = first, first * 2
    while (growing := fitting(high)).any():
        low, high = np.where(growing, high, low), np.where(growing, high * 2, high)
    while (high - low > 1).any():
        middle = (low + high) // 2
        inside = fitting(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return low


def _sizes(setting: PaperSetting, limits: Limits) -> Any:
    """All feasible μ of the grid, ascending."""

    def at(number: Any) -> Any:
        """The size of this number in the grid, counted from 1."""
        return np.where(number <= FIRST_SIZES, number, FIRST_SIZES + STEP * (number - FIRST_SIZES))

    one = np.array([1], dtype=np.int64)
    if limits.micro_batch_size is not None:
        sizes = one * limits.micro_batch_size
    elif limits.batch_size is not None:
        sizes = at(np.arange(1, FIRST_SIZES + limits.batch_size // STEP + 1))
        sizes = sizes[limits.batch_size % sizes == 0]
    elif fits(setting, limits, one, _first(limits, one))[0]:
        maximum = largest(lambda counts: fits(setting, limits, at(counts), _first(limits, at(counts))), one)
        return at(np.arange(1, maximum[0] + 1))
    else:
        return one[:0]
    return sizes[fits(setting, limits, sizes, _first(limits, sizes))]


def _first(limits: Limits, sizes: Any) -> Any:
    """The least n_ub of each size; the fixed one if n_ub or N is fixed."""
    if limits.num_micro_batches is not None:
        return np.full_like(sizes, limits.num_micro_batches)
    return np.ones_like(sizes) if limits.batch_size is None else limits.batch_size // sizes
