"""What a job would be: its input, how the model would be run, and how long that would take.

Knows a scan's summary and a plan. Refuses to read input, to plan and to print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moelight.batch.summary import ScanSummary
from moelight.optimizer.plan import Plan, plan_as_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseForecast:
    """Passes of one kind in a row: how many, seconds of all of them, and the lane that is busiest in them."""

    name: str
    passes: float
    seconds: float
    binding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A job that was not run.

    Attributes:
        input: what a person calls the input; ``detected`` its format, and from what that was told.
        plan: None where no row can be served, or a policy was given.
    """

    input: str
    detected: str
    model: str
    summary: ScanSummary
    plan: Plan | None = None

    @property
    def phases(self) -> tuple[PhaseForecast, ...]:
        """The kinds of passes in their order: those that bring prompts, those that only generate."""
        return () if self.plan is None else phases_of(self.plan)

    @property
    def predicted_s(self) -> float | None:
        """Seconds of all passes if every answer is as long as it may be; None without a plan."""
        return None if self.plan is None else predicted_s(self.plan)

    @property
    def given(self) -> str:
        """What the plan was not free to choose, and who is; nothing without a plan."""
        if self.plan is None:
            return ""
        policy = self.plan.policy
        experts = {"cpu": "on the CPU", "gpu": "on the GPU", "split": "on both"}[policy.ffn_device]
        return (
            f"given, not searched: {policy.schedule}, attention on the {policy.attention_device.upper()}, experts "
            f"{experts}; moelight optimize searches these too, and --policy runs what it finds"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``--json``: bytes, seconds and tokens, unrounded."""
        return {
            "input": self.input,
            "detected": self.detected,
            "model": self.model,
            "summary": self.summary.as_dict(),
            "given": self.given,
            "predicted_s": self.predicted_s,
            "phases": [
                {"name": each.name, "passes": each.passes, "seconds": each.seconds, "binding": each.binding}
                for each in self.phases
            ],
            "plan": None if self.plan is None else plan_as_dict(self.plan),
        }


def predicted_s(plan: Plan) -> float:
    """Seconds that ``plan`` promises for its whole workload."""
    return sum(phase.passes * phase.seconds for phase in plan.estimate.phases)


def predicted_prompt_s(plan: Plan) -> float:
    """Of them, what the prompts cost: passes that bring them, less what these would take if they only generated."""
    alone = plan.estimate.pass_s
    return sum(phase.passes * max(0.0, phase.seconds - alone) for phase in plan.estimate.phases if phase.prompt_tokens)


def phases_of(plan: Plan) -> tuple[PhaseForecast, ...]:
    """The kinds of passes of ``plan`` that there are at all."""
    return tuple(
        PhaseForecast(
            name=phase.name,
            passes=phase.passes,
            seconds=phase.passes * phase.seconds,
            binding=max(phase.lanes, key=lambda lane: phase.lanes[lane], default=""),
        )
        for phase in plan.estimate.phases
        if phase.passes > 0 and phase.seconds > 0
    )
