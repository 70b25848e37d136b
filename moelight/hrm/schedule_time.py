"""Seconds of a pass under each schedule (MoE-Lightning, section 4.1 and figure 6): the largest of a list of terms,
which are affine in the placement of pages. ``scheduler.simulate`` runs the same work task by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from moelight.hrm import costs
from moelight.hrm.pass_cost import PassCost
from moelight.profiles.model import ModelProfile

_COMPUTE = ("device", "cpu", "d2h", "dram", "exchange")
_WORK = ("device", "cpu", "d2h", "h2d")
ON_DEMAND_SCHEDULES = ("cgopipe", "fastdecode", "serial", "module")  # schedules that have an on-demand pass
# The least expected share of streamed pages without routed tokens from which on only the other pages are transferred,
# after the routers. The cost is the overlap of the links with compute. With so few tokens, compute runs at memory
# speed, ten to twenty times as fast as any link that binds, and reads no more bytes than the pages that cross and the
# dense part: 0.05 to 0.2 of the link's time.
ROUTED_ONLY_SHARE = 0.25
# The same share where the number of pages without routed tokens is measured: routed pages are read as fast as in a
# whole pass, and resident experts run meanwhile. 64 experts, a disk: 1.2 to 1.5 x the tokens per second of a quarter
# (docs/log.md).
MEASURED_SHARE = 0.06
LOOK_AHEAD = 2  # micro-batches that attend while another one runs its experts, by default (algorithm 1)


def routed_only(
    model: ModelProfile, schedule: str, tokens: Any, most_tokens: Any, *, least: float | None = None
) -> Any:
    """True if a pass of ``tokens`` transfers only the streamed pages to which its tokens are routed. ``most_tokens``:
    of a micro-batch, and of an on-demand pass, since all micro-batches keep their expert inputs. ``least``: the least
    share of unrouted pages, `ROUTED_ONLY_SHARE` if None."""
    least = ROUTED_ONLY_SHARE if least is None else least
    missed = 1.0 - costs.distinct_experts(model, tokens) / model.experts.num_experts
    small = (missed >= least) & (np.asarray(tokens) <= most_tokens)
    return small & (schedule in ON_DEMAND_SCHEDULES)


def cgopipe(cost: PassCost) -> list[Any]:
    """S1: all lanes overlap, links from pass to pass, compute from the first micro-batch on, with ``look_ahead`` + 1
    micro-batches in flight. If only routed pages move, links and compute alternate, except for resident experts."""
    return _overlapped(cost, cost.look_ahead)


def _overlapped(cost: PassCost, look_ahead: Any = LOOK_AHEAD) -> list[Any]:
    compute = [cost.lanes[lane] + cost.waits.get(lane, 0.0) for lane in _COMPUTE if lane in cost.lanes]
    on_their_way = np.maximum(1.0, cost.count / (look_ahead + 1.0))
    crossing = cost.pages[0] if "h2d" in cost.lanes else 0.0
    work = reduce(np.add, (cost.lanes[lane] for lane in _WORK if lane in cost.lanes)) - crossing
    turns = [cost.apart * (work - cost.meanwhile + pages) for pages in cost.pages]
    return [*_links(cost), *compute, cost.chain * on_their_way, *turns]


def fastdecode(cost: PassCost) -> list[Any]:
    """S2: a layer's pages cross as one block before the next layer's first hidden states; meanwhile only micro-batches
    whose hidden states crossed before can proceed."""
    if "h2d" not in cost.lanes:
        return _overlapped(cost)
    behind = np.maximum(cost.count - 2.0, 0.0)
    exposed = [pages + cost.up + behind * step for pages in cost.pages for step in (cost.up, cost.act, cost.attend)]
    return [*_overlapped(cost), *exposed]


def flexgen_c(cost: PassCost) -> list[Any]:
    """S3: each micro-batch runs through its chain alone, after the pages of its layer."""
    others = np.maximum(cost.count - 1.0, 0.0)
    return [*_overlapped(cost), cost.count * cost.chain, *(pages + others * cost.chain for pages in cost.pages)]


def flexgen(cost: PassCost) -> list[Any]:
    """S4: contexts cross one micro-batch ahead, after the pages of their layer. Without a link, the next layer's block
    is read after the first micro-batch's experts, beside everything up to the next layer's."""
    if "h2d" not in cost.lanes:
        first = np.where(cost.count > 1, cost.act + cost.attend - cost.first, 0.0)
        return [*cgopipe(cost), *(pages + first for pages in cost.pages)]
    others, steps = np.maximum(cost.count - 1.0, 0.0), (cost.act + cost.attend, cost.up)
    return [*_overlapped(cost), *(pages + others * step for pages in cost.pages for step in steps)]


def flexgen_loop(cost: PassCost) -> list[Any]:
    """FlexGen's actual loop, synchronised after each micro-batch; the next layer crosses beside the first micro-batch:
    max(w + K, c) + (n - 1) max(c, K). Without a link, a layer's block is read beside its first attention a, and nothing
    else overlaps: max(w, a) + (n - 1) a + n e."""
    if "h2d" not in cost.lanes:
        return [*cgopipe(cost), *(pages + cost.lanes["cpu"] - cost.first for pages in cost.pages)]
    others, steps = np.maximum(cost.count - 1.0, 0.0), (cost.chain, cost.up)
    firsts = (*(pages + cost.up for pages in cost.pages), *steps)
    return [*_overlapped(cost), *(first + others * step for first in firsts for step in steps)]


def serial(cost: PassCost) -> list[Any]:
    """Return the terms of a pass without overlap; the bandwidth of host memory is still a bound."""
    within = ("dram",) if "device" in cost.lanes else ("dram", "exchange")  # of other lanes
    alone = sum(seconds for lane, seconds in cost.lanes.items() if lane not in within)
    return [alone, *(cost.lanes[lane] for lane in ("dram",) if lane in cost.lanes)]


def module(cost: PassCost) -> list[Any]:
    """Experts run once over the whole pass, between all attention of their layer and of the next. Meanwhile the next
    layer's pages cross, but no contexts; at worst they delay attention's reads of host memory by their bytes.

    A ring that is full stays so until experts read it: of a layer's w pages, a ring of R takes no more than R beside
    attention a, and the rest arrive while experts run, the last turn e of them after all: a + (w - R) + e."""
    before = [cost.attended]
    if "device" in cost.lanes:
        before += [cost.lanes["cpu"], cost.count * cost.up]
    late = [pages - ahead + cost.turn for pages, ahead in zip(cost.pages, cost.ahead, strict=True)]
    behind = [attended + rest for attended in before for rest in late]
    if "device" not in cost.lanes:
        return [*_overlapped(cost), *behind]
    attended = cost.lanes["cpu"] + cost.link_reads + cost.waits["cpu"]
    return [*_overlapped(cost), attended + cost.experts, cost.count * cost.up + cost.experts, *behind]


def _links(cost: PassCost) -> list[Any]:
    """The terms of the lanes that only move bytes."""
    up = [cost.lanes["h2d"] + cost.link_waits] if "h2d" in cost.lanes else []
    return [*up, *(cost.lanes[lane] + cost.waits.get(lane, 0.0) for lane in ("stage", "disk") if lane in cost.lanes)]


SCHEDULE_TERMS: Mapping[str, Callable[[PassCost], list[Any]]] = {
    "cgopipe": cgopipe,
    "fastdecode": fastdecode,
    "flexgen-c": flexgen_c,
    "flexgen": flexgen,
    "flexgen-loop": flexgen_loop,
    "serial": serial,
    "module": module,
}


def pass_s(schedule: str, cost: PassCost) -> Any:
    """Seconds of the pass under ``schedule``."""
    return reduce(np.maximum, SCHEDULE_TERMS[schedule](cost))
