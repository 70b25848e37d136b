"""What a job is asked to do, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moelight.batch.rows import BadRow
from moelight.core.policy import Policy
from moelight.core.request import SamplingParams
from moelight.experts.options import ExpertOptions
from moelight.observe.stats import RunStats

DONE, INTERRUPTED, DONE_BEFORE = "done", "interrupted", "done before"


@dataclass(frozen=True, kw_only=True, slots=True)
class Durability:
    """How the output is kept. ``order`` is ``input`` or ``completion``; with ``atomic`` the output appears whole at the
    end; rows are synchronised to the disk every ``sync_s`` seconds. ``restart`` forgets what is done, ``allow_changed``
    goes on with other settings than it was done with."""

    order: Literal["input", "completion"] = "input"
    atomic: bool = False
    sync_s: float = 5.0
    restart: bool = False
    allow_changed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What a job is asked to do. None leaves the choice to the planner; a path of None is not written.

    A ``policy`` is run as it stands, on ``model``; otherwise the planner chooses one for the machine ``hw``. Memory is
    in bytes. ``sampling`` holds where a row does not say otherwise. ``format`` and the columns say how ``prompts`` is
    read; with ``ignore_model`` rows may name any model.
    """

    prompts: Path
    model: str = "demo"
    output: Path | None = None
    error_file: Path | None = None
    format: str = "auto"
    prompt_column: str | None = None
    id_column: str | None = None
    ignore_model: bool = False
    chat_template: Path | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256, seed=0))
    durability: Durability = field(default_factory=Durability)
    device: str = "auto"
    host_memory: int | None = None
    device_memory: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    policy: Policy | None = None
    hw: str = "auto"
    token_ids: bool = False
    stats: Path | None = None
    trace: Path | None = None
    status: Path | None = None
    metrics: Path | None = None
    adapt: bool | None = None
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    expert_stats: Path | None = None
    save_expert_profile: Path | None = None

    @property
    def written(self) -> dict[str, Path | None]:
        """Every file that the job writes, by what is in it."""
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
    """How a job ended: ``done``, ``interrupted`` (running it again goes on) or ``done before`` (nothing was to do).

    Rows count over all runs of the job. ``first_error`` is the first row of this run that was not served, if any;
    ``troubles`` say which files that tell of the job could not be kept.
    """

    state: str
    total: int
    completed: int
    failed: int
    stats: RunStats | None = None
    first_error: BadRow | None = None
    troubles: tuple[str, ...] = ()
