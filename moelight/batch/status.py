"""The files that other programs read while a job runs: ``--status`` and ``--metrics``.

The status is OpenAI's batch object (API reference, object ``batch``) with the additional field ``moelight``; the
metrics are in the text format of Prometheus, under vLLM's names where vLLM has the figure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.batch.options import JobOptions
from moelight.batch.output import create_partial, partial_of, refused_write, target
from moelight.batch.progress import EngineCounts, JobCounts, JobStart, Progress, State
from moelight.batch.time_left import TimeLeft
from moelight.core.errors import InputError
from moelight.core.request import Completion
from moelight.observe.stats import Binding, RunStats

if TYPE_CHECKING:
    from prometheus_client import Metric

_EVERY_S = 1.0
_STAMPED = ("created", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_WINDOW = "24h"  # the only one that OpenAI has; a job here has no time limit


class LiveFile(Progress, ABC):
    """Keeps `text` in the file at ``path``, replaced atomically by a finished sibling: readers see the old text or the
    new text. Without an fsync: after a power cut the file may be old or empty, and the job writes it again. ``trouble``
    is the reason why the file is not up to date; empty if it is."""

    def __init__(self, path: Path, *, label: str) -> None:
        self.trouble = ""
        self._shown = f"{label} {path}"
        # A symlink is kept and its target replaced. A pipe or a device cannot be replaced.
        self._target, self._partial = target(path), partial_of(path)
        self._due_s = -1.0

    @abstractmethod
    def text(self) -> str:
        """The current contents of the file."""

    def begin(self) -> None:
        """Write the file for the first time; raises InputError if it cannot be written."""
        try:
            if self._target.exists() and not stat.S_ISREG(self._target.stat().st_mode):
                raise InputError(f"{self._shown}: must be a file, to be replaced whole", code="output_path")
            self._write()
        except OSError as error:
            raise refused_write(error, self._shown) from None

    def renew(self, *, now: bool = False) -> None:
        """Write the file if the last write is a second ago, or if ``now``. A failure is kept as ``trouble``."""
        if not now and time.monotonic() < self._due_s:
            return
        try:
            self._write()
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{self._shown}: could not be renewed ({(error.strerror or str(error)).lower()})"

    def _write(self) -> None:
        try:
            with os.fdopen(create_partial(self._partial), "wb") as file:
                file.write(self.text().encode("utf-8", errors="backslashreplace"))
            self._partial.replace(self._target)
        except OSError:
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)
            raise
        finally:
            self._due_s = time.monotonic() + _EVERY_S


class StatusFile(LiveFile):
    """Keeps the status of the job of ``options`` at ``path``; raises InputError if it cannot be written at the start.
    Ids are file names, since no server assigns ids."""

    def __init__(self, path: Path, options: JobOptions, eta: TimeLeft) -> None:
        super().__init__(path, label="status")
        self._options, self._eta = options, eta
        self._counts = JobCounts()
        self._endpoint = ""
        self._stamps: dict[str, int] = {"created": int(time.time())}
        self._state: State = "validating"
        self._read: tuple[int, int, int | None] = (0, 0, None)
        self._binding: Binding | None = None
        self._errors: list[dict[str, Any]] = []
        self.begin()

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        self._read = (rows, read_bytes, total_bytes)
        self.renew()

    def started(self, start: JobStart) -> None:
        self._endpoint = start.endpoint
        self._counts = start.counts
        self._enter("in_progress")

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:  # noqa: ARG002
        self._binding = binding

    def counts(self, counts: JobCounts) -> None:
        self._counts = counts
        self._binding = counts.binding or self._binding
        if counts.state != self._state:
            self._enter(counts.state)
        else:
            self.renew()

    def failed(self, code: str, message: str) -> None:
        """Keep the error for the final write."""
        self._errors.append({"code": code, "message": message, "line": None, "param": None})

    def ended(self, state: State) -> None:
        self._enter(state)

    def _enter(self, state: State) -> None:
        self._state = state
        self._stamps.setdefault(state, int(time.time()))
        if state == "cancelled":
            self._stamps.setdefault("cancelling", self._stamps["cancelled"])
        self.renew(now=True)

    def text(self) -> str:
        return json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The batch object."""
        options, counts = self._options, self._counts
        named = os.fsencode(options.output or options.prompts)
        return {
            "id": f"batch_{hashlib.blake2b(named, digest_size=12).hexdigest()}",
            "object": "batch",
            "endpoint": self._endpoint,
            "errors": {"object": "list", "data": self._errors} if self._errors else None,
            "input_file_id": str(options.prompts),
            "completion_window": _WINDOW,
            "status": self._state,
            "output_file_id": None if options.output is None else str(options.output),
            "error_file_id": None if options.error_file is None else str(options.error_file),
            **{f"{state}_at": self._stamps.get(state) for state in _STAMPED},
            "expires_at": None,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "metadata": None,
            "model": options.model or None,
            "moelight": self._more(counts),
        }

    def _more(self, counts: JobCounts) -> dict[str, Any]:
        rows, read_bytes, total_bytes = self._read
        left, binding = 0.0 if self._state == "completed" else self._eta.remaining_s, self._binding
        return {
            "updated_at": int(time.time()),
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
            "binding": _binding(binding),
            **({"engines": [_engine(engine) for engine in counts.engines]} if counts.engines else {}),
        }


