"""Rehearsed passes: the right work, never faster than the busiest lane, close to the estimate of their order."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, TaskKind
from moelight.hrm.machine_model import Speeds, speeds_of
from moelight.optimizer import simulation
from moelight.optimizer.simulation import SimulationSetup, layer_starts
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES
from tests.cases import thorough
from tests.shapes import examples

WORK = Workload(num_requests=4000, prompt_len=77, max_prompt_len=418, gen_len=32)
T4, ALONE = load_hardware_profile("t4"), load_hardware_profile("cpu-avx2")
OLMOE = load_model_profile("olmoe-1b-7b")


def policy(**changed: object) -> Policy:
    values: dict[str, object] = {
        "model": "olmoe-1b-7b",
        "batch_size": 1000,
        "micro_batch_size": 125,
        "micro_batch_tokens": 1024,
        "kv_tokens": 200_000,
        "ffn_device": "gpu",
        "weights": Shares(device=0.25, host=0.75),
    }
    return Policy(**{**values, **changed})  # type: ignore[arg-type]


def test_the_passes_carry_the_jobs_tokens() -> None:
    result = SimulationSetup(policy(), OLMOE, T4, WORK).simulated_run("cgopipe")
    assert [run.decode_tokens for run in result.decode] == [1000] * 3
    assert [run.prompt_tokens for run in result.decode] == [0] * 3
    assert result.with_prompts is not None and result.with_prompts.prompt_tokens > 1000
    assert len(result.timelines) == 4
    tasks = [span.task for span in result.steady.timeline.spans]
    assert sum(task.kind is TaskKind.SAMPLE for task in tasks) == 8
    assert {task.layer for task in tasks if task.kind is TaskKind.POST_ATTENTION} == set(range(16))


@pytest.mark.parametrize(
    ("card", "device", "disk"), thorough([("t4", 0.06, 0.18), ("l4", 0.18, 0.0)], but=[("t4", 0.06, 0.18)])
)
def test_launches_hide_behind_the_link(card: str, device: float, disk: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream has a thread that launches, so what launches cost delays a pass by 3 % at most."""
    shares = Shares(device=device, host=1 - device - disk, disk=disk)
    sizes = {"batch_size": 3732, "micro_batch_size": 933, "micro_batch_tokens": 1145, "kv_tokens": 800_000}
    planned, hardware = policy(model="mixtral-8x7b", weights=shares, **sizes), load_hardware_profile(card)

    def pass_s() -> float:
        setup = SimulationSetup(planned, load_model_profile("mixtral-8x7b"), hardware, WORK)
        return setup.simulated_run("cgopipe", passes=1).steady.seconds

    with_launches = pass_s()

    def without(*inputs: Any) -> Speeds:
        speeds = speeds_of(*inputs)
        assert speeds.gpu.launch_s > 0
        return replace(speeds, gpu=replace(speeds.gpu, launch_s=0.0))

    monkeypatch.setattr(simulation, "speeds_of", without)
    assert with_launches <= 1.03 * pass_s()


def test_a_micro_batch_more_costs_its_own_tasks_only() -> None:
    """Counted in calls of the interpreter, which no other program slows down: what every micro-batch shares, such as
    the ring slots of a layer, is not written down for each of them, and equal tasks are priced once."""

    def work(micro_batches: int) -> tuple[int, int]:
        stage = SimulationSetup(policy(batch_size=4 * micro_batches, micro_batch_size=4), OLMOE, T4, WORK)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            result = stage.simulated_run("cgopipe", passes=1)
        finally:
            sys.setprofile(None)
        return calls, sum(len(timeline.spans) for timeline in result.timelines)

    (few, tasks), (many, more) = work(4), work(16)
    assert (many - few) / (more - tasks) < 190


@pytest.mark.parametrize(("batch_size", "passes"), [(8, 10_000), (10_000, 3), (1 << 30, 3)])
def test_what_would_take_too_long_is_refused_before_it_is_built(batch_size: int, passes: int) -> None:
    chosen = policy(batch_size=batch_size, micro_batch_size=1, kv_tokens=1 << 40)
    stage = SimulationSetup(chosen, OLMOE, T4, replace(WORK, num_requests=1 << 30))
    with pytest.raises(ConfigError, match=r"some .* tasks, and 2,000,000 can be simulated; ask for fewer passes"):
        stage.simulated_run("cgopipe", passes=passes)


def test_passes_follow_one_another_on_one_clock() -> None:
    result = SimulationSetup(policy(), OLMOE, T4, WORK).simulated_run("cgopipe", passes=4)
    ends = [timeline.end_s for timeline in result.timelines]
    assert ends == sorted(ends) and result.timelines[0].start_s == 0
    runs = [result.with_prompts, *result.decode]
    assert sum(run.seconds for run in runs if run is not None) == pytest.approx(ends[-1])
    assert result.decode[-1].seconds == pytest.approx(result.decode[-2].seconds, rel=1e-6)


