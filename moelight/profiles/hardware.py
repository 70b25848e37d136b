"""Hardware profiles: capacities of tiers, bandwidths of links, speeds of processors, and their YAML files.

Does not depend on models or costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from moelight.core.errors import ConfigError
from moelight.core.policy import PROCESSORS, TIERS
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.files import YamlNode, find_profile, read_yaml
from moelight.profiles.quantities import (
    BANDWIDTH,
    CAPACITY,
    MOST_PROCESSORS,
    PROCESSOR_COUNT,
    SHARE_OF_WHOLE,
    SPEED,
    TIME,
    Quantity,
)

TO = "_to_"
_LEAST_X, _MOST_X = 1e-3, 1e15  # sizes of work
_MOST_SPREAD = 1e6
BYTES_PER_S, FLOPS, SECONDS, SHARE, PROCESSORS_BUSY = "bytes/s", "flop/s", "s", "share", "processors"


class Figure(NamedTuple):
    """A kind of measured number: its unit and its meaning."""

    unit: str
    says: str


# Scalar measurements, by name.
MEASURED = {
    "host_copy": Figure(BYTES_PER_S, "what one copy inside host memory moves (each byte is read and written)"),
    "host_to_device_pageable": Figure(BYTES_PER_S, "a transfer from memory that is not pinned"),
    "device_to_host_pageable": Figure(BYTES_PER_S, "a transfer into memory that is not pinned"),
    "host_to_device_under_attention": Figure(BYTES_PER_S, "a pinned transfer while the CPU attends"),
    "disk_direct": Figure(BYTES_PER_S, "several readers past the page cache"),
    "disk_cached": Figure(BYTES_PER_S, "a read that the page cache serves"),
    "cpu_task": Figure(SECONDS, "one layer phase of a micro-batch on the CPU beside its arithmetic"),
    "gpu_launch": Figure(SECONDS, "one kernel launch"),
    "transfer": Figure(SECONDS, "one transfer beside its bytes"),
    "cpu_under_disk": Figure(SHARE, "of its speed the CPU keeps while the disk lane reads at full rate"),
    "disk_under_cpu": Figure(SHARE, "of its speed the disk lane keeps while the CPU computes"),
    "exchange": Figure(BYTES_PER_S, "a sum of tensors over two ranks, processes on a half of the cores each"),
    "exchange_latency": Figure(SECONDS, "one such sum beside its bytes"),
    "busy_elsewhere": Figure(PROCESSORS_BUSY, "kept busy by other programs meanwhile, so that figures may be too low"),
}
# Measured speeds by size of work. linear: flop/s by rows, for weights of some bytes; experts: flop/s by rows of each
# expert, for all work of a layer of experts; attention: bytes/s of keys and values by context; prefill: flop/s by
# prompt tokens (4 x head_dim flop per head and attended pair); elementwise: bytes/s of norms, rotations, residual sums
# and routing, by the bytes that one layer phase touches (`hrm.cost_model` counts them).
WORK = {"linear": FLOPS, "experts": FLOPS, "attention": BYTES_PER_S, "prefill": FLOPS, "elementwise": BYTES_PER_S}
EFFICIENCY = {f"{unit}_{work}": speed for unit in PROCESSORS for work, speed in WORK.items()}
BY_WEIGHT_BYTES = frozenset(f"{unit}_{work}" for unit in PROCESSORS for work in ("linear", "experts"))
# Classes of products that have forms: tiles, halves and pairs; for int8 activations tiles, dots and wide.
PRODUCTS = {
    "bf16": "products of bfloat16 weights",
    "low": "products of quantised weights of fewer than eight bits",
    "high": "products of quantised weights of eight bits",
    "fine": "products of int8 activations, scales for up to 32 inputs",
    "coarse": "products of int8 activations, scales for more inputs",
}
INTEGER_PRODUCTS = frozenset(("fine", "coarse"))
FORM_ROWS = (1, 4, 16, 64)  # rows have the form of the nearest of these by ratio


def products_named(name: str, rows: int) -> str:
    """The name in `KERNELS` of the products ``name`` of `PRODUCTS` with ``rows`` of `FORM_ROWS`."""
    return f"{name}_products_{rows}"


# Kernels whose fastest form a measurement finds. Tiles of bfloat16 round otherwise than vectors, for all rows alike.
KERNELS = {
    "stream_1": "bfloat16 weights meeting one token",
    "stream_2": "bfloat16 weights meeting two tokens",
    "stream_4": "bfloat16 weights meeting three or four tokens",
    **{products_named(name, rows): f"{says}, {rows} rows" for name, says in PRODUCTS.items() for rows in FORM_ROWS},
}
QUANTITIES = {
    BYTES_PER_S: BANDWIDTH,
    FLOPS: SPEED,
    SECONDS: TIME,
    SHARE: SHARE_OF_WHOLE,
    PROCESSORS_BUSY: PROCESSOR_COUNT,
}


def _figure(key: str, quantity: Quantity, *, required: bool = True) -> Any:
    """A field that a profile states under ``key``; None where it does not, and need not."""
    metadata = {"key": key, "quantity": quantity, "required": required}
    return field(metadata=metadata) if required else field(metadata=metadata, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One memory: ``device`` (of one GPU), ``host`` or ``disk``."""

    name: str
    capacity_bytes: int = _figure("capacity", CAPACITY)
    bandwidth_bytes_per_s: float = _figure("bandwidth", BANDWIDTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The transfer path from tier ``src`` to tier ``dst``."""

    src: str
    dst: str
    bandwidth_bytes_per_s: float = _figure("bandwidth", BANDWIDTH)

    @property
    def name(self) -> str:
        """For example ``host_to_device``."""
        return f"{self.src}{TO}{self.dst}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """``count`` equal processors of kind ``name`` (``cpu`` or ``gpu``); ``peak_flops`` is the flop/s of one,
    ``int8_flops`` that of products of int8, ``bfloat16`` whether it computes in that format (NVIDIA from compute
    capability 8.0 on)."""

    name: str
    count: int
    peak_flops: float = _figure("peak", SPEED)
    int8_flops: float | None = _figure("int8_peak", SPEED, required=False)
    bfloat16: bool = True


Part = Tier | Link | Processor


def figures_of(part: Part) -> Iterator[tuple[str, str, Quantity]]:
    """``(key, field, quantity)`` of every figure that a profile states of ``part``."""
    stated = (f for f in fields(part) if f.metadata and getattr(part, f.name, 0) is not None)
    return ((f.metadata["key"], f.name, f.metadata["quantity"]) for f in stated)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """One machine.

    Attributes:
        source: the origin of the figures; ``sources`` gives the origin of single figures, by dotted key.
        measured: scalar measurements by name, see `MEASURED`.
        efficiency: measured speeds by size of work, see `EFFICIENCY`.
        date: the day of the measurements, such as ``2026-11-03``; ``notes`` describes their method.
        spread: interquartile range of the samples over their median, by dotted key (``efficiency.cpu_linear`` for a
            whole surface).
        kernels: the fastest form of kernels by name, see `KERNELS`.
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
    kernels: tuple[tuple[str, str], ...] = ()

    def tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    def link(self, src: str, dst: str) -> Link | None:
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

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every tier, link and processor, with the section of the file that holds it."""
        yield from (("tiers", tier) for tier in self.tiers)
        yield from (("links", link) for link in self.links)
        yield from (("processors", unit) for unit in self.processors)

    def figure_keys(self) -> tuple[str, ...]:
        """The dotted keys of all figures, one per surface."""
        return (
            *(f"{where}.{part.name}.{key}" for where, part in self.parts() for key, *_ in figures_of(part)),
            *(f"measured.{name}" for name, _ in self.measured),
            *(f"efficiency.{surface.name}" for surface in self.efficiency),
        )


def with_gpus(hardware: HardwareProfile, count: int) -> HardwareProfile:
    """``hardware`` restricted to ``count`` GPUs; 1 is valid without one. Capacities, links and peaks are per GPU."""
    gpu = hardware.processor("gpu")
    available = 0 if gpu is None else gpu.count
    if count > max(1, available):
        raise ConfigError(f"gpus={count}: the machine {hardware.name} has {available:,}")
    if gpu is None or available == count:
        return hardware
    units = (replace(unit, count=count) if unit is gpu else unit for unit in hardware.processors)
    return replace(hardware, processors=tuple(units))


def with_gpu_each(hardware: HardwareProfile, ranks: int) -> HardwareProfile:
    """``hardware``, which has one GPU or none, with a GPU for each of ``ranks``."""
    units = (replace(unit, count=ranks) if unit.name == "gpu" else unit for unit in hardware.processors)
    return replace(hardware, processors=tuple(units))


def part_of(hardware: HardwareProfile, parts: int) -> HardwareProfile:
    """One of ``parts`` equal parts of ``hardware``, with the GPUs divided among them: of the host and the disk it has a
    part of the capacity and of every speed; a GPU and its links are as they were. ``parts`` divides the GPUs."""
    tiers = (
        tier
        if tier.name == "device"
        else replace(
            tier,
            capacity_bytes=max(1, tier.capacity_bytes // parts),
            bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / parts,
        )
        for tier in hardware.tiers
    )
    units = (
        replace(unit, count=unit.count // parts)
        if unit.name == "gpu"
        else replace(
            unit,
            peak_flops=unit.peak_flops / parts,
            int8_flops=None if unit.int8_flops is None else unit.int8_flops / parts,
        )
        for unit in hardware.processors
    )
    shared = ("host_copy", "disk_direct", "disk_cached")
    return replace(
        hardware,
        tiers=tuple(tiers),
        processors=tuple(units),
        measured=tuple((name, value / parts if name in shared else value) for name, value in hardware.measured),
        efficiency=tuple(
            surface.times(1 / parts) if surface.name.startswith("cpu_") else surface for surface in hardware.efficiency
        ),
    )


def load_hardware_profile(name_or_path: str) -> HardwareProfile:
    """The hardware profile with a name, or in the YAML file at a path."""
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    return read_hardware_profile(Path(name_or_path) if is_path else find_profile("hardware", name_or_path))


def read_hardware_profile(path: Path) -> HardwareProfile:
    """The hardware profile in the YAML file ``path``; an error names file and line."""
    root = read_yaml(path)
    optional = ("source", "date", "notes", "links", "measured", "efficiency", "spread", "kernels")
    entries = root.fields(*optional, required=("name", "tiers", "processors"))

    def section(name: str, keys: Collection[str]) -> dict[str, YamlNode]:
        return entries[name].fields(*keys) if name in entries else {}

    sources: dict[str, str] = {}
    tiers, units = section("tiers", TIERS), section("processors", PROCESSORS)
    _check_parts(tiers, units, root)
    measured, surfaces = section("measured", MEASURED), section("efficiency", EFFICIENCY)
    profile = HardwareProfile(
        name=entries["name"].text(),
        tiers=tuple(Tier(name=name, **_figures(Tier, node, sources)) for name, node in tiers.items()),
        links=tuple(_links(entries["links"], tiers, sources)) if "links" in entries else (),
        processors=tuple(_processor(name, node, sources) for name, node in units.items()),
        measured=tuple(
            (name, _quantity(node, QUANTITIES[MEASURED[name].unit], sources)) for name, node in measured.items()
        ),
        efficiency=tuple(_surface(name, node) for name, node in surfaces.items()),
        kernels=tuple((name, node.text()) for name, node in section("kernels", KERNELS).items()),
        sources=tuple(sorted(sources.items())),
        date=entries["date"].day() if "date" in entries else "",
        source=entries["source"].text() if "source" in entries else "",
        notes=entries["notes"].text() if "notes" in entries else "",
    )
    for src, dst in (("host", "device"), ("device", "host")):
        if "device" in tiers and profile.link(src, dst) is None:
            raise ConfigError(f"{root.where}: links.{src}{TO}{dst} is missing")
    wanted = f"of at least 0, a share of the value, and at most {_MOST_SPREAD:g}"
    spread = section("spread", profile.figure_keys()).items()
    return replace(
        profile, spread=tuple((name, node.number(maximum=_MOST_SPREAD, wanted=wanted)) for name, node in spread)
    )


def _figures(part: type[Part], node: YamlNode, sources: dict[str, str], *more: str) -> dict[str, Any]:
    """The fields of ``part`` that are figures, and those that ``more`` names."""
    part_fields = [f for f in fields(part) if f.metadata]
    required = tuple(f.metadata["key"] for f in part_fields if f.metadata["required"])
    entries = node.fields(
        *more, *(f.metadata["key"] for f in part_fields if not f.metadata["required"]), required=required
    )
    stated = {f.name: (entries.get(f.metadata["key"]), f.metadata["quantity"]) for f in part_fields}
    return {name: _quantity(node, quantity, sources) for name, (node, quantity) in stated.items() if node is not None}


def _links(node: YamlNode, tiers: Collection[str], sources: dict[str, str]) -> Iterator[Link]:
    for name, value in node.entries().items():
        src, _, dst = name.partition(TO)
        if src not in tiers or dst not in tiers or src == dst:
            raise value.error(f"must be SRC{TO}DST of two of this machine's tiers ({', '.join(tiers)})")
        yield Link(src=src, dst=dst, **_figures(Link, value, sources))


def _processor(name: str, node: YamlNode, sources: dict[str, str]) -> Processor:
    figures = _figures(Processor, node, sources, "count", "bfloat16")
    count, bfloat16 = map(node.entries().get, ("count", "bfloat16"))
    return Processor(
        name=name,
        count=1 if count is None else count.integer(maximum=MOST_PROCESSORS),
        bfloat16=True if bfloat16 is None else bfloat16.truth(),
        **figures,
    )


def _surface(name: str, node: YamlNode) -> Surface:
    """A surface from ``{SIZE: {X: speed}}`` (weights of several sizes) or ``{X: speed}``, in any order."""
    entries = node.entries()
    if not entries:
        raise node.error("is empty")
    speed = QUANTITIES[EFFICIENCY[name]]
    if not any(entry.is_mapping() for entry in entries.values()):
        return Surface(name=name, sizes=(0.0,), curves=(_curve(node, speed),))
    if name not in BY_WEIGHT_BYTES:
        raise node.error("is one curve, a speed for each size of work; it has no sizes of weights")
    curves: dict[float, Curve] = {}
    for size, entry in entries.items():
        weight_bytes = float(CAPACITY.parse(size, label=f"{entry.where}: {node.key}"))
        if weight_bytes in curves:
            raise entry.error("gives the same size of weights a second time")
        curves[weight_bytes] = _curve(entry, speed)
    return Surface(name=name, sizes=tuple(sorted(curves)), curves=tuple(curves[size] for size in sorted(curves)))


def _curve(node: YamlNode, speed: Quantity) -> Curve:
    points: dict[float, float] = {}
    for name, value in node.entries().items():
        try:
            x = float(name)
        except ValueError:
            x = 0.0
        if not _LEAST_X <= x <= _MOST_X:
            wanted = "a number above 0 as its key, below 1e15: rows, context, prompt tokens or bytes"
            raise value.error(f"must have {wanted}")
        if x in points:
            raise value.error("is given twice")
        points[x] = _quantity(value, speed, {})
    if not points:
        raise node.error("is empty")
    return Curve(x=tuple(sorted(points)), y=tuple(points[x] for x in sorted(points)))


def _quantity(node: YamlNode, quantity: Quantity, sources: dict[str, str]) -> float:
    """A figure, plain or as ``{value: …, source: …}``; the source goes to ``sources`` under the figure's key."""
    value = node
    if node.is_mapping():
        entries = node.fields("source", required=("value",))
        value = entries["value"]
        if "source" in entries:
            sources[node.key] = entries["source"].text()
    raw = value.scalar()
    if raw is None or isinstance(raw, bool):
        raise node.error("must be a number, or text with a unit")
    return quantity.parse(raw, label=f"{value.where}: {node.key}")


def _check_parts(tiers: Collection[str], units: Collection[str], root: YamlNode) -> None:
    """Check that host and CPU are present, and that a GPU and its memory are present together."""
    for name, parts, key in (("host", tiers, "tiers"), ("cpu", units, "processors")):
        if name not in parts:
            raise ConfigError(f"{root.where}: {key}.{name} is missing; every machine has tiers.host and processors.cpu")
    if ("device" in tiers) != ("gpu" in units):
        missing, other = ("processors.gpu", "tiers.device") if "device" in tiers else ("tiers.device", "processors.gpu")
        raise ConfigError(f"{root.where}: {missing} is missing; it and {other} belong together")
