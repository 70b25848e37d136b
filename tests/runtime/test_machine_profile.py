"""The kept profile of this machine: measured once, its capacities always of the moment, a bad file but a line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moelight.core.errors import ConfigError
from moelight.core.paths import CACHE_VARIABLE
from moelight.core.units import GiB
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import WORK, HardwareProfile, Processor, Tier, read_hardware_profile
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime import machine_profile as room
from moelight.runtime.calibration import machine as program
from moelight.runtime.machine_profile import kept_path, machine_profile


def measured(rate: float = 1e10, *, busy: float | None = None, works: tuple[str, ...] = tuple(WORK)) -> HardwareProfile:
    """What a quick measurement of a machine without a GPU gives."""
    curve = Curve(x=(1.0, 64.0), y=(rate, 2 * rate))
    figures = [("host_copy", rate), ("cpu_task", 4e-5)]
    return HardwareProfile(
        name="auto",
        notes="a box",
        tiers=(
            Tier(name="host", capacity_bytes=8 * GiB, bandwidth_bytes_per_s=rate),
            Tier(name="disk", capacity_bytes=99 * GiB, bandwidth_bytes_per_s=rate / 10),
        ),
        links=(),
        processors=(Processor(name="cpu", count=1, peak_flops=100 * rate),),
        measured=tuple(figures if busy is None else [*figures, ("busy_elsewhere", busy)]),
        efficiency=tuple(Surface(name=f"cpu_{work}", sizes=(0.0,), curves=(curve,)) for work in works),
        spread=(("measured.host_copy", 0.01),),
    )


class Bench:
    """Stands in for measuring: gives one profile after another, and counts."""

    def __init__(self, *profiles: HardwareProfile) -> None:
        self._left = list(profiles)
        self.taken = 0

    def __call__(self, device: str, directory: Path, say: Callable[[str], None]) -> HardwareProfile:
        say("measuring this machine")
        self.taken += 1
        return self._left.pop(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose free memory and disk other programs leave alone, so that profiles can be compared."""
    monkeypatch.setattr(room, "available_bytes", lambda: 8 * GiB)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda directory: SimpleNamespace(free=99 * GiB))


def bench(monkeypatch: pytest.MonkeyPatch, *profiles: HardwareProfile) -> Bench:
    stand_in = Bench(*profiles)
    monkeypatch.setattr(room, "_measured_apart", stand_in)
    return stand_in


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    stand_in, message = bench(monkeypatch, measured()), []
    first = machine_profile("cpu", say=message.append)
    again = machine_profile("cpu", say=message.append)
    assert stand_in.taken == 1 and len(message) == 1 and "measuring this machine" in message[0]
    assert kept_path("cpu").parent == own_cache / "hardware" and kept_path("cpu").is_file()
    assert replace(first, tiers=()) == replace(again, tiers=()) == replace(measured(), tiers=())


def test_capacities_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench(monkeypatch, measured())
    free = iter([5 * GiB, 3 * GiB])
    monkeypatch.setattr(room, "available_bytes", lambda: next(free))
    monkeypatch.setattr(room.shutil, "disk_usage", lambda directory: SimpleNamespace(free=len(str(directory))))
    sizes = []
    for directory in (tmp_path, tmp_path / "much" / "further"):
        result = machine_profile("cpu", disk_dir=directory)
        host, disk = result.tier("host"), result.tier("disk")
        assert host is not None and disk is not None
        sizes.append((host.capacity_bytes, disk.capacity_bytes))
        assert (host.bandwidth_bytes_per_s, disk.bandwidth_bytes_per_s) == (1e10, 1e9)
    assert sizes == [(5 * GiB, len(str(tmp_path))), (3 * GiB, len(str(tmp_path / "much" / "further")))]


