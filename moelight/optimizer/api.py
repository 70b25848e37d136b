"""The planner as ``moelight`` shows it in Python: names or profiles in, plans and timelines out.

Refuses to measure a machine: ``auto`` is the command line's and the engine's word.
"""

from __future__ import annotations

from collections.abc import Mapping

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.timeline import Timeline
from moelight.optimizer import optimize as planner
from moelight.optimizer.fixed_values import Fixed, parse_fixes
from moelight.optimizer.plan import Plan
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.hardware import HardwareProfile, load_hardware_profile
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from moelight.profiles.workload_files import load_workload


def optimize(
    hardware: HardwareProfile | str,
    model: ModelProfile | str,
    workload: Workload | str = "mtbench",
    *,
    name: str | None = None,
    estimator: str = "calibrated",
    limits: Mapping[str, int] | None = None,
    fix: Mapping[str, Fixed] | None = None,
    weight_dtypes: tuple[str, ...] = ("auto",),
    kv_dtypes: tuple[str, ...] = ("auto",),
    cache: bool = True,
) -> Plan:
    """The policy with the most tokens per second for ``model`` on ``hardware``, and why.

    Args:
        hardware, model, workload: names, files, or profiles; a model may be a directory with a ``config.json``.
        name: what the policy calls the model; ``model`` if that is text, else the profile's name.
        estimator: ``calibrated``, what the engine really does, or ``paper``, the published formulas.
        limits: bytes that may be used by tier (``device`` of one GPU, ``host``, ``disk``; 0: none), where not all.
        fix: parts of the policy, by the keys of ``--fix`` (``{"attention": "cpu", "weights.device": 0.1}``).
        weight_dtypes, kv_dtypes: what experts and cache may be stored in; ``auto`` is the model's own.
        cache: whether an equal question may be answered from disk.

    Raises:
        ConfigError: an unknown name (the nearest is named), or fixed parts that contradict each other.
        BudgetError: nothing fits; says what lacks and what would do.
    """
    return planner.make_plan(
        _hardware(hardware),
        _model(model),
        load_workload(workload) if isinstance(workload, str) else workload,
        name=name or (model if isinstance(model, str) else model.name),
        estimator=estimator,
        limits=limits,
        fix=parse_fixes(f"{key}={value}" for key, value in (fix or {}).items()),
        weight_dtypes=weight_dtypes,
        kv_dtypes=kv_dtypes,
        cache=cache,
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
    """One pass as it would run: each task's start and end on a virtual clock, at the ledger's costs.

    Args:
        plan_or_policy: what to run; a plan also says for which machine and workload.
        hardware, workload: those of the plan, unless given; a policy has no machine, and stands for ``mtbench``.
        model: what the policy names, unless given.
        schedule: another order of work than the policy's.
        with_prompts: the pass in which prompts ride along; otherwise a steady one in which every slot decodes.

    Raises:
        ConfigError: no machine is named, an unknown name, an order of work that these devices do not allow, or a
            workload without passes that bring prompts.
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
    found = stage.simulated_run(policy.schedule if schedule is None else schedule)
    if not with_prompts:
        return found.steady.timeline
    if found.with_prompts is None:
        raise ConfigError("simulate: this workload has no pass that brings prompts")
    return found.with_prompts.timeline


def _hardware(given: HardwareProfile | str) -> HardwareProfile:
    return load_hardware_profile(given) if isinstance(given, str) else given


def _model(given: ModelProfile | str) -> ModelProfile:
    return load_model_profile(given) if isinstance(given, str) else given
