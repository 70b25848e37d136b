"""Assignment of a machine's cores to the lanes of a run, with the reason for it.

Pure functions of topology and demands. Does not depend on the work of lanes or on how threads are created.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelight.core.policy import Policy
from moelight.core.schedule import Lane
from moelight.runtime.topology import Core, PciSlot, Topology

# Copy rate of one thread within host memory; 8 to 10 GB/s were measured.
COPY_BYTES_PER_S = 8e9
# Assumed rate of an unknown link: PCIe 4.0 x16, as far as copies reach.
LINK_BYTES_PER_S = 25e9
# From this many threads on, one core is left unbound for the thread that launches device work.
_CORES_TO_LAUNCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """Processor demands of a run.

    Attributes:
        device: a discrete device computes.
        computes: the CPU computes attention or experts (always without a device).
        stages: pages are staged from host memory.
        link_bytes_per_s: rate of the link to the device.
        node: NUMA node of the device; None if unknown.
    """

    device: bool
    computes: bool = True
    stages: bool = False
    link_bytes_per_s: float = LINK_BYTES_PER_S
    node: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """``threads`` of a lane's kernels, each bound to one of ``places`` (the processors of one core); unbound without
    places."""

    threads: int
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreShares:
    """Threads of the computing lanes and of staging (None: no such work), with the reason.

    No thread is bound to the ``free`` processors, so launching and reading threads find time there; empty if every
    processor has a bound thread or no thread is bound. ``shared``: all computing lanes use ``compute``.
    """

    compute: Share | None
    staging: Share | None
    free: tuple[int, ...]
    reason: str
    shared: bool

    def of(self, lane: Lane) -> Share | None:
        """Threads of ``lane``; None for a lane that computes nothing on the CPU."""
        if self.shared:
            return None if lane is Lane.DISK else self.compute
        return {Lane.CPU: self.compute, Lane.STAGE: self.staging}.get(lane)


def demands_of(policy: Policy, plug: PciSlot | None, *, device: bool) -> Demands:
    """Processor demands of a run of ``policy``, with a discrete ``device`` or without one."""
    rate = None if plug is None else plug.bytes_per_s
    return Demands(
        device=device,
        computes=not device or policy.attention_device == "cpu" or policy.ffn_device != "gpu",
        stages=device and policy.weights.host > policy.cpu_experts,
        link_bytes_per_s=rate or LINK_BYTES_PER_S,
        node=None if plug is None else plug.node,
    )


def share_cores(topology: Topology, demands: Demands, *, at_most: int) -> CoreShares:
    """Assign one thread per core, ``at_most`` in all (torch's thread count).

    Threads are bound only if the run uses all cores; otherwise the operating system places them.
    """
    cores = _nearest_first(topology.cores, demands.node)
    granted = len(cores) if topology.quota is None else math.ceil(topology.quota)
    threads = max(1, min(len(cores), granted, at_most))
    bound = 1 < threads == len(cores)
    if not demands.device:
        return CoreShares(
            compute=_share(cores, threads, bound=bound),
            staging=None,
            free=(),
            reason=f"{_count(topology, threads)}, {_binding(bound)}; reads run between them",
            shared=True,
        )
    launching = 1 if threads >= _CORES_TO_LAUNCH else 0
    staging, computing = _split(threads - launching, demands)
    bound = bound and 0 < staging + computing <= threads - launching
    stagers, others = cores[launching : launching + staging], cores[launching + staging :]
    free = [*cores[:launching], *others[computing:]] if bound else []
    parts = [
        f"{staging} to stage pages" if staging else "",
        f"{computing} to compute" if computing else "",
        "1 core left to launch work" if launching else "work is launched between them",
    ]
    split = ", ".join(part for part in parts if part)
    return CoreShares(
        compute=_share(others, computing, bound=bound) if computing else None,
        staging=_share(stagers, staging, bound=bound) if staging else None,
        free=tuple(each for core in free for each in core.processors),
        reason=f"{_count(topology, threads)}, {_binding(bound)}: {split}",
        shared=False,
    )


def _split(threads: int, demands: Demands) -> tuple[int, int]:
    """Numbers of threads that stage and that compute.

    Staging gets as many threads as the link can use, at most a third if the CPU computes too; work that occurs gets at
    least one thread.
    """
    wanted = max(1, math.ceil(demands.link_bytes_per_s / COPY_BYTES_PER_S)) if demands.stages else 0
    if not demands.computes:
        return min(wanted, threads), 0
    staging = min(wanted, max(1, threads // 3))
    return staging, max(1, threads - staging)


def _share(cores: tuple[Core, ...], threads: int, *, bound: bool) -> Share:
    return Share(threads=threads, places=tuple(core.processors for core in cores[:threads]) if bound else ())


def _nearest_first(cores: tuple[Core, ...], node: int | None) -> tuple[Core, ...]:
    return tuple(sorted(cores, key=lambda core: node is not None and core.node != node))


def _count(topology: Topology, threads: int) -> str:
    cores = len(topology.cores)
    if threads == cores:
        return _some(threads, "thread")
    said = "torch's number, OMP_NUM_THREADS"
    if topology.quota is not None and math.ceil(topology.quota) <= threads:
        said = f"a quota of {topology.quota:g} processors"
    return f"{_some(threads, 'thread')} for {cores} cores ({said})"


def _binding(bound: bool) -> str:
    return "each bound to its core" if bound else "none bound"


def _some(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
