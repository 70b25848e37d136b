"""``--status``: the progress of a job, as OpenAI's batch object with a few additional fields.

Source of the names: OpenAI's API reference, object ``batch``; without the fields of `EXTRA` the object conforms to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelight.batch.options import JobOptions
from moelight.batch.output import refused_write
from moelight.batch.progress import JobCounts, JobStart, Progress, State
from moelight.batch.time_left import TimeLeft
from moelight.core.errors import InputError
from moelight.core.request import Completion
from moelight.observe.stats import Binding, RunStats

_EVERY_S = 1.0


class LiveFile:
    """The file at ``path``, replaced atomically by a finished sibling: readers see the old text or the new text.

    There is no fsync: after a power cut the file may be old or empty, and the job writes it again.
    """

    def __init__(self, path: Path, *, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.trouble = ""
        self._path, self._what, self._clock = path, what, clock
        # A symlink is kept and its target replaced. A pipe or a device cannot be replaced.
        self._target = Path(os.path.realpath(path))
        self._partial = self._target.with_name(f".{self._target.name[:50]}.{os.getpid()}.partial")
        self._due_s = -1.0

    def begin(self, text: str) -> None:
        """Write ``text`` for the first time.

        Raises:
            InputError: the file cannot be written: no such directory, a directory of that name, or no permission.
        """
        try:
            if self._target.exists() and not stat.S_ISREG(self._target.stat().st_mode):
                raise InputError(f"{self._what} {self._path}: must be a file, to be replaced whole", code="output_path")
            self._write(text)
        except OSError as error:
            raise refused_write(error, f"{self._what} {self._path}") from None

    def renew(self, text: Callable[[], str], *, now: bool = False) -> None:
        """Write ``text()`` if the last write is a second ago, or if ``now``. A failure is kept as ``trouble``."""
        if not now and self._clock() < self._due_s:
            return
        try:
            self._write(text())
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{self._what} {self._path}: could not be renewed ({(error.strerror or str(error)).lower()})"
        self._due_s = self._clock() + _EVERY_S

    def _write(self, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(self._partial, flags, 0o666), "wb") as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
            self._partial.replace(self._target)
        except OSError:
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)
            raise
        self._due_s = self._clock() + _EVERY_S


EXTRA = ("moelight",)
WINDOW = "24h"  # the only one that OpenAI has; a job here has no time limit


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """Constant fields of the object. Ids are file names, since no server assigns ids."""

    id: str
    input_file: str
    output_file: str | None = None
    error_file: str | None = None
    model: str = ""
    endpoint: str = ""


class StatusFile(Progress):
    """Keeps the file at ``path`` up to date with the job.

    Raises:
        InputError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, facts: BatchFacts, eta: TimeLeft, *, clock: Callable[[], float] = time.time) -> None:
        self._facts, self._eta, self._clock = facts, eta, clock
        self._counts = JobCounts()
        self._endpoint = facts.endpoint
        self._stamps: dict[str, int] = {"created_at": int(clock())}
        self._state: State = "validating"
        self._read: tuple[int, int, int | None] = (0, 0, None)
        self._binding: Binding | None = None
        self._errors: list[dict[str, Any]] = []
        self._file = LiveFile(path, what="status")
        self._file.begin(self._text())

    @property
    def trouble(self) -> str:
        """The reason why the file is not up to date; empty if it is."""
        return self._file.trouble

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """Renew the file while the input is validated."""
        self._read = (rows, read_bytes, total_bytes)
        self._file.renew(self._text)

    def started(self, start: JobStart) -> None:
        """Set the row counts; the input is validated."""
        self._endpoint = start.endpoint or self._endpoint
        self._counts = JobCounts(
            total=start.total, failed=start.refused, completed=start.resumed, resumed=start.resumed
        )
        self._enter("in_progress")

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:  # noqa: ARG002
        """Keep the busiest lane."""
        self._binding = binding

    def counts(self, counts: JobCounts) -> None:
        """Renew the file, at most once a second."""
        self._counts = counts
        self._binding = counts.binding or self._binding
        if counts.state != self._state and counts.state not in ("completed", "failed", "cancelled"):
            self._enter(counts.state)
        else:
            self._file.renew(self._text)

    def failed(self, code: str, message: str) -> None:
        """Keep the error for the final write."""
        self._errors.append({"code": code, "message": message, "line": None, "param": None})

    def ended(self, state: State) -> None:
        """Write the final state."""
        self._enter(state)

    def _enter(self, state: State) -> None:
        self._state = state
        if state != "validating":
            self._stamps.setdefault(f"{state}_at", int(self._clock()))
        if state == "cancelled":
            self._stamps.setdefault("cancelling_at", self._stamps["cancelled_at"])
        self._file.renew(self._text, now=True)

    def _text(self) -> str:
        return json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the batch object."""
        facts, counts = self._facts, self._counts
        stamped = ("created", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": facts.id,
            "object": "batch",
            "endpoint": self._endpoint,
            "errors": {"object": "list", "data": self._errors} if self._errors else None,
            "input_file_id": facts.input_file,
            "completion_window": WINDOW,
            "status": self._state,
            "output_file_id": facts.output_file,
            "error_file_id": facts.error_file,
            **{f"{name}_at": self._stamps.get(f"{name}_at") for name in stamped},
            "expires_at": None,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "metadata": None,
            "model": facts.model or None,
            "moelight": self._more(counts),
        }

    def _more(self, counts: JobCounts) -> dict[str, Any]:
        rows, read_bytes, total_bytes = self._read
        left, binding = 0.0 if self._state == "completed" else self._eta.remaining_s, self._binding
        return {
            "updated_at": int(self._clock()),
            "rows_read": max(rows, counts.total),
            "bytes_read": read_bytes,
            "bytes_total": total_bytes,
            "resumed": counts.resumed,
            "running": counts.running,
            "waiting": counts.waiting,
            "prompt_tokens": counts.prompt_tokens,
            "generation_tokens": counts.generation_tokens,
            "expected_tokens": counts.expected_tokens,
            "tokens_per_second": round(counts.tokens_per_s, 3),
            "eta_seconds": None if left is None or not math.isfinite(left) else round(left, 1),
            "elapsed_seconds": round(counts.elapsed_s, 1),
            "pass": counts.passes,
            "binding": None if binding is None else {"lane": str(binding.lane), "share": round(binding.share, 4)},
        }


def without_extra(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``batch`` with only OpenAI's fields."""
    return {name: value for name, value in batch.items() if name not in EXTRA}


