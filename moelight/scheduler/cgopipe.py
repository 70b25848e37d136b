"""CGOPipe (MoE-Lightning, Algorithm 1) on passes: GPU experts, CPU attention and paged weights in one interleaving.

The launch order is the pipeline: pages of the next layer go between the hidden-state transfers of this one, so no
transfer waits behind a whole layer, and attention runs two micro-batches ahead of the experts. Whoever launches a
transfer may have to wait for the host's part of it, so each is launched only when the experts need it next.
"""

from __future__ import annotations

from itertools import pairwise

from moelight.core.schedule import Schedule
from moelight.scheduler.draft import Draft
from moelight.scheduler.layout import Layout, PassShape

LOOK_AHEAD = 2


def build(layout: Layout, shape: PassShape) -> Schedule:
    """Algorithm 1. Steps are (layer, micro-batch) in sweep order; attention is ``look_ahead`` steps ahead.

    A single micro-batch can only be one step ahead: its next layer needs this one's experts. The paper's W_PinToG is
    ``deliver``, its W_CtoPin ``fetch``: two steps ahead of the delivery, across layers.
    """
    draft = Draft(layout, shape)
    n, layers = len(shape.micro_batches), layout.model.num_layers
    steps, look_ahead = layers * n, min(LOOK_AHEAD, n)
    shares = [share for layer in range(layers) for share in _shares(draft.layer_pages(layer + 1), n)]
    for page in draft.layer_pages(0):
        draft.deliver(page)
    for step in range(look_ahead):
        draft.attend(*divmod(step, n))
    _fetch(draft, shares[:LOOK_AHEAD])
    for step in range(steps):
        layer, j = divmod(step, n)
        draft.load_hidden(layer, j)
        for page in shares[step]:
            draft.deliver(page)
        draft.post_attention(layer, j)
        if step + look_ahead < steps:
            draft.attend(*divmod(step + look_ahead, n))
        _fetch(draft, shares[step + 1 : step + 1 + LOOK_AHEAD])
        if layer == layers - 1:
            draft.sample(j)
    return draft.finish("cgopipe")


def _shares(pages: range, n: int) -> list[range]:
    """``pages`` cut into ``n`` consecutive parts, as equal as may be."""
    bounds = [pages.start + len(pages) * share // n for share in range(n + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _fetch(draft: Draft, shares: list[range]) -> None:
    for share in shares:
        for page in share:
            draft.fetch(page)
