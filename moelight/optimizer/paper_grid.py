"""The published search: the artifact's whole grid of μ and n_ub, with each cell's linear programme in closed form.

The artifact solves a linear programme for every cell and stops at the first cell that is worse than the one before.
This search covers every cell; it skips only micro-batch sizes whose attention and experts alone take longer than the
best cell found. Depends only on a `PaperSetting`, not on machine and model profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from moelight.hrm import paper
from moelight.hrm.paper import PaperPolicy, PaperSetting

FIRST_SIZES, STEP = (1, 2, 3, 4), 32  # g of the artifact: 1, 2, 3, 4, 36, 68, 100, …
TIE = 1e-12  # relative; closer times differ by rounding only
_BLOCK = 1 << 16  # cells that are priced at once
_PIECE = 1 << 10  # micro-batch sizes that are processed together
_SLACK = 1e-12

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
        flat = np.abs(row.weights) <= _SLACK * (np.abs(row.base) + np.abs(row.cap))  # rounding, no slope
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
    for sizes in _sizes(limits):
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


def _sizes(limits: Limits) -> Iterator[Any]:
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