def _binding(binding: Binding | None) -> dict[str, Any] | None:
    return None if binding is None else {"lane": str(binding.lane), "share": round(binding.share, 4)}


def _engine(counts: EngineCounts) -> dict[str, Any]:
    return {
        "name": counts.name,
        "node": counts.node,
        "state": counts.state,
        "rows": counts.rows,
        "running": counts.running,
        "queued": counts.queued,
        "share": round(counts.share, 4),
        "tokens_per_second": round(counts.tokens_per_s, 3),
        "eta_seconds": None if counts.eta_s is None else round(counts.eta_s, 1),
        "binding": _binding(counts.binding),
    }


_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LATENCIES_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_REASONS = ("stop", "length")


class MetricsFile(LiveFile):
    """Keeps the metrics of this run at ``path``; raises InputError if they cannot be written at the start."""

    def __init__(self, path: Path, model: str, eta: TimeLeft) -> None:
        from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics

        super().__init__(path, label="metrics")
        disable_created_metrics()
        self._model = model
        self._eta = eta
        self._counts = JobCounts()
        self._stats: RunStats | None = None
        self._experts: Mapping[str, Any] = {}
        self._reasons: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self._cached = self._asked = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, help_: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(name, help_, ["model_name"], buckets=bounds, registry=self._registry)

        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens generated for an answer.", _TOKENS)
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from asking the engine to the whole answer.", _LATENCIES_S
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Seconds from asking the engine to the first pass.", _LATENCIES_S
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "Seconds from asking the engine to the first token.", _FIRST_TOKEN_S
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds between two tokens of an answer.", _PER_TOKEN_S
        )
        for counter in (self._prompt, self._generated):
            counter.labels(model)
        self.begin()

    def started(self, start: JobStart) -> None:
        self._counts = start.counts
        self.renew(now=True)

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:  # noqa: ARG002
        self._reasons[completion.finish_reason] += 1
        self._generated.labels(self._model).observe(completion.completion_tokens)
        if completion.sample == 0:  # the samples of a prompt share it
            self._prompt.labels(self._model).observe(completion.prompt_tokens)
            self._asked += completion.prompt_tokens
            self._cached += completion.cached_tokens
        queue_s = None if completion.metrics is None else completion.metrics.queue_s
        for times, seconds in (
            (self._latency, latency_s),
            (self._queue, queue_s),
            (self._first_token, completion.time_to_first_token_s),
            (self._per_token, completion.time_per_output_token_s),
        ):
            if seconds is not None:
                times.labels(self._model).observe(seconds)

    def counts(self, counts: JobCounts) -> None:
        self._counts = counts
        self.renew()

    def measured(self, stats: RunStats, experts: Mapping[str, Any] | None = None) -> None:
        self._stats = stats
        self._experts = (experts or {}).get("overall", {})

    def ended(self, state: State) -> None:  # noqa: ARG002
        self.renew(now=True)

    def text(self) -> str:
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """The figures that are kept elsewhere, for the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, help_, samples in self._figures():
            label, values = samples if isinstance(samples, tuple) else (None, {"": samples})
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(name, help_, labels=["model_name", *([label] if label else [])])
            for key, value in values.items():
                metric.add_metric([self._model, *([key] if label else [])], value)
            yield metric

    def _figures(self) -> Iterator[tuple[str, str, float | tuple[str, Mapping[str, float]]]]:
        """Name, help text and value; or, by the values of a further label, several values."""
        counts, left = self._counts, self._eta.remaining_s
        unfinished = max(0, counts.total - counts.done)
        rows = {"completed": counts.completed, "failed": counts.failed, "unfinished": unfinished}
        yield "vllm:num_requests_running", "Sequences that the engine is at.", counts.running
        yield "vllm:num_requests_waiting", "Sequences that it has not begun.", counts.waiting
        yield "vllm:kv_cache_usage_perc", "Room for keys and values that is taken; 1 is all.", counts.kv_usage
        yield "vllm:prompt_tokens_total", "Prompt tokens processed.", counts.prompt_tokens
        yield "vllm:generation_tokens_total", "Tokens generated.", counts.generation_tokens
        yield "vllm:prefix_cache_queries_total", "Prompt tokens of the finished answers.", self._asked
        yield "vllm:prefix_cache_hits_total", "Of them, those computed for an earlier prompt.", self._cached
        yield "vllm:request_success_total", "Finished answers by reason.", ("finished_reason", self._reasons)
        yield "moelight_job_rows", "Rows of the input by fate, earlier runs included.", ("state", rows)
        yield "moelight_job_expected_tokens", "Tokens that this run will generate, at most.", counts.expected_tokens
        yield "moelight_job_elapsed_seconds", "Seconds since this run began.", counts.elapsed_s
        if left is not None:
            yield "moelight_job_eta_seconds", "Seconds until the job ends, estimated.", left
        yield "moelight_passes_total", "Sweeps through all layers.", counts.passes
        if counts.engines:
            answered = {engine.name: float(engine.rows) for engine in counts.engines}
            speeds = {engine.name: engine.tokens_per_s for engine in counts.engines}
            yield "moelight_engine_rows", "Rows that an engine of the cluster answered.", ("engine", answered)
            yield "moelight_engine_tokens_per_s", "Tokens that it generates in a second.", ("engine", speeds)
        if self._stats is None:
            return
        busy = {str(lane): lane_stats.busy_s for lane, lane_stats in self._stats.lanes.items()}
        moved = {str(lane): lane_stats.bytes for lane, lane_stats in self._stats.lanes.items()}
        yield "moelight_lane_busy_seconds_total", "Seconds a lane was at work.", ("lane", busy)
        yield "moelight_transfer_bytes_total", "Bytes that crossed a lane.", ("lane", moved)
        peak = self._stats.peak_rss_bytes
        yield "moelight_peak_resident_memory_bytes", "The largest resident set of the process.", peak
        for name, are in (("hits", "resident"), ("misses", "offloaded")):
            if name in self._experts:
                yield f"moelight_expert_cache_{name}_total", f"Routed experts that were {are}.", self._experts[name]


def file_watchers(options: JobOptions, eta: TimeLeft) -> list[LiveFile]:
    """The watchers of the requested files; ``eta`` must receive every event before they do. May raise InputError."""
    files: list[LiveFile] = []
    if options.status is not None:
        files.append(StatusFile(options.status, options, eta))
    if options.metrics is not None:
        files.append(MetricsFile(options.metrics, options.model, eta))
    return files
