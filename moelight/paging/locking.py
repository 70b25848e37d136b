"""Host memory on huge pages, and page-locked host memory that a device accesses by DMA.

Memory is locked in place: torch's pinned allocator rounds every size up to a power of two, which the plan does not
account for. Uses the CUDA runtime (ROCm's is the same under another name).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_PAGE = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


def on_huge_pages(size: int) -> Tensor:
    """``size`` bytes of host memory, aligned to a huge page where the system has them: sequential reads of weights
    and caches then avoid TLB misses (docs/log.md). Pages are committed on first write.
    """
    raw = torch.frombuffer(_mapped(size), dtype=torch.uint8)
    return raw[_start(raw) :][:size]


def page_locked(size: int, device: torch.device) -> Tensor:
    """``size`` bytes of page-locked host memory, which ``device`` reads and writes by DMA.

    Raises:
        RuntimeError: the system refuses to lock that much.
    """
    if not locks_in_place(device.type):
        raw = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True)
        return raw[-raw.data_ptr() % _PAGE :][:size]
    return _locked(size)


@functools.cache
def locks_in_place(device_type: str) -> bool:
    """True if memory can be locked in place; tested with one huge page."""
    if device_type != "cuda":
        return False
    try:
        _locked(HUGE_PAGE)
    except RuntimeError:
        with suppress(RuntimeError):  # clears the runtime's sticky error, which the next kernel launch would report
            torch.zeros(1, device=device_type).add_(1)
        return False
    return True


def _locked(size: int) -> Tensor:
    cells = _mapped(size)
    raw = torch.frombuffer(cells, dtype=torch.uint8)
    region = raw[_start(raw) :][:size]
    runtime, address = _runtime(), region.data_ptr()
    if size:
        code = int(runtime.cudaHostRegister(address, -(-size // _PAGE) * _PAGE, _PORTABLE))
        if code:
            raise RuntimeError(f"cudaHostRegister refused {size} bytes with error {code}")
        weakref.finalize(cells, runtime.cudaHostUnregister, address)  # runs before the mapping is freed
    return region


def _mapped(size: int) -> Any:
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_char * len(memory)).from_buffer(memory)


def _start(raw: Tensor) -> int:
    return -raw.data_ptr() % HUGE_PAGE


def _runtime() -> Any:
    return torch.cuda.cudart()
