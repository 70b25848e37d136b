"""Measures the hardware profile of this machine within the limits of an effort. `machine_profile` runs the module as a
process, so that its memory and library caches end with it."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError, UserError
from moelight.core.units import KiB, MiB, format_bytes
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import EFFICIENCY, TO, HardwareProfile, Link, Processor, Tier
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime.calibration import disk, surfaces
from moelight.runtime.calibration.effort import QUICK, Effort, Shape
from moelight.runtime.calibration.surfaces import SHARE_OF_FREE, Pool
from moelight.runtime.calibration.timing import (
    DISTURBED_CORES,
    Measure,
    Measurement,
    Work,
    beside,
    best_of_rounds,
    finisher,
    sample,
)
from moelight.runtime.machine import Machine, find_machine
from moelight.runtime.machine_profile import describe
from moelight.runtime.measure import available_bytes, memory_limit_bytes
from moelight.weights.torch_dtypes import to_torch

SMALL_BYTES = 4 * KiB


def measure_links(device: torch.device, size: int, attend: Work) -> dict[str, Measure]:
    """Measurements by kind: transfers of ``size`` bytes in bytes/s, and small ``transfers`` per second. ``attend``
    keeps the CPU busy during ``host_to_device_under_attention``."""
    finish, crosses = finisher(device), device.type != "cpu"
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=crosses)
    plain = torch.zeros(size, dtype=torch.uint8)
    there = torch.zeros(size, dtype=torch.uint8, device=device)

    def copy(into: torch.Tensor, source: torch.Tensor, amount: float, seconds: float) -> Measurement:
        work = partial(into.copy_, source, non_blocking=True)
        return sample(work, seconds=seconds, amount=amount, finish=finish)

    def copy_beside(seconds: float) -> Measurement:
        with kept_busy(attend):
            return copy(there, pinned, size, seconds)

    return {
        "host_to_device": partial(copy, there, pinned, size),
        "device_to_host": partial(copy, pinned, there, size),
        "host_to_device_pageable": partial(copy, there, plain, size),
        "device_to_host_pageable": partial(copy, plain, there, size),
        "host_to_device_under_attention": copy_beside,
        "transfers": partial(copy, there[:SMALL_BYTES], pinned[:SMALL_BYTES], 1.0),
    }


def launches(device: torch.device) -> Measure:
    """Launches per second of an almost empty kernel, one after another."""
    number, finish = torch.zeros(1, device=device), finisher(device)
    return lambda seconds: sample(lambda: number.add_(1), seconds=seconds, finish=finish)


def kept_busy(work: Work) -> AbstractContextManager[None]:
    """Run ``work`` over and over on a thread within the context."""

    def toil(enough: threading.Event) -> None:
        with torch.inference_mode():
            while not enough.is_set():
                work()

    return beside(toil, "moelight-attention-beside")


Say = Callable[[str], None]
Measures = dict[str | surfaces.Point, tuple[Measure, float]]
Readings = dict[str | surfaces.Point, Measurement]
LEAST_POOL_BYTES = 16 * MiB
_DIGITS = 4
_BUSY_CONTEXT = 1024
_BUSY_ROWS = 64
# Intermediate readings that are not figures of the profile.
_ACTS, _LARGE, _ALONE, _BESIDE, _DIRECT = "acts", "large", "alone", "beside", "direct"
_READS_BESIDE = "reads beside"


@dataclass(kw_only=True, slots=True)
class _Findings:
    """Results so far: ``figures`` are (value, spread) by dotted key in the profile."""

    figures: dict[str, tuple[float, float]] = field(default_factory=dict)
    surfaces: list[tuple[Surface, float]] = field(default_factory=list)
    capacities: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    busy_elsewhere: float = 0.0

    def read(self, measurements: Measures, effort: Effort, seconds: float) -> Readings:
        readings, busy = best_of_rounds(measurements, quiet_rounds=effort.quiet_rounds, seconds=seconds)
        self.busy_elsewhere = max(self.busy_elsewhere, busy)
        return readings

    def rate(self, key: str, reading: Measurement) -> None:
        self.figures[key] = (reading.rate, reading.spread)

    def seconds(self, key: str, reading: Measurement) -> None:
        """``reading`` is in units per second, the figure in seconds per unit."""
        self.figures[key] = (1 / reading.rate, reading.spread)


def measure_machine(
    machine: Machine,
    effort: Effort,
    *,
    name: str,
    disk_dir: Path | None,
    disk_needed: bool = True,
    say: Say = lambda _: None,
) -> HardwareProfile:
    """Measure ``machine`` now; raises ConfigError for the emulated device, which has no speed of its own, too little
    memory, or a directory that cannot be written.

    Args:
        disk_dir: directory of the scratch file; None measures no disk.
        disk_needed: raise if the directory cannot be written; otherwise the profile then has no disk.
        say: receives a line before each part of the measurement.
    """
    if machine.twin:
        raise ConfigError("--device twin: a twin has no speed of its own; measure cpu, cuda or xpu")
    began, found = time.perf_counter(), _Findings()
    with torch.inference_mode(), ExitStack() as stack:
        scratch = None
        if disk_dir is not None:
            say(f"writing a scratch file in {disk_dir}")
            scratch = _scratch(found, disk_dir, effort, stack, needed=disk_needed)
        pool = _host_pool(effort)
        say("measuring memory, processor and disk" if scratch else "measuring memory and processor")
        _measure_host(found, pool, scratch, effort)
        if machine.discrete:
            say("measuring the GPU and its link")
            _measure_device(found, machine, pool, effort)
    if found.busy_elsewhere > DISTURBED_CORES:
        found.figures["measured.busy_elsewhere"] = (found.busy_elsewhere, 0.0)
    return _profile(name, machine, found, time.perf_counter() - began)


def _scratch(
    found: _Findings, directory: Path, effort: Effort, stack: ExitStack, *, needed: bool
) -> disk.Scratch | None:
    try:
        scratch = stack.enter_context(disk.Scratch(directory, effort.disk_bytes, seconds=effort.disk_write_s))
    except ConfigError as error:
        if needed:
            raise
        found.notes.append(str(error))
        return None
    found.capacities["disk"] = shutil.disk_usage(directory).total
    return scratch


def _host_pool(effort: Effort) -> Pool:
    free = available_bytes()
    if free // SHARE_OF_FREE < LEAST_POOL_BYTES:
        raise ConfigError(
            f"the machine cannot be measured: {format_bytes(free)} of memory is free, and at least "
            f"{format_bytes(SHARE_OF_FREE * LEAST_POOL_BYTES)} is needed"
        )
    size = min(effort.pool_bytes, free // SHARE_OF_FREE)
    return Pool(size, device=torch.device("cpu"), dtype=to_torch(BFLOAT16))


def _measure_host(found: _Findings, pool: Pool, scratch: disk.Scratch | None, effort: Effort) -> None:
    """Indispensable figures are measured first, because a slow machine omits the last ones."""
    found.capacities["host"] = memory_limit_bytes()
    figures: dict[str, Measure] = {
        "tiers.host.bandwidth": surfaces.reads(pool),
        "measured.host_copy": surfaces.copies(pool),
        _ACTS: surfaces.layer_phases(pool),
    }
    if scratch is not None:
        figures |= _measure_disk(scratch, pool, effort)
    points = _points("cpu", pool, effort, effort.rows, effort.large)
    measurements: Measures = {key: (measure_one, effort.figure_s) for key, measure_one in figures.items()}
    measurements |= {key: (measure_one, effort.point_s) for key, measure_one in points.items()}
    readings = found.read(measurements, effort, effort.host_s)
    for key in ("tiers.host.bandwidth", "measured.host_copy"):
        found.rate(key, readings[key])
    found.seconds("measured.cpu_task", readings[_ACTS])
    if scratch is not None:
        _judge_disk(found, readings, past_cache=disk.past_cache(scratch))
    _add_surfaces(found, "cpu", readings)


def _measure_disk(scratch: disk.Scratch, pool: Pool, effort: Effort) -> dict[str, Measure]:
    work, _ = surfaces.layer_work(pool, _large_expert(pool, effort), _BUSY_ROWS)
    found: dict[str, Measure] = {
        "measured.disk_cached": disk.cached_reads(scratch),
        "tiers.disk.bandwidth": disk.lane_reads(scratch),
        _ALONE: lambda seconds: sample(work, seconds=seconds),
        _BESIDE: disk.beside_reads(work, scratch),
        _READS_BESIDE: disk.reads_beside(work, scratch),
    }
    return found | ({_DIRECT: disk.direct_reads(scratch)} if scratch.direct is not None else {})


def _judge_disk(found: _Findings, readings: Readings, *, past_cache: bool) -> None:
    """Store the speed of the disk lane, or of direct reads if the lane's reads were served by the page cache."""
    lane, cached, direct = readings["tiers.disk.bandwidth"], readings["measured.disk_cached"], readings.get(_DIRECT)
    if not past_cache and disk.from_cache(lane, cached):
        if direct is None:
            del found.capacities["disk"]
            found.notes.append("the disk could not be told from the page cache")
            return
        found.notes.append("the page cache could not be emptied, so the disk was read past it")
        lane = direct
    found.rate("tiers.disk.bandwidth", lane)
    found.rate("measured.disk_cached", cached)
    if direct is not None:
        found.rate("measured.disk_direct", direct)
    alone, beside, reads = readings[_ALONE], readings[_BESIDE], readings[_READS_BESIDE]
    found.figures["measured.cpu_under_disk"] = (min(1.0, beside.rate / alone.rate), beside.spread)
    found.figures["measured.disk_under_cpu"] = (min(1.0, reads.rate / lane.rate), lane.spread)


