"""The seven schedules: CGOPipe (MoE-Lightning, Algorithm 1) and the schedules that it is compared with.

FastDecode (S2), FlexGen(c) (S3) and FlexGen (S4) are MoE-Lightning's readings of these systems; ``flexgen-loop`` is
FlexGen's code as published; ``module`` is the order of MoE-Gen and MoE-Lens; ``serial`` overlaps nothing.
"""

from __future__ import annotations

from itertools import pairwise

from moelight.core.schedule import Schedule
from moelight.scheduler.builder import ScheduleBuilder
from moelight.scheduler.layout import Layout, PassShape
from moelight.scheduler.on_demand import write

LOOK_AHEAD = 2


def build_cgopipe(layout: Layout, shape: PassShape) -> Schedule:
    """GPU experts, CPU attention and paged weights, interleaved (Algorithm 1). Steps are (layer, micro-batch), layer by
    layer; attention is ``look_ahead`` steps ahead, at most n, and n - 1 where experts are ``late`` by a step.

    Pages of the next layer cross between the hidden-state transfers of the current one, so no transfer waits for a
    whole layer; each is launched only when the experts need it next, since a launch may block on its host part. Where
    the device attends, contexts take the place of hidden states on the link; where the CPU computes experts, their
    outputs cross one step after their inputs. The paper's W_PinToG is ``deliver``, its W_CtoPin ``fetch``: two steps
    ahead of the delivery, across layers.
    """
    draft = ScheduleBuilder("cgopipe", layout, shape)
    if shape.routed_only:
        return write(draft)
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
    return draft.finish()


def page_shares(draft: ScheduleBuilder) -> list[range]:
    """For each step, the positions of the next layer's pages that cross in that step: consecutive parts, nearly equal.
    Where pages cross no link, all are in a layer's first step, so that the disk is never idle while the launching
    thread computes."""
    n, shares = draft.count if draft.layout.pages_cross else 1, []
    for layer in range(draft.layout.model.num_layers):
        pages = draft.layer_pages(layer + 1)
        bounds = [pages.start + len(pages) * share // n for share in range(n + 1)]
        shares += [range(first, last) for first, last in pairwise(bounds)] + [range(0)] * (draft.count - n)
    return shares


def _attend(draft: ScheduleBuilder, step: int) -> None:
    layer, j = divmod(step, draft.count)
    draft.load_contexts(layer, j)
    draft.attend(layer, j)


def _fetch(draft: ScheduleBuilder, shares: list[range]) -> None:
    for share in shares:
        for page in share:
            draft.fetch(page)


def build_fastdecode(layout: Layout, shape: PassShape) -> Schedule:
    """S2: CPU attention two micro-batches ahead, as in CGOPipe, but a layer's pages cross as one block: after all
    hidden states of the layer before, ahead of the first of its own layer. Without a link, the next layer's pages are
    read while this layer computes."""
    draft = ScheduleBuilder("fastdecode", layout, shape)
    if shape.routed_only:
        return write(draft)
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
    return draft.finish()


def build_flexgen_c(layout: Layout, shape: PassShape) -> Schedule:
    """S3: micro-batches go through projections, CPU attention and experts one after the other; only the next layer's
    block, launched after the first micro-batch, overlaps with them."""
    draft = ScheduleBuilder("flexgen-c", layout, shape)
    draft.deliver_layer(0)
    for layer in range(layout.model.num_layers):
        for j in range(draft.count):
            draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.post_attention(layer, j)
            if j == 0:
                draft.deliver_layer(layer + 1)
                draft.fetch_layer(layer + 2)
    draft.sample()
    return draft.finish()


def build_flexgen(layout: Layout, shape: PassShape) -> Schedule:
    """S4: the device attends; meanwhile the next micro-batch's context crosses, and after the second context the next
    layer's block. Without a link, that block is read after the first micro-batch, or beside it if it is alone."""
    draft = ScheduleBuilder("flexgen", layout, shape)
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
    draft.sample()
    return draft.finish()


def build_flexgen_loop(layout: Layout, shape: PassShape) -> Schedule:
    """FlexGen's ``generation_loop_overlap_multi_batch`` as in the published runs (``sep_layer``): see `loop`."""
    return loop(layout, shape, separate=True)


def loop(layout: Layout, shape: PassShape, *, separate: bool) -> Schedule:
    """Attention and experts of all micro-batches, each followed by a full synchronisation; without a link, by one of
    compute and page reads. The whole next layer's weights are launched with the first micro-batch, each next context
    beside the current micro-batch.

    ``separate``: attention and experts are separate layers, each with a loop over micro-batches; the experts' weights
    cross beside the first attention of their own layer, contexts only beside attention. New keys and values go down in
    the iteration that computes them, not in the next.
    """
    draft = ScheduleBuilder("flexgen-loop", layout, shape, apart=separate)
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
    draft.sample()
    return draft.finish()


def build_module(layout: Layout, shape: PassShape) -> Schedule:
    """For each layer: all micro-batches into attention, out of it and through the router, then the experts.

    While the CPU attends one part of the batch, the device projects the other. No experts run before every hidden state
    is on the device, so the link transfers those first, then the next layer's pages as one block, beside the experts
    and the next attention.
    """
    draft = ScheduleBuilder("module", layout, shape, apart=True)
    if shape.routed_only:
        return write(draft, whole_pass=True)
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
    draft.sample()
    draft.deliver_layer(layers)
    return draft.finish()


def build_serial(layout: Layout, shape: PassShape) -> Schedule:
    """For each layer: transfer its pages, then run each micro-batch through it."""
    draft = ScheduleBuilder("serial", layout, shape, chained=True)
    if shape.routed_only:
        return write(draft)
    for layer in range(layout.model.num_layers):
        draft.deliver_layer(layer)
        for j in range(draft.count):
            draft.attend(layer, j)
            draft.load_hidden(layer, j)
            draft.post_attention(layer, j)
            draft.combine(layer, j)
    draft.sample()
    return draft.finish()
