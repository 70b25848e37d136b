"""The tier of each expert page, such that the shares of a policy are met exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Page
from moelight.profiles.model import ModelProfile
from moelight.profiles.tensor_list import pages

Table = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """``tiers`` of all pages. Pages on ``fast_tier``, beside the processor of the experts, are resident; the CPU
    computes ``computed`` in host memory (``ffn_device`` split); every pass streams ``streamed``, in this order.
    ``pinned_pages``: host pages are page-locked, without staging copy. ``learned``: the set of residents may change.
    ``ring_pages``: as in `Policy`."""

    fast_tier: str
    tiers: Mapping[Page, str]
    streamed: tuple[Page, ...]
    computed: tuple[Page, ...] = ()
    pinned_pages: bool = False
    learned: bool = False
    ring_pages: int = 0

    @property
    def resident(self) -> tuple[Page, ...]:
        return tuple(page for page, home in self.tiers.items() if home == self.fast_tier)

    @property
    def host_copies(self) -> bool:
        """True if device-resident pages keep a copy in host memory, for transfers after an eviction."""
        return self.learned and self.fast_tier == "device" and "host" in self.tiers.values()

    @property
    def most_per_layer(self) -> int:
        """The largest number of experts in one layer."""
        return max((page.expert + 1 for page in self.tiers), default=0)

    def on(self, tier: str) -> tuple[Page, ...]:
        return tuple(page for page, home in self.tiers.items() if home == tier)

    @property
    def most_streamed_per_layer(self) -> int:
        return max(Counter(map(attrgetter("layer"), self.streamed)).values(), default=0)

    @property
    def small_ring(self) -> bool:
        """True if the ring holds fewer pages than two layers stream."""
        return 0 < self.ring_pages < 2 * self.most_streamed_per_layer


def with_residents(policy: Policy, share: float) -> Policy:
    """``policy`` with ``share`` of the expert weights resident. The other pages move to the tier of the streamed pages:
    without a GPU the disk, else host memory, beyond what the disk held before."""
    if resident_tier(policy) == "host":
        return replace(policy, weights=Shares(host=share, disk=1.0 - share))
    disk = min(policy.weights.disk, 1.0 - share) if policy.weights.host else 1.0 - share
    host = 1.0 - share - disk
    weights = Shares(device=share, host=host, disk=disk)
    return replace(policy, weights=weights, cpu_experts=min(policy.cpu_experts, host))


def moved(placement: Placement, resident: Collection[Page]) -> Placement:
    """``placement`` with the pages ``resident`` resident, as many as fit. Evicted pages are streamed from their host
    copies or from disk; the CPU computes the same pages as before, unless they became resident."""
    away = "host" if placement.host_copies else "disk"
    tiers = {
        page: placement.fast_tier if page in resident else away if home == placement.fast_tier else home
        for page, home in placement.tiers.items()
    }
    computed = tuple(page for page in placement.computed if page not in resident)
    in_place = set(computed)
    return replace(
        placement,
        tiers=tiers,
        computed=computed,
        streamed=tuple(page for page, home in tiers.items() if home != placement.fast_tier and page not in in_place),
    )


def slot_table(placement: Placement, model: ModelProfile) -> Table:
    """int32 ``[layers, experts]``: the cache slot of each resident page, in order, or -1."""
    table = np.full((model.num_layers, model.experts.num_experts), -1, dtype=np.int32)
    for slot, page in enumerate(placement.resident):
        table[page.layer, page.expert] = slot
    return table


# Parts of a ring of fewer pages than two layers stream: one is computed while the others are filled.
TURNS_OF_RING = 4


def turn_pages(ring_pages: Any) -> Any:
    """Pages whose experts run at a time behind a ring of ``ring_pages``, fewer than two layers stream."""
    return np.maximum(1, ring_pages // TURNS_OF_RING)


# Multiples of this ratio, modulo 1, are evenly distributed over [0, 1) for any count: where a tier holds one expert
# more in some layers than in others, those layers are spread out, so that a ring of two layers evens out their pages.
GOLDEN = (5**0.5 - 1) / 2


def in_turn(layers: Iterable[int]) -> list[int]:
    """``layers`` in the order in which a tier holds a page more of them."""
    return sorted(layers, key=lambda layer: layer * GOLDEN % 1.0)


def unevenness(by_layer: Sequence[int]) -> float:
    """The most by which the bytes of pages that follow each other in the order of placement differ from as many of
    average size, where a page of each layer takes ``by_layer`` (0: the layer has none)."""
    sizes = np.array([by_layer[layer] for layer in in_turn(np.flatnonzero(by_layer).tolist())], dtype=float)
    return float(np.ptp(np.append(np.cumsum(sizes - sizes.mean()), 0.0))) if sizes.size else 0.0


def resident_tier(policy: Policy) -> str:
    """The tier whose pages the processor of the experts reads in place."""
    return "host" if policy.ffn_device == "cpu" else "device"


def place_pages(model: ModelProfile, policy: Policy) -> Placement:
    """The tier of every page: fast tiers first, spread evenly, so that no layer streams two pages more than another."""
    fast_tier = resident_tier(policy)
    placement = _place(model, policy.weights, policy.cpu_experts, fast_tier)
    pinned_pages, learned = policy.host_pages == "pinned" and fast_tier == "device", policy.residents == "learned"
    if not (pinned_pages or learned or policy.ring_pages):
        return placement
    return replace(placement, pinned_pages=pinned_pages, learned=learned, ring_pages=policy.ring_pages)


@lru_cache(maxsize=256)
def _place(model: ModelProfile, weights: Shares, cpu_experts: float, fast_tier: str) -> Placement:
    every = pages(model)
    layers = in_turn({page.layer for page in every})
    turn = {layer: index for index, layer in enumerate(layers)}
    on_device = round(weights.device * len(every))
    on_host = round((weights.device + weights.host) * len(every)) - on_device
    in_place = min(round(cpu_experts * len(every)), on_host)
    tiers, streamed, computed = {}, [], []
    for page in every:
        rank = page.expert * len(layers) + turn[page.layer]  # expert by expert, each in all layers
        tiers[page] = home = "device" if rank < on_device else "host" if rank < on_device + on_host else "disk"
        if on_device <= rank < on_device + in_place:
            computed.append(page)
        elif home != fast_tier:
            streamed.append(page)
    return Placement(fast_tier=fast_tier, tiers=tiers, streamed=tuple(streamed), computed=tuple(computed))
