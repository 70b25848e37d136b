"""The work after every pass of a job: rows become durable in time, and watchers are notified."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moelight.batch.progress import JobCounts, Progress
from moelight.batch.row_processor import RowProcessor
from moelight.batch.run_trace import RunTrace
from moelight.batch.stream_output import Ledger
from moelight.batch.summary import ScanSummary
from moelight.core.adaptation import Adaptation

if TYPE_CHECKING:
    from moelight.engine.engine import Engine

_TOLD_EVERY_S = 1.0


class RowSync:
    """Observes one run of an engine."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        answering: RowProcessor,
        summary: ScanSummary,
        told: Progress,
        trace: RunTrace | None,
    ) -> None:
        self._engine, self._ledger, self._answering = engine, ledger, answering
        self._summary, self._told, self._trace = summary, told, trace
        self._began_s = self._told_s = time.monotonic()
        self._resumed = ledger.completed + ledger.failed
        self._room = summary.generated_tokens - ledger.totals.get("room", 0)
        self._prompts = summary.prompt_tokens - ledger.totals.get("prompt_tokens", 0)
        left = 1.0 - self._resumed / max(1, summary.rows)
        self._sequences = round(summary.sequences * left)
        self._changes: list[Adaptation] = []

    def on_pass(self) -> None:
        """Report a finished pass, before its completions are taken."""
        engine = self._engine
        self._told.tokens(engine.progress_tokens, self._expected, engine.binding)
        if time.monotonic() - self._told_s >= _TOLD_EVERY_S:
            self.notify()
        if self._trace is not None and engine.timeline is not None:
            self._trace.add(engine.timeline)
        for change in engine.adaptations[len(self._changes) :]:
            self._changes.append(change)
            self._told.adapted(change.reason)

    def taken(self) -> None:
        """Commit if due, after the completions of a pass were taken: the next pass may end minutes later."""
        self._ledger.tick()

    def notify(self) -> None:
        """Report the counts and the stats to the watchers."""
        self._told_s = time.monotonic()
        self._told.counts(self.counts())
        self._told.measured(self._engine.stats, self._engine.expert_stats)

    @property
    def _expected(self) -> int:
        return max(self._engine.progress_tokens, self._room - self._answering.spared)

    def counts(self) -> JobCounts:
        """Return the current counts."""
        ledger, stats = self._ledger, self._engine.stats
        done = ledger.completed + ledger.failed
        return JobCounts(
            total=self._summary.rows,
            completed=ledger.completed,
            failed=ledger.failed,
            running=self._answering.running,
            waiting=max(0, self._sequences - self._answering.asked),
            kv_usage=self._engine.kv_usage,
            resumed=self._resumed,
            prompt_tokens=stats.prompt_tokens,
            expected_prompt_tokens=max(self._prompts, stats.prompt_tokens),
            generation_tokens=stats.completion_tokens,
            expected_tokens=self._expected,
            passes=stats.passes,
            elapsed_s=time.monotonic() - self._began_s + stats.load_s,
            running_s=stats.wall_s,
            state="in_progress" if done < self._summary.rows else "finalizing",
            binding=self._engine.binding,
        )
