"""A compute device in one type: what it can do, and those parts of torch's interface that differ between kinds.

Outside of this module, of `native.on_cpu`, of `kernels.gpu`, whose programs are CUDA's, and of `paging.arena`, which
locks memory by CUDA's runtime, nothing asks for the type of a `torch.device`. A twin (`runtime.twin`) computes on the
CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ACCELERATORS = ("cuda", "xpu")
BFLOAT16_SINCE = (8, 0)


def on_host(tensor: Tensor) -> bool:
    """True if ``tensor`` is in host memory; `native.on_cpu` decides which kernels compute with it."""
    return tensor.device.type == "cpu"


@cache
def compute_capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA card; None for the current card."""
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def default_accelerator() -> torch.device | None:
    """The kind of accelerator that torch sees on this machine, one of `ACCELERATORS`; None without any."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind if kind is not None and kind.type in ACCELERATORS else None


def count_of(kind: str) -> int:
    """Number of devices of ``kind``, one of `ACCELERATORS`, that torch sees."""
    module = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeak:
    """Most bytes of tensors (``allocated``) and of the allocator's segments (``reserved``)."""

    allocated: int = 0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """``handle``: torch's name of the device."""

    handle: torch.device

    @property
    def host(self) -> bool:
        """True if it computes in host memory, at the moment of the call."""
        return self.handle.type == "cpu"

    @property
    def cuda(self) -> bool:
        """True for a device with CUDA's interface; ROCm has it, too."""
        return self.handle.type == "cuda"

    @property
    def nvidia(self) -> bool:
        """True for CUDA itself: events that block, graphs, growing segments, addresses of page-locked memory."""
        return self.cuda and torch.version.hip is None

    @property
    def bfloat16(self) -> bool:
        """True if it computes in bfloat16: NVIDIA from compute capability 8.0 on."""
        return not self.nvidia or compute_capability(self.handle.index) >= BFLOAT16_SINCE

    @property
    def properties(self) -> Any:
        """torch's record of an accelerator: its name, its memory, where torch knows it its PCI address."""
        return self._module.get_device_properties(self.handle)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.handle)

    def context(self) -> AbstractContextManager[Any]:
        """Context within which launches go to the device."""
        return torch.cuda.device(self.handle) if self.cuda else nullcontext()

    def stream(self) -> Any:
        return torch.cuda.Stream(self.handle) if self.cuda else torch.Stream(device=self.handle)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.handle)

    def event(self, *, timed: bool = False) -> Any:
        """An event; where the device allows it, one whose waiting thread sleeps in the driver (`wakes`)."""
        if self.nvidia:
            return torch.cuda.Event(enable_timing=timed, blocking=True)
        return torch.Event(device=self.handle, enable_timing=timed)

    def synchronize(self) -> None:
        """Wait for everything launched on the device, on whichever stream."""
        if not self.host:
            torch.accelerator.synchronize(self.handle)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory, not initialised, from which and to which copies are asynchronous: page-locked, unless the
        device computes there. torch reuses page-locked memory only after the copies that were launched."""
        return torch.empty(shape, dtype=dtype, pin_memory=not self.host and torch.accelerator.is_available())

    def pinned(self, values: Tensor | np.ndarray) -> Tensor:
        """``values``, which are in host memory, as `host_memory`."""
        return torch.as_tensor(values) if self.host else torch.as_tensor(values).pin_memory()

    def landed(self, values: Tensor | np.ndarray) -> Tensor:
        """``values``, which are in host memory, on the device, copied without waiting."""
        return self.pinned(values).to(self.handle, non_blocking=True)

    def memory(self) -> tuple[int, int]:
        """Free and all memory of an accelerator, bytes; what this process's allocator caches is not free."""
        free, total = self._module.mem_get_info(self.handle)
        return int(free), int(total)

    def free_cache(self) -> None:
        """Give back what the allocator caches without use."""
        if not self.host:
            self._module.empty_cache()

    def limit_memory(self, limit_bytes: int | None) -> None:
        """Limit the allocator to ``limit_bytes`` (None: all); larger requests fail from now on.

        On CUDA segments then grow in place, so that freed memory serves requests of any size. The device's context
        (some hundred MiB) does not count. No effect where the device has no memory or no such limit.
        """
        if self.host or not hasattr(self._module, "set_per_process_memory_fraction"):
            return
        if self.nvidia:
            _change_settings("expandable_segments:True")
        _, total = self.memory()
        share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
        self._module.set_per_process_memory_fraction(share, self.handle)

    def watch_memory(self) -> None:
        """Free unused cached memory and reset the peaks."""
        if self.host:
            return
        self._module.init()  # there are no statistics before
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self.handle)

    def memory_peak(self) -> DevicePeak:
        """Peaks since `watch_memory`; zeros where the device has no memory of its own."""
        if self.host:
            return DevicePeak()
        module = self._module
        return DevicePeak(
            allocated=int(module.max_memory_allocated(self.handle)),
            reserved=int(module.max_memory_reserved(self.handle)),
        )


def wakes(event: Any) -> bool:
    """True if a thread that synchronizes with ``event`` sleeps in the driver, without the GIL, and does not spin."""
    return isinstance(event, torch.cuda.Event)


def _change_settings(settings: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.9 and later
    (change or torch.cuda.memory._set_allocator_settings)(settings)
