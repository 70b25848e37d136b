"""On-demand passes: only the chosen offloaded pages of a layer are transferred, once all its routers have chosen. The
pages are known only when the pass runs, so one task per layer and lane stands for all of them."""

from __future__ import annotations

from itertools import pairwise

from moelight.core.schedule import Schedule
from moelight.hrm import schedule_time
from moelight.scheduler.builder import ScheduleBuilder
from moelight.scheduler.layout import Layout


def pays(
    layout: Layout,
    schedule: str,
    tokens: int,
    most_tokens: int,
    missing: float | None = None,
    *,
    least: float | None = None,
) -> bool:
    """True if a pass of ``tokens`` should transfer routed pages only; ``most_tokens``, ``least``: as in `routed_only`.
    ``missing``: measured share of the streamed pages to which such passes were routed; None: the expected share."""
    if not layout.streamed or layout.model.dense or layout.turn_parts:  # every page is used
        return False
    if missing is None:
        return bool(schedule_time.routed_only(layout.model, schedule, tokens, most_tokens, least=least))
    small = schedule in schedule_time.ON_DEMAND_SCHEDULES and tokens <= most_tokens
    return small and missing <= 1.0 - min(schedule_time.ROUTED_ONLY_SHARE, schedule_time.MEASURED_SHARE)


def write(draft: ScheduleBuilder, *, whole_pass: bool = False) -> Schedule:
    """For each layer: all micro-batches through attention and router, the chosen pages, the experts (``whole_pass``:
    once
    for all micro-batches). Resident experts run while others are read only without a GPU: beside one, the CPU's experts
    are not separated, which does not pay in so small a pass."""
    layout, micro_batches = draft.layout, range(draft.count)
    moe_layers = [layer for layer in range(layout.model.num_layers) if layout.model.moe_layers[layer]]
    coming = dict(pairwise(moe_layers))
    for layer in range(layout.model.num_layers):
        for j in micro_batches if layout.discrete else ():
            draft.load_contexts(layer, j)
            draft.attend(layer, j)
        for j in micro_batches:
            if not layout.discrete:  # one after the other, so that only one attention output is in memory
                draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.route(layer, j)
        if layout.model.moe_layers[layer]:
            draft.transfer_chosen(layer)
            if draft.shape.ahead and layer in coming:
                draft.prefetch_predicted(layer, coming[layer])
        if whole_pass:
            draft.experts(layer)
        else:
            for step in (draft.resident_experts, draft.experts_of, draft.combine):
                for j in micro_batches:
                    step(layer, j)
    draft.sample()
    return draft.finish()
