"""Orders that move a layer's weights as one block: what CGOPipe is compared with (MoE-Lightning, section 4.1, fig. 6).

``fastdecode`` is S2, ``flexgen-c`` S3, ``flexgen`` S4; ``flexgen-loop`` is what FlexGen's loop really does.
"""

from __future__ import annotations

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import LayerWriter
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write
from moelight.scheduler.requirements import check_layout

LOOK_AHEAD = 2


def build_fastdecode(layout: Layout, shape: PassShape) -> Schedule:
    """S2: CPU attention two micro-batches ahead, as in CGOPipe; but a layer's pages cross as one block, after all
    hidden states of the layer before and in front of its own first ones, which have to wait.

    Without a link nothing waits behind the block: the next layer's pages are read while this one computes.
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
    """S3: one micro-batch after the other goes through projections, CPU attention and experts, and nothing overlaps
    with it but the next layer's block, launched behind the first micro-batch."""
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
    """S4: the device attends; the next micro-batch's context crosses meanwhile, and the next layer's block behind that
    of the second.

    Without a link, one level down: the next layer's block is read behind the first micro-batch, or beside it where it
    is the only one.
    """
    check_layout("flexgen", layout, shape)
    draft = LayerWriter(layout, shape)
    n, layers = draft.count, layout.model.num_layers
    draft.deliver_layer(0)
    alone = n == 1 and not layout.discrete  # whoever computes here also launches
    for step in range(layers * n):
        layer, j = divmod(step, n)
        if alone:
            draft.deliver_layer(layer + 1)
        draft.load_contexts(layer, j)
        draft.attend(layer, j)
        draft.post_attention(layer, j)
        if j == 0:
            if not layout.discrete and not alone:
                draft.barrier()  # nothing stands before the block but the first micro-batch itself
            draft.deliver_layer(layer + 1)
            draft.fetch_layer(layer + 2)
    for j in range(n):
        draft.sample(j)
    return draft.finish("flexgen")


def build_flexgen_loop(layout: Layout, shape: PassShape) -> Schedule:
    """FlexGen's ``generation_loop_overlap_multi_batch`` as the published runs had it (``sep_layer``): see `loop`."""
    check_layout("flexgen-loop", layout, shape)
    return loop(layout, shape, separate=True)


def loop(layout: Layout, shape: PassShape, *, separate: bool) -> Schedule:
    """Attention and experts of all micro-batches, with a synchronisation of everything after each of them; without a
    link, of compute and the reading of pages.

    The whole next layer's weights are launched with the first micro-batch; the next one's context beside this one.
    ``separate``: attention and experts are layers of their own, each with a loop over micro-batches and a
    synchronisation in every turn. The experts' weights then cross beside the first attention of their own layer, and
    contexts only ever cross beside attention. New keys and values go down in the turn that makes them, not the next.
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
