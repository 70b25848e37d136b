"""`moelight profile` of the machine: what every later part plans with, and the roof of the link."""

from __future__ import annotations

import re
import shutil
from typing import Any

from gpu_sections.setting import FailedError, Setting
from moelight.profiles.hardware import MEASURED, TO, load_hardware_profile

FULL_S = 150.0  # a full profile takes up to 100 s; with less time a quick one is made


def run(setting: Setting) -> None:
    """The profile is kept for ``--hw auto`` of the parts that follow, and beside the report."""
    setting.need_card("a twin has no speed of its own; later parts plan with a shipped profile")
    path = setting.results / "machine.yaml"
    quick = setting.left_s < FULL_S
    options = ["--device", setting.device, "--disk-dir", setting.scratch, *(["--quick"] if quick else [])]
    ended = setting.moelight("profile", *options).check()
    retained = re.search(r"wrote (.+\.yaml); ", ended.err)
    if retained is None:
        raise FailedError(f"moelight profile does not say where it wrote: {ended.why}")
    shutil.copyfile(retained[1], path)
    profile = load_hardware_profile(str(path))
    setting.keep(
        quick=quick,
        wall_s=ended.seconds,
        notes=profile.notes,
        bytes_per_s={tier.name: tier.bandwidth_bytes_per_s for tier in profile.tiers},
        links={f"{link.src}{TO}{link.dst}": link.bandwidth_bytes_per_s for link in profile.links},
        peak_flops={unit.name: unit.peak_flops for unit in profile.processors},
        measured={name: value for name, value in profile.measured if name in MEASURED},
    )


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    if "links" not in figures:
        return []
    rates, tiers, measured = figures["links"], figures["bytes_per_s"], figures["measured"]

    def gigabytes(name: str) -> str:
        return f"{measured.get(name, 0.0) / 1e9:.1f}"

    peaks = ", ".join(f"{unit} {peak / 1e12:.1f} TFLOP/s" for unit, peak in figures["peak_flops"].items())
    return [
        f"link, GB/s: pinned to the device {rates[f'host{TO}device'] / 1e9:.1f}, back "
        f"{rates[f'device{TO}host'] / 1e9:.1f}; to the device pageable {gigabytes('host_to_device_pageable')}, beside "
        f"attention on the CPU {gigabytes('host_to_device_under_attention')}",
        f"a launch takes {measured.get('gpu_launch', 0.0) * 1e6:.1f} us, a small transfer "
        f"{measured.get('transfer', 0.0) * 1e6:.1f} us",
        f"memory, GB/s: {', '.join(f'{name} {rate / 1e9:.1f}' for name, rate in tiers.items())}; {peaks}",
        f"{'quick' if figures['quick'] else 'full'}, {figures['wall_s']:.0f} s; {figures['notes']}",
    ]
