"""The options of a job, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moelight.batch.rows import BadRow
from moelight.batch.tasks import GENERATE
from moelight.core.policy import Policy
from moelight.core.request import DEFAULT_RESAMPLINGS, PoolingParams, SamplingParams
from moelight.engine.options import EngineOptions
from moelight.observe.stats import RunStats

DONE, INTERRUPTED, DONE_BEFORE = "done", "interrupted", "done before"


@dataclass(frozen=True, kw_only=True, slots=True)
class Durability:
    """How the output is written: rows in ``order``, fsynced every ``sync_s`` seconds; with ``atomic`` the output
    appears complete at the end. ``restart`` discards finished rows; ``allow_changed`` resumes with other settings than
    theirs."""

    order: Literal["input", "completion"] = "input"
    atomic: bool = False
    sync_s: float = 5.0
    restart: bool = False
    allow_changed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions(EngineOptions):
    """The options of a job, with those of its engine. A ``policy`` is run unchanged. A file whose path is None is not
    written. ``sampling`` applies where a row sets no value: without ``max_tokens`` answers may fill the rest of the
    context. So do ``strict`` and ``resamplings`` (of `StructuredOutputs` and `ToolRequest`). With ``ignore_model`` rows
    may name any model. Where ``task`` scores, ``choices`` are scored for rows without any; ``pooling`` is that of
    embeddings where a row sets no value."""

    prompts: Path
    model: str = "demo"
    policy: Policy | None = None
    output: Path | None = None
    error_file: Path | None = None
    format: str = "auto"
    prompt_column: str | None = None
    id_column: str | None = None
    ignore_model: bool = False
    chat_template: Path | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=None, seed=0))
    strict: bool = False
    resamplings: int = DEFAULT_RESAMPLINGS
    durability: Durability = field(default_factory=Durability)
    token_ids: bool = False
    per_request_metrics: bool = False
    task: str = GENERATE
    choices: Sequence[str] = ()
    pooling: PoolingParams = field(default_factory=PoolingParams)
    stats: Path | None = None
    trace: Path | None = None
    status: Path | None = None
    metrics: Path | None = None
    expert_stats: Path | None = None
    save_expert_profile: Path | None = None

    @property
    def written(self) -> dict[str, Path | None]:
        """Every file that the job writes, by its description."""
        return {
            "output": self.output,
            "error file": self.error_file,
            "stats": self.stats,
            "trace": self.trace,
            "status": self.status,
            "metrics": self.metrics,
            "routing trace": self.experts.trace,
            "expert stats": self.expert_stats,
            "expert profile": self.save_expert_profile,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """The result of a job: ``done``, ``interrupted`` (another run resumes it) or ``done before`` (nothing was left).
    Row counts cover all runs, ``first_error`` this one; of the answers, ``invalid`` ones have not the structure asked
    for, and ``truncated`` ones end before it is complete; ``running``: answers that were under way when it was
    interrupted; ``generates`` is False if no row asks for tokens; ``troubles`` name status or metrics files that are
    not up to date; ``hint`` is a line on what may be wrong with all answers."""

    state: str
    total: int
    completed: int
    failed: int
    running: int = 0
    stats: RunStats | None = None
    first_error: BadRow | None = None
    invalid: int = 0
    truncated: int = 0
    generates: bool = True
    troubles: tuple[str, ...] = ()
    hint: str = ""
