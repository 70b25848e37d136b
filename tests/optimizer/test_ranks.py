"""Ranks in plans and on the virtual clock: sums on a lane of their own, and links that add up where they bind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, TaskKind
from moelight.hrm import costs
from moelight.optimizer.optimize import compute_dtype
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile, part_of, with_gpus
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload

MIXTRAL = load_model_profile("mixtral-8x7b")
WORK = Workload(num_requests=64, prompt_len=32, max_prompt_len=32, gen_len=16)
STREAMED = Policy(
    model="mixtral-8x7b",
    batch_size=64,
    micro_batch_size=16,
    micro_batch_tokens=512,
    kv_tokens=64 * 80,
    ffn_device="gpu",
    host_pages="pinned",
    weights=Shares(host=1.0),
)


def rank_of(count: int, hardware: HardwareProfile | None = None, policy: Policy = STREAMED) -> SimulationSetup:
    """One of ``count`` ranks of two cards, or a card alone."""
    machine = part_of(with_gpus(hardware or load_hardware_profile("2xt4"), count), count)
    return SimulationSetup(policy, MIXTRAL if count == 1 else MIXTRAL.on_ranks(count), machine, WORK)


@pytest.mark.parametrize("schedule", ["cgopipe", "module", "serial"])
def test_sums_have_a_lane_in_the_ledger_and_on_the_virtual_clock(schedule: str) -> None:
    setup = rank_of(2)
    run = setup.simulated_run(schedule, passes=1)
    spans = [span for span in run.steady.timeline.spans if span.task.kind is TaskKind.SUM_EXPERTS]
    assert {span.task.lane for span in spans} == {Lane.EXCHANGE} and len(spans) == 4 * MIXTRAL.num_layers
    assert run.steady.busy_s[Lane.EXCHANGE] == pytest.approx(run.estimate.lanes["exchange"])
    sent = MIXTRAL.num_layers * costs.sent_bytes(setup.model, compute_dtype(setup.model, setup.hardware), 64)
    assert run.steady.lane_bytes[Lane.EXCHANGE] == sent
    alone = rank_of(1).simulated_run(schedule, passes=1)
    assert Lane.EXCHANGE not in alone.steady.busy_s and "exchange" not in alone.estimate.lanes


def test_other_micro_batches_compute_while_one_is_summed() -> None:
    """Of four micro-batches on a card; without a device the thread that computes also exchanges."""
    timeline = rank_of(2).simulated_run("cgopipe", passes=1).steady.timeline
    assert overlaps(timeline.spans, Lane.DEVICE) > 0
    policy = replace(STREAMED, ffn_device="cpu", host_pages="auto")
    timeline = rank_of(2, load_hardware_profile("2xt4"), policy).simulated_run("cgopipe", passes=1).steady.timeline
    assert overlaps(timeline.spans, Lane.CPU) == pytest.approx(0.0, abs=1e-9)


def overlaps(spans: tuple, lane: Lane) -> float:  # type: ignore[type-arg]
    """Seconds in which ``lane`` works beside the exchange."""
    summed, others = ([span for span in spans if span.task.lane is one] for one in (Lane.EXCHANGE, lane))
    return sum(
        max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s)) for one in summed for other in others
    )


def test_two_links_carry_what_one_does_in_half_of_the_time() -> None:
    """Where they bind: all experts cross in every pass."""
    steady = [rank_of(count).simulated_run("cgopipe").steady for count in (1, 2)]
    assert {run.binding for run in steady} == {Lane.H2D}
    assert 1.9 < steady[0].seconds / steady[1].seconds < 2.0
