"""What one machine can do: how much each tier holds, what each link carries, how fast each unit computes.

Knows the YAML of ``hardware_profiles/``. Refuses to know models, and what anything costs (floor 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moelight.core.errors import ConfigError
from moelight.core.policy import PROCESSORS, TIERS
from moelight.profiles.efficiency import Surface
from moelight.profiles.files import Node, find_profile, read_yaml
from moelight.profiles.quantities import bandwidth_bytes_per_s, capacity_bytes, flops_per_s

T = TypeVar("T")
_TO = "_to_"

# Single measured figures: bytes per second, seconds, or a share of full speed.
MEASURED = {
    "host_copy": "bytes/s that one copy inside host memory moves (each byte is read and written)",
    "host_to_device_pageable": "bytes/s of a transfer from memory that is not pinned",
    "host_to_device_under_attention": "bytes/s of a pinned transfer while the CPU attends",
    "disk_cached": "bytes/s of a read that the page cache serves",
    "cpu_elementwise": "bytes/s that norms and activations touch",
    "gpu_elementwise": "bytes/s that norms and activations touch",
    "cpu_task": "seconds one act of a micro-batch takes on the CPU beside its arithmetic",
    "gpu_launch": "seconds one kernel launch takes",
    "transfer": "seconds one transfer takes beside its bytes",
    "cpu_under_disk": "share of its speed the CPU keeps while the disk lane reads at full rate",
}
# Measured speeds by size of work. linear, experts: flop/s by rows, for weights of some bytes; attention: bytes/s of
# keys and values read by context; prefill: flop/s by prompt tokens (4 x head_dim flop per head and attended pair).
EFFICIENCY = {
    f"{unit}_{work}": "bytes/s" if work == "attention" else "flop/s"
    for unit in PROCESSORS
    for work in ("linear", "experts", "attention", "prefill")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One memory: ``device`` (of one GPU), ``host`` or ``disk``."""

    name: str
    capacity_bytes: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What carries bytes from tier ``src`` to tier ``dst``."""

    src: str
    dst: str
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """``count`` equal units of kind ``name`` (``cpu`` or ``gpu``), each of ``peak_flops`` flop per second."""

    name: str
    count: int
    peak_flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """One machine. ``source`` says where its figures come from; ``sources`` does so for single ones, by dotted key.

    ``measured`` (see `MEASURED`) and ``efficiency`` (see `EFFICIENCY`) are there where somebody measured them.
    """

    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    processors: tuple[Processor, ...]
    source: str = ""
    sources: tuple[tuple[str, str], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[Surface, ...] = ()

    def tier(self, name: str) -> Tier | None:
        """The tier called ``name``, where the machine has it."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def link(self, src: str, dst: str) -> Link | None:
        """The link from ``src`` to ``dst``, where the machine has it."""
        return next((link for link in self.links if (link.src, link.dst) == (src, dst)), None)

    def processor(self, name: str) -> Processor | None:
        """The units called ``name``, where the machine has them."""
        return next((unit for unit in self.processors if unit.name == name), None)

    def figure(self, name: str) -> float | None:
        """The figure of `MEASURED` called ``name``, where it was measured."""
        return dict(self.measured).get(name)

    def surface(self, name: str) -> Surface | None:
        """The speeds of `EFFICIENCY` called ``name``, where they were measured."""
        return next((surface for surface in self.efficiency if surface.name == name), None)

    def source_of(self, key: str) -> str:
        """Where the figure at the dotted ``key`` (``tiers.device.capacity``) comes from."""
        return dict(self.sources).get(key, self.source)


def load_hardware_profile(name_or_path: str) -> HardwareProfile:
    """The machine called so, or described in the YAML file at that path.

    Raises:
        ConfigError: no such machine (the nearest is named), or the file breaks a rule (file and line are named).
    """
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    return read_hardware_profile(Path(name_or_path) if is_path else find_profile("hardware", name_or_path))


def read_hardware_profile(path: Path) -> HardwareProfile:
    """The machine that the YAML file ``path`` describes.

    Raises:
        ConfigError: an unknown or missing key, a wrong unit, tiers and processors that do not fit; names file, line.
    """
    root = read_yaml(path)
    fields = root.fields("source", "links", required=("name", "tiers", "processors"))
    sources: dict[str, str] = {}
    tiers = tuple(_tier(name, node, sources) for name, node in fields["tiers"].fields(*TIERS).items())
    links = fields["links"].entries().items() if "links" in fields else ()
    units = fields["processors"].fields(*PROCESSORS).items()
    profile = HardwareProfile(
        name=fields["name"].text(),
        tiers=tiers,
        links=tuple(_link(name, node, tiers, sources) for name, node in links),
        processors=tuple(_processor(name, node, sources) for name, node in units),
        source=fields["source"].text() if "source" in fields else "",
        sources=tuple(sorted(sources.items())),
    )
    _check(profile, root)
    return profile


def _tier(name: str, node: Node, sources: dict[str, str]) -> Tier:
    fields = node.fields(required=("capacity", "bandwidth"))
    return Tier(
        name=name,
        capacity_bytes=_quantity(fields["capacity"], capacity_bytes, sources),
        bandwidth_bytes_per_s=_quantity(fields["bandwidth"], bandwidth_bytes_per_s, sources),
    )


def _link(name: str, node: Node, tiers: tuple[Tier, ...], sources: dict[str, str]) -> Link:
    src, _, dst = name.partition(_TO)
    present = [tier.name for tier in tiers]
    if src not in present or dst not in present or src == dst:
        raise node.error(f"must be SRC{_TO}DST of two of this machine's tiers ({', '.join(present)})")
    value = node.fields(required=("bandwidth",))["bandwidth"]
    return Link(src=src, dst=dst, bandwidth_bytes_per_s=_quantity(value, bandwidth_bytes_per_s, sources))


def _processor(name: str, node: Node, sources: dict[str, str]) -> Processor:
    fields = node.fields("count", required=("peak",))
    return Processor(
        name=name,
        count=fields["count"].integer() if "count" in fields else 1,
        peak_flops=_quantity(fields["peak"], flops_per_s, sources),
    )


def _quantity(node: Node, parse: Callable[..., T], sources: dict[str, str]) -> T:
    """A quantity, alone or as ``{value: …, source: …}``; its source is noted under its key."""
    value = node
    if node.is_mapping():
        fields = node.fields("source", required=("value",))
        value = fields["value"]
        if "source" in fields:
            sources[node.key] = fields["source"].text()
    raw = value.scalar()
    if raw is None or isinstance(raw, bool):
        raise node.error("must be a number, or text with a unit")
    return parse(raw, what=f"{value.where}: {node.key}")


def _check(profile: HardwareProfile, root: Node) -> None:
    """Host and CPU are always there; a GPU and its memory come together, joined by links both ways."""
    if profile.tier("host") is None or profile.processor("cpu") is None:
        raise ConfigError(f"{root.where}: every machine has tiers.host and processors.cpu")
    if (profile.tier("device") is None) != (profile.processor("gpu") is None):
        raise ConfigError(f"{root.where}: tiers.device and processors.gpu belong together; one of them is missing")
    if profile.tier("device") is not None:
        for src, dst in (("host", "device"), ("device", "host")):
            if profile.link(src, dst) is None:
                raise ConfigError(f"{root.where}: links.{src}{_TO}{dst} is missing")
