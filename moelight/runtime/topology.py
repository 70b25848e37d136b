"""Cores and memory of the machine: read from /sys, shared among the lanes of a run, and chosen for its arenas. Without
/sys every processor is a core of one node. Never imports torch, because `doctor` uses this module."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.core.policy import Policy
from moelight.core.schedule import Lane
from moelight.core.units import format_bytes
from moelight.runtime.measure import PROC, entry, processor_quota, text_of

if TYPE_CHECKING:
    import torch

SYS = Path("/sys")
# Copy rate of one thread within host memory; 8 to 10 GB/s were measured.
COPY_BYTES_PER_S = 8e9
# Assumed rate of an unknown link: PCIe 4.0 x16, as far as copies reach.
LINK_BYTES_PER_S = 25e9
# From this many threads on, one core is left unbound for the thread that launches device work.
_CORES_TO_LAUNCH = 4
# Share of a node's memory that is kept free for torch, the driver and other programs.
ROOM = 0.05
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3
_MODES = {"bound": _PREFERRED, "interleaved": _INTERLEAVE}
_MOST_NODES = 1024
_NEW = {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237}
_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": _NEW,
    "riscv64": _NEW,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Numbers of the core's processors (hyperthreads) that this process may use, and its NUMA node."""

    processors: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """A NUMA node with memory; page cache is available memory, because the kernel drops it first."""

    number: int
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PciSlot:
    """PCI slot of a GPU, its NUMA node, and the speed of its link in one direction; None if unknown."""

    address: str
    node: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """``cores`` and ``nodes`` that this process may use; ``quota`` in processors' worth of time (None: no limit)."""

    cores: tuple[Core, ...]
    quota: float | None = None
    nodes: tuple[NumaNode, ...] = ()


