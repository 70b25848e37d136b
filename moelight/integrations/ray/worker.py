"""One engine of a cluster, an actor: it plans for its node, loads the model, and answers the rows that are leased to it
as a job on one machine does. Does not import ray: the actor is made of `EngineWorker` by `cluster`.

A thread runs the engine; calls of the driver put rows into its queue and take results. The engine's passes are refilled
from the queue, and end only when it is empty and no sequence is running.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from moelight.batch import faults
from moelight.batch.fields import Input, RowContext
from moelight.batch.fingerprint import differences
from moelight.batch.input import FORMATS
from moelight.batch.job import RunTrace
from moelight.batch.model_names import ModelNames
from moelight.batch.options import JobOptions
from moelight.batch.output import whole_file
from moelight.batch.progress import Progress, ProgressFields
from moelight.batch.row_processor import JobInput, RowProcessor
from moelight.batch.rows import BadRow, Row
from moelight.batch.trace_header import trace_header
from moelight.core.errors import CheckpointError, UserError
from moelight.core.request import Completion, RequestMetrics
from moelight.engine.model import LazyModel, PlannedModel, model_facts
from moelight.observe.stats import RunStats
from moelight.profiles.workload import Workload

if TYPE_CHECKING:
    from moelight.engine.engine import Engine
    from moelight.integrations.ray.leases import LeasedRow

PROMPT_WEIGHT = 0.1  # of a token of a prompt, beside a generated one
_LINES = ("openai", "simple", "text")
_MANY_RESULTS = 1024  # end an exchange
_NOTED_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """The setup shared by all engines of a job. ``options`` name the model, on the node's disk, on a shared one or on
    the hub; ``chat_template`` is the template's text. ``facts`` are the driver's: an engine with another model is
    refused. ``shown``: rows are sent with their texts."""

    options: JobOptions
    format: str
    facts: dict[str, Any]
    workload: Workload
    chat_template: bytes | None = None
    shown: bool = False
    traced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """How an engine will run: its plan in a sentence, sequences in a pass, tokens in a second (those of prompts weighed
    with `PROMPT_WEIGHT`) and the binding lane as predicted, and where it is."""

    node: str
    pid: int
    summary: str
    batch_rows: int
    tokens_per_s: float
    binding: str
    device: str
    kv_dtype: str


# finish_reason, sample, prompt_tokens, completion_tokens, cached_tokens, room, latency_s, metrics
Entry: TypeAlias = tuple[int, int, bytes | Row | BadRow]  # number, line, and what `Input.read_entry` takes
CompletionFigures: TypeAlias = tuple[str, int, int, int, int, int, float | None, RequestMetrics | None]


class RowResult(msgspec.Struct, array_like=True):
    """The line of a row. ``bad``: line, code and message of an error row; ``shown``: prompt, texts, finish reasons."""

    number: int
    data: bytes
    failed: bool = False
    totals: dict[str, int] = {}
    bad: tuple[int, str, str] | None = None
    completions: list[CompletionFigures] = []
    shown: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFigures:
    """Figures of an engine, noted once a second; ``binding`` is a lane and its share, ``changes`` are those of its
    policy."""

    stats: RunStats | None = None
    kv_usage: float = 0.0
    binding: tuple[str, float] | None = None
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The answer to an exchange: ``results`` are ``count`` `RowResult` in MessagePack, ``queued`` rows not begun,
    ``running`` sequences; ``fault`` is what ended the engine, and whether it is for the user to correct."""

    results: bytes
    count: int
    queued: int
    running: int
    figures: EngineFigures
    fault: tuple[str, bool] | None = None


def entries_of(rows: Sequence[LeasedRow]) -> list[Entry]:
    """Return the entries of leased rows that an engine needs."""
    return [(row.number, row.line, row.payload) for row in rows]


_RESULTS = msgspec.msgpack.Decoder(list[RowResult])


def pack_results(results: Sequence[RowResult]) -> bytes:
    """Results as bytes."""
    return msgspec.msgpack.encode(results)


def unpack_results(report: EngineReport) -> list[RowResult]:
    """The results of an exchange."""
    return _RESULTS.decode(report.results) if report.count else []


