"""Arenas: named memory regions, announced before loading, that hold every long-lived byte of a run. Host memory is
page-locked in place for DMA, because torch's pinned allocator rounds sizes up to a power of two."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.hrm.footprint import Footprint

HUGE_PAGE = 2 << 20
_PAGE = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
_PINNED = frozenset({"pinned_ring", "crossing"})
_BOUNDS_ONLY = frozenset({"transient", "host_transient", "runtime"})


def allocate(footprint: Footprint, device: torch.device, *, pinned_pages: bool = False) -> dict[str, Tensor]:
    """One uint8 tensor per purpose, except the bounds ``transient``, ``host_transient`` and ``runtime``; raises
    BudgetError if the system refuses a region. Pinned, if ``device`` is not the CPU: host arenas for transfers, the KV
    cache if the device attends over it, and host experts with ``pinned_pages``."""
    arenas = {}
    attends = any(arena.purpose == "kv_buffer" for arena in footprint.arenas)
    crossing = _PINNED | ({"kv"} if attends else set()) | ({"host_experts"} if pinned_pages else set())
    for arena in footprint.arenas:
        if arena.purpose in _BOUNDS_ONLY:
            continue
        where = device if arena.tier == "device" else torch.device("cpu")
        pinned = arena.tier == "host" and arena.purpose in crossing and device.type != "cpu"
        try:
            if pinned:
                arenas[arena.purpose] = page_locked(arena.bytes, device)
            elif where.type == "cpu":
                arenas[arena.purpose] = on_huge_pages(arena.bytes)
            else:
                arenas[arena.purpose] = _aligned_empty(arena.bytes, device=where)
        except (RuntimeError, MemoryError, OSError):
            raise BudgetError(
                f"the machine has no {format_bytes(arena.bytes)} left on tier {arena.tier} for {arena.purpose}; "
                f"lower --{arena.tier}-memory below {format_bytes(footprint.total(arena.tier))}",
                tier=arena.tier,
                needed_bytes=arena.bytes,
            ) from None
    return arenas


def slots(arena: Tensor, slot_bytes: int) -> Iterator[Tensor]:
    """Consecutive slots of ``slot_bytes`` bytes."""
    for start in range(0, arena.numel(), slot_bytes):
        yield arena[start : start + slot_bytes]


def typed(arena: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A view of the first bytes of ``arena``."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return arena[:size].view(dtype).view(shape)


def on_huge_pages(size: int) -> Tensor:
    """``size`` bytes of host memory, on huge pages where the system has them, so that sequential reads avoid TLB misses
    (docs/log.md). Pages are committed on first write."""
    return _mapped(size)[1]


def page_locked(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of host memory for DMA by ``device``; raises RuntimeError if the system refuses."""
    if not locks_in_place(device.type):
        return _aligned_empty(size, pin_memory=True)
    return _locked(size)


@functools.cache
def locks_in_place(device_type: str) -> bool:
    """True if memory can be locked in place, tested with one huge page."""
    if device_type != "cuda":
        return False
    try:
        _locked(HUGE_PAGE)
    except RuntimeError:
        with suppress(RuntimeError):  # clears the runtime's sticky error, which the next kernel launch would report
            torch.zeros(1, device=device_type).add_(1)
        return False
    return True


def _aligned_empty(size: int, **kind: Any) -> Tensor:
    raw = torch.empty(size + _PAGE, dtype=torch.uint8, **kind)
    return raw[-raw.data_ptr() % _PAGE :][:size]


def _locked(size: int) -> Tensor:
    cells, region = _mapped(size)
    runtime, address = _runtime(), region.data_ptr()
    if size:
        code = int(runtime.cudaHostRegister(address, -(-size // _PAGE) * _PAGE, _PORTABLE))
        if code:
            raise RuntimeError(f"cudaHostRegister refused {size} bytes with error {code}")
        weakref.finalize(cells, runtime.cudaHostUnregister, address)  # runs before the mapping is freed
    return region


def _mapped(size: int) -> tuple[Any, Tensor]:
    """Cells of a new mapping, and ``size`` bytes of them from a huge page's start on."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    cells = (ctypes.c_char * len(memory)).from_buffer(memory)
    raw = torch.frombuffer(cells, dtype=torch.uint8)
    return cells, raw[-raw.data_ptr() % HUGE_PAGE :][:size]


def _runtime() -> Any:
    return torch.cuda.cudart()
