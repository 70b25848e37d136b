"""Where memory lies is chosen by rule on invented machines, and carried out and undone on the real one."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.hrm.footprint import ArenaSize, Footprint
from moelight.runtime import machine
from moelight.runtime import topology as numa
from moelight.runtime.topology import MemoryPlace, place_memory, read_plug, read_topology
from tests.runtime.machines import GiB, invent_sys, topology

EVERYWHERE = MemoryPlace(kind="interleaved", nodes=(0,), reason="a test")
refused = numa.why_not_placed()
placed = pytest.mark.skipif(refused is not None, reason=str(refused))


def policy_of(address: int | None = None) -> int:
    """The mode of this thread's policy, or of the memory at ``address``."""
    mode = ctypes.c_int(-1)
    where = (None, 0) if address is None else (ctypes.c_void_p(address), 2)
    assert numa._call("get_mempolicy", ctypes.byref(mode), None, 0, *where) == 0
    return mode.value


def test_one_node_is_left_alone() -> None:
    assert place_memory(topology(4), 4 * GiB, device_node=0) == MemoryPlace(kind="anywhere", reason="one NUMA node")
    assert place_memory(topology(4, nodes=1), 400 * GiB).kind == "anywhere"


def test_the_node_of_the_device_as_long_as_there_is_room(tmp_path: Path) -> None:
    root = invent_sys(tmp_path)
    present, plug = read_topology(sys=root, proc=tmp_path, allowed=range(16)), read_plug("0000:81:00.0", sys=root)
    result = place_memory(present, 40 * GiB, device_node=plug.node)
    assert (result.kind, result.nodes) == ("bound", (1,))
    assert result.reason == "node 1, the device's, has room for 40.0GiB"
    result = place_memory(present, 43 * GiB, device_node=plug.node)  # 44 are available: no room beside
    assert (result.kind, result.nodes) == ("interleaved", (0, 1))
    assert result.reason == "node 1, the device's, has 44.0GiB for 43.0GiB, which is not enough"


def test_without_a_device_the_node_of_all_cores_or_all_nodes(tmp_path: Path) -> None:
    root = invent_sys(tmp_path)
    spread = read_topology(sys=root, proc=tmp_path, allowed=range(16))
    result = place_memory(spread, GiB)
    assert (result.kind, result.nodes, result.reason) == ("interleaved", (0, 1), "no node is nearer than the others")
    together = read_topology(sys=root, proc=tmp_path, allowed=[0, 1, 8])
    result = place_memory(together, GiB)
    assert (result.kind, result.nodes, result.reason) == (
        "bound",
        (0,),
        "node 0, that of all its cores, has room for 1.0GiB",
    )


def test_a_node_without_memory_is_no_home() -> None:
    assert place_memory(topology(4, nodes=2), GiB, device_node=7).kind == "interleaved"


def test_a_refusal_is_said() -> None:
    result = place_memory(topology(4, nodes=2), GiB, device_node=0, refusal="the system does not")
    assert result == MemoryPlace(kind="anywhere", reason="2 NUMA nodes, but the system does not")


@given(nodes=st.integers(1, 4), wanted=st.integers(1, 100 * GiB), node=st.none() | st.integers(0, 5))
def test_places_are_sound(nodes: int, wanted: int, node: int | None) -> None:
    present = topology(4, nodes=nodes)
    result = place_memory(present, wanted, device_node=node)
    values = {node.number for node in present.nodes}
    assert set(result.nodes) <= values and result.reason
    assert (result.kind == "anywhere") == (nodes == 1) == (not result.nodes)
    if result.kind == "bound":
        assert len(result.nodes) == 1 and wanted < 48 * GiB
    if result.kind == "interleaved":
        assert set(result.nodes) == values


@placed
def test_a_policy_holds_for_a_thread_and_is_taken_back() -> None:
    for kind, mode in (("interleaved", 3), ("bound", 1)):
        with pytest.raises(RuntimeError, match="stop"), numa.placing(MemoryPlace(kind=kind, nodes=(0,), reason="")):
            assert policy_of() == mode
            assert "already" in str(numa.why_not_placed())  # somebody's policy stands
            raise RuntimeError("stop")
        assert policy_of() == 0
    with numa.placing(MemoryPlace(kind="anywhere", reason="")):
        assert policy_of() == 0


@placed
def test_memory_is_settled_to_its_last_byte_and_nothing_beside_it() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    numa.settle(EVERYWHERE, start + page, page + 1)
    assert [policy_of(start + k * page) for k in range(4)] == [0, 3, 3, 0]
    numa.settle(MemoryPlace(kind="anywhere", reason=""), start, 4 * page)
    numa.settle(EVERYWHERE, start, 0)
    assert policy_of(start) == 0


@placed
def test_arenas_in_host_memory_lie_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "place_memory", lambda *_, **__: EVERYWHERE)
    footprint = Footprint(
        arenas=(
            ArenaSize(purpose="hidden", tier="device", bytes=3 << 20),
            ArenaSize(purpose="kv", tier="host", bytes=5000),
            ArenaSize(purpose="runtime", tier="host", bytes=1 << 20),
        )
    )
    arenas = machine.allocate_for(machine.find_machine("cpu"), footprint)
    assert {name: arena.numel() for name, arena in arenas.items()} == {"hidden": 3 << 20, "kv": 5000}
    assert {policy_of(arena.data_ptr()) for arena in arenas.values()} == {3}
    assert policy_of(arenas["hidden"].data_ptr() + (3 << 20) - 1) == 3
    arenas["hidden"].fill_(1)
    assert policy_of() == 0


def test_what_is_asked_for_is_all_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(_: object, wanted: int, **__: object) -> MemoryPlace:
        asked.append(wanted)
        return MemoryPlace(kind="anywhere", reason="")

    monkeypatch.setattr(machine, "place_memory", note)
    footprint = Footprint(
        arenas=(ArenaSize(purpose="hidden", tier="device", bytes=100), ArenaSize(purpose="kv", tier="host", bytes=10))
    )
    machine.allocate_for(machine.find_machine("cpu"), footprint)
    machine.allocate_for(machine.find_machine("twin"), footprint)
    monkeypatch.setattr(machine, "pci_slot_of", lambda _: None)
    monkeypatch.setattr(machine, "allocate", lambda *_, **__: {"kv": torch.empty(0)})
    machine.allocate_for(machine.Machine(device=torch.device("meta"), discrete=True), footprint)
    assert asked == [110, 110, 10]
