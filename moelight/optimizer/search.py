"""The outer search: over N, micro-batches, prompts in a pass, and the variants.

The search samples each variant over its whole space, with placement in closed form (``placement``), and continues at
random around the best candidates of different regions with shrinking steps, down to single sequences, micro-batches,
pages and blocks; variants that fall behind are dropped. For N sequences in b micro-batches, the smallest μ is best: the
same work in less memory. The integer programme (``milp``) places pages and cache where the closed form may not be
optimal. Branch and bound (``bound``) proves how far any policy can be from the result, and solves problems of few
requests and fixed prompt micro-batches exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from moelight.core.policy import MOST_COUNTS
from moelight.hrm.estimate import job_s
from moelight.hrm.pass_cost import PlacementCounts
from moelight.optimizer.bound import undecided
from moelight.optimizer.candidates import WHOLE_UP_TO, around, as_of, cache_is_open, first_sample, scattered
from moelight.optimizer.milp import solve
from moelight.optimizer.placement import Solution, buffers_longest, fill
from moelight.optimizer.problem import Candidates, Problem, joined, variants

# Random rounds: the widest step (a power of ten of a factor), the number of candidates, and the time of a variant over
# the best at which it is dropped.
ROUNDS = ((0.3, 400, 4.0), (0.0, 400, 2.5), (0.0, 400, 1.6), (-0.5, 400, 1.3), (-1.0, 400, 1.15), (-1.0, 400, 1.08))
LAST_STEPS = (0.03, 0.004, 0.0)
FEW = 12  # candidates of a variant that are kept
FIRST = 3  # candidates of a variant that are refined to the end
WORTH_SOLVING = 1.01
MOST_SOLVED = 3
MOST_ROUNDS = 8
WORTH_FINISHING = 1.02
MOST_FINISHED = 2
SHAKES = 2
SCATTERED = 1000
EQUAL = 1e-9
AS_GOOD = 5e-4  # relative loss of speed that is accepted for fewer tokens
FEWER_TOKENS = 16  # of a prompt micro-batch that are accepted for it: more save kilobytes at most
GAINED = 1e-4  # relative gain below which no further round is run
MOST_BOXES = 20_000
MOST_UNDECIDED = 40
# Variants that are rarely the fastest: first tried with sizes that were good for the usual ones.
RARE = frozenset({"flexgen", "flexgen-c", "serial", "static", "learned"})
POOLED_AFTER = (2, 5)  # rounds
# candidates of each variant; random neighbours; the time of a variant over the best at which it is dropped
POOLED, NEAR_POOLED, WORTH_POOLING = 4, 60, 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """A few good candidates of one variant, best first, and their seconds in closed form."""

    candidates: Candidates
    seconds: Any

    @property
    def least(self) -> float:
        return float(self.seconds[0])

    def first(self, count: int) -> Candidates:
        return self.candidates.at(slice(count))


def search(problem: Problem) -> Solution | None:
    """The fastest policy, or None if nothing fits."""
    if problem.sequences[0] > problem.sequences[1]:
        return None
    every = list(variants(problem))
    usual = [variant for variant in every if RARE.isdisjoint(variant.variant)] or every
    looks = [keep_best(problem, None, first_sample(problem, variant)) for variant in usual]
    beam = [result for result in looks if result is not None]
    if not beam:
        return None
    draw, others = np.random.default_rng(0), list[Candidates]()
    for number, (widest, count, worth) in enumerate(ROUNDS):
        best = min(result.least for result in beam)
        beam = [result for result in beam if result.least <= best * worth]
        if number in POOLED_AFTER:
            beam = _pooled(problem, beam, every, draw)
            devices = {result.candidates.variant[:2] for result in beam}
            others += [variant for variant in every if variant.variant[:2] not in devices]
            every = [variant for variant in every if variant.variant[:2] in devices]
        beam = [
            keep_best(problem, result, scattered(problem, result.candidates, draw, count, widest=widest))
            for result in beam
        ]
    for improve in (_refined, _restarted):
        beam = _improved(problem, beam, improve)
    beam = [*(_refined(problem, result) for result in _in_others(problem, beam, others)), *beam]
    best = _select_best(problem, sorted(beam, key=lambda result: result.least))
    open_tokens = problem.count("micro_batch_tokens") is None or problem.count("prompt_micro_batches") is None
    if best is not None and problem.workload.num_requests <= WHOLE_UP_TO and not open_tokens:
        best = _certified(problem, best)
    return None if best is None else _with_fewer_tokens(problem, best)


def _improved(problem: Problem, beam: list[Beam], improve: Callable[[Problem, Beam], Beam]) -> list[Beam]:
    """``beam`` with its best members as ``improve`` leaves them."""
    beam = sorted(beam, key=lambda result: result.least)
    worth = beam[0].least * WORTH_FINISHING
    first = [improve(problem, result) for result in beam[:MOST_FINISHED] if result.least <= worth]
    return sorted(first + beam[len(first) :], key=lambda result: result.least)


def _in_others(problem: Problem, beam: list[Beam], others: list[Candidates]) -> list[Beam]:
    """The beam that gains most of the sizes of the best in its variant, among the others of ``beam`` and ``others``, in
    several times as many micro-batches, since attention on the GPU may need their memory; none if no variant gains."""
    pool, by_variant = beam[0].first(FIRST), {result.candidates.variant: result for result in beam}
    least, best = beam[0].least * WORTH_FINISHING, []
    for variant in [*(result.candidates for result in beam[1:]), *others]:
        before = by_variant.get(variant.variant)
        result = keep_best(
            problem, before, joined(*(as_of(problem, pool, variant, times=times) for times in (1, 2, 4)))
        )
        if result is None or result.least >= least or (before and result.least >= before.least * (1 - GAINED)):
            continue
        least, best = result.least, [result]
    return best


def _pooled(problem: Problem, beam: list[Beam], every: list[Candidates], draw: np.random.Generator) -> list[Beam]:
    """Beams of all variants at the sizes that are best in any variant; variants that fall behind are dropped."""
    pool = joined(*(result.first(POOLED) for result in beam))
    by_variant = {result.candidates.variant: result for result in beam}
    best, pooled = min(result.least for result in beam), []
    for variant in every:
        here = as_of(problem, pool, variant)
        near = joined(here, scattered(problem, here, draw, NEAR_POOLED))
        result = keep_best(problem, by_variant.get(variant.variant), near)
        if result is not None and result.least <= best * WORTH_POOLING:
            pooled.append(result)
    return pooled


def feasible(problem: Problem) -> bool:
    """True if some policy fits, so that `search` finds one."""
    fewest, maximum = problem.sequences
    return fewest <= maximum and any(
        np.any(fill(problem, first_sample(problem, variant))[1]) for variant in variants(problem)
    )


def closed_form_s(problem: Problem, candidates: Candidates) -> tuple[Any, PlacementCounts]:
    """Seconds of the job for every candidate, infinite if it does not fit, with its placement in closed form."""
    placed, fitting = fill(problem, candidates)
    seconds = np.full(np.shape(fitting), np.inf)
    fits = np.flatnonzero(fitting)
    if fits.size:
        some, counts = candidates.at(fits), placed.map(itemgetter(fits))
        seconds[fits] = job_s(candidates.cost_model, problem.workload, some, counts)
    return seconds, placed


def keep_best(problem: Problem, beam: Beam | None, look: Candidates, *, by_waves: bool = False) -> Any:
    """The best candidates of ``beam`` and of each region of ``look``, at most `FEW`, or None; of equals the larger N
    and micro-batches.

    A region holds sizes of about the same logarithm, or, with ``by_waves``, of the same number of waves for all
    requests, full waves apart. Candidates with every page resident are regions apart: no small step leads to them.
    """
    seconds, placed = closed_form_s(problem, look)
    fits = np.flatnonzero(np.isfinite(seconds))
    if beam is None and not fits.size:
        return None
    selected = fits[np.argsort(seconds[fits], kind="stable")[:400]]
    some, seconds = _as_filled(problem, look.at(selected), placed.map(itemgetter(selected))), seconds[selected]
    if beam is not None:
        some, seconds = joined(beam.candidates, some), np.concatenate([beam.seconds, seconds])
    order = np.lexsort((-some.micro_batch_size, -some.batch_size, np.round(np.log(seconds) / EQUAL)))
    _, first = np.unique(_region(problem, some, by_waves=by_waves)[order], return_index=True)
    index = order[np.sort(first)[:FEW]]
    return Beam(candidates=some.at(index), seconds=seconds[index])


def _region(problem: Problem, candidates: Candidates, *, by_waves: bool) -> Any:
    all_stay = candidates.resident + candidates.computed >= problem.pages
    n, requests = candidates.batch_size, problem.workload.num_requests
    b = -(-n // candidates.micro_batch_size)
    batches = np.minimum(b, 8) + np.round(4 * np.log2(np.maximum(b / 8, 1)))
    size, tokens = np.round(4 * np.log2(n)), np.round(np.log2(candidates.micro_batch_tokens))
    prefill = np.round(np.log2(candidates.micro_batch_tokens * candidates.prompt_micro_batches) / 2)
    if by_waves:
        waves = -(-requests // n)
        size = 2 * waves + (n == -(-requests // waves))
    return (((size * 100 + tokens) * 100 + prefill) * 1000 + batches) * 2 + all_stay


def _as_filled(problem: Problem, candidates: Candidates, placed: PlacementCounts) -> Candidates:
    """Return the candidates with requests equal to their resolved placement, so that a small step of the request is one
    of the result."""
    if candidates.ffn_device == "cpu":
        return candidates
    candidates = replace(candidates, spilled=placed.from_disk)
    if cache_is_open(problem, candidates):
        resident = problem.pages - placed.offloaded
        candidates = replace(candidates, device_kv=np.full_like(resident, np.nan), resident=resident)
    return candidates


def _refined(problem: Problem, beam: Beam) -> Beam:
    """``beam`` after local search: no small or single step improves its first candidates, each in its own region."""
    for _ in range(MOST_ROUNDS):
        before = beam.seconds[:FIRST]
        for step in LAST_STEPS:
            near = around(problem, beam.first(FIRST), step=step)
            beam = keep_best(problem, beam, near, by_waves=True)
        if not _is_better(beam.seconds[:FIRST], before):
            break
    return beam


def _is_better(seconds: Any, before: Any) -> bool:
    """True if any of the first regions is faster than before, or there are more regions."""
    return len(seconds) != len(before) or bool(np.any(seconds < before * (1 - GAINED)))


def _restarted(problem: Problem, beam: Beam) -> Beam:
    """``beam`` improved by random candidates near it, which steps along one axis do not reach."""
    draw = np.random.default_rng(0)
    for _ in range(SHAKES):
        near = scattered(problem, beam.candidates, draw, SCATTERED, widest=-0.3)
        result = keep_best(problem, beam, near, by_waves=True)
        beam = _refined(problem, result) if _is_better(result.seconds[:1], beam.seconds[:1]) else result
    return beam


def _select_best(problem: Problem, beam: list[Beam]) -> Solution | None:
    """The best of ``beam`` (sorted by closed-form time) once the integer programme has placed every page."""
    best: Solution | None = None
    for result in beam[:MOST_SOLVED]:
        if best is not None and result.least > best.seconds * WORTH_SOLVING:
            break
        candidate = result.candidates.at(0)
        for placed in (_filled(problem, candidate), _solved(problem, candidate)):
            if placed is not None and (best is None or placed.seconds < best.seconds * (1 - EQUAL)):
                best = placed
    return best


def _solved(problem: Problem, candidate: Candidates) -> Solution | None:
    """The integer programme's placement; of equals, the one that leaves no memory empty."""
    solution = solve(problem, candidate) if buffers_longest(problem, candidate) else None
    if solution is None:
        return None
    for device_kv in (np.nan, solution.placed.device_kv):
        requested = {"computed": solution.placed.computed, "device_kv": device_kv, "resident": np.inf, "spilled": 0.0}
        full = _filled(problem, replace(candidate, **requested))
        if full is not None and full.seconds <= solution.seconds * (1 + EQUAL):
            return full
    return solution


