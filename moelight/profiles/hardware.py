"""Hardware profiles: capacities of tiers, bandwidths of links, speeds of processors.

Reads the YAML of ``hardware_profiles/``. Does not depend on models or costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from moelight.core.errors import ConfigError
from moelight.core.policy import PROCESSORS, TIERS
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.files import YamlNode, find_profile, read_yaml
from moelight.profiles.quantities import (
    MOST_PROCESSORS,
    bandwidth_bytes_per_s,
    capacity_bytes,
    flops_per_s,
    positive,
    seconds,
    share,
)

T = TypeVar("T")
TO = "_to_"
_LEAST_X, _MOST_X = 1e-3, 1e15  # sizes of work
_MOST_SPREAD = 1e6
BYTES_PER_S, FLOPS, SECONDS, SHARE, PROCESSORS_BUSY = "bytes/s", "flop/s", "s", "share", "processors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A kind of measured number: its ``unit`` and its meaning."""

    unit: str
    says: str


# Scalar measurements, by name.
MEASURED = {
    "host_copy": Figure(
        unit=BYTES_PER_S, says="what one copy inside host memory moves (each byte is read and written)"
    ),
    "host_to_device_pageable": Figure(unit=BYTES_PER_S, says="a transfer from memory that is not pinned"),
    "device_to_host_pageable": Figure(unit=BYTES_PER_S, says="a transfer into memory that is not pinned"),
    "host_to_device_under_attention": Figure(unit=BYTES_PER_S, says="a pinned transfer while the CPU attends"),
    "disk_direct": Figure(unit=BYTES_PER_S, says="several readers past the page cache"),
    "disk_cached": Figure(unit=BYTES_PER_S, says="a read that the page cache serves"),
    "cpu_task": Figure(unit=SECONDS, says="one layer phase of a micro-batch on the CPU beside its arithmetic"),
    "gpu_launch": Figure(unit=SECONDS, says="one kernel launch"),
    "transfer": Figure(unit=SECONDS, says="one transfer beside its bytes"),
    "cpu_under_disk": Figure(unit=SHARE, says="of its speed the CPU keeps while the disk lane reads at full rate"),
    "disk_under_cpu": Figure(unit=SHARE, says="of its speed the disk lane keeps while the CPU computes"),
    "busy_elsewhere": Figure(
        unit=PROCESSORS_BUSY, says="kept busy by other programs meanwhile, so that figures may be too low"
    ),
}
# Measured speeds by size of work. linear: flop/s by rows, for weights of some bytes; experts: flop/s by rows of each
# expert, for all work of a layer of experts; attention: bytes/s of keys and values by context; prefill: flop/s by
# prompt tokens (4 x head_dim flop per head and attended pair); elementwise: bytes/s of norms, rotations, residual sums
# and routing, by the bytes that one layer phase touches (`hrm.cost_model` counts them).
WORK = {"linear": FLOPS, "experts": FLOPS, "attention": BYTES_PER_S, "prefill": FLOPS, "elementwise": BYTES_PER_S}
EFFICIENCY = {f"{unit}_{work}": speed for unit in PROCESSORS for work, speed in WORK.items()}
BY_WEIGHT_BYTES = frozenset(f"{unit}_{work}" for unit in PROCESSORS for work in ("linear", "experts"))
_PARSERS: dict[str, Callable[..., float]] = {
    BYTES_PER_S: bandwidth_bytes_per_s,
    FLOPS: flops_per_s,
    SECONDS: seconds,
    SHARE: share,
    PROCESSORS_BUSY: positive,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One memory: ``device`` (of one GPU), ``host`` or ``disk``."""

    name: str
    capacity_bytes: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The transfer path from tier ``src`` to tier ``dst``."""

    src: str
    dst: str
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """``count`` equal processors of kind ``name`` (``cpu`` or ``gpu``), each with a peak of ``peak_flops`` flop/s."""

    name: str
    count: int
    peak_flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """One machine. ``source`` is the origin of its figures; ``sources`` gives the origin of single figures, by dotted
    key.

    ``measured`` (see `MEASURED`) and ``efficiency`` (see `EFFICIENCY`) hold measurements, if any; ``date``
    (``2026-11-03``) and ``notes`` are their date and method. ``spread`` is their dispersion by dotted key
    (``efficiency.cpu_linear`` for a whole surface): the interquartile range of the samples over their median.
    """

    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    processors: tuple[Processor, ...]
    source: str = ""
    sources: tuple[tuple[str, str], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[Surface, ...] = ()
    date: str = ""
    notes: str = ""
    spread: tuple[tuple[str, float], ...] = ()

    def tier(self, name: str) -> Tier | None:
        """The tier called ``name``, or None."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def link(self, src: str, dst: str) -> Link | None:
        """The link from ``src`` to ``dst``, or None."""
        return next((link for link in self.links if (link.src, link.dst) == (src, dst)), None)

    def processor(self, name: str) -> Processor | None:
        """The processors of kind ``name``, or None."""
        return next((unit for unit in self.processors if unit.name == name), None)

    def figure(self, name: str) -> float | None:
        """The figure of `MEASURED` called ``name``, or None if not measured."""
        return dict(self.measured).get(name)

    def surface(self, name: str) -> Surface | None:
        """The speeds of `EFFICIENCY` called ``name``, or None if not measured."""
        return next((surface for surface in self.efficiency if surface.name == name), None)

    def source_of(self, key: str) -> str:
        """The origin of the figure at the dotted ``key`` (``tiers.device.capacity``)."""
        return dict(self.sources).get(key, self.source)

    def figure_keys(self) -> tuple[str, ...]:
        """The dotted keys of all figures, one per surface."""
        return (
            *(f"tiers.{tier.name}.{what}" for tier in self.tiers for what in ("capacity", "bandwidth")),
            *(f"links.{link.src}{TO}{link.dst}.bandwidth" for link in self.links),
            *(f"processors.{unit.name}.peak" for unit in self.processors),
            *(f"measured.{name}" for name, _ in self.measured),
            *(f"efficiency.{surface.name}" for surface in self.efficiency),
        )


def with_gpus(hardware: HardwareProfile, count: int) -> HardwareProfile:
    """``hardware`` restricted to ``count`` of its GPUs; capacities, links and peaks are stated per GPU.

    Raises:
        ConfigError: the machine has fewer GPUs. (``count`` 1 is always valid: a policy may not use the GPU.)
    """
    gpu = hardware.processor("gpu")
    there = 0 if gpu is None else gpu.count
    if count > max(1, there):
        raise ConfigError(f"gpus={count}: the machine {hardware.name} has {there:,}")
    if gpu is None or there == count:
        return hardware
    units = (replace(unit, count=count) if unit is gpu else unit for unit in hardware.processors)
    return replace(hardware, processors=tuple(units))


def load_hardware_profile(name_or_path: str) -> HardwareProfile:
    """The hardware profile with a name, or in the YAML file at a path.

    Raises:
        ConfigError: no such profile (the message names the closest one), or the file breaks a rule (the message names
            file and line).
    """
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    return read_hardware_profile(Path(name_or_path) if is_path else find_profile("hardware", name_or_path))


def read_hardware_profile(path: Path) -> HardwareProfile:
    """The hardware profile in the YAML file ``path``.

    Raises:
        ConfigError: an unknown or missing key, a wrong unit, or tiers and processors that do not match; the message
            names file and line.
    """
    root = read_yaml(path)
    optional = ("source", "date", "notes", "links", "measured", "efficiency", "spread")
    fields = root.fields(*optional, required=("name", "tiers", "processors"))
    sources: dict[str, str] = {}
    tiers = tuple(_tier(name, node, sources) for name, node in fields["tiers"].fields(*TIERS).items())
    units = tuple(_processor(name, node, sources) for name, node in fields["processors"].fields(*PROCESSORS).items())
    _check_parts({tier.name for tier in tiers}, {unit.name for unit in units}, root)
    links = fields["links"].entries().items() if "links" in fields else ()
    figures = fields["measured"].fields(*MEASURED).items() if "measured" in fields else ()
    surfaces = fields["efficiency"].fields(*EFFICIENCY).items() if "efficiency" in fields else ()
    profile = HardwareProfile(
        name=fields["name"].text(),
        tiers=tiers,
        links=tuple(_link(name, node, tiers, sources) for name, node in links),
        processors=units,
        measured=tuple((name, _quantity(node, _PARSERS[MEASURED[name].unit], sources)) for name, node in figures),
        efficiency=tuple(_surface(name, node) for name, node in surfaces),
        source=fields["source"].text() if "source" in fields else "",
        sources=tuple(sorted(sources.items())),
        date=fields["date"].day() if "date" in fields else "",
        notes=fields["notes"].text() if "notes" in fields else "",
    )
    _check_links(profile, root)
    return replace(profile, spread=_spread(fields["spread"], profile)) if "spread" in fields else profile


def _tier(name: str, node: YamlNode, sources: dict[str, str]) -> Tier:
    fields = node.fields(required=("capacity", "bandwidth"))
    return Tier(
        name=name,
        capacity_bytes=_quantity(fields["capacity"], capacity_bytes, sources),
        bandwidth_bytes_per_s=_quantity(fields["bandwidth"], bandwidth_bytes_per_s, sources),
    )


def _link(name: str, node: YamlNode, tiers: tuple[Tier, ...], sources: dict[str, str]) -> Link:
    src, _, dst = name.partition(TO)
    present = [tier.name for tier in tiers]
    if src not in present or dst not in present or src == dst:
        raise node.error(f"must be SRC{TO}DST of two of this machine's tiers ({', '.join(present)})")
    value = node.fields(required=("bandwidth",))["bandwidth"]
    return Link(src=src, dst=dst, bandwidth_bytes_per_s=_quantity(value, bandwidth_bytes_per_s, sources))


def _processor(name: str, node: YamlNode, sources: dict[str, str]) -> Processor:
    fields = node.fields("count", required=("peak",))
    return Processor(
        name=name,
        count=fields["count"].integer(most=MOST_PROCESSORS) if "count" in fields else 1,
        peak_flops=_quantity(fields["peak"], flops_per_s, sources),
    )


def _surface(name: str, node: YamlNode) -> Surface:
    """Parse ``{SIZE: {X: speed}}`` with weights of several sizes, or ``{X: speed}``; in any order."""
    entries = node.entries()
    if not entries:
        raise node.error("is empty")
    parse = _PARSERS[EFFICIENCY[name]]
    if not any(entry.is_mapping() for entry in entries.values()):
        return Surface(name=name, sizes=(0.0,), curves=(_curve(node, parse),))
    if name not in BY_WEIGHT_BYTES:
        raise node.error("is one curve, a speed for each size of work; it has no sizes of weights")
    curves = {}
    for size, entry in entries.items():
        weight_bytes = float(capacity_bytes(size, what=f"{entry.where}: {node.key}"))
        if weight_bytes in curves:
            raise entry.error("gives the same size of weights a second time")
        curves[weight_bytes] = _curve(entry, parse)
    return Surface(name=name, sizes=tuple(sorted(curves)), curves=tuple(curves[size] for size in sorted(curves)))


def _curve(node: YamlNode, parse: Callable[..., float]) -> Curve:
    points: dict[float, float] = {}
    for name, value in node.entries().items():
        x = _above_zero(name)
        if x is None:
            raise value.error(
                "must have a number above 0 as its key, below 1e15: rows, context, prompt tokens or bytes"
            )
        if x in points:
            raise value.error("is given twice")
        points[x] = _quantity(value, parse, {})
    if not points:
        raise node.error("is empty")
    return Curve(x=tuple(sorted(points)), y=tuple(points[x] for x in sorted(points)))


def _above_zero(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if _LEAST_X <= number <= _MOST_X else None


def _spread(node: YamlNode, profile: HardwareProfile) -> tuple[tuple[str, float], ...]:
    found = []
    for name, value in node.fields(*profile.figure_keys()).items():
        width = value.scalar()
        if isinstance(width, (bool, str)) or width is None or not 0 <= width <= _MOST_SPREAD:
            raise value.error(f"must be a number of at least 0, a share of the value, and at most {_MOST_SPREAD:g}")
        found.append((name, float(width)))
    return tuple(found)


def _quantity(node: YamlNode, parse: Callable[..., T], sources: dict[str, str]) -> T:
    """Parse a quantity, plain or as ``{value: …, source: …}``; the source is stored in ``sources`` under the
    quantity's key.
    """
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


def _check_parts(tiers: Collection[str], units: Collection[str], root: YamlNode) -> None:
    """Check that host and CPU are present, and that a GPU and its memory are present together."""
    for name, there, key in (("host", tiers, "tiers"), ("cpu", units, "processors")):
        if name not in there:
            raise ConfigError(f"{root.where}: {key}.{name} is missing; every machine has tiers.host and processors.cpu")
    if ("device" in tiers) != ("gpu" in units):
        missing, other = ("processors.gpu", "tiers.device") if "device" in tiers else ("tiers.device", "processors.gpu")
        raise ConfigError(f"{root.where}: {missing} is missing; it and {other} belong together")


def _check_links(profile: HardwareProfile, root: YamlNode) -> None:
    """Check that links in both directions join device and host memory."""
    if profile.tier("device") is not None:
        for src, dst in (("host", "device"), ("device", "host")):
            if profile.link(src, dst) is None:
                raise ConfigError(f"{root.where}: links.{src}{TO}{dst} is missing")
