"""A job whose rows are answered by the engines of a Ray cluster. Its state stays with the driver: the journal, the
order of the rows, the status. Engines are leased rows (`LeaseBook`) and return lines; they keep nothing.

The driver has one call under way to each engine, an exchange: it carries new rows there and results back, at the latest
after `exchange_interval_s`. A call that ends with an error ends the engine; its rows are leased to others, and its slot
is given another engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moelight.batch.forecast import EngineForecast
from moelight.batch.job import Answer, Interrupt, JobAnswers, JobRun, PlanEngines, job_start, refuse_rest
from moelight.batch.options import DONE, INTERRUPTED, JobOptions
from moelight.batch.output import whole_file
from moelight.batch.progress import EngineCounts, JobCounts, ProgressFields
from moelight.batch.row_processor import JobInput
from moelight.batch.rows import BadRow, Row, bad_row
from moelight.batch.scan import duplicate
from moelight.batch.summary import ScanSummary
from moelight.core.errors import ConfigError, InputError
from moelight.core.request import Completion
from moelight.core.schedule import Lane
from moelight.core.small_files import read_bytes
from moelight.engine.tokenizer import MOST_TOKENIZER_BYTES
from moelight.integrations.ray.cluster import ActorLost, Cluster, ClusterOptions, EngineSlot
from moelight.integrations.ray.leases import (
    MOST_DEATHS,
    LeaseBook,
    LeasedRow,
    LeaseSizes,
    exchange_interval_s,
)
from moelight.integrations.ray.worker import (
    PROMPT_WEIGHT,
    EngineFigures,
    EnginePlan,
    EngineReport,
    EngineWorker,
    RowResult,
    WorkerSetup,
    entries_of,
    unpack_results,
)
from moelight.observe.stats import Binding, LaneStats, RunStats
from moelight.optimizer.allowed import CHOOSE
from moelight.profiles.workload import Workload
from moelight.runtime.measure import peak_rss_bytes

_IDLE_SHARE = 0.1  # of the interval of exchanges: for an engine that waits for rows
_SLOTS_EVERY_S, _TOLD_EVERY_S = 2.0, 1.0
_SILENT_S = 60.0  # an engine that answers no exchange for this long: its rows are leased to others too
_MOST_FAILURES = 5  # of the engines of a slot, one after another without a result
_LONGEST_WAIT_S = 60.0  # before a slot is given the next engine
_NO_SLOT_S = 30.0  # a cluster that does not scale must have a slot by then
_END_S = 600.0  # for the last pass of an engine that is told to end


@dataclass(kw_only=True, slots=True)
class _SlotState:
    """The history of the engines of a slot; ``refused`` is the reason why none can run there."""

    slot: EngineSlot
    failures: int = 0
    next_s: float = 0.0
    refused: str = ""


@dataclass(kw_only=True, slots=True)
class _EngineState:
    """An engine: its actor, the call under way, and its last figures."""

    slot: _SlotState
    actor: Any
    call: Any
    doing: str = "loading"
    plan: EnginePlan | None = None
    figures: EngineFigures = field(default_factory=EngineFigures)
    queued: int = 0
    running: int = 0
    rows: int = 0
    returned_tokens: int = 0  # of the rows that it answered
    heard_s: float = 0.0
    noted: tuple[float, float] = (0.0, 0.0)  # seconds of passes, and tokens, at the last measurement
    stealing: Any = None

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of the sequences that run in it, as of its last figures."""
        stats = self.figures.stats
        return 0 if stats is None else max(0, stats.completion_tokens - self.returned_tokens)

    @property
    def tokens(self) -> float:
        stats = self.figures.stats
        return 0.0 if stats is None else stats.completion_tokens + PROMPT_WEIGHT * stats.prompt_tokens


def answer_on(
    options: ClusterOptions,
    *,
    sizes: LeaseSizes | None = None,
    shown: bool = False,
    worker: type[EngineWorker] = EngineWorker,
) -> Answer:
    """The ``answer`` of `run_job` that puts each row into the ledger when an engine of the cluster has answered it."""

    def answer(job: JobRun) -> JobAnswers:
        if (refused := refuse_rest(job)) is not None:
            return refused
        with Cluster(options, worker) as cluster, Interrupt(job.told.interrupting) as interrupt:
            return ClusterJob(job, cluster, sizes or LeaseSizes(), shown=shown).run(interrupt)

    return answer


