"""``--metrics``: a job's figures for Prometheus, in a file that node_exporter's textfile collector reads.

Metrics that vLLM has carry vLLM's names, so that its dashboards work; others begin with ``moelight_``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moelight.batch.exposition import Histogram, Metric, exposition
from moelight.batch.live_file import LiveFile
from moelight.batch.progress import JobCounts, JobStart, Progress, State
from moelight.batch.time_left import TimeLeft
from moelight.core.request import Completion
from moelight.observe.stats import RunStats

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
                help_ = f"Experts asked for that were {'near' if name == 'hits' else 'not near'}."
                yield _counter(f"moelight_expert_cache_{name}_total", help_, int(self._experts[name]))


def _gauge(name: str, help_: str, value: float) -> Metric:
    return Metric(name=name, kind="gauge", help=help_, samples=[("", {}, value)])


def _counter(name: str, help_: str, value: float) -> Metric:
    return Metric(name=name, kind="counter", help=help_, samples=[("", {}, value)])


def _histogram(name: str, help_: str, found: Histogram) -> Metric:
    return Metric(name=name, kind="histogram", help=help_, samples=list(found.samples()))