class LeaseQueue:
    """The rows that an engine has not begun, and the results that were not taken. Calls of the driver and the engine's
    thread meet here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: deque[Entry] = deque()
        self._results: list[RowResult] = []
        self._closed = False
        self._low = 0  # rows at which the exchange ends that is under way

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Entry]) -> None:
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify_all()

    def close(self) -> None:
        """The engine gets no more rows."""
        with self._changed:
            self._closed = True
            self._rows.clear()
            self._changed.notify_all()

    def next(self, *, block: bool) -> Entry | None:
        """The next row; None if there is none at present, or, with ``block``, if there will be none."""
        with self._changed:
            while block and not self._rows and not self._closed:
                self._changed.notify_all()
                self._changed.wait(1.0)
            if not self._rows:
                return None
            if len(self._rows) - 1 == self._low:
                self._changed.notify_all()
            return self._rows.popleft()

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, result: RowResult) -> None:
        with self._changed:
            self._results.append(result)
            if len(self._results) >= _MANY_RESULTS:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wake a waiting exchange: a pass has ended."""
        with self._changed:
            self._changed.notify_all()

    def take_back(self, count: int) -> list[int]:
        """Withdraw the last rows, ``count`` at most; the numbers of those that were not begun."""
        with self._changed:
            return [self._rows.pop()[0] for _ in range(min(count, len(self._rows)))]

    def results(self, wait_s: float, over: Callable[[], bool]) -> list[RowResult]:
        """The results since the last call, after ``wait_s``; earlier if there are many, or once half of the rows are
        begun."""
        end_s = time.monotonic() + wait_s
        with self._changed:
            self._low = len(self._rows) // 2
            has_rows = bool(self._rows)
            while (left_s := end_s - time.monotonic()) > 0 and not over():
                low = len(self._rows) <= self._low
                if len(self._results) >= _MANY_RESULTS or (low and (self._results or has_rows)):
                    break
                self._changed.wait(min(left_s, 0.2))
            taken, self._results = self._results, []
            return taken


class _Answers(Progress):
    """Turns what a `RowProcessor` puts and tells into results."""

    def __init__(self, queue: LeaseQueue, *, shown: bool) -> None:
        self._queue, self._shown = queue, shown
        self.bad: tuple[int, str, str] | None = None  # of the error row that is being put
        self._completions: dict[int, list[CompletionFigures]] = {}
        self._result = RowResult(-1, b"")
        self.number = -1  # of the row whose completion is being taken

    def preparing(self, number: int) -> AbstractContextManager[None]:
        """The driver counts the deaths of rows."""
        faults.reach(f"row_{number}")
        return contextlib.nullcontext()

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:
        figures = (
            completion.finish_reason,
            completion.sample,
            completion.prompt_tokens,
            completion.completion_tokens,
            completion.cached_tokens,
            room,
            latency_s,
            completion.metrics,
        )
        self._completions.setdefault(self.number, []).append(figures)

    def put(self, number: int, data: bytes, *, failed: bool = False, totals: Mapping[str, int] | None = None) -> None:
        completions = self._completions.pop(number, [])
        bad, self.bad = self.bad, None
        self._result = RowResult(number, data, failed, dict(totals or {}), bad, completions)

    def row(self, shown: ProgressFields) -> None:
        if self._shown:
            self._result.shown = (shown.prompt, shown.texts, shown.finish_reasons)
        self._queue.put(self._result)


class _LeaseProcessor(RowProcessor):
    """A `RowProcessor` whose rows become results."""

    def __init__(self, prepared: JobInput, answers: _Answers) -> None:
        super().__init__(answers, prepared, answers, repeated=frozenset())
        self._answers = answers

    def take(self, completion: Completion) -> None:
        self._answers.number = self._open[completion.index].row.number
        super().take(completion)

    def refuse(self, bad: BadRow, *, room: int = 0) -> None:
        self._answers.bad = (bad.line, bad.code, bad.message)
        super().refuse(bad, room=room)


