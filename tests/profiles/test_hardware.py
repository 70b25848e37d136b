"""Machines: every shipped value has a source, units are honoured, what cannot be a machine is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.core.units import GiB, MiB
from moelight.profiles.files import profile_names
from moelight.profiles.hardware import (
    Link,
    Processor,
    Tier,
    load_hardware_profile,
    read_hardware_profile,
)

PLAIN = """\
name: box
tiers:
  device: {capacity: 24GiB, bandwidth: 285GiB/s}
  host: {capacity: 197880360960, bandwidth: 76GiB/s}
  disk: {capacity: 1TB, bandwidth: 3.5GB/s}
links:
  host_to_device: {bandwidth: 16GiB/s}
  device_to_host: {bandwidth: 12e9}
processors:
  gpu: {count: 2, peak: 104TFLOP/s}
  cpu: {peak: 1.6TFLOP/s}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "box.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plain_file_needs_only_values_and_units(tmp_path: Path) -> None:
    machine = load_hardware_profile(str(written(tmp_path, PLAIN)))
    assert machine.tier("device") == Tier(name="device", capacity_bytes=24 * GiB, bandwidth_bytes_per_s=285.0 * GiB)
    assert machine.tier("host") == Tier(name="host", capacity_bytes=197880360960, bandwidth_bytes_per_s=76.0 * GiB)
    assert machine.tier("disk") == Tier(name="disk", capacity_bytes=10**12, bandwidth_bytes_per_s=3.5e9)
    assert machine.link("device", "host") == Link(src="device", dst="host", bandwidth_bytes_per_s=12e9)
    assert machine.link("disk", "host") is None
    assert machine.processor("gpu") == Processor(name="gpu", count=2, peak_flops=104e12)
    assert machine.processor("cpu") == Processor(name="cpu", count=1, peak_flops=1.6e12)


def test_a_gpu_may_lack_bfloat16(tmp_path: Path) -> None:
    text = PLAIN.replace("{count: 2,", "{bfloat16: false,")
    machine = load_hardware_profile(str(written(tmp_path, text)))
    assert machine.processor("gpu") == Processor(name="gpu", count=1, peak_flops=104e12, bfloat16=False)
    with pytest.raises(ConfigError, match=r"box.yaml:\d+: processors.gpu.bfloat16 must be true or false, not 'no!'"):
        load_hardware_profile(str(written(tmp_path, text.replace("false", "no!"))))


def test_a_value_may_bring_its_source(tmp_path: Path) -> None:
    text = PLAIN.replace("capacity: 24GiB", "capacity: {value: 24GiB, source: sheet}").replace(
        "box", "box\nsource: all"
    )
    machine = read_hardware_profile(written(tmp_path, text))
    assert machine.tier("device") == read_hardware_profile(written(tmp_path, PLAIN)).tier("device")
    assert machine.source_of("tiers.device.capacity") == "sheet"
    assert machine.source_of("tiers.device.bandwidth") == "all"


MEASURED = (
    PLAIN
    + """\
date: 2026-11-03
notes: two cores of a cloud host
measured:
  host_copy: 23.1GB/s
  cpu_task: 40us
  gpu_launch: 6e-06
  transfer: {value: 1.5ms, source: a stopwatch}
  cpu_under_disk: 0.8
efficiency:
  cpu_experts: {128MiB: {1: 20GFLOP/s, 16: 300GFLOP/s}, 8MiB: {16: 2e11, 1: 15GFLOP/s}}
  cpu_attention: {512: 18GB/s, 64: 12e9}
spread:
  measured.host_copy: 0.02
  efficiency.cpu_experts: 0
"""
)


def test_measured_figures_and_speeds_by_size_of_work(tmp_path: Path) -> None:
    machine = read_hardware_profile(written(tmp_path, MEASURED))
    assert machine.figure("host_copy") == 23.1e9
    assert (machine.figure("cpu_task"), machine.figure("gpu_launch"), machine.figure("transfer")) == (
        4e-5,
        6e-6,
        1.5e-3,
    )
    assert machine.figure("cpu_under_disk") == 0.8 and machine.figure("disk_cached") is None
    assert machine.source_of("measured.transfer") == "a stopwatch"
    experts, attention = machine.surface("cpu_experts"), machine.surface("cpu_attention")
    assert experts is not None and experts.sizes == (8 * MiB, 128 * MiB)
    assert experts.curves[0].x == (1, 16) and experts.at(1.0, 8 * MiB) == pytest.approx(15e9)
    assert experts.at(16.0, 32 * MiB) == pytest.approx((2e11 * 3e11) ** 0.5)
    assert attention is not None and attention.sizes == (0,) and attention.at(512.0) == pytest.approx(18e9)
    assert (machine.date, machine.notes) == ("2026-11-03", "two cores of a cloud host")
    assert dict(machine.spread) == {"measured.host_copy": 0.02, "efficiency.cpu_experts": 0}


