"""``moelight profile``: what it prints, where it writes, and what it refuses before a minute has gone by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moelight.cli.profile import profile
from moelight.core.errors import ConfigError
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import HardwareProfile, Link, Processor, Tier, read_hardware_profile
from moelight.runtime.calibration import machine
from moelight.runtime.calibration.effort import FULL, QUICK
from moelight.runtime.machine_profile import kept_path

FOUND = HardwareProfile(
    name="box",
    notes="a box, 2 threads",
    tiers=(
        Tier(name="device", capacity_bytes=24 << 30, bandwidth_bytes_per_s=2.5e11),
        Tier(name="host", capacity_bytes=64 << 30, bandwidth_bytes_per_s=5.01e10),
    ),
    links=(
        Link(src="host", dst="device", bandwidth_bytes_per_s=1.23e10),
        Link(src="device", dst="host", bandwidth_bytes_per_s=1.3e10),
    ),
    processors=(Processor(name="gpu", count=2, peak_flops=1.1e14), Processor(name="cpu", count=1, peak_flops=9e11)),
    measured=(("host_copy", 2.3e10), ("cpu_task", 4.2e-5), ("cpu_under_disk", 0.87), ("busy_elsewhere", 1.25)),
    efficiency=(
        Surface(
            name="cpu_experts",
            sizes=(2359296.0, 22020096.0),
            curves=(Curve(x=(1.0, 64.0), y=(1.4e10, 1e11)), Curve(x=(1.0,), y=(2e10,))),
        ),
        Surface(name="cpu_attention", sizes=(0.0,), curves=(Curve(x=(64.0, 4096.0), y=(2.4e10, 3.8e10)),)),
    ),
    spread=(("tiers.host.bandwidth", 0.02), ("efficiency.cpu_experts", 0.05)),
)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every call that would have measured."""
    calls: list[dict[str, Any]] = []

    def measure(_: object, effort: object, *, say: Callable[[str], None], **named: Any) -> HardwareProfile:
        say("looking")
        calls.append({"effort": effort, **named})
        return FOUND

    monkeypatch.setattr(machine, "measure_machine", measure)
    return calls


def test_the_profile_is_written_and_shown(
    tmp_path: Path, measuring: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    profile(output=tmp_path / "mine.yaml", device="cpu", quick=True, disk_dir=tmp_path)
    assert read_hardware_profile(tmp_path / "mine.yaml") == FOUND
    assert measuring == [{"effort": QUICK, "name": "mine", "disk_dir": tmp_path, "disk_needed": True}]
    shown = capsys.readouterr()
    assert f"use it with --hw {tmp_path / 'mine.yaml'}" in " ".join(shown.err.split())
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "tiers.host.bandwidth 50.1 GB/s 2.0 % reading" in lines
    assert "links.host_to_device.bandwidth 12.3 GB/s pinned" in lines
    assert "processors.gpu.peak 110 Tflop/s of each of 2; the fastest product" in lines
    assert any(line.startswith("cpu_task 42.0 µs") for line in lines)
    assert any(line.startswith("cpu_under_disk 87 %") for line in lines)
    assert any(line.startswith("busy_elsewhere 1.25 kept busy by other programs") for line in lines)
    at = lines.index("experts on the CPU, flop/s spread 5.0 %")
    assert lines[at + 1 : at + 4] == ["rows 1 64", "2.2MiB 14.0G 100G", "21.0MiB 20.0G"]
    assert "context 64 4,096" in lines and "24.0G 38.0G" in lines


def test_without_a_name_it_is_kept_for_hw_auto(
    measuring: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    profile(device="cpu")
    assert read_hardware_profile(kept_path("cpu")) == FOUND
    assert measuring == [{"effort": FULL, "name": "auto", "disk_dir": tmp_path, "disk_needed": False}]
    assert "--hw auto uses it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"output": Path("mine.json")}, r"--output mine\.json: a profile is a \.yaml file"),
        ({"output": Path("none/mine.yaml")}, "there is no directory none"),
        ({"disk_dir": Path("none")}, "--disk-dir none: no such directory"),
        ({"device": "twin"}, "twin"),
        ({"device": "gpu"}, "not one of"),
    ],
)
def test_what_is_refused_is_refused_at_once(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        profile(**options)
