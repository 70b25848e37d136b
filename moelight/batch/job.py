"""One job: a file of prompts in, a file of completions out. Finished rows survive a crash and are not computed again.
All checks precede the loading of the model; a row that cannot be served becomes an error row."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from moelight.batch.fields import RowContext
from moelight.batch.fingerprint import digest_of_file, number_facts, pooling_facts, sampling_facts
from moelight.batch.forecast import EngineForecast, Forecast, predicted_prompt_s
from moelight.batch.input import open_input
from moelight.batch.journal import Ledger, open_outputs
from moelight.batch.model_names import ModelNames
from moelight.batch.options import DONE, DONE_BEFORE, INTERRUPTED, JobOptions, JobResult
from moelight.batch.output import check_writable, mode_of, whole_file, writes_directly
from moelight.batch.paths import Outputs, journal_of
from moelight.batch.progress import JobCounts, JobStart, Progress, ProgressGroup, State
from moelight.batch.row_processor import JobInput, RowProcessor, refuse_struck
from moelight.batch.rows import BadRow
from moelight.batch.scan import Scan, scan
from moelight.batch.status import file_watchers
from moelight.batch.summary import ScanSummary
from moelight.batch.tasks import EMBED, GENERATE
from moelight.batch.time_left import TimeLeft
from moelight.batch.trace_header import trace_header
from moelight.core.errors import InputError, MoelightError
from moelight.core.request import DEFAULT_RESAMPLINGS
from moelight.core.timeline import Timeline
from moelight.engine.model import LazyModel, model_facts
from moelight.engine.reasoning import check_mode
from moelight.observe.stats import RunStats
from moelight.observe.trace import TraceHeader, TraceWriter
from moelight.optimizer.allowed import CHOOSE
from moelight.optimizer.plan import Plan
from moelight.profiles.pooling import check_dimensions
from moelight.profiles.workload import EXPECTED_GEN_LEN
from moelight.runtime.measure import peak_rss_bytes

if TYPE_CHECKING:
    from moelight.engine.engine import Engine

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOLD_EVERY_S = 1.0
_NOWHERE = Path(os.devnull)


class RunTrace:
    """Writes passes to the file as they end. ``about`` is the header of the trace, once it is known."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._writer = TraceWriter(write)
        self._fault: InputError | OSError | None = None
        self.about: TraceHeader | None = None

    def add(self, timeline: Timeline) -> None:
        """Write a pass; does nothing after a failed write."""
        if self._fault is None:
            try:
                self._writer.add(timeline)
            except (InputError, OSError) as fault:
                self._fault = fault

    def finish(self) -> None:
        """End the trace; raises the error of a failed write."""
        if self._fault is not None:
            raise self._fault
        self._writer.finish(self.about)


class Interrupt:
    """Within this context, ``asked`` becomes True at the first of ``signals``, whose handler calls ``on_first``; a
    second one raises KeyboardInterrupt. Ignored signals stay ignored; outside the main thread ``asked`` stays False."""

    def __init__(
        self, on_first: Callable[[], None], *, signals: Iterable[signal.Signals] = _SIGNALS, asked: bool = False
    ) -> None:
        self.asked = asked
        self._on_first, self._signals = on_first, signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()


