"""Which candidates are looked at: a coarse lattice over the whole space first, then ever closer around good ones.

Knows what is fixed. Refuses to know what candidates cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from moelight.optimizer.homes import Wanted
from moelight.optimizer.problem import PROMPT_MICRO_BATCH_TOKENS, Cells, Problem, Setting, cells

WHOLE_UP_TO = 12  # requests: up to there the lattice has every N and every number of micro-batches
_PAGE_SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
_CACHE_SHARES = (np.nan, 0.0, 1.0, 0.5)
_STEPS = (-1, 0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Candidates, and what is wanted of their homes."""

    cells: Cells
    wanted: Wanted

    def at(self, index: Any) -> Choices:
        """The candidates that ``index`` picks."""
        return Choices(cells=self.cells.at(index), wanted=self.wanted.at(index))


def first_look(problem: Problem, setting: Setting) -> Choices:
    """The lattice of a setting: N, micro-batches and prompt tokens in growing steps, and a few shares."""
    requests, prompt_len = problem.workload.num_requests, problem.workload.prompt_len
    if requests <= WHOLE_UP_TO:
        sizes = batches = np.arange(1, requests + 1)
    else:
        sizes = _sizes(requests, np.geomspace(1, requests, 24), waves=8)
        batches = np.unique(np.geomspace(1, requests, 12).astype(int))
    all_prompts, context = requests * prompt_len, problem.model.max_positions
    steps = PROMPT_MICRO_BATCH_TOKENS[:: 1 if requests <= WHOLE_UP_TO else 2]
    whole = [t for t in PROMPT_MICRO_BATCH_TOKENS if t >= context][:1]  # no context has to be gathered
    tokens = sorted({*(t for t in steps if t <= 4 * all_prompts), *whole, steps[0]})
    split, open_cache = setting.ffn_device == "split", cache_is_open(problem, setting)
    cache = np.array(_CACHE_SHARES[:: 2 if split else 1] if open_cache else (np.nan,))
    computed = np.array(_PAGE_SHARES[:: 2 if open_cache else 1] if split else (0.0,)) * problem.pages
    return _grid(problem, setting, sizes, batches, tokens, computed, cache, [np.inf], [0.0])


