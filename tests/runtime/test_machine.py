"""A machine and the lanes that it has."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from moelight.core.errors import ConfigError
from moelight.core.schedule import Lane
from moelight.kernels import device as device_module
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
    for machine, exchanges in product((PLAIN, TWIN), (False, True)):
        wanted = set(Lane) if machine.discrete else {Lane.DISK, Lane.CPU, Lane.EXCHANGE}
        wanted -= set() if exchanges else {Lane.EXCHANGE}
        lanes = open_lanes(machine, kind, exchanges=exchanges)
        assert set(lanes) == wanted
        if kind == "inline":
            assert all(isinstance(runner, InlineLane) for runner in lanes.values())
        if kind == "threads":
            assert all(isinstance(runner, ThreadLane) for runner in lanes.values())
        if kind == "auto":
            assert isinstance(lanes[Lane.DISK], ThreadLane)
            assert isinstance(lanes[Lane.CPU], ThreadLane if machine.discrete else InlineLane)
            streams = {Lane.H2D, Lane.D2H, Lane.DEVICE, Lane.EXCHANGE} if machine.discrete else set()
            assert all(isinstance(lanes[item], StreamLane) for item in wanted & streams)
        for runner in lanes.values():
            runner.close()


def test_what_a_machine_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lanes 'fibres' is not one of auto, inline, threads"):
        open_lanes(PLAIN, "fibres")
    with pytest.raises(ConfigError, match="--device 'tpu' is not one of auto, cpu, cuda, xpu, twin"):
        find_machine("tpu")
    for device in ("cuda:x", "cuda:-1", "cpu:0", "twin:1", "auto:0", "cuda:0:1"):
        with pytest.raises(ConfigError, match="is not one of"):
            find_machine(device)
    assert find_machine("twin") == TWIN
    assert find_machine("twin:fp16") == replace(TWIN, bf16=False)
    assert find_machine("cpu") == PLAIN
    with pytest.raises(ConfigError, match="--device-memory is needed for a twin"):
        TWIN.device_memory_bytes()


def test_one_card_of_several_is_chosen_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(device_module, "compute_capability", lambda index: (7, 5) if index else (8, 0))
    assert find_machine("cuda").device == find_machine("cuda:0").device == torch.device("cuda", 0)
    second = find_machine("cuda:1")
    assert second.device == torch.device("cuda", 1)
    assert (second.discrete, second.bf16) == (True, False)
    with pytest.raises(ConfigError, match=r"--device cuda:2: torch .* sees 2 cuda devices on this machine"):
        find_machine("cuda:2")
    module.is_available = lambda: False
    with pytest.raises(ConfigError, match=r"--device cuda:1: torch .* sees no such device"):
        find_machine("cuda:1")
