"""Generators of candidates: a sample of the whole space, and random and single steps around good candidates. Does not
depend on costs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from moelight.core.policy import MOST_COUNTS
from moelight.optimizer.problem import ARRAYS, LEAST_TOKENS, Candidates, Problem, make_candidates

WHOLE_UP_TO = 12  # requests up to which the first sample has every N and every number of micro-batches
WHOLE_WAVES = 8  # full waves up to which the first sample has the N that serves all requests in so many
SAMPLED = 1600  # candidates of the first sample
ANEW = 0.1  # the share of random neighbours with newly drawn prompt micro-batches
MOST_PASSES = 64  # the most passes over which prompts of all slots are spread: each number is a local minimum
_PASSES = np.array([1, 2, 3, 4, 5, 6, 8, 12], dtype=float)
_PAGE_SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
_CACHE_SHARES = (np.nan, np.nan, 0.0, 1.0, 0.5)
_PARTS = (1, 2, 3, 4, 6, 8)
_NEARLY_FULL = (0.99, 0.98)  # of the N of one wave fewer: the requests left over start while the last wave drains
_STEPS = (-1, 0, 1)


def first_sample(problem: Problem, variant: Candidates) -> Candidates:
    """A sample of a variant: sizes and placement shares, each over its whole range; and a coarse grid of N with the
    least of everything else, which takes the least memory."""
    draw, requests = np.random.default_rng(1), problem.workload.num_requests
    if requests <= WHOLE_UP_TO:
        every = [(n, b) for n in range(1, requests + 1) for b in range(1, n + 1)]
        n, b = np.array(every * -(-SAMPLED // len(every))).T.astype(float)
    else:
        waves = np.arange(1, WHOLE_WAVES + 1)
        sizes = np.unique(np.append(-(-requests // waves), np.geomspace(1, requests, 24).astype(int)))
        n = draw.permutation(np.resize(sizes, SAMPLED)).astype(float)
        b = np.where(draw.random(SAMPLED) < 0.6, draw.choice(_PARTS, SAMPLED), np.exp(draw.uniform(0, np.log(n))))
    tokens, prefill = _tokens(problem, draw, len(n))
    computed: Any = 0.0
    device_kv: Any = np.nan
    if variant.ffn_device == "split":
        computed = draw.choice(_PAGE_SHARES, len(n)) * problem.pages
    if cache_is_open(problem, variant):
        device_kv = draw.choice(_CACHE_SHARES, len(n))
    smallest, largest = problem.rings(variant)
    rings = (
        np.floor(np.exp(draw.uniform(np.log(smallest), np.log(largest + 1), len(n)))) if smallest < largest else largest
    )
    columns = np.broadcast_arrays(n, b, tokens, prefill / tokens, computed, device_kv, np.inf, 0.0, rings)
    fewest = np.unique(np.append(n[: 1 if requests > WHOLE_UP_TO else None], problem.sequences[0]))
    least = np.broadcast_arrays(fewest, 1.0, LEAST_TOKENS, 1.0, 0.0, np.nan, np.inf, 0.0, smallest)
    return _choices(problem, variant, *(np.append(row, column) for row, column in zip(least, columns, strict=True)))


def _tokens(problem: Problem, draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Random tokens of a prompt micro-batch, some as many as the longest context, for which no context is gathered; and
    prompt tokens of a pass."""
    maximum = max(problem.prompt_tokens, LEAST_TOKENS)
    tokens = np.exp2(draw.integers(4, np.log2(max(min(maximum, 1 << 16), 32)) + 1, count))
    context = problem.model.max_positions
    tokens = np.where(draw.random(count) < 0.1 if context <= 4 * maximum else False, context, tokens)
    return tokens, tokens * np.exp2(np.minimum(draw.exponential(2.5, count), np.log2(np.maximum(maximum / tokens, 1))))


def _prefill_over(problem: Problem, variant: Candidates, sequences: Any, passes: Any) -> Any:
    """Prompt tokens of a pass if the prompts of ``sequences`` are spread over ``passes`` (`hrm.workload_model`)."""
    prompt = problem.workload.prompt_len
    if variant.admission == "static":
        return sequences * prompt / passes - sequences
    return sequences / passes * (prompt - 1)


