"""Identity of this machine, as far as its speed depends on it: processor, threads, GPUs, versions.

Imports torch only where an accelerator may be present.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.core.errors import ConfigError
from moelight.kernels import native
from moelight.runtime.measure import processor_name

if TYPE_CHECKING:
    from moelight.runtime.machine import Machine

# Device files under /dev of the drivers of NVIDIA, AMD, WSL and Intel.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*")


def may_have_accelerator() -> bool:
    """True if an accelerator may be present; on Linux, only if a driver has created a device file."""
    return not sys.platform.startswith("linux") or any(
        True for pattern in _DEVICE_FILES for _ in Path("/dev").glob(pattern)
    )


def accelerators(device: str) -> tuple[str, ...]:
    """Names of the accelerators selected by ``device`` (``auto``, ``cpu``, ``cuda``, ``xpu``); none for a CPU.

    Raises:
        ConfigError: no such device here, or the emulated device.
    """
    if device == "cpu" or (device == "auto" and not may_have_accelerator()):
        return ()
    import torch

    from moelight.runtime.machine import find_machine

    machine = find_machine(device)
    if machine.twin:
        raise ConfigError(f"--device {device}: a twin has no speed of its own; name cpu, cuda or xpu")
    if not machine.discrete:
        return ()
    backend = torch.get_device_module(machine.device)
    return tuple(str(backend.get_device_properties(index).name) for index in range(backend.device_count()))


def fingerprint(device: str) -> str:
    """Short hash of this machine and these versions; other hardware or another release has another one."""
    facts = (
        processor_name(),
        usable_threads(),
        os.environ.get("OMP_NUM_THREADS", ""),
        *accelerators(device),
        _version("torch"),
        _version("moelight"),
        native.reason(),
    )
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def describe(machine: Machine) -> str:
    """Description of the machine in one clause, for the notes of a profile."""
    import torch

    gpus = accelerators(machine.device.type)
    parts = [processor_name(), f"{torch.get_num_threads()} threads"]
    parts += [f"{len(gpus)} x {gpus[0]}"] if gpus else []
    return ", ".join([*parts, f"torch {_version('torch')}", f"moelight {_version('moelight')}"])


def usable_threads() -> int:
    """Number of hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
