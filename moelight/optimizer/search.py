"""The outer search: over N, micro-batches, and the discrete settings; pages and cache are the programme's (``milp``).

Every setting is looked at in a coarse lattice, with homes in closed form (``homes``). From the best of it, far enough
apart to lie in different valleys, the search goes on in ever smaller steps, down to single sequences, micro-batches,
pages and blocks, and at last at random; settings that fall behind are left. For N sequences in b micro-batches, the
smallest μ is best: the same work in less memory. The programme then places every page of the best. How far any policy
at all can be from it is proven by branch and bound over boxes of N and b (``bound``); small problems are solved to the
end that way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.hrm.estimate import job_s
from moelight.optimizer.bound import undecided
from moelight.optimizer.homes import Wanted, fill
from moelight.optimizer.lattice import WHOLE_UP_TO, Choices, around, cache_is_open, closely, first_look, scattered
from moelight.optimizer.milp import Solved, solve
from moelight.optimizer.problem import Cells, Problem, settings

STEPS = (1.0, 0.5, 0.25, 0.1, 0.04, 0.01)
WORTH_A_LOOK = (1.5, 1.25, 1.12, 1.06, 1.02, 1.01)
LAST_STEPS = (0.004, 0.001, 0.0)
CLOSELY_AT = 0.04
FEW, FEW_BY_WAVES = 12, 8  # candidates of a setting that are followed
WORTH_SOLVING = 1.01
MOST_SOLVED = 3
MOST_ROUNDS = 12
FIRST = 4
WORTH_FINISHING = 1.005
MOST_FINISHED = 3
SHAKES = 6
SCATTERED = 4000
EQUAL = 1e-9
MOST_BOXES = 20_000
MOST_UNDECIDED = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The best candidate: its setting and sizes, and its homes with the seconds of the job."""

    cell: Cells
    homes: Solved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaders:
    """A few good candidates of one setting, best first, and their seconds in closed form."""

    choices: Choices
    seconds: Any

    @property
    def least(self) -> float:
        return float(self.seconds[0])


def search(problem: Problem) -> Found | None:
    """The fastest policy, or None where nothing fits."""
    every = list(settings(problem))
    looks = [_few(problem, first_look(problem, setting)) for setting in every]
    leaders = [found for found in looks if found is not None]
    if not leaders:
        return None
    for step, worth in zip(STEPS, WORTH_A_LOOK, strict=True):
        least = min(found.least for found in leaders)
        leaders = [_closer(problem, found, step) for found in leaders if found.least <= least * worth]
        if step == CLOSELY_AT:
            leaders = [
                _few(problem, found.choices, closely(problem, found.choices.at(0))) or found for found in leaders
            ]
    for work in (_to_the_end, _shaken):
        leaders = sorted(leaders, key=lambda found: found.least)
        worth = leaders[0].least * WORTH_FINISHING
        first = [work(problem, found) if found.least <= worth else found for found in leaders[:MOST_FINISHED]]
        leaders = first + leaders[MOST_FINISHED:]
    best = _settled(problem, sorted(leaders, key=lambda found: found.least))
    if best is not None and problem.programme and problem.workload.num_requests <= WHOLE_UP_TO:
        best = _decided(problem, best)
    return best


def closed_form_s(problem: Problem, choices: Choices) -> Any:
    """Seconds of the job for every candidate at its homes in closed form; infinite where it does not fit."""
    filled = fill(problem, choices.cells, choices.wanted)
    seconds = np.full(np.shape(filled.feasible), np.inf)
    fits = np.flatnonzero(filled.feasible)
    cells = choices.cells.at(fits)
    seconds[fits] = job_s(cells.setting.acts, problem.workload, cells.setting.order, cells, filled.homes.at(fits))
    return seconds


def _few(problem: Problem, *looks: Choices, by_waves: bool = False) -> _Leaders | None:
    """The best candidates of each of some regions, at most `FEW`; of equals those with larger N and micro-batches.

    Regions are sizes of about the same logarithm, or ``by_waves``: so many waves for all requests, full ones apart.
    """
    found = []
    for choices in looks:
        seconds = closed_form_s(problem, choices)
        fits = np.flatnonzero(np.isfinite(seconds))
        found.append((choices.at(fits), seconds[fits]))
    choices, seconds = _joined([choices for choices, _ in found]), np.concatenate([seconds for _, seconds in found])
    if not seconds.size:
        return None
    cell = choices.cells
    rounded = np.round(np.log(seconds) / EQUAL)
    order = np.lexsort((-cell.micro_batch_size, -cell.batch_size, rounded))
    region = _region(problem, cell, by_waves=by_waves)
    _, first = np.unique(region[order], return_index=True)
    index = order[np.sort(first)[: FEW_BY_WAVES if by_waves else FEW]]
    return _Leaders(choices=_as_filled(problem, choices.at(index)), seconds=seconds[index])


