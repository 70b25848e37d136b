"""Upper bound on the speed of any policy: branch and bound over boxes of all values of a policy.

A box is a range of N, of numbers of micro-batches, of tokens in a prompt micro-batch, of prompt tokens in a pass, of
pages for the CPU, of the cache's share on the device and of the ring's pages (as little memory as its smallest takes,
as many pages ahead as in its largest). Its price combines the best values in the box: passes that are fewer and have
fewer tokens than those of any N in it (`bounding_passes`), weights read for its fewest micro-batches, a pipeline filled
as by its most, the free memory of its smallest candidate, pages computed and cached where that is best, no transfer of
a page without routed tokens and no wait for routers, on a machine where more work never takes less time or is done at a
lower rate. So no policy in the box is faster under any schedule: cgopipe takes no longer than any other but ``module``.
Unless fixed otherwise, the cache has the smallest blocks, host pages are pinned and look-ahead is the largest allowed,
none of which ever takes longer. Each way of admission has its own boxes.

Boxes that cannot beat the best known policy are dropped. The others are cut in two along the side that has raised
bounds the most so far for its length, until all remaining boxes are within the gap or the limit of boxes is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from moelight.hrm import costs
from moelight.hrm.footprint import KV_BUFFERS, WHOLE_EXPERTS, kv_buffer_tokens, transient_bytes
from moelight.hrm.machine_model import at_best
from moelight.hrm.pass_cost import NO_DISK_BYTES_PER_S, PassCost, PlacementCounts, pass_cost
from moelight.hrm.schedule_time import ON_DEMAND_SCHEDULES, pass_s
from moelight.hrm.workload_model import bounding_passes, bounding_static_passes
from moelight.optimizer.placement import FreeMemory, fill, free_memory
from moelight.optimizer.problem import LEAST_TOKENS, Candidates, Problem, kv_tokens, make_candidates, variants

GAP = 0.01
EXACT = 1e-7
SLACK = 1e-6  # of a block
ALL_DECODE = 2  # the kind of passes in which every slot decodes
AT_ONCE = 1000
MOST_BOXES = {True: 14_000, False: 60_000}  # with a GPU, whose passes take longer to price, and without
MOST_CUTS, WORTH_A_CALL = 3, 300
FORGET, LEAST_RAISED = 0.7, 1e-3
# Initial estimate of the relative rise of a bound by a cut along each of `_SIDES`, per length of the side.
RAISES = (0.8, 0.1, 0.1, 0.5, 4.0, 6.0, 0.3)
BOUNDING = ("cgopipe", "module")  # no other schedule takes less than cgopipe, whichever pages are transferred


@dataclass(frozen=True, kw_only=True, slots=True)
class _Boxes:
    """Arrays of one length: N in ``n0..n1``, micro-batches ``b``, tokens of a prompt micro-batch ``t``, prompt tokens
    of a pass ``r``, pages for the CPU ``c``, device share of the cache ``k``, pages of the ring ``g``; ``least_s``: a
    lower bound of their policies. A box was, or will be, cut along ``side``, of ``length`` before the cut."""

    n0: Any
    n1: Any
    b0: Any
    b1: Any
    t0: Any
    t1: Any
    r0: Any
    r1: Any
    c0: Any
    c1: Any
    k0: Any
    k1: Any
    g0: Any
    g1: Any
    least_s: Any
    side: Any
    length: Any

    def at(self, index: Any) -> _Boxes:
        return _Boxes(**{name: getattr(self, name)[index] for name in _FIELDS})

    def __len__(self) -> int:
        return len(self.n0)


_SIDES = (("n0", "n1"), ("b0", "b1"), ("t0", "t1"), ("r0", "r1"), ("c0", "c1"), ("k0", "k1"), ("g0", "g1"))
_FIELDS = tuple(_Boxes.__dataclass_fields__)


def least_seconds(problem: Problem, known_s: float) -> float:
    """A lower bound in seconds on the job under any policy, within `GAP` of ``known_s``, the best known time, if the
    boxes suffice. Boxes are cut first in the variant with the lowest bound."""
    goal_s, left = known_s * (1 - GAP), MOST_BOXES[problem.has_gpu]
    fronts = [
        _Front.of(problem, variant, goal_s)
        for variant in variants(problem)
        if (variant.residents != "learned" or "residents" in problem.fixed)
        and (variant.schedule in BOUNDING or "schedule" in problem.fixed)
    ]
    while left > 0:
        front = min(fronts, key=lambda front: front.least_s)
        if not len(front.waiting):
            break
        left -= front.advance()
    return min([goal_s, *(front.least_s for front in fronts)])


def undecided(problem: Problem, known_s: float, *, most_boxes: int) -> list[Candidates]:
    """The sizes, as single candidates, that some placement might make faster than ``known_s``, lowest bound first;
    complete if the boxes suffice and prompt micro-batches are fixed."""
    open_boxes: list[tuple[float, Candidates]] = []
    for variant in variants(problem):
        front, left = _Front.of(problem, variant, known_s * (1 - EXACT)), most_boxes
        while len(front.waiting) and left > 0:
            left -= front.advance()
        boxes = _joined(front.settled, front.waiting)
        order = np.argsort(boxes.least_s, kind="stable")
        sizes = np.stack([boxes.n1, boxes.b1, boxes.t1, boxes.r1, boxes.g1])[:, order]
        _, first = np.unique(sizes, axis=1, return_index=True)
        mu = _least_mu(problem, boxes)
        for index in order[np.sort(first)]:
            values = (boxes.n1[index], mu[index], boxes.t0[index], max(1, boxes.r1[index] // boxes.t0[index]))
            ring = np.int64(boxes.g1[index])
            candidate = make_candidates(problem, variant, *(np.int64(value) for value in values), ring_pages=ring)
            open_boxes.append((float(boxes.least_s[index]), candidate))
    return [candidate for _, candidate in sorted(open_boxes, key=lambda item: item[0])]


@dataclass(kw_only=True, slots=True)
class _Front:
    """The boxes of one variant that may hold a policy faster than ``goal_s``: ``waiting`` to be cut, or ``settled``,
    which cannot be cut further. ``raised``: relative rise of the bound by cuts so far, per length of each side."""

    problem: Problem
    variant: Candidates
    goal_s: float
    waiting: _Boxes
    settled: _Boxes
    raised: Any

    @classmethod
    def of(cls, problem: Problem, variant: Candidates, goal_s: float) -> _Front:
        variant = replace(variant, cost_model=replace(variant.cost_model, speeds=at_best(variant.cost_model.speeds)))
        boxes = _all(problem, variant)
        boxes = replace(boxes, least_s=_bound_s(problem, variant, boxes))
        front = cls(
            problem=problem,
            variant=variant,
            goal_s=goal_s,
            waiting=boxes,
            settled=boxes.at([]),
            raised=np.array(RAISES),
        )
        front.waiting = front._open(boxes)
        return front

    @property
    def least_s(self) -> float:
        """The least of all bounds; infinite if no box is left."""
        return float(min(np.min(boxes.least_s, initial=np.inf) for boxes in (self.waiting, self.settled)))

    def advance(self) -> int:
        """Cut the boxes with the lowest bounds; return the number of new boxes."""
        order = np.argsort(self.waiting.least_s, kind="stable")
        first, rest = self.waiting.at(order[:AT_ONCE]), self.waiting.at(order[AT_ONCE:])
        single = np.max(_lengths(self.problem, first), axis=0) <= 0
        self.settled, boxes = _joined(self.settled, first.at(single)), first.at(~single)
        for _ in range(MOST_CUTS):  # cut again while too few boxes are left for one call of `_bound_s`
            boxes = self._cut(boxes)
            if not len(boxes) or len(boxes) >= WORTH_A_CALL:
                break
        seconds = np.maximum(_bound_s(self.problem, self.variant, boxes), boxes.least_s)
        self._learn(boxes, seconds)
        self.waiting = _joined(rest, self._open(replace(boxes, least_s=seconds)))
        return len(boxes)

    def _open(self, boxes: _Boxes) -> _Boxes:
        """The boxes that may hold a policy faster than the goal."""
        return boxes.at(np.flatnonzero(boxes.least_s < self.goal_s))

    def _cut(self, boxes: _Boxes) -> _Boxes:
        """The halves of ``boxes``, each cut along its most promising side; boxes of a single point are kept."""
        lengths = _lengths(self.problem, boxes)
        side = np.argmax(lengths * self.raised[:, None], axis=0)
        length = lengths[side, np.arange(len(boxes))]
        some = length > 0
        halves = _halves(self.problem, replace(boxes, side=side, length=length).at(some))
        return halves if some.all() else _joined(boxes.at(~some), halves)

    def _learn(self, boxes: _Boxes, seconds: Any) -> None:
        """Update ``raised`` by the rise of bounds in the last cut of ``boxes``."""
        gained = np.minimum(seconds, 2 * self.goal_s) / boxes.least_s - 1.0
        for index in np.unique(boxes.side).astype(int):
            along = (boxes.side == index) & (boxes.length > 0)
            if along.any():
                brought = float(np.mean(gained[along] / boxes.length[along]))
                self.raised[index] = max(FORGET * self.raised[index] + (1 - FORGET) * brought, LEAST_RAISED)


def _joined(*parts: _Boxes) -> _Boxes:
    return _Boxes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS})


def _all(problem: Problem, variant: Candidates) -> _Boxes:
    """Boxes that together cover every candidate of a variant."""
    total, (fewest, maximum) = problem.pages, problem.sequences
    number, fixed = problem.count("num_micro_batches"), problem.count("micro_batch_tokens")
    longest = max(problem.prompt_tokens, maximum, LEAST_TOKENS)  # the most tokens of a pass
    n = _ranges(fewest, maximum, 8)
    b = [(number, number)] if number is not None else _ranges(1, maximum, 16)
    tokens = [(fixed, fixed)] if fixed is not None else [(1, longest)]
    prompt_batches = problem.count("prompt_micro_batches")
    free = prompt_batches is None and fixed is None
    prefill = _ranges(1, longest, 64) if free else [(1, longest * (prompt_batches or 1))]
    computed: list[tuple[int, int]] = [(0, 0)]
    cache = [(0.0, 0.5), (0.5, 1.0)] if variant.attention_device == "gpu" else [(0.0, 0.0)]
    if variant.ffn_device == "split":
        pages, edges = problem.fixed_pages("cpu_experts"), np.linspace(-1, total, 3).astype(int)
        computed = [(low + 1, high) for low, high in pairwise(edges) if low < high]
        computed = computed if pages is None else [(pages, pages)]
    if variant.attention_device == "gpu" and (share := problem.device_kv) is not None:
        blocks = -(-int(kv_tokens(problem, np.int64(fewest))) // problem.block_size)
        half = 0.5 / blocks  # a fixed share is met to a block
        cache = [(max(0.0, share - half), min(1.0, share + half))]
    smallest, largest = problem.rings(variant)
    rings = [(largest, largest)] if smallest == largest else [(smallest, largest - 1), (largest, largest)]
    grid = [np.asarray(axis, dtype=float) for axis in (n, b, tokens, prefill, computed, cache, rings)]
    index = np.stack([i.ravel() for i in np.meshgrid(*(np.arange(len(axis)) for axis in grid), indexing="ij")])
    sides, nothing = np.concatenate([axis[i].T for axis, i in zip(grid, index, strict=True)]), np.zeros(index.shape[1])
    columns = (*sides, nothing, nothing, nothing)
    return _trimmed(problem, _Boxes(**dict(zip(_FIELDS, columns, strict=True))))


def _ranges(fewest: int, maximum: int, factor: int) -> list[tuple[int, int]]:
    """``fewest`` to ``maximum`` in ranges that grow by ``factor``."""
    edges = [fewest]
    while factor * edges[-1] <= maximum:
        edges.append(factor * edges[-1])
    return list(zip(edges, [*(edge - 1 for edge in edges[1:]), maximum], strict=True))


def _trimmed(problem: Problem, boxes: _Boxes) -> _Boxes:
    """Boxes shrunk to consistent sizes: N at least the number of micro-batches, a fixed μ if given, a token per
    sequence, at least one prompt micro-batch in a pass, whole cache blocks. Empty boxes are dropped."""
    n0, n1, b0, b1, mu = boxes.n0, boxes.n1, boxes.b0, boxes.b1, problem.count("micro_batch_size")
    if mu is not None:
        n0, n1 = np.maximum(n0, (b0 - 1) * mu + 1), np.minimum(n1, b1 * mu)
        b0, b1 = np.maximum(b0, np.ceil(n0 / mu)), np.minimum(b1, np.ceil(n1 / mu))
    n0, b1 = np.maximum(n0, b0), np.minimum(b1, n1)
    prompt_batches = problem.count("prompt_micro_batches")
    t0, t1 = np.maximum(boxes.t0, np.ceil(n0 / np.maximum(b1, 1)) if mu is None else mu), boxes.t1
    r0, r1 = np.maximum(boxes.r0, t0 * (prompt_batches or 1)), boxes.r1
    if prompt_batches is not None:
        r1 = np.minimum(r1, t1 * prompt_batches)
    t1 = np.minimum(t1, np.floor(r1 / (prompt_batches or 1)))
    blocks = np.ceil(kv_tokens(problem, np.maximum(n0, 1)) / problem.block_size)
    single = n0 == n1
    k0 = np.where(single, np.ceil(boxes.k0 * blocks - SLACK) / blocks, boxes.k0)
    k1 = np.where(single, np.floor(boxes.k1 * blocks + SLACK) / blocks, boxes.k1)
    trimmed = replace(boxes, n0=n0, n1=n1, b0=b0, b1=b1, t0=t0, t1=t1, r0=r0, r1=r1, k0=k0, k1=k1)
    left = (n0 <= n1) & (b0 <= b1) & (t0 <= t1) & (r0 <= r1) & (k0 <= k1)
    return trimmed.at(np.flatnonzero(left))


def _bound_s(problem: Problem, variant: Candidates, boxes: _Boxes) -> Any:
    """A lower bound of the seconds of any policy, for each box; infinite if no policy fits."""
    few, many = boxes.t0.astype(np.int64), boxes.t1.astype(np.int64)
    requested = {"computed": boxes.c1, "device_kv": boxes.k0, "ring_pages": boxes.g0}
    sizes = boxes.n0.astype(np.int64), _least_mu(problem, boxes), few, boxes.r0 / few
    smallest = make_candidates(problem, variant, *sizes, **requested)
    bounding = bounding_static_passes if variant.admission == "static" else bounding_passes
    kinds, more = bounding(problem.workload, (boxes.n0, boxes.n1), (boxes.r0, boxes.r1))
    rows = np.flatnonzero(np.any(kinds.count > 0, axis=1) | (np.arange(len(kinds.count)) <= ALL_DECODE))
    kinds = kinds.kind(rows)
    room = {"off_host": boxes.k1, "in_host": boxes.c0, "free": _most_room(problem, smallest, boxes, many)}
    placed, feasible = fill(problem, smallest, **room)
    wide = np.stack([boxes.n0 if index == ALL_DECODE else boxes.n1 for index in rows])

    on_demand = variant.schedule in ON_DEMAND_SCHEDULES or "schedule" not in problem.fixed
    if on_demand and variant.schedule in WHOLE_EXPERTS:  # behind a ring smaller than two layers every pass is whole
        on_demand = boxes.g1 >= 2 * np.ceil(
            (placed.from_host + placed.from_disk) / max(problem.model.num_moe_layers, 1)
        )

    def cost(placed: PlacementCounts, *, fewest: bool) -> PassCost:
        return pass_cost(
            variant.cost_model,
            kinds,
            placed,
            running=wide if fewest else boxes.n0,
            batches=boxes.b0 if fewest else boxes.b1,
            prompt_tokens=(many if fewest else few).astype(float),
            grouped=variant.schedule in WHOLE_EXPERTS,
            look_ahead=variant.look_ahead,
            routed_only=on_demand,
            apart=0.0,
            ring_pages=boxes.g1,
            least_ring=boxes.g0,
        )

    best = _best_of(
        [
            cost(replace(placed, computed=computed, device_kv=boxes.k1), fewest=fewest)
            for computed in ((boxes.c0, boxes.c1) if variant.ffn_device == "split" else (boxes.c0,))
            for fewest in (True, False)
        ]
    )
    best = _from_disk(problem, variant, best, placed)
    if not variant.discrete:  # overlapping never costs more than running one after the other
        cpu, disk = (
            np.minimum(best.waits[lane], best.lanes[other]) for lane, other in (("cpu", "disk"), ("disk", "cpu"))
        )
        best = replace(best, waits={"cpu": cpu, "disk": disk})
    if variant.attention_device == "gpu" and variant.ffn_device != "cpu":
        bare, _ = fill(problem, replace(smallest, device_kv=0 * boxes.k0), **room)
        links = [cost(replace(bare, device_kv=k), fewest=True) for k in (boxes.k0, boxes.k1)]
        best = _pages_or_cache(variant, best, bare, room["free"], boxes, links)
    pass_seconds = pass_s(variant.schedule, best)
    seconds = np.sum(kinds.count * pass_seconds, axis=0) + more * np.min(pass_seconds[: ALL_DECODE + 1], axis=0)
    return np.where(feasible, seconds, np.inf)


def _least_mu(problem: Problem, boxes: _Boxes) -> Any:
    """The least sequences of a micro-batch in each box."""
    fixed = problem.count("micro_batch_size")
    least = np.ceil(boxes.n0 / boxes.b1)
    return (least if fixed is None else np.full_like(least, fixed)).astype(np.int64)


def _most_room(problem: Problem, smallest: Candidates, boxes: _Boxes, most_tokens: Any) -> FreeMemory:
    """The free memory of the smallest candidate of each box, plus what another candidate saves where use does not grow
    with size: cache buffers, which fall with N, and the gathered context, not needed if T exceeds the context. Where
    pages differ, those that are placed may be the smallest."""
    free, model, cost_model = free_memory(problem, smallest), problem.model, smallest.cost_model
    free = replace(free, uneven_bytes=-free.uneven_bytes)
    none = replace(smallest, kv_tokens=np.zeros_like(smallest.kv_tokens))
    context = np.minimum(smallest.kv_tokens, model.max_positions)
    gathered = transient_bytes(model, smallest, cost_model.dtype) - transient_bytes(model, none, cost_model.dtype)
    spared = np.where(context <= most_tokens, gathered, 0)
    if not smallest.discrete:
        return replace(free, host=free.host + spared)
    if smallest.attention_device == "gpu":
        sizes = (smallest.micro_batch_size, smallest.micro_batch_tokens, smallest.prompt_micro_batches)
        largest = make_candidates(problem, smallest, boxes.n1.astype(np.int64), *sizes)
        buffer = np.minimum(kv_buffer_tokens(largest), smallest.kv_tokens)
        tokens = np.maximum(kv_buffer_tokens(smallest) - buffer, 0)
        spared = spared + KV_BUFFERS * tokens * costs.kv_layer_bytes(model, cost_model.kv_dtype)
    return replace(free, device=free.device + spared)


def _from_disk(problem: Problem, variant: Candidates, cost: PassCost, placed: PlacementCounts) -> PassCost:
    """``cost`` less the host copies that reading pages from disk could save: a lane's time falls until the disk is as
    busy; without this limit in ``serial``, which overlaps nothing."""
    if "stage" not in cost.lanes:
        return cost
    speeds, page = variant.cost_model.speeds, variant.cost_model.page_bytes()
    spared = np.minimum(placed.from_host, np.maximum(problem.capacity_bytes["disk"] // page - placed.from_disk, 0))
    disk_s, each_disk_s = cost.lanes["disk"], page / (speeds.disk or NO_DISK_BYTES_PER_S)

    def sunk(seconds: Any, each_s: float) -> Any:
        if variant.schedule == "serial":
            return seconds - spared * max(each_s - each_disk_s, 0.0)
        moved = np.clip((seconds - disk_s) / (each_s + each_disk_s), 0.0, spared)
        return seconds - moved * each_s

    copies = cost.lanes["stage"] > 0
    stage = np.where(copies, sunk(cost.lanes["stage"], page / speeds.stage), cost.lanes["stage"])
    dram = np.where(copies, sunk(cost.lanes["dram"], page / speeds.dram), cost.lanes["dram"])
    lanes = {**cost.lanes, "stage": stage, "dram": dram}
    return replace(cost, lanes=lanes, pages=(cost.pages[0], stage, cost.pages[2]))


def _pages_or_cache(
    variant: Candidates, cost: PassCost, bare: PlacementCounts, free: FreeMemory, boxes: _Boxes, links: list[PassCost]
) -> PassCost:
    """``cost`` with one more page on the host-to-device link for each device slot that the cache takes, less one page
    in all. ``links``: passes without slots taken, at the least and the most device cache, linear in between."""
    page_s = links[0].share * variant.cost_model.page_bytes() / variant.cost_model.speeds.h2d
    taken = free.kv_blocks * free.kv_block_bytes / free.slot_bytes
    least = np.minimum(
        *(link.lanes["h2d"] + (k * taken - 1.0) * page_s for link, k in zip(links, (boxes.k0, boxes.k1), strict=True))
    )
    streams = bare.from_host + bare.from_disk > 0
    h2d = np.where(streams, np.maximum(cost.lanes["h2d"], least), cost.lanes["h2d"])
    return replace(cost, lanes={**cost.lanes, "h2d": h2d})


def _best_of(costs: list[PassCost]) -> PassCost:
    """The least of every figure; ``first``, which is subtracted again beside the first attention, is infinite."""

    def least(values: Iterable[Any]) -> Any:
        return np.minimum.reduce(np.broadcast_arrays(*values))

    def least_of(name: str) -> dict[str, Any]:
        return {lane: least(getattr(cost, name)[lane] for cost in costs) for lane in getattr(costs[0], name)}

    figures = ("count", "act", "attend", "up", "chain", "experts", "link_waits", "link_reads", "attended", "turn")
    return PassCost(
        lanes=least_of("lanes"),
        waits=least_of("waits"),
        pages=tuple(least(parts) for parts in zip(*(cost.pages for cost in costs), strict=True)),
        first=np.inf,
        ahead=costs[0].ahead,
        look_ahead=costs[0].look_ahead,
        **{name: least(getattr(cost, name) for cost in costs) for name in figures},
    )


def _lengths(problem: Problem, boxes: _Boxes) -> Any:
    """The length of each of `_SIDES`: of sizes the log of their ratio, of shares the difference."""
    blocks = np.ceil(kv_tokens(problem, boxes.n0) / problem.block_size)
    sizes = [np.log(getattr(boxes, high) / getattr(boxes, low)) for low, high in _SIDES[:4]]
    share = np.where((boxes.k1 - boxes.k0) * blocks < 1 - SLACK, 0.0, boxes.k1 - boxes.k0)
    return np.stack([*sizes, (boxes.c1 - boxes.c0) / problem.pages, share, np.log(boxes.g1 / boxes.g0)])


def _halves(problem: Problem, boxes: _Boxes) -> _Boxes:
    """Each box cut in two along its ``side``: sizes at the geometric mean, shares halfway; N where the number of full
    waves changes, if that number changes within the box."""
    requests = problem.workload.num_requests
    parts = []
    for side, (low, high) in enumerate(_SIDES):
        part = boxes.at(np.flatnonzero(boxes.side == side))
        start, stop = getattr(part, low), getattr(part, high)
        middle = np.sqrt(start * stop) if side < 4 or low == "g0" else (start + stop) / 2
        middle = middle if low == "k0" else np.floor(middle)
        if low == "n0":
            full = np.floor(requests / np.maximum(np.round(requests / np.maximum(middle, 1)), 1))
            middle = np.where((full >= start) & (full < stop), full, middle)
        parts += [replace(part, **{high: middle}), replace(part, **{low: middle if low == "k0" else middle + 1})]
    return _trimmed(problem, _joined(*parts))
