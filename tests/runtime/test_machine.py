"""A machine and the lanes that it has."""

from __future__ import annotations

import pytest
import torch

from moelight.core.errors import ConfigError
from moelight.core.schedule import Lane
from moelight.runtime.lanes import (
    InlineLane,
    StreamLane,
    ThreadLane,
)
from moelight.runtime.machine import Machine, find_machine, open_lanes

PLAIN = Machine(device=torch.device("cpu"), discrete=False)
TWIN = Machine(device=torch.device("cpu"), discrete=True, twin=True)


@pytest.mark.parametrize("kind", ["auto", "inline", "threads"])
def test_a_machine_has_the_lanes_it_needs(kind: str) -> None:
    for machine, wanted in ((PLAIN, {Lane.DISK, Lane.CPU}), (TWIN, set(Lane))):
        lanes = open_lanes(machine, kind)
        assert set(lanes) == wanted
        if kind == "inline":
            assert all(isinstance(runner, InlineLane) for runner in lanes.values())
        if kind == "threads":
            assert all(isinstance(runner, ThreadLane) for runner in lanes.values())
        if kind == "auto":
            assert isinstance(lanes[Lane.DISK], ThreadLane)
            assert isinstance(lanes[Lane.CPU], ThreadLane if machine.discrete else InlineLane)
            assert all(isinstance(lanes[each], StreamLane) for each in wanted & {Lane.H2D, Lane.D2H, Lane.DEVICE})
        for runner in lanes.values():
            runner.close()


def test_what_a_machine_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lanes 'fibres' is not one of auto, inline, threads"):
        open_lanes(PLAIN, "fibres")
    with pytest.raises(ConfigError, match="--device 'tpu' is not one of auto, cpu, cuda, xpu, twin"):
        find_machine("tpu")
    assert find_machine("twin") == TWIN
    assert find_machine("cpu") == PLAIN
    with pytest.raises(ConfigError, match="--device-memory is needed for a twin"):
        TWIN.device_memory_bytes()
