"""The policy that the engine plans to run is the policy that ``optimize`` recommends, on every shipped machine."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from moelight.core.dtypes import dtype_named
from moelight.engine.api import optimize
from moelight.engine.options import EngineOptions
from moelight.engine.planning import plan_for, resolve
from moelight.optimizer import optimize as planner
from moelight.optimizer.placement import Solution
from moelight.optimizer.problem import Problem
from moelight.optimizer.search import search as find
from moelight.profiles.files import profile_names
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model import not_computed
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import load_workload
from moelight.runtime.machine import Machine
from moelight.weights.tensor_map import OpenCheckpoint

RUNNABLE = [name for name in profile_names("model") if not not_computed(load_model_profile(name))]
PAIRS = [
    pytest.param(*pair, marks=[] if number % 18 == 0 else pytest.mark.thorough)
    for number, pair in enumerate(zip(profile_names("hardware"), cycle(RUNNABLE), strict=False))
]


@pytest.mark.parametrize(("machine", "model"), PAIRS)
def test_the_engine_plans_what_optimize_recommends(machine: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU, which is what the engine uses of several; and with the same memory. Whoever asks again what was asked
    before gets the answer of before, and the bound, which the engine does not want, is not looked for."""
    asked: list[tuple[Problem, Solution | None]] = []

    def search(problem: Problem) -> Solution | None:
        for other, result in asked:
            if other == problem:
                return result
        asked.append((problem, find(problem)))
        return asked[-1][1]

    monkeypatch.setattr(planner, "search", search)
    monkeypatch.setattr(planner, "best_plan", partial(planner.best_plan, proof=False))
    hardware, profile, work = load_hardware_profile(machine), load_model_profile(model), load_workload("mtbench")
    gpu = hardware.processor("gpu")
    discrete = gpu is not None
    limits = {tier.name: tier.capacity_bytes * 9 // 10 for tier in hardware.tiers if tier.name != "disk"}
    source = SimpleNamespace(profile=profile, weight_map=SimpleNamespace(dtype=dtype_named(profile.dtype)))
    fix = {"gpus": 1} if discrete else {}
    recommended = optimize(hardware, profile, work, name=model, limits=limits, fix=fix, cache=False)
    planned = plan_for(
        model,
        cast(OpenCheckpoint, source),
        Machine(device=torch.device("cpu"), discrete=discrete, twin=discrete, bf16=gpu is None or gpu.bfloat16),
        EngineOptions(hw=machine, host_memory=limits["host"], device_memory=limits.get("device")),
        work,
    )
    assert recommended.runs
    assert planned.policy == recommended.policy == resolve(planned.policy, profile, discrete=discrete)
    assert planned.estimate == recommended.estimate
