"""Hardware topology: cores, their hyperthreads, NUMA nodes with their memory, and the PCI slot of a GPU.

Reads /sys as Linux provides it; elsewhere every processor is a core of one node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.runtime.measure import PROC, processor_quota

if TYPE_CHECKING:
    import torch

SYS = Path("/sys")


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """One core: the numbers of its processors (hyperthreads) that this process may use, and its NUMA node."""

    processors: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """One NUMA node with memory. ``available_bytes``: free memory and page cache, which the kernel drops first."""

    number: int
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PciSlot:
    """PCI slot of a GPU: its NUMA node, and the bytes/s of its link in one direction; None if unknown."""

    address: str
    node: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """``cores`` that this process may use, ``nodes`` whose memory it may use, and the ``quota`` of its control group in
    processors' worth of time (None: no limit)."""

    cores: tuple[Core, ...]
    quota: float | None = None
    nodes: tuple[NumaNode, ...] = ()


def read_topology(*, sys: Path = SYS, proc: Path = PROC, allowed: Iterable[int] | None = None) -> Topology:
    """Topology of this process. ``allowed``: processor numbers; by default those of this process."""
    processors = sorted(_own_processors() if allowed is None else allowed)
    numbers = _node_numbers(sys)
    node_of = {each: number for number in numbers for each in _listed(_node(sys, number) / "cpulist")}
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in processors:
        siblings = _listed(sys / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        cores.setdefault(tuple(siblings) or (processor,), []).append(processor)
    memory = set(_numbers(_status(proc, "Mems_allowed_list"))) or set(numbers)
    return Topology(
        cores=tuple(Core(processors=tuple(own), node=node_of.get(own[0], 0)) for own in cores.values()),
        quota=processor_quota(proc=proc),
        nodes=tuple(node for number in numbers if number in memory if (node := _read_node(sys, number)).total_bytes),
    )


def read_plug(address: str, *, sys: Path = SYS) -> PciSlot:
    """Slot of the device at PCI ``address`` (``0000:3b:00.0``)."""
    directory = sys / "bus/pci/devices" / address
    node, width = _text(directory / "numa_node"), _text(directory / "max_link_width")
    speed = re.match(r"[0-9.]+", _text(directory / "max_link_speed"))
    rate = None
    if speed is not None and width.isdecimal() and 0 < int(width) <= 32:
        transfers = float(speed[0]) * 1e9
        # Up to 5 GT/s a byte is encoded in ten bits, beyond with 2 of 130 bits lost.
        rate = transfers * int(width) / (10 if transfers < 8e9 else 8 * 130 / 128)
    return PciSlot(address=address, node=int(node) if node.isdecimal() else None, bytes_per_s=rate)


def pci_slot_of(device: torch.device, *, sys: Path = SYS) -> PciSlot | None:
    """Slot of torch's ``device``; None for the CPU, or where torch does not report the slot."""
    if device.type == "cpu":
        return None
    import torch

    properties = torch.get_device_module(device).get_device_properties(device)
    try:
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return read_plug(f"{place[0]:04x}:{place[1]:02x}:{place[2]:02x}.0", sys=sys)


def _own_processors() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _node(sys: Path, number: int) -> Path:
    return sys / f"devices/system/node/node{number}"


def _node_numbers(sys: Path) -> list[int]:
    return _listed(sys / "devices/system/node/online")


def _read_node(sys: Path, number: int) -> NumaNode:
    sizes = {}
    for line in _text(_node(sys, number) / "meminfo").splitlines():
        found = re.match(r"Node \d+ (\S+):\s+(\d+) kB", line)
        if found is not None:
            sizes[found[1]] = int(found[2]) * 1024
    return NumaNode(
        number=number,
        total_bytes=sizes.get("MemTotal", 0),
        available_bytes=sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)")),
    )


def _status(proc: Path, name: str) -> str:
    for line in _text(proc / "self/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def _listed(path: Path) -> list[int]:
    return _numbers(_text(path))


def _numbers(text: str) -> list[int]:
    """Numbers of a list such as ``0-3,8``; empty for any other text."""
    found: list[int] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if bounds is None:
            return []
        found.extend(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