def test_a_machine_without_a_gpu_needs_neither_links_nor_a_disk(tmp_path: Path) -> None:
    text = "name: box\ntiers: {host: {capacity: 64e9, bandwidth: 5E+10}}\nprocessors: {cpu: {peak: 2.5tflop/s}}\n"
    machine = read_hardware_profile(written(tmp_path, text))
    assert machine.tiers == (Tier(name="host", capacity_bytes=64 * 10**9, bandwidth_bytes_per_s=5e10),)
    assert machine.processors == (Processor(name="cpu", count=1, peak_flops=2.5e12),)
    assert not machine.links and not machine.measured and not machine.efficiency


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("host_copy: 23.1GB/s", "host_cpy: 23.1GB/s", 15, "did you mean 'host_copy'"),
        ("host_copy: 23.1GB/s", "host_copy: 23.1GiB", 15, "measured.host_copy"),
        ("cpu_task: 40us", "cpu_task: 40 minutes", 16, "write seconds or a unit"),
        ("cpu_task: 40us", "cpu_task: 0", 16, "measured.cpu_task"),
        ("cpu_under_disk: 0.8", "cpu_under_disk: 1.2", 19, "1.2 is out of range; a share"),
        ("cpu_under_disk: 0.8", "cpu_under_disk: 80%", 19, "is not a share"),
        ("  cpu_experts:", "  cpu_expert:", 21, "did you mean 'cpu_experts'"),
        ("{128MiB: {1: 20GFLOP/s", "{128MoB: {1: 20GFLOP/s", 21, "efficiency.cpu_experts"),
        ("8MiB: {16", "131072KiB: {16", 21, "a second time"),
        ("16: 300GFLOP/s", "1.0: 300GFLOP/s", 21, "is given twice"),
        ("16: 300GFLOP/s", "-3: 300GFLOP/s", 21, "a number above 0 as its key"),
        ("16: 300GFLOP/s", "16: 300GB/s", 21, "is not a speed"),
        ("16: 300GFLOP/s", "16: {value: }", 21, "must be a number, or text with a unit"),
        ("{128MiB: {1: 20GFLOP/s, 16: 300GFLOP/s}, 8MiB", "{64: 1e9, 8MiB", 21, "must be a mapping"),
        ("{512: 18GB/s, 64: 12e9}", "{8MiB: {512: 18GB/s}}", 22, "it has no sizes of weights"),
        ("{512: 18GB/s, 64: 12e9}", "{}", 22, "is empty"),
        ("  measured.host_copy: 0.02", "  measured.host_copi: 0.02", 24, "did you mean 'measured.host_copy'"),
        ("  measured.host_copy: 0.02", "  measured.host_copy: -1", 24, "at least 0"),
        ("date: 2026-11-03", "date: yesterday", 12, "must be a day"),
        ("notes: two cores of a cloud host", "notes: [1]", 13, "notes must be a single value"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert MEASURED.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read_hardware_profile(written(tmp_path, MEASURED.replace(old, new)))
    assert f"box.yaml:{line}:" in str(caught.value)
    assert says in str(caught.value)


GENERATION = {
    3: ("t4", "2xt4", "4xt4"),
    4: ("l4", "a10", "rtx3090", "rtx4090", "a100-40g", "a100-80g", "2xa100"),
    5: ("h100", "h200"),
}
WITH_GPU = tuple(name for names in GENERATION.values() for name in names)
SHIPPED = sorted([*WITH_GPU, "cpu-amx", "cpu-avx2", "laptop-nvme"])
# Bytes per second of 16 lanes: 8, 16, 32 GT/s each, 128 of 130 bits are payload.
PCIE = {3: 15.76e9, 4: 31.51e9, 5: 63.02e9}


def test_the_machines_that_are_shipped() -> None:
    assert list(profile_names("hardware")) == SHIPPED
    with_gpu = {name for name in SHIPPED if load_hardware_profile(name).processor("gpu") is not None}
    assert with_gpu == set(WITH_GPU)


def test_every_value_of_a_shipped_machine_has_a_source() -> None:
    for name in SHIPPED:
        machine = load_hardware_profile(name)
        assert machine.name == name and machine.source
        assert {key for key, _ in machine.sources} == set(machine.figure_keys())
        assert all(len(source) > 10 for _, source in machine.sources)


@pytest.mark.parametrize(("generation", "name"), [(g, name) for g, names in GENERATION.items() for name in names])
def test_no_shipped_link_is_faster_than_its_slot(generation: int, name: str) -> None:
    machine = load_hardware_profile(name)
    for link in machine.links:
        assert PCIE[generation] * 0.999 < link.bandwidth_bytes_per_s <= PCIE[generation]
        assert f"PCIe {generation}.0 x16" in machine.source_of(f"links.{link.src}_to_{link.dst}.bandwidth")
    assert {(link.src, link.dst) for link in machine.links} == {("host", "device"), ("device", "host")}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_are_machines(name: str) -> None:
    """The nearer the faster and smaller, and no figure that counts sparsity or both directions of a link."""
    machine = load_hardware_profile(name)
    device, host, disk = (machine.tier(tier) for tier in ("device", "host", "disk"))
    gpu, cpu = machine.processor("gpu"), machine.processor("cpu")
    assert host is not None and disk is not None and cpu is not None
    assert 50e9 < host.bandwidth_bytes_per_s < 350e9 and 16 * GiB <= host.capacity_bytes <= 512 * GiB
    assert 2e9 < disk.bandwidth_bytes_per_s < 8e9 and disk.capacity_bytes > host.capacity_bytes
    assert 0.5e12 < cpu.peak_flops < 120e12
    if device is not None and gpu is not None:
        assert device.bandwidth_bytes_per_s > 2 * host.bandwidth_bytes_per_s
        assert device.capacity_bytes * gpu.count < host.capacity_bytes
        assert 60e12 < gpu.peak_flops < 1000e12 and gpu.peak_flops > 4 * cpu.peak_flops
        assert gpu.count == (int(name[0]) if name[0].isdigit() else 1)
        ridge = gpu.peak_flops / device.bandwidth_bytes_per_s  # flop per byte of memory
        assert 70 < ridge < 450


def test_shipped_machines_state_what_their_parts_can_really_do() -> None:
    t4 = load_hardware_profile("t4").tier("device")
    assert t4 is not None and t4.capacity_bytes == 15360 * MiB
    peaks = {name: load_hardware_profile(name).processor("gpu") for name in ("t4", "l4", "rtx4090", "h100")}
    assert {name: gpu and gpu.peak_flops for name, gpu in peaks.items()} == {
        "t4": 65e12,
        "l4": 121e12,
        "rtx4090": 165.2e12,
        "h100": 989e12,
    }
    hosts = {name: load_hardware_profile(name).tier("host") for name in ("t4", "l4", "2xt4", "4xt4")}
    assert [host and host.capacity_bytes for host in hosts.values()] == [192e9, 192e9, 416e9, 416e9]


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("capacity: 24GiB", "capacty: 24GiB", 3, "did you mean 'capacity'"),
        ("  disk:", "  dsik:", 5, "did you mean 'disk'"),
        ("  gpu:", "  tpu:", 10, "did you mean"),
        ("count: 2", "count: two", 10, "processors.gpu.count"),
        ("count: 2", "count: 0", 10, "processors.gpu.count"),
        ("count: 2", "count: 100000000000", 10, "processors.gpu.count must be a whole number from 1 to 4,096"),
        ("104TFLOP/s", "1e-300", 10, "1e-300 is out of range; a speed is from 1KFLOP/s to 1,000,000PFLOP/s"),
        ("104TFLOP/s", "104", 10, "104 is out of range; a speed"),
        ("76GiB/s", "1e-30", 4, "1e-30 is out of range; a bandwidth is from 1KB/s to 1,000,000TB/s"),
        ("76GiB/s", "1e+30", 4, "1e+30 is out of range; a bandwidth"),
        ("76GiB/s", "1" + "0" * 400, 4, "is too large a number"),
        ("76GiB/s", "0x" + "f" * 5000, 4, "is too large a number"),
        ("76GiB/s", "76GFLOP/s", 4, "'76GFLOP/s' is not a bandwidth; write bytes/s or a unit"),
        ("  host: {capacity: 197880360960, bandwidth: 76GiB/s}\n", "", 1, "tiers.host is missing; every machine has"),
        ("24GiB", "24Gib/s", 3, "tiers.device.capacity"),
        ("24GiB", "-1", 3, "tiers.device.capacity"),
        ("24GiB", "true", 3, "tiers.device.capacity"),
        ("24GiB", "[1]", 3, "tiers.device.capacity"),
        ("24GiB", "{value: 1GiB, sauce: x}", 3, "did you mean 'source'"),
        ("24GiB", "{source: x}", 3, "'value'"),
        ("285GiB/s", "285GiB", 3, "tiers.device.bandwidth"),
        ("285GiB/s", "285GiB/h", 3, "tiers.device.bandwidth"),
        ("104TFLOP/s", "104TB/s", 10, "processors.gpu.peak"),
        ("104TFLOP/s", "104e12", 10, ""),
        ("host_to_device", "host_to_moon", 7, "links.host_to_moon"),
        ("host_to_device", "host_to_host", 7, "links.host_to_host"),
        ("  device_to_host: {bandwidth: 12e9}\n", "", 1, "links.device_to_host is missing"),
        ("  cpu: {peak: 1.6TFLOP/s}\n", "", 1, "processors.cpu is missing"),
        ("  gpu: {count: 2, peak: 104TFLOP/s}\n", "", 1, "belong together"),
        ("name: box", "name: 7", 1, "name must be text"),
        ("name: box\n", "", 1, "'name'"),
    ],
)
def test_what_is_no_machine_is_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert old in PLAIN
    if says == "":
        assert read_hardware_profile(written(tmp_path, PLAIN.replace(old, new))).processors[0].peak_flops == 104e12
        return
    with pytest.raises(ConfigError) as caught:
        read_hardware_profile(written(tmp_path, PLAIN.replace(old, new)))
    assert f"box.yaml:{line}:" in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_file_or_name_is_told() -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.yaml: cannot be read"):
        load_hardware_profile("/no/such.yaml")
    with pytest.raises(ConfigError, match="did you mean 'cpu-amx'"):
        load_hardware_profile("cpu_amx")
