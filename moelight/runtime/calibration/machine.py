"""Measures the hardware profile of this machine within the limits of an effort. `machine_profile` runs the module as a
process, so that its memory and library caches end with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import ConfigError, RankError, UserError
from moelight.core.units import KiB, MiB, format_bytes
from moelight.kernels import variants
from moelight.kernels.device import Device
from moelight.kernels.ranks import Endpoints, Ranks, endpoints_of
from moelight.profiles.efficiency import Surface
from moelight.profiles.hardware import EFFICIENCY, TO, HardwareProfile, Link, Processor, Tier
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime.calibration import disk, surfaces
from moelight.runtime.calibration.effort import QUICK, Effort, Shape
from moelight.runtime.calibration.forms import fastest_forms
from moelight.runtime.calibration.surfaces import SHARE_OF_FREE, Point, Pool, significant
from moelight.runtime.calibration.timing import (
    DISTURBED_CORES,
    Measure,
    Measurement,
    Work,
    beside,
    finisher,
    over_rounds,
    sample,
)
from moelight.runtime.machine import Machine, find_machine
from moelight.runtime.machine_profile import describe
from moelight.runtime.measure import available_bytes, memory_limit_bytes
from moelight.weights.torch_dtypes import to_torch

SMALL_BYTES = 4 * KiB
Say = Callable[[str], None]
LEAST_POOL_BYTES = 16 * MiB
_BUSY_CONTEXT = 1024
_BUSY_ROWS = 64
# Measured in units per second, stated in seconds per unit.
_IN_SECONDS = frozenset(f"measured.{name}" for name in ("cpu_task", "gpu_launch", "transfer", "exchange_latency"))
# Intermediate readings: work alone, work beside reads, reads beside work.
_ALONE, _BESIDE, _READS_BESIDE = "alone", "beside", "reads beside"
_SMALL, _LARGE = "small sums", "large sums"
_SUM_BYTES, _SUMS = {_SMALL: 4 * KiB, _LARGE: 4 * MiB}, {_SMALL: 100, _LARGE: 4}  # as many sums are asked for at once
_LANE, _CACHED, _DIRECT = "tiers.disk.bandwidth", "measured.disk_cached", "measured.disk_direct"


def measure_links(device: torch.device, size: int, attend: Work) -> dict[str, Measure]:
    """Measurements by dotted key: transfers of ``size`` bytes in bytes/s, and small transfers per second. ``attend``
    keeps the CPU busy during ``host_to_device_under_attention``."""
    finish = finisher(device)
    pinned = Device(device).host_memory((size,), torch.uint8).zero_()
    plain = torch.zeros(size, dtype=torch.uint8)
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)

    def copy(into: torch.Tensor, source: torch.Tensor, amount: float, seconds: float) -> Measurement:
        work = partial(into.copy_, source, non_blocking=True)
        return sample(work, seconds=seconds, amount=amount, finish=finish)

    def toil(enough: threading.Event) -> None:
        with torch.inference_mode():
            while not enough.is_set():
                attend()

    def copy_beside(seconds: float) -> Measurement:
        with beside(toil, "moelight-attention-beside"):
            return copy(on_device, pinned, size, seconds)

    return {
        f"links.host{TO}device.bandwidth": partial(copy, on_device, pinned, size),
        f"links.device{TO}host.bandwidth": partial(copy, pinned, on_device, size),
        "measured.host_to_device_pageable": partial(copy, on_device, plain, size),
        "measured.device_to_host_pageable": partial(copy, plain, on_device, size),
        "measured.host_to_device_under_attention": copy_beside,
        "measured.transfer": partial(copy, on_device[:SMALL_BYTES], pinned[:SMALL_BYTES], 1.0),
    }


def launches(device: torch.device) -> Measure:
    """Launches per second of an almost empty kernel, one after another."""
    number, finish = torch.zeros(1, device=device), finisher(device)
    return lambda seconds: sample(lambda: number.add_(1), seconds=seconds, finish=finish)


@contextmanager
def exchanges() -> Iterator[dict[str, Measure]]:
    """Measurements of `_SMALL` and `_LARGE` sums per second, while another process takes part in them. Raises RankError
    if that does not start."""
    first, second = endpoints_of(2)
    ranks = Ranks(first)
    program = f"from moelight.runtime.calibration.machine import take_part; take_part({second.descriptors})"
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=second.descriptors
        )
    finally:
        second.close()
    try:
        ranks.meet(torch.device("cpu"))
        yield {name: partial(_sums_with_other, ranks, name) for name in (_SMALL, _LARGE)}
    finally:
        ranks.leave()
        process.wait()


def exchange_figures(readings: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """``measured.exchange`` in bytes/s beside its latency, and ``measured.exchange_latency`` in sums per second."""
    small, large = readings[_SMALL], readings[_LARGE]
    seconds = max(1 / large.rate - 1 / small.rate, 1e-3 / large.rate)
    return {
        "measured.exchange": Measurement(rate=(_SUM_BYTES[_LARGE] - _SUM_BYTES[_SMALL]) / seconds, spread=large.spread),
        "measured.exchange_latency": small,
    }


def _sums_with_other(ranks: Ranks, name: str, seconds: float) -> Measurement:
    def ask() -> None:
        ranks.tell(name.encode())
        _sum_up(ranks, name)

    return sample(ask, seconds=seconds, amount=_SUMS[name])


def _sum_up(ranks: Ranks, name: str) -> None:
    partial_sums = torch.zeros(_SUM_BYTES[name] // 4)
    for _ in range(_SUMS[name]):
        ranks.sum_(partial_sums)


def take_part(descriptors: Sequence[int]) -> None:
    """Take part in the sums that the other process asks for, until it ends."""
    ranks = Ranks(Endpoints.of(1, 2, descriptors))
    try:
        ranks.meet(torch.device("cpu"))
        while True:
            _sum_up(ranks, ranks.hear().decode())
    except RankError:
        ranks.leave()


@dataclass(kw_only=True, slots=True)
class _Findings:
    """Results so far: ``figures`` by dotted key in the profile; ``surfaces`` with their spreads."""

    figures: dict[str, Measurement] = field(default_factory=dict)
    surfaces: list[tuple[Surface, float]] = field(default_factory=list)
    capacities: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    busy_elsewhere: float = 0.0

    def read(self, unit: str, figures: dict[str, Measure], pool: Pool, effort: Effort) -> dict[str, Measurement]:
        """Measure the figures, with the points of the surfaces of ``unit``; return the readings of all ``figures``. The
        peak of the unit is its fastest product."""
        on_cpu = unit == "cpu"
        point_s, seconds = (effort.point_s, effort.host_s) if on_cpu else (effort.gpu_point_s, effort.device_s)
        measurements: dict[str | Point, tuple[Measure, float]] = {}
        measurements |= {key: (measure_one, effort.figure_s) for key, measure_one in figures.items()}
        measurements |= {
            point: (measure_one, point_s) for point, measure_one in surfaces.points(unit, pool, effort).items()
        }
        if not on_cpu:
            for measure_one, _ in measurements.values():
                measure_one(0.0)  # kernels are loaded at their first use
        measured, busy = over_rounds(measurements, quiet_rounds=effort.quiet_rounds, seconds=seconds)
        self.busy_elsewhere = max(self.busy_elsewhere, busy)
        readings = {key: reading for key, reading in measured.items() if isinstance(key, str)}
        curves = {point: reading for point, reading in measured.items() if isinstance(point, tuple)}
        self.figures |= {key: reading for key, reading in readings.items() if "." in key}
        names = {name for name, _, _ in curves}
        self.surfaces += [surfaces.surface_of(name, curves) for name in EFFICIENCY if name in names]
        products = (f"{unit}_linear", f"{unit}_experts", surfaces.LARGE)
        fastest = max(
            (reading for (name, *_), reading in curves.items() if name in products), key=lambda reading: reading.rate
        )
        self.figures[f"processors.{unit}.peak"] = fastest
        return readings


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
    began, findings, scratch = time.perf_counter(), _Findings(), None
    with torch.inference_mode(), ExitStack() as stack:
        if disk_dir is not None:
            say(f"writing a scratch file in {disk_dir}")
            try:
                scratch = stack.enter_context(disk.Scratch(disk_dir, effort.disk_bytes, seconds=effort.disk_write_s))
                findings.capacities["disk"] = shutil.disk_usage(disk_dir).total
            except ConfigError as error:
                if disk_needed:
                    raise
                findings.notes.append(str(error))
        sums: dict[str, Measure] = {}
        if effort.exchanges and not machine.discrete:
            try:
                sums = stack.enter_context(exchanges())
            except RankError as error:
                findings.notes.append(f"exchanges with another process cannot be measured: {error}")
        pool = _host_pool(effort)
        say("measuring forms of kernels")
        findings.kernels = fastest_forms(pool)
        variants.choose(findings.kernels)  # what is measured from here on is what will run
        say("measuring memory, processor and disk" if scratch else "measuring memory and processor")
        _measure_host(findings, pool, scratch, sums, effort)
        if machine.discrete:
            say("measuring the GPU and its link")
            _measure_device(findings, machine, pool, effort)
    if findings.busy_elsewhere > DISTURBED_CORES:
        findings.figures["measured.busy_elsewhere"] = Measurement(rate=findings.busy_elsewhere, spread=0.0)
    return _profile(name, machine, findings, time.perf_counter() - began)


def _host_pool(effort: Effort) -> Pool:
    free = available_bytes()
    if free // SHARE_OF_FREE < LEAST_POOL_BYTES:
        raise ConfigError(
            f"the machine cannot be measured: {format_bytes(free)} of memory is free, and at least "
            f"{format_bytes(SHARE_OF_FREE * LEAST_POOL_BYTES)} is needed"
        )
    size = min(effort.pool_bytes, free // SHARE_OF_FREE)
    return Pool(size, device=torch.device("cpu"), dtype=to_torch(BFLOAT16))


def _measure_host(
    findings: _Findings, pool: Pool, scratch: disk.Scratch | None, sums: dict[str, Measure], effort: Effort
) -> None:
    """Indispensable figures are measured first, because a slow machine omits the last ones. ``sums``: `exchanges`."""
    findings.capacities["host"] = memory_limit_bytes()
    figures: dict[str, Measure] = {
        "tiers.host.bandwidth": pool.measure(surfaces.read_work),
        "measured.host_copy": pool.measure(surfaces.copy_work),
        "measured.cpu_task": partial(surfaces.layer_phases, pool),
        **sums,
    }
    if scratch is not None:
        work, _ = surfaces.layer_work(pool, _large_expert(pool, effort), _BUSY_ROWS)
        figures |= {
            _CACHED: partial(disk.cached_reads, scratch),
            _LANE: partial(disk.lane_reads, scratch),
            _ALONE: lambda seconds: sample(work, seconds=seconds),
            _BESIDE: partial(disk.beside_reads, work, scratch),
            _READS_BESIDE: partial(disk.reads_beside, work, scratch),
        }
        if scratch.direct is not None:
            figures[_DIRECT] = partial(disk.direct_reads, scratch)
    readings = findings.read("cpu", figures, pool, effort)
    if scratch is not None:
        _judge_disk(findings, readings, past_cache=disk.past_cache(scratch))
    if sums:
        findings.figures |= exchange_figures(readings)


def _judge_disk(findings: _Findings, readings: dict[str, Measurement], *, past_cache: bool) -> None:
    """Store the speed of the disk lane, or of direct reads if the lane's reads were served by the page cache."""
    lane, direct = readings[_LANE], readings.get(_DIRECT)
    if not past_cache and disk.from_cache(lane, readings[_CACHED]):
        if direct is None:
            del findings.capacities["disk"], findings.figures[_LANE], findings.figures[_CACHED]
            findings.notes.append("the disk could not be told from the page cache")
            return
        findings.notes.append("the page cache could not be emptied, so the disk was read past it")
        findings.figures[_LANE] = lane = direct
    alone, beside, reads = readings[_ALONE], readings[_BESIDE], readings[_READS_BESIDE]
    for key, rate, spread in (
        ("measured.cpu_under_disk", beside.rate / alone.rate, beside.spread),
        ("measured.disk_under_cpu", reads.rate / lane.rate, lane.spread),
    ):
        findings.figures[key] = Measurement(rate=min(1.0, rate), spread=spread)


