"""CGOPipe (MoE-Lightning, Algorithm 1) on passes: GPU experts, CPU attention and paged weights, interleaved.

The launch order is the pipeline: pages of the next layer are sent between the hidden-state transfers of the current
layer, so no transfer waits for a whole layer, and attention runs two micro-batches ahead of the experts. The launch of
a transfer may block on its host part, so each transfer is launched only when the experts need it next. Where the device
attends, contexts take the place of hidden states on the link; where the CPU computes experts, their outputs cross one
step after their inputs.
"""

from __future__ import annotations

from itertools import pairwise

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import LayerWriter
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write

LOOK_AHEAD = 2


def build_cgopipe(layout: Layout, shape: PassShape) -> Schedule:
    """Algorithm 1. Steps are (layer, micro-batch), layer by layer; attention is ``look_ahead`` steps ahead.

    A single micro-batch can only be one step ahead, since its next layer needs the experts of the current one; one step
    less where experts are ``late`` by a step. The paper's W_PinToG is ``deliver``, its W_CtoPin ``fetch``: two steps
    ahead of the delivery, across layers.
    """
    draft = LayerWriter(layout, shape)
    if shape.routed_only:
        return write(draft, "cgopipe")
    n, layers = draft.count, layout.model.num_layers
    late = int(n > 1 and any(layout.cpu_layers))
    steps, look_ahead = layers * n, min(shape.look_ahead, n - late)
    shares = page_shares(draft)
    draft.deliver_layer(0)
    for step in range(look_ahead):
        _attend(draft, step)
    _fetch(draft, shares[:LOOK_AHEAD])
    for step in range(steps + late):
        if step < steps:
            draft.load_hidden(*divmod(step, n))
            for page in shares[step]:
                draft.deliver(page)
            draft.post_attention(*divmod(step, n))
        if step >= late:
            draft.combine(*divmod(step - late, n))
        if step + look_ahead < steps:
            _attend(draft, step + look_ahead)
        _fetch(draft, shares[step + 1 : step + 1 + LOOK_AHEAD])
        if step - late >= steps - n:
            draft.sample((step - late) % n)
    return draft.finish("cgopipe")


def page_shares(draft: LayerWriter) -> list[range]:
    """For each step, the positions of the next layer's pages that cross in that step: consecutive parts, nearly equal.

    Where pages cross no link, nothing waits for them: all go in a layer's first step, so that the disk is never idle
    while the launching thread computes.
    """
    n, shares = draft.count if draft.layout.pages_cross else 1, []
    for layer in range(draft.layout.model.num_layers):
        pages = draft.layer_pages(layer + 1)
        bounds = [pages.start + len(pages) * share // n for share in range(n + 1)]
        shares += [range(first, last) for first, last in pairwise(bounds)] + [range(0)] * (draft.count - n)
    return shares


def _attend(draft: LayerWriter, step: int) -> None:
    layer, j = divmod(step, draft.count)
    draft.load_contexts(layer, j)
    draft.attend(layer, j)


def _fetch(draft: LayerWriter, shares: list[range]) -> None:
    for share in shares:
        for page in share:
            draft.fetch(page)
