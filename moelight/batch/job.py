"""One job: a file of prompts in, a file of completions out. Finished rows survive a crash and are not computed again.
All checks precede the loading of the model; a row that cannot be served becomes an error row."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from moelight.batch.fingerprint import digest_of_file, number_facts, sampling_facts
from moelight.batch.forecast import Forecast, predicted_prompt_s, predicted_s
from moelight.batch.input import Input, open_input
from moelight.batch.journal import Ledger, open_outputs
from moelight.batch.model_names import ModelNames
from moelight.batch.options import DONE, DONE_BEFORE, INTERRUPTED, JobOptions, JobResult
from moelight.batch.output import check_writable, mode_of, whole_file, writes_directly
from moelight.batch.paths import Outputs, journal_of
from moelight.batch.progress import JobCounts, JobStart, Progress, ProgressGroup, State
from moelight.batch.row_processor import RowProcessor, refuse_struck
from moelight.batch.rows import Row
from moelight.batch.scan import Scan, scan
from moelight.batch.status import file_watchers
from moelight.batch.summary import ScanSummary
from moelight.batch.time_left import TimeLeft
from moelight.batch.trace_header import trace_header
from moelight.core.errors import InputError, MoelightError
from moelight.core.policy import Adaptation
from moelight.core.timeline import Timeline
from moelight.engine.model import LazyModel, PlannedModel, model_facts
from moelight.observe.stats import RunStats
from moelight.observe.trace import TraceHeader, TraceWriter
from moelight.runtime.measure import peak_rss_bytes

if TYPE_CHECKING:
    from moelight.engine.engine import Engine


class RunTrace:
    """Writes passes to the file as they end. ``about`` is the header of the trace, once it is known."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._writer = TraceWriter(write)
        self._fault: InputError | OSError | None = None
        self.about: TraceHeader | None = None

    def add(self, timeline: Timeline) -> None:
        """Write a pass; does nothing after a failed write."""
        if self._fault is not None:
            return
        try:
            self._writer.add(timeline)
        except (InputError, OSError) as fault:
            self._fault = fault

    def finish(self) -> None:
        """End the trace; raises the error of a failed write."""
        if self._fault is not None:
            raise self._fault
        self._writer.finish(self.about)


@contextlib.contextmanager
def open_trace(path: Path | None) -> Iterator[RunTrace | None]:
    """The trace that ``path`` holds once `RunTrace.finish` was called and the block ends without error; None without
    ``path``."""
    if path is None:
        yield None
        return
    with whole_file(path, what="trace") as write:
        yield RunTrace(write)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Within this context, ``asked`` becomes True at the first SIGINT or SIGTERM, whose handler calls ``on_first``; a
    second one raises KeyboardInterrupt. Ignored signals stay ignored; outside the main thread ``asked`` stays False."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._on_first = on_first
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM in this block, so that open files are closed and watchers notified."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


_TOLD_EVERY_S = 1.0


class RowSync:
    """Observes one run of an engine: reports its passes and commits its rows."""

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
        self._told_s = time.monotonic()
        self._told.counts(self.counts())
        self._told.measured(self._engine.stats, self._engine.expert_stats)

    @property
    def _expected(self) -> int:
        return max(self._engine.progress_tokens, self._room - self._answering.spared)

    def counts(self) -> JobCounts:
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


