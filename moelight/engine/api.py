"""The planner's public Python interface: turns names or profiles into plans and timelines.

Does not measure a machine: ``auto`` exists only on the command line and in the engine.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from moelight.core.errors import ConfigError, refuse_unknown
from moelight.core.policy import Policy
from moelight.core.timeline import Timeline
from moelight.models.profiles import profile_of_checkpoint
from moelight.optimizer import optimize as planner
from moelight.optimizer.fixed_values import parse_fixes
from moelight.optimizer.options import PlanOptions
from moelight.optimizer.plan import Plan
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload, load_workload


def optimize(
    hardware: HardwareProfile | str,
    model: ModelProfile | str,
    workload: Workload | str = "mtbench",
    *,
    name: str | None = None,
    **options: Any,
) -> Plan:
    """The plan with the most tokens per second for ``model`` on ``hardware``.

    Args:
        hardware: a profile, its name or its file.
        model: a profile, its name, its file, or a directory with a ``config.json``.
        workload: a workload, its name or its file.
        name: the model's name in the policy; default: ``model`` if that is text, else the profile's name.
        options: by name, the fields of `PlanOptions`, such as ``limits={"host": 16 << 30}``.

    Returns:
        The policy with its predicted speed, memory use and proven bound.

    Raises:
        ConfigError: an unknown name (the nearest is named), or fixed parts that contradict each other.
        BudgetError: nothing fits; names the missing bytes and a sufficient size.
    """
    refuse_unknown(options, [option.name for option in fields(PlanOptions)])
    asked = PlanOptions(**options)
    fix = parse_fixes(f"{key}={value}" for key, value in asked.fix.items())
    return planner.make_plan(
        _hardware(hardware),
        _model(model),
        load_workload(workload) if isinstance(workload, str) else workload,
        replace(asked, fix=fix),
        name=name or (model if isinstance(model, str) else model.name),
    )


def simulate(
    plan_or_policy: Plan | Policy,
    *,
    hardware: HardwareProfile | str | None = None,
    model: ModelProfile | str | None = None,
    workload: Workload | str | None = None,
    schedule: str | None = None,
    with_prompts: bool = False,
) -> Timeline:
    """Simulate one pass: each task's start and end on a virtual clock, at the ledger's costs.

    Args:
        plan_or_policy: the policy to simulate; a plan also provides machine and workload.
        hardware: a profile, its name or its file; default: the plan's machine; needed for a policy.
        model: a profile, its name or its file; default: the model that the policy names.
        workload: a workload, its name or its file; default: the plan's, or ``mtbench`` for a policy.
        schedule: the name of a schedule in place of the policy's.
        with_prompts: simulate the pass with prompt tokens instead of a steady pass in which every slot decodes.

    Returns:
        The start and the end of every task, in seconds.

    Raises:
        ConfigError: no machine is named, an unknown name, a schedule that these devices do not allow, too many tasks,
            or a workload without passes with prompts.
    """
    plan = plan_or_policy if isinstance(plan_or_policy, Plan) else None
    policy = plan.policy if plan is not None else plan_or_policy
    assert isinstance(policy, Policy)
    machine = hardware if hardware is not None else plan.hardware if plan is not None else None
    if machine is None:
        raise ConfigError("simulate: a policy says nothing of the machine; give hardware=NAME, a file or a profile")
    work = workload if workload is not None else plan.workload if plan is not None else "mtbench"
    stage = SimulationSetup(
        policy,
        _model(policy.model if model is None else model),
        _hardware(machine),
        load_workload(work) if isinstance(work, str) else work,
    )
    run = stage.simulated_run(policy.schedule if schedule is None else schedule)
    if not with_prompts:
        return run.steady.timeline
    if run.with_prompts is None:
        raise ConfigError("simulate: this workload has no pass that brings prompts")
    return run.with_prompts.timeline


def _hardware(hardware: HardwareProfile | str) -> HardwareProfile:
    return load_hardware_profile(hardware) if isinstance(hardware, str) else hardware


def _model(model: ModelProfile | str) -> ModelProfile:
    return load_model_profile(model, profile_of_checkpoint) if isinstance(model, str) else model
