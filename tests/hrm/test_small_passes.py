"""Passes that bring routed pages only, on a machine without a GPU: what runs meanwhile, and from when on they come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane
from moelight.hrm.estimate import cost_model_of, cost_of, estimate, least_missed
from moelight.hrm.machine_model import speeds_of
from moelight.hrm.pass_cost import PlacementCounts
from moelight.hrm.schedule_time import ROUTED_ONLY_SHARE, pass_s
from moelight.hrm.workload_model import decode_pass
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload

MIXTRAL = load_model_profile("mixtral")
MACHINE = load_hardware_profile("cpu-amx")
CPU = speeds_of(MACHINE)
PAGES = MIXTRAL.num_moe_layers * MIXTRAL.experts.num_experts
WORK = Workload(num_requests=400, prompt_len=64, max_prompt_len=64, gen_len=64)


def policy(**changes: object) -> Policy:
    plain = Policy(
        model="m",
        batch_size=3,
        micro_batch_size=3,
        micro_batch_tokens=64,
        kv_tokens=3 * 160,
        ffn_device="cpu",
        attention_device="cpu",
        weights=Shares(host=0.5, disk=0.5),
        residents="learned",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_experts_that_are_near_run_while_the_others_are_read() -> None:
    """A pass takes turns but for them: half of the experts' time is hidden where half of the pages stay."""
    asked, kind = policy(), decode_pass(WORK, 3)
    cost_model = cost_model_of(MIXTRAL, asked, CPU)
    half = cost_of(cost_model, WORK, kind, PlacementCounts(from_disk=PAGES / 2), asked)
    assert half.apart == 1.0
    experts = float(cost_model.experts_s(cost_model.expert_unit, 3.0)) * MIXTRAL.num_moe_layers
    turns = float(half.lanes["cpu"] + half.lanes["disk"])
    assert float(pass_s("cgopipe", half)) == pytest.approx(turns - experts / 2)
    everything = cost_of(cost_model, WORK, kind, PlacementCounts(from_disk=float(PAGES)), asked)
    assert float(pass_s("cgopipe", everything)) == pytest.approx(
        float(everything.lanes["cpu"] + everything.lanes["disk"])
    )


def test_all_experts_at_once_wait_for_the_last_page() -> None:
    asked, kind = policy(schedule="module"), decode_pass(WORK, 3)
    cost_model = cost_model_of(MIXTRAL, asked, CPU)
    cost = cost_of(cost_model, WORK, kind, PlacementCounts(from_disk=PAGES / 2), asked)
    assert float(pass_s("module", cost)) == pytest.approx(float(cost.lanes["cpu"] + cost.lanes["disk"]))


@pytest.mark.parametrize("resident", [0.25, 0.5, 0.75])
def test_the_virtual_clock_lets_them_run_too(resident: float) -> None:
    """Within the sum of the steps of each layer that no lane can share."""
    stage = SimulationSetup(policy(weights=Shares(host=resident, disk=1.0 - resident)), MIXTRAL, MACHINE, WORK)
    assert stage.simulated_run("cgopipe").steady.seconds == pytest.approx(stage.estimate.pass_s, rel=0.05)


@pytest.mark.parametrize(
    ("batch_size", "residents", "met"), [(3, "static", 37 / 64), (7, "static", 1.0), (7, "learned", 1 - 0.75**7)]
)
def test_routed_pages_alone_come_where_the_engine_brings_no_others(batch_size: int, residents: str, met: float) -> None:
    """Seven tokens leave 13 % of Mixtral's experts out: too few by chance, enough where every pass counts them."""
    asked = policy(batch_size=batch_size, micro_batch_size=batch_size, kv_tokens=batch_size * 160, residents=residents)
    result = estimate(MIXTRAL, asked, WORK, CPU)
    streamed = PAGES / 2 * cost_model_of(MIXTRAL, asked, CPU).page_bytes()
    assert result.lanes["disk"] * CPU.disk == pytest.approx(met * streamed)
    steady = SimulationSetup(asked, MIXTRAL, MACHINE, WORK).simulated_run("cgopipe").steady
    assert steady.busy_s[Lane.DISK] == pytest.approx(result.lanes["disk"], rel=0.02)
    assert least_missed(replace(asked, ffn_device="gpu")) == ROUTED_ONLY_SHARE  # a device is not asked what it chose


def test_prompts_of_one_token_more_than_a_micro_batch_run_in_two() -> None:
    """Each micro-batch reads the experts that its tokens meet, so a pass has as many readings as the engine makes."""
    asked, kind = policy(batch_size=1, micro_batch_size=1, weights=Shares(host=1.0)), decode_pass(WORK, 1)
    cost_model = cost_model_of(MIXTRAL, asked, CPU)

    def prompts(tokens: int) -> float:
        passes = replace(kind, decode_tokens=0.0, prompt_tokens=float(tokens), prompt_len=float(tokens))
        return float(cost_of(cost_model, WORK, passes, PlacementCounts(), asked).lanes["cpu"])

    assert prompts(64) == pytest.approx(prompts(63), rel=0.05)
    assert prompts(65) > 1.5 * prompts(64)
