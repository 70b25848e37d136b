"""Gauges on tiny operands: each gives a plausible figure, in the unit it says, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moelight.core.errors import ConfigError
from moelight.core.units import KiB, MiB
from moelight.hrm.machine_model import speeds_of
from moelight.kernels import native
from moelight.profiles.hardware import EFFICIENCY, read_hardware_profile
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime.calibration import disk, machine, surfaces, timing
from moelight.runtime.calibration.effort import FULL, QUICK, Effort
from moelight.runtime.calibration.surfaces import LEAST_TURNS, Pool
from moelight.runtime.calibration.timing import Measurement, Others, over_rounds, reading_of, sample
from moelight.runtime.machine import Machine, find_machine

CPU = torch.device("cpu")
TINY = replace(
    QUICK,
    pool_bytes=16 * MiB,
    link_bytes=64 * KiB,
    disk_bytes=2 * disk.BLOCK_BYTES,
    quiet_rounds=1,
    host_s=60.0,  # a busy machine leaves no gauge out
    device_s=60.0,
    figure_s=0.002,
    point_s=0.002,
    gpu_point_s=0.002,
    rows=(1, 5, 16, 64),
    gpu_rows=(1, 16),
    linear=((64, 32), (128, 64)),
    experts=((32, 24), (64, 48)),
    contexts=(32, 96),
    prompts=(8, 24),
    touching=(2, 8),
    large=((64, 64), 32),
    gpu_large=((64, 64), 32),
    exchanges=False,
)


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is busy, one round is enough."""
    monkeypatch.setattr(timing, "DISTURBED_CORES", float("inf"))


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(8 * MiB, device=CPU, dtype=torch.bfloat16)


def points_of(work: str, pool: Pool, **sizes: object) -> dict[surfaces.Point, timing.Measure]:
    """The points of one surface of the CPU, over other sizes than `TINY`."""
    result = surfaces.points("cpu", pool, replace(TINY, **sizes))
    return {point: measure for point, measure in result.items() if point[0] == f"cpu_{work}"}


