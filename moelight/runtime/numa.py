"""Placement of host memory on NUMA nodes: the choice, which is pure, and the system calls that apply it.

On a machine with one node, or where the system refuses, the operating system places memory: a run is then slower, not
wrong. Never imports torch, because `doctor` uses this module.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moelight.core.units import format_bytes
from moelight.runtime.topology import Topology

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
class MemoryPlace:
    """Placement of host memory, with the reason: ``anywhere``, ``bound`` to one of ``nodes`` (while the node has free
    memory), or ``interleaved`` over all ``nodes``."""

    kind: str
    nodes: tuple[int, ...] = ()
    reason: str


def place_memory(
    topology: Topology, wanted_bytes: int, *, device_node: int | None = None, refusal: str | None = None
) -> MemoryPlace:
    """Choose the placement of ``wanted_bytes`` of host memory.

    Memory is bound to the node of the device, or of all cores, if everything fits there with a margin, else
    interleaved. ``refusal``: the reason why the system does not place memory; None if it does.
    """
    nodes = {node.number: node for node in topology.nodes}
    if len(nodes) < 2:
        return MemoryPlace(kind="anywhere", reason="one NUMA node")
    if refusal is not None:
        return MemoryPlace(kind="anywhere", reason=f"{len(nodes)} NUMA nodes, but {refusal}")
    whose, home = "the device's", device_node
    if home is None:
        whose, of_cores = "that of all its cores", {core.node for core in topology.cores}
        home = of_cores.pop() if len(of_cores) == 1 else None
    everywhere = tuple(nodes)
    if home not in nodes:
        return MemoryPlace(kind="interleaved", nodes=everywhere, reason="no node is nearer than the others")
    near, size = nodes[home], format_bytes(wanted_bytes)
    if wanted_bytes + ROOM * near.total_bytes <= near.available_bytes:
        return MemoryPlace(kind="bound", nodes=(home,), reason=f"node {home}, {whose}, has room for {size}")
    room = format_bytes(near.available_bytes)
    return MemoryPlace(
        kind="interleaved", nodes=everywhere, reason=f"node {home}, {whose}, has {room} for {size}, which is not enough"
    )


def why_not_placed() -> str | None:
    """Reason why the system does not place memory for this thread; None if it does."""
    if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
        return f"memory is not placed on {platform.system()} {platform.machine()}"
    mode = ctypes.c_int(_DEFAULT)
    if code := _call("get_mempolicy", ctypes.byref(mode), None, 0, None, 0):
        return f"the system does not let memory be placed ({os.strerror(code)})"
    return "the user has placed its memory already (numactl)" if mode.value != _DEFAULT else None


@contextmanager
def placing(place: MemoryPlace) -> Iterator[None]:
    """Place memory that the calling thread touches first within the context at ``place``. Threads started within
    inherit the placement."""
    if place.kind == "anywhere":
        yield
        return
    _call("set_mempolicy", _MODES[place.kind], _mask(place.nodes), _MOST_NODES)
    try:
        yield
    finally:
        _call("set_mempolicy", _DEFAULT, None, 0)


def settle(place: MemoryPlace, start: int, size: int) -> None:
    """Place the untouched pages of the ``size`` bytes from address ``start`` on at ``place``, whichever thread touches
    them."""
    if place.kind != "anywhere" and size > 0:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(first)
        _call("mbind", address, start + size - first, _MODES[place.kind], _mask(place.nodes), _MOST_NODES, 0)


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (_MOST_NODES // bits + 1))()
    for node in nodes:
        words[node // bits] |= 1 << node % bits
    return words


def _call(name: str, *arguments: object) -> int:
    """Return 0, or the errno of the failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    number = ctypes.c_long(_NUMBERS[platform.machine()][name])
    return ctypes.get_errno() if libc.syscall(number, *wide) else 0
