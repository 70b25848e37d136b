"""The inputs of a schedule: what is fixed while an engine runs (`Layout`) and the shape of one pass (`PassShape`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Page
from moelight.hrm import costs
from moelight.hrm.footprint import pinned_slots, ring_slots
from moelight.hrm.placement import Placement, place_pages, turn_pages
from moelight.profiles.model import ModelProfile

# The place where experts run, by ``Policy.ffn_device``.
EXPERT_PLACES = {"gpu": "device", "split": "split", "cpu": "host"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Devices, placement and slots of one engine; pages may move between passes, all else is fixed.

    Attributes:
        dtype: of compute and of transfers between devices; ``page_dtype``: of experts; ``kv_dtype``: of the cache.
        discrete: a GPU takes part, so a link connects two memories; otherwise the CPU does everything.
        attention: ``cpu`` or ``gpu``: where sequences attend that need the cache (prefill-only prompts: on the GPU).
        experts: ``device``; ``host``; or ``split``: the CPU computes ``computed`` in place, the GPU all others.
        kv_host: the share of every context whose keys and values are in host memory.
        parts: the bytes of each part in which the longest page moves: several across a link, one without.
        page_bytes: of a page of each layer.
        streamed: the parts of pages that move every pass, in order of use; ``layer_pages``: their positions, by layer.
        cpu_layers: the layers whose hidden states cross the link for the CPU's experts.
        ring_slots: slots of the ring on the fast tier, one part each; the parts of a page are contiguous and in order.
        turn_parts: parts of pages whose experts run at a time where the ring is smaller than two layers; 0: of a layer.
        pinned_slots: slots through which parts pass before a link, unless in pinned host memory (``pinned_pages``).
    """

    model: ModelProfile
    dtype: DType
    page_dtype: DType
    kv_dtype: DType
    discrete: bool
    attention: str
    experts: str
    kv_host: float
    parts: tuple[range, ...]
    page_bytes: tuple[int, ...]
    streamed: tuple[Page, ...]
    from_disk: tuple[bool, ...]
    layer_pages: tuple[range, ...]
    computed: tuple[Page, ...]
    cpu_layers: tuple[bool, ...]
    ring_slots: int
    pinned_slots: int
    pinned_pages: bool = False
    turn_parts: int = 0

    @property
    def compute(self) -> Lane:
        """The lane of norms, projections and routers."""
        return Lane.DEVICE if self.discrete else Lane.CPU

    def bytes_at(self, k: int) -> int:
        """Bytes of streamed part ``k``."""
        part, size = self.parts[k % len(self.parts)], self.page_bytes[self.streamed[k % len(self.streamed)].layer]
        return min(part.stop, size) - min(part.start, size)

    @property
    def pages_cross(self) -> bool:
        """True if pages cross the link; otherwise they are read directly into the ring."""
        return self.discrete and self.experts != "host"

    @property
    def page_lanes(self) -> tuple[Lane, ...]:
        """The lanes that chosen experts may pass, in order; pages in host memory cross the link only."""
        if not self.pages_cross:
            return (Lane.DISK,)
        return (Lane.DISK, Lane.H2D) if any(self.from_disk) else (Lane.H2D,)

    def most_chosen_bytes(self, layer: int, lane: Lane) -> int:
        """Bytes that pass ``lane`` for ``layer`` if all its streamed pages are chosen."""
        passing = (k for k in self.layer_pages[layer] if lane is Lane.H2D or self.from_disk[k])
        return sum(self.bytes_at(k) for k in passing)

    def turns(self, layer: int) -> tuple[tuple[range, range | None], ...]:
        """The turns in which the experts of ``layer`` run: the stream positions of the pages that each waits for, and
        its experts (None: all). Those of a turn follow those of the turn before in number, so that the sum of a token's
        experts does not depend on turns."""
        pages, size = self.layer_pages[layer], self.turn_parts
        if not size or len(pages) <= size:
            return ((pages, None),)
        cuts = [range(first, min(first + size, pages.stop)) for first in range(pages.start, pages.stop, size)]
        ends = [self.streamed[cut.stop - 1].expert + 1 for cut in cuts[:-1]]
        experts = pairwise((0, *ends, self.model.experts.num_experts))
        return tuple((cut, range(*bounds)) for cut, bounds in zip(cuts, experts, strict=True))

    def turn_of(self, k: int) -> int:
        """The turn, in its layer, whose experts read position ``k`` of the stream."""
        at = k % len(self.streamed)
        return (at - self.layer_pages[self.streamed[at].layer].start) // self.turn_parts if self.turn_parts else 0

    def stops(self, k: int) -> bool:
        """True if position ``k`` of the stream passes through a pinned slot before the link."""
        return self.pages_cross and (not self.pinned_pages or self.from_disk[k % len(self.streamed)])

    @property
    def context_crosses(self) -> bool:
        """True if cached keys and values cross the link for attention on the device."""
        return self.attention == "gpu" and self.kv_host > 0

    def kv_down_bytes(self, micro_batch: MicroBatchShape, layer: int) -> int:
        """Bytes of a layer's new keys and values that cross to host memory."""
        crossing = micro_batch.tokens - micro_batch.device_tokens if self.kv_host else 0
        dtype = costs.kv_crossing_dtype(self.attention, self.dtype, self.kv_dtype)
        return crossing * costs.kv_layer_bytes(self.model, dtype, layer)

    def context_bytes(self, micro_batch: MicroBatchShape, layer: int) -> int:
        """Bytes of a layer's cached keys and values that cross to the device."""
        crossing = micro_batch.context - micro_batch.device_context
        return crossing * costs.kv_layer_bytes(self.model, self.kv_dtype, layer)

    def device_tokens(self, tokens: int) -> int:
        """Return the number of ``tokens`` in cache blocks on the device, by the policy's share; 0 if no context crosses
        the link."""
        return math.floor(tokens * (1.0 - self.kv_host) + 1e-9) if self.context_crosses else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchShape:
    """The shape of one micro-batch.

    Attributes:
        prefill_only: its prompts attend over their own new keys and values; no chunk reads the cache.
        samples: at least one sequence gets a new token at the end of the pass.
        context: cached tokens of all sequences; 0 where none cross the link, so that schedules can be cached by shape.
        continues: the context includes tokens of earlier micro-batches of this pass (a prompt cut in two).
        device_tokens: the new tokens in blocks on the device, which do not cross.
        device_context: tokens of the context that do not cross: on the device, or in a block that crosses for another.
    """

    tokens: int
    prefill_only: bool = False
    samples: bool = True
    context: int = 0
    continues: bool = False
    device_tokens: int = 0
    device_context: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """The shape of one pass.

    Attributes:
        prefetched: parts of its first pages that are already in the ring.
        wraps: another pass follows.
        routed_only: an on-demand pass; none of its pages are prefetched for the next pass.
        ahead: in such a pass, predicted experts of later layers are prefetched; ``predict_experts``: by their routers.
        whole_layers: without a link, a micro-batch goes through consecutive layers in one task where none of their
            pages move (not under schedules that keep attention and experts apart).
    """

    micro_batches: tuple[MicroBatchShape, ...]
    prefetched: int = 0
    wraps: bool = False
    look_ahead: int = 2
    routed_only: bool = False
    ahead: bool = False
    predict_experts: bool = False
    whole_layers: bool = False


