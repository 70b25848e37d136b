"""Arenas: named memory regions whose sizes are announced before loading. They hold every long-lived byte of a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.hrm.footprint import Footprint
from moelight.paging.locking import on_huge_pages, page_locked

_PINNED = frozenset({"pinned_ring", "crossing"})
_BOUNDS_ONLY = frozenset({"transient", "host_transient", "runtime"})
_BASE_ALIGNMENT = 4096


def allocate(footprint: Footprint, device: torch.device, *, pinned_pages: bool = False) -> dict[str, Tensor]:
    """One uint8 tensor per purpose: device arenas on ``device``, host arenas for transfers pinned if ``device`` is not
    the CPU.

    The host KV cache is pinned too if the device attends over it, and host experts with ``pinned_pages``.
    ``transient``, ``host_transient`` and ``runtime`` are bounds on other allocations and get no region.

    Raises:
        BudgetError: the system refuses a region that the plan accounted for.
    """
    arenas = {}
    attends = any(arena.purpose == "kv_buffer" for arena in footprint.arenas)
    crossing = _PINNED | ({"kv"} if attends else set()) | ({"host_experts"} if pinned_pages else set())
    for arena in footprint.arenas:
        if arena.purpose in _BOUNDS_ONLY:
            continue
        where = device if arena.tier == "device" else torch.device("cpu")
        pinned = arena.tier == "host" and arena.purpose in crossing and device.type != "cpu"
        try:
            arenas[arena.purpose] = _aligned(arena.bytes, where, device, pinned=pinned)
        except (RuntimeError, MemoryError, OSError):
            raise BudgetError(
                f"the machine has no {format_bytes(arena.bytes)} left on tier {arena.tier} for {arena.purpose}; "
                f"lower --{arena.tier}-memory below {format_bytes(footprint.total(arena.tier))}",
                tier=arena.tier,
                needed_bytes=arena.bytes,
            ) from None
    return arenas


def slots(arena: Tensor, slot_bytes: int) -> Iterator[Tensor]:
    """Consecutive slots of ``slot_bytes`` bytes in ``arena``."""
    for start in range(0, arena.numel(), slot_bytes):
        yield arena[start : start + slot_bytes]


def typed(arena: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A view of the arena's first bytes as ``shape`` of ``dtype``."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return arena[:size].view(dtype).view(shape)


def _aligned(size: int, where: torch.device, device: torch.device, *, pinned: bool) -> Tensor:
    if pinned:
        return page_locked(size, device)
    if where.type == "cpu":
        return on_huge_pages(size)
    raw = torch.empty(size + _BASE_ALIGNMENT, dtype=torch.uint8, device=where)
    start = -raw.data_ptr() % _BASE_ALIGNMENT
    return raw[start : start + size]
