"""Placement of pages and cache blocks in the free memory, in closed form for many candidates at once.

A resident page saves a transfer in every pass and ring slots besides, so that pages take the memory of the experts'
processor first and the cache the rest (a byte of cache saves at most a byte, and only in passes that read all of it),
except what of the cache host memory cannot hold beside the pages for the CPU and the pinned ring.
The integer programme (``milp``) decides the cases that the closed form cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.hrm import costs
from moelight.hrm.footprint import fixed_bytes, kv_block_bytes, kv_blocks, kv_buffer_tokens
from moelight.hrm.pass_cost import PlacementCounts, ring_of
from moelight.hrm.placement import unevenness
from moelight.optimizer.problem import Candidates, Problem

# With more of the cache on the device more pages stream, whose pinned ring takes more of host memory, and so on: three
# rounds settle it.
RING_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Bytes left on each tier after everything of fixed placement, for each candidate; ``kv_blocks`` blocks and
    ``pages`` pages are still to be placed, of ``page_bytes`` on average, in slots of ``slot_bytes`` on average, from
    which those of the pages that a tier holds differ by at most ``uneven_bytes`` in all. A slot of a ring takes
    ``ring_slot`` times the average."""

    device: Any
    host: Any
    disk: int
    kv_blocks: Any
    kv_block_bytes: int
    pages: int
    layers: int
    slot_bytes: float
    uneven_bytes: float
    ring_slot: float
    page_bytes: int

    def slots(self, left: Any) -> Any:
        """Slots of average size in ``left`` bytes of one tier, such that as many pages fit whichever they are."""
        return np.floor((left - self.uneven_bytes) / self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """One candidate, placed, and the seconds of the job."""

    candidate: Candidates
    placed: PlacementCounts
    seconds: float


def free_memory(problem: Problem, candidates: Candidates) -> FreeMemory:
    """The free memory of each tier, for each candidate."""
    model, cost_model = problem.model, candidates.cost_model
    left = {tier: float(size) for tier, size in problem.capacity_bytes.items()}
    taken = fixed_bytes(model, candidates, dtype=cost_model.dtype)
    page_dtype = cost_model.page_dtype
    slot_bytes = costs.mean_slot_bytes(model, page_dtype)
    for (_, tier), size in taken.items():
        left[tier] = left[tier] - size
    return FreeMemory(
        device=left.get("device", 0.0),
        host=left["host"],
        disk=int(left.get("disk", 0.0)),
        kv_blocks=kv_blocks(candidates),
        kv_block_bytes=kv_block_bytes(model, candidates, cost_model.dtype),
        pages=problem.pages,
        layers=model.num_moe_layers,
        slot_bytes=slot_bytes,
        uneven_bytes=unevenness(costs.page_slots_by_layer(model, page_dtype)),
        ring_slot=costs.page_slot_bytes(model, page_dtype) / slot_bytes,
        page_bytes=costs.moved_page_bytes(model, page_dtype),
    )


def fill(
    problem: Problem,
    candidates: Candidates,
    *,
    off_host: Any = None,
    in_host: Any = None,
    free: FreeMemory | None = None,
) -> tuple[PlacementCounts, Any]:
    """Resolve the requested placement; free choices fill the tiers from the fastest on. Returns the counts, and whether
    they are feasible. Only bounds set ``off_host``, the share of the cache that host memory need not hold, ``in_host``,
    the pages for the CPU that host memory must hold, and ``free``."""
    buffered = True if free is not None else buffers_longest(problem, candidates)
    free = free_memory(problem, candidates) if free is None else free
    cache = _cache_blocks(candidates, free, candidates.computed if in_host is None else in_host)
    for _ in range(RING_ROUNDS):
        placed, fits, needed = _fill_beside(problem, candidates, free, cache, off_host, in_host)
        if not np.any(needed > cache):
            break
        cache = np.maximum(cache, needed)
    return placed, fits & buffered


def buffers_longest(problem: Problem, candidates: Candidates) -> Any:
    """Whether the device's buffer for the contexts of one micro-batch holds the longest sequence of a workload whose
    longest answer is not the usual one."""
    work, model = problem.workload, problem.model
    if candidates.attention_device != "gpu" or work.max_gen_len is None:
        return True
    longest = min(work.max_prompt_len + work.max_gen_len, model.max_positions)
    if model.window is not None:
        longest = np.minimum(longest, model.window - 1 + candidates.micro_batch_tokens)
    return kv_buffer_tokens(candidates) >= longest


def _fill_beside(
    problem: Problem, candidates: Candidates, free: FreeMemory, cache: Any, off_host: Any, in_host: Any
) -> tuple[PlacementCounts, Any, Any]:
    """`fill` with ``cache`` blocks in device memory before any page. Also returns how many blocks these must be so that
    host memory holds the pinned ring; 0 where it does, or where the cache's share is not free."""
    computed, device_kv, needed = candidates.computed, candidates.device_kv, np.zeros_like(cache)
    held = computed if in_host is None else in_host
    if candidates.ffn_device == "split" and in_host is None and problem.share("cpu_experts") is None:
        held = computed = np.maximum(computed, _least_computed(free, candidates, cache))
    device, pages = free.device - cache * free.kv_block_bytes, free.pages - computed
    max_ring = ring_of(problem.model, candidates.ring_pages)

    def host_slots(spared: Any) -> Any:
        """Slots of host memory beside the cache, of which ``spared`` blocks are elsewhere."""
        spared = spared if off_host is None else np.ceil(free.kv_blocks * off_host)
        return free.slots(free.host - (free.kv_blocks - spared) * free.kv_block_bytes)

    on_disk, on_host = (problem.fixed_pages(f"weights.{tier}") or 0 for tier in ("disk", "host"))
    if candidates.ffn_device == "cpu":
        slots, on_device = host_slots(cache), cache
        resident, ring, fits = _resident(pages, free, slots, problem.fixed_pages("weights.host"), on_disk, max_ring)
        if candidates.residents == "learned" and not candidates.discrete:
            resident, fits = _beside_a_layer(problem, free, pages, slots, resident, ring, fits)
        from_host = np.zeros_like(resident)
        fits &= device >= 0
    else:
        slots, elsewhere = free.slots(device), on_disk + np.maximum(on_host - computed, 0)
        resident, ring, fits = _resident(pages, free, slots, problem.fixed_pages("weights.device"), elsewhere, max_ring)
        fewer = resident > candidates.resident  # the others stream through the ring
        resident = np.where(fewer, candidates.resident, resident)
        ring = np.where(fewer, _ring(pages - resident, free, max_ring), ring)
        taken = resident + free.ring_slot * ring
        fits &= taken <= slots
        left = device - free.uneven_bytes - taken * free.slot_bytes
        left = np.clip(np.floor(left / free.kv_block_bytes), 0, np.inf)
        more = np.minimum(left, free.kv_blocks - cache) if candidates.attention_device == "gpu" else 0
        on_device = cache + np.where(np.isnan(device_kv), more, 0)
        slots = host_slots(on_device) - held
        staged = np.minimum(np.ceil((pages - resident) / free.layers), ring)
        pinned = free.ring_slot * staged, free.ring_slot * ring
        from_host = _from_host(problem, candidates, pages - resident, slots, pinned, computed, held)
        fits &= from_host >= 0
        if candidates.attention_device == "gpu":
            needed = np.where(np.isnan(device_kv) & (from_host < 0), _off_host(free, held + pinned[1]), 0)
    from_disk = pages - resident - from_host
    fits &= from_disk * free.page_bytes <= free.disk
    device_kv = on_device / np.maximum(free.kv_blocks, 1)
    placed = PlacementCounts(from_host=from_host, from_disk=from_disk, computed=computed, device_kv=device_kv)
    return placed, fits, needed


def _least_computed(free: FreeMemory, candidates: Candidates, cache: Any) -> Any:
    """The fewest pages for the CPU beside ``cache`` blocks; others are resident, or stream through two slots of a ring
    per streamed page of a layer, which leave what is odd to resident pages."""
    slots = np.maximum(free.slots(np.maximum(free.device - cache * free.kv_block_bytes, 0)), 0)
    rings, odd = np.divmod(slots, 2 * free.ring_slot)
    streamed = free.layers * rings + np.minimum(np.floor(odd), candidates.resident)
    return np.maximum(free.pages - np.maximum(slots, streamed), 0)


def _beside_a_layer(
    problem: Problem, free: FreeMemory, pages: Any, slots: Any, resident: Any, ring: Any, fits: Any
) -> tuple[Any, Any]:
    """Reduce resident pages where the ring must hold a whole layer, since any page of the layer may be offloaded."""
    layer = problem.model.experts.num_experts
    short = (resident < pages) & (ring < layer)
    fewer = np.where(short, np.minimum(resident, np.floor(slots - free.ring_slot * layer)), resident)
    streamed = 2 * np.ceil((pages - fewer) / free.layers)
    return fewer, fits & (fewer >= 0) & (~short | (fewer + free.ring_slot * np.maximum(streamed, layer) <= slots))


def _cache_blocks(candidates: Candidates, free: FreeMemory, held: Any) -> Any:
    """Cache blocks placed in device memory before any page: the requested share; if that is free, all that fit where
    device memory holds no pages, else those that host memory cannot hold."""
    if candidates.attention_device == "cpu":
        return np.zeros_like(free.kv_blocks)
    if candidates.ffn_device == "cpu":
        least = np.clip(np.floor(free.device / free.kv_block_bytes), 0, free.kv_blocks)
    else:
        least = _off_host(free, held)
    requested = candidates.device_kv
    return np.where(np.isnan(requested), least, np.round(free.kv_blocks * np.nan_to_num(requested)))


def _off_host(free: FreeMemory, slots: Any) -> Any:
    """The fewest cache blocks that host memory cannot hold beside ``slots``."""
    held = np.floor((free.host - slots * free.slot_bytes - free.uneven_bytes) / free.kv_block_bytes)
    return np.clip(free.kv_blocks - held, 0, free.kv_blocks)


def _from_host(
    problem: Problem,
    candidates: Candidates,
    streamed: Any,
    slots: Any,
    pinned: tuple[Any, Any],
    computed: Any,
    held: Any,
) -> Any:
    """The most pages of ``streamed`` that come from host memory, for ``held`` to ``computed`` CPU pages; -1 if pages
    and ``pinned`` ring, as large as so many slots if no page and if some pages are on disk, do not fit in ``slots``."""
    host, disk = problem.fixed_pages("weights.host"), problem.fixed_pages("weights.disk")
    staged, ring = pinned
    on_host = np.floor(slots - (0 * ring if candidates.cost_model.pinned_pages else staged))
    kept_off = host is not None and streamed > host - held
    reads = (streamed > on_host) | bool(problem.share("weights.disk")) | kept_off
    on_host = np.where(reads, np.floor(slots - ring), on_host)
    max_host = np.minimum(streamed, np.maximum(on_host, 0))
    if host is not None:
        least, requested = np.maximum(host - computed, 0), np.maximum(host - held, 0)
        from_host = np.where((host >= held) & (least <= max_host), np.minimum(requested, max_host), -1)
    elif disk is not None:
        requested = streamed - disk
        from_host = np.where((requested >= held - computed) & (requested <= max_host), np.maximum(requested, 0), -1)
    else:
        from_host = max_host
    from_host = np.where(on_host >= 0, from_host, -1)
    if host is not None or disk is not None:  # fixed shares decide which of the streamed pages are on disk
        return from_host
    moved = np.clip(np.minimum(candidates.spilled, streamed) - (streamed - from_host), 0, np.maximum(from_host, 0))
    max_host = np.where(moved > 0, slots - ring, np.inf)
    return np.where(from_host - moved <= max_host, from_host - moved, -1)


def _ring(streamed: Any, free: FreeMemory, max_ring: Any) -> Any:
    """Slots of the ring of ``streamed`` pages: two layers of them, at ``max_ring`` as many as a candidate says."""
    return np.minimum(2 * np.ceil(streamed / free.layers), max_ring)


def _resident(
    pages: Any, free: FreeMemory, slots: Any, requested: int | None, elsewhere: Any, max_ring: Any
) -> tuple[Any, Any, Any]:
    """The most resident pages r, the slots of the ring of the others, r + w min(2 ceil((pages - r) / layers), most) <=
    slots, and whether both fit. A slot of the ring is as large as w others. Fixed shares of other tiers exclude
    ``elsewhere`` pages; a ``requested`` number leaves no choice."""
    two = 2 * free.ring_slot
    if requested is not None:
        resident = np.minimum(requested, pages) + 0 * slots
        ring = _ring(pages - resident, free, max_ring)
        fits = resident + free.ring_slot * ring <= slots
        return resident, ring, fits & (requested <= pages - elsewhere)
    if free.layers > two:
        per_layer = np.where(slots >= pages, 0, np.maximum(1, np.ceil((pages - slots) / (free.layers - two))))
    else:
        per_layer = np.where(slots >= pages, 0, np.ceil(pages / free.layers))
    double = np.minimum(pages - elsewhere, np.floor(slots - two * per_layer))
    small = np.minimum(pages - elsewhere, np.floor(slots - free.ring_slot * max_ring))
    resident = np.where(slots >= pages, double, np.maximum(double, small))
    ring = 2 * np.maximum(per_layer, np.ceil((pages - np.maximum(resident, 0)) / free.layers))
    ring = np.where(resident > double, _ring(pages - resident, free, max_ring), ring)
    return np.maximum(resident, 0), ring, (resident >= 0) & (resident + free.ring_slot * ring <= slots)
