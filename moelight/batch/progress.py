"""What a job tells while it runs, and to whom.

Nouns and a face: whoever wants to watch (a terminal, a status file, metrics) overrides the events it wants. Refuses to
know how a job is done or how it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from moelight.core.request import Completion
from moelight.observe.stats import Binding, RunStats

State: TypeAlias = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCounts:
    """How far a job is. States are those of OpenAI's batch object.

    Attributes:
        total: rows of the input; 0 while it is being read for the first time.
        completed: rows answered, by this run or an earlier one.
        failed: rows that became error rows, by this run or an earlier one.
        running: sequences that the engine is at.
        waiting: sequences that it has not begun.
        resumed: of ``completed`` and ``failed``, those that an earlier run had done.
        prompt_tokens: prompt tokens whose work this run has done.
        expected_prompt_tokens: all that this run has to do, those done included.
        generation_tokens: tokens that this run has generated.
        expected_tokens: the most that it will generate; it shrinks as sequences end early.
        passes: passes that this run has made.
        kv_usage: the share of the room for keys and values that is taken, 0 to 1.
        elapsed_s: seconds since this run began.
        running_s: seconds of them since the first pass began.
        binding: the busiest lane of the last few passes.
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

    @property
    def done(self) -> int:
        """Rows that have their line in the output."""
        return self.completed + self.failed

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the seconds since the first pass; 0 before it."""
        return self.generation_tokens / self.running_s if self.running_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """What is known when the input has been read and planned, before the model is loaded.

    Attributes:
        input: what a person calls the input: the file's name, or ``standard input``.
        detected: what the format is and from what that was told, one line.
        kinds: rows by kind; ``endpoint`` is the one most of them ask for, empty where rows name none.
        refused: rows that are error rows already.
        plan: one sentence on how the model will be run; empty where all rows were done by an earlier run.
        predicted_s: seconds the plan promises for the rows that are left; None where nothing was planned.
        predicted_prompt_s: of them, the ones before the first pass that only generates.
        resumed: rows that an earlier run had done.
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
    plan: str = ""
    predicted_s: float | None = None
    predicted_prompt_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressFields:
    """A row that is written: its ``number`` in the input, what a person would call its ``prompt``, and the ``texts`` of
    its answers and how they ended, or why there are none."""

    number: int
    prompt: str
    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None


class Progress:
    """What a job tells while it runs. This one keeps silent; override what is wanted.

    Events come in this order: ``reading`` now and then, ``started`` once, ``planned`` once the model is loaded, then
    ``tokens`` after every pass, ``completion`` and ``row`` as they come, ``counts`` and ``measured`` at most a few
    times a second and once at the end, ``ended`` last. All come from one thread.
    """

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """The input is being read for the first time: ``rows`` so far, ``read_bytes`` of ``total_bytes`` (None where
        the input is a stream)."""

    def started(self, start: JobStart) -> None:
        """The input is read and the work is planned."""

    def planned(self, why: str) -> None:
        """The model is loaded; ``why`` says how it will be run."""

    def adapted(self, why: str) -> None:
        """The policy changes with the next pass, and ``why``."""

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        """``done`` tokens are generated of at most ``expected``, which shrinks as sequences end early; ``binding`` was
        the busiest lane of the last few passes."""

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:
        """A sequence has ended that could have had ``room`` tokens, ``latency_s`` seconds after it was asked for."""

    def counts(self, counts: JobCounts) -> None:
        """How far the job is."""

    def measured(self, stats: RunStats, experts: Mapping[str, Any] | None = None) -> None:
        """The run's figures so far, and those of the experts' residency (`expert_stats`) where there are any."""

    def row(self, shown: ProgressFields) -> None:
        """A row was answered or refused; rows come in any order."""

    def interrupting(self) -> None:
        """Somebody asked the job to end: it does after the pass that is running. Called in a signal's handler."""

    def failed(self, code: str, message: str) -> None:
        """The job as a whole cannot be done; ``ended`` follows."""

    def ended(self, state: State) -> None:
        """The job is over: ``completed`` (with error rows or without), ``failed``, or ``cancelled``."""


class ProgressGroup(Progress):
    """Tells everything to each of ``watchers``, in their order."""

    def __init__(self, watchers: Sequence[Progress]) -> None:
        self._watchers = tuple(watchers)

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.reading(rows, read_bytes, total_bytes)

    def started(self, start: JobStart) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.started(start)

    def planned(self, why: str) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.planned(why)

    def adapted(self, why: str) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.adapted(why)

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.tokens(done, expected, binding)

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.completion(completion, room=room, latency_s=latency_s)

    def counts(self, counts: JobCounts) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.counts(counts)

    def measured(self, stats: RunStats, experts: Mapping[str, Any] | None = None) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.measured(stats, experts)

    def row(self, shown: ProgressFields) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.row(shown)

    def interrupting(self) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.interrupting()

    def failed(self, code: str, message: str) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.failed(code, message)

    def ended(self, state: State) -> None:
        """To all."""
        for watcher in self._watchers:
            watcher.ended(state)