def _certified(problem: Problem, best: Solution) -> Solution:
    """The optimum, if the bounds leave few enough candidates to solve them all; otherwise the best one solved."""
    for candidate in undecided(problem, best.seconds, most_boxes=MOST_BOXES)[:MOST_UNDECIDED]:
        solution = _solved(problem, candidate)
        if solution is not None and solution.seconds < best.seconds * (1 - EQUAL):
            best = solution
    return best


def _with_fewer_tokens(problem: Problem, best: Solution) -> Solution:
    """``best`` with the fewest prompt tokens per pass and per micro-batch that are as good (`AS_GOOD`)."""
    candidate, placed = best.candidate, best.placed
    tokens, prompt_batches = int(candidate.micro_batch_tokens), int(candidate.prompt_micro_batches)
    sizes, total = {tokens}, tokens * prompt_batches
    if problem.count("micro_batch_tokens") is None:
        sizes.update(_powers(max(FEWER_TOKENS, int(candidate.micro_batch_size)), tokens))
    pairs = []
    for t in sorted(sizes):
        fewer = {-(-r // t) for r in (total, *_powers(t, total))}
        counts = sorted(fewer) if problem.count("prompt_micro_batches") is None else [prompt_batches]
        pairs += [(t, p) for p in counts if p <= MOST_COUNTS["prompt_micro_batches"]]
    t, p = np.array(pairs, dtype=np.int64).T
    shares = {"computed": placed.computed, "device_kv": placed.device_kv, "resident": np.inf}
    one = replace(candidate, **shares, spilled=placed.from_disk).at(None)  # an array of one candidate
    many = replace(one.at(np.zeros_like(t)), micro_batch_tokens=t, prompt_micro_batches=p)
    good = np.flatnonzero(closed_form_s(problem, many)[0] <= best.seconds * (1 + AS_GOOD))
    if not good.size:
        return best
    return _filled(problem, many.at(good[np.argmin((t * p + t)[good])])) or best


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from ``low`` up to, not including, ``high``."""
    return [1 << power for power in range(high.bit_length()) if low <= 1 << power < high]


def _filled(problem: Problem, candidate: Candidates) -> Solution | None:
    """The placement of one candidate in closed form; None if the candidate does not fit."""
    placed, feasible = fill(problem, candidate)
    if not feasible:
        return None
    placed = placed.map(float)
    seconds = float(job_s(candidate.cost_model, problem.workload, candidate, placed))
    return Solution(candidate=candidate, placed=placed, seconds=seconds)
