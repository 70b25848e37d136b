"""The optimizer against exhaustive enumeration on small problems: as fast, as feasible, and its bound holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError
from moelight.hrm.costs import page_slot_bytes
from moelight.hrm.estimate import estimate
from moelight.hrm.footprint import footprint
from moelight.hrm.speeds import Speeds, Unit
from moelight.optimizer.bound import least_seconds
from moelight.optimizer.optimize import policy_of
from moelight.optimizer.problem import Problem
from moelight.optimizer.refusal import refusal
from moelight.optimizer.search import search
from moelight.profiles.model import ExpertSpec, ModelProfile
from moelight.profiles.workload import Workload
from tests.optimizer.exhaustive import every, least_seconds_of_all, settings_of
from tests.shapes import examples, small_model

MOST_POLICIES = 150_000


def drawn_problem(seed: int) -> Problem:
    """A small model on a machine whose speeds range over decades, with memory from too little to plenty."""
    draw = random.Random(seed)
    model, gpu = drawn_model(draw), draw.random() < 0.7
    prompt = draw.randint(1, 40)
    work = Workload(
        num_requests=draw.randint(1, 4),
        prompt_len=prompt,
        max_prompt_len=prompt + draw.randint(0, 20),
        gen_len=draw.randint(1, 24),
    )
    slot = page_slot_bytes(model, FLOAT32)
    pages = model.num_moe_layers * model.experts.num_experts
    capacity = {
        tier: int(draw.uniform(60e6, 75e6) + draw.uniform(0, 1.2) * pages * slot) for tier in ("device", "host")
    }
    if draw.random() < 0.3:
        capacity[draw.choice(["device", "host"])] = 1 << 40
    if draw.random() < 0.8:
        capacity["device"] = int(draw.uniform(2e6, 70e6))
    capacity["disk"] = draw.choice([0, 1 << 40, int(draw.random() * pages * slot)])
    if not gpu:
        del capacity["device"]
    return Problem(
        name="m",
        model=model,
        speeds=drawn_speeds(draw, gpu=gpu),
        workload=work,
        capacity_bytes=capacity,
        dtype=FLOAT32,
    )


def drawn_model(draw: random.Random) -> ModelProfile:
    layers = [True] * draw.randint(1, 3)
    experts = draw.randint(1, 2) if len(layers) > 2 else draw.randint(2, 3)
    model = small_model(layers, experts=experts)
    return replace(
        model,
        hidden_size=draw.choice([8, 32, 64]),
        experts=ExpertSpec(num_experts=experts, intermediate_size=draw.choice([12, 64, 96])),
        router=replace(model.router, top_k=draw.randint(1, min(2, experts))),
    )


def drawn_speeds(draw: random.Random, *, gpu: bool) -> Speeds:
    def rate(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def unit() -> Unit:
        return Unit(
            flops=rate(7, 11),
            memory=rate(6, 10),
            elementwise=rate(7, 11),
            task_s=draw.choice([0.0, rate(-7, -3)]),
            launch_s=draw.choice([0.0, rate(-7, -4)]),
            prefill_flops=rate(7, 11),
        )

    return Speeds(
        cpu=unit(),
        gpu=unit() if gpu else None,
        dram=rate(6, 10),
        disk=rate(5, 10),
        h2d=rate(5, 10),
        d2h=rate(5, 10),
        stage=rate(5, 10),
        transfer_s=draw.choice([0.0, rate(-7, -4)]),
        under_disk=draw.choice([1.0, draw.uniform(0.1, 1)]),
    )


@examples(220)
@given(seed=st.integers(0, 1 << 30))
def test_the_optimizer_equals_enumeration(seed: int) -> None:
    problem = drawn_problem(seed)
    assume(sum(len(every(problem, *setting).batch_size) for setting in settings_of(problem)) <= MOST_POLICIES)
    least, found = least_seconds_of_all(problem), search(problem)
    assert (found is None) == (least == float("inf"))
    if found is None:
        with pytest.raises(BudgetError):
            raise refusal(problem)
        return
    policy = policy_of(problem, found)
    priced = estimate(problem.model, policy, problem.workload, problem.speeds, dtype=FLOAT32)
    took = problem.workload.num_requests * problem.workload.gen_len / priced.tokens_per_s
    assert took == pytest.approx(least, rel=1e-6)
    assert least_seconds(problem, took) <= least * (1 + 1e-9)
    taken = footprint(problem.model, policy, dtype=FLOAT32, kv_dtype=FLOAT32)
    assert all(
        taken.total(tier) <= problem.capacity_bytes[tier]
        for tier in ("device", "host")
        if tier in problem.capacity_bytes
    )


@examples(60)
@given(seed=st.integers(0, 1 << 30))
def test_the_figure_in_a_refusal_is_enough_and_no_more_than_enough(seed: int) -> None:
    """Of one tier, the other having plenty; a byte less is refused with the same figure."""
    problem = drawn_problem(seed)
    tier = "device" if problem.has_gpu and seed % 2 else "host"
    fixed = {"ffn_device": "gpu", "attention_device": "cpu"} if tier == "device" else {}
    problem = replace(problem, fixed=fixed, capacity_bytes={**dict.fromkeys(problem.capacity_bytes, 1 << 50), tier: 1})
    needed = refusal(problem).needed_bytes
    assert refusal(problem).tier == tier
    assert search(replace(problem, capacity_bytes={**problem.capacity_bytes, tier: needed})) is not None
    short = replace(problem, capacity_bytes={**problem.capacity_bytes, tier: needed - 1})
    assert search(short) is None
    assert (refusal(short).tier, refusal(short).needed_bytes) == (tier, needed)


@examples(40)
@given(seed=st.integers(0, 1 << 30), more=st.floats(1, 3))
def test_more_memory_is_never_slower(seed: int, more: float) -> None:
    problem = drawn_problem(seed)
    before = search(problem)
    assume(before is not None)
    for tier, size in problem.capacity_bytes.items():
        grown = search(replace(problem, capacity_bytes={**problem.capacity_bytes, tier: int(size * more)}))
        assert grown is not None and before is not None
        assert grown.homes.seconds <= before.homes.seconds * (1 + 1e-9)
