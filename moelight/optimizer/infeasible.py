"""Explain why nothing fits: the tier that is too small, by how much, and the smallest change that suffices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.optimizer.candidates import PlacedCandidates, first_sample
from moelight.optimizer.placement import fill, free_memory
from moelight.optimizer.problem import Problem, variants
from moelight.optimizer.search import search

_TIERS = ("host", "device")  # a candidate that lacks host memory alone fits the device, so it is easier to fix
_PLENTY = 1 << 60


def infeasible_error(problem: Problem) -> BudgetError:
    """The error that names the memory missing for the candidate nearest to fitting: of one tier, or, where no single
    tier suffices, of both host and device."""
    looks = [_smallest(first_sample(problem, setting)) for setting in variants(problem)]
    for tier in _TIERS:
        if (needed := _least(problem, looks, tier)) is not None:
            return _too_small(problem, tier, needed)
    plenty = _with(problem, "host", _PLENTY)
    if (needed := _least(plenty, looks, "device")) is not None:
        host = _least(_with(problem, "device", needed), looks, "host")
        also = "" if host is None else f", and {format_bytes(host, round_up=True)} of host memory"
        return _too_small(problem, "device", needed, also)
    return _on_disk(problem)


def _too_small(problem: Problem, tier: str, needed: int, also: str = "") -> BudgetError:
    given = problem.capacity_bytes[tier]
    text = (
        f"--{tier}-memory {format_bytes(given)} is too small for {problem.model.name}: at least "
        f"{format_bytes(needed, round_up=True)} is needed on this workload, "
        f"{format_bytes(needed - given, round_up=True)} more{also}"
    )
    return BudgetError(text + _without_a_fix(problem), tier=tier, needed_bytes=needed)


def _with(problem: Problem, tier: str, size: int) -> Problem:
    return replace(problem, capacity_bytes={**problem.capacity_bytes, tier: size})


def _smallest(choices: PlacedCandidates) -> PlacedCandidates:
    """The candidates with the fewest sequences; memory use grows with N."""
    sizes = choices.cells.batch_size
    return choices.at(np.flatnonzero(sizes == np.min(sizes, initial=1 << 60)))


def _least(problem: Problem, looks: list[PlacedCandidates], tier: str) -> int | None:
    """The least bytes of ``tier`` with which some candidate fits, the other tiers unchanged; None where more of
    ``tier`` does not help."""
    if tier not in problem.capacity_bytes:
        return None

    def fitting(size: int) -> list[PlacedCandidates]:
        some = _with(problem, tier, size)
        found = [choices.at(np.flatnonzero(fill(some, choices.cells, choices.wanted).feasible)) for choices in looks]
        return [choices for choices in found if choices.cells.batch_size.size]

    low, high, looks = problem.capacity_bytes[tier], _PLENTY, fitting(_PLENTY)
    if not looks:
        return None
    while high - low > 1:  # nothing fits in `low`, and `looks` are what fits in `high`
        middle = (low + high) // 2
        found = fitting(middle)
        low, high, looks = (low, middle, found) if found else (middle, high, looks)
    return high


def _without_a_fix(problem: Problem) -> str:
    """A hint at the one fixed value without which the problem is feasible; empty if there is none."""
    for key in problem.fixed:
        rest = {name: value for name, value in problem.fixed.items() if name != key}
        if search(replace(problem, fixed=rest)) is not None:
            return f"; without --fix {key}={problem.fixed[key]} it fits"
    return ""


def _on_disk(problem: Problem) -> BudgetError:
    """The error for a disk too small for the expert pages, where more memory does not help."""
    free = [free_memory(problem, first_sample(problem, setting).cells) for setting in variants(problem)]
    needed = free[0].pages * free[0].page_bytes
    given = problem.capacity_bytes.get("disk", 0)
    return BudgetError(
        f"--disk {format_bytes(given)} is too small for {problem.model.name}: its experts take "
        f"{format_bytes(needed, round_up=True)}, {format_bytes(needed - given, round_up=True)} more"
        f"{_without_a_fix(problem)}",
        tier="disk",
        needed_bytes=needed,
    )
