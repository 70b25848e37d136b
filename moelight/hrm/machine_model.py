"""Sustained speeds of one machine, from its hardware profile: measured values, or else shares of the stated peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.profiles.efficiency import Surface
from moelight.profiles.hardware import WORK, HardwareProfile, Processor

# Shares of a data sheet's peak that long, well-shaped work sustains, for machines without measurements. Links: 12.3 of
# 15.75 GB/s (MoE-Lightning's own kernel figures); device memory: their fused experts, 75 % of 306 GB/s; host memory:
# this project's attention kernel against the read roof; products: common figures of tensor cores and tiles.
SUSTAINED = {"link": 0.78, "device_memory": 0.75, "host_memory": 0.75, "disk": 0.9, "products": 0.6, "prefill": 0.3}
TASK_S = 50e-6
LAUNCH_S = 8e-6
TRANSFER_S = 15e-6
# Exchanges between ranks without measurements: NCCL between GPUs over their links, gloo between processes of a machine.
EXCHANGE_S = {"gpu": 30e-6, "cpu": 200e-6}
EXCHANGE_BYTES_PER_S = 1e9
ELEMENTWISE_SHARE = 0.5
# Speed of products of int8 over that of bfloat16, where no profile states the peak of either unit: an instruction of
# vectors has twice as many. Measured with 64 rows on an Emerald Rapids without AMX: 3.6 to 5.1 (docs/log.md).
INT8_PRODUCTS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A processor (or all equal GPUs together) with its memory; rates in bytes/s and flop/s. ``task_s``: overhead of
    one layer phase of a micro-batch; ``launch_s``: overhead of each kernel in it; ``unpacks``: kernels multiply
    quantised experts on tensor units; ``int8``: speed of products of int8 over that of the usual ones."""

    flops: float
    memory: float
    elementwise: float
    task_s: float = 0.0
    launch_s: float = 0.0
    linear: Surface | None = None
    experts: Surface | None = None
    attention: Surface | None = None
    prefill: Surface | None = None
    touching: Surface | None = None
    prefill_flops: float = 0.0
    unpacks: bool = True
    int8: float = INT8_PRODUCTS

    def product_s(self, rows: Any, elements: int, dtype: DType, *, experts: bool = False, faster: float = 1.0) -> Any:
        """Seconds of ``rows`` vectors times a matrix of ``elements``, weights read from this unit's memory; ``faster``:
        speed of these products over that of the usual ones."""
        surface = self.experts if experts else self.linear
        flops = 2.0 * rows * elements
        size = float(dtype.bytes_for(elements))
        if surface is None:
            return np.maximum(flops / (self.flops * faster), np.where(np.asarray(rows) > 0, size / self.memory, 0.0))
        at_16_bits = flops / surface.at(np.maximum(rows, 1.0), 2.0 * elements)
        if dtype.bits == 16:
            return at_16_bits
        read_s = size / surface.at(1.0, 2.0 * elements)  # at one row, flop/s are bytes/s of 16-bit weights
        return np.where(np.asarray(rows) > 0, np.maximum(read_s, flops / (max(surface.curves[-1].y) * faster)), 0.0)

    def attention_s(self, bytes_read: Any, flops: Any, context: Any) -> Any:
        """Seconds of attention over ``bytes_read`` of cached keys and values, ``context`` tokens per sequence."""
        speed = self.memory if self.attention is None else self.attention.at(np.maximum(context, 1.0))
        return np.maximum(bytes_read / speed, flops / self.flops)

    def touch_s(self, size: Any) -> Any:
        """Seconds in which norms and sums of one phase touch ``size`` bytes."""
        return size / (self.elementwise if self.touching is None else self.touching.at(np.maximum(size, 1.0)))

    def prefill_s(self, flops: Any, tokens: Any) -> Any:
        """Seconds of the attention of prompts of ``tokens`` each over themselves."""
        speed = self.prefill_flops if self.prefill is None else self.prefill.at(np.maximum(tokens, 1.0))
        return flops / speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of one machine in bytes/s, links of all GPUs together.

    Attributes:
        dram: host memory, shared by everything that touches it.
        stage: payload of a copy into pinned memory.
        transfer_s: seconds of overhead per transfer.
        under_disk: the share of the CPU's speed that remains while the disk is read.
        disk_under_cpu: the share of the disk's speed that remains while the CPU computes.
        exchange: what a rank sends to, and receives from, the others meanwhile; ``exchange_s``: seconds of overhead of
            an exchange.
    """

    cpu: Unit
    gpu: Unit | None
    dram: float
    disk: float
    h2d: float
    d2h: float
    stage: float
    transfer_s: float
    under_disk: float = 1.0
    disk_under_cpu: float = 1.0
    exchange: float = EXCHANGE_BYTES_PER_S
    exchange_s: float = EXCHANGE_S["cpu"]


def speeds_of(hardware: HardwareProfile) -> Speeds:
    """The speeds of ``hardware``. A missing link takes no time; a missing disk has speed 0."""
    host, cpu = hardware.tier("host"), hardware.processor("cpu")
    if host is None or cpu is None:
        raise ConfigError(f"hardware profile {hardware.name!r} lacks tiers.host or processors.cpu")
    device, gpu, disk = hardware.tier("device"), hardware.processor("gpu"), hardware.tier("disk")
    host_memory = host.bandwidth_bytes_per_s * _share(hardware, "host_memory")
    device_memory = 0.0 if device is None else device.bandwidth_bytes_per_s * _share(hardware, "device_memory")
    h2d, d2h = _link(hardware, "host", "device"), _link(hardware, "device", "host")
    between = EXCHANGE_BYTES_PER_S if gpu is None else min(h2d, d2h)
    return Speeds(
        cpu=_unit(hardware, cpu, host_memory, task_s=hardware.figure("cpu_task") or TASK_S),
        gpu=None
        if gpu is None
        else _unit(hardware, gpu, device_memory, launch_s=hardware.figure("gpu_launch") or LAUNCH_S),
        dram=host_memory,
        disk=0.0 if disk is None else disk.bandwidth_bytes_per_s * _share(hardware, "disk"),
        h2d=h2d,
        d2h=d2h,
        stage=hardware.figure("host_copy") or host_memory / 2,
        transfer_s=hardware.figure("transfer") or TRANSFER_S,
        under_disk=hardware.figure("cpu_under_disk") or 1.0,
        disk_under_cpu=hardware.figure("disk_under_cpu") or 1.0,
        exchange=(hardware.figure("exchange") if gpu is None else None) or between,
        exchange_s=(hardware.figure("exchange_latency") if gpu is None else None)
        or EXCHANGE_S["cpu" if gpu is None else "gpu"],
    )


def slowed(speeds: Speeds, by: Mapping[str, float]) -> Speeds:
    """The machine on which all work of each lane in ``by`` takes that many times as long."""
    links = {name: getattr(speeds, name) / by.get(name, 1.0) for name in ("disk", "stage", "h2d", "d2h")}
    gpu = None if speeds.gpu is None else slowed_unit(speeds.gpu, by.get("device", 1.0))
    return replace(speeds, cpu=slowed_unit(speeds.cpu, by.get("cpu", 1.0)), gpu=gpu, **links)


def slowed_unit(unit: Unit, by: float) -> Unit:
    """The unit on which all work and every overhead takes ``by`` times as long."""
    rates: dict[str, Any] = {
        name: getattr(unit, name) / by for name in ("flops", "memory", "elementwise", "prefill_flops")
    }
    times = {name: getattr(unit, name) * by for name in ("task_s", "launch_s")}
    surfaces: dict[str, Any] = {name: surface.times(1.0 / by) for name, surface in _surfaces(unit, *_MEASURED)}
    return replace(unit, **rates, **times, **surfaces)


def at_best(speeds: Speeds) -> Speeds:
    """A machine nowhere slower than ``speeds``, on which more rows take no less time and run at no lower rate."""

    def best(unit: Unit) -> Unit:
        surfaces: dict[str, Any] = {name: _at_best(surface) for name, surface in _surfaces(unit, *_OF_ROWS)}
        return replace(unit, **surfaces)

    return replace(speeds, cpu=best(speeds.cpu), gpu=None if speeds.gpu is None else best(speeds.gpu))


_PRODUCTS = ("linear", "experts")
_OF_ROWS = (*_PRODUCTS, "touching")
_MEASURED = (*_OF_ROWS, "attention", "prefill")


def _surfaces(unit: Unit, *names: str) -> Iterator[tuple[str, Surface]]:
    """The measured ones of ``names``."""
    return ((name, surface) for name in names if (surface := getattr(unit, name)) is not None)


def _at_best(surface: Surface) -> Surface:
    curves = []
    for curve in _rising(surface).curves:
        least_s = np.minimum.accumulate((np.array(curve.x) / curve.y)[::-1])[::-1]
        curves.append(replace(curve, y=tuple(float(y) for y in np.array(curve.x) / least_s)))
    return replace(surface, curves=tuple(curves))


def _rising(surface: Surface) -> Surface:
    """``surface`` without falls."""
    curves = (replace(curve, y=tuple(np.maximum.accumulate(curve.y).tolist())) for curve in surface.curves)
    return replace(surface, curves=tuple(curves))


def _share(hardware: HardwareProfile, key: str) -> float:
    """The sustained share of a stated bandwidth: 1.0 if the profile holds measurements, else the usual share."""
    return 1.0 if hardware.measured else SUSTAINED[key]


def _link(hardware: HardwareProfile, src: str, dst: str) -> float:
    link, gpu = hardware.link(src, dst), hardware.processor("gpu")
    if link is None or gpu is None:
        return np.inf
    return link.bandwidth_bytes_per_s * _share(hardware, "link") * gpu.count


def _unit(
    hardware: HardwareProfile, unit: Processor, memory: float, *, task_s: float = 0.0, launch_s: float = 0.0
) -> Unit:
    """All ``unit.count`` processors together; every matrix is divided among them in equal parts."""
    name, count = unit.name, unit.count
    surfaces = {work: hardware.surface(f"{name}_{work}") for work in WORK}
    if name == "cpu":  # whose kernels take many rows in parts: a lower speed at more rows is what others took meanwhile
        products = {work: surface for work in _PRODUCTS if (surface := surfaces[work]) is not None}
        surfaces |= {work: _rising(surface) for work, surface in products.items()}
    fields = {"touching" if work == "elementwise" else work: surface for work, surface in surfaces.items()}
    return Unit(
        flops=unit.peak_flops * count * (1.0 if surfaces["linear"] else SUSTAINED["products"]),
        memory=memory * count,
        elementwise=ELEMENTWISE_SHARE * memory * count,
        task_s=task_s,
        launch_s=launch_s,
        prefill_flops=unit.peak_flops * count * SUSTAINED["prefill"],
        unpacks=unit.bfloat16,
        int8=INT8_PRODUCTS if unit.int8_flops is None else unit.int8_flops / unit.peak_flops,
        **{field: surface.times(count) for field, surface in fields.items() if surface is not None},
    )