def read_topology(*, sys: Path = SYS, proc: Path = PROC, allowed: Iterable[int] | None = None) -> Topology:
    """``allowed``: processor numbers; None: those that this process may use."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    online = _numbers(text_of(sys / "devices/system/node/online"))
    directories = {number: sys / f"devices/system/node/node{number}" for number in online}
    node_of = {
        processor: number for number, path in directories.items() for processor in _numbers(text_of(path / "cpulist"))
    }
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in sorted(allowed):
        siblings = sys / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        cores.setdefault(tuple(_numbers(text_of(siblings))) or (processor,), []).append(processor)
    memory = _numbers(entry(proc / "self/status", "Mems_allowed_list")) or directories
    nodes = [_read_node(number, directories[number] / "meminfo") for number in directories if number in memory]
    return Topology(
        cores=tuple(
            Core(processors=tuple(processors), node=node_of.get(processors[0], 0)) for processors in cores.values()
        ),
        quota=processor_quota(proc=proc),
        nodes=tuple(node for node in nodes if node.total_bytes),
    )


def read_plug(address: str, *, sys: Path = SYS) -> PciSlot:
    """``address`` is written as in ``0000:3b:00.0``."""
    directory = sys / "bus/pci/devices" / address
    node, width = text_of(directory / "numa_node"), text_of(directory / "max_link_width")
    speed = re.match(r"[0-9.]+", text_of(directory / "max_link_speed"))
    rate = None
    if speed is not None and width.isdecimal() and 0 < int(width) <= 32:
        transfers = float(speed[0]) * 1e9
        # Up to 5 GT/s a byte is encoded in ten bits, beyond with 2 of 130 bits lost.
        rate = transfers * int(width) / (10 if transfers < 8e9 else 8 * 130 / 128)
    return PciSlot(address=address, node=int(node) if node.isdecimal() else None, bytes_per_s=rate)


def pci_slot_of(device: torch.device, *, sys: Path = SYS) -> PciSlot | None:
    """The slot is None for the CPU, or where torch does not report it."""
    from moelight.kernels.device import Device

    if Device(device).host:
        return None
    properties = Device(device).properties
    try:
        address = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return read_plug(f"{address[0]:04x}:{address[1]:02x}:{address[2]:02x}.0", sys=sys)


def _read_node(number: int, file: Path) -> NumaNode:
    def size(name: str) -> int:
        kib = entry(file, f"Node {number} {name}").removesuffix(" kB")
        return int(kib) * 1024 if kib.isdecimal() else 0

    return NumaNode(
        number=number,
        total_bytes=size("MemTotal"),
        available_bytes=sum(map(size, ("MemFree", "Active(file)", "Inactive(file)"))),
    )


def _numbers(text: str) -> list[int]:
    """Numbers of a list such as ``0-3,8``; empty for other text."""
    values: list[int] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if bounds is None:
            return []
        values.extend(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """Processor demands of a run.

    Attributes:
        device: a discrete device computes.
        computes: the CPU computes attention or experts (always without a device).
        stages: pages are staged from host memory.
    """

    device: bool
    computes: bool = True
    stages: bool = False
    link_bytes_per_s: float = LINK_BYTES_PER_S
    node: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """``threads`` of a lane, each bound to one of ``places`` (the processors of one core); unbound without places."""

    threads: int
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreShares:
    """Threads of the computing lanes and of staging (None: no such work), with the reason; none is bound to the
    ``free`` processors, which serve launching and reading threads. ``shared``: all computing lanes use ``compute``."""

    compute: Share | None
    staging: Share | None
    free: tuple[int, ...]
    reason: str
    shared: bool

    def of(self, lane: Lane) -> Share | None:
        """Lanes that compute nothing on the CPU have no share."""
        if self.shared:
            return None if lane is Lane.DISK else self.compute
        return {Lane.CPU: self.compute, Lane.STAGE: self.staging}.get(lane)


def demands_of(policy: Policy, plug: PciSlot | None, *, device: bool) -> Demands:
    """Processor demands of a run of ``policy``, with a discrete ``device`` or without one."""
    return Demands(
        device=device,
        computes=not device or policy.attention_device == "cpu" or policy.ffn_device != "gpu",
        stages=device and policy.weights.host > policy.cpu_experts,
        link_bytes_per_s=(None if plug is None else plug.bytes_per_s) or LINK_BYTES_PER_S,
        node=None if plug is None else plug.node,
    )


def share_cores(topology: Topology, demands: Demands, *, at_most: int) -> CoreShares:
    """Assign one thread per core, at most ``at_most``; threads are bound only if the run uses all cores."""
    # the nearest to the device first
    cores = tuple(sorted(topology.cores, key=lambda core: demands.node is not None and core.node != demands.node))
    granted = len(cores) if topology.quota is None else math.ceil(topology.quota)
    threads = max(1, min(len(cores), granted, at_most))
    launching, staging, computing = 0, 0, threads
    if demands.device:
        launching = 1 if threads >= _CORES_TO_LAUNCH else 0
        staging, computing = _split(threads - launching, demands)
    bound = 1 < threads == len(cores) and 0 < staging + computing <= threads - launching
    stagers, others = cores[launching : launching + staging], cores[launching + staging :]
    free = [*cores[:launching], *others[computing:]] if bound else []
    parts = [
        f"{staging} to stage pages" if staging else "",
        f"{computing} to compute" if computing else "",
        "1 core left to launch work" if launching else "work is launched between them",
    ]
    use = f": {', '.join(part for part in parts if part)}" if demands.device else "; reads run between them"
    return CoreShares(
        compute=_share(others, computing, bound=bound),
        staging=_share(stagers, staging, bound=bound),
        free=tuple(processor for core in free for processor in core.processors),
        reason=_count(topology, threads, bound=bound) + use,
        shared=not demands.device,
    )


def _split(threads: int, demands: Demands) -> tuple[int, int]:
    """Threads that stage and that compute: staging gets as many as the link can use, at most a third if the CPU
    computes too, and work that occurs at least one."""
    wanted = max(1, math.ceil(demands.link_bytes_per_s / COPY_BYTES_PER_S)) if demands.stages else 0
    if not demands.computes:
        return min(wanted, threads), 0
    staging = min(wanted, max(1, threads // 3))
    return staging, max(1, threads - staging)


def _share(cores: tuple[Core, ...], threads: int, *, bound: bool) -> Share | None:
    """None for no threads."""
    places = tuple(core.processors for core in cores[:threads]) if bound else ()
    return Share(threads=threads, places=places) if threads else None


def _count(topology: Topology, threads: int, *, bound: bool) -> str:
    cores, count = len(topology.cores), "1 thread" if threads == 1 else f"{threads} threads"
    if threads != cores:
        limited = topology.quota is not None and math.ceil(topology.quota) <= threads
        limit = f"a quota of {topology.quota:g} processors" if limited else "torch's number, OMP_NUM_THREADS"
        count = f"{count} for {cores} cores ({limit})"
    return f"{count}, {'each bound to its core' if bound else 'none bound'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlace:
    """Host memory ``anywhere``, ``bound`` to a node while it has free memory, or ``interleaved`` over ``nodes``."""

    kind: str
    nodes: tuple[int, ...] = ()
    reason: str


def place_memory(
    topology: Topology, wanted_bytes: int, *, device_node: int | None = None, refusal: str | None = None
) -> MemoryPlace:
    """Choose the placement of ``wanted_bytes``: bound to the node of the device, or of all cores, if everything fits
    there with a margin, else interleaved. ``refusal``: why the system places no memory, if so."""
    nodes = {node.number: node for node in topology.nodes}
    if len(nodes) < 2:
        return MemoryPlace(kind="anywhere", reason="one NUMA node")
    if refusal is not None:
        return MemoryPlace(kind="anywhere", reason=f"{len(nodes)} NUMA nodes, but {refusal}")
    whose, of_cores = "the device's", {core.node for core in topology.cores}
    if device_node is None and len(of_cores) == 1:
        whose, device_node = "that of all its cores", of_cores.pop()
    reason = "no node is nearer than the others"
    if device_node is not None and device_node in nodes:
        near, size = nodes[device_node], format_bytes(wanted_bytes)
        if wanted_bytes + ROOM * near.total_bytes <= near.available_bytes:
            reason = f"node {near.number}, {whose}, has room for {size}"
            return MemoryPlace(kind="bound", nodes=(near.number,), reason=reason)
        room = format_bytes(near.available_bytes)
        reason = f"node {near.number}, {whose}, has {room} for {size}, which is not enough"
    return MemoryPlace(kind="interleaved", nodes=tuple(nodes), reason=reason)


def why_not_placed() -> str | None:
    """Why the system places no memory for this thread; None if it does."""
    if platform.system() != "Linux" or platform.machine() not in _NUMBERS:
        return f"memory is not placed on {platform.system()} {platform.machine()}"
    mode = ctypes.c_int(_DEFAULT)
    if code := _call("get_mempolicy", ctypes.byref(mode), None, 0, None, 0):
        return f"the system does not let memory be placed ({os.strerror(code)})"
    return "the user has placed its memory already (numactl)" if mode.value != _DEFAULT else None


@contextmanager
def placing(placement: MemoryPlace) -> Iterator[None]:
    """Place memory that the calling thread, or a thread started within the context, touches first."""
    if placement.kind == "anywhere":
        yield
        return
    _call("set_mempolicy", _MODES[placement.kind], _mask(placement.nodes), _MOST_NODES)
    try:
        yield
    finally:
        _call("set_mempolicy", _DEFAULT, None, 0)


def settle(placement: MemoryPlace, start: int, size: int) -> None:
    """Place the untouched pages of ``size`` bytes from address ``start`` on, whichever thread touches them."""
    if placement.kind != "anywhere" and size > 0:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(first)
        _call("mbind", address, start + size - first, _MODES[placement.kind], _mask(placement.nodes), _MOST_NODES, 0)


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (_MOST_NODES // bits + 1))()
    for node in nodes:
        words[node // bits] |= 1 << node % bits
    return words


def _call(name: str, *arguments: object) -> int:
    """Return 0 or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    number = ctypes.c_long(_NUMBERS[platform.machine()][name])
    return ctypes.get_errno() if libc.syscall(number, *wide) else 0
