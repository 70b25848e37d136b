"""Memory of this process that a device copies from and to by itself, because its pages cannot move.

Locked where it lies: torch's own pinned allocator rounds every size up to a power of two, which no plan has announced.
Knows CUDA's runtime (ROCm's is the same under another name). Refuses to know what the memory is for.
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
    """Memory of the process, from the start of a huge page on where the system has them: sweeps over weights and caches
    miss no address translations then (docs/log.md). Taken page by page when it is first written."""
    raw = torch.frombuffer(_mapped(size), dtype=torch.uint8)
    return raw[_start(raw) :][:size]


def page_locked(size: int, device: torch.device) -> Tensor:
    """``size`` bytes that ``device`` reads and writes without the processor's help.

    Raises:
        RuntimeError: the machine will not lock so much.
    """
    if not locks_in_place(device.type):
        raw = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True)
        return raw[-raw.data_ptr() % _PAGE :][:size]
    return _locked(size)


@functools.cache
def locks_in_place(device_type: str) -> bool:
    """Whether memory can be locked where it lies, found out with one huge page."""
    if device_type != "cuda":
        return False
    try:
        _locked(HUGE_PAGE)
    except RuntimeError:
        with suppress(RuntimeError):  # the runtime keeps the refusal, and its next kernel would be blamed for it
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
        weakref.finalize(cells, runtime.cudaHostUnregister, address)  # the cells go before the mapping they lie in
    return region


def _mapped(size: int) -> Any:
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_char * len(memory)).from_buffer(memory)


def _start(raw: Tensor) -> int:
    return -raw.data_ptr() % HUGE_PAGE


def _runtime() -> Any:
    return torch.cuda.cudart()
