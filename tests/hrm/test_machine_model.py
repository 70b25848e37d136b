"""What a measured profile means for plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moelight.hrm.machine_model import speeds_of
from moelight.profiles.efficiency import Curve, Surface
from moelight.profiles.hardware import load_hardware_profile

MEASURED = Curve(x=(1.0, 60.0, 64.0, 256.0), y=(2e9, 7e10, 4e10, 5e10))  # others took a core from 64 rows on


def test_more_rows_of_a_product_are_planned_at_no_lower_speed_on_a_cpu() -> None:
    """Else prompts are cut into micro-batches of the rows that were measured in a quiet moment."""
    works = ("linear", "experts")
    surfaces = tuple(
        Surface(name=f"{unit}_{work}", sizes=(0.0,), curves=(MEASURED,)) for unit in ("cpu", "gpu") for work in works
    )
    speeds = speeds_of(replace(load_hardware_profile("t4"), efficiency=surfaces))
    for work in works:
        on_cpu, on_gpu = getattr(speeds.cpu, work), getattr(speeds.gpu, work)
        assert np.all(np.diff(on_cpu.at(np.arange(1.0, 300.0))) >= 0)
        assert on_cpu.at(256.0) == on_cpu.at(60.0)
        assert on_gpu.at(256.0) < on_gpu.at(60.0)
