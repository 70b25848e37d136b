"""One job: a file of prompts in, a file of completions out, in the order of the input.

Everything that can be refused is refused before the model is loaded; a line that cannot be served becomes an error row.
Knows files, lines and the engine's face. Refuses to know how completions are made.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.batch.forecast import about
from moelight.batch.format import (
    BadLine,
    InputLine,
    bad_line,
    completion_row,
    error_row,
    read_lines,
    to_json_line,
)
from moelight.batch.output import check_writable, whole_file
from moelight.batch.progress import Progress
from moelight.batch.run_trace import RunTrace, open_trace
from moelight.core.adaptation import Adaptation
from moelight.core.errors import InputError, MoelightError
from moelight.core.policy import Policy
from moelight.core.request import Request, SamplingParams
from moelight.engine.tokenizer import Tokenizer
from moelight.experts.options import ExpertOptions
from moelight.observe.stats import Stats
from moelight.observe.trace import About
from moelight.optimizer.rehearse import Stage
from moelight.profiles.families import profile_from_dir
from moelight.profiles.workload import Workload
from moelight.runtime.measure import peak_rss_bytes
from moelight.weights.source import resolve_model

if TYPE_CHECKING:
    from moelight.engine.engine import Engine

LONGEST_SHOWN = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What a job is asked to do. None leaves the choice to the planner; a path of None is not written.

    A ``policy`` is run as it stands, on ``model``; otherwise the planner chooses one for the machine ``hw``. Memory is
    in bytes. ``sampling`` holds where a line does not say otherwise.
    """

    prompts: Path
    model: str = "demo"
    output: Path | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256, seed=0))
    device: str = "auto"
    host_memory: int | None = None
    device_memory: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    policy: Policy | None = None
    hw: str = "auto"
    token_ids: bool = False
    stats: Path | None = None
    trace: Path | None = None
    adapt: bool | None = None
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    expert_stats: Path | None = None
    save_expert_profile: Path | None = None

    @property
    def written(self) -> dict[str, Path | None]:
        """Every file that the job writes, by what is in it."""
        return {
            "output": self.output,
            "stats": self.stats,
            "trace": self.trace,
            "routing trace": self.experts.trace,
            "expert stats": self.expert_stats,
            "expert profile": self.save_expert_profile,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a job ended. ``first_error`` is the first line that was not served, if any."""

    completed: int
    failed: int
    stats: Stats
    first_error: BadLine | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A line that can be served, ready for the engine. ``number`` is its place among all rows."""

    number: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """What a row needs to know of its line once the prompt has become ids."""

    line: int
    custom_id: str | None
    shown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """All lines in order, the refused ones by place, and the rest as ids. ``context`` is the model's, in tokens."""

    lines: list[_Line]
    refused: dict[int, BadLine]
    asked: list[_Asked]
    context: int

    def room(self, asked: _Asked) -> int:
        """The most tokens this line can be answered with."""
        return max(1, min(asked.sampling.max_tokens, self.context - len(asked.token_ids)))

    def workload(self) -> Workload:
        """What the planner is told."""
        lengths = [min(len(asked.token_ids), self.context) for asked in self.asked]
        return Workload(
            num_requests=len(lengths),
            prompt_len=-(-sum(lengths) // len(lengths)),
            max_prompt_len=max(lengths),
            gen_len=max(self.room(asked) for asked in self.asked),
        )

    def refuse(self, number: int, error: InputError) -> None:
        """The line at ``number`` becomes an error row."""
        self.refused[number] = bad_line(self.lines[number].line, self.lines[number].custom_id, error)


def run_job(options: JobOptions, *, progress: Progress | None = None) -> JobResult:
    """Answer every line of ``options.prompts``.

    Raises:
        UserError: the job cannot be done at all: a path, the model, a budget or an option is at fault. An earlier
            output is as it was, unless the disk refuses stats or trace, which is said once the output is written.
    """
    told = progress if progress is not None else Progress()
    _check_paths(options)
    lines = read_lines(options.prompts, defaults=options.sampling)
    # A missing or empty file of prompts shows here, before a model is fetched from the hub.
    first = next(lines)
    directory = resolve_model(options.model)
    context = profile_from_dir(directory).max_positions
    batch = _encode(itertools.chain([first], lines), Tokenizer.from_dir(directory), context=context)
    with open_trace(options.trace) as trace:
        with _open_output(options.output) as write:
            stats = _answer(batch, options, told, write, trace)
        if options.stats is not None:
            with whole_file(options.stats, what="stats") as write:
                write(json.dumps(stats.as_dict(), indent=2).encode() + b"\n")
        if trace is not None:
            trace.finish()
    failed = len(batch.refused)
    return JobResult(
        completed=len(batch.lines) - failed,
        failed=failed,
        stats=stats,
        first_error=batch.refused[min(batch.refused)] if failed else None,
    )


def open_engine(options: JobOptions, workload: Workload) -> Engine:
    """Plan and load. Torch is imported here and not before, so that refusals come at once."""
    from moelight.engine.engine import Engine

    asked = options.expert_stats is not None or options.save_expert_profile is not None
    experts = replace(options.experts, record=asked)
    if options.policy is not None:
        policy = replace(options.policy, model=options.model)
        return Engine(policy, device=options.device, adapt=options.adapt, experts=experts)
    return Engine.from_pretrained(
        options.model,
        hw=options.hw,
        device=options.device,
        host_memory=options.host_memory,
        device_memory=options.device_memory,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        schedule=options.schedule,
        workload=workload,
        adapt=options.adapt,
        experts=experts,
    )


def _check_paths(options: JobOptions) -> None:
    seen: dict[Path, str] = {}
    if options.prompts.is_file():
        seen[options.prompts.resolve()] = "prompts"
    for what, path in options.written.items():
        if path is None:
            continue
        check_writable(path, what=what)
        if path.is_file() or not path.exists():
            other = seen.setdefault(path.resolve(), what)
            if other != what:
                raise InputError(f"{what} {path}: is the same file as the {other}", code="output_path")


def _encode(lines: Iterable[InputLine | BadLine], tokenizer: Tokenizer, *, context: int) -> _Batch:
    batch = _Batch(lines=[], refused={}, asked=[], context=context)
    for number, line in enumerate(lines):
        if isinstance(line, BadLine):
            batch.lines.append(_Line(line=line.line, custom_id=line.custom_id, shown=f"(line {line.line})"))
            batch.refused[number] = line
            continue
        shown = line.shown
        shown = shown if len(shown) <= LONGEST_SHOWN else shown[: LONGEST_SHOWN - 1] + "…"
        batch.lines.append(_Line(line=line.line, custom_id=line.custom_id, shown=shown))
        try:
            ids = tokenizer.encode(line.prompt) if line.prompt is not None else tokenizer.render(line.messages)
            if not ids:
                raise InputError("the prompt is empty: it holds no token", code="empty_prompt")
            batch.asked.append(_Asked(number=number, token_ids=tuple(ids), sampling=line.sampling))
        except InputError as error:
            batch.refuse(number, error)
    return batch


@contextlib.contextmanager
def _open_output(path: Path | None) -> Iterator[Callable[[bytes], None]]:
    if path is None:
        yield lambda _: None
        return
    with whole_file(path, what="output") as write:
        yield write


def _answer(
    batch: _Batch,
    options: JobOptions,
    told: Progress,
    write: Callable[[bytes], None],
    trace: RunTrace | None,
) -> Stats:
    """Write every row of ``batch`` through ``write``, each as soon as those before it are written."""
    rows = _Rows(batch.lines, told, write)
    if not batch.asked:
        rows.put_all(batch.refused)
        return _nothing_ran()
    with open_engine(options, batch.workload()) as engine:
        told.planned(engine.plan.why if engine.plan is not None else _told(engine.policy))
        accepted, requests = _accept(batch, engine)
        rows.put_all(batch.refused)
        expected = sum(batch.room(asked) for asked in accepted)
        changes: list[Adaptation] = []

        def on_pass() -> None:
            told.tokens(engine.progress_tokens, expected, engine.binding)
            if trace is not None and engine.timeline is not None:
                trace.add(engine.timeline)
            for change in engine.adaptations[len(changes) :]:
                changes.append(change)
                told.adapted(change.reason)

        for completion in engine.run(requests, on_pass=on_pass):
            asked = accepted[completion.index]
            expected -= batch.room(asked) - completion.completion_tokens
            custom_id = batch.lines[asked.number].custom_id
            rows.put(asked.number, completion_row(completion, custom_id=custom_id, token_ids=options.token_ids))
        stats = engine.stats
        _write_experts(engine, options)
        if trace is not None:
            trace.about = _predicted(engine, options, batch.workload())
    rows.check_complete()
    return stats


def _write_experts(engine: Engine, options: JobOptions) -> None:
    """What was learned of the experts."""
    if options.experts.trace is not None:
        engine.end_routing_trace()
    if options.expert_stats is not None:
        with whole_file(options.expert_stats, what="expert stats") as write:
            write(json.dumps(engine.expert_stats, indent=2).encode() + b"\n")
    if options.save_expert_profile is not None:
        engine.save_expert_profile(options.save_expert_profile)


def _told(policy: Policy) -> str:
    """The one line on a policy that was given."""
    return (
        f"as the policy says: N = {policy.batch_size} in micro-batches of {policy.micro_batch_size}, "
        f"{policy.schedule}, attention on the {policy.attention_device}, experts on {policy.ffn_device}"
    )


def _predicted(engine: Engine, options: JobOptions, workload: Workload) -> About:
    """What the ledger says of this policy, on the machine that was planned for."""
    from moelight.engine.planning import hardware_for

    hardware = hardware_for(options.hw, discrete=engine.policy.discrete)
    stage = Stage(engine.policy, engine.profile, hardware, workload)
    return about(stage, engine.policy.schedule, source="measured")


def _accept(batch: _Batch, engine: Engine) -> tuple[list[_Asked], list[Request]]:
    """The lines this engine can serve, numbered without gaps; the others become error rows."""
    accepted: list[_Asked] = []
    requests: list[Request] = []
    for asked in batch.asked:
        request = Request(index=len(requests), token_ids=asked.token_ids, sampling=asked.sampling)
        try:
            engine.check(request)
        except InputError as error:
            batch.refuse(asked.number, error)
            continue
        accepted.append(asked)
        requests.append(request)
    return accepted, requests


class _Rows:
    """Rows arrive in any order and leave in the order of the input."""

    def __init__(self, lines: list[_Line], told: Progress, write: Callable[[bytes], None]) -> None:
        self._lines = lines
        self._told = told
        self._write = write
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0

    def put_all(self, refused: dict[int, BadLine]) -> None:
        """The error rows."""
        for number, bad in refused.items():
            self.put(number, error_row(bad))

    def put(self, number: int, row: dict[str, Any]) -> None:
        """``row`` belongs at ``number``; it and those that waited for it are written."""
        self._waiting[number] = row
        while self._next in self._waiting:
            ready = self._waiting.pop(self._next)
            self._write(to_json_line(ready))
            self._told.row(self._lines[self._next].shown, ready)
            self._next += 1

    def check_complete(self) -> None:
        """Every line has its row, or the engine broke its promise."""
        if self._next != len(self._lines):
            raise MoelightError(f"line {self._lines[self._next].line} was never answered")


def _nothing_ran() -> Stats:
    return Stats(
        wall_s=0.0,
        load_s=0.0,
        prompt_tokens=0,
        completion_tokens=0,
        passes=0,
        peak_rss_bytes=peak_rss_bytes(),
        lanes={},
    )