def layout_of(
    model: ModelProfile,
    policy: Policy,
    dtype: DType,
    *,
    discrete: bool | None = None,
    part_bytes: int | None = None,
    placement: Placement | None = None,
) -> Layout:
    """The layout of ``policy`` on ``model``, with compute in ``dtype``; raises ConfigError if placement and devices
    contradict. ``discrete``: the machine has a GPU, where the policy does not show it. ``part_bytes``: at most this
    much of a page crosses a link at a time (default `costs.PART_BYTES`). ``placement``: the present one, where pages
    have moved."""
    discrete = policy.discrete if discrete is None else discrete
    _check(policy, discrete=discrete)
    placement, experts = placement or place_pages(model, policy), EXPERT_PLACES[policy.ffn_device]
    page_dtype = costs.page_dtype(model, dtype, policy.weight_dtype)
    size, crosses = costs.page_bytes(model, page_dtype), discrete and experts != "host"
    parts = costs.page_parts(size, part_bytes or costs.PART_BYTES) if crosses else (range(size),)
    streamed = tuple(replace(page, part=part) for page in placement.streamed for part in range(len(parts)))
    ends = [bisect_right(streamed, layer, key=lambda page: page.layer) for layer in range(-1, model.num_layers)]
    return Layout(
        model=model,
        dtype=dtype,
        page_dtype=page_dtype,
        kv_dtype=costs.kv_dtype(policy, dtype),
        discrete=discrete,
        attention=policy.attention_device,
        experts=experts,
        kv_host=policy.kv.host,
        parts=parts,
        page_bytes=costs.moved_bytes_by_layer(model, page_dtype),
        streamed=streamed,
        from_disk=tuple(placement.tiers[replace(page, part=0)] == "disk" for page in streamed),
        layer_pages=tuple(range(first, last) for first, last in pairwise(ends)),
        computed=placement.computed,
        cpu_layers=_cpu_layers(model, placement, experts) if discrete else (False,) * model.num_layers,
        ring_slots=len(parts) * ring_slots(placement),
        pinned_slots=len(parts) * pinned_slots(placement) if crosses else 0,
        pinned_pages=placement.pinned_pages,
        turn_parts=len(parts) * int(turn_pages(placement.ring_pages)) if placement.small_ring else 0,
    )


def _check(policy: Policy, *, discrete: bool) -> None:
    if policy.discrete and not discrete:
        raise ConfigError("attention_device and ffn_device must be cpu on a machine without a GPU")
    if policy.weights.device and policy.ffn_device == "cpu":
        raise ConfigError("weights: a share on device needs ffn_device gpu or split, not cpu")
    if policy.kv.disk or (policy.kv.device and policy.attention_device == "cpu"):
        raise ConfigError("kv: the cache lives in host memory; a share on device needs attention_device gpu")


def _cpu_layers(model: ModelProfile, placement: Placement, experts: str) -> tuple[bool, ...]:
    if experts == "host" or (experts == "split" and placement.learned and placement.on("host")):
        return model.moe_layers  # where residents are learned, the CPU may compute missing experts in any layer
    some = {page.layer for page in placement.computed}
    return tuple(layer in some for layer in range(model.num_layers))
