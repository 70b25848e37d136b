"""The published search: the best cell of the grid of μ and n_ub, its linear programmes in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from moelight.optimizer.published import formulas
from moelight.optimizer.published.formulas import PaperPolicy, PaperSetting

FIRST_SIZES, STEP = 4, 32  # μ of the artifact: 1, 2, 3, 4, 36, 68, 100, …
TIE = 1e-12  # relative; closer times differ by rounding only
_SLACK = 1e-12
_AT_ONCE = 1 << 10  # sizes

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
        least, most = _weights_range(bounds, kv_host)
        feasible = least <= most + _SLACK
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
    most: Any = np.inf
    for row in bounds:
        room = row.room(kv_host)
        flat = np.abs(row.weights) <= _SLACK * (np.abs(row.base) + np.abs(row.cap))  # rounding, no slope
        slope = np.where(flat, 1.0, row.weights)
        edge = room / slope
        least = np.maximum(least, np.where(~flat & (slope < 0), edge, -np.inf))
        most = np.minimum(most, np.where(flat, np.where(room < 0, -np.inf, np.inf), np.where(slope > 0, edge, np.inf)))
    return least, most


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
        most = largest(lambda numbers: fits(setting, limits, at(numbers), _first(limits, at(numbers))), one)
        return at(np.arange(1, most[0] + 1))
    else:
        return one[:0]
    return sizes[fits(setting, limits, sizes, _first(limits, sizes))]


def _first(limits: Limits, sizes: Any) -> Any:
    """The least n_ub of each size; the fixed one if n_ub or N is fixed."""
    if limits.num_micro_batches is not None:
        return np.full_like(sizes, limits.num_micro_batches)
    return np.ones_like(sizes) if limits.batch_size is None else limits.batch_size // sizes
