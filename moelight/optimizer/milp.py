"""The integer programme (HiGHS): the placement of every page and cache block of one candidate that minimises the job's
time.

Time is a sum over the kinds of passes, each as long as its longest term; every term is affine in the placement
(``hrm.pass_cost``), so that pricing unit steps gives its coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moelight.hrm.estimate import cost_of, job_s, kinds_of
from moelight.hrm.pass_cost import PlacementCounts, ring_of
from moelight.hrm.schedule_time import SCHEDULE_TERMS
from moelight.optimizer.placement import FreeMemory, Solution, free_memory
from moelight.optimizer.problem import Candidates, Problem

_TOLERANCE = 2e-6  # of a slot: by how much the solver may exceed a limit
_AFFINE_IN = ("from_host", "from_disk", "computed", "device_kv")
# Pages by placement, the most streamed pages of a layer, cache blocks on the device, pinned slots, and 1 if any page is
# streamed from disk. Seconds of each kind of pass follow.
_NAMES = ("resident", "from_host", "from_disk", "computed", "per_layer", "device_blocks", "pinned", "reads")


class _IntegerProgram:
    """Non-negative integers `_NAMES`, at most ``most_of`` each, and the seconds of ``kinds`` kinds of passes, whose sum
    is minimal, within linear limits."""

    def __init__(self, kinds: int, most_of: Mapping[str, float]) -> None:
        import highspy

        self._optimal, self._solver = highspy.HighsModelStatus.kOptimal, highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.silent()
        self._solver.setOptionValue("mip_rel_gap", 1e-9)
        self._solver.setOptionValue("threads", 1)
        for index, name in enumerate(_NAMES):
            self._solver.addVar(0.0, most_of.get(name, np.inf))
            self._solver.changeColIntegrality(index, highspy.HighsVarType.kInteger)
        for kind in range(kinds):
            self._solver.addVar(0.0, np.inf)
            self._solver.changeColCost(len(_NAMES) + kind, 1.0)

    def add(
        self, coefficients: Mapping[str, float], *, least: float = -np.inf, maximum: float = np.inf, kind: int = -1
    ) -> None:
        """Limit a linear sum of variables. ``kind``: the kind of pass whose seconds are subtracted from the sum."""
        row = {_NAMES.index(name): float(value) for name, value in coefficients.items() if value}
        if kind >= 0:
            row[len(_NAMES) + kind] = -1.0
        columns, values = np.array(list(row), dtype=np.int32), np.array(list(row.values()), dtype=float)
        self._solver.addRow(least, maximum, len(row), columns, values)

    def solved(self) -> list[float] | None:
        """The values of all variables; None if infeasible."""
        self._solver.run()
        if self._solver.getModelStatus() != self._optimal:
            return None
        return list(self._solver.getSolution().col_value)


def solve(problem: Problem, candidate: Candidates) -> Solution | None:
    """The best placement of one candidate (numbers, no arrays); None if none fits."""
    free, terms = free_memory(problem, candidate), _terms(problem, candidate)
    integer_program = _IntegerProgram(len(terms), {"device_blocks": int(free.kv_blocks), "reads": 1})
    _memory(candidate, free, integer_program)
    _fixed(problem, candidate, free, integer_program)
    scale = sum(count * float(base.max()) for count, _, base in terms)  # the solver's tolerance is of numbers near 1
    blocks = max(int(free.kv_blocks), 1)
    for kind, (count, slopes, base) in enumerate(terms):
        for slope, alone in zip(slopes * (count / scale), base * (count / scale), strict=True):
            per = dict(zip(_AFFINE_IN, slope, strict=True))
            per["device_blocks"] = per.pop("device_kv") / blocks
            integer_program.add(per, maximum=-float(alone), kind=kind)
    solution = integer_program.solved()
    if solution is None:
        return None
    rounded = dict(zip(_NAMES, (float(round(value)) for value in solution), strict=False))
    pages = {name: rounded[name] for name in _AFFINE_IN[:3]}
    placed = PlacementCounts(**pages, device_kv=rounded["device_blocks"] / blocks)
    seconds = float(job_s(candidate.cost_model, problem.workload, candidate, placed))
    return Solution(candidate=candidate, placed=placed, seconds=seconds)


def _memory(candidate: Candidates, free: FreeMemory, integer_program: _IntegerProgram) -> None:
    """Limits: every page is placed, and every tier holds its pages and blocks. In slots, to keep numbers small."""
    block = free.kv_block_bytes / free.slot_bytes
    kv = int(free.kv_blocks) * block
    device, host = (float(left - free.uneven_bytes) / free.slot_bytes for left in (free.device, free.host))
    integer_program.add(
        {"resident": 1, "from_host": 1, "from_disk": 1, "computed": 1}, least=free.pages, maximum=free.pages
    )
    integer_program.add({"per_layer": free.layers, "from_host": -1, "from_disk": -1}, least=0)
    integer_program.add({"from_disk": 1, "reads": -free.pages}, maximum=0)
    ring, taken = _rings(candidate, free, integer_program)
    integer_program.add({"from_disk": 1}, maximum=free.disk // free.page_bytes)
    if candidate.attention_device == "cpu":
        integer_program.add({"device_blocks": 1}, maximum=0)
        block = 0.0
    if candidate.attention_device == "cpu" and free.ring_slot == 1:  # whole slots, so the tolerance loses nothing
        device, host = float(math.floor(device)), float(math.floor(host - kv))
    else:
        device, host = device - _TOLERANCE, host - kv - _TOLERANCE
    if candidate.ffn_device == "cpu":
        integer_program.add({"resident": 1, **ring, "device_blocks": -block}, maximum=host - taken)
        if candidate.residents == "learned" and not candidate.discrete:  # the ring holds a layer
            integer_program.add(
                {"resident": 1, "reads": free.ring_slot * (free.pages // free.layers), "device_blocks": -block},
                maximum=host,
            )
        integer_program.add({"from_host": 1, "computed": 1}, maximum=0)
        if candidate.discrete:
            integer_program.add({"device_blocks": block}, maximum=device)
        return
    integer_program.add({"resident": 1, **ring, "device_blocks": block}, maximum=device - taken)
    on_host = {"from_host": 1, "computed": 1, "pinned": free.ring_slot, "device_blocks": -block}
    integer_program.add(on_host, maximum=host)
    if candidate.ffn_device != "split":
        integer_program.add({"computed": 1}, maximum=0)


def _rings(
    candidate: Candidates, free: FreeMemory, integer_program: _IntegerProgram
) -> tuple[Mapping[str, float], float]:
    """The ring in slots of average size, as a sum of variables and a number; and the limits of the pinned ring. A ring
    smaller than two layers, and its pinned ring, are taken whole, whatever streams."""
    pinned_pages, experts = candidate.cost_model.pinned_pages, free.pages // free.layers
    ring = int(ring_of(candidate.cost_model.model, candidate.ring_pages))
    if ring < 2 * experts:
        integer_program.add(
            {"pinned": 1, **({"reads": -ring} if pinned_pages else {})}, least=0 if pinned_pages else ring
        )
        return {}, free.ring_slot * ring
    if not pinned_pages:
        integer_program.add({"pinned": 1, "per_layer": -1}, least=0)
    integer_program.add({"pinned": 1, "per_layer": -2, "reads": -2 * free.pages}, least=-2 * free.pages)
    return {"per_layer": 2 * free.ring_slot}, 0


def _fixed(problem: Problem, candidate: Candidates, free: FreeMemory, integer_program: _IntegerProgram) -> None:
    """Limits: fixed shares are met to the page and to the block."""
    near_device = candidate.ffn_device != "cpu"
    counts: Mapping[str, Mapping[str, float]] = {
        "weights.device": {"resident": 1} if near_device else {"resident": 0},
        "weights.host": {"from_host": 1, "computed": 1} if near_device else {"resident": 1},
        "weights.disk": {"from_disk": 1},
        "cpu_experts": {"computed": 1},
    }
    for key, coefficients in counts.items():
        pages = problem.fixed_pages(key)
        if pages is not None:
            integer_program.add(coefficients, least=pages, maximum=pages)
    device_kv = problem.device_kv if candidate.attention_device == "gpu" else 0.0
    if device_kv is not None:
        requested = round(device_kv * int(free.kv_blocks))
        integer_program.add({"device_blocks": 1}, least=requested, maximum=requested)


def _terms(problem: Problem, candidate: Candidates) -> list[tuple[float, Any, Any]]:
    """For each kind of pass: its count, and its terms as slopes ``[terms, variables]`` over a base ``[terms]``."""
    cost_model, terms = candidate.cost_model, []
    kinds = kinds_of(cost_model.model, problem.workload, candidate)
    for index in np.flatnonzero(kinds.count > 0):
        kind = kinds.kind(int(index))

        def at(**placed: float) -> Any:
            counts = PlacementCounts(**placed)
            cost = cost_of(cost_model, problem.workload, kind, counts, candidate, streams=True)  # noqa: B023
            return np.array([float(term) for term in SCHEDULE_TERMS[candidate.schedule](cost)])

        base = at()
        slopes = np.stack([at(**{name: 1.0}) - base for name in _AFFINE_IN], axis=1)
        terms.append((float(kind.count), slopes, base))
    return terms