def test_a_job_without_prompts_of_its_own_has_decode_passes_only() -> None:
    work = Workload(num_requests=10, prompt_len=1, max_prompt_len=1, gen_len=4)
    result = SimulationSetup(policy(), OLMOE, T4, work).simulated_run("cgopipe")
    assert result.steady.decode_tokens == 10
    assert result.with_prompts is None or result.with_prompts.prompt_tokens <= 10


@examples(15)
@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    micro_batches=st.integers(1, 12),
    device=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    disk=st.sampled_from([0.0, 0.25]),
    attention=st.sampled_from(["cpu", "gpu"]),
)
def test_no_pass_is_shorter_than_its_busiest_lane(
    schedule: str, micro_batches: int, device: float, disk: float, attention: str
) -> None:
    disk = min(disk, 1 - device)
    chosen = policy(
        micro_batch_size=-(-1000 // micro_batches),
        attention_device=attention,
        weights=Shares(device=device, host=1 - device - disk, disk=disk),
    )
    stage = SimulationSetup(chosen, OLMOE, T4, WORK)
    if schedule not in stage.schedules():
        with pytest.raises(ConfigError, match=schedule):
            stage.simulated_run(schedule)
        return
    result = stage.simulated_run(schedule)
    for run in (result.with_prompts, *result.decode):
        assert run is not None
        assert 0 <= run.idle_share < 1
    assert max(result.steady.busy_s.values()) <= result.steady.seconds * (1 + 1e-6)
    assert result.steady.lane_bytes == stage.lane_bytes(schedule)
    assert result.tokens_per_s > 0


def test_where_no_gpu_takes_part_only_the_orders_without_a_link_exist() -> None:
    stage = SimulationSetup(policy(ffn_device="cpu", weights=Shares(host=1.0)), OLMOE, ALONE, WORK)
    assert set(stage.schedules()) == set(SCHEDULES) - {"flexgen-c"}
    assert stage.roofs().keys() <= {"disk"}
    for name in stage.schedules():
        result = stage.simulated_run(name)
        assert set(result.steady.busy_s) == {Lane.CPU}
        assert result.steady.idle_share == pytest.approx(0.0, abs=1e-6)


def test_roofs_are_of_the_links_that_are_there() -> None:
    roofs = SimulationSetup(policy(), OLMOE, T4, WORK).roofs()
    assert set(roofs) == {"disk", "stage", "h2d", "d2h"}
    assert roofs["h2d"] <= 15.75e9


def test_layers_begin_in_order() -> None:
    result = SimulationSetup(policy(), OLMOE, T4, WORK).simulated_run("cgopipe")
    starts = layer_starts(result.steady.timeline)
    assert list(starts) == list(range(16))
    assert list(starts.values()) == sorted(starts.values())


@pytest.mark.parametrize(
    ("batch_size", "ring_pages"), thorough([(100, 2), (100, 8), (1000, 3)], but=[(100, 2), (1000, 3)])
)
def test_a_small_ring_waits_as_the_ledger_says(batch_size: int, ring_pages: int) -> None:
    """A disk that fills the ring during attention, and waits for experts then; or one that a processor hides."""
    laptop = load_hardware_profile("laptop-nvme")
    sizes = {"batch_size": batch_size, "micro_batch_size": batch_size // 4, "kv_tokens": 400 * batch_size}
    chosen = policy(schedule="module", ffn_device="cpu", weights=Shares(host=0.1, disk=0.9), **sizes)
    small = SimulationSetup(replace(chosen, ring_pages=ring_pages), OLMOE, laptop, WORK)
    assert small.schedules() == ("module",)
    full = SimulationSetup(chosen, OLMOE, laptop, WORK).simulated_run("module", passes=2)
    result = small.simulated_run("module", passes=2)
    assert result.estimate.pass_s <= result.steady.seconds <= 1.02 * result.estimate.pass_s
    assert result.steady.seconds >= 0.99 * full.steady.seconds
    assert result.steady.lane_bytes == full.steady.lane_bytes


@examples(5)
@given(ring_pages=st.integers(2, 128), device=st.sampled_from([0.0, 0.25]), disk=st.sampled_from([0.0, 0.4]))
def test_no_small_ring_beside_a_gpu_is_faster_than_its_estimate(ring_pages: int, device: float, disk: float) -> None:
    shares = Shares(device=device, host=1 - device - disk, disk=disk)
    sizes = {"batch_size": 100, "micro_batch_size": 50, "kv_tokens": 40_000}
    chosen = policy(schedule="module", weights=shares, ring_pages=ring_pages, **sizes)
    result = SimulationSetup(chosen, OLMOE, T4, WORK).simulated_run("module", passes=2)
    assert result.steady.seconds >= result.estimate.pass_s * (1 - 1e-6)