def _measure_device(findings: _Findings, machine: Machine, host: Pool, effort: Effort) -> None:
    device = machine.device
    free, findings.capacities["device"] = Device(device).memory()
    dtype = to_torch(machine.native_dtype(BFLOAT16))
    pool = Pool(min(effort.pool_bytes, free // SHARE_OF_FREE), device=device, dtype=dtype)
    attend, _ = surfaces.decode_work(host, _BUSY_CONTEXT if host.holds((_BUSY_CONTEXT, surfaces.KV_NUMBERS)) else 64)
    figures: dict[str, Measure] = {
        "tiers.device.bandwidth": pool.measure(surfaces.read_work),
        "measured.gpu_launch": launches(device),
        **measure_links(device, min(effort.link_bytes, host.nbytes), attend),
    }
    findings.read("gpu", figures, pool, effort)


def _large_expert(pool: Pool, effort: Effort) -> Shape:
    """Shape of experts of which the pool holds many, so that reading their weights dominates the time."""
    fitting = [(hidden, width) for hidden, width in effort.experts if pool.holds((16 * hidden, 3 * width))]
    return fitting[-1] if fitting else effort.experts[0]


def _profile(name: str, machine: Machine, findings: _Findings, took_s: float) -> HardwareProfile:
    figures = findings.figures.items()
    values = {key: significant(1 / figure.rate if key in _IN_SECONDS else figure.rate) for key, figure in figures}
    counts = {"cpu": 1}
    ways: tuple[tuple[str, str], ...] = ()
    if machine.discrete:
        counts = {"gpu": 1, "cpu": 1}  # the engine uses one GPU, however many there are
        ways = (("host", "device"), ("device", "host"))
    return HardwareProfile(
        name=name,
        date=time.strftime("%Y-%m-%d"),
        source="measured on the machine itself by moelight profile",
        notes="; ".join([f"{describe(machine)}, in {took_s:.0f} s", *findings.notes]),
        tiers=tuple(
            Tier(
                name=tier,
                capacity_bytes=findings.capacities[tier],
                bandwidth_bytes_per_s=values[f"tiers.{tier}.bandwidth"],
            )
            for tier in ("device", "host", "disk")
            if tier in findings.capacities
        ),
        links=tuple(
            Link(src=src, dst=dst, bandwidth_bytes_per_s=values[f"links.{src}{TO}{dst}.bandwidth"]) for src, dst in ways
        ),
        processors=tuple(
            Processor(
                name=unit,
                count=count,
                peak_flops=values[f"processors.{unit}.peak"],
                bfloat16=machine.bf16 or unit == "cpu",
            )
            for unit, count in counts.items()
        ),
        measured=tuple(
            (key.removeprefix("measured."), value) for key, value in values.items() if key.startswith("measured.")
        ),
        efficiency=tuple(surface for surface, _ in findings.surfaces),
        spread=(
            *((key, significant(figure.spread, 2)) for key, figure in figures),
            *((f"efficiency.{surface.name}", significant(spread, 2)) for surface, spread in findings.surfaces),
        ),
        kernels=tuple(findings.kernels.items()),
    )


def run_calibration(device: str, directory: str, file: str) -> int:
    """Measure and write the profile. Return 0, or 2 with one line on stderr if the measurement fails."""
    try:
        profile = measure_machine(find_machine(device), QUICK, name="auto", disk_dir=Path(directory), disk_needed=False)
        write_hardware_profile(profile, Path(file))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_calibration(*sys.argv[1:]))