_NOWHERE = Path(os.devnull)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The inputs of a job before its model is loaded."""

    source: Input
    model: LazyModel
    facts: dict[str, Any]

    @property
    def job(self) -> str:
        """The identity of the job in its answers (`AnswerHeader`)."""
        return str(self.facts["prompts"]["digest"])

    def encode(self, row: Row) -> list[tuple[int, ...]]:
        """Token ids of each prompt of ``row``; raises InputError if one is empty or the chat template refuses the
        conversation."""
        tokenizer, most = self.model.tokenizer, self.model.context
        if row.conversation is not None:
            prompts = [tuple(tokenizer.render(row.conversation, most=most))]
        else:
            prompts = [tuple(tokenizer.encode(p, most=most)) if isinstance(p, str) else p for p in row.prompts]
        if not all(prompts):
            raise InputError("the prompt is empty: it holds no token", code="empty_prompt")
        return prompts


def run_job(options: JobOptions, *, progress: Progress | None = None, eta: TimeLeft | None = None) -> JobResult:
    """Answer every row of the prompts that no earlier run has answered. Torch is not loaded before the job is checked.

    ``progress`` receives the events after ``eta``, from which it may read the time left. A UserError is raised before
    any work, or during work if the disk is full or fails; finished rows are kept.
    """
    left = eta or TimeLeft()
    with terminable(), prepare(options) as prepared:
        if options.durability.restart:
            _simulated(options, prepared, progress or Progress())
        with _open_ledger(options, prepared) as ledger:
            return _run_on(options, prepared, ledger, left, progress)


def _run_on(
    options: JobOptions, prepared: Prepared, ledger: Ledger, left: TimeLeft, progress: Progress | None
) -> JobResult:
    # After the ledger: a run that may not write the output may not write its status files either.
    files = file_watchers(options, left)
    told = ProgressGroup([left, *([progress] if progress is not None else []), *files])
    end: State = "failed"
    try:
        done = ledger.state == "complete"
        result = _done_before(ledger, told) if done else _run(options, prepared, ledger, told)
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


def forecast_job(options: JobOptions, *, progress: Progress | None = None) -> Forecast:
    """Read the input and plan the job, as `run_job` does; nothing is loaded or written, and output files are not
    checked."""
    with prepare(options) as prepared:
        found = scan(prepared.source, prepared.encode, progress or Progress(), context=prepared.model.context)
        workload = found.summary.workload()
        return Forecast(
            input=prepared.source.name,
            detected=_detected(prepared),
            model=options.model,
            summary=found.summary,
            plan=None if workload is None else prepared.model.plan(options, workload).plan,
        )


def _run(options: JobOptions, prepared: Prepared, ledger: Ledger, told: Progress) -> JobResult:
    refuse_struck(ledger, prepared.source, model=options.model, job=prepared.job)
    found = read_all(prepared, ledger, told)
    with open_trace(options.trace) as trace:
        ran = _answer(options, prepared, ledger, found, told, trace)
        if ran.state == DONE:
            ledger.finish(found.summary.rows)
        _write_figures(options, ran, trace)
    told.counts(replace(ran.counts, completed=ledger.completed, failed=ledger.failed))
    return JobResult(
        state=ran.state,
        total=found.summary.rows,
        completed=ledger.completed,
        failed=ledger.failed,
        stats=ran.stats,
        first_error=ran.answering.first_error,
    )


def _simulated(options: JobOptions, prepared: Prepared, told: Progress) -> None:
    """Plan the job before --restart discards its output: a job that cannot run leaves the output untouched."""
    workload = scan(prepared.source, prepared.encode, told, context=prepared.model.context).summary.workload()
    if workload is not None:
        prepared.model.plan(options, workload)


def _done_before(ledger: Ledger, told: Progress) -> JobResult:
    total = ledger.completed + ledger.failed
    told.counts(_counts_of(ledger, total))
    return JobResult(state=DONE_BEFORE, total=total, completed=ledger.completed, failed=ledger.failed)


@contextlib.contextmanager
def prepare(options: JobOptions) -> Iterator[Prepared]:
    """Check the paths, open the prompts, find the model: in this order, so that a missing file of prompts is reported
    before a model is downloaded."""
    _check_paths(options)
    model = LazyModel(options.model, chat_template=options.chat_template)
    with open_input(
        options.prompts,
        format=options.format,
        defaults=options.sampling,
        models=ModelNames.of(options.model, ignore=options.ignore_model),
        prompt_column=options.prompt_column,
        id_column=options.id_column,
        vocabulary=model,
        token_ids=options.token_ids,
        numbered=options.durability.order == "completion",
    ) as source:
        model.check(options.sampling)  # otherwise every row would become an error row
        yield Prepared(
            source=source,
            model=model,
            facts={
                "prompts": {"format": source.format.name, "bytes": source.size_bytes, "digest": source.digest()},
                "model": model_facts(model.directory),
                "sampling": sampling_facts(options.sampling),
                "numbers": number_facts(options.policy),
                "rows": {
                    "chat_template": digest_of_file(options.chat_template),
                    "ignore_model": options.ignore_model,
                    "prompt_column": options.prompt_column,
                    "id_column": options.id_column,
                    "token_ids": options.token_ids,
                },
            },
        )


def read_all(prepared: Prepared, ledger: Ledger, told: Progress) -> Scan:
    """The scan of the prompts, from the ledger if an earlier run has read the same prompts."""
    if ledger.scan is not None:
        return Scan.from_dict(ledger.scan)
    found = scan(prepared.source, prepared.encode, told, context=prepared.model.context, preparing=ledger.preparing)
    ledger.note_scan(found.as_dict())
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    state: str
    answering: RowProcessor
    stats: RunStats
    counts: JobCounts


def _answer(
    options: JobOptions,
    prepared: Prepared,
    ledger: Ledger,
    found: Scan,
    told: Progress,
    trace: RunTrace | None,
) -> _Ran:
    """Put every row that is not done into ``ledger`` when its last completion is finished."""
    summary, workload = found.summary, found.summary.workload()
    answering = RowProcessor(
        ledger,
        answers=prepared.source.format,
        encode=prepared.encode,
        context=prepared.model.context,
        repeated=found.repeated,
        model=options.model,
        job=prepared.job,
        told=told,
    )
    rows = prepared.source.rows(skip=ledger.done)
    if workload is None or ledger.completed >= summary.served:
        answering.refuse_all(rows)
        return _Ran(state=DONE, answering=answering, stats=_nothing_ran(), counts=_counts_of(ledger, summary.rows))
    job = prepared.model.plan(options, workload)
    told.started(_start(options, prepared, summary, ledger, job))
    with job.load(record=options.expert_stats is not None or options.save_expert_profile is not None) as engine:
        told.planned(job.why)
        watch = RowSync(engine, ledger, answering, summary, told, trace)
        with Interrupt(told.interrupting) as interrupt:

            def asked_to_end() -> bool:
                watch.taken()
                return interrupt.asked

            requests = answering.requests(rows, engine)
            for completion in engine.run(requests, on_pass=watch.on_pass, until=asked_to_end):
                answering.take(completion)
            ledger.commit()
        watch.notify()
        left = interrupt.asked and ledger.completed + ledger.failed < summary.rows
        if not left:
            answering.check_complete()
        _write_experts(engine, options)
        if trace is not None:
            trace.about = trace_header(job.simulation(engine.policy), engine.policy.schedule, source="measured")
        state = INTERRUPTED if left else DONE
        return _Ran(state=state, answering=answering, stats=engine.stats, counts=watch.counts())


def _start(
    options: JobOptions, prepared: Prepared, summary: ScanSummary, ledger: Ledger, job: PlannedModel
) -> JobStart:
    """The facts known before the model is loaded; predicted seconds are those of the remaining tokens."""
    source, done = prepared.source, ledger.totals.get("room", 0)
    share = 1.0 - done / max(1, summary.generated_tokens)
    return JobStart(
        input=source.name,
        detected=_detected(prepared),
        model=options.model,
        endpoint=summary.endpoint,
        kinds=summary.kinds,
        total=summary.rows,
        refused=summary.refused,
        resumed=ledger.completed + ledger.failed,
        prompt_tokens=summary.prompt_tokens,
        expected_tokens=summary.generated_tokens,
        plan=job.why,
        predicted_s=None if job.plan is None else share * predicted_s(job.plan),
        predicted_prompt_s=None if job.plan is None else share * predicted_prompt_s(job.plan),
    )


def _detected(prepared: Prepared) -> str:
    """The detected format and its evidence, without the input's name."""
    return prepared.source.why.removeprefix(f"{prepared.source.name}: ")


