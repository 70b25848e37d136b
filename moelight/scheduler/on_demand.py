"""Small passes: pages of a layer move once all its routers have chosen, and only chosen ones that are not near.

What is lost is the overlap of links and compute; what is saved are the pages of experts that nobody routes to
(`hrm.schedule_time.routed_only` says when that pays). Which pages these are is known only when the pass runs, so one task for
a layer and a lane stands for all of them. One order for all builders that have it.
"""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.hrm import schedule_time
from moelight.scheduler.draft import LayerWriter
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
    """Whether a pass of ``tokens`` is to bring routed pages only; ``most_tokens``, ``least``: as in `routed_only`.

    ``missing``: the share of the streamed pages that such passes were routed to; None: what chance has it.
    """
    if missing is None:
        return bool(layout.streamed) and bool(
            schedule_time.routed_only(layout.model, schedule, tokens, most_tokens, least=least)
        )
    small = schedule in schedule_time.ROUTED_ORDERS and tokens <= most_tokens
    return (
        bool(layout.streamed)
        and small
        and missing <= 1.0 - min(schedule_time.ROUTED_ONLY_SHARE, schedule_time.MEASURED_SHARE)
    )


def write(draft: LayerWriter, builder: str, *, whole: bool = False) -> Schedule:
    """For each layer: all micro-batches through attention and router, the chosen pages, the experts.

    The CPU's experts beside a GPU that hold no streamed pages need not wait, but a pass this small is over before it
    pays to tell them apart. Without a GPU, experts that are near run while the others are read. What layers to come may
    choose is fetched behind what this one needs. ``whole``: experts run once for all micro-batches.
    """
    layout, everyone, layers = draft.layout, range(draft.count), draft.layout.model.num_layers
    for layer in range(layers):
        for j in everyone if layout.discrete else ():
            draft.load_contexts(layer, j)
            draft.attend(layer, j)
        for j in everyone:
            if not layout.discrete:  # one after the other, so that one attention output is in memory
                draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.route(layer, j)
        if layout.model.moe_layers[layer]:
            draft.bring_chosen(layer)
            _look_ahead(draft, layer)
        if whole:
            draft.experts(layer)
        else:
            for j in everyone:
                draft.resident_experts(layer, j)
            for j in everyone:
                draft.experts_of(layer, j)
            for j in everyone:
                draft.combine(layer, j)
    for j in everyone:
        draft.sample(j)
    return draft.finish(builder)


def _look_ahead(draft: LayerWriter, layer: int) -> None:
    """Guess what the next layer with experts chooses, and begin to fetch it."""
    moe_layers = draft.layout.model.moe_layers
    coming = next((other for other in range(layer + 1, len(moe_layers)) if moe_layers[other]), None)
    if not draft.shape.ahead or coming is None:
        return
    after = draft.routed_task(layer)
    for j in range(draft.count) if draft.shape.predict_experts else ():
        after = draft.predict_experts(layer, j)
    draft.bring_ahead(coming, after)