@pytest.mark.parametrize("text", ["", "name: [", "name: auto\n", "\x00\xff", "name: auto\nmeasured: {host_cpy: 1}\n"])
def test_a_corrupt_file_is_a_line_and_a_new_measurement(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    stand_in, message = bench(monkeypatch, measured()), []
    path = kept_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    assert machine_profile("cpu", say=message.append).figure("host_copy") == 1e10
    assert stand_in.taken == 1 and message[0].startswith("warning: ") and str(path) in message[0]
    assert read_hardware_profile(path) == measured()


def test_a_cache_that_cannot_be_written_is_a_line(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    own_cache.write_text("a file where the directory should be")
    stand_in, message = bench(monkeypatch, measured()), []
    assert machine_profile("cpu", say=message.append).figure("host_copy") == 1e10
    assert stand_in.taken == 1 and "cannot be written" in message[-1]


@pytest.mark.usefixtures("steady")
def test_what_is_missing_is_measured_and_what_is_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    known_names = measured(3e10, works=("linear", "experts"))
    write_hardware_profile(known_names, kept_path("cpu"))
    stand_in = bench(monkeypatch, measured(1e10))
    result = machine_profile("cpu", say=lambda _: None)
    assert stand_in.taken == 1 and machine_profile("cpu") == result
    speeds = {surface.name: surface.curves[0].y[0] for surface in result.efficiency}
    assert speeds == {f"cpu_{work}": 3e10 if work in ("linear", "experts") else 1e10 for work in WORK}
    assert result.figure("host_copy") == 3e10


@pytest.mark.usefixtures("steady")
def test_a_disturbed_measurement_is_told_and_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = bench(monkeypatch, measured(1e9, busy=1.5), measured(2e9, busy=1.8), measured(1e10))
    message: list[str] = []

    def later() -> HardwareProfile:
        os.utime(kept_path("cpu"), (0, 0))
        return machine_profile("cpu", say=message.append)

    assert machine_profile("cpu", say=message.append).figure("host_copy") == 1e9
    assert "1.5 processors busy" in message[-1]
    assert machine_profile("cpu", say=message.append).figure("host_copy") == 1e9 and stand_in.taken == 1
    assert later().figure("busy_elsewhere") == 1.5 and stand_in.taken == 2  # the less disturbed one stays
    quiet = later()
    assert quiet.figure("host_copy") == 1e10 and quiet.figure("busy_elsewhere") is None and stand_in.taken == 3
    message.clear()
    assert later() == quiet and not message


def test_other_machines_and_releases_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {kept_path("cpu")}
    for change in (
        lambda: monkeypatch.setattr(room, "processor_name", lambda: "another"),
        lambda: monkeypatch.setattr(room, "usable_threads", lambda: 77),
        lambda: monkeypatch.setattr(room, "_version", lambda package: f"{package} 99"),
        lambda: monkeypatch.setattr(room, "accelerator_name", lambda device: "Twin 9000"),
        lambda: monkeypatch.setenv("OMP_NUM_THREADS", "3"),
    ):
        change()
        names.add(kept_path("cpu"))
    assert len(names) == 6


@pytest.mark.parametrize("told", ["4", "4,1", "none", ""])
def test_as_many_threads_by_another_word_are_the_same_machine(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(room, "usable_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    name = kept_path("cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert kept_path("cpu") == name


def test_a_twin_has_no_profile() -> None:
    with pytest.raises(ConfigError, match="twin"):
        machine_profile("twin")


def test_a_machine_that_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=2, stderr="a warning\nthe machine cannot be measured: no memory\n", stdout="")
    monkeypatch.setattr(room.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"\(the machine cannot be measured: no memory\); name a machine with --hw"):
        machine_profile("cpu", say=lambda _: None)


def test_the_measuring_program_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run_calibration("twin", str(tmp_path), str(tmp_path / "out.yaml")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_measuring_program_writes_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(program, "measure_machine", lambda *_, **named: asked.append(named) or measured())
    assert program.run_calibration("cpu", str(tmp_path), str(tmp_path / "out.yaml")) == 0
    assert read_hardware_profile(tmp_path / "out.yaml") == measured()
    assert asked == [{"name": "auto", "disk_dir": tmp_path, "disk_needed": False}]


def test_without_an_accelerator_torch_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    if room.may_have_accelerator():
        pytest.skip("this machine may have an accelerator")
    write_hardware_profile(measured(), kept_path("auto"))
    code = (
        "import sys; from moelight.runtime.machine_profile import machine_profile; "
        "found = machine_profile(); print(found.figure('host_copy'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("10000000000.0 False\n", "")


def test_a_cache_that_cannot_be_looked_into_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / ("x" * 300)))
    message: list[str] = []
    assert room.kept_profile("cpu", say=message.append) is None
    assert len(message) == 1 and "File name too long" in message[0]