def _reader(setup: WorkerSetup, model: LazyModel) -> Input:
    """The reader of the job's format, without a file. Rows of tables are read by the driver and answered as simple
    ones."""
    options = setup.options
    context = RowContext(
        defaults=options.sampling,
        strict=options.strict,
        resamplings=options.resamplings,
        models=ModelNames.of(options.model, ignore=options.ignore_model),
        vocabulary=model,
        token_ids=options.token_ids,
        per_request_metrics=options.per_request_metrics,
        numbered=options.durability.order == "completion",
        task=options.task,
        choices=tuple(options.choices),
        pooling=options.pooling,
    )
    nothing: Any = SimpleNamespace(name="", size_bytes=0, digest=str)
    return FORMATS.get(setup.format if setup.format in _LINES else "simple")(context, nothing)


class EngineLoop:
    """An engine in a thread of its own: it answers the rows of ``queue`` until that is closed. Created in the thread
    of a call; `ready` ends when the engine is loaded or has failed."""

    def __init__(self, setup: WorkerSetup, planned: PlannedModel, model: LazyModel, queue: LeaseQueue) -> None:
        self._planned, self._queue = planned, queue
        self._reader = _reader(setup, model)
        prepared = JobInput(options=setup.options, source=self._reader, model=model, facts=setup.facts)
        self._answers = _Answers(queue, shown=setup.shown)
        self._processor = _LeaseProcessor(prepared, self._answers)
        self._ready = threading.Event()
        self.fault: tuple[str, bool] | None = None  # what ended the engine, and whether it is for the user to correct
        self.figures = EngineFigures()
        self._told_s, self._changes = 0.0, 0
        self._folder = TemporaryDirectory(prefix="moelight-trace-") if setup.traced else None
        self._thread = threading.Thread(target=self._run, name="moelight-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return self._processor.running

    def ready(self) -> None:
        self._ready.wait()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def trace(self) -> bytes:
        """The trace of all passes, empty if there is none; the engine has ended. Removes the file."""
        if self._folder is None:
            return b""
        with self._folder:
            return self._trace_path.read_bytes() if self.fault is None else b""

    @property
    def _trace_path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "trace.json"

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as files, self._planned.load() as engine:
                trace = None
                if self._folder is not None:
                    trace = RunTrace(files.enter_context(whole_file(self._trace_path, label="trace")))
                self._note(engine)
                self._ready.set()
                self._serve(engine, trace)
                self._note(engine)
                if trace is not None:
                    setup = self._planned.simulation(engine.policy)
                    trace.about = trace_header(setup, engine.policy.schedule, source="measured")
                    trace.finish()
        except BaseException as error:  # noqa: BLE001 (it is the driver's to judge)
            message = " ".join(str(error).split()) or type(error).__name__
            is_user_error = isinstance(error, UserError)
            self.fault = (message if is_user_error else f"{type(error).__name__}: {message}", is_user_error)
        finally:
            self._ready.set()
            self._queue.flush()

    def _serve(self, engine: Engine, trace: RunTrace | None) -> None:
        def on_pass() -> None:
            if trace is not None and engine.timeline is not None:
                trace.add(engine.timeline)

        def until() -> bool:
            if time.monotonic() - self._told_s >= _NOTED_EVERY_S:
                self._note(engine)
            self._queue.flush()
            return self._queue.closed

        requests = self._processor.requests(self._rows(), engine)
        while not self._queue.closed:
            for completion in engine.run(requests, on_pass=on_pass, until=until):
                self._processor.take(completion)

    def _rows(self) -> Iterator[Row | BadRow | None]:
        """The rows of the queue; None where it is empty while sequences are running, so that their passes go on."""
        while not self._queue.closed:
            entry = self._queue.next(block=not self._processor.running)
            if entry is None:
                yield None
                continue
            number, line, payload = entry
            yield self._reader.read_entry(payload, number, line)

    def _note(self, engine: Engine) -> None:
        self._told_s = time.monotonic()
        changes = engine.adaptations[self._changes :]
        self._changes += len(changes)
        binding = engine.binding
        self.figures = EngineFigures(
            stats=engine.stats,
            kv_usage=engine.kv_usage,
            # None at the start of each run of the engine
            binding=self.figures.binding if binding is None else (str(binding.lane), binding.share),
            changes=(*self.figures.changes, *(change.reason for change in changes)),
        )


class EngineWorker:
    """One engine on one node, by the calls of its driver: `load` once, then `exchange` again and again, `take_back` at
    any time, `end`. ``cores``: those of the node that are for this engine, by position; None: all. ``memory_share``:
    its part of the memory, if several engines share the host."""

    def __init__(self, setup: WorkerSetup, *, cores: tuple[int, int] | None = None, memory_share: float = 1.0) -> None:
        # As in `moelight.cli.main`: threads of torch that spin take cores from the kernels' own.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        self._setup, self._cores, self._memory_share = setup, cores, memory_share
        self._queue = LeaseQueue()
        self._loop: EngineLoop | None = None
        self._files = contextlib.ExitStack()

    def plan(self) -> EnginePlan | str:
        """How this node would do the job, without loading anything; a text: why it cannot."""
        try:
            return self._said(self._planned()[1])
        except UserError as error:
            return str(error)

    def load(self) -> EnginePlan | str:
        """Plan for this node and load the model; a text: why it cannot be done here."""
        try:
            model, planned = self._planned()
        except UserError as error:
            return str(error)
        self._loop = EngineLoop(self._setup, planned, model, self._queue)
        self._loop.ready()
        return self._said(planned) if self._loop.fault is None else self._loop.fault[0]

    def add(self, rows: Sequence[Entry]) -> None:
        """Take rows; an exchange that is under way returns their results too."""
        self._queue.add(rows)

    def exchange(self, rows: Sequence[Entry], wait_s: float) -> EngineReport:
        """Take ``rows``; return the results since the last exchange, after ``wait_s`` or earlier."""
        loop = self._loop
        assert loop is not None
        self._queue.add(rows)
        results = self._queue.results(wait_s, over=lambda: loop.fault is not None)
        return EngineReport(
            results=pack_results(results),
            count=len(results),
            queued=len(self._queue),
            running=loop.running,
            figures=loop.figures,
            fault=loop.fault,
        )

    def take_back(self, count: int) -> list[int]:
        """Withdraw the last ``count`` rows; returns the numbers of those that were not begun."""
        return self._queue.take_back(count)

    def end(self, timeout_s: float) -> tuple[EngineReport, bytes]:
        """Stop after the running pass; the last results, and the trace."""
        loop = self._loop
        assert loop is not None
        self._queue.close()
        loop.join(timeout_s)
        report = self.exchange((), 0.0)
        self._files.close()
        return report, loop.trace()

    def _planned(self) -> tuple[LazyModel, PlannedModel]:
        self._take_cores()
        setup, options = self._setup, self._setup.options
        template = None
        if setup.chat_template is not None:
            folder = self._files.enter_context(TemporaryDirectory(prefix="moelight-"))
            template = Path(folder) / "template.jinja"
            template.write_bytes(setup.chat_template)
        model = LazyModel(options.model, chat_template=template)
        if (changed := differences(setup.facts["model"], model_facts(model.directory))) and setup.facts["model"]:
            raise CheckpointError(f"{model.directory}: is another model than the driver's ({changed[0].split(':')[0]})")
        if options.host_memory is None and self._memory_share < 1.0:
            from moelight.engine.planning import FREE_SHARE
            from moelight.runtime.measure import available_bytes

            options = replace(options, host_memory=int(FREE_SHARE * available_bytes() * self._memory_share))
        return model, model.plan(options, setup.workload, options.policy)

    def _take_cores(self) -> None:
        if self._cores is None or not hasattr(os, "sched_setaffinity"):
            return
        first, count = self._cores
        allowed = sorted(os.sched_getaffinity(os.getpid()))
        cores = {allowed[(first + index) % len(allowed)] for index in range(count)}
        os.sched_setaffinity(0, cores)  # of this thread, from which the engine's are started
        self._cores = None

    def _said(self, planned: PlannedModel) -> EnginePlan:
        plan, workload = planned.plan, planned.workload
        rate = 0.0 if plan is None else plan.estimate.tokens_per_s
        return EnginePlan(
            node=socket.gethostname(),
            pid=os.getpid(),
            summary=planned.why,
            batch_rows=planned.policy.batch_size,
            tokens_per_s=rate * (1 + PROMPT_WEIGHT * workload.prompt_len / workload.gen_len),
            binding="" if plan is None else str(plan.estimate.binding),
            device=planned.policy.ffn_device,
            kv_dtype=planned.policy.kv_dtype,
        )