def closely(problem: Problem, leader: Choices) -> Choices:
    """A close lattice of sizes, up to a factor of 4 from those of one candidate, with its shares."""
    cell, wanted, requests = leader.cells, leader.wanted, problem.workload.num_requests
    n, t, b = int(cell.batch_size), int(cell.micro_batch_tokens), -(-int(cell.batch_size) // int(cell.micro_batch_size))
    sizes = _sizes(requests, np.geomspace(max(1, n / 4), min(requests, 4 * n), 120), waves=16)
    batches = np.unique(np.append(np.arange(1, 17), np.geomspace(max(1, b / 4), 4 * b, 12)).astype(int))
    tokens = [int(part) for part in (t, _next_tokens(t, 1), _next_tokens(t, -1))]
    computed, spilled = [float(wanted.computed)], [float(wanted.spilled)]
    cache, resident = [float(wanted.device_kv)], [float(wanted.resident)]
    return _grid(problem, cell.setting, sizes, batches, tokens, computed, cache, resident, spilled)


def around(problem: Problem, leaders: Choices, *, step: float) -> Choices:
    """Neighbours of some candidates of one setting: sizes up to the factor ``1 + step`` away, shares up to ``step`` of
    a whole, and always those one whole step away."""
    cell, requests = leaders.cells, problem.workload.num_requests
    n, mu, t = (np.atleast_1d(a)[:, None] for a in (cell.batch_size, cell.micro_batch_size, cell.micro_batch_tokens))
    factor, single, in_waves, times, more, twice, double = _SIZE_MOVES
    scale, waves = (1.0 + step) ** factor, -(-requests // n)
    more_waves = np.maximum(1, np.round(waves * scale) + single).astype(np.int64)
    size = np.where(in_waves > 0, -(-requests // more_waves), np.round(n * scale) + single)
    batches = np.round(-(-n // mu) * twice * (1.0 + step) ** times) + more
    batches = np.where(more == _SAME_SIZE, np.ceil(np.maximum(size, 1) / mu), batches)
    wanted = _columns(leaders.wanted)
    near, alone = _near_shares(problem, cell, wanted, step)
    parts = [(size, batches, _next_tokens(t, double), shares) for shares in (wanted, *(near if step > 0 else ()))]
    parts += [(n, -(-n // mu), _next_tokens(t, up), shares) for up in (0, -1, 1) for shares in (*near, *alone)]
    columns: list[list[Any]] = [[] for _ in range(7)]
    for *sizes, shares in parts:
        for column, part in zip(columns, np.broadcast_arrays(*sizes, *shares), strict=True):
            column.append(part.ravel())
    return _choices(problem, cell.setting, *map(np.concatenate, columns))


def scattered(problem: Problem, leaders: Choices, draw: np.random.Generator, count: int) -> Choices:
    """Random neighbours of some candidates of one setting: each size and each share as it is, or a thousandth of it to
    a few times as much away."""
    cell, requests, wanted = leaders.cells, problem.workload.num_requests, _columns(leaders.wanted)
    pick = draw.integers(len(cell.batch_size), size=count)
    n, mu, t = (np.asarray(a)[pick] for a in (cell.batch_size, cell.micro_batch_size, cell.micro_batch_tokens))
    computed, cache, resident, spilled = (column[pick, 0] for column in wanted)

    def some(share: float) -> Any:
        return draw.random(count) < share

    def scale() -> Any:
        return np.exp(draw.normal(0, 1, count) * 10.0 ** draw.uniform(-3, 0, count))

    def moved(pages: Any) -> Any:
        return np.where(
            some(0.5), pages, pages + np.round(draw.normal(0, 1, count) * 10.0 ** draw.uniform(0, 3, count))
        )

    waves = np.maximum(1, np.round(-(-requests // n) * scale()))
    size = np.where(some(0.4), n, np.where(some(0.7), np.ceil(requests / waves), np.round(n * scale())))
    batches = np.where(some(0.3), -(-n // mu), np.round(-(-n // mu) * scale()) + draw.integers(-2, 3, count))
    tokens = t * np.where(some(0.5), 1.0, 2.0 ** draw.integers(-2, 3, count))
    if cache_is_open(problem, cell.setting):
        resident = np.where(some(0.2), np.inf, moved(np.minimum(resident, problem.pages)))
    if cell.ffn_device == "split":
        computed = moved(computed)
    if cell.ffn_device != "cpu":
        spilled = moved(spilled)
    return _choices(problem, cell.setting, size, batches, tokens, computed, cache, resident, spilled)


def _sizes(requests: int, lattice: Any, *, waves: int) -> Any:
    """N of a lattice, and those that serve all requests in so many full waves."""
    return np.unique(np.append(-(-requests // np.arange(1, waves + 1)), lattice.astype(int)))


_SAME_SIZE = 99.0  # instead of a number of micro-batches more or less: as many as keep the size of each


def _size_moves() -> Any:
    """Moves of N (a factor's exponent, single ones, of waves instead), of micro-batches (and twice or half as many),
    and of prompt tokens."""
    sizes = [(up, single, waves) for up, single, waves in product(_STEPS, _STEPS, (0, 1)) if not (up and single)]
    batches = [(float(times), float(more), 1.0) for times in _STEPS for more in (0, times or 1)]
    batches += [(0.0, -1.0, 1.0), (0.0, _SAME_SIZE, 1.0), (0.0, 0.0, 2.0), (0.0, 0.0, 0.5)]
    moves = [(*size, *batch, 0.0) for size in sizes for batch in batches]
    moves += [
        (*size, 0.0, more, 1.0, float(double)) for size in sizes for more in (0.0, _SAME_SIZE) for double in (-1, 1)
    ]
    return np.array(moves, dtype=float).T


_SIZE_MOVES = _size_moves()


def _next_tokens(t: Any, double: Any) -> Any:
    """``t``, or the next power of two below or above it."""
    power = np.log2(t)
    return np.where(double > 0, 2.0 ** (np.floor(power) + 1), np.where(double < 0, 2.0 ** (np.ceil(power) - 1), t))


def _columns(wanted: Wanted) -> tuple[Any, Any, Any, Any]:
    shares = wanted.computed, wanted.device_kv, wanted.resident, wanted.spilled
    computed, device_kv, resident, spilled = (np.atleast_1d(np.asarray(a, dtype=float))[:, None] for a in shares)
    return computed, device_kv, resident, spilled


def _near_shares(problem: Problem, cell: Cells, wanted: Any, step: float) -> tuple[list[Any], list[Any]]:
    """Homes near the wanted ones: more or fewer pages that stay, and the cache in the memory they leave. And others,
    to be tried with the same sizes alone: pages for the CPU with each of these, and from disk instead of host memory.
    """
    c, k, most, x = wanted
    single, wide = np.array([1.0, -1.0, 1.0, -1.0]), np.array([1.0, -1.0, 0.0, 0.0]) * step / 4
    near: list[Any] = []
    alone: list[Any] = [wanted]
    if cache_is_open(problem, cell.setting):
        pages = np.minimum(most, problem.pages) + single + np.round(problem.pages * wide)
        near += [(c, np.nan, kept, x) for kept in (*pages.T[:2, :, None], np.inf)] + [(c, 1.0, np.inf, x)]
        alone += [(c, np.nan, kept, x) for kept in pages.T[2:, :, None]]
    if cell.ffn_device == "split":
        more = c + single + np.round(problem.pages * wide)
        near += [(pages_for_cpu, k, most, x) for pages_for_cpu in more.T[:2, :, None]]
        for pages_for_cpu in more.T[:, :, None]:
            alone += [(pages_for_cpu, *shares) for _, *shares in (wanted, *near[:-2])]
    if cell.ffn_device != "cpu":
        spilled = x + single + np.round(problem.pages * wide)
        alone += [(c, k, most, pages_from_disk) for pages_from_disk in spilled.T[:, :, None]]
        near += [(c, k, most, 0.0)]
    return near, alone


def cache_is_open(problem: Problem, setting: Setting) -> bool:
    """Whether cache and pages compete for device memory, and neither's share is fixed."""
    open_here = problem.device_kv is None and problem.share("weights.device") is None
    return open_here and setting.attention_device == "gpu" and setting.ffn_device != "cpu"


def _grid(problem: Problem, setting: Setting, *axes: Any) -> Choices:
    grids = np.meshgrid(*(np.asarray(axis, dtype=float) for axis in axes), indexing="ij")
    return _choices(problem, setting, *(grid.ravel() for grid in grids))


def _choices(problem: Problem, setting: Setting, n: Any, b: Any, t: Any, c: Any, k: Any, most: Any, x: Any) -> Choices:
    """These candidates as far as they can be, each once: within bounds, what is fixed put in its place, the smallest
    micro-batches that give as many."""
    fewest, largest = problem.sequences
    number, size, tokens = (
        problem.count(key) for key in ("num_micro_batches", "micro_batch_size", "micro_batch_tokens")
    )
    n = np.clip(n, fewest, largest).astype(np.int64)
    b = np.clip(b, 1, n).astype(np.int64) if number is None else np.full_like(n, number)
    mu = -(-n // b) if size is None else np.full_like(n, size)
    t = np.clip(t, PROMPT_MICRO_BATCH_TOKENS[0], PROMPT_MICRO_BATCH_TOKENS[-1])
    t = np.maximum(2 ** np.floor(np.log2(t)), mu).astype(np.int64) if tokens is None else np.full_like(n, tokens)
    share = problem.share("cpu_experts") if setting.ffn_device == "split" else None
    c = np.round(np.clip(c, 0, problem.pages)) if share is None else np.full_like(c, round(share * problem.pages))
    k = np.clip(k, 0.0, 1.0)
    if setting.attention_device == "gpu" and problem.device_kv is not None:
        k = np.full_like(k, problem.device_kv)
    keep = mu <= t
    if number is not None:
        keep &= -(-n // mu) == number
    most = np.where(np.isnan(k), np.clip(most, 0, np.inf), np.inf)
    columns = [column[keep] for column in (n, mu, t, c, k, most, np.clip(x, 0, problem.pages))]
    first = _first_of_each(columns)
    n, mu, t, c, k, most, x = (column[first] for column in columns)
    return Choices(
        cells=cells(problem, setting, n, mu, t), wanted=Wanted(computed=c, device_kv=k, resident=most, spilled=x)
    )


def _first_of_each(columns: list[Any]) -> Any:
    """Where equal candidates come first, in the order of their sizes."""
    keys = [np.nan_to_num(column, nan=-1.0) for column in columns]
    keys = [key for key in keys if np.any(key != key[:1])] or keys[:1]
    order = np.lexsort(keys[::-1])
    differs = np.zeros(len(order), dtype=bool)
    differs[:1] = True
    for key in keys:
        differs[1:] |= key[order[1:]] != key[order[:-1]]
    return order[differs]