def terminable() -> Interrupt:
    """Raise KeyboardInterrupt on SIGTERM in this block, so that open files are closed and watchers notified."""
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return Interrupt(lambda: None, signals=[signal.SIGTERM] if default else [], asked=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """A job that has been read and is not complete: the rows of ``prepared`` that are not in ``ledger`` are to be put
    there. ``trace`` is written if it is requested."""

    prepared: JobInput
    ledger: Ledger
    told: Progress
    scanned: Scan
    trace: RunTrace | None = None

    @property
    def summary(self) -> ScanSummary:
        return self.scanned.summary

    def processor(self) -> RowProcessor:
        """A processor of the rows that are left, for an engine in this process."""
        return RowProcessor(self.ledger, self.prepared, self.told, repeated=self.scanned.repeated)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAnswers:
    """The result of a run of a job: ``DONE`` or ``INTERRUPTED``, its figures, and the first error row of this run."""

    state: str
    stats: RunStats
    counts: JobCounts
    first_error: BadRow | None = None


Answer: TypeAlias = Callable[[JobRun], JobAnswers]
PlanEngines: TypeAlias = Callable[[JobInput, ScanSummary], tuple[EngineForecast, ...]]


class RowSync:
    """Observes one run of an engine: reports its passes and commits its rows."""

    def __init__(self, engine: Engine, answering: RowProcessor, job: JobRun) -> None:
        self._engine, self._answering, self._summary, self._trace = engine, answering, job.summary, job.trace
        self._ledger, self._told = job.ledger, job.told
        ledger, summary = job.ledger, job.summary
        self._began_s = self._told_s = time.monotonic()
        self._resumed = ledger.completed + ledger.failed
        self._room = summary.generated_tokens - ledger.totals.get("room", 0)
        self._prompts = summary.prompt_tokens - ledger.totals.get("prompt_tokens", 0)
        left = 1.0 - self._resumed / max(1, summary.rows)
        self._sequences = round(summary.sequences * left)
        self._unlimited = round(summary.unlimited_sequences * left)
        self._changes = 0

    def on_pass(self) -> None:
        """Report a finished pass, before its completions are taken."""
        engine = self._engine
        self._told.tokens(engine.progress_tokens, self._expected, engine.binding)
        if time.monotonic() - self._told_s >= _TOLD_EVERY_S:
            self.notify()
        if self._trace is not None and engine.timeline is not None:
            self._trace.add(engine.timeline)
        changes = engine.adaptations[self._changes :]
        self._changes += len(changes)
        for change in changes:
            self._told.adapted(change.reason)

    def notify(self) -> None:
        self._told_s = time.monotonic()
        self._told.counts(self.counts())
        self._told.measured(self._engine.stats, self._engine.expert_stats)

    @property
    def _expected(self) -> int:
        """Tokens of this run: of answers that only the context limits, as many as finished ones let expect."""
        learned = self._engine.learned_len
        longer = 0 if learned is None else learned - EXPECTED_GEN_LEN
        unfinished = max(0, self._unlimited - self._answering.unlimited)
        return max(self._engine.progress_tokens, self._room - self._answering.spared + longer * unfinished)

    def counts(self) -> JobCounts:
        ledger, stats = self._ledger, self._engine.stats
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
            state="in_progress" if ledger.completed + ledger.failed < self._summary.rows else "finalizing",
            binding=self._engine.binding,
        )


def run_job(
    options: JobOptions,
    *,
    progress: Progress | None = None,
    eta: TimeLeft | None = None,
    answer: Answer | None = None,
) -> JobResult:
    """Answer every row of the prompts that no earlier run has answered. Torch is not loaded before the job is checked.

    ``progress`` receives the events after ``eta``, from which it may read the time left. ``answer`` puts the rows into
    the ledger; None: an engine in this process does. A UserError is raised before any work, or during work if the disk
    is full or fails; finished rows are kept.
    """
    watchers: list[Progress] = [left := eta or TimeLeft(), *([progress] if progress is not None else [])]
    how = options.durability
    outputs = Outputs(
        rows=options.output or _NOWHERE,
        errors=options.error_file,
        order=how.order,
        atomic=how.atomic,
        sync_s=how.sync_s,
    )
    with terminable(), prepare(options) as prepared:
        if how.restart:
            # A job that cannot run leaves the output untouched, which --restart discards.
            _planned(prepared, progress or Progress())
        with open_outputs(outputs, prepared.facts, restart=how.restart, allow_changed=how.allow_changed) as ledger:
            # After the ledger: a run that may not write the output may not write its status files either.
            files = file_watchers(options, left)
            told = ProgressGroup([*watchers, *files])
            end: State = "failed"
            try:
                result = _run(prepared, ledger, told, answer or answer_here)
                end = "cancelled" if result.state == INTERRUPTED else "completed"
            except MoelightError as error:
                told.failed(getattr(error, "code", "job"), str(error))
                raise
            except KeyboardInterrupt:
                end = "cancelled"
                raise
            finally:
                told.ended(end)
            return replace(result, troubles=tuple(file.trouble for file in files if file.trouble))


