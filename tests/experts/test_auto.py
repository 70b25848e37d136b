"""Policies made without a trace: they fit the memory that there is, and obey the language."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.dtypes import dtype_named
from moelight.core.errors import BudgetError
from moelight.experts.cache import ExpertCache
from moelight.experts.sizing import RESERVE_BYTES
from moelight.experts.tune import auto_policy, room_for_experts
from moelight.hrm.costs import page_slot_bytes
from moelight.lang.check import read
from moelight.lang.format import format_policy
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile

CASES = [
    ("mixtral", "t4"),
    ("mixtral", "l4"),
    ("olmoe-1b-7b", "l4"),
    ("deepseek-v2-lite", "t4"),
    ("qwen3-30b-a3b", "laptop-nvme"),
]


def loaded(model: str, machine: str) -> tuple[ModelProfile, HardwareProfile]:
    return load_model_profile(model), load_hardware_profile(machine)


@pytest.mark.parametrize(("name", "machine"), CASES)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_what_is_made_fits_and_is_sound(name: str, machine: str, batch_size: int) -> None:
    model, hardware = loaded(name, machine)
    result = auto_policy(model, hardware, name=name, batch_size=batch_size)
    reading = read(format_policy(result.policy))
    assert not reading.errors and not reading.warnings and reading.policies == (result.policy,)
    experts = model.experts.num_experts
    cache = ExpertCache.of(result.policy, num_layers=model.num_moe_layers, num_experts=experts)
    room, page = room_for_experts(model, hardware, batch_size), page_slot_bytes(model, dtype_named(model.dtype))
    everything = sum(room.taken.values()) + RESERVE_BYTES + cache.capacity * page
    assert everything <= room.capacity_bytes
    full = cache.capacity == model.num_moe_layers * experts
    # One more for each layer has no room, or all have.
    assert full or everything + model.num_moe_layers * page > room.capacity_bytes


def test_what_all_has_room_needs_no_rules() -> None:
    model, hardware = loaded("olmoe-1b-7b", "l4")
    result = auto_policy(model, hardware, name="olmoe")
    assert result.policy.per_layer is None and result.policy.prefetch.strategy == "none"
    assert str(result.policy.cache.capacity) == "100%"


def test_no_room_for_one_says_how_much_would_do() -> None:
    model, hardware = loaded("mixtral", "t4")
    with pytest.raises(BudgetError, match=r"no expert of mixtral .* would do for one") as refusal:
        auto_policy(model, hardware, name="mixtral", batch_size=80)
    device = hardware.tier("device")
    assert device is not None
    larger = replace(device, capacity_bytes=refusal.value.needed_bytes)
    enough = replace(hardware, tiers=(larger, *(tier for tier in hardware.tiers if tier is not device)))
    assert auto_policy(model, enough, name="mixtral", batch_size=80).plan.slots >= 1
