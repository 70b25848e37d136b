"""Schedules that transfer a layer's weights as one block: the baselines of CGOPipe (MoE-Lightning, section 4.1, fig.
6).

``fastdecode`` is S2, ``flexgen-c`` S3, ``flexgen`` S4; ``flexgen-loop`` is the actual loop of FlexGen.
"""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import LayerWriter
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write
from moelight.scheduler.requirements import check_layout

LOOK_AHEAD = 2


def build_fastdecode(layout: Layout, shape: PassShape) -> Schedule:
    """S2: CPU attention two micro-batches ahead, as in CGOPipe, but a layer's pages cross as one block.

    The block crosses after all hidden states of the layer before and ahead of its own layer's first hidden states,
    which wait for it. Without a link nothing waits for the block: the next layer's pages are read while this layer
    computes.
    """
    check_layout("fastdecode", layout)
    draft = LayerWriter(layout, shape)
    if shape.routed_only:
        return write(draft, "fastdecode")
    n, layers = draft.count, layout.model.num_layers
    steps, look_ahead = layers * n, min(LOOK_AHEAD, n)
    draft.deliver_layer(0)
    for step in range(look_ahead):
        draft.attend(*divmod(step, n))
    for step in range(steps):
        layer, j = divmod(step, n)
        if j == 0:
            draft.deliver_layer(layer if layout.discrete else layer + 1)
            draft.fetch_layer(layer + 1)
        draft.load_hidden(layer, j)
        draft.post_attention(layer, j)
        if step + look_ahead < steps:
            draft.attend(*divmod(step + look_ahead, n))
        if layer == layers - 1:
            draft.sample(j)
    draft.deliver_layer(layers)
    return draft.finish("fastdecode")


def build_flexgen_c(layout: Layout, shape: PassShape) -> Schedule:
    """S3: micro-batches go through projections, CPU attention and experts one after the other; only the next layer's
    block, launched after the first micro-batch, overlaps with them."""
    check_layout("flexgen-c", layout, shape)
    draft = LayerWriter(layout, shape)
    draft.deliver_layer(0)
    for layer in range(layout.model.num_layers):
        for j in range(draft.count):
            draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.post_attention(layer, j)
            if j == 0:
                draft.deliver_layer(layer + 1)
                draft.fetch_layer(layer + 2)
    for j in range(draft.count):
        draft.sample(j)
    return draft.finish("flexgen-c")


def build_flexgen(layout: Layout, shape: PassShape) -> Schedule:
    """S4: the device attends; meanwhile the next micro-batch's context crosses, and after the second context the next
    layer's block.

    Without a link, disk and host memory take these parts: the next layer's block is read after the first micro-batch,
    or beside it where it is the only one.
    """
    check_layout("flexgen", layout, shape)
    draft = LayerWriter(layout, shape)
    n, layers = draft.count, layout.model.num_layers
    draft.deliver_layer(0)
    alone = n == 1 and not layout.discrete  # the launching thread also computes
    for step in range(layers * n):
        layer, j = divmod(step, n)
        if alone:
            draft.deliver_layer(layer + 1)
        draft.load_contexts(layer, j)
        draft.attend(layer, j)
        draft.post_attention(layer, j)
        if j == 0:
            if not layout.discrete and not alone:
                draft.barrier()  # the block waits for the first micro-batch only
            draft.deliver_layer(layer + 1)
            draft.fetch_layer(layer + 2)
    for j in range(n):
        draft.sample(j)
    return draft.finish("flexgen")


def build_flexgen_loop(layout: Layout, shape: PassShape) -> Schedule:
    """FlexGen's ``generation_loop_overlap_multi_batch`` as in the published runs (``sep_layer``): see `loop`."""
    check_layout("flexgen-loop", layout, shape)
    return loop(layout, shape, separate=True)


def loop(layout: Layout, shape: PassShape, *, separate: bool) -> Schedule:
    """Attention and experts of all micro-batches, with a full synchronisation after each of them; without a link, a
    synchronisation of compute and page reads.

    The whole next layer's weights are launched with the first micro-batch; each next context beside the current
    micro-batch. ``separate``: attention and experts are separate layers, each with a loop over micro-batches and a
    synchronisation in every iteration. The experts' weights then cross beside the first attention of their own layer,
    and contexts cross only beside attention. New keys and values go down in the iteration that computes them, not in
    the next.
    """
    draft = LayerWriter(layout, shape)
    n, layers = draft.count, layout.model.num_layers
    if not separate:
        draft.deliver_layer(0)
    draft.load_kv(0, 0)
    draft.barrier()
    for layer in range(layers):
        for j in range(n):
            if j == 0:
                draft.deliver_layer(layer if separate else layer + 1)
            if not separate or j + 1 < n:
                draft.load_contexts(layer, j)
            draft.attend(layer, j)
            draft.load_hidden(layer, j)
            if not separate:
                draft.post_attention(layer, j)
            draft.barrier()
        for j in range(n if separate else 0):
            if j + 1 == n and layer + 1 < layers:
                draft.load_kv(layer + 1, 0)
            draft.post_attention(layer, j)
            draft.barrier()
    for j in range(n):
        draft.sample(j)
    return draft.finish("flexgen-loop")
