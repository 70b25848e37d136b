"""Planning as published: the best policy by MoE-Lightning's own estimator, over its own candidates.

Only the parts of a policy that the published model has can be fixed. The formulas are in ``hrm.paper``, the search is
in ``optimizer.paper``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from moelight.core.dtypes import DType, dtype_named
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.core.units import format_bytes
from moelight.hrm import paper
from moelight.hrm.estimate import Estimate, Phase
from moelight.hrm.paper import LayerTime, PaperPolicy, PaperSetting
from moelight.optimizer.explain import WORTH_SAYING, why
from moelight.optimizer.fixed_values import check_fixes
from moelight.optimizer.plan import Plan, TierUse, WhatIf
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

FIRST_SIZES, STEP = (1, 2, 3, 4), 32  # g of the artifact: 1, 2, 3, 4, 36, 68, 100, …
TIE = 1e-12  # relative; closer times differ by rounding only
_BLOCK = 1 << 16  # cells that are priced at once
_PIECE = 1 << 10  # micro-batch sizes that are processed together
_GRID_SLACK = 1e-12

Range = tuple[float, float]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GridShares:
    """Solutions of the linear programme: w_c, c_c, and whether it is feasible."""

    weights_host: Any
    kv_host: Any
    feasible: Any


def device_rows(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> list[CapacityRow]:
    """home_d + work <= 0.86 m_g and home_p + work <= 0.86 m_g."""
    cap = paper.DEVICE_SHARE * setting.device_bytes
    uses = (paper.device_decode_bytes, paper.device_prefill_bytes)
    return [_row(setting, limits, sizes, counts, use, cap) for use in uses]


def host_row(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> CapacityRow:
    """use_host <= 0.8 m_c."""
    return _row(setting, limits, sizes, counts, paper.host_use_bytes, paper.HOST_SHARE * setting.host_bytes)


def _row(
    setting: PaperSetting,
    limits: Limits,
    sizes: Any,
    counts: Any,
    use: Callable[[PaperSetting, PaperPolicy], dict[str, Any]],
    cap: float,
) -> CapacityRow:
    """The row of ``use``, which is linear in the shares: three points determine it."""
    base, weights, kv = (
        sum(use(setting, _choice(limits, sizes, counts, weights_host, kv_host)).values())
        for weights_host, kv_host in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    )
    return CapacityRow(base=base, weights=weights - base, kv=kv - base, cap=cap)


def _choice(limits: Limits, sizes: Any, counts: Any, weights_host: Any, kv_host: Any) -> PaperPolicy:
    return PaperPolicy(
        micro_batch_size=sizes,
        num_micro_batches=counts,
        weights_host=weights_host,
        kv_host=kv_host,
        gpu_attention=limits.gpu_attention,
    )


def solve_cells(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> GridShares:
    """Solve the artifact's linear programme for arrays of cells.

    T depends on w_c and c_c through the link alone, so the shares of least link time are optimal.
    """
    rows = [*device_rows(setting, limits, sizes, counts), host_row(setting, limits, sizes, counts)]

    def link_s(weights_host: Any, kv_host: Any) -> Any:
        return paper.decode_link_s(setting, _choice(limits, sizes, counts, weights_host, kv_host))

    return least_shares(rows, limits, link_s)


def least_shares(rows: list[CapacityRow], limits: Limits, cost: Callable[[Any, Any], Any]) -> GridShares:
    """The (w_c, c_c) of least ``cost``, which is linear and decreases in neither.

    For a given c_c the least feasible w_c is best; it is the maximum of linear functions of c_c. So the best c_c is an
    end of its range, or a crossing of two bounds on w_c.
    """
    low, high = limits.weights_host
    bounds = [
        *rows,
        CapacityRow(base=0.0, weights=-1.0, kv=0.0, cap=-low),
        CapacityRow(base=0.0, weights=1.0, kv=0.0, cap=high),
    ]
    best = GridShares(weights_host=np.inf, kv_host=np.inf, feasible=False)
    best_cost: Any = np.inf
    for kv_host in _candidates(bounds, limits.kv_host):
        least, most = _weights_range(bounds, kv_host)
        feasible = least <= most + _GRID_SLACK
        price = np.where(feasible, cost(np.where(feasible, least, 0.0), kv_host), np.inf)
        better = price < best_cost
        best = GridShares(
            weights_host=np.where(better, np.minimum(least, high), best.weights_host),
            kv_host=np.where(better, kv_host, best.kv_host),
            feasible=best.feasible | feasible,
        )
        best_cost = np.minimum(price, best_cost)
    return best


def _candidates(bounds: list[CapacityRow], kv_host: Range) -> Iterator[Any]:
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
    """The least and the most w_c that all bounds allow; the least exceeds the most where no w_c is feasible."""
    least: Any = -np.inf
    most: Any = np.inf
    for row in bounds:
        room = row.room(kv_host)
        flat = np.abs(row.weights) <= _GRID_SLACK * (np.abs(row.base) + np.abs(row.cap))  # rounding, no slope
        slope = np.where(flat, 1.0, row.weights)
        edge = room / slope
        least = np.maximum(least, np.where(~flat & (slope < 0), edge, -np.inf))
        most = np.minimum(most, np.where(flat, np.where(room < 0, -np.inf, np.inf), np.where(slope > 0, edge, np.inf)))
    return least, most


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCell:
    """One point of the grid with its shares; ``each_s`` is T / N, the seconds of a layer per sequence."""

    micro_batch_size: int
    num_micro_batches: int
    weights_host: float
    kv_host: float
    each_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GridColumns:
    """Feasible micro-batch sizes, ascending, with the least and the most micro-batches of each."""

    sizes: Any
    first: Any
    last: Any

    def __getitem__(self, kept: Any) -> GridColumns:
        return GridColumns(sizes=self.sizes[kept], first=self.first[kept], last=self.last[kept])

    def __len__(self) -> int:
        return len(self.sizes)


def best_cell(setting: PaperSetting, limits: Limits) -> GridCell | None:
    """The cell of least T / N; of equals the last in the artifact's order: the largest μ, then the largest n_ub. None
    if nothing fits."""
    best: GridCell | None = None
    sizes = micro_batch_sizes(setting, limits)
    while len(sizes):
        piece, sizes = columns(setting, limits, sizes[-_PIECE:]), sizes[:-_PIECE]
        while len(piece):
            taken = _block(piece)
            for cells in _cells(piece[-taken:]):
                found = best_of(setting, limits, *cells)
                if best is None or found.each_s < best.each_s * (1 - TIE):
                    best = found
            piece = piece[:-taken]
            piece = piece[_can_beat(setting, limits, best, piece.sizes)]
        sizes = sizes[_can_beat(setting, limits, best, sizes)]
    return best


def best_of(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> GridCell:
    """The best of the given cells, which must all be feasible; of equals the first."""
    shares = solve_cells(setting, limits, sizes, counts)
    choice = _choice(limits, sizes, counts, shares.weights_host, shares.kv_host)
    each_s = paper.decode_time(setting, choice).layer_s / choice.batch_size
    at = int(np.argmax(each_s <= each_s.min() * (1 + TIE)))
    return GridCell(
        micro_batch_size=int(sizes[at]),
        num_micro_batches=int(counts[at]),
        weights_host=float(shares.weights_host[at]),
        kv_host=float(shares.kv_host[at]),
        each_s=float(each_s[at]),
    )


def _can_beat(setting: PaperSetting, limits: Limits, best: GridCell | None, sizes: Any) -> Any:
    """True where attention and experts alone, whose seconds per sequence do not depend on n_ub, take less than the time
    of ``best``."""
    one = paper.decode_time(setting, _choice(limits, sizes, 1, 0.0, 0.0))
    return np.maximum(one.cpu_s, one.gpu_s) / sizes < (np.inf if best is None else best.each_s * (1 - TIE))


def micro_batch_sizes(setting: PaperSetting, limits: Limits) -> Any:
    """All feasible μ of the grid, ascending. Feasibility is monotonic: a feasible cell stays so with less of either
    number."""
    found = []
    for sizes in _grid_sizes(limits):
        fitting = fits(setting, limits, sizes, _first(limits, sizes))
        whole = np.ones(len(sizes), dtype=bool) if limits.batch_size is None else limits.batch_size % sizes == 0
        found.append(sizes[fitting & whole])
        if not fitting.all():
            break
    return np.concatenate(found)


def columns(setting: PaperSetting, limits: Limits, sizes: Any) -> GridColumns:
    """``sizes`` with their feasible numbers of micro-batches."""
    first = _first(limits, sizes)
    free = limits.num_micro_batches is None and limits.batch_size is None
    last = most_that_fit(lambda counts: fits(setting, limits, sizes, counts), first) if free else first
    return GridColumns(sizes=sizes, first=first, last=last)


def fits(setting: PaperSetting, limits: Limits, sizes: Any, counts: Any) -> Any:
    """True for each feasible cell."""
    return np.broadcast_to(solve_cells(setting, limits, sizes, counts).feasible, np.shape(sizes))


def most_that_fit(fitting: Callable[[Any], Any], first: Any) -> Any:
    """The largest counts that are ``fitting``, by doubling and bisection from ``first``, which must be fitting."""
    low, high = first, first * 2
    while (growing := fitting(high)).any():
        low, high = np.where(growing, high, low), np.where(growing, high * 2, high)
    while (high - low > 1).any():
        middle = (low + high) // 2
        inside = fitting(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return low


def _grid_sizes(limits: Limits) -> Iterator[Any]:
    """μ in the artifact's order, in pieces."""
    if limits.micro_batch_size is not None:
        yield np.array([limits.micro_batch_size], dtype=np.int64)
        return
    yield np.array(FIRST_SIZES, dtype=np.int64)
    start, piece = FIRST_SIZES[-1] + STEP, 64
    while limits.batch_size is None or start <= limits.batch_size:
        yield start + STEP * np.arange(piece, dtype=np.int64)
        start, piece = start + STEP * piece, min(piece * 2, _BLOCK)