def test_a_reading_is_the_median_and_the_width_of_the_middle_half() -> None:
    reading = reading_of([1.0, 2.0, 4.0, 3.0, 100.0], amount=6.0)
    assert reading == Measurement(rate=2.0, spread=pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([1.5, 0.0, 0.7, 0.01, 0.1], {"a": 4.0, "b": 2.0}, id="the median of undisturbed rounds"),
        pytest.param([1.5, 0.7, 0.9, 0.5, 0.3], {"a": 9.0, "b": 8.0}, id="the fastest of disturbed ones"),
    ],
)
def test_undisturbed_rounds_count_alike(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, others: list[float], expected: dict[str, float]
) -> None:
    busy = iter(others)

    def round_ends() -> float:
        clock.sleep(1.0)
        return next(busy)

    monkeypatch.setattr(timing, "Others", lambda: SimpleNamespace(cores=round_ends))
    rates = {"a": iter([1.0, 5.0, 9.0, 3.0, 4.0]), "b": iter([8.0, 1.0, 1.0, 7.0, 2.0])}
    measurements = {
        key: (lambda seconds, original=rate: Measurement(rate=next(original), spread=seconds), 0.5)
        for key, rate in rates.items()
    }
    result, least = over_rounds(measurements, quiet_rounds=3, seconds=4.5)
    assert {key: reading.rate for key, reading in result.items()} == expected
    assert least == min(others)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only ``sleep`` moves."""
    result = SimpleNamespace(now=0.0, perf_counter=lambda: result.now, process_time=lambda: 0.0)

    def sleep(seconds: float) -> None:
        result.now += seconds

    result.sleep = sleep
    monkeypatch.setattr(timing, "time", result)
    monkeypatch.setattr(surfaces, "time", result)
    return result


def test_a_sample_warms_up_counts_calls_and_waits(clock: SimpleNamespace) -> None:
    calls, waits = [], []

    def work() -> None:
        calls.append(1)
        clock.sleep(1e-4)

    reading = sample(work, seconds=0.02, amount=3.0, finish=lambda: waits.append(1))
    assert len(calls) > len(waits) > 2
    assert reading.rate == pytest.approx(3e4) and reading.spread == pytest.approx(0)
    slow = sample(lambda: clock.sleep(0.02), seconds=0.001, amount=1.0)
    assert slow.rate == pytest.approx(50) and slow.spread == 0


def test_a_slow_machine_leaves_out_the_last_gauges_but_never_the_first(clock: SimpleNamespace) -> None:
    def slow(seconds: float) -> Measurement:
        clock.sleep(0.02)
        return Measurement(rate=1.0, spread=0.0)

    result, _ = over_rounds(dict.fromkeys(range(50), (slow, 0.0)), quiet_rounds=3, seconds=0.03)
    assert 0 in result and 1 < len(result) < 10


def test_the_pool_is_written_and_walked_round(pool: Pool) -> None:
    assert pool.buffer.count_nonzero() > 0.99 * pool.buffer.numel()
    assert pool.holds((1024, 1024)) and not pool.holds((2048, 1024))
    groups = pool.groups((100, 7), (50, 3))
    seen = {first.data_ptr() for first, second in itertools.islice(groups, 20_000)}
    assert len(seen) >= LEAST_TURNS
    first, second = next(groups)
    assert first.shape == (100, 7) and second.shape == (50, 3)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    start = pool.buffer.data_ptr()
    assert all(start <= pointer <= start + pool.nbytes - first.nbytes for pointer in seen)


def test_memory_is_read_copied_and_touched(pool: Pool) -> None:
    read, copied = (pool.measure(work)(0.01) for work in (surfaces.read_work, surfaces.copy_work))
    assert 1e8 < read.rate < 1e13 and 1e8 < copied.rate < 1e13
    assert 1e6 < pool.measure(surfaces.norm_work, 4, 32)(0.005).rate < 1e12


def test_speeds_of_products_are_flop_per_second_by_rows_and_bytes_of_weights(pool: Pool) -> None:
    points = points_of("linear", pool, linear=((64, 32), (4096, 4096)), rows=(1, 5))
    assert list(points) == [("cpu_linear", 2 * 64 * 32, 1), ("cpu_linear", 2 * 64 * 32, 5)]  # the others do not fit
    experts = points_of("experts", pool, experts=((32, 24),), rows=(1, 5, 64))
    assert {size for _, size, _ in experts} == {2 * 3 * 32 * 24}
    _, flops = surfaces.moe_work(pool, (32, 24), 8, 20)
    assert flops == 20 * surfaces.TOP_K * 6 * 32 * 24
    readings = {point: gauge(0.002) for point, gauge in {**points, **experts}.items()}
    assert all(1e4 < reading.rate < 1e13 for reading in readings.values())
    surface, spread = surfaces.surface_of("cpu_experts", readings)
    assert surface.sizes == (2.0 * 3 * 32 * 24,) and spread >= 0
    rows = surface.curves[0].x
    assert rows[0] == 1 and 5 <= rows[1] < 5.2 and rows[2] == pytest.approx(64)  # of the experts that some token meets


def test_speed_of_decoding_is_bytes_of_keys_and_values(pool: Pool) -> None:
    points = points_of("attention", pool, contexts=(32, 96, 1 << 20))
    assert [context for _, _, context in points] == [32, 96]  # a cache of the last length does not fit
    work, amount = surfaces.decode_work(pool, 96)
    batch = amount / (96 * 2 * surfaces.KV_HEADS * surfaces.HEAD_DIM * 2)
    assert batch == min(64, 8 * MiB // (96 * 4 * KiB))
    work()
    assert all(1e4 < gauge(0.002).rate < 1e13 for gauge in points.values())


def test_decoding_on_a_device_reads_as_much(pool: Pool) -> None:
    work, amount = surfaces.device_decode_work(pool, 64)
    assert amount == min(64, 8 * MiB // (64 * 4 * KiB)) * 64 * 4 * KiB
    out = work()
    assert isinstance(out, torch.Tensor) and out.shape[1:] == (32, 128)


def test_speed_of_prompts_counts_attended_pairs(pool: Pool) -> None:
    _, flops = surfaces.prefill_work(pool, 8)
    assert flops == 4 * 128 * 32 * (8 * 9 / 2)
    work, all_flops = surfaces.device_prefill_work(pool, 128)
    assert all_flops == surfaces.PROMPT_TOKENS / 128 * 4 * 128 * 32 * (128 * 129 / 2)
    out = work()
    assert isinstance(out, torch.Tensor) and out.shape == (surfaces.PROMPT_TOKENS, 32, 128)
    assert points_of("prefill", pool, prompts=(8,))["cpu_prefill", 0, 8](0.002).rate > 0


def test_an_act_takes_microseconds_beside_its_arithmetic(pool: Pool) -> None:
    with torch.inference_mode():
        reading = surfaces.layer_phases(pool, 0.05)
    assert 2e-6 < 1 / reading.rate < 0.05


def test_the_arithmetic_of_acts_is_taken_off(clock: SimpleNamespace) -> None:
    rest = surfaces._in_turn(lambda: clock.sleep(3e-3), lambda: clock.sleep(1e-3), 0.05)
    assert len(rest) > 5 and rest == pytest.approx([2e-3] * len(rest))
    rest = surfaces._in_turn(lambda: clock.sleep(1e-6), lambda: clock.sleep(1e-3), 0.01)
    assert all(item > 0 for item in rest)


def test_norms_and_sums_are_read_by_the_bytes_an_act_touches(pool: Pool) -> None:
    with torch.inference_mode():
        points = points_of("elementwise", pool, touching=(2, 8))
        assert list(points) == [("cpu_elementwise", 0, 2 * 2048 * 40), ("cpu_elementwise", 0, 8 * 2048 * 40)]
        assert all(1e5 < gauge(0.01).rate < 1e12 for gauge in points.values())


def test_no_block_is_read_after_its_neighbour_and_each_once() -> None:
    for blocks in (2, 3, 7, 128):
        order = disk.lane_order(blocks)
        assert sorted(order) == list(range(blocks))
        assert blocks < 4 or all(after != before + 1 for before, after in itertools.pairwise(order))


def test_transfers_and_launches_with_the_cpu_as_its_own_device() -> None:
    turns = []
    measurements = machine.measure_links(CPU, 64 * KiB, lambda: turns.append(time.sleep(1e-4)))
    assert all(gauge(0.005).rate > 0 for gauge in measurements.values())
    assert turns and not [thread for thread in threading.enumerate() if "beside" in thread.name]
    assert machine.launches(CPU)(0.005).rate > 0


def scratch_files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def test_the_scratch_file_has_no_name(tmp_path: Path) -> None:
    with disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0) as scratch:
        assert scratch.blocks == 2 and not scratch_files(tmp_path)
        with disk.block_buffer() as block:
            scratch.read(0, block)
            first = bytes(block)
            scratch.read(1, block)
            assert len({first, bytes(block)}) == 2
        descriptors = [item for item in (scratch.buffered, scratch.direct) if item is not None]
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_ctrl_c_while_the_file_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    opened: list[int] = []
    real = os.open

    def noted(*arguments, **named) -> int:  # type: ignore[no-untyped-def]
        opened.append(real(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(os, "pwritev", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0)
    assert not scratch_files(tmp_path) and opened
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_disk_without_a_direct_way_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def refuse_direct(descriptor: int, buffers: list[mmap.mmap], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    with disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0) as scratch:
        assert scratch.direct is None and scratch.blocks == 2
        assert disk.lane_reads(scratch, 0.001).rate > 0


def test_the_disk_is_read_three_ways_and_beside_work(tmp_path: Path) -> None:
    with disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0) as scratch:
        assert disk.cached_reads(scratch, 0.001).rate > 0
        assert disk.lane_reads(scratch, 0.001).rate > 0
        if scratch.direct is not None:
            assert disk.direct_reads(scratch, 0.001).rate > 0
        assert disk.beside_reads(lambda: time.sleep(1e-3), scratch, 0.02).rate > 0
    assert not [thread for thread in threading.enumerate() if "scratch" in thread.name]


def test_reads_as_fast_as_the_page_cache_did_not_come_from_the_disk() -> None:
    cached = Measurement(rate=20e9, spread=0.0)
    assert disk.from_cache(Measurement(rate=19e9, spread=0.0), cached)
    assert not disk.from_cache(Measurement(rate=3e9, spread=0.0), cached)


@pytest.mark.usefixtures("one_round")
def test_a_lane_that_reads_past_the_page_cache_is_believed_however_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old memory and a new disk: direct reads may be as fast as copies from the page cache."""
    with disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0) as scratch:
        past_cache = disk.past_cache(scratch)
    monkeypatch.setattr(disk, "_CACHED_ABOVE", 0.0)  # every lane is faster than that
    result = machine.measure_machine(find_machine("cpu"), TINY, name="box", disk_dir=tmp_path)
    assert ("the page cache could not be emptied" in result.notes) == (not past_cache)


