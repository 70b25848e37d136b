"""Arenas: named memory regions, announced before loading, that hold every long-lived byte of a run. Host memory is
page-locked in place for DMA, because torch's pinned allocator rounds sizes up to a power of two."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moelight.core.errors import BudgetError
from moelight.core.units import format_bytes
from moelight.hrm.footprint import ArenaSize, Footprint
from moelight.kernels.device import Device

_log = logging.getLogger(__name__)
HUGE_PAGE = 2 << 20
LOCKED_AT_ONCE = 1 << 30
_PAGE = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
_PINNED = frozenset({"pinned_ring", "crossing"})
_BOUNDS_ONLY = frozenset({"transient", "host_transient", "states", "runtime", "transformers", "device_runtime"})


class PinningError(BudgetError):
    """The system does not page-lock the memory of ``purpose``."""

    def __init__(self, purpose: str, size: int, *, locked: int, code: int) -> None:
        super().__init__(
            f"the system refuses to page-lock {format_bytes(size)} of host memory for {purpose} (cudaHostRegister: "
            f"error {code} after {format_bytes(locked)}); raise its limit of locked memory (ulimit -l, that of a "
            "container or of WSL), or lower --host-memory",
            tier="host",
            needed_bytes=size,
        )
        self.purpose = purpose


def allocate(footprint: Footprint, device: torch.device, *, pinned_pages: bool = False) -> dict[str, Tensor]:
    """One uint8 tensor per purpose, except the bounds ``transient``, ``host_transient``, ``states``, ``runtime`` and
    ``device_runtime``; raises BudgetError if the system refuses a region. Pinned, if ``device`` is not the CPU: host
    arenas for transfers, the KV cache if the device attends over it, and host experts with ``pinned_pages``; what of
    pages crosses at once lies in one slot."""
    arenas = {}
    attends = any(arena.purpose == "kv_buffer" for arena in footprint.arenas)
    crossing = _PINNED | ({"kv"} if attends else set()) | ({"host_experts"} if pinned_pages else set())
    for arena in footprint.arenas:
        if arena.purpose in _BOUNDS_ONLY:
            continue
        where = device if arena.tier == "device" else torch.device("cpu")
        pinned = arena.tier == "host" and arena.purpose in crossing and not Device(device).host
        try:
            if pinned:
                arenas[arena.purpose] = page_locked(arena.bytes, device, slots=arena.slots, purpose=arena.purpose)
            elif Device(where).host:
                arenas[arena.purpose] = on_huge_pages(arena.bytes)
            else:
                arenas[arena.purpose] = _aligned_empty(arena.bytes, device=where)
        except (RuntimeError, MemoryError, OSError):  # PinningError is none of them
            raise nothing_left(footprint, arena) from None
    return arenas


def nothing_left(footprint: Footprint, arena: ArenaSize) -> BudgetError:
    """The error of a machine without memory for ``arena``."""
    return BudgetError(
        f"the machine has no {format_bytes(arena.bytes)} left on tier {arena.tier} for {arena.purpose}; "
        f"lower --{arena.tier}-memory below {format_bytes(footprint.total(arena.tier))}",
        tier=arena.tier,
        needed_bytes=arena.bytes,
    )


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


def page_locked(size: int, device: torch.device, *, slots: Sequence[int] = (), purpose: str = "transfers") -> Tensor:
    """``size`` bytes of host memory for DMA by ``device``. Raises PinningError, or RuntimeError where torch locks.

    Where it consists of ``slots`` of so many bytes, it is locked in pieces of about `LOCKED_AT_ONCE`, of whole slots: a
    refusal comes before everything is locked. CUDA does not say that a copy may cross two locked regions, so none does.
    """
    if not locks_in_place(device):
        return _aligned_empty(size, pin_memory=True)
    region, locked, code = _locked(size, _pieces(size, slots))
    if code:
        _clear_error(device)
        raise PinningError(purpose, size, locked=locked, code=code)
    return region


@functools.cache
def locks_in_place(device: torch.device) -> bool:
    """True if memory can be locked in place, tested with one huge page."""
    if not Device(device).cuda:
        return False
    _, _, code = _locked(HUGE_PAGE, [HUGE_PAGE])
    if code:
        _clear_error(device)
    return not code


def _clear_error(device: torch.device) -> None:
    """Drop the error that the runtime keeps, which the next kernel launch would report."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _aligned_empty(size: int, **kind: Any) -> Tensor:
    raw = torch.empty(size + _PAGE, dtype=torch.uint8, **kind)
    return raw[-raw.data_ptr() % _PAGE :][:size]


def _locked(size: int, pieces: Sequence[int]) -> tuple[Tensor, int, int]:
    """``size`` bytes of host memory, locked in ``pieces`` of so many bytes; how many were; the error of the one that
    was not, or 0: the others are unlocked then."""
    cells, region = _mapped(size)
    runtime, address, locked = _runtime(), region.data_ptr(), list[Any]()
    for piece, stop in zip(pieces, accumulate(pieces), strict=True):
        first = stop - piece
        if code := int(runtime.cudaHostRegister(address + first, -(-piece // _PAGE) * _PAGE, _PORTABLE)):
            for unlock in locked:
                unlock()
            return region, first, code
        # runs before the mapping is freed
        locked.append(weakref.finalize(cells, runtime.cudaHostUnregister, address + first))
        if piece < size:
            _log.info("page-locked %s of %s", format_bytes(stop), format_bytes(size))
    return region, size, 0


def _pieces(size: int, slots: Sequence[int]) -> list[int]:
    """The bytes of the pieces in which ``size`` bytes are locked: all at once, or whole ``slots``."""
    if not slots:
        return [size] if size else []
    pieces = [0]
    for slot in slots:
        if pieces[-1] and pieces[-1] + slot > LOCKED_AT_ONCE:
            pieces.append(0)
        pieces[-1] += slot
    return pieces


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
