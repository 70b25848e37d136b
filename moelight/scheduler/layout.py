"""What a builder needs to know: the pipeline's fixed shape (`Layout`) and one pass through it (`PassShape`)."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.dtypes import DType
from moelight.core.policy import Policy
from moelight.core.schedule import Lane, Page
from moelight.hrm import costs
from moelight.hrm.footprint import pinned_slots, ring_slots
from moelight.hrm.placement import place
from moelight.profiles.model import ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The pipeline of one engine: fixed from load to close.

    ``streamed`` are the pages that cross every pass, in order of use; ``from_disk`` says which come from disk, and
    ``layer_pages`` which positions belong to each layer.
    With ``discrete`` the experts run beside their own memory: attention's inputs and outputs cross a link, and pages
    pass through ``pinned_slots``. Otherwise pages are read straight into the ring.
    """

    model: ModelProfile
    dtype: DType
    discrete: bool
    streamed: tuple[Page, ...]
    from_disk: tuple[bool, ...]
    layer_pages: tuple[range, ...]
    ring_slots: int
    pinned_slots: int

    @property
    def compute(self) -> Lane:
        """The lane of norms, projections, routers and experts."""
        return Lane.DEVICE if self.discrete else Lane.CPU

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on any link."""
        return costs.page_bytes(self.model, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchShape:
    """``fresh`` prompts attend over their own new keys and values; all others need the paged cache.

    ``samples``: at least one sequence gets a new token at the end of the pass.
    """

    tokens: int
    fresh: bool = False
    samples: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """One sweep: its micro-batches, how many of its first pages are already in the ring, whether another follows."""

    micro_batches: tuple[MicroBatchShape, ...]
    carried: int = 0
    wraps: bool = False


def layout_of(model: ModelProfile, policy: Policy, dtype: DType) -> Layout:
    """The pipeline that ``policy`` makes of ``model``."""
    placement = place(model, policy)
    discrete = policy.ffn_device == "gpu"
    return Layout(
        model=model,
        dtype=dtype,
        discrete=discrete,
        streamed=placement.streamed,
        from_disk=tuple(placement.homes[page] == "disk" for page in placement.streamed),
        layer_pages=_layer_ranges(model.num_layers, placement.streamed),
        ring_slots=ring_slots(placement),
        pinned_slots=pinned_slots(placement) if discrete else 0,
    )


def _layer_ranges(num_layers: int, streamed: tuple[Page, ...]) -> tuple[range, ...]:
    bounds, start = [], 0
    for layer in range(num_layers):
        stop = start
        while stop < len(streamed) and streamed[stop].layer == layer:
            stop += 1
        bounds.append(range(start, stop))
        start = stop
    return tuple(bounds)
