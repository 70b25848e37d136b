"""Small passes: a layer's pages move once all its routers have chosen, and only those that somebody chose.

What is lost is the overlap of links and compute; what is saved are the pages of experts that nobody routes to
(`hrm.orders.routed_only` says when that pays). One order for all builders that have it.
"""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.hrm import orders
from moelight.scheduler.draft import Draft
from moelight.scheduler.layout import Layout


def pays(layout: Layout, schedule: str, tokens: int, most_tokens: int) -> bool:
    """Whether a pass of ``tokens`` is to bring routed pages only; ``most_tokens`` as in `orders.routed_only`."""
    return bool(layout.streamed) and bool(orders.routed_only(layout.model, schedule, tokens, most_tokens))


def write(draft: Draft, builder: str, *, whole: bool = False) -> Schedule:
    """For each layer: all micro-batches through attention and router, the chosen pages, the experts.

    The CPU's experts beside a GPU that hold no streamed pages need not wait, but a pass this small is over before it
    pays to tell them apart. ``whole``: experts run once for all micro-batches.
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
        draft.fetch_layer(layer)
        draft.deliver_layer(layer)
        if whole:
            draft.experts(layer)
        else:
            for j in everyone:
                draft.experts_of(layer, j)
            for j in everyone:
                draft.combine(layer, j)
    for j in everyone:
        draft.sample(j)
    return draft.finish(builder)
