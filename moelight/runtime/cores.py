"""Who computes where: the cores of a machine shared among the lanes of a run, and why so.

Pure: topology and demands in, shares out. Refuses to know what lanes do and how threads are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelight.core.policy import Policy
from moelight.core.schedule import Lane
from moelight.runtime.topology import Core, Plug, Topology

# What one thread copies from one place in host memory to another; 8 to 10 GB/s were seen.
COPY_BYTES_PER_S = 8e9
# A link that nothing is known of: PCIe 4.0 with 16 lanes, as far as copies reach.
LINK_BYTES_PER_S = 25e9
# From so many on, the thread that launches work on a device has a core that nobody is bound to.
_CORES_TO_LAUNCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a run asks of the processor: whether a device takes part; with one, whether the CPU computes beside it
    (attention or experts) and whether pages are staged from host memory; what the link carries."""

    device: bool
    computes: bool = True
    stages: bool = False
    link_bytes_per_s: float = LINK_BYTES_PER_S
    node: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """``threads`` of a lane's kernels, each bound to one of ``places`` (processors of one core), or to none."""

    threads: int
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreShares:
    """The threads of computing lanes and of staging (None: that work does not occur), and why.

    ``free`` processors have no thread bound to them: there launching and reading threads find room, though they may run
    anywhere; empty if every processor has one or nobody is bound. ``shared``: all lanes that compute are one.
    """

    compute: Share | None
    staging: Share | None
    free: tuple[int, ...]
    reason: str
    shared: bool

    def of(self, lane: Lane) -> Share | None:
        """What ``lane`` computes with; None for a lane that computes nothing here."""
        if self.shared:
            return None if lane is Lane.DISK else self.compute
        return {Lane.CPU: self.compute, Lane.STAGE: self.staging}.get(lane)


def demands_of(policy: Policy, plug: Plug | None, *, device: bool) -> Demands:
    """What running ``policy`` asks for, on a ``device`` of its own or without one."""
    rate = None if plug is None else plug.bytes_per_s
    return Demands(
        device=device,
        computes=not device or policy.attention_device == "cpu" or policy.ffn_device != "gpu",
        stages=device and policy.weights.host > policy.cpu_experts,
        link_bytes_per_s=rate or LINK_BYTES_PER_S,
        node=None if plug is None else plug.node,
    )


def share_cores(topology: Topology, demands: Demands, *, at_most: int) -> CoreShares:
    """One thread a core, ``at_most`` in all (torch's number). Threads are bound only where the run has all its cores to
    itself: who takes a part of them leaves it to the system which."""
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
    """Threads that stage and that compute: staging as many as the link needs, where both want cores at most a third of
    them, and never none of what occurs."""
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
