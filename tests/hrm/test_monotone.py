"""A better machine is never slower: of every rate, peak and capacity, over random machines, models and policies."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.planner_sections.random_questions import question
from benchmarks.planner_sections.sampled_policies import Sampled, drawn, every_setting
from moelight.hrm.machine_model import Speeds, Unit, speeds_of
from moelight.optimizer.optimize import make_plan
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.problem import Problem
from moelight.optimizer.search import search
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.shapes import examples

MACHINE = ("disk", "h2d", "d2h", "dram", "stage")
UNIT = ("flops", "memory", "elementwise", "prefill_flops")


def better_speeds(speeds: Speeds, by: float) -> dict[str, Speeds]:
    """The machine with one of its parts ``by`` as fast."""

    def unit(of: Unit, name: str) -> Unit:
        return replace(of, **{name: by * getattr(of, name)})

    result = {name: replace(speeds, **{name: by * getattr(speeds, name)}) for name in MACHINE}
    result |= {f"cpu.{name}": replace(speeds, cpu=unit(speeds.cpu, name)) for name in UNIT}
    if speeds.gpu is not None:
        result |= {f"gpu.{name}": replace(speeds, gpu=unit(speeds.gpu, name)) for name in UNIT}
    return result


def priced(problem: Problem, some: Sampled, speeds: Speeds) -> np.ndarray:
    return np.asarray(replace(some, cost_model=replace(some.cost_model, speeds=speeds)).seconds(problem))


@examples(40)
@given(seed=st.integers(0, 1 << 30), by=st.floats(1.01, 30.0))
def test_no_policy_is_slower_on_a_faster_machine(seed: int, by: float) -> None:
    problem, _ = question(seed)
    rng = np.random.default_rng(seed)
    for cost_model, order in random.Random(seed).sample(list(every_setting(problem)), 3):
        some = drawn(problem, rng, 200, cost_model, order, None)
        if not len(some):
            continue
        before = priced(problem, some, problem.speeds)
        for name, speeds in better_speeds(problem.speeds, by).items():
            assert np.all(priced(problem, some, speeds) <= before * (1 + 1e-9)), (name, order)


@pytest.mark.thorough
@examples(5)
@given(seed=st.integers(0, 1 << 30), by=st.floats(1.2, 8.0))
def test_no_plan_is_slower_on_a_better_machine(seed: int, by: float) -> None:
    """What the search misses is less than what it promises: 1 %."""
    problem, _ = question(seed)
    problem = replace(
        problem, workload=replace(problem.workload, num_requests=min(problem.workload.num_requests, 2000))
    )
    before = search(problem)
    assume(before is not None)
    assert before is not None
    draw = random.Random(seed)
    speeds = draw.choice(list(better_speeds(problem.speeds, by).values()))
    tier, size = draw.choice(list(problem.capacity_bytes.items()))
    roomier = replace(problem, capacity_bytes={**problem.capacity_bytes, tier: int(size * by)})
    for better in (replace(problem, speeds=speeds), roomier):
        after = search(better)
        assert after is not None
        assert after.seconds <= before.seconds * 1.01


def test_a_faster_link_does_not_slow_the_processor_that_shares_its_memory() -> None:
    """All experts stay on the device, so only hidden states cross: the plan at any link is the same, and as fast."""
    machine, model = load_hardware_profile("a100-80g"), load_model_profile("qwen3-30b-a3b")
    work = Workload(num_requests=5000, prompt_len=77, max_prompt_len=77, gen_len=128)
    result = []
    for rate in (12.5e9, 25e9, 50e9):
        links = tuple(replace(link, bandwidth_bytes_per_s=rate) for link in machine.links)
        linked = replace(machine, links=links)
        options = PlanOptions(fix={"attention_device": "cpu", "schedule": "module"}, cache=False)
        plan = make_plan(linked, model, work, options, name="m")
        result.append(plan.estimate.tokens_per_s)
        assert speeds_of(linked).h2d == pytest.approx(0.78 * rate)
    assert result[0] <= result[1] * 1.001 <= result[2] * 1.002