def _region(problem: Problem, cell: Cells, *, by_waves: bool) -> Any:
    """A number for each candidate, the same for those of one region."""
    n, requests = cell.batch_size, problem.workload.num_requests
    b = -(-n // cell.micro_batch_size)
    numbers = np.minimum(b, 8) + np.round(4 * np.log2(np.maximum(b / 8, 1)))
    size, tokens = np.round(4 * np.log2(n)), np.round(np.log2(cell.micro_batch_tokens))
    if by_waves:
        waves = -(-requests // n)
        size = 2 * waves + (n == -(-requests // waves))
    return (size * 1000 + tokens) * 1000 + numbers


def _as_filled(problem: Problem, choices: Choices) -> Choices:
    """The same candidates, what they want said by what they got, so that a small step from there is one: pages that
    come from disk, and the place of the cache as that of the pages which leave it room."""
    setting = choices.cells.setting
    if setting.ffn_device == "cpu":
        return choices
    filled = fill(problem, choices.cells, choices.wanted)
    wanted = replace(choices.wanted, spilled=filled.homes.from_disk)
    if cache_is_open(problem, setting):
        wanted = replace(wanted, device_kv=np.full_like(filled.resident, np.nan), resident=filled.resident)
    return Choices(cells=choices.cells, wanted=wanted)


def _joined(parts: list[Choices]) -> Choices:
    if len(parts) == 1:
        return parts[0]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part.cells, name) for part in parts])
        for name in ("batch_size", "micro_batch_size", "micro_batch_tokens", "kv_tokens")
    }
    first = parts[0].cells
    names = ("computed", "device_kv", "resident", "spilled")
    wanted = {name: np.concatenate([getattr(part.wanted, name) for part in parts]) for name in names}
    return Choices(cells=replace(first, **arrays), wanted=Wanted(**wanted))


def _closer(problem: Problem, leaders: _Leaders, step: float) -> _Leaders:
    """The best of ``leaders`` and of what is around them."""
    return _few(problem, leaders.choices, around(problem, leaders.choices, step=step)) or leaders


def _to_the_end(problem: Problem, leaders: _Leaders) -> _Leaders:
    """``leaders`` from the first of which, each in its own region, no small or single step leads on."""
    for _ in range(MOST_ROUNDS):
        before = leaders.seconds[:FIRST]
        for step in LAST_STEPS:
            near = around(problem, leaders.choices, step=step)
            leaders = _few(problem, leaders.choices, near, by_waves=True) or leaders
        if not _is_better(leaders.seconds[:FIRST], before):
            break
    return leaders


def _is_better(seconds: Any, before: Any) -> bool:
    """Whether any of the first regions got faster, or there are more of them."""
    return len(seconds) != len(before) or bool(np.any(seconds < before * (1 - EQUAL)))


def _shaken(problem: Problem, leaders: _Leaders) -> _Leaders:
    """``leaders`` near which none of many random candidates is better: what no step along an axis finds."""
    draw = np.random.default_rng(0)
    for _ in range(SHAKES):
        near = scattered(problem, leaders.choices, draw, SCATTERED)
        found = _few(problem, leaders.choices, near, by_waves=True) or leaders
        leaders = _to_the_end(problem, found) if _is_better(found.seconds[:1], leaders.seconds[:1]) else found
    return leaders


def _settled(problem: Problem, leaders: list[_Leaders]) -> Found | None:
    """The best of ``leaders``, best first in closed form, once the programme has placed every page."""
    best: Found | None = None
    for found in leaders[:MOST_SOLVED]:
        if best is not None and found.least > best.homes.seconds * WORTH_SOLVING:
            break
        choice = found.choices.at(0)
        homes = (_solved(problem, choice.cells) if problem.programme else None) or _filled(problem, choice)
        if homes is not None and (best is None or homes.seconds < best.homes.seconds * (1 - EQUAL)):
            best = Found(cell=choice.cells, homes=homes)
    return best


def _solved(problem: Problem, cell: Cells) -> Solved | None:
    """The programme's homes; of equals, those that leave no memory empty."""
    homes = solve(problem, cell)
    if homes is None:
        return None
    cache = homes.device_blocks / -(-int(cell.kv_tokens) // cell.kv_block_size)
    for device_kv in map(np.asarray, (np.nan, cache)):
        wanted = Wanted(computed=np.asarray(homes.computed), device_kv=device_kv)
        full = _filled(problem, Choices(cells=cell, wanted=wanted))
        if full is not None and full.seconds <= homes.seconds * (1 + EQUAL):
            return full
    return homes


def _decided(problem: Problem, best: Found) -> Found:
    """The best there is, where the bounds leave few enough candidates to solve them all."""
    for cell in undecided(problem, best.homes.seconds, most_boxes=MOST_BOXES)[:MOST_UNDECIDED]:
        homes = _solved(problem, cell)
        if homes is not None and homes.seconds < best.homes.seconds * (1 - EQUAL):
            best = Found(cell=cell, homes=homes)
    return best


def _filled(problem: Problem, choice: Choices) -> Solved | None:
    """The homes of one candidate in closed form; None where it does not fit."""
    cell, setting = choice.cells, choice.cells.setting
    filled = fill(problem, cell, choice.wanted)
    if not filled.feasible:
        return None
    blocks = round(float(filled.homes.device_kv) * -(-int(cell.kv_tokens) // cell.kv_block_size))
    return Solved(
        resident=int(filled.resident),
        from_host=int(filled.homes.from_host),
        from_disk=int(filled.homes.from_disk),
        computed=int(choice.wanted.computed),
        device_blocks=blocks,
        seconds=float(job_s(setting.acts, problem.workload, setting.order, cell, filled.homes)),
    )