def test_reads_beside_work_are_timed_from_arrival_to_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes a while to begin is as fast as one that does not."""
    begin, late_s = disk._DiskLane.__init__, 0.4

    def late(self: disk._DiskLane, scratch: disk.Scratch) -> None:
        time.sleep(late_s)
        begin(self, scratch)

    monkeypatch.setattr(disk._DiskLane, "__init__", late)
    with disk.Scratch(tmp_path, 2 * disk.BLOCK_BYTES, seconds=5.0) as scratch:
        began = time.perf_counter()
        reading = disk.reads_beside(lambda: time.sleep(1e-3), scratch, 0.0)
        took_s = time.perf_counter() - began
    assert reading.rate >= disk.BLOCK_BYTES / (took_s - late_s)


def test_directories_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none: the disk cannot be measured there \(No such file"):
        disk.Scratch(tmp_path / "none", MiB, seconds=1.0)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=MiB))
    with pytest.raises(ConfigError, match="--disk-dir"):
        disk.Scratch(tmp_path, MiB, seconds=1.0)


def test_others_are_what_keeps_processors_busy_beside_this_process(tmp_path: Path) -> None:
    usable = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  0 0 0 0 0 0 0 0\ncpu{usable} 100 0 100 999 0 0 0 0 0 0\ncpu9999 0 0 0 0 0 0 0 0\n")
    others = Others(proc=tmp_path)
    time.sleep(0.05)
    stat.write_text(f"cpu{usable} 110 0 100 999 0 0 0 50 0 0\ncpu9999 9999 0 0 0 0 0 0 0\n")
    seconds = 60 / os.sysconf("SC_CLK_TCK")
    assert 0.5 * seconds / 0.06 < others.cores() < seconds / 0.05
    assert Others(proc=tmp_path / "none").cores() == 0.0


@pytest.fixture
def bound_apart() -> Iterator[tuple[int, int]]:
    """The first and the last processor that this process may use: this thread is bound to the one, a worker to the
    other, as benchmarks bind them."""
    usable = sorted(os.sched_getaffinity(0))
    selected, theirs = usable[0], usable[-1]
    over, bound = threading.Event(), threading.Event()

    def worker() -> None:
        os.sched_setaffinity(0, {theirs})
        bound.set()
        over.wait()

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        bound.wait()
        os.sched_setaffinity(0, {selected})
        yield selected, theirs
    finally:
        over.set()
        os.sched_setaffinity(0, set(usable))
        thread.join()


def test_others_are_seen_on_every_core_that_a_thread_is_bound_to(
    bound_apart: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own work on both cores, 0.2 s in all, in a second in which the worker's core was busy throughout."""
    selected, theirs = bound_apart
    clock = SimpleNamespace(perf_counter=lambda: 0.0, process_time=lambda: 0.0)
    monkeypatch.setattr("moelight.runtime.calibration.timing.time", clock)
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    names = [f"cpu{number}" for number in dict.fromkeys((selected, theirs))]
    stat.write_text("".join(f"{name} 0 0 0 0 0 0 0 0 0 0\n" for name in names))
    others = Others(proc=tmp_path)
    busy = {f"cpu{selected}": ticks // 10, f"cpu{theirs}": ticks}
    stat.write_text("".join(f"{name} {busy[name]} 0 0 0 0 0 0 0 0 0\n" for name in names))
    clock.perf_counter, clock.process_time = lambda: 1.0, lambda: 0.2
    assert others.cores() == pytest.approx(sum(busy.values()) / ticks - 0.2)


def test_another_program_on_a_core_is_seen_where_every_thread_has_a_core_of_its_own(
    bound_apart: tuple[int, int],
) -> None:
    _, theirs = bound_apart
    spinning = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(spinning.pid, {theirs})
        assert spinning.stdout is not None and spinning.stdout.readline()
        others, until = Others(), time.process_time() + 0.5
        while time.process_time() < until:
            pass
        assert others.cores() > 0.3
    finally:
        spinning.kill()
        spinning.communicate()


@pytest.mark.usefixtures("one_round")
def test_a_machine_without_a_gpu_becomes_a_profile(tmp_path: Path) -> None:
    message: list[str] = []
    effort = replace(TINY, exchanges=True)
    result = machine.measure_machine(find_machine("cpu"), effort, name="box", disk_dir=tmp_path, say=message.append)
    assert result.name == "box" and result.date.startswith("20") and "threads" in result.notes
    assert [tier.name for tier in result.tiers] == ["host", "disk"] and not result.links
    assert {surface.name for surface in result.efficiency} == {name for name in EFFICIENCY if name.startswith("cpu")}
    assert {"host_copy", "cpu_task", "disk_cached", "cpu_under_disk", "disk_under_cpu"} <= dict(result.measured).keys()
    speeds = speeds_of(result)
    assert speeds.exchange == result.figure("exchange") and speeds.exchange_s == result.figure("exchange_latency")
    assert speeds.exchange > 1e6 and 1e-7 < speeds.exchange_s < 1.0
    linear = result.surface("cpu_linear")
    assert linear is not None and linear.sizes == (2 * 64 * 32, 2 * 128 * 64) and linear.curves[0].x == (1, 5, 16, 64)
    unit = result.processor("cpu")
    best = max(y for name in ("cpu_linear", "cpu_experts") for c in result.surface(name).curves for y in c.y)  # type: ignore[union-attr]
    assert unit is not None and unit.peak_flops >= best
    assert set(dict(result.spread)) == set(result.figure_keys()) - {"tiers.host.capacity", "tiers.disk.capacity"}
    write_hardware_profile(result, tmp_path / "box.yaml")
    assert read_hardware_profile(tmp_path / "box.yaml") == result
    assert message and list(tmp_path.iterdir()) == [tmp_path / "box.yaml"]


@pytest.mark.usefixtures("one_round")
def test_a_machine_with_a_gpu_becomes_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device: what is measured, and where it goes, is what a GPU would give."""
    backend = SimpleNamespace(
        mem_get_info=lambda _: (64 * MiB, 80 * MiB),
        device_count=lambda: 2,
        get_device_properties=lambda _: SimpleNamespace(name="Twin 9000"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    monkeypatch.setattr(machine, "describe", lambda _: "two twins")
    result = machine.measure_machine(Machine(device=CPU, discrete=True), TINY, name="box", disk_dir=None)
    device, gpu = result.tier("device"), result.processor("gpu")
    assert device is not None and device.capacity_bytes == 80 * MiB and result.tier("disk") is None
    assert gpu is not None and gpu.count == 1  # the engine uses one
    assert result.link("host", "device") is not None and result.link("device", "host") is not None
    assert {surface.name for surface in result.efficiency} == set(EFFICIENCY)
    figures = dict(result.measured)
    assert {
        "host_to_device_pageable",
        "device_to_host_pageable",
        "host_to_device_under_attention",
    } <= figures.keys()
    assert 1e-8 < figures["gpu_launch"] < 1e-2 and 1e-8 < figures["transfer"] < 1e-2


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="twin"):
        machine.measure_machine(find_machine("twin"), TINY, name="x", disk_dir=None)
    with pytest.raises(ConfigError, match="none"):
        machine.measure_machine(find_machine("cpu"), TINY, name="x", disk_dir=tmp_path / "none")
    monkeypatch.setattr(machine, "available_bytes", lambda: 60 * MiB)
    with pytest.raises(ConfigError, match=r"60\.0MiB of memory is free, and at least 64\.0MiB"):
        machine.measure_machine(find_machine("cpu"), TINY, name="x", disk_dir=None)


@pytest.mark.usefixtures("one_round")
def test_a_directory_that_is_not_needed_only_leaves_a_note(tmp_path: Path) -> None:
    tiny = replace(TINY, rows=(1,), contexts=(32,), prompts=(8,))
    result = machine.measure_machine(find_machine("cpu"), tiny, name="x", disk_dir=tmp_path / "none", disk_needed=False)
    assert result.tier("disk") is None and "cannot be measured there" in result.notes


@pytest.mark.parametrize(("effort", "most_s"), [(FULL, 110), (QUICK, 16)])
def test_efforts_end_in_time_and_meet_every_form_of_product(effort: Effort, most_s: float) -> None:
    assert effort.disk_write_s + effort.host_s + effort.device_s < most_s
    assert effort.rows == tuple(sorted(effort.rows)) and {1, 12, 60, 64} <= set(effort.rows)
    assert all(context % surfaces.BLOCK == 0 for context in effort.contexts)


@pytest.mark.skipif(not native.available(), reason="the twin of the kernel is slow")
def test_decoding_reads_no_faster_than_memory_would_allow_by_much(pool: Pool) -> None:
    """A count of bytes that is wrong by a factor would show: the pool is in the cache, but not ten times over."""
    decode_once = points_of("attention", pool, contexts=(96,))["cpu_attention", 0, 96]
    read, decode = (
        max(measure(0.05).rate for _ in range(5)) for measure in (pool.measure(surfaces.read_work), decode_once)
    )
    assert decode < 10 * read
