"""Profiles written and read back: nothing is lost, whatever the names, numbers and sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.files import profile_names
from moelight.profiles.hardware import (
    BY_WEIGHT_BYTES,
    BYTES_PER_S,
    EFFICIENCY,
    MEASURED,
    PROCESSORS_BUSY,
    SECONDS,
    SHARE,
    HardwareProfile,
    Link,
    Processor,
    Tier,
    load_hardware_profile,
    read_hardware_profile,
)
from moelight.profiles.hardware_text import hardware_profile_text, write_hardware_profile
from tests.shapes import examples

texts = st.text(max_size=30).filter(lambda text: text == "" or text.strip() != "")
names = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() != "")
sizes = st.integers(1, 1 << 50)
rates = st.floats(1e3, 1e18) | st.integers(1, 10**6).map(lambda n: n * 1e6)
MEASURED_VALUES = {
    BYTES_PER_S: rates,
    SECONDS: st.floats(1e-12, 1e6),
    SHARE: st.floats(0.01, 1.0),
    PROCESSORS_BUSY: st.floats(1e-9, 4096.0),
}


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    x = sorted(draw(st.sets(st.integers(1, 4096) | st.floats(0.5, 4096.0), min_size=1, max_size=4)))
    return Curve(x=tuple(map(float, x)), y=tuple(draw(rates) for _ in x))


@st.composite
def surfaces(draw: st.DrawFn) -> Surface:
    name = draw(st.sampled_from(sorted(EFFICIENCY)))
    weights = [0]
    if name in BY_WEIGHT_BYTES and draw(st.booleans()):
        weights = sorted(draw(st.sets(sizes, min_size=1, max_size=3)))
    return Surface(name=name, sizes=tuple(map(float, weights)), curves=tuple(draw(curves()) for _ in weights))


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    gpu = draw(st.booleans())
    tiers = [name for name in ("device", "host", "disk") if name == "host" or (name == "device" and gpu)]
    tiers += ["disk"] if draw(st.booleans()) else []
    figures = draw(st.sets(st.sampled_from(sorted(MEASURED)), max_size=4))
    profile = HardwareProfile(
        name=draw(names),
        date=draw(st.dates().map(str) | st.just("")),
        source=draw(texts),
        notes=draw(texts),
        tiers=tuple(Tier(name=name, capacity_bytes=draw(sizes), bandwidth_bytes_per_s=draw(rates)) for name in tiers),
        links=tuple(
            Link(src=src, dst=dst, bandwidth_bytes_per_s=draw(rates))
            for src, dst in (("host", "device"), ("device", "host"))
            if gpu
        ),
        processors=tuple(
            Processor(name=name, count=draw(st.integers(1, 8)), peak_flops=draw(rates), bfloat16=draw(st.booleans()))
            for name in (("gpu", "cpu") if gpu else ("cpu",))
        ),
        measured=tuple((name, draw(MEASURED_VALUES[MEASURED[name].unit])) for name in sorted(figures)),
        efficiency=tuple({surface.name: surface for surface in draw(st.lists(surfaces(), max_size=3))}.values()),
    )
    return with_words(draw, profile)


def with_words(draw: st.DrawFn, profile: HardwareProfile) -> HardwareProfile:
    """The same with sources and spreads of some of its figures."""
    some = st.sets(st.sampled_from(profile.figure_keys()), max_size=4)
    cited = [key for key in sorted(draw(some)) if not key.startswith("efficiency.")]
    return replace(
        profile,
        sources=tuple((key, draw(names)) for key in cited),
        spread=tuple((key, draw(st.floats(0.0, 3.0))) for key in sorted(draw(some))),
    )


@examples(150)
@given(machines())
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, machine: HardwareProfile) -> None:
    path = tmp_path_factory.getbasetemp() / "machine.yaml"
    write_hardware_profile(machine, path, comments=("one: {two}\nthree", "four"))
    assert read_hardware_profile(path) == machine


@pytest.mark.parametrize("name", profile_names("hardware"))
def test_shipped_machines_read_back(name: str, tmp_path: Path) -> None:
    machine = load_hardware_profile(name)
    write_hardware_profile(machine, tmp_path / "copy.yaml")
    assert read_hardware_profile(tmp_path / "copy.yaml") == machine


def test_figures_are_written_with_their_units() -> None:
    machine = HardwareProfile(
        name="box",
        tiers=(Tier(name="host", capacity_bytes=16 << 30, bandwidth_bytes_per_s=50.1e9),),
        links=(),
        processors=(Processor(name="cpu", count=1, peak_flops=2e12),),
        measured=(("cpu_task", 4e-5), ("cpu_under_disk", 0.75)),
        efficiency=(
            Surface(name="cpu_linear", sizes=(float(8 << 20),), curves=(Curve(x=(1.0, 64.0), y=(2e10, 3e11)),)),
            Surface(name="cpu_attention", sizes=(0.0,), curves=(Curve(x=(512.0,), y=(1.8e10,)),)),
        ),
        spread=(("measured.cpu_task", 0.05),),
    )
    assert hardware_profile_text(machine, comments=["measured at night"]) == (
        "# measured at night\n"
        "name: box\n"
        "tiers:\n"
        "  host: {capacity: 16GiB, bandwidth: 50.1GB/s}\n"
        "processors:\n"
        "  cpu: {count: 1, peak: 2TFLOP/s}\n"
        "measured:\n"
        "  cpu_task: 40us\n"
        "  cpu_under_disk: 0.75\n"
        "efficiency:\n"
        "  cpu_linear:\n"
        "    8MiB: {1: 20GFLOP/s, 64: 300GFLOP/s}\n"
        "  cpu_attention: {512: 18GB/s}\n"
        "spread:\n"
        "  measured.cpu_task: 0.05\n"
    )


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/box\.yaml: cannot be written"):
        write_hardware_profile(load_hardware_profile("t4"), tmp_path / "file" / "box.yaml")
