"""The outer search on named machines and models: no sampled policy is better, none is beyond the proven bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.sampled_policies import _drawn, _settings, best_of_samples
from moelight.core.policy import Policy, Shares
from moelight.hrm.estimate import estimate
from moelight.hrm.footprint import footprint
from moelight.hrm.speeds import speeds_of
from moelight.optimizer.optimize import best_plan, capacities, compute_dtype
from moelight.optimizer.problem import Problem
from moelight.optimizer.search import search
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload_files import load_workload
from tests.optimizer.drawn import drawn_problem

PAIRS = [
    ("t4", "mixtral-8x7b", "mtbench"),
    ("4xt4", "gpt-oss-20b", "mtbench"),
    ("2xa100", "qwen1.5-moe-a2.7b", "mtbench"),
    ("l4", "qwen2-57b-a14b", "synthetic-reasoning"),
    ("h200", "deepseek-v3", "summarization"),
    ("rtx4090", "qwen3-30b-a3b", "synthetic-reasoning"),
    ("cpu-avx2", "deepseek-v2-lite", "summarization"),
    ("laptop-nvme", "gpt-oss-120b", "mtbench"),
]


def problem_of(machine: str, model: str, workload: str) -> Problem:
    hardware, profile = load_hardware_profile(machine), load_model_profile(model)
    return Problem(
        name=model,
        model=profile,
        speeds=speeds_of(hardware),
        workload=load_workload(workload),
        capacity_bytes=capacities(hardware, {}),
        dtype=compute_dtype(profile),
    )


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_no_sampled_policy_is_better_than_the_plan_or_the_bound(names: tuple[str, str, str]) -> None:
    problem = problem_of(*names)
    plan = best_plan(problem, load_hardware_profile(names[0]), {})
    tokens = problem.workload.num_requests * problem.workload.gen_len
    best = best_of_samples(problem, plan.policy, 5000)
    assert best.count >= 5000
    assert tokens / best.seconds <= plan.estimate.tokens_per_s * (1 + 1e-6), best.policy
    assert plan.estimate.tokens_per_s <= plan.bound_tokens_per_s * (1 + 1e-9)


@pytest.mark.parametrize("names", PAIRS[:3], ids="-".join)
def test_samples_are_policies_that_fit_and_are_priced_as_such(names: tuple[str, str, str]) -> None:
    """The arrays say of each what the footprint and the estimate of one policy say."""
    problem, rng = problem_of(*names), np.random.default_rng(1)
    near = Policy(model="m", batch_size=512, micro_batch_size=64, kv_tokens=1)
    for acts, schedule in _settings(problem):
        for around in (None, near):
            some = _drawn(problem, rng, 200, acts, schedule, around)
            for index in range(min(3, len(some))):
                one, pages = some.at(index), problem.pages
                on_host = one.resident if acts.ffn_device == "cpu" else one.from_host + one.computed
                device = 0.0 if acts.ffn_device == "cpu" else one.resident / pages
                cache = one.blocks / -(-one.kv_tokens // 32)
                policy = Policy(
                    model="m",
                    batch_size=int(one.batch_size),
                    micro_batch_size=int(one.micro_batch_size),
                    micro_batch_tokens=int(one.micro_batch_tokens),
                    kv_tokens=int(one.kv_tokens),
                    attention_device=acts.attention_device,
                    ffn_device=acts.ffn_device,
                    weights=Shares(device=device, host=on_host / pages, disk=one.from_disk / pages),
                    cpu_experts=one.computed / pages,
                    kv=Shares(device=cache, host=1.0 - cache),
                    schedule=schedule,
                )
                taken = footprint(problem.model, policy, dtype=problem.dtype, kv_dtype=problem.dtype)
                assert all(taken.total(tier) <= problem.capacity_bytes[tier] for tier in ("device", "host"))
                priced = estimate(problem.model, policy, problem.workload, problem.speeds, dtype=problem.dtype)
                tokens = problem.workload.num_requests * problem.workload.gen_len
                assert tokens / priced.tokens_per_s == pytest.approx(float(one.seconds(problem)), rel=1e-9)


def test_nothing_is_found_where_nothing_fits() -> None:
    problem = drawn_problem(1, gpu=True)
    assert search(replace(problem, capacity_bytes=dict.fromkeys(problem.capacity_bytes, 0))) is None


def test_without_the_programme_homes_are_those_of_closed_form() -> None:
    """What the engine asks for: attention and cache beside the CPU, and no solver to load."""
    problem = replace(
        problem_of("t4", "olmoe-1b-7b", "mtbench"), fixed={"attention_device": "cpu", "ffn_device": "gpu"}
    )
    plain, solved = search(replace(problem, programme=False)), search(problem)
    assert plain is not None and solved is not None
    assert plain.homes.seconds == pytest.approx(solved.homes.seconds, rel=1e-6)