def forecast_job(
    options: JobOptions, *, progress: Progress | None = None, plan_engines: PlanEngines | None = None
) -> Forecast:
    """Read the input and plan the job, as `run_job` does; nothing is loaded or written, and output files are not
    checked. ``plan_engines`` asks the engines of a cluster for their plans."""
    with prepare(options) as prepared:
        if plan_engines is not None:
            summary = _scanned(prepared, progress or Progress())
            return Forecast(
                input=prepared.source.name,
                detected=prepared.source.detected,
                model=options.model,
                summary=summary,
                engines=plan_engines(prepared, summary),
            )
        summary, plan = _planned(prepared, progress or Progress())
        return Forecast(
            input=prepared.source.name,
            detected=prepared.source.detected,
            model=options.model,
            summary=summary,
            plan=plan,
        )


def _scanned(prepared: JobInput, told: Progress) -> ScanSummary:
    context, check = prepared.model.context, prepared.check_structure
    return scan(prepared.source, prepared.encode, told, context=context, check=check).summary


def _planned(prepared: JobInput, told: Progress) -> tuple[ScanSummary, Plan | None]:
    summary = _scanned(prepared, told)
    workload = summary.workload()
    told.planning()
    if workload is None:
        return summary, None
    return summary, prepared.model.plan(prepared.options, workload, prepared.options.policy).plan


@contextlib.contextmanager
def prepare(options: JobOptions) -> Iterator[JobInput]:
    """Check the paths, open the prompts, find the model: in this order, so that a missing file of prompts is reported
    before a model is downloaded."""
    _check_paths(options)
    check_mode(options.reasoning)
    model = LazyModel(options.model, chat_template=options.chat_template)
    context = RowContext(
        defaults=options.sampling,
        strict=options.strict,
        resamplings=options.resamplings,
        models=ModelNames.of(options.model, ignore=options.ignore_model),
        prompt_column=options.prompt_column,
        id_column=options.id_column,
        vocabulary=model,
        token_ids=options.token_ids,
        per_request_metrics=options.per_request_metrics,
        numbered=options.durability.order == "completion",
        task=options.task,
        choices=tuple(options.choices),
        pooling=options.pooling,
    )
    with open_input(options.prompts, context, format=options.format) as source:
        model.check(options.sampling)  # otherwise every row would become an error row
        if options.task == EMBED:
            check_dimensions(model.pooling(options.pooling), model.profile.hidden_size)
        yield JobInput(
            options=options,
            source=source,
            model=model,
            facts={
                "prompts": {"format": source.format.name, "bytes": source.size_bytes, "digest": source.digest()},
                "model": model_facts(model.directory),
                "sampling": sampling_facts(options.sampling),
                "numbers": number_facts(options.policy, options.kv_dtype, options.activations, options.dtype),
                "rows": {
                    "chat_template": digest_of_file(options.chat_template),
                    "ignore_model": options.ignore_model,
                    "prompt_column": options.prompt_column,
                    "id_column": options.id_column,
                    "token_ids": options.token_ids,
                    "per_request_metrics": options.per_request_metrics or None,
                    "reasoning": options.reasoning,
                    "strict": options.strict or None,
                    "task": None if options.task == GENERATE else options.task,
                    "choices": list(options.choices) or None,
                    "pooling": pooling_facts(options.pooling),
                    "resamplings": None if options.resamplings == DEFAULT_RESAMPLINGS else options.resamplings,
                },
            },
        )