def plan_on(options: ClusterOptions, *, worker: type[EngineWorker] = EngineWorker) -> PlanEngines:
    """The ``plan_engines`` of `forecast_job`: the plan of each engine, for its node."""

    def plan(prepared: JobInput, summary: ScanSummary) -> tuple[EngineForecast, ...]:
        workload = summary.workload()
        if workload is None:
            return ()
        with Cluster(options, worker) as cluster:
            slots = cluster.slots()
            setup = setup_of(prepared, workload, engines=len(slots), shown=False)
            actors = [cluster.start(slot, setup) for slot in slots]
            calls = {actor.plan.remote(): slot for actor, slot in zip(actors, slots, strict=True)}
            answers: dict[str, Any] = {}
            while calls:
                for call, answer in cluster.answers(list(calls), 1.0):
                    answers[calls.pop(call).name] = answer
        if not answers:
            raise ConfigError(f"--ray {options.address}: no node has what an engine takes")
        return _forecasts(answers, summary)

    return plan


def _forecasts(answers: Mapping[str, Any], summary: ScanSummary) -> tuple[EngineForecast, ...]:
    plans = {name: plan for name, plan in answers.items() if isinstance(plan, EnginePlan)}
    weight = 1 + PROMPT_WEIGHT * summary.prompt_tokens / max(1, summary.generated_tokens)
    speeds = {name: plan.tokens_per_s / weight for name, plan in plans.items()}
    total = sum(speeds.values())
    forecasts = []
    for name, answer in sorted(answers.items()):
        plan = plans.get(name)
        if plan is None:
            reason = answer.reason if isinstance(answer, ActorLost) else str(answer)
            forecasts.append(EngineForecast(name=name, refused=reason))
            continue
        share = speeds[name] / total if total else 1 / len(plans)
        forecasts.append(
            EngineForecast(
                name=name,
                share=share,
                rows=round(share * summary.served),
                tokens_per_s=speeds[name],
                binding=plan.binding,
                seconds=share * summary.generated_tokens / speeds[name] if speeds[name] else None,
                why=plan.summary,
            )
        )
    return tuple(forecasts)


def setup_of(
    prepared: JobInput, workload: Workload, *, engines: int, shown: bool, chosen: Mapping[str, str] | None = None
) -> WorkerSetup:
    """Return the setup of the ``engines`` engines of a job; ``chosen``: the choices left to the planner."""
    options: JobOptions = prepared.options
    kv_dtype = options.kv_dtype if chosen is None else chosen["kv_dtype"]
    template = options.chat_template
    return WorkerSetup(
        options=replace(options, kv_dtype=kv_dtype, chat_template=None, trace=None, stats=None),
        format=prepared.source.format.name,
        facts=prepared.facts,
        workload=_shared(workload, engines),
        chat_template=None if template is None else read_bytes(template, max_bytes=MOST_TOKENIZER_BYTES),
        shown=shown,
        traced=options.trace is not None,
    )


def _shared(workload: Workload, engines: int) -> Workload:
    return replace(workload, num_requests=max(1, math.ceil(workload.num_requests / max(1, engines))))