def _write_figures(options: JobOptions, ran: _Ran, trace: RunTrace | None) -> None:
    if options.stats is not None:
        figures = ran.stats.as_dict()
        with whole_file(options.stats, what="stats") as write:
            write(json.dumps(figures, indent=2).encode() + b"\n")
    if trace is not None:
        trace.finish()


def _write_experts(engine: Engine, options: JobOptions) -> None:
    """Write the routing trace, the expert stats and the expert profile."""
    if options.experts.trace is not None:
        engine.end_routing_trace()
    if options.expert_stats is not None:
        with whole_file(options.expert_stats, what="expert stats") as write:
            write(json.dumps(engine.expert_stats, indent=2).encode() + b"\n")
    if options.save_expert_profile is not None:
        engine.save_expert_profile(options.save_expert_profile)


def _open_ledger(options: JobOptions, prepared: Prepared) -> Ledger:
    how = options.durability
    outputs = Outputs(
        rows=options.output or _NOWHERE,
        errors=options.error_file,
        order=how.order,
        atomic=how.atomic,
        sync_s=how.sync_s,
    )
    return open_outputs(outputs, prepared.facts, restart=how.restart, allow_changed=how.allow_changed)


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
    for what, path in written.items():
        if path is None:
            continue
        check_writable(path, what=what)
        if path.is_file() or not path.exists():
            other = seen.setdefault(path.resolve(), what)
            if other != what:
                raise InputError(f"{what} {path}: is the same file as the {other}", code="output_path")


def _counts_of(ledger: Ledger, total: int) -> JobCounts:
    """The counts after the last row."""
    return JobCounts(total=total, completed=ledger.completed, failed=ledger.failed, state="finalizing")


def _nothing_ran() -> RunStats:
    return RunStats(
        wall_s=0.0,
        load_s=0.0,
        prompt_tokens=0,
        completion_tokens=0,
        passes=0,
        peak_rss_bytes=peak_rss_bytes(),
        lanes={},
    )