def _run(prepared: JobInput, ledger: Ledger, told: Progress, answer: Answer) -> JobResult:
    """Put every row that is not done into ``ledger``, and write the figures of the run."""
    if ledger.state == "complete":
        counts = _final_counts(ledger, ledger.completed + ledger.failed)
        told.counts(counts)
        return JobResult(
            state=DONE_BEFORE,
            total=counts.total,
            completed=counts.completed,
            failed=counts.failed,
            invalid=ledger.totals.get("invalid", 0),
            truncated=ledger.totals.get("truncated", 0),
        )
    refuse_struck(ledger, prepared)
    scanned = read_all(prepared, ledger, told)
    trace, options = None, prepared.options
    with contextlib.ExitStack() as files:
        if options.trace is not None:
            trace = RunTrace(files.enter_context(whole_file(options.trace, label="trace")))
        answers = answer(JobRun(prepared=prepared, ledger=ledger, told=told, scanned=scanned, trace=trace))
        if answers.state == DONE:
            ledger.finish(scanned.summary.rows)
        _write_json(options.stats, "stats", answers.stats.as_dict())
        if trace is not None:
            trace.finish()
    told.counts(answers.counts)
    return JobResult(
        state=answers.state,
        total=scanned.summary.rows,
        completed=ledger.completed,
        failed=ledger.failed,
        running=answers.counts.running,
        stats=answers.stats,
        first_error=answers.first_error,
        invalid=ledger.totals.get("invalid", 0),
        truncated=ledger.totals.get("truncated", 0),
        generates=scanned.summary.generated_tokens > 0,
        hint=_ending_hint(prepared, ledger),
    )


def _ending_hint(prepared: JobInput, ledger: Ledger) -> str:
    """A line if most rows were cut by their limit, and the template closes turns by a token that ends no answer."""
    if 2 * ledger.totals.get("cut_chats", 0) <= ledger.completed:
        return ""
    tokenizer = prepared.model.tokenizer
    token = tokenizer.unended_turn(prepared.options.sampling.stop_token_ids)
    if token is None:
        return ""
    text = tokenizer.token_text(token)
    return (
        f"most rows end by max_tokens; the chat template closes an answer with {text}, which ends nothing: add "
        f"--stop-token-id {token}"
    )


def read_all(prepared: JobInput, ledger: Ledger, told: Progress) -> Scan:
    """The scan of the prompts, from the ledger if an earlier run has read the same prompts."""
    if ledger.scan is not None:
        return msgspec.convert(ledger.scan, Scan)
    scanned = scan(
        prepared.source,
        prepared.encode,
        told,
        context=prepared.model.context,
        preparing=ledger.preparing,
        check=prepared.check_structure,
    )
    prepared.model.release()
    if scanned.summary.notes:
        first, *others = scanned.summary.notes.values()
        more = f"; --dry-run shows {len(others)} more" if others else ""
        _log.warning(
            "structured outputs of %d rows, the first in line %d: %s%s",
            first.count,
            first.first_line,
            first.message,
            more,
        )
    ledger.note_scan(msgspec.to_builtins(scanned))
    return scanned


def refuse_rest(job: JobRun) -> JobAnswers | None:
    """Put the error rows of a job of which no row is left that can be served; None if one is left."""
    ledger, summary = job.ledger, job.summary
    if summary.workload() is not None and ledger.completed < summary.served:
        return None
    answering = job.processor()
    for _ in answering.requests(job.prepared.source.rows(skip=ledger.done), None):
        raise MoelightError("a row that the first reading refused can be served")
    nothing = RunStats(
        wall_s=0.0,
        load_s=0.0,
        prompt_tokens=0,
        completion_tokens=0,
        passes=0,
        peak_rss_bytes=peak_rss_bytes(),
        lanes={},
    )
    counts = _final_counts(ledger, summary.rows)
    return JobAnswers(state=DONE, stats=nothing, counts=counts, first_error=answering.first_error)


