"""Invented machines: /sys trees, and topologies without one."""

from __future__ import annotations

from pathlib import Path

from moelight.runtime.topology import Core, NumaNode, Topology

GiB = 1 << 30


def topology(cores: int, *, nodes: int = 1, siblings: int = 1, quota: float | None = None) -> Topology:
    """``cores`` in equal blocks on ``nodes`` of 64 GiB, 48 of them available."""
    return Topology(
        cores=tuple(
            Core(processors=tuple(core + cores * thread for thread in range(siblings)), node=core * nodes // cores)
            for core in range(cores)
        ),
        quota=quota,
        nodes=tuple(NumaNode(number=node, total_bytes=64 * GiB, available_bytes=48 * GiB) for node in range(nodes)),
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def invent_sys(root: Path) -> Path:
    """Two nodes of four cores with two hyperthreads; 32 and 64 GiB; a GPU on node 1; a third node without cores."""
    for node, processors, total_kb, free_kb in (
        (0, "0-3,8-11", 32 << 20, 2 << 20),
        (1, "4-7,12-15", 64 << 20, 40 << 20),
        (2, "", 0, 0),
    ):
        directory = root / f"devices/system/node/node{node}"
        write(directory / "cpulist", processors)
        sizes = {"MemTotal": total_kb, "MemFree": free_kb, "Active(file)": 3 << 20, "Inactive(file)": 1 << 20}
        write(directory / "meminfo", "\n".join(f"Node {node} {key}:  {size} kB" for key, size in sizes.items()))
    write(root / "devices/system/node/online", "0-2")
    for processor in range(16):
        first = processor % 8
        position = root / f"devices/system/cpu/cpu{processor}/topology"
        write(position / "thread_siblings_list", f"{first},{first + 8}")
    card = root / "bus/pci/devices/0000:81:00.0"
    write(card / "numa_node", "1")
    write(card / "max_link_speed", "16.0 GT/s PCIe")
    write(card / "max_link_width", "16")
    return root
