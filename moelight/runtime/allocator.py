"""The caching allocator of a device: its limit and its peak.

Device-generic, through torch's module for each kind of accelerator. The emulated device has no memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeak:
    """Most bytes held by tensors (``allocated``) and kept for them by the allocator (``reserved``)."""

    allocated: int = 0
    reserved: int = 0


def limit_device_memory(device: torch.device, limit_bytes: int | None) -> None:
    """Limit the allocator to ``limit_bytes`` of ``device`` (None: all of it); larger requests fail from now on.

    On CUDA its segments grow in place, so that memory freed by one size serves another. The device's own context (some
    hundred MiB) is not counted. Does nothing where the device has no memory or no such limit.
    """
    module = _module(device)
    if module is None or not hasattr(module, "set_per_process_memory_fraction"):
        return
    if device.type == "cuda" and torch.version.hip is None:
        _change_settings("expandable_segments:True")
    _, whole = module.mem_get_info(device)
    share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / whole)
    module.set_per_process_memory_fraction(share, device)


def watch_device_memory(device: torch.device) -> None:
    """Free unused cached memory and reset the peaks."""
    module = _module(device)
    if module is not None:
        module.empty_cache()
        module.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> DevicePeak:
    """Peaks since `watch_device_memory`; zeros where the device has no memory of its own."""
    module = _module(device)
    if module is None:
        return DevicePeak()
    return DevicePeak(
        allocated=int(module.max_memory_allocated(device)), reserved=int(module.max_memory_reserved(device))
    )


def _change_settings(settings: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.9 and later
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def _module(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device)
