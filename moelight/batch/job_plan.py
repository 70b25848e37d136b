"""Plans a job: a plan for the workload of its prompts, or the given policy; and the engine for it.

Torch is imported when a job is planned, and not before, so that errors in the input are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moelight.batch.options import JobOptions
from moelight.batch.trace_header import trace_header
from moelight.core.policy import Policy
from moelight.observe.trace import TraceHeader
from moelight.optimizer.plan import Plan
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.workload import Workload

# Sequences that are running when a job is killed are computed again, and each costs some kilobytes of Python objects:
# plan more than this many at a time only if they make the job faster by more than the error of predictions.
_MANY, _AS_FAST = 4096, 0.85

if TYPE_CHECKING:
    from moelight.engine.checkpoint import OpenCheckpoint
    from moelight.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """An audited checkpoint and its policy. ``plan`` is None if the policy was given by the user."""

    source: OpenCheckpoint
    policy: Policy
    plan: Plan | None
    workload: Workload

    @property
    def why(self) -> str:
        """One line on how the model will be run."""
        if self.plan is not None:
            return self.plan.why
        policy = self.policy
        return (
            f"as the policy says: N = {policy.batch_size} in micro-batches of {policy.micro_batch_size}, "
            f"{policy.schedule}, attention on the {policy.attention_device}, experts on {policy.ffn_device}"
        )

    def load(self, options: JobOptions) -> Engine:
        """Return the engine; a context manager."""
        from moelight.engine.engine import Engine

        record = options.expert_stats is not None or options.save_expert_profile is not None
        return Engine(
            self.plan or self.policy,
            device=options.device,
            source=self.source,
            adapt=options.adapt,
            experts=replace(options.experts, record=record),
        )


def plan_job(options: JobOptions, workload: Workload) -> PlannedJob:
    """Return the fastest policy for ``workload`` within the limits, or the given policy.

    Raises:
        CheckpointError, ConfigError, BudgetError: the model, the limits or the memory are insufficient.
    """
    from moelight.engine.checkpoint import open_checkpoint
    from moelight.engine.planning import PlanConstraints, plan_for
    from moelight.runtime.machine import find_machine

    source = open_checkpoint(options.model)
    if options.policy is not None:
        policy = replace(options.policy, model=options.model)
        return PlannedJob(source=source, policy=policy, plan=None, workload=workload)
    constraints = PlanConstraints(
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        schedule=options.schedule or "cgopipe",
    )
    machine = find_machine(options.device)

    def planned(constraints: PlanConstraints) -> Plan:
        return plan_for(
            options.model,
            source,
            machine,
            hw=options.hw,
            host_memory=options.host_memory,
            device_memory=options.device_memory,
            constraints=constraints,
            workload=workload,
            experts=options.experts.policy,
        )

    plan = planned(constraints)
    if plan.policy.batch_size > _MANY and constraints.batch_size is None:
        fewer = planned(replace(constraints, batch_size=_MANY))
        if fewer.estimate.tokens_per_s >= _AS_FAST * plan.estimate.tokens_per_s:
            plan = fewer
    return PlannedJob(source=source, policy=plan.policy, plan=plan, workload=workload)


def predicted(engine: Engine, hw: str, workload: Workload) -> TraceHeader:
    """Return the cost model's prediction for the engine's policy, on the machine that was planned for."""
    from moelight.engine.planning import hardware_for

    hardware = hardware_for(hw, discrete=engine.policy.discrete)
    stage = SimulationSetup(engine.policy, engine.profile, hardware, workload)
    return trace_header(stage, engine.policy.schedule, source="measured")