Labels = Mapping[str, str]


class Histogram:
    """Counts of values up to each of ``bounds``, the number of values and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield the suffix, labels and value of each line; buckets are cumulative and include their bound."""
        so_far = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            so_far += count
            yield "_bucket", {"le": number_text(float(bound))}, so_far
        yield "_sum", {}, self._sum
        yield "_count", {}, so_far


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric: name, ``kind`` (``counter``, ``gauge`` or ``histogram``), help text, and samples as (suffix, labels,
    value). A counter's name ends in ``_total``."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, Labels, float]] = field(default=())


def exposition(families: Sequence[Metric], *, labels: Labels) -> str:
    """Return ``families`` as text. ``labels`` are added to every sample; a family without samples is omitted."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help, quotes=False)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, own, value in family.samples:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**labels, **own}.items())
            lines.append(f"{family.name}{suffix}{{{pairs}}} {number_text(value)}")
    return "\n".join(lines) + "\n"


def number_text(value: float) -> str:
    """Return ``value`` in the number syntax of Prometheus."""
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LATENCIES_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_REASONS = ("stop", "length")


class MetricsFile(Progress):
    """Keeps the file at ``path`` up to date with the job. Counters cover this run only.

    Raises:
        InputError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, model: str, eta: TimeLeft) -> None:
        self._labels = {"model_name": model}
        self._eta = eta
        self._counts = JobCounts()
        self._stats: RunStats | None = None
        self._experts: Mapping[str, Any] = {}
        self._reasons: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self._cached = self._asked = 0
        self._prompt, self._generated = Histogram(_TOKENS), Histogram(_TOKENS)
        self._latency = Histogram(_LATENCIES_S)
        self._timed = False
        self._file = LiveFile(path, what="metrics")
        self._file.begin(self.text())

    @property
    def trouble(self) -> str:
        """The reason why the file is not up to date; empty if it is."""
        return self._file.trouble

    def started(self, start: JobStart) -> None:
        """Set the row counts."""
        self._counts = JobCounts(
            total=start.total, failed=start.refused, completed=start.resumed, resumed=start.resumed
        )
        self._file.renew(self.text, now=True)

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:  # noqa: ARG002
        """Count one answer."""
        self._reasons[completion.finish_reason] += 1
        self._generated.observe(completion.completion_tokens)
        if completion.sample == 0:  # the samples of a prompt share it
            self._prompt.observe(completion.prompt_tokens)
            self._asked += completion.prompt_tokens
            self._cached += completion.cached_tokens
        if latency_s is not None:
            self._timed = True
            self._latency.observe(latency_s)

    def counts(self, counts: JobCounts) -> None:
        """Renew the file, at most once a second."""
        self._counts = counts
        self._file.renew(self.text)

    def measured(self, stats: RunStats, experts: Mapping[str, Any] | None = None) -> None:
        """Keep the figures for the next renewal."""
        self._stats = stats
        self._experts = (experts or {}).get("overall", {})

    def ended(self, state: State) -> None:  # noqa: ARG002
        """Write the final figures."""
        self._file.renew(self.text, now=True)

    def text(self) -> str:
        """Return the current contents of the file."""
        return exposition([*self._vllm(), *self._job(), *self._lanes()], labels=self._labels)

    def _vllm(self) -> Iterator[Metric]:
        counts = self._counts
        yield _gauge("vllm:num_requests_running", "Sequences that the engine is at.", counts.running)
        yield _gauge("vllm:num_requests_waiting", "Sequences that it has not begun.", counts.waiting)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "Room for keys and values that is taken; 1 is all.", float(counts.kv_usage)
        )
        yield _counter("vllm:prompt_tokens_total", "Prompt tokens processed.", counts.prompt_tokens)
        yield _counter("vllm:generation_tokens_total", "Tokens generated.", counts.generation_tokens)
        yield _counter("vllm:prefix_cache_queries_total", "Prompt tokens of the finished answers.", self._asked)
        yield _counter("vllm:prefix_cache_hits_total", "Of them, those computed for an earlier prompt.", self._cached)
        reasons = [("", {"finished_reason": reason}, count) for reason, count in self._reasons.items()]
        yield Metric(
            name="vllm:request_success_total", kind="counter", help="Finished answers by reason.", samples=reasons
        )
        yield _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", self._prompt)
        yield _histogram("vllm:request_generation_tokens", "Tokens generated for an answer.", self._generated)
        if self._timed:
            help_ = "Seconds from asking the engine to the whole answer."
            yield _histogram("vllm:e2e_request_latency_seconds", help_, self._latency)

    def _job(self) -> Iterator[Metric]:
        counts, left = self._counts, self._eta.remaining_s
        waiting = max(0, counts.total - counts.done)
        rows = {"completed": counts.completed, "failed": counts.failed, "unfinished": waiting}
        yield Metric(
            name="moelight_job_rows",
            kind="gauge",
            help="Rows of the input by fate, earlier runs included.",
            samples=[("", {"state": state}, count) for state, count in rows.items()],
        )
        yield _gauge(
            "moelight_job_expected_tokens", "Tokens that this run will have generated, at most.", counts.expected_tokens
        )
        yield _gauge("moelight_job_elapsed_seconds", "Seconds since this run began.", float(counts.elapsed_s))
        if left is not None:
            yield _gauge("moelight_job_eta_seconds", "Seconds until the job ends, estimated.", float(left))
        yield _counter("moelight_passes_total", "Sweeps through all layers.", counts.passes)

    def _lanes(self) -> Iterator[Metric]:
        if self._stats is None:
            return
        lanes = self._stats.lanes
        busy = [("", {"lane": str(lane)}, float(each.busy_s)) for lane, each in lanes.items()]
        moved = [("", {"lane": str(lane)}, each.bytes) for lane, each in lanes.items()]
        yield Metric(
            name="moelight_lane_busy_seconds_total", kind="counter", help="Seconds a lane was at work.", samples=busy
        )
        yield Metric(
            name="moelight_transfer_bytes_total", kind="counter", help="Bytes that crossed a lane.", samples=moved
        )
        peak = self._stats.peak_rss_bytes
        yield _gauge("moelight_peak_resident_memory_bytes", "The largest resident set of the process.", peak)
        for name in ("hits", "misses"):
            if name in self._experts:
                help_ = f"Routed experts that were {'resident' if name == 'hits' else 'offloaded'}."
                yield _counter(f"moelight_expert_cache_{name}_total", help_, int(self._experts[name]))


