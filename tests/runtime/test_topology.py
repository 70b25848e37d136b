"""Cores, nodes and plugs are read from invented /sys trees; the real machine's are plausible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moelight.runtime.topology import Core, PciSlot, pci_slot_of, read_plug, read_topology
from tests.runtime.machines import GiB, invent_sys, write


def test_cores_are_groups_of_hyperthreads_on_their_node(tmp_path: Path) -> None:
    result = read_topology(sys=invent_sys(tmp_path), proc=tmp_path, allowed=range(16))
    assert len(result.cores) == 8 and result.quota is None
    assert result.cores[0] == Core(processors=(0, 8), node=0)
    assert result.cores[7] == Core(processors=(7, 15), node=1)


def test_only_what_the_process_may_use_counts(tmp_path: Path) -> None:
    result = read_topology(sys=invent_sys(tmp_path), proc=tmp_path, allowed={9, 2, 12, 4})
    assert result.cores == (Core(processors=(2,)), Core(processors=(4, 12), node=1), Core(processors=(9,)))


def test_nodes_have_their_memory_and_files_make_room(tmp_path: Path) -> None:
    result = read_topology(sys=invent_sys(tmp_path), proc=tmp_path, allowed=range(16))
    sizes = [(node.number, node.total_bytes, node.available_bytes) for node in result.nodes]
    assert sizes == [(0, 32 * GiB, 6 * GiB), (1, 64 * GiB, 44 * GiB)]  # node 2 has none


def test_nodes_that_a_cpuset_forbids_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "self/status", "Name:\tx\nMems_allowed_list:\t1-2")
    result = read_topology(sys=invent_sys(tmp_path), proc=tmp_path, allowed=range(16))
    assert [node.number for node in result.nodes] == [1]


def test_without_sys_every_processor_is_a_core(tmp_path: Path) -> None:
    result = read_topology(sys=tmp_path, proc=tmp_path, allowed=[3, 1])
    assert result.cores == (Core(processors=(1,)), Core(processors=(3,)))
    assert result.nodes == ()


@pytest.mark.parametrize("garbage", ["x", "1-", "-", "0-x", ""])
def test_a_list_that_is_none_is_ignored(tmp_path: Path, garbage: str) -> None:
    root = invent_sys(tmp_path)
    write(root / "devices/system/cpu/cpu0/topology/thread_siblings_list", garbage)
    write(root / "devices/system/node/online", garbage)
    result = read_topology(sys=root, proc=tmp_path, allowed=[0])
    assert result.cores == (Core(processors=(0,)),) and result.nodes == ()


def test_the_real_machine() -> None:
    result = read_topology()
    assert {processor for core in result.cores for processor in core.processors} == os.sched_getaffinity(0)
    assert all(0 < node.available_bytes <= node.total_bytes for node in result.nodes)


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [
        ("16.0 GT/s PCIe", "16", 31.5e9),
        ("32.0 GT/s PCIe", "8", 31.5e9),
        ("5.0 GT/s PCIe", "16", 8e9),
        ("Unknown", "255", None),
        ("16.0 GT/s PCIe", "0", None),
        ("", "", None),
    ],
)
def test_a_plug_says_node_and_rate(tmp_path: Path, speed: str, width: str, rate: float | None) -> None:
    root = invent_sys(tmp_path)
    card = root / "bus/pci/devices/0000:81:00.0"
    write(card / "max_link_speed", speed)
    write(card / "max_link_width", width)
    result = read_plug("0000:81:00.0", sys=root)
    assert result.node == 1
    assert result.bytes_per_s == (None if rate is None else pytest.approx(rate, rel=0.01))


def test_a_plug_that_nobody_knows(tmp_path: Path) -> None:
    root = invent_sys(tmp_path)
    assert read_plug("0000:00:00.0", sys=root) == PciSlot(address="0000:00:00.0")
    write(root / "bus/pci/devices/0000:81:00.0/numa_node", "-1")
    assert read_plug("0000:81:00.0", sys=root).node is None
    assert pci_slot_of(torch.device("cpu"), sys=root) is None


@pytest.mark.gpu
def test_a_real_device_is_plugged_in_somewhere() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    result = pci_slot_of(torch.device(device.type, 0))
    assert result is None or Path("/sys/bus/pci/devices", result.address).is_dir()
