"""Where pages and cache blocks can be, given the memory that is left: in closed form for many candidates at once.

Near pages save a transfer in every pass and ring slots besides, so memory beside the experts' unit goes to pages first
and to the cache with what is left (a byte of cache saves at most a byte, and only in passes that read it all). What
closed form cannot settle, the integer programme does (``milp``).
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
    """Bytes left on each tier once everything without a choice is placed, for each candidate. ``kv_blocks`` of
    ``kv_block_bytes`` each and ``pages`` in slots of ``slot_bytes`` are still to be placed."""

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
    """What memory leaves open, for each candidate.

    Attributes:
        computed: pages that the CPU computes beside a GPU; more where the others would not pass through the ring.
        device_kv: the share of the cache on the device; not a number: what pages leave.
        resident: in that case, the most pages that stay on the device.
        spilled: pages that come from disk at least, whether host memory had room for them or not: it spares copies.
    """

    computed: Any
    device_kv: Any
    resident: Any = np.inf
    spilled: Any = 0.0

    def at(self, index: Any) -> RequestedPlacement:
        """Those of the candidates that ``index`` picks, where all are arrays."""
        names = ("computed", "device_kv", "resident", "spilled")
        return RequestedPlacement(**{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPlacement:
    """``placed`` and whether they are ``feasible``, for each candidate; ``resident`` pages never move."""

    placed: PlacementCounts
    resident: Any
    feasible: Any


def room_of(problem: Problem, cells: Candidates) -> FreeMemory:
    """What is left on each tier."""
    cost_model = cells.setting.cost_model
    left = {tier: float(size) for tier, size in problem.capacity_bytes.items()}
    for (_, tier), size in fixed_bytes(
        problem.model, cells, dtype=cost_model.dtype, kv_dtype=cost_model.kv_dtype
    ).items():
        left[tier] = left[tier] - size
    return FreeMemory(
        device=left.get("device", 0.0),
        host=left["host"],
        disk=int(left.get("disk", 0.0)),
        kv_blocks=kv_blocks(cells),
        kv_block_bytes=kv_block_bytes(problem.model, cells, cost_model.kv_dtype),
        pages=problem.model.num_moe_layers * problem.model.experts.num_experts,
        layers=problem.model.num_moe_layers,
        slot_bytes=costs.page_slot_bytes(problem.model, cost_model.page_dtype),
        page_bytes=costs.page_bytes(problem.model, cost_model.page_dtype),
    )


def fill(
    problem: Problem,
    cells: Candidates,
    wanted: RequestedPlacement,
    *,
    off_host: Any = None,
    in_host: Any = None,
    room: FreeMemory | None = None,
) -> ResolvedPlacement:
    """The best homes as they are wanted, and what is left open filled from the nearest tier on.

    For bounds: ``off_host``, the share of the cache that host memory need not hold, where it is not the wanted one;
    ``in_host``, the pages for the CPU that it must hold, where they are not; and the ``room`` to fill.
    """
    computed, device_kv = wanted.computed, wanted.device_kv
    room = room_of(problem, cells) if room is None else room
    held = computed if in_host is None else in_host
    cache = _cache_blocks(cells, room, held, device_kv)
    if cells.ffn_device == "split" and in_host is None and problem.share("cpu_experts") is None:
        held = computed = np.maximum(computed, _least_computed(room, room.device - cache * room.kv_block_bytes))
    device, pages = room.device - cache * room.kv_block_bytes, room.pages - computed
    if cells.ffn_device == "cpu":
        spared = cache if off_host is None else np.ceil(room.kv_blocks * off_host)
        slots = np.floor((room.host - (room.kv_blocks - spared) * room.kv_block_bytes) / room.slot_bytes)
        resident, ring, fits = _resident(pages, room, slots, problem.share("weights.host"), _on_disk(problem, room))
        if cells.residents == "learned" and not cells.discrete:
            resident, fits = _beside_a_layer(problem, room, pages, slots, resident, ring, fits)
        from_host, on_device = np.zeros_like(resident), cache
        fits &= device >= 0
    else:
        slots = np.floor(device / room.slot_bytes)
        elsewhere = _on_disk(problem, room) + np.maximum(_on_host(problem, room) - computed, 0)
        resident, ring, fits = _resident(pages, room, slots, problem.share("weights.device"), elsewhere)
        resident, ring = _at_most(wanted.resident, pages, room, resident, ring)
        fits &= resident + ring <= slots
        left = np.clip(np.floor((device - (resident + ring) * room.slot_bytes) / room.kv_block_bytes), 0, np.inf)
        more = np.minimum(left, room.kv_blocks - cache) if cells.attention_device == "gpu" else 0
        on_device = cache + np.where(np.isnan(device_kv), more, 0)
        spared = on_device if off_host is None else np.ceil(room.kv_blocks * off_host)
        on_host = np.floor((room.host - (room.kv_blocks - spared) * room.kv_block_bytes) / room.slot_bytes) - held
        staged = 0 * ring if cells.setting.cost_model.pinned_pages else ring / 2
        pinned = (staged, ring)
        from_host = _from_host(problem, room, pages - resident, on_host, pinned, computed, held, wanted.spilled)
        fits &= from_host >= 0
    from_disk = pages - resident - from_host
    fits &= from_disk * room.page_bytes <= room.disk
    device_kv = on_device / np.maximum(room.kv_blocks, 1)
    placed = PlacementCounts(from_host=from_host, from_disk=from_disk, computed=computed, device_kv=device_kv)
    return ResolvedPlacement(placed=placed, resident=resident, feasible=fits)


def _least_computed(room: FreeMemory, device: Any) -> Any:
    """Pages that the CPU computes at least: the others must all stay, or pass through two slots for each of a layer."""
    slots = np.floor(np.maximum(device, 0) / room.slot_bytes)
    return np.maximum(room.pages - np.maximum(slots, room.layers * np.floor(slots / 2)), 0)


def _beside_a_layer(
    problem: Problem, room: FreeMemory, pages: Any, slots: Any, resident: Any, ring: Any, fits: Any
) -> tuple[Any, Any]:
    """Fewer pages stay where the ring must hold a whole layer, since any page of it may be elsewhere."""
    layer = problem.model.experts.num_experts
    short = (resident < pages) & (ring < layer)
    fewer = np.where(short, np.minimum(resident, slots - layer), resident)
    streamed = 2 * np.ceil((pages - fewer) / room.layers)
    return fewer, fits & (fewer >= 0) & (~short | (fewer + np.maximum(streamed, layer) <= slots))


def _at_most(most: Any, pages: Any, room: FreeMemory, resident: Any, ring: Any) -> tuple[Any, Any]:
    """No more than so many pages stay; the others pass through the ring."""
    fewer = resident > most
    kept = np.where(fewer, most, resident)
    return kept, np.where(fewer, 2 * np.ceil((pages - kept) / room.layers), ring)


def _cache_blocks(cells: Candidates, room: FreeMemory, held: Any, device_kv: Any) -> Any:
    """Blocks of the cache that device memory gives room to first: a share of them, or, where that is left open, all
    that fit if it holds nothing else, and no more than host memory cannot hold if it holds pages."""
    if cells.attention_device == "cpu":
        return np.zeros_like(room.kv_blocks)
    if cells.ffn_device == "cpu":
        least = np.floor(room.device / room.kv_block_bytes)
    else:
        least = room.kv_blocks - np.floor((room.host - held * room.slot_bytes) / room.kv_block_bytes)
    least = np.clip(least, 0, room.kv_blocks)
    return np.where(np.isnan(device_kv), least, np.round(room.kv_blocks * np.nan_to_num(device_kv)))


def _from_host(
    problem: Problem,
    room: FreeMemory,
    streamed: Any,
    slots: Any,
    pinned: tuple[Any, Any],
    computed: Any,
    held: Any,
    spilled: Any,
) -> Any:
    """Pages streamed from host memory where ``slots`` of it are left; -1 where they and the ``pinned`` ring do not fit,
    which has more slots where some pages come from disk."""
    shallow, deep = pinned
    on_host = slots - shallow
    reads = _needs_disk(problem, room, streamed, on_host, held)
    on_host = np.where(reads, slots - deep, on_host)
    found = np.where(on_host >= 0, _host_pages(problem, room, streamed, on_host, computed, held), -1)
    if _spread_is_fixed(problem):
        return found
    moved = np.clip(np.minimum(spilled, streamed) - (streamed - found), 0, np.maximum(found, 0))
    most = np.where(moved > 0, slots - deep, np.inf)
    return np.where(found - moved <= most, found - moved, -1)


def _spread_is_fixed(problem: Problem) -> bool:
    """Whether fixed shares say which of the pages that move come from disk."""
    return any(problem.share(key) is not None for key in ("weights.host", "weights.disk"))


def _on_disk(problem: Problem, room: FreeMemory) -> int:
    """Pages that a fixed share keeps on disk."""
    return round((problem.share("weights.disk") or 0.0) * room.pages)


def _on_host(problem: Problem, room: FreeMemory) -> int:
    """Pages that a fixed share keeps in host memory."""
    return round((problem.share("weights.host") or 0.0) * room.pages)


def _resident(pages: Any, room: FreeMemory, slots: Any, share: float | None, elsewhere: Any) -> tuple[Any, Any, Any]:
    """The most of ``pages`` that stay within ``slots`` beside the ring of those that cannot, the ring's slots, and
    whether that fits at all: r + 2 ceil((pages - r) / layers) <= slots. ``elsewhere`` are kept from staying by fixed
    shares of other tiers; a fixed ``share`` of this one leaves no choice."""
    if share is not None:
        wanted = np.round(share * room.pages)
        resident = np.minimum(wanted, pages) + 0 * slots
        ring = 2 * np.ceil((pages - resident) / room.layers)
        return resident, ring, (resident + ring <= slots) & (wanted <= pages - elsewhere)
    if room.layers > 2:
        per_layer = np.where(slots >= pages, 0, np.maximum(1, np.ceil((pages - slots) / (room.layers - 2))))
    else:
        per_layer = np.where(slots >= pages, 0, np.ceil(pages / room.layers))
    resident = np.minimum(pages - elsewhere, slots - 2 * per_layer)
    ring = 2 * np.maximum(per_layer, np.ceil((pages - np.maximum(resident, 0)) / room.layers))
    return np.maximum(resident, 0), ring, (resident >= 0) & (resident + ring <= slots)


def _needs_disk(problem: Problem, room: FreeMemory, streamed: Any, on_host: Any, held: Any) -> Any:
    """Whether some pages come from disk, and pinned memory is two layers deep: those that find no room, or fixed."""
    host = problem.share("weights.host")
    kept_off = False if host is None else streamed > _on_host(problem, room) - held
    return (streamed > on_host) | bool(problem.share("weights.disk")) | kept_off


def _host_pages(problem: Problem, room: FreeMemory, streamed: Any, on_host: Any, computed: Any, held: Any) -> Any:
    """Pages streamed from host memory; -1 where a fixed share asks for what cannot be. Between ``held`` and
    ``computed`` pages for the CPU, the most that may be."""
    host, disk = problem.share("weights.host"), problem.share("weights.disk")
    most = np.minimum(streamed, np.maximum(on_host, 0))
    if host is not None:
        least, wanted = (np.maximum(np.round(host * room.pages) - pages, 0) for pages in (computed, held))
        return np.where((np.round(host * room.pages) >= held) & (least <= most), np.minimum(wanted, most), -1)
    if disk is not None:
        wanted = streamed - np.round(disk * room.pages)
        return np.where((wanted >= held - computed) & (wanted <= most), np.maximum(wanted, 0), -1)
    return most


def fixed_device_kv(problem: Problem, cells: Candidates) -> float | None:
    """The share of the cache on the device, where there is no choice."""
    if cells.attention_device == "cpu":
        return 0.0
    device, host = problem.share("kv.device"), problem.share("kv.host")
    return device if device is not None else None if host is None else 1.0 - host
