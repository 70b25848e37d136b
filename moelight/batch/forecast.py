"""The forecast of a job that is not run: the summary of its input, its plan, and the predicted time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moelight.batch.summary import ScanSummary
from moelight.optimizer.plan import Plan, plan_as_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseForecast:
    """Consecutive passes of one kind: their number, their total seconds, and their busiest lane."""

    name: str
    passes: float
    seconds: float
    binding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineForecast:
    """The forecast for one engine of a cluster: its part of the work, its rows, its speed in generated tokens, the
    binding lane, and the seconds that it takes if every answer has its maximum length; or why it is ``refused``.
    ``why`` is its plan in a sentence."""

    name: str
    share: float = 0.0
    rows: int = 0
    tokens_per_s: float = 0.0
    binding: str = ""
    seconds: float | None = None
    why: str = ""
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The forecast of a job. ``detected`` is the input's format and the evidence for it; ``plan`` is None if no row can
    be served, or a policy was given, or ``engines`` of a cluster have plans of their own."""

    input: str
    detected: str
    model: str
    summary: ScanSummary
    plan: Plan | None = None
    engines: tuple[EngineForecast, ...] = ()

    @property
    def phases(self) -> list[PhaseForecast]:
        """The kinds of passes that occur at least once."""
        return [
            PhaseForecast(
                name=phase.name,
                passes=phase.passes,
                seconds=phase.passes * phase.seconds,
                binding=max(phase.lanes, key=lambda lane: phase.lanes[lane], default=""),
            )
            for phase in (() if self.plan is None else self.plan.estimate.phases)
            if phase.passes > 0 and phase.seconds > 0
        ]

    @property
    def predicted_s(self) -> float | None:
        """Seconds of all passes if every answer has its maximum length; None without a plan."""
        if self.engines:
            return max((engine.seconds for engine in self.engines if engine.seconds is not None), default=None)
        return None if self.plan is None else self.plan.predicted_s

    @property
    def given(self) -> str:
        """The keys of the policy that the user fixed; empty if there are none."""
        fixed = () if self.plan is None else self.plan.fixed
        return f"given, not searched: {', '.join(fixed)}" if fixed else ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``: bytes, seconds and tokens, unrounded."""
        return {
            "input": self.input,
            "detected": self.detected,
            "model": self.model,
            "summary": self.summary.as_dict(),
            "given": self.given,
            "predicted_s": self.predicted_s,
            "phases": [asdict(phase) for phase in self.phases],
            "plan": None if self.plan is None else plan_as_dict(self.plan),
            **({"engines": [asdict(engine) for engine in self.engines]} if self.engines else {}),
        }


def predicted_prompt_s(plan: Plan) -> float:
    """Seconds due to prompts: those of passes with prompt tokens, less those of as many decode passes."""
    alone = plan.estimate.pass_s
    return sum(phase.passes * max(0.0, phase.seconds - alone) for phase in plan.estimate.phases if phase.prompt_tokens)