def around(problem: Problem, beam: Candidates, *, step: float) -> Candidates:
    """Neighbours of candidates of one variant: sizes by a factor up to ``1 + step``, shares by up to ``step``, or one
    unit."""
    requests = problem.workload.num_requests
    n, mu, t, p, *requested = (column[:, None] for column in _columns(beam))
    factor, single, in_waves, times, more, twice = _SIZE_MOVES
    scale, waves = (1.0 + step) ** factor, -(-requests // n)
    more_waves = np.maximum(1, np.round(waves * scale) + single).astype(np.int64)
    size = np.where(in_waves > 0, -(-requests // more_waves), np.round(n * scale) + single)
    parts = -(-n // mu)
    batches = np.round(parts * twice * (1.0 + step) ** times) + more
    batches = np.where(more == _SAME_SIZE, np.ceil(np.maximum(size, 1) / mu), batches)
    tokens, prefill = _token_moves(t, p, step)
    near, alone = _near_shares(problem, beam, requested, step)
    moves: list[tuple[Any, ...]] = [(size, batches, t, p, *requested)]
    prefills = _prefill_over(problem, beam, n, _PASSES)
    for shares in (requested, (*requested[:3], 0.0, requested[4])):
        moves += [(n, parts, tokens, prefill, *shares), (n, parts, t, np.ceil(prefills / t), *shares)]
    fewer, more_full = (-(-requests // np.maximum(waves + more, 1)) for more in (-1, 1))
    others = [n + 1, n - 1, fewer, more_full, *(np.floor(fewer * share) for share in _NEARLY_FULL)]
    if beam.admission == "refill":  # the N whose prompts take just as many passes as an answer
        others.append(np.floor(t * p * problem.workload.gen_len / max(problem.workload.prompt_len - 1, 1)))
    homes: list[Any] = [requested]
    if cache_is_open(problem, beam):  # more sequences may need all memory that pages have
        homes.append((requested[0], np.nan, 0.0, *requested[3:]))
    for other, shares in product(others, homes):  # with the prompts of as many sequences, which take memory, too
        spread = np.concatenate((_prefill_over(problem, beam, other, _PASSES) / t, p * other / n), axis=1)
        moves += [(other, np.ceil(other / mu), t, rounding(spread), *shares) for rounding in (np.floor, np.ceil)]
    # Prompts of fewer tokens leave room on the device for a page that the CPU computes.
    freed = (
        [requested, (np.maximum(requested[0] - 1, 0), *requested[1:])] if beam.ffn_device == "split" else [requested]
    )
    # Under static admission N tokens more: a pass has so many if no sequence decodes in it.
    in_passes = [prefills, prefills + n] if beam.admission == "static" else [prefills]
    for many, some, shares in product((p, p + 1.0, np.maximum(p - 1.0, 1.0)), in_passes, freed):
        moves += [(n, parts, np.ceil(some / many), many, *shares)]
    counts = np.maximum(p + np.array([-2.0, -1.0, 1.0, 2.0]), 1.0)  # about as many tokens in all, in the same memory
    moves += [(n, parts, np.round(t * p / counts * scale), counts, *requested) for scale in (0.98, 0.99, 1.01, 1.02)]
    moves += [(n, parts, t, p, *shares) for shares in (*near, *alone)]
    moves += _ring_moves(problem, beam, (n, mu, t, p, *requested), step)
    rows = [[column.ravel() for column in np.broadcast_arrays(*move)] for move in moves]
    return _choices(problem, beam, *map(np.concatenate, zip(*rows, strict=True)))


def scattered(
    problem: Problem, beam: Candidates, draw: np.random.Generator, count: int, *, widest: float = 0.0
) -> Candidates:
    """Random neighbours of candidates of one variant: each size and share is kept, or changed by a random factor whose
    logarithm has a scale from 0.001 to 10 to the power of ``widest``."""
    requests, pick = problem.workload.num_requests, draw.integers(len(beam.batch_size), size=count)
    n, mu, t, p, computed, cache, resident, spilled, ring = (column[pick] for column in _columns(beam))

    def some(share: float) -> Any:
        return draw.random(count) < share

    def scale() -> Any:
        return np.exp(draw.normal(0, 1, count) * 10.0 ** draw.uniform(-3, widest, count))

    def moved(pages: Any) -> Any:
        far = 10.0 ** draw.uniform(0, max(0.0, np.log10(problem.pages) + min(widest, 0.0)), count)
        return np.where(some(0.5), pages, pages + np.round(draw.normal(0, 1, count) * far))

    waves = np.maximum(1, np.round(-(-requests // n) * scale()))
    size = np.where(some(0.4), n, np.where(some(0.7), np.ceil(requests / waves), np.round(n * scale())))
    parts = -(-n // mu)
    same = np.where(some(0.6), parts, np.ceil(np.maximum(size, 1) / mu))
    batches = np.where(some(0.4), same, np.round(parts * scale()) + draw.integers(-2, 3, count))
    twice = 2.0 ** draw.integers(-2, 3, count)
    anew, prefill_anew = _tokens(problem, draw, count)
    tokens = np.where(some(0.5), t, np.round(t * np.where(some(0.5), twice, scale())))
    tokens = np.where(some(ANEW), anew, tokens)
    prefill = t * p * np.where(some(0.4), 1.0, np.where(some(0.3), 2.0 ** draw.integers(-2, 3, count), scale()))
    prefill = np.where(some(ANEW), prefill_anew, prefill)
    passes = np.maximum(1, np.round(np.exp(draw.uniform(0, np.log(MOST_PASSES), count))))
    prefill = np.where(some(ANEW), _prefill_over(problem, beam, size, passes), prefill)
    prompts = np.where(some(0.3), p, np.round(prefill / np.maximum(tokens, 1)) + np.where(some(0.8), 0, 1))
    if cache_is_open(problem, beam):
        resident = np.where(some(0.2), np.inf, moved(np.minimum(resident, problem.pages)))
        cache = np.where(some(0.1), np.nan, cache)
    if beam.ffn_device == "split":
        computed = moved(computed)
    if beam.ffn_device != "cpu":
        spilled = moved(spilled)
    smallest, largest = problem.rings(beam)
    if smallest < largest:
        ring = np.where(
            some(0.4), ring, np.where(some(0.7), np.round(ring * scale()), ring + draw.integers(-2, 3, count))
        )
    return _choices(problem, beam, size, batches, tokens, prompts, computed, cache, resident, spilled, ring)


def as_of(problem: Problem, beam: Candidates, variant: Candidates, *, times: int = 1) -> Candidates:
    """Return the candidates' sizes in ``times`` as many micro-batches and another variant, with those parts of the
    requested placement that the variant has."""
    n, mu, t, p, computed, cache, resident, spilled, ring = _columns(beam)
    if variant.ffn_device != "split":
        computed = np.zeros_like(computed)
    if not cache_is_open(problem, variant):
        cache, resident = np.full_like(cache, np.nan), np.full_like(resident, np.inf)
    if variant.ffn_device == "cpu":
        spilled = np.zeros_like(spilled)
    return _choices(problem, variant, n, times * -(-n // mu), t, p, computed, cache, resident, spilled, ring)


def _columns(beam: Candidates) -> Iterator[Any]:
    """N, μ, the tokens and the number of prompt micro-batches, and the requested placement, as arrays."""
    for name in _COLUMNS:
        yield np.atleast_1d(np.asarray(getattr(beam, name)))


_COLUMNS = tuple(name for name in ARRAYS if name != "kv_tokens")
_SAME_SIZE = 99.0  # in place of a change of the number of micro-batches: keep the size of each


def _size_moves() -> Any:
    """Moves of N (exponent of a factor, single steps, the same for waves) and of micro-batches."""
    sizes = [(up, single, waves) for up, single, waves in product(_STEPS, _STEPS, (0, 1)) if not (up and single)]
    batches = [(float(times), float(more), 1.0) for times in _STEPS for more in (0, times or 1)]
    batches += [(0.0, -1.0, 1.0), (0.0, _SAME_SIZE, 1.0), (0.0, 0.0, 2.0), (0.0, 0.0, 0.5)]
    return np.array([(*size, *batch) for size in sizes for batch in batches], dtype=float).T


_SIZE_MOVES = _size_moves()


def _token_moves(t: Any, p: Any, step: float) -> tuple[Any, Any]:
    """Moves of prompt micro-batch tokens and of prompt micro-batches: each alone, and both with equal product."""
    factors = np.array([1.0, 2.0, 0.5, 1.0 + step, 1.0 / (1.0 + step), 1.0, 1.0])
    singles = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    tokens = np.round(t * factors) + singles
    prefill = np.round(p * factors) + singles
    as_before = np.round(t * p / np.maximum(tokens, 1))
    both = np.broadcast_arrays(tokens, p)
    prompt_batches = np.broadcast_arrays(t, prefill)
    unchanged = np.broadcast_arrays(tokens, as_before)
    return tuple(np.concatenate(parts, axis=1) for parts in zip(both, prompt_batches, unchanged, strict=True))  # type: ignore[return-value]


def _near_shares(problem: Problem, candidate: Candidates, requested: Any, step: float) -> tuple[list[Any], list[Any]]:
    """Placements near ``requested``: other numbers of resident pages, the cache in the remaining memory; and a second
    list for unchanged sizes only: other numbers of pages for the CPU, and pages on disk instead of host memory."""
    c, k, resident, x, ring = requested
    single, wide = np.array([1.0, -1.0, 1.0, -1.0]), np.array([1.0, -1.0, 0.0, 0.0]) * step / 4
    near: list[Any] = []
    alone: list[Any] = [requested]
    if cache_is_open(problem, candidate):
        pages = np.minimum(resident, problem.pages) + single + np.round(problem.pages * wide)
        near += [(c, np.nan, stay, x, ring) for stay in (*pages.T[:2, :, None], np.inf)] + [(c, 1.0, np.inf, x, ring)]
        alone += [(c, np.nan, stay, x, ring) for stay in pages.T[2:, :, None]]
    if candidate.ffn_device == "split":
        more = c + single + np.round(problem.pages * wide)
        near += [(pages_for_cpu, k, resident, x, ring) for pages_for_cpu in more.T[:2, :, None]]
        for pages_for_cpu in more.T[:, :, None]:
            alone += [(pages_for_cpu, *shares) for _, *shares in (requested, *near[:-2])]
    if candidate.ffn_device != "cpu":
        spilled = x + single + np.round(problem.pages * wide)
        alone += [(c, k, resident, pages_from_disk, ring) for pages_from_disk in spilled.T[:, :, None]]
        near += [(c, k, resident, 0.0, ring)]
    return near, alone


def _ring_moves(problem: Problem, beam: Candidates, columns: tuple[Any, ...], step: float) -> list[tuple[Any, ...]]:
    """Moves of the ring: by a page, by a factor, to either end, also with the sequences that its memory holds."""
    smallest, largest = problem.rings(beam)
    if smallest == largest:
        return []
    n, mu, t, p, *rest, ring = columns
    rings = (
        ring + 1,
        ring - 1,
        ring * (1 + step),
        ring / (1 + step),
        2 * ring,
        ring / 2,
        0 * ring + smallest,
        0 * ring + largest,
    )
    sizes = (n, np.round(n * (1 + step)), np.round(n / (1 + step)), n + 1, n - 1)
    return [(size, np.ceil(size / mu), t, p, *rest, np.round(slots)) for slots in rings for size in sizes]


def cache_is_open(problem: Problem, variant: Candidates) -> bool:
    """True if cache and pages compete for device memory and neither share is fixed."""
    open_here = problem.device_kv is None and problem.share("weights.device") is None
    return open_here and variant.attention_device == "gpu" and variant.ffn_device != "cpu"


def _choices(
    problem: Problem,
    variant: Candidates,
    n: Any,
    b: Any,
    t: Any,
    p: Any,
    c: Any,
    k: Any,
    resident: Any,
    x: Any,
    ring: Any,
) -> Candidates:
    """Candidates from raw columns: clipped, fixed values inserted, μ as small as possible, infeasible rows dropped."""
    fewest, largest = problem.sequences
    number, size, tokens, prefill = (problem.count(key) for key in ("num_micro_batches", *_COLUMNS[1:4]))
    n = np.clip(n, fewest, largest).astype(np.int64)
    b = np.clip(b, 1, n).astype(np.int64) if number is None else np.full_like(n, number)
    mu = -(-n // b) if size is None else np.full_like(n, size)
    most_tokens = max(problem.prompt_tokens, LEAST_TOKENS)
    in_one = min(most_tokens, MOST_COUNTS["micro_batch_tokens"])
    t = np.maximum(np.clip(t, LEAST_TOKENS, in_one), mu).astype(np.int64)
    t = t if tokens is None else np.full_like(n, tokens)
    most_batches = np.minimum(-(-most_tokens // t), MOST_COUNTS["prompt_micro_batches"])
    p = np.clip(p, 1, most_batches).astype(np.int64) if prefill is None else np.full_like(n, prefill)
    computed = problem.fixed_pages("cpu_experts") if variant.ffn_device == "split" else None
    c = np.round(np.clip(c, 0, problem.pages)) if computed is None else np.full_like(c, computed)
    k = np.clip(k, 0.0, 1.0)
    if variant.attention_device == "gpu" and problem.device_kv is not None:
        k = np.full_like(k, problem.device_kv)
    keep = mu <= t
    if number is not None:
        keep &= -(-n // mu) == number
    resident = np.where(np.isnan(k), np.clip(resident, 0, np.inf), np.inf)
    selected = np.flatnonzero(keep)
    x, ring = np.clip(x, 0, problem.pages), np.clip(ring, *problem.rings(variant)).astype(np.int64)
    n, mu, t, p, c, k, resident, x, ring = (a[selected] for a in (n, mu, t, p, c, k, resident, x, ring))
    requested = {"computed": c, "device_kv": k, "resident": resident, "spilled": x, "ring_pages": ring}
    return make_candidates(problem, variant, n, mu, t, p, **requested)
