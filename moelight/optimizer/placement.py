"""Placement of pages and cache blocks in the free memory, in closed form for many candidates at once.

A resident page saves a transfer in every pass and ring slots besides, so that pages take the memory of the experts'
processor first and the cache the rest (a byte of cache saves at most a byte, and only in passes that read all of it).
The integer programme (``milp``) decides the cases that the closed form cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.hrm import costs
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes, kv_blocks
from moelight.hrm.pass_cost import PlacementCounts
from moelight.optimizer.problem import Candidates, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Bytes left on each tier after everything of fixed placement, for each candidate; ``kv_blocks`` blocks and
    ``pages`` pages, each in a slot of ``slot_bytes``, are still to be placed."""

    device: Any
    host: Any
    disk: int
    kv_blocks: Any
    kv_block_bytes: int
    pages: int
    layers: int
    slot_bytes: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedPlacement:
    """The free choices of a placement, for each candidate.

    Attributes:
        computed: pages that the CPU computes beside a GPU; raised if the others do not fit through the ring.
        device_kv: the share of the cache on the device; NaN: all that the pages leave free.
        resident: with ``device_kv`` NaN, the most pages resident on the device.
        spilled: the least pages streamed from disk, even if host memory could hold them: this saves copies.
    """

    computed: Any
    device_kv: Any
    resident: Any = np.inf
    spilled: Any = 0.0

    def at(self, index: Any) -> RequestedPlacement:
        """All fields must be arrays."""
        names = ("computed", "device_kv", "resident", "spilled")
        return RequestedPlacement(**{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPlacement:
    """Counts of ``placed`` and ``resident`` pages, and whether they are ``feasible``, for each candidate."""

    placed: PlacementCounts
    resident: Any
    feasible: Any


def free_memory(problem: Problem, candidates: Candidates) -> FreeMemory:
    """The free memory of each tier, for each candidate."""
    cost_model = candidates.variant.cost_model
    left = {tier: float(size) for tier, size in problem.capacity_bytes.items()}
    for (_, tier), size in fixed_bytes(
        problem.model, candidates, dtype=cost_model.dtype, kv_dtype=cost_model.kv_dtype
    ).items():
        left[tier] = left[tier] - size
    return FreeMemory(
        device=left.get("device", 0.0),
        host=left["host"],
        disk=int(left.get("disk", 0.0)),
        kv_blocks=kv_blocks(candidates),
        kv_block_bytes=kv_block_bytes(problem.model, candidates, cost_model.kv_dtype),
        pages=problem.model.num_moe_layers * problem.model.experts.num_experts,
        layers=problem.model.num_moe_layers,
        slot_bytes=costs.page_slot_bytes(problem.model, cost_model.page_dtype),
        page_bytes=costs.page_bytes(problem.model, cost_model.page_dtype),
    )


def fill(
    problem: Problem,
    candidates: Candidates,
    requested: RequestedPlacement,
    *,
    off_host: Any = None,
    in_host: Any = None,
    free: FreeMemory | None = None,
) -> ResolvedPlacement:
    """Resolve the requested placement; free choices fill the tiers from the fastest on. Only bounds set ``off_host``,
    the share of the cache that host memory need not hold, ``in_host``, the pages for the CPU that host memory must
    hold, and ``free``."""
    computed, device_kv = requested.computed, requested.device_kv
    free = free_memory(problem, candidates) if free is None else free
    held = computed if in_host is None else in_host
    cache = _cache_blocks(candidates, free, held, device_kv)
    if candidates.ffn_device == "split" and in_host is None and problem.share("cpu_experts") is None:
        held = computed = np.maximum(computed, _least_computed(free, free.device - cache * free.kv_block_bytes))
    device, pages = free.device - cache * free.kv_block_bytes, free.pages - computed
    if candidates.ffn_device == "cpu":
        spared = cache if off_host is None else np.ceil(free.kv_blocks * off_host)
        slots = np.floor((free.host - (free.kv_blocks - spared) * free.kv_block_bytes) / free.slot_bytes)
        resident, ring, fits = _resident(pages, free, slots, problem.share("weights.host"), _on_disk(problem, free))
        if candidates.residents == "learned" and not candidates.discrete:
            resident, fits = _beside_a_layer(problem, free, pages, slots, resident, ring, fits)
        from_host, on_device = np.zeros_like(resident), cache
        fits &= device >= 0
    else:
        slots = np.floor(device / free.slot_bytes)
        elsewhere = _on_disk(problem, free) + np.maximum(_on_host(problem, free) - computed, 0)
        resident, ring, fits = _resident(pages, free, slots, problem.share("weights.device"), elsewhere)
        resident, ring = _at_most(requested.resident, pages, free, resident, ring)
        fits &= resident + ring <= slots
        left = np.clip(np.floor((device - (resident + ring) * free.slot_bytes) / free.kv_block_bytes), 0, np.inf)
        more = np.minimum(left, free.kv_blocks - cache) if candidates.attention_device == "gpu" else 0
        on_device = cache + np.where(np.isnan(device_kv), more, 0)
        spared = on_device if off_host is None else np.ceil(free.kv_blocks * off_host)
        on_host = np.floor((free.host - (free.kv_blocks - spared) * free.kv_block_bytes) / free.slot_bytes) - held
        staged = 0 * ring if candidates.variant.cost_model.pinned_pages else ring / 2
        pinned = (staged, ring)
        from_host = _from_host(problem, free, pages - resident, on_host, pinned, computed, held, requested.spilled)
        fits &= from_host >= 0
    from_disk = pages - resident - from_host
    fits &= from_disk * free.page_bytes <= free.disk
    device_kv = on_device / np.maximum(free.kv_blocks, 1)
    placed = PlacementCounts(from_host=from_host, from_disk=from_disk, computed=computed, device_kv=device_kv)
    return ResolvedPlacement(placed=placed, resident=resident, feasible=fits)


def _least_computed(free: FreeMemory, device: Any) -> Any:
    """The fewest pages for the CPU; others are resident, or stream through two slots per streamed page of a layer."""
    slots = np.floor(np.maximum(device, 0) / free.slot_bytes)
    return np.maximum(free.pages - np.maximum(slots, free.layers * np.floor(slots / 2)), 0)


def _beside_a_layer(
    problem: Problem, free: FreeMemory, pages: Any, slots: Any, resident: Any, ring: Any, fits: Any
) -> tuple[Any, Any]:
    """Reduce resident pages where the ring must hold a whole layer, since any page of the layer may be offloaded."""
    layer = problem.model.experts.num_experts
    short = (resident < pages) & (ring < layer)
    fewer = np.where(short, np.minimum(resident, slots - layer), resident)
    streamed = 2 * np.ceil((pages - fewer) / free.layers)
    return fewer, fits & (fewer >= 0) & (~short | (fewer + np.maximum(streamed, layer) <= slots))


def _at_most(most: Any, pages: Any, free: FreeMemory, resident: Any, ring: Any) -> tuple[Any, Any]:
    """Limit resident pages to ``most``; the others stream through the ring."""
    fewer = resident > most
    kept = np.where(fewer, most, resident)
    return kept, np.where(fewer, 2 * np.ceil((pages - kept) / free.layers), ring)


def _cache_blocks(candidates: Candidates, free: FreeMemory, held: Any, device_kv: Any) -> Any:
    """Cache blocks placed in device memory before any page: the requested share; if that is free, all that fit where
    device memory holds no pages, else those that host memory cannot hold."""
    if candidates.attention_device == "cpu":
        return np.zeros_like(free.kv_blocks)
    if candidates.ffn_device == "cpu":
        least = np.floor(free.device / free.kv_block_bytes)
    else:
        least = free.kv_blocks - np.floor((free.host - held * free.slot_bytes) / free.kv_block_bytes)
    least = np.clip(least, 0, free.kv_blocks)
    return np.where(np.isnan(device_kv), least, np.round(free.kv_blocks * np.nan_to_num(device_kv)))


def _from_host(
    problem: Problem,
    free: FreeMemory,
    streamed: Any,
    slots: Any,
    pinned: tuple[Any, Any],
    computed: Any,
    held: Any,
    spilled: Any,
) -> Any:
    """Pages streamed from host memory; -1 if pages and ``pinned`` ring, larger with pages on disk, do not fit."""
    shallow, deep = pinned
    on_host = slots - shallow
    reads = _needs_disk(problem, free, streamed, on_host, held)
    on_host = np.where(reads, slots - deep, on_host)
    found = np.where(on_host >= 0, _host_pages(problem, free, streamed, on_host, computed, held), -1)
    if _spread_is_fixed(problem):
        return found
    moved = np.clip(np.minimum(spilled, streamed) - (streamed - found), 0, np.maximum(found, 0))
    most = np.where(moved > 0, slots - deep, np.inf)
    return np.where(found - moved <= most, found - moved, -1)


def _spread_is_fixed(problem: Problem) -> bool:
    """True if fixed shares decide which of the streamed pages are on disk."""
    return any(problem.share(key) is not None for key in ("weights.host", "weights.disk"))


def _on_disk(problem: Problem, free: FreeMemory) -> int:
    """Pages that a fixed share keeps on disk."""
    return round((problem.share("weights.disk") or 0.0) * free.pages)


def _on_host(problem: Problem, free: FreeMemory) -> int:
    """Pages that a fixed share keeps in host memory."""
    return round((problem.share("weights.host") or 0.0) * free.pages)


def _resident(pages: Any, free: FreeMemory, slots: Any, share: float | None, elsewhere: Any) -> tuple[Any, Any, Any]:
    """The most resident pages r, the slots of the ring of the others, r + 2 ceil((pages - r) / layers) <= slots, and
    whether both fit. Fixed shares of other tiers exclude ``elsewhere`` pages; a fixed ``share`` leaves no choice."""
    if share is not None:
        requested = np.round(share * free.pages)
        resident = np.minimum(requested, pages) + 0 * slots
        ring = 2 * np.ceil((pages - resident) / free.layers)
        return resident, ring, (resident + ring <= slots) & (requested <= pages - elsewhere)
    if free.layers > 2:
        per_layer = np.where(slots >= pages, 0, np.maximum(1, np.ceil((pages - slots) / (free.layers - 2))))
    else:
        per_layer = np.where(slots >= pages, 0, np.ceil(pages / free.layers))
    resident = np.minimum(pages - elsewhere, slots - 2 * per_layer)
    ring = 2 * np.maximum(per_layer, np.ceil((pages - np.maximum(resident, 0)) / free.layers))
    return np.maximum(resident, 0), ring, (resident >= 0) & (resident + ring <= slots)


def _needs_disk(problem: Problem, free: FreeMemory, streamed: Any, on_host: Any, held: Any) -> Any:
    """True if some pages are streamed from disk; pinned memory is then two layers deep."""
    host = problem.share("weights.host")
    kept_off = False if host is None else streamed > _on_host(problem, free) - held
    return (streamed > on_host) | bool(problem.share("weights.disk")) | kept_off


def _host_pages(problem: Problem, free: FreeMemory, streamed: Any, on_host: Any, computed: Any, held: Any) -> Any:
    """The most pages streamed from host memory for ``held`` to ``computed`` CPU pages; -1 if infeasible."""
    host, disk = problem.share("weights.host"), problem.share("weights.disk")
    most = np.minimum(streamed, np.maximum(on_host, 0))
    if host is not None:
        least, requested = (np.maximum(np.round(host * free.pages) - pages, 0) for pages in (computed, held))
        return np.where((np.round(host * free.pages) >= held) & (least <= most), np.minimum(requested, most), -1)
    if disk is not None:
        requested = streamed - np.round(disk * free.pages)
        return np.where((requested >= held - computed) & (requested <= most), np.maximum(requested, 0), -1)
    return most


def fixed_device_kv(problem: Problem, candidates: Candidates) -> float | None:
    """The share of the cache on the device, if fixed; None if free."""
    if candidates.attention_device == "cpu":
        return 0.0
    device, host = problem.share("kv.device"), problem.share("kv.host")
    return device if device is not None else None if host is None else 1.0 - host
