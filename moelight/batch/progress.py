"""Progress events of a job. A watcher (a terminal, a status file, metrics) overrides the events that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from moelight.core.request import Completion
from moelight.observe.stats import Binding, RunStats

State: TypeAlias = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounts:
    """One engine of several: what it does (``loading``, ``running``, ``ended``), the rows that it answered, the
    sequences that are ``running`` and the rows that wait there, its part of the work that is left (0 to 1), its speed
    in generated tokens, the seconds that it needs for the rows it holds, and its busiest lane."""

    name: str
    node: str
    state: str
    rows: int = 0
    running: int = 0
    queued: int = 0
    share: float = 0.0
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    binding: Binding | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCounts:
    """The progress of a job. States are those of OpenAI's batch object; ``completed`` and ``failed`` cover all runs.

    Attributes:
        total: rows of the input; 0 while it is being read for the first time.
        running: sequences that were requested from the engine and are unfinished.
        waiting: sequences that were not requested yet.
        resumed: of ``completed`` and ``failed``, the rows that an earlier run had done.
        prompt_tokens: prompt tokens that this run has processed, of ``expected_prompt_tokens``.
        generation_tokens: tokens that this run has generated.
        expected_tokens: the most tokens that this run will generate, or of answers that only the context limits the
            expected ones; it shrinks as sequences end early.
        kv_usage: the used share of the KV cache, 0 to 1.
        elapsed_s: seconds since this run began.
        running_s: of ``elapsed_s``, the seconds since the first pass began.
        binding: the busiest lane of the last few passes.
        engines: each engine of a cluster; empty for one engine in this process.
    """

    total: int = 0
    completed: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    expected_prompt_tokens: int = 0
    generation_tokens: int = 0
    expected_tokens: int = 0
    passes: int = 0
    kv_usage: float = 0.0
    elapsed_s: float = 0.0
    running_s: float = 0.0
    state: State = "validating"
    binding: Binding | None = None
    engines: tuple[EngineCounts, ...] = ()

    @property
    def done(self) -> int:
        return self.completed + self.failed

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the seconds since the first pass; 0 before it."""
        return self.generation_tokens / self.running_s if self.running_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """The facts known when the input has been read and planned, before the model is loaded.

    Attributes:
        input: display name of the input: the file's name, or ``standard input``.
        detected: the format and the evidence for it, one line.
        kinds: rows by kind; ``endpoint`` is the one of most rows, empty if rows name none.
        refused: rows that are error rows already.
        plan: one sentence on how the model will be run; empty if all rows were done by an earlier run.
        machine: the hardware profile that the seconds are predicted with.
        predicted_s: predicted seconds for the remaining rows; None without a plan.
        predicted_prompt_s: of ``predicted_s``, the seconds due to prompts.
        resumed: rows that an earlier run had done.
        unlimited: a clause on rows that set no limit; empty if all do. ``open_ended``: only the context limits some
            answers, of which ``expected_tokens`` and ``predicted_s`` are those of the expected length.
    """

    input: str
    detected: str = ""
    model: str = ""
    endpoint: str = ""
    kinds: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    refused: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    unlimited: str = ""
    open_ended: bool = False
    plan: str = ""
    machine: str = ""
    predicted_s: float | None = None
    predicted_prompt_s: float | None = None

    @property
    def counts(self) -> JobCounts:
        """The counts at the start: rows that are done already."""
        return JobCounts(total=self.total, failed=self.refused, completed=self.resumed, resumed=self.resumed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressFields:
    """A row that is written: its ``number`` in the input, a short ``prompt``, and its answers or its ``error``."""

    number: int
    prompt: str
    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None


class Progress:
    """The events of a running job. Every method of this class does nothing; override as needed.

    All are called from one thread, in this order: ``reading`` repeatedly, ``planning`` and ``started`` once,
    ``planned`` once the model is loaded, then ``tokens`` after every pass, ``completion`` and ``row`` as they finish,
    ``counts`` and ``measured`` at most a few times a second and once at the end, ``ended`` last.
    """

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """The first reading of the input has given ``rows``, ``read_bytes``; a stream has no ``total_bytes``."""

    def planning(self) -> None:
        """The input is read; the job is being planned."""

    def started(self, start: JobStart) -> None:
        """The input is read and the job is planned."""

    def planned(self, description: str) -> None:
        """The model is loaded; ``description`` describes how it will be run."""

    def adapted(self, reason: str) -> None:
        """The policy changes with the next pass; ``reason`` is the reason."""

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        """``done`` of at most ``expected`` tokens are generated; ``binding`` was the busiest lane recently."""

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:
        """A sequence limited to ``room`` tokens has ended, ``latency_s`` seconds after its request."""

    def counts(self, counts: JobCounts) -> None:
        """The current counts of the job."""

    def measured(self, stats: RunStats, experts: Mapping[str, Any] | None = None) -> None:
        """The current stats of the run, and those of the expert cache (`expert_stats`), if any."""

    def row(self, shown: ProgressFields) -> None:
        """A row was answered or refused; rows arrive in any order."""

    def interrupting(self) -> None:
        """The job was asked to end and ends after the running pass. Called in a signal's handler."""

    def failed(self, code: str, message: str) -> None:
        """The job as a whole has failed; ``ended`` follows."""

    def ended(self, state: State) -> None:
        """The job is over: ``completed`` (with error rows or without), ``failed``, or ``cancelled``."""


_EVENTS = tuple(name for name in vars(Progress) if not name.startswith("_"))


class ProgressGroup(Progress):
    """Forwards every event to each of ``watchers``, in their order."""

    def __init__(self, watchers: Sequence[Progress]) -> None:
        for name in _EVENTS:
            setattr(self, name, partial(_tell, [getattr(watcher, name) for watcher in watchers]))


def _tell(listeners: Sequence[Callable[..., None]], *args: Any, **kwargs: Any) -> None:
    for listener in listeners:
        listener(*args, **kwargs)