def _measure_device(found: _Findings, machine: Machine, host: Pool, effort: Effort) -> None:
    device, backend = machine.device, torch.get_device_module(machine.device)
    free, found.capacities["device"] = (int(size) for size in backend.mem_get_info(device))
    dtype = to_torch(machine.native_dtype(BFLOAT16))
    pool = Pool(min(effort.pool_bytes, free // SHARE_OF_FREE), device=device, dtype=dtype)
    attend, _ = surfaces.decode_work(host, _BUSY_CONTEXT if host.holds((_BUSY_CONTEXT, surfaces.KV_NUMBERS)) else 64)
    figures: dict[str, Measure] = {
        "tiers.device.bandwidth": surfaces.reads(pool),
        "launches": launches(device),
        **measure_links(device, min(effort.link_bytes, host.nbytes), attend),
    }
    points = _points("gpu", pool, effort, effort.gpu_rows, effort.gpu_large)
    measurements: Measures = {key: (measure_one, effort.figure_s) for key, measure_one in figures.items()}
    measurements |= {key: (measure_one, effort.gpu_point_s) for key, measure_one in points.items()}
    for measure_one, _ in measurements.values():
        measure_one(0.0)  # kernels are loaded at their first use
    readings = found.read(measurements, effort, effort.device_s)
    found.rate("tiers.device.bandwidth", readings["tiers.device.bandwidth"])
    for key in (f"host{TO}device", f"device{TO}host"):
        found.rate(f"links.{key}.bandwidth", readings[key])
    for key in ("host_to_device_pageable", "device_to_host_pageable", "host_to_device_under_attention"):
        found.rate(f"measured.{key}", readings[key])
    found.seconds("measured.gpu_launch", readings["launches"])
    found.seconds("measured.transfer", readings["transfers"])
    _add_surfaces(found, "gpu", readings)


def _points(
    unit: str, pool: Pool, effort: Effort, rows: tuple[int, ...], large: tuple[Shape, int]
) -> dict[surfaces.Point, Measure]:
    """All points of the surfaces of ``unit`` and one compute-bound product, smallest work first."""
    found = {
        **surfaces.decode_points(f"{unit}_attention", pool, effort.contexts),
        **surfaces.prefill_points(f"{unit}_prefill", pool, effort.prompts),
        **surfaces.linear_points(f"{unit}_linear", pool, effort.linear, rows),
        **surfaces.expert_points(f"{unit}_experts", pool, effort.experts, rows),
        **surfaces.elementwise_points(f"{unit}_elementwise", pool, effort.touching),
        **surfaces.linear_points(_LARGE, pool, (large[0],), (large[1],)),
    }
    return dict(sorted(found.items(), key=lambda item: item[0][2]))


def _add_surfaces(found: _Findings, unit: str, readings: Readings) -> None:
    """The peak of ``unit`` is its fastest product."""
    points = {key: reading for key, reading in readings.items() if isinstance(key, tuple)}
    measured = {key[0] for key in points}
    for name in EFFICIENCY:
        if name in measured:
            found.surfaces.append(surfaces.surface_of(name, points))
    products = (f"{unit}_linear", f"{unit}_experts", _LARGE)
    best = max((reading for key, reading in points.items() if key[0] in products), key=lambda reading: reading.rate)
    found.rate(f"processors.{unit}.peak", best)


def _large_expert(pool: Pool, effort: Effort) -> Shape:
    """Shape of experts of which the pool holds many, so that reading their weights dominates the time."""
    fitting = [(hidden, width) for hidden, width in effort.experts if pool.holds((16 * hidden, 3 * width))]
    return fitting[-1] if fitting else effort.experts[0]


def _profile(name: str, machine: Machine, found: _Findings, took_s: float) -> HardwareProfile:
    values = {key: _rounded(value) for key, (value, _) in found.figures.items()}
    tiers = [tier for tier in ("device", "host", "disk") if tier in found.capacities]
    units = ("gpu", "cpu") if machine.discrete else ("cpu",)
    ways = (("host", "device"), ("device", "host")) if machine.discrete else ()
    count = torch.get_device_module(machine.device).device_count() if machine.discrete else 1
    about = [f"{describe(machine)}, in {took_s:.0f} s", *found.notes]
    return HardwareProfile(
        name=name,
        date=time.strftime("%Y-%m-%d"),
        source="measured on the machine itself by moelight profile",
        notes="; ".join(about),
        tiers=tuple(
            Tier(
                name=tier,
                capacity_bytes=found.capacities[tier],
                bandwidth_bytes_per_s=values[f"tiers.{tier}.bandwidth"],
            )
            for tier in tiers
        ),
        links=tuple(
            Link(src=src, dst=dst, bandwidth_bytes_per_s=values[f"links.{src}{TO}{dst}.bandwidth"]) for src, dst in ways
        ),
        processors=tuple(
            Processor(name=unit, count=count if unit == "gpu" else 1, peak_flops=values[f"processors.{unit}.peak"])
            for unit in units
        ),
        measured=tuple(
            (key.removeprefix("measured."), value) for key, value in values.items() if key.startswith("measured.")
        ),
        efficiency=tuple(_rounded_surface(surface) for surface, _ in found.surfaces),
        spread=(
            *((key, _rounded(spread, 2)) for key, (_, spread) in found.figures.items()),
            *((f"efficiency.{surface.name}", _rounded(spread, 2)) for surface, spread in found.surfaces),
        ),
    )


def _rounded_surface(surface: Surface) -> Surface:
    curves = tuple(Curve(x=curve.x, y=tuple(_rounded(y) for y in curve.y)) for curve in surface.curves)
    return Surface(name=surface.name, sizes=surface.sizes, curves=curves)


def _rounded(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def run_calibration(device: str, directory: str, file: str) -> int:
    """Measure and write the profile. Return 0, or 2 with one line on stderr if the measurement fails."""
    try:
        found = measure_machine(find_machine(device), QUICK, name="auto", disk_dir=Path(directory), disk_needed=False)
        write_hardware_profile(found, Path(file))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_calibration(*sys.argv[1:]))