def _gauge(name: str, help_: str, value: float) -> Metric:
    return Metric(name=name, kind="gauge", help=help_, samples=[("", {}, value)])


def _counter(name: str, help_: str, value: float) -> Metric:
    return Metric(name=name, kind="counter", help=help_, samples=[("", {}, value)])


def _histogram(name: str, help_: str, found: Histogram) -> Metric:
    return Metric(name=name, kind="histogram", help=help_, samples=list(found.samples()))


def file_watchers(options: JobOptions, eta: TimeLeft) -> list[StatusFile | MetricsFile]:
    """Return the watchers of the requested files; ``eta`` must receive every event before they do.

    Raises:
        InputError: a file cannot be written.
    """
    files: list[StatusFile | MetricsFile] = []
    if options.status is not None:
        output, errors = options.output, options.error_file
        facts = BatchFacts(
            id=f"batch_{hashlib.blake2b(os.fsencode(output or options.prompts), digest_size=12).hexdigest()}",
            input_file=str(options.prompts),
            output_file=None if output is None else str(output),
            error_file=None if errors is None else str(errors),
            model=options.model,
        )
        files.append(StatusFile(options.status, facts, eta))
    if options.metrics is not None:
        files.append(MetricsFile(options.metrics, options.model, eta))
    return files