def _first(limits: Limits, sizes: Any) -> Any:
    """The least n_ub of each size; the fixed one if n_ub or N is fixed."""
    if limits.num_micro_batches is not None:
        return np.full_like(sizes, limits.num_micro_batches)
    if limits.batch_size is not None:
        return np.maximum(limits.batch_size // sizes, 1)
    return np.ones_like(sizes)


def _block(piece: GridColumns) -> int:
    """The number of largest sizes that together have at most `_BLOCK` cells; at least one."""
    cells = np.cumsum((piece.last - piece.first + 1)[::-1])
    return max(1, int(np.searchsorted(cells, _BLOCK, side="right")))


def _cells(block: GridColumns) -> Iterator[tuple[Any, Any]]:
    """All cells of ``block`` from the largest to the smallest, in pieces of at most `_BLOCK` cells."""
    sizes, first, last = block.sizes[::-1], block.first[::-1], block.last[::-1]
    number = last - first + 1
    if len(sizes) > 1:
        before = np.repeat(np.cumsum(number) - number, number)
        yield np.repeat(sizes, number), np.repeat(last, number) - (np.arange(number.sum()) - before)
        return
    for top in range(int(last[0]), int(first[0]) - 1, -_BLOCK):
        counts = np.arange(top, max(int(first[0]) - 1, top - _BLOCK), -1, dtype=np.int64)
        yield np.full_like(counts, sizes[0]), counts


T = TypeVar("T")

# The schedule that T = max(…) models, by the device of decode attention: S1 and S4 of section 4.1.
SCHEDULE = {"cpu": "cgopipe", "gpu": "flexgen"}
_KNOWN = (
    "batch_size",
    "micro_batch_size",
    "num_micro_batches",
    "attention_device",
    "ffn_device",
    "weights.device",
    "weights.host",
    "weights.disk",
    "cpu_experts",
    "kv.device",
    "kv.host",
    "schedule",
    "weight_dtype",
    "kv_dtype",
)
_SLACK = 1e-9

TierBytes = tuple[str, int, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperResult:
    """The best cell of the grid.

    Attributes:
        layer_s: T, one layer of a decode step for the whole batch.
        prefill_layer_s: the same for the prefill pass.
        decode_tokens_per_s: N n / (T (n-1) l), as the artifact reports it.
        tokens_per_s: N n / (T_prefill l + T (n-1) l), prompts included.
        lanes: seconds of one decode step by lane; ``prefill_lanes`` those of the prefill pass.
        binding: the busiest lane of a decode step.
        memory: (tier, capacity, bytes by purpose); ``device`` is all GPUs together. The capacity is the whole memory;
            the estimator uses at most 0.86 (device) and 0.8 (host) of it.
    """

    policy: Policy
    layer_s: float
    prefill_layer_s: float
    decode_tokens_per_s: float
    tokens_per_s: float
    lanes: dict[str, float]
    prefill_lanes: dict[str, float]
    binding: str
    memory: tuple[TierBytes, ...]


def search_published(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    name: str,
    fix: Mapping[str, Any],
) -> PaperResult:
    """The policy of least T / N for the model called ``name``, with the values of ``fix``.

    ``workload.prompt_len`` is s and ``workload.gen_len`` n; the workload's other fields are not used.

    Raises:
        ConfigError: no GPU; fewer than two tokens to generate; a fixed value contradicts another, or the published
            model has no such key (keys are named).
        BudgetError: nothing fits; names the memory, the missing bytes and a sufficient size.
    """
    if workload.gen_len < 2:
        raise ConfigError(
            f"the paper estimator prices decode steps, and gen_len {workload.gen_len} has none: the first token comes "
            "with the prompt; use the calibrated estimator"
        )
    limits = read_limits(fix)
    weight_dtype, kv_dtype = _dtype(fix, "weight_dtype", model), _dtype(fix, "kv_dtype", model)
    setting = paper.setting_of(hardware, model, workload, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    cell = best_cell(setting, limits)
    if cell is None:
        raise published_infeasible_error(setting, limits, hardware, model)
    choice = PaperPolicy(
        micro_batch_size=cell.micro_batch_size,
        num_micro_batches=cell.num_micro_batches,
        weights_host=cell.weights_host,
        kv_host=cell.kv_host,
        gpu_attention=limits.gpu_attention,
    )
    attention_device = "gpu" if limits.gpu_attention else "cpu"
    policy = Policy(
        model=name,
        batch_size=choice.batch_size,
        micro_batch_size=choice.micro_batch_size,
        micro_batch_tokens=choice.micro_batch_size * workload.prompt_len,
        kv_tokens=choice.batch_size * setting.context,
        attention_device=attention_device,
        ffn_device="gpu",
        weights=_shares(fix, "weights", choice.weights_host),
        kv=_shares(fix, "kv", choice.kv_host),
        weight_dtype=weight_dtype.name,
        kv_dtype=kv_dtype.name,
        schedule=SCHEDULE[attention_device],
    )
    return _result(setting, choice, policy, hardware)


def published_plan(
    hardware: HardwareProfile,
    model: ModelProfile,
    workload: Workload,
    *,
    name: str,
    fix: Mapping[str, Any],
) -> Plan:
    """The result of `search_published` as a plan. Its bound is the decode rate, which no cell of the grid exceeds.

    Raises:
        ConfigError, BudgetError: see `search_published`.
    """
    found = search_published(hardware, model, workload, name=name, fix=fix)
    policy, steps = found.policy, workload.gen_len - 1
    prompt_tokens = float(policy.batch_size * workload.prompt_len)
    layers = model.num_layers
    estimate = Estimate(
        layer_s=found.layer_s,
        pass_s=found.layer_s * layers,
        decode_tokens_per_s=found.decode_tokens_per_s,
        tokens_per_s=found.tokens_per_s,
        lanes=found.lanes,
        binding=found.binding,
        phases=(
            Phase(
                name="prompts",
                passes=1.0,
                decode_tokens=0.0,
                prompt_tokens=prompt_tokens,
                seconds=found.prefill_layer_s * layers,
                lanes=found.prefill_lanes,
            ),
            Phase(
                name="decode",
                passes=float(steps),
                decode_tokens=float(policy.batch_size),
                prompt_tokens=0.0,
                seconds=found.layer_s * layers,
                lanes=found.lanes,
            ),
        ),
    )
    plan = Plan(
        policy=policy,
        hardware=hardware.name,
        workload=workload,
        estimator="paper",
        estimate=estimate,
        memory=tuple(TierUse(tier=tier, capacity_bytes=size, by_purpose=use) for tier, size, use in found.memory),
        why="",
        what_if=_what_if(hardware, model, workload, fix, found.decode_tokens_per_s),
        bound_tokens_per_s=found.decode_tokens_per_s,
    )
    return replace(plan, why=why(plan, model))


def _what_if(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, fix: Mapping[str, Any], now: float
) -> tuple[WhatIf, ...]:
    """The gain in decode rate of doubling each part of the machine and planning anew; best first."""
    found = []
    for change, better in _better(hardware):
        gain = search_published(better, model, workload, name=model.name, fix=fix).decode_tokens_per_s / now - 1.0
        if gain >= WORTH_SAYING:
            found.append(WhatIf(change=f"twice the {change}", gain=gain))
    return tuple(sorted(found, key=lambda help_: -help_.gain))


def _better(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    """Yield each change and the machine with this part doubled."""
    words = {"device": "device memory", "host": "host memory"}
    for tier in hardware.tiers:
        if tier.name in words:
            size = replace(tier, capacity_bytes=2 * tier.capacity_bytes)
            rate = replace(tier, bandwidth_bytes_per_s=2 * tier.bandwidth_bytes_per_s)
            yield words[tier.name], replace(hardware, tiers=_swapped(hardware.tiers, tier, size))
            yield f"{words[tier.name]} bandwidth", replace(hardware, tiers=_swapped(hardware.tiers, tier, rate))
    for unit in hardware.processors:
        twice = replace(unit, peak_flops=2 * unit.peak_flops)
        name = f"{unit.name.upper()} arithmetic"
        yield name, replace(hardware, processors=_swapped(hardware.processors, unit, twice))
    links = tuple(replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s) for link in hardware.links)
    yield "link bandwidth", replace(hardware, links=links)


def _swapped(items: tuple[T, ...], old: T, new: T) -> tuple[T, ...]:
    return tuple(new if item is old else item for item in items)


def _shares(fix: Mapping[str, Any], what: str, host: float) -> Shares:
    """Shares of device and host memory: fixed values exactly as given, the others from ``host``."""
    return Shares(device=fix.get(f"{what}.device", 1.0 - host), host=fix.get(f"{what}.host", host))


def _result(setting: PaperSetting, choice: PaperPolicy, policy: Policy, hardware: HardwareProfile) -> PaperResult:
    decode, prefill = paper.decode_time(setting, choice), paper.prefill_time(setting, choice)
    layer_s, prefill_layer_s = float(decode.layer_s), float(prefill.layer_s)
    lanes = _lanes(setting, decode)
    return PaperResult(
        policy=policy,
        layer_s=layer_s,
        prefill_layer_s=prefill_layer_s,
        decode_tokens_per_s=paper.decode_tokens_per_s(setting, policy.batch_size, layer_s),
        tokens_per_s=paper.job_tokens_per_s(setting, policy.batch_size, prefill_layer_s, layer_s),
        lanes=lanes,
        prefill_lanes=_lanes(setting, prefill),
        binding=max(lanes, key=lanes.__getitem__),
        memory=_memory(setting, choice, hardware),
    )


def _lanes(setting: PaperSetting, time: LayerTime) -> dict[str, float]:
    layers = setting.num_layers
    return {
        str(Lane.H2D): float(time.link_s) * layers,
        str(Lane.DEVICE): float(time.gpu_s) * layers,
        str(Lane.CPU): float(time.cpu_s) * layers,
    }


def _memory(setting: PaperSetting, choice: PaperPolicy, hardware: HardwareProfile) -> tuple[TierBytes, ...]:
    """Bytes by tier and purpose; of the device, those of the larger phase."""
    phases = (paper.device_decode_bytes(setting, choice), paper.device_prefill_bytes(setting, choice))
    device = max(phases, key=lambda use: float(sum(use.values())))
    host = paper.host_use_bytes(setting, choice)
    uses = [
        ("device", setting.device_bytes, _whole(device)),
        ("host", setting.host_bytes, _whole(host)),
    ]
    disk = hardware.tier("disk")
    return (*uses, *([("disk", disk.capacity_bytes, ())] if disk is not None else []))


def _whole(use: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((purpose, round(float(size))) for purpose, size in use.items())


# ---------------------------------------------------------------------------------------------------------------------
# Fixed values


def read_limits(fix: Mapping[str, Any]) -> Limits:
    """The part of the grid that ``fix`` leaves free.

    Raises:
        ConfigError: see `search_published`.
    """
    check_fixes(fix, has_gpu=True)
    for key in fix:
        if key not in _KNOWN:
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
    mu, n_ub, batch = _sizes(fix)
    return Limits(
        gpu_attention=device == "gpu",
        weights_host=_host_share(fix, "weights", (0.0, 1.0)),
        kv_host=_kv_host(fix, device),
        micro_batch_size=mu,
        num_micro_batches=n_ub,
        batch_size=batch,
    )


def _sizes(fix: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """μ, n_ub and N; any two determine the third, since N = μ n_ub."""
    mu, n_ub, batch = (fix.get(key) for key in ("micro_batch_size", "num_micro_batches", "batch_size"))
    if batch is not None:
        for key, part in (("micro_batch_size", mu), ("num_micro_batches", n_ub)):
            if part is not None and batch % part:
                why = "in the published model the batch is a whole number of equal micro-batches"
                raise _refused(fix, "batch_size", key, why=why)
        if mu is not None:
            n_ub = batch // mu
        elif n_ub is not None:
            mu = batch // n_ub
    return mu, n_ub, batch


def _host_share(fix: Mapping[str, Any], what: str, free: Range) -> Range:
    if f"{what}.host" in fix and f"{what}.device" in fix:
        host, device = float(fix[f"{what}.host"]), float(fix[f"{what}.device"])
        if abs(host + device - 1.0) > _SLACK:
            why = "in the published model they sum to 1"
            raise _refused(fix, f"{what}.device", f"{what}.host", why=why)
    if f"{what}.host" in fix:
        return (float(fix[f"{what}.host"]),) * 2
    return (1.0 - float(fix[f"{what}.device"]),) * 2 if f"{what}.device" in fix else free


def _kv_host(fix: Mapping[str, Any], attention_device: str) -> Range:
    """The range of c_c: 1 for attention on the CPU."""
    if attention_device == "gpu":
        return _host_share(fix, "kv", (0.0, 1.0))
    for key, only in (("kv.device", 0.0), ("kv.host", 1.0)):
        if abs(float(fix.get(key, only)) - only) > _SLACK:
            keys = (key, "attention_device") if "attention_device" in fix else (key,)
            why = "the CPU attends over host memory alone; fix attention_device=gpu for a cache on the device"
            raise _refused(fix, *keys, why=why)
    return 1.0, 1.0


def _dtype(fix: Mapping[str, Any], key: str, model: ModelProfile) -> DType:
    """The fixed dtype, else the checkpoint's own if it has 16 bits, else float16."""
    if key in fix:
        return dtype_named(fix[key])
    own = dtype_named(model.dtype)
    return own if own.bits == 16 else dtype_named("float16")


def _refused(fix: Mapping[str, Any], *keys: str, why: str) -> ConfigError:
    named = " and ".join(f"--fix {key}={fix[key]}" for key in keys)
    return ConfigError(f"{named} cannot be planned by the paper estimator: {why}; or use the calibrated one")


def published_infeasible_error(
    setting: PaperSetting, limits: Limits, hardware: HardwareProfile, model: ModelProfile
) -> BudgetError:
    """The error that names the memory too small for even the smallest cell, the missing bytes, and the least change
    that suffices."""
    mu = limits.micro_batch_size or 1
    n_ub = limits.num_micro_batches or max(1, (limits.batch_size or 1) // mu)
    device_needed = -(-_device_needed(setting, limits, mu, n_ub) // setting.gpus)
    enough = replace(setting, device_bytes=max(setting.device_bytes, device_needed * setting.gpus))
    host_needed = _host_needed(enough, limits, mu, n_ub)
    if enough.device_bytes > setting.device_bytes:
        tier, needed, capacity = "device", device_needed, setting.device_bytes // setting.gpus
        share = paper.DEVICE_SHARE
        also = host_needed > setting.host_bytes
        others = [f", and --host-memory {format_bytes(host_needed, round_up=True)}"] if also else []
    else:
        tier, needed, capacity, share = "host", host_needed, setting.host_bytes, paper.HOST_SHARE
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
    least = min(max(float(row.base + row.weights * w + row.kv * c) for row in rows) for w, c in ends)
    return _capacity(least, paper.DEVICE_SHARE)


def _host_needed(setting: PaperSetting, limits: Limits, mu: int, n_ub: int) -> int:
    """The least m_c with which all rules hold for the given device, in bytes; 0 if the device's rules do not hold."""
    rows = device_rows(setting, limits, np.asarray(mu), np.asarray(n_ub))
    host = host_row(setting, limits, mu, n_ub)

    def use(weights_host: Any, kv_host: Any) -> Any:
        return host.base + host.weights * weights_host + host.kv * kv_host

    shares = least_shares(rows, limits, use)
    if not shares.feasible:
        return 0
    return _capacity(float(use(shares.weights_host, shares.kv_host)), paper.HOST_SHARE)


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
    kv_host = limits.kv_host[0]
    needed = max(float(row.base + row.weights * weights_host + row.kv * kv_host) for row in rows)
    more = -(-(_capacity(needed, paper.DEVICE_SHARE) - setting.device_bytes) // setting.gpus)
    return f"; or {format_bytes(more, round_up=True)} more --device-memory"


def _fewer(setting: PaperSetting, limits: Limits) -> str:
    """A hint at the largest batch that fits in place of the fixed one; empty if none fits."""
    if limits.batch_size is None and limits.num_micro_batches is None and limits.micro_batch_size is None:
        return ""
    one = np.array([1], dtype=np.int64)
    if not fits(setting, limits, one, one)[0]:
        return ""
    if limits.micro_batch_size is not None and limits.num_micro_batches is None:
        most = most_that_fit(lambda sizes: fits(setting, limits, sizes, one), one)
        return f"; or a micro_batch_size of at most {most[0]}"
    mu = one * (limits.micro_batch_size or 1)
    if not fits(setting, limits, mu, one)[0]:
        mu = one
    most = most_that_fit(lambda counts: fits(setting, limits, mu, counts), one)
    return f"; or a batch_size of at most {most[0] * mu[0]} in micro-batches of {mu[0]}"
