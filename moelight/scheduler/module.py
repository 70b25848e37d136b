"""Module by module (MoE-Gen; MoE-Lens): experts run once over the whole batch, attention per micro-batch.

A layer's weights are read only once from device memory too, for any number of micro-batches. The price: the experts
wait for all attention of their layer.
"""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import LayerWriter
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write
from moelight.scheduler.requirements import check_layout


def build_module(layout: Layout, shape: PassShape) -> Schedule:
    """For each layer: all micro-batches into attention, out of it and through the router, then the experts.

    While the CPU attends one part of the batch, the device projects the other: first into attention, then out of it. No
    experts run before every hidden state is on the device, so the link transfers those first, then the next layer's
    pages as one block, beside the experts and the next attention.
    """
    check_layout("module", layout)
    draft = LayerWriter(layout, shape)
    if shape.routed_only:
        return write(draft, "module", whole=True)
    micro_batches, layers = range(draft.count), layout.model.num_layers
    # Hidden states cross after attention, contexts before it: the block crosses between those of two layers.
    ahead = 0 if layout.discrete and layout.attention == "cpu" else 1
    draft.deliver_layer(0)
    for layer in range(layers):
        if not layout.discrete:  # the launching thread also computes
            draft.deliver_layer(layer + 1)
        for j in micro_batches:
            draft.load_contexts(layer, j)
            draft.attend(layer, j)
        draft.deliver_layer(layer + ahead)
        draft.fetch_layer(layer + ahead + 1)
        for j in micro_batches:
            draft.load_hidden(layer, j)
            draft.route(layer, j)
        draft.experts(layer)
    for j in micro_batches:
        draft.sample(j)
    draft.deliver_layer(layers)
    return draft.finish("module")
