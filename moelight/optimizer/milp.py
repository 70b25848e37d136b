"""The integer programme: homes of every page and cache block for one candidate, so that its job ends soonest.

Written with cvxpy, solved by HiGHS. Time is a sum over the kinds of passes, each as long as its longest term; every
term is affine in the homes (``hrm.lanes``), so its coefficients are read off by pricing unit steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moelight.hrm.estimate import cost_of
from moelight.hrm.footprint import riding_tokens
from moelight.hrm.job import passes_of
from moelight.hrm.lanes import Homes
from moelight.hrm.orders import ORDERS
from moelight.optimizer.homes import Room, fixed_device_kv, room_of
from moelight.optimizer.problem import Cells, Problem

_TOLERANCE = 2e-6  # of a slot: what the solver may overstep a limit by
_AFFINE_IN = ("from_host", "from_disk", "computed", "device_kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """Page counts and cache blocks of the best homes, and the seconds of the job with them."""

    resident: int
    from_host: int
    from_disk: int
    computed: int
    device_blocks: int
    seconds: float


class _Variables(NamedTuple):
    """Pages by home, the most streamed pages of a layer, blocks of the cache on the device, pinned slots."""

    resident: Any
    from_host: Any
    from_disk: Any
    computed: Any
    per_layer: Any
    device_blocks: Any
    pinned: Any


def solve(problem: Problem, cell: Cells) -> Solved | None:
    """The best homes for one candidate (a `Cells` of scalars); None where none fit."""
    import cvxpy

    room = room_of(problem, cell)
    blocks = max(int(room.kv_blocks), 1)
    v = _Variables(*(cvxpy.Variable(integer=True, name=name) for name in _Variables._fields))
    reads = cvxpy.Variable(boolean=True, name="reads")  # whether any page comes from disk
    homes = cvxpy.hstack([v.from_host, v.from_disk, v.computed, v.device_blocks / blocks])
    limits = [
        *(variable >= 0 for variable in v),
        v.device_blocks <= int(room.kv_blocks),
        v.resident + v.from_host + v.from_disk + v.computed == room.pages,
        v.per_layer * room.layers >= v.from_host + v.from_disk,
        v.from_disk <= room.pages * reads,
        v.pinned >= v.per_layer,
        v.pinned >= 2 * v.per_layer - 2 * room.pages * (1 - reads),
        *_memory(cell, room, v),
        *_fixed(problem, cell, room, v),
    ]
    objective: Any = 0
    terms = _terms(problem, cell)
    scale = sum(count * float(base.max()) for count, _, base in terms)  # the solver's tolerance is of numbers near 1
    for count, slopes, base in terms:
        longest = cvxpy.Variable()  # of one kind of passes together
        limits.append(longest >= (count / scale) * (slopes @ homes + base))
        objective = objective + longest
    programme = cvxpy.Problem(cvxpy.Minimize(objective), limits)
    programme.solve(solver=cvxpy.HIGHS, mip_rel_gap=1e-9)  # type: ignore[no-untyped-call]
    if programme.status not in ("optimal", "optimal_inaccurate"):
        return None
    found = _Variables(*(round(float(np.asarray(variable.value))) for variable in v))
    return Solved(
        resident=found.resident,
        from_host=found.from_host,
        from_disk=found.from_disk,
        computed=found.computed,
        device_blocks=found.device_blocks,
        seconds=float(programme.value) * scale,
    )


def _memory(cell: Cells, room: Room, v: _Variables) -> list[Any]:
    """Every tier holds what is at home on it. In slots, to keep numbers small."""
    block = room.kv_block_bytes / room.slot_bytes
    device, host = float(room.device) / room.slot_bytes, float(room.host) / room.slot_bytes
    kv, kv_device = int(room.kv_blocks) * block, v.device_blocks * block
    limits = [v.from_disk <= room.disk // room.page_bytes]
    if cell.attention_device == "cpu":  # whole slots on both sides, so nothing is lost to the solver's tolerance
        limits += [v.device_blocks == 0]
        kv_device = 0
        device, host = float(math.floor(device)), float(math.floor(host - kv))
    else:
        device, host = device - _TOLERANCE, host - kv - _TOLERANCE
    if cell.ffn_device == "cpu":
        limits += [v.resident + 2 * v.per_layer - kv_device <= host, v.from_host == 0, v.computed == 0]
        if cell.discrete:
            limits += [kv_device <= device]
        return limits
    limits += [v.resident + 2 * v.per_layer + kv_device <= device]
    limits += [v.from_host + v.computed + v.pinned - kv_device <= host]
    return limits if cell.ffn_device == "split" else [*limits, v.computed == 0]


def _fixed(problem: Problem, cell: Cells, room: Room, v: _Variables) -> list[Any]:
    """Fixed shares are met to the page and to the block."""
    near_device = cell.ffn_device != "cpu"
    counts = {
        "weights.device": v.resident if near_device else 0 * v.resident,
        "weights.host": v.from_host + v.computed if near_device else v.resident,
        "weights.disk": v.from_disk,
        "cpu_experts": v.computed,
    }
    shares = {key: problem.share(key) for key in counts}
    limits = [counts[key] == round(share * room.pages) for key, share in shares.items() if share is not None]
    device_kv = fixed_device_kv(problem, cell)
    if device_kv is not None:
        limits += [v.device_blocks == round(device_kv * int(room.kv_blocks))]
    return limits


def _terms(problem: Problem, cell: Cells) -> list[tuple[float, Any, Any]]:
    """For each kind of pass: how many, and its terms as slopes ``[terms, variables]`` over a base ``[terms]``."""
    acts, order = cell.setting.acts, cell.setting.order
    found = []
    kinds = passes_of(problem.workload, cell.batch_size, riding_tokens(cell))
    for index in np.flatnonzero(kinds.count > 0):
        kind = kinds.kind(int(index))

        def at(**homes: float) -> Any:
            cost = cost_of(acts, kind, Homes(**homes), cell, order)  # noqa: B023 (called before the next kind)
            return np.array([float(term) for term in ORDERS[order](cost)])

        base = at()
        slopes = np.stack([at(**{name: 1.0}) - base for name in _AFFINE_IN], axis=1)
        found.append((float(kind.count), slopes, base))
    return found
