"""The machine that passes run on: the compute device with its lanes, arenas and allocator. The emulated device
(``twin``, `runtime.twin`) replaces a GPU in host memory: the same tiers, transfers and lanes, no accelerator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moelight.core.dtypes import BFLOAT16, FLOAT16, DType, computed_in
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy
from moelight.core.schedule import Lane
from moelight.core.units import format_bytes
from moelight.hrm.footprint import Footprint
from moelight.kernels.device import ACCELERATORS, Device, DevicePeak, count_of, default_accelerator, on_host
from moelight.kernels.threads import ThreadTeam
from moelight.paging.arena import allocate, nothing_left
from moelight.runtime.lanes import InlineLane, LaneRunner, PendingLane, StreamLane, ThreadLane
from moelight.runtime.topology import (
    CoreShares,
    demands_of,
    pci_slot_of,
    place_memory,
    placing,
    read_topology,
    settle,
    share_cores,
    why_not_placed,
)
from moelight.runtime.twin import EmulatedEvent, EmulatedMemory, EmulatedStream, TwinHabits

DEVICES = ("auto", "cpu", *ACCELERATORS, "twin")
LANE_KINDS = ("auto", "inline", "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """``device`` holds the dense weights and the ring; ``discrete`` if a link separates it from host memory; ``bf16``
    if it computes in bfloat16 (NVIDIA from compute capability 8.0 on); ``habits`` and ``memory`` of a twin."""

    device: torch.device
    discrete: bool
    twin: bool = False
    bf16: bool = True
    habits: TwinHabits = field(default_factory=TwinHabits, compare=False)
    memory: EmulatedMemory | None = field(default=None, compare=False)

    @property
    def compiles(self) -> bool:
        """True if kernels are compiled or loaded at their first launch."""
        return not Device(self.device).host

    def native_dtype(self, dtype: DType) -> DType:
        """``dtype``, or float16 in mixed precision where the device has no bfloat16."""
        return computed_in(FLOAT16, dtype) if dtype == BFLOAT16 and not self.bf16 else dtype

    def synchronize(self) -> None:
        """Wait for everything launched on the device, on whichever stream."""
        Device(self.device).synchronize()

    def device_memory_bytes(self) -> int:
        """Free device memory, the driver's context apart; raises ConfigError for a twin without ``memory``."""
        if self.memory is not None:
            return self.memory.limit - self.memory.used
        device = Device(self.device)
        if device.host:
            raise ConfigError("--device-memory is needed for a twin: it has no memory of its own")
        device.free_cache()  # what an earlier engine of this process left
        free, _ = device.memory()
        return free


def find_machine(name: str) -> Machine:
    """The machine called ``name``: one of `DEVICES`, a card as in ``cuda:1``, or a twin with `TwinHabits` as in
    ``twin:fp16,link=12GB/s``. Raises ConfigError if the device is absent."""
    kind, _, index = name.partition(":")
    if kind == "twin":
        habits = TwinHabits.parse(index) if index else TwinHabits()
        memory = EmulatedMemory(habits.memory_bytes) if habits.memory_bytes else None
        bf16 = not habits.fp16
        return Machine(device=torch.device("cpu"), discrete=True, twin=True, bf16=bf16, habits=habits, memory=memory)
    if kind not in DEVICES or (index and (kind not in ACCELERATORS or not index.isdecimal())):
        raise ConfigError(f"--device {name!r} is not one of {', '.join(DEVICES)}, or a card as in cuda:1")
    if kind == "auto":
        accelerator = default_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
    if kind == "cpu":
        return Machine(device=torch.device("cpu"), discrete=False)
    count = count_of(kind)
    if int(index or 0) >= count:
        available = f"{count:,} {kind} device{'s' * (count > 1)}" if count else "no such device"
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees {available} on this machine")
    device = torch.device(kind, int(index or 0))
    return Machine(device=device, discrete=True, bf16=Device(device).bfloat16)


