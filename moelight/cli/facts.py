"""Facts of ``moelight doctor``: collected as plain values, printed as tables.

Reasons are those of the modules that make the choices.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from moelight import __version__
from moelight.cli.machine_facts import machine_facts, machine_lines
from moelight.core.units import format_bytes
from moelight.kernels import native
from moelight.kernels.serving import serving
from moelight.runtime import measure
from moelight.runtime.topology import PciSlot, pci_slot_of

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
INSTALL_HINT = (
    "install a C++20 compiler (g++ 11 or clang 14 will do), "
    "then install moelight again: pip install --force-reinstall --no-deps ."
)


def facts(model: Path | None = None) -> dict[str, Any]:
    """Return all facts of ``moelight doctor``, ready for JSON. Sizes in bytes. ``model``: a directory of weights."""
    torch = _torch()
    plugs = [PciSlot(**plug) for device in torch["devices"] if (plug := device["plug"]) is not None]
    return {
        "moelight": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "processor": _processor(),
        "memory": {
            "physical_bytes": measure.physical_bytes(),
            "limit_bytes": measure.memory_limit_bytes(),
            "available_bytes": measure.available_bytes(),
        },
        **machine_facts(torch["threads"], plugs, model),
        "torch": torch,
        "extension": {"available": native.available(), "reason": native.reason()},
        "kernels": [
            {"operation": row.operation, "implementation": row.implementation, "reason": row.reason}
            for row in serving()
        ],
    }


def print_facts(found: dict[str, Any]) -> None:
    """Print the facts ``found`` as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    about = Table.grid(padding=(0, 2))
    for name, value in _about(found):
        about.add_row(name, value)
    console.print(about)
    kernels = Table("operation", "served by", "why", title="kernels", title_justify="left", header_style="bold")
    for row in found["kernels"]:
        kernels.add_row(row["operation"], row["implementation"], row["reason"])
    console.print()
    console.print(kernels)
    if not found["extension"]["available"]:
        console.print(f"The native kernels are missing ({found['extension']['reason']}). Everything runs on torch's.")
        console.print(f"To have them: {INSTALL_HINT}", soft_wrap=True)


def _about(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    libraries = ", ".join(f"{name} {version}" for name, version in found["libraries"].items() if version)
    yield "moelight", f"{found['moelight']}  (Python {found['python']}, {found['platform']})"
    yield "libraries", libraries
    processor = found["processor"]
    yield "processor", processor["name"]
    cores = found["cores"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g} processors"
    usable = f"{cores['usable']} cores, {cores['processors']} threads, {quota}"
    yield "", f"{processor['cores']} cores, {processor['threads']} threads; usable here: {usable}"
    sets = ", ".join(name for name, there in processor["instructions"].items() if there)
    yield "instructions", sets or f"{found['torch']['cpu_capability']}, as torch sees it"
    memory = {name: format_bytes(size) for name, size in found["memory"].items()}
    yield "memory", f"{memory['physical_bytes']} physical, {memory['available_bytes']} available"
    if found["memory"]["limit_bytes"] < found["memory"]["physical_bytes"]:
        yield "", f"{memory['limit_bytes']} is the limit of this control group"
    yield from machine_lines(found)
    torch = found["torch"]
    if torch["fault"]:
        yield "torch", f"does not load: {torch['fault']}"
    else:
        yield "torch", f"{torch['threads']} threads, CPU capability {torch['cpu_capability']}"
    for device in torch["devices"]:
        yield "device", f"{device['id']}: {device['name']}, {format_bytes(device['total_bytes'])}"
    if not torch["devices"] and not torch["fault"]:
        yield "device", "cpu only: torch sees no accelerator"
    yield "extension", found["extension"]["reason"]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": measure.processor_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": usable,
        "instructions": native.cpu_features(),
    }


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {"fault": None, "threads": None, "cpu_capability": None, "devices": []}
    try:
        import torch
    except (ImportError, OSError) as error:
        return {**found, "fault": " ".join(str(error).split())}
    found["threads"] = torch.get_num_threads()
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        backend = torch.get_device_module(accelerator)
        for index in range(torch.accelerator.device_count()):
            properties = backend.get_device_properties(index)
            found["devices"].append(
                {
                    "id": f"{accelerator.type}:{index}",
                    "name": properties.name,
                    "total_bytes": properties.total_memory,
                    "plug": None
                    if (plug := pci_slot_of(torch.device(accelerator.type, index))) is None
                    else asdict(plug),
                }
            )
    return found