def answer_here(job: JobRun) -> JobAnswers:
    """Put each row into the ledger when its last completion is finished, by an engine in this process."""
    ledger, prepared, told, summary = job.ledger, job.prepared, job.told, job.summary
    options, workload = prepared.options, summary.workload()
    if (refused := refuse_rest(job)) is not None:
        return refused
    assert workload is not None
    if ledger.chosen is not None:  # by an earlier run: rows of one job have keys and values of one format
        options = replace(options, kv_dtype=ledger.chosen["kv_dtype"])
    told.planning()
    planned = prepared.model.plan(options, workload, options.policy)
    if options.kv_dtype == CHOOSE:
        ledger.note_chosen({"kv_dtype": planned.policy.kv_dtype})
    told.started(job_start(job, reason=planned.why, plan=planned.plan))
    answering = job.processor()
    with planned.load(record=options.expert_stats is not None or options.save_expert_profile is not None) as engine:
        told.planned(planned.why)
        watch = RowSync(engine, answering, job)
        with Interrupt(told.interrupting) as interrupt:

            def asked_to_end() -> bool:
                ledger.tick()  # here, not after the pass: the next pass may end minutes later
                return interrupt.asked

            requests = answering.requests(prepared.source.rows(skip=ledger.done), engine)
            for completion in engine.run(requests, on_pass=watch.on_pass, until=asked_to_end):
                answering.take(completion)
            ledger.commit()
        watch.notify()
        left = interrupt.asked and ledger.completed + ledger.failed < summary.rows
        if not left:
            answering.check_complete()
        _write_experts(engine, options)
        if job.trace is not None:
            header = trace_header(planned.simulation(engine.policy), engine.policy.schedule, source="measured")
            job.trace.about = header
        state, stats = INTERRUPTED if left else DONE, engine.stats
        return JobAnswers(state=state, stats=stats, counts=watch.counts(), first_error=answering.first_error)


def job_start(job: JobRun, *, reason: str, plan: Plan | None) -> JobStart:
    """The facts known before a model is loaded; predicted seconds are those of the remaining tokens."""
    prepared, summary, ledger = job.prepared, job.summary, job.ledger
    share = 1.0 - ledger.totals.get("room", 0) / max(1, summary.generated_tokens)
    return JobStart(
        input=prepared.source.name,
        detected=prepared.source.detected,
        model=prepared.options.model,
        endpoint=summary.endpoint,
        kinds=summary.kinds,
        total=summary.rows,
        refused=summary.refused,
        resumed=ledger.completed + ledger.failed,
        prompt_tokens=summary.prompt_tokens,
        expected_tokens=summary.generated_tokens,
        unlimited=summary.limits_text,
        open_ended=summary.unlimited > 0,
        plan=reason,
        machine="" if plan is None else plan.hardware,
        predicted_s=None if plan is None else share * plan.predicted_s,
        predicted_prompt_s=None if plan is None else share * predicted_prompt_s(plan),
    )


def _write_json(path: Path | None, label: str, value: object) -> None:
    if path is not None:
        with whole_file(path, label=label) as write:
            write(json.dumps(value, indent=2).encode() + b"\n")


def _write_experts(engine: Engine, options: JobOptions) -> None:
    """Write the routing trace, the expert stats and the expert profile."""
    if options.experts.trace is not None:
        engine.end_routing_trace()
    _write_json(options.expert_stats, "expert stats", engine.expert_stats)
    if options.save_expert_profile is not None:
        engine.save_expert_profile(options.save_expert_profile)


def _check_paths(options: JobOptions) -> None:
    seen: dict[Path, str] = {}
    mode = mode_of(options.prompts)
    if mode is not None and stat.S_ISREG(mode):
        seen[options.prompts.resolve()] = "prompts"
    if options.error_file is not None and options.output is None:
        raise InputError("--error-file goes with --output: rows that are served need a file too", code="output_path")
    written = dict(options.written)
    if options.output is not None and not writes_directly(options.output):
        written["journal"] = journal_of(options.output)
    for label, path in written.items():
        if path is None:
            continue
        check_writable(path, label=label)
        if path.is_file() or not path.exists():
            other = seen.setdefault(path.resolve(), label)
            if other != label:
                raise InputError(f"{label} {path}: is the same file as the {other}", code="output_path")


def _final_counts(ledger: Ledger, total: int) -> JobCounts:
    """The counts after the last row."""
    return JobCounts(total=total, completed=ledger.completed, failed=ledger.failed, state="finalizing")