def open_lanes(
    machine: Machine, kind: str = "auto", shares: CoreShares | None = None, *, exchanges: bool = False
) -> dict[Lane, LaneRunner]:
    """A runner for every lane, with the threads of ``shares``; for ``exchanges`` with other ranks if there are any.
    ``auto``: streams; without a device the calling thread computes and exchanges."""
    if kind not in LANE_KINDS:
        raise ConfigError(f"lanes {kind!r} is not one of {', '.join(LANE_KINDS)}")
    teams = {} if shares is None else teams_of(shares)
    with_others = (Lane.EXCHANGE,) if exchanges else ()
    streams = (Lane.H2D, Lane.D2H, Lane.DEVICE, *with_others) if machine.discrete else ()
    hosts = (Lane.DISK, Lane.STAGE, Lane.CPU) if machine.discrete else (Lane.DISK, Lane.CPU, *with_others)
    lanes: dict[Lane, LaneRunner] = {}
    for lane in hosts + streams:
        team, calling = teams.get(lane), lane in (Lane.CPU, Lane.EXCHANGE) and not machine.discrete
        if lane in streams and not machine.twin:
            lanes[lane] = StreamLane.on(machine.device, str(lane))
        elif lane in streams and kind == "auto":
            lanes[lane] = StreamLane(str(lane), EmulatedStream(machine.memory), EmulatedEvent, team)
        elif kind == "inline" or (kind == "auto" and calling):
            lanes[lane] = InlineLane(team)
        else:
            lanes[lane] = PendingLane(str(lane)) if lane is Lane.DISK else ThreadLane(str(lane), team)
    return lanes


def teams_of(shares: CoreShares) -> dict[Lane, ThreadTeam]:
    """Thread team of each computing lane; lanes with the same share take turns with one team."""
    lane_shares = {lane: share for lane in Lane if (share := shares.of(lane)) is not None}
    made = {share: ThreadTeam(share.threads, share.places) for share in dict.fromkeys(lane_shares.values())}
    return {lane: made[share] for lane, share in lane_shares.items()}


def cores_for(machine: Machine, policy: Policy) -> CoreShares:
    """Assignment of this process's cores to the lanes of a run of ``policy``."""
    device = machine.discrete and not machine.twin
    plug = pci_slot_of(machine.device) if device else None
    return share_cores(read_topology(), demands_of(policy, plug, device=device), at_most=torch.get_num_threads())


def allocate_for(machine: Machine, footprint: Footprint, *, pinned_pages: bool = False) -> dict[str, Tensor]:
    """Allocate the arenas of ``footprint`` (`paging.arena.allocate`), those in host memory on suitable NUMA nodes."""
    plug = pci_slot_of(machine.device)
    tiers = ("host",) if machine.compiles else ("host", "device")
    placement = place_memory(
        read_topology(),
        sum(footprint.total(tier) for tier in tiers),
        device_node=None if plug is None else plug.node,
        refusal=why_not_placed(),
    )
    with placing(placement):  # pinned memory is touched at allocation, the rest later by any thread
        arenas = allocate(footprint, machine.device, pinned_pages=pinned_pages)
    for arena in arenas.values():
        if on_host(arena):
            settle(placement, arena.data_ptr(), arena.numel())
    if machine.memory is not None:
        for region in (
            planned for planned in footprint.arenas if planned.tier == "device" and planned.purpose in arenas
        ):
            try:
                machine.memory.hold(arenas[region.purpose], region.bytes)
            except torch.OutOfMemoryError:
                raise nothing_left(footprint, region) from None
    return arenas


def device_peak(machine: Machine) -> DevicePeak:
    """Peaks since `Device.watch_memory`; zeros where the device has no memory of its own."""
    if machine.memory is not None:
        return DevicePeak(allocated=machine.memory.peak, reserved=machine.memory.peak)
    return Device(machine.device).memory_peak()


def out_of_device_memory(machine: Machine, limit_bytes: int) -> BudgetError:
    """The error of a pass to which the allocator refused memory; ``limit_bytes``: what it may take, 0 if all."""
    peak, limit = device_peak(machine), limit_bytes or machine.habits.memory_bytes
    allowed = f"of {format_bytes(limit)} " if limit else ""
    return BudgetError(
        f"{'twin' if machine.twin else machine.device}: a pass needs more device memory than is left: tensors took "
        f"{format_bytes(peak.allocated)} and the allocator {format_bytes(peak.reserved)} {allowed}at most; lower "
        "--device-memory, so that the plan leaves more free, or batch_size or micro_batch_size of the policy. Finished "
        "rows are kept",
        tier="device",
        needed_bytes=peak.reserved,
    )
