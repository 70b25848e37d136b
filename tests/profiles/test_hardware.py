"""Machines: every shipped value has a source, units are honoured, what cannot be a machine is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.core.units import GiB, MiB
from moelight.profiles.files import profile_names
from moelight.profiles.hardware import Link, Processor, Tier, load_hardware_profile, read_hardware_profile
from moelight.profiles.quantities import bandwidth_bytes_per_s, capacity_bytes, flops_per_s

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


def test_a_value_may_bring_its_source(tmp_path: Path) -> None:
    text = PLAIN.replace("capacity: 24GiB", "capacity: {value: 24GiB, source: sheet}").replace(
        "box", "box\nsource: all"
    )
    machine = read_hardware_profile(written(tmp_path, text))
    assert machine.tier("device") == read_hardware_profile(written(tmp_path, PLAIN)).tier("device")
    assert machine.source_of("tiers.device.capacity") == "sheet"
    assert machine.source_of("tiers.device.bandwidth") == "all"


@pytest.mark.parametrize("name", profile_names("hardware"))
def test_every_value_of_a_shipped_machine_has_a_source(name: str) -> None:
    machine = load_hardware_profile(name)
    assert machine.name == name
    own = dict(machine.sources)
    for tier in machine.tiers:
        assert {f"tiers.{tier.name}.capacity", f"tiers.{tier.name}.bandwidth"} <= own.keys()
    for link in machine.links:
        assert f"links.{link.src}_to_{link.dst}.bandwidth" in own
    for processor in machine.processors:
        assert f"processors.{processor.name}.peak" in own


def test_shipped_machines_state_what_their_parts_can_really_do() -> None:
    t4, amx = load_hardware_profile("t4"), load_hardware_profile("cpu-amx")
    link, memory = t4.link("host", "device"), t4.tier("device")
    assert link is not None and link.bandwidth_bytes_per_s <= 15.76e9
    assert memory is not None and memory.capacity_bytes == 15360 * MiB
    assert amx.tier("device") is None and amx.processor("gpu") is None and amx.tier("disk") is not None


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("capacity: 24GiB", "capacty: 24GiB", 3, "did you mean 'capacity'"),
        ("  disk:", "  dsik:", 5, "did you mean 'disk'"),
        ("  gpu:", "  tpu:", 10, "did you mean"),
        ("count: 2", "count: two", 10, "processors.gpu.count"),
        ("count: 2", "count: 0", 10, "processors.gpu.count"),
        ("24GiB", "24Gib/s", 3, "tiers.device.capacity"),
        ("24GiB", "-1", 3, "tiers.device.capacity"),
        ("24GiB", "true", 3, "tiers.device.capacity"),
        ("24GiB", "[1]", 3, "tiers.device.capacity"),
        ("24GiB", "{value: 1GiB, sauce: x}", 3, "did you mean 'source'"),
        ("24GiB", "{source: x}", 3, "'value'"),
        ("285GiB/s", "285GiB", 3, "tiers.device.bandwidth"),
        ("285GiB/s", "285GiB/h", 3, "tiers.device.bandwidth"),
        ("104TFLOP/s", "104TB/s", 10, "processors.gpu.peak"),
        ("104TFLOP/s", "104", 10, ""),
        ("host_to_device", "host_to_moon", 7, "links.host_to_moon"),
        ("host_to_device", "host_to_host", 7, "links.host_to_host"),
        ("  device_to_host: {bandwidth: 12e9}\n", "", 1, "links.device_to_host is missing"),
        ("  cpu: {peak: 1.6TFLOP/s}\n", "", 1, "processors.cpu"),
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
        assert read_hardware_profile(written(tmp_path, PLAIN.replace(old, new))).processors[0].peak_flops == 104
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


def test_units_are_different_words() -> None:
    assert capacity_bytes("1GiB", what="x") == 2**30 != capacity_bytes("1GB", what="x")
    assert bandwidth_bytes_per_s("1 GB/s", what="x") == 1e9
    assert flops_per_s("1.5 PFLOP/s", what="x") == 1.5e15
    assert flops_per_s(2e12, what="x") == flops_per_s("2TFLOPS", what="x")