class ClusterJob:
    """One run of a job on a cluster."""

    def __init__(self, job: JobRun, cluster: Cluster, sizes: LeaseSizes, *, shown: bool) -> None:
        self._job, self._cluster, self._shown = job, cluster, shown
        self._began_s = self._slots_s = self._told_s = time.monotonic()
        self._refusals = job.processor()
        summary, ledger = job.summary, job.ledger
        self._resumed = ledger.completed + ledger.failed
        left = max(1, summary.rows - self._resumed)
        served = max(1, summary.served)
        self._tokens_of_row = (summary.generated_tokens + PROMPT_WEIGHT * summary.prompt_tokens) / served
        self._byte_tokens = PROMPT_WEIGHT * summary.prompt_tokens / max(1, job.prepared.source.size_bytes)
        self._book = LeaseBook(self._rows(), count=left, row_tokens=self._tokens_of_row, sizes=sizes)
        self._slots: dict[tuple[str, str], _SlotState] = {}
        self._engines: dict[str, _EngineState] = {}
        self._started = 0
        self._first_pass_s: float | None = None
        self._past: list[EngineFigures] = []  # of engines that are over
        self._written_tokens = 0  # of rows that were put
        self._most_tokens = 0  # that were ever shown
        self._first_error: BadRow | None = None
        self._traces: list[tuple[str, bytes]] = []

    def run(self, interrupt: Interrupt) -> JobAnswers:
        """Lease rows and take results until all are done, or the job is interrupted."""
        job, book = self._job, self._book
        job.told.started(job_start(job, reason=f"on Ray, {self._cluster.options.address}", plan=None))
        self._fill_slots()  # engines load while the input is read up to the first open row
        while not book.finished and not interrupt.asked:
            self._fill_slots()
            calls = {state.call: name for name, state in self._engines.items()}
            calls |= {state.stealing: name for name, state in self._engines.items() if state.stealing is not None}
            began_s = time.monotonic()
            for call, answer in self._cluster.answers(list(calls), 0.2):
                self._take(calls[call], call, answer)
            if not calls:
                time.sleep(max(0.0, 0.1 - (time.monotonic() - began_s)))
            job.ledger.tick()
            self._notify()
        left = not book.finished
        self._end()
        job.ledger.commit()
        self._notify(now=True)
        state = INTERRUPTED if left and job.ledger.completed + job.ledger.failed < job.summary.rows else DONE
        self._write_traces()
        stats = self._stats()
        return JobAnswers(state=state, stats=stats, counts=self._counts(), first_error=self._first_error)

    def _rows(self) -> Iterator[LeasedRow]:
        """The rows that are not done and may be served; the others become error rows here."""
        job, source = self._job, self._job.prepared.source
        for number, line, row in source.entries(skip=job.ledger.done):
            if isinstance(row, BadRow):
                self._refuse(row)
            elif number in job.scanned.repeated:
                read = source.read_entry(row, number, line)
                self._refuse(duplicate(read) if isinstance(read, Row) else read)
            else:
                size = len(row) if isinstance(row, bytes) else 0
                tokens = self._tokens_of_row + self._byte_tokens * size
                yield LeasedRow(number=number, line=line, payload=row, tokens=tokens)

    def _refuse(self, bad: BadRow) -> None:
        self._book.unfinished -= 1
        self._refusals.refuse(bad)
        self._note_error(bad)

    def _note_error(self, bad: BadRow) -> None:
        """Keep the error row that is first in the input: results come in any order."""
        if self._first_error is None or bad.line < self._first_error.line:
            self._first_error = bad

    # Slots and engines

    def _fill_slots(self) -> None:
        """Start an engine at every slot that has none."""
        now_s = time.monotonic()
        if not self._slots or now_s - self._slots_s >= _SLOTS_EVERY_S:
            self._slots_s = now_s
            slots = {(slot.node, slot.name): slot for slot in self._cluster.slots()}
            self._slots = {key: self._slots.get(key) or _SlotState(slot=slot) for key, slot in slots.items()}
            self._cluster.ask_for_more(len(slots))
            self._check_slots(now_s)
        taken = {id(state.slot) for state in self._engines.values()}
        for slot in self._slots.values():
            choosing = self._kv_dtype_open and self._engines  # the first engine's plan decides for all
            if id(slot) not in taken and not slot.refused and now_s >= slot.next_s and not choosing:
                self._start(slot)

    @property
    def _kv_dtype_open(self) -> bool:
        return self._job.prepared.options.kv_dtype == CHOOSE and self._job.ledger.chosen is None

    def _check_slots(self, now_s: float) -> None:
        """Raise ConfigError if no engine is left, and none can be started."""
        if self._engines or any(not slot.refused for slot in self._slots.values()):
            return
        address = self._cluster.options.address
        reasons = [f"{slot.slot.name}: {slot.refused}" for slot in self._slots.values()]
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise ConfigError(f"--ray {address}: no engine can run; {reasons[0]}{more}")
        if self._cluster.options.engines is None and now_s - self._began_s > _NO_SLOT_S:
            raise ConfigError(
                f"--ray {address}: no node has what an engine takes; --ray-engines N asks a cluster that scales for it"
            )

    def _start(self, slot: _SlotState) -> None:
        self._started += 1
        count = self._cluster.options.engines or len(self._slots)
        job, workload = self._job, self._job.summary.workload()
        assert workload is not None
        setup = setup_of(job.prepared, workload, engines=count, shown=self._shown, chosen=job.ledger.chosen)
        actor = self._cluster.start(slot.slot, setup)
        name = f"{slot.slot.name}" if self._started <= len(self._slots) else f"{slot.slot.name}.{self._started}"
        self._engines[name] = _EngineState(slot=slot, actor=actor, call=actor.load.remote(), heard_s=time.monotonic())

    def _take(self, name: str, call: Any, answer: Any) -> None:
        """Take the answer of a call to the engine ``name``, and make the next call."""
        state = self._engines.get(name)
        if state is None:
            return
        state.heard_s = time.monotonic()
        if isinstance(answer, ActorLost):
            self._lose(name, answer.reason, died=answer.died and self._cluster.is_alive(state.slot.slot.node))
        elif call == state.stealing:
            state.stealing = None
            self._book.give_back(name, answer)
        elif isinstance(answer, EngineReport):
            self._take_report(name, state, answer)
        elif isinstance(answer, EnginePlan):
            self._join(name, state, answer)
        else:
            state.slot.refused = str(answer)
            self._job.told.adapted(f"{name}: {answer}")
            self._remove(name)
        if name in self._engines and call != state.stealing and state.call == call:
            self._exchange(name, state)

    def _join(self, name: str, state: _EngineState, plan: EnginePlan) -> None:
        told = self._job.told
        (told.adapted if self._first_pass_s is not None else told.planned)(f"{name}: {plan.summary}")
        self._first_pass_s = self._first_pass_s or time.monotonic()
        if self._kv_dtype_open:
            self._job.ledger.note_chosen({"kv_dtype": plan.kv_dtype})
        state.plan, state.doing = plan, "running"
        self._book.join(name, batch_rows=plan.batch_rows, tokens_per_s=plan.tokens_per_s or 1.0)

    def _take_report(self, name: str, state: _EngineState, report: EngineReport) -> None:
        state.queued, state.running = report.queued, report.running
        self._take_figures(name, state, report.figures)
        for result in unpack_results(report):
            self._put(name, state, result)
        if report.fault is not None:
            reason, user_error = report.fault
            if user_error:
                state.slot.refused = reason
            self._lose(name, reason, died=False)

    def _take_figures(self, name: str, state: _EngineState, figures: EngineFigures) -> None:
        changes = figures.changes[len(state.figures.changes) :]
        state.figures = figures
        for change in changes:
            self._job.told.adapted(f"{name}: {change}")
        wall_s = 0.0 if figures.stats is None else figures.stats.wall_s
        since_s, tokens = wall_s - state.noted[0], state.tokens - state.noted[1]
        rate = 0.0
        if since_s >= 1.0 and tokens > 0:
            rate = tokens / since_s
            state.noted = (wall_s, state.tokens)
        self._book.measure(name, tokens_per_s=rate, queued=state.queued)

    def _put(self, name: str, state: _EngineState, result: RowResult) -> None:
        """Put a result into the ledger, if it is the row's first."""
        spent = result.totals.get("completion_tokens", 0) + PROMPT_WEIGHT * result.totals.get("prompt_tokens", 0)
        if self._book.returned(name, result.number, spent=None if result.failed else spent) is None:
            return
        job = self._job
        state.rows += 1
        state.slot.failures = 0
        job.ledger.put(result.number, result.data, failed=result.failed, totals=result.totals or None)
        for reason, sample, prompt_tokens, tokens, cached, room, latency_s, metrics in result.completions:
            self._written_tokens += tokens
            state.returned_tokens += tokens
            completion = Completion(
                index=result.number,
                text="",
                token_ids=(0,) * tokens,
                finish_reason=reason,
                prompt_tokens=prompt_tokens,
                sample=sample,
                cached_tokens=cached,
                metrics=metrics,
            )
            job.told.completion(completion, room=room, latency_s=latency_s)
        if result.bad is not None:
            line, code, message = result.bad
            bad = BadRow(number=result.number, line=line, custom_id=None, code=code, message=message)
            self._note_error(bad)
            job.told.row(ProgressFields(number=result.number, prompt=f"(line {line})", error=message))
        elif result.shown is not None:
            prompt, texts, reasons = result.shown
            job.told.row(ProgressFields(number=result.number, prompt=prompt, texts=texts, finish_reasons=reasons))

    def _exchange(self, name: str, state: _EngineState) -> None:
        """Send what the engine is to have, and steal for one that has nothing to begin."""
        rows = self._book.lease(name, time.monotonic())
        state.queued += len(rows)
        idle = not state.queued
        interval_s = exchange_interval_s(len(self._engines))
        wait_s = interval_s * _IDLE_SHARE if idle else interval_s
        state.call = state.actor.exchange.remote(entries_of(rows), wait_s)
        if idle and (steal := self._book.victim(name)) is not None:
            victim = self._engines[steal[0]]
            count = min(victim.queued, max(1, round(steal[1] / self._tokens_of_row)))
            if victim.stealing is None and count:
                victim.stealing = victim.actor.take_back.remote(count)

    def _lose(self, name: str, reason: str, *, died: bool) -> None:
        """An engine is over: its rows are leased to others; those that died too often become error rows."""
        state = self._engines[name]
        slot = state.slot
        slot.failures += 1
        slot.next_s = time.monotonic() + min(_LONGEST_WAIT_S, 0.25 * 2**slot.failures)
        if slot.failures >= _MOST_FAILURES:
            slot.refused = (
                slot.refused or f"its engine ended {slot.failures} times without a result; the last: {reason}"
            )
        more = "; no other engine is started there" if slot.refused else ""
        self._job.told.adapted(f"{name} is lost ({reason}); its rows are given to others{more}")
        self._remove(name, died=died)

    def _remove(self, name: str, *, died: bool = False) -> None:
        state = self._engines.pop(name)
        self._past.append(state.figures)
        self._cluster.stop(state.actor)
        if name not in self._book.engines:
            return
        for row in self._book.leave(name, died=died):
            bad = self._crashed(row)
            self._refusals.refuse(bad)
            self._note_error(bad)
            state.slot.failures = 0  # it was the row

    def _crashed(self, row: LeasedRow) -> BadRow:
        error = InputError(
            f"{MOST_DEATHS} engines died while they held this row; it is not tried again", code="row_crashed"
        )
        read = self._job.prepared.source.read_entry(row.payload, row.number, row.line)
        return bad_row(row.number, row.line, read.custom_id, error, kind=read.kind)

    def _end(self) -> None:
        """End every engine after its running pass, and take the last results."""
        calls = {}
        for name, state in self._engines.items():
            if state.plan is not None:
                calls[state.actor.end.remote(_END_S)] = name
        end_s = time.monotonic() + _END_S
        while calls and time.monotonic() < end_s:
            for call, answer in self._cluster.answers(list(calls), 0.2):
                name = calls.pop(call)
                if isinstance(answer, tuple):
                    report, trace = answer
                    self._take_report_at_end(name, report)
                    if trace:
                        self._traces.append((name, trace))
            self._job.ledger.tick()
        for state in self._engines.values():
            self._cluster.stop(state.actor)

    def _take_report_at_end(self, name: str, report: EngineReport) -> None:
        state = self._engines[name]
        state.queued = state.running = 0
        state.doing, state.figures = "ended", report.figures
        for result in unpack_results(report):
            self._put(name, state, result)
        if report.fault is not None:
            self._job.told.adapted(f"{name}: {report.fault[0]}")

    # Figures

    def _notify(self, *, now: bool = False) -> None:
        now_s = time.monotonic()
        if not now and now_s - self._told_s < _TOLD_EVERY_S:
            return
        self._told_s = now_s
        silent = frozenset(
            name
            for name, state in self._engines.items()
            if state.plan is not None and now_s - state.heard_s > _SILENT_S + exchange_interval_s(len(self._engines))
        )
        self._book.late(now_s, silent=silent)
        counts = self._counts()
        self._job.told.tokens(counts.generation_tokens, counts.expected_tokens, counts.binding)
        self._job.told.counts(counts)
        self._job.told.measured(self._stats())
        self._cluster.show(
            {
                "tokens_per_s": {engine.name: engine.tokens_per_s for engine in counts.engines},
                "engine_rows": {engine.name: engine.rows for engine in counts.engines},
                "engine_eta_s": {engine.name: engine.eta_s or 0.0 for engine in counts.engines},
            }
        )

    def _counts(self) -> JobCounts:
        job, now_s = self._job, time.monotonic()
        ledger, summary, stats = job.ledger, job.summary, self._stats()
        engines = tuple(self._engine_counts(name, state) for name, state in self._engines.items())
        room = summary.generated_tokens - ledger.totals.get("room", 0)
        # What an engine had of unfinished rows is computed again after its death: the count waits for it.
        self._most_tokens = max(self._most_tokens, stats.completion_tokens)
        running = sum(state.running for state in self._engines.values())
        widest = max(engines, key=lambda engine: engine.share, default=None)
        return JobCounts(
            total=summary.rows,
            completed=ledger.completed,
            failed=ledger.failed,
            running=running,
            waiting=max(0, self._book.unfinished - running),
            kv_usage=max((state.figures.kv_usage for state in self._engines.values()), default=0.0),
            resumed=self._resumed,
            prompt_tokens=stats.prompt_tokens,
            expected_prompt_tokens=max(summary.prompt_tokens, stats.prompt_tokens),
            generation_tokens=self._most_tokens,
            expected_tokens=max(self._most_tokens, self._written_tokens + room),
            passes=stats.passes,
            elapsed_s=now_s - self._began_s,
            running_s=stats.wall_s,
            state="in_progress" if ledger.completed + ledger.failed < summary.rows else "finalizing",
            binding=None if widest is None else widest.binding,
            engines=engines,
        )

    def _engine_counts(self, name: str, state: _EngineState) -> EngineCounts:
        stats, held = state.figures.stats, name in self._book.engines
        binding = state.figures.binding
        return EngineCounts(
            name=name,
            node=state.slot.slot.name,
            state=state.doing,
            rows=state.rows,
            running=state.running,
            queued=state.queued,
            share=self._book.share(name) if held else 0.0,
            tokens_per_s=0.0 if stats is None else stats.tokens_per_s,
            eta_s=self._book.seconds_left(name) if held else None,
            binding=None if binding is None else Binding(lane=Lane(binding[0]), share=binding[1]),
        )

    def _stats(self) -> RunStats:
        """The sum over all engines; ``wall_s`` is that of the driver, and memory the largest process's. Of the tokens
        of an engine that is over, those of rows that it had not finished do not count."""
        figures = [state.figures for state in self._engines.values()] + self._past
        all_stats = [figure.stats for figure in figures if figure.stats is not None]
        lanes, counts = dict[Lane, LaneStats](), Counter[str]()
        for stats in all_stats:
            counts.update(stats.counts)
            for lane, lane_stats in stats.lanes.items():
                so_far = lanes.get(lane, LaneStats())
                lanes[lane] = LaneStats(
                    busy_s=so_far.busy_s + lane_stats.busy_s,
                    bytes=so_far.bytes + lane_stats.bytes,
                    tasks=so_far.tasks + lane_stats.tasks,
                )
        began_s = self._first_pass_s or time.monotonic()
        return RunStats(
            wall_s=time.monotonic() - began_s,
            load_s=began_s - self._began_s,
            prompt_tokens=sum(stat.prompt_tokens for stat in all_stats),
            completion_tokens=self._written_tokens + sum(engine.unfinished_tokens for engine in self._engines.values()),
            passes=sum(stat.passes for stat in all_stats),
            peak_rss_bytes=max([peak_rss_bytes(), *(stat.peak_rss_bytes for stat in all_stats)]),
            lanes=lanes,
            counts=dict(counts),
        )

    def _write_traces(self) -> None:
        """One trace for each engine, beside each other: ``run.json`` becomes ``run.NODE.json``."""
        path = self._job.prepared.options.trace
        for name, data in self._traces:
            assert path is not None
            safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
            with whole_file(path.with_suffix(f".{safe}{path.suffix}"), label="trace") as write:
                write(data)
