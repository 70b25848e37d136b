"""The reference schedule: one task at a time, each waiting for the one before. Only disk reads overlap with each other,
since a disk serves several as fast as one."""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import LayerWriter
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write


def build_serial(layout: Layout, shape: PassShape) -> Schedule:
    """For each layer: transfer its pages, then run each micro-batch through it."""
    draft = LayerWriter(layout, shape, chained=True)
    if shape.routed_only:
        return write(draft, "serial")
    micro_batches = range(draft.count)
    for layer in range(layout.model.num_layers):
        draft.deliver_layer(layer)
        for j in micro_batches:
            draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.post_attention(layer, j)
            draft.combine(layer, j)
    for j in micro_batches:
        draft.sample(j)
    return draft.finish("serial")
