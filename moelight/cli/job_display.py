"""Display of a job: live lines or log lines, a table of rows, the last line, and the forecast of ``--dry-run``."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from moelight import cli
from moelight.batch import job
from moelight.batch.forecast import Forecast
from moelight.batch.options import DONE, DONE_BEFORE, INTERRUPTED, JobOptions, JobResult
from moelight.batch.output import STANDARD_OUTPUT, writes_directly
from moelight.batch.progress import JobCounts, JobStart, Progress, ProgressFields, ProgressGroup
from moelight.batch.summary import ScanSummary
from moelight.batch.time_left import TimeLeft
from moelight.cli.plan_view import memory_view
from moelight.cli.tables import bar, machine_words, plain_table, printable, section, show, stacked, text, title
from moelight.core.units import format_bytes
from moelight.observe.number_format import rate_or_count, scaled_text, seconds_text, share_text
from moelight.observe.stats import Binding, RunStats

if TYPE_CHECKING:
    from moelight.integrations.ray.cluster import ClusterOptions

_MANY_TOKENS = 100_000
_MOST_ENGINES = 8


def about_text(seconds: float) -> str:
    """Format a duration as ``about 2 h 10 min``, rounded to the precision of a forecast."""
    if seconds < 4.5:
        return "a few seconds"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s"
    if seconds < 3570:
        return f"about {round(seconds / 60)} min"
    minutes = round(seconds / 60) if seconds < 10_800 else 10 * round(seconds / 600)
    if minutes < 48 * 60:
        return f"about {minutes // 60} h {minutes % 60} min" if minutes % 60 else f"about {minutes // 60} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"about {days} days {hours} h" if hours else f"about {days} days"


def predicted_text(seconds: float, machine: str, *, open_ended: bool = False) -> str:
    """Format the predicted ``seconds`` of a job with the hardware profile ``machine`` that they are predicted with."""
    condition = "answers are as long as expected" if open_ended else "no answer ends early"
    return f"{about_text(seconds)} by the profile of {machine_words(machine)} if {condition}"


def clock_text(seconds: float) -> str:
    """Format elapsed time as ``0:07`` or ``1:02:09``."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def tokens_text(count: float) -> str:
    """Format a number of tokens as ``16,384`` or ``1.23M``."""
    return f"{count:,.0f}" if count < _MANY_TOKENS else scaled_text(count)


def rows_text(counts: JobCounts) -> str:
    """Format the progress in rows as ``12,340/100,000 rows (12 %)``."""
    share = f" ({share_text(counts.done / counts.total)})" if counts.total else ""
    return f"{counts.done:,}/{counts.total:,} rows{share}"


def start_line(start: JobStart) -> str:
    """Return the start line: the input, the plan and the predicted time."""
    beside = [
        f"{start.refused:,} with errors" if start.refused else "",
        f"{start.resumed:,} done before" if start.resumed else "",
    ]
    rows, open_ended = "1 row" if start.total == 1 else f"{start.total:,} rows", start.open_ended
    read = [
        start.detected,
        rows + (f" ({', '.join(filter(None, beside))})" if any(beside) else ""),
        f"{tokens_text(start.prompt_tokens)} prompt tokens" if start.prompt_tokens else "",
        f"{_bound(open_ended)} {tokens_text(start.expected_tokens)} to generate" if start.expected_tokens else "",
        start.unlimited,
    ]
    predicted = ""
    if start.predicted_s is not None:
        predicted = predicted_text(start.predicted_s, start.machine, open_ended=open_ended)
    return "; ".join(filter(None, (f"{start.input}: {', '.join(filter(None, read))}", start.plan, predicted)))


def _bound(open_ended: bool) -> str:
    return "about" if open_ended else "at most"


def log_line(counts: JobCounts, left_s: float | None, binding: Binding | None = None) -> str:
    """Return the progress line: rows, failures, speed, binding lane and time left."""
    parts = (
        rows_text(counts),
        f"{counts.failed:,} failed" if counts.failed else "",
        *_speed_words(counts, binding),
        f"{about_text(left_s)} left" if left_s is not None and counts.state == "in_progress" else "",
    )
    return ", ".join(filter(None, parts))


def engine_lines(counts: JobCounts) -> list[str]:
    """Return a line for each of the slowest `_MOST_ENGINES` engines of a cluster, those that end last first."""
    engines = sorted(counts.engines, key=lambda engine: -(engine.eta_s or 0.0))[:_MOST_ENGINES]
    return [
        ", ".join(
            filter(
                None,
                (
                    f"{engine.name}: {engine.rows:,} rows",
                    engine.state if engine.state != "running" else f"{engine.tokens_per_s:,.0f} tok/s",
                    "" if engine.binding is None else f"{engine.binding.lane} {share_text(engine.binding.share)}",
                    ""
                    if engine.eta_s is None
                    else f"holds {engine.running + engine.queued:,}, {about_text(engine.eta_s)}",
                ),
            )
        )
        for engine in engines
    ]


def _speed_words(counts: JobCounts, binding: Binding | None) -> tuple[str, str]:
    speed = f"{counts.tokens_per_s:,.0f} tok/s" if counts.tokens_per_s else ""
    return speed, "" if binding is None else f"{binding.lane} {share_text(binding.share)}"


def end_line(stats: RunStats, *, completed: int, failed: int, output: str = "", generates: bool = True) -> str:
    """Return the end line: completions, tokens, speed and peak memory; ``output`` is the path of the rows. Of a job
    that does not generate, rows and tokens of prompts."""
    bad = f", {failed:,} failed" if failed else ""
    where = f" -> {output}" if output else ""
    rows, tokens, speed = f"{completed:,} completions", f"{stats.completion_tokens:,} tokens", stats.tokens_per_s
    if not generates:
        rows, tokens = f"{completed:,} rows", f"{stats.prompt_tokens:,} prompt tokens"
        speed = stats.prompt_tokens / stats.wall_s
    if drafts := _drafts_text(stats.counts):
        tokens += f", {stats.completion_tokens / max(1, stats.passes):.1f} a pass, {drafts},"
    return (
        f"{rows}{bad}, {tokens} in {seconds_text(stats.wall_s)} ({speed:,.0f} tok/s), load {stats.load_s:.1f} s, "
        f"peak memory {format_bytes(stats.peak_rss_bytes)}{where}"
    )


def _drafts_text(counts: Mapping[str, int]) -> str:
    """Accepted and drafted tokens by kind of draft; empty without drafts."""
    suffix = "_drafted_tokens"
    kinds = [name.removesuffix(suffix) for name in counts if name.endswith(suffix)]
    return ", ".join(
        f"{counts[f'{kind}_accepted_tokens']:,} of {counts[kind + suffix]:,} drafted by {kind}" for kind in kinds
    )


def interrupted_line(counts: JobCounts | None, *, output: str) -> str:
    """Return the line for an interrupted job: the rows kept, and the answers under way, which are computed again.

    ``counts`` is None if the job ended before it counted rows; ``output`` is empty if no rows are kept. With an output
    the command that resumes the job follows.
    """
    rows = "" if counts is None else f"{counts.done:,} of {counts.total:,} rows "
    if not output:
        answered = f": {rows}were answered" if rows else ""
        return f"interrupted{answered}; use -o FILE to be able to resume"
    lost = f"; {counts.running:,} answers were under way and are computed again" if counts and counts.running else ""
    return f"interrupted: {rows or 'the rows that were finished '}are kept in {output}{lost}; continue with:"


LOG_EVERY_S = 30.0
HELD_S = 5.0
_MOST_BUCKETS = 12
_WIDEST_BAR = 40


def run_and_report(options: JobOptions, *, as_table: bool, nodes: ClusterOptions | None = None) -> int:
    """Run the job, on ``nodes`` if given, show its progress and return the exit code of the program."""
    table = TableOfRows() if as_table else None
    rows_on_screen = options.output == STANDARD_OUTPUT and sys.stdout.isatty()
    eta = TimeLeft()
    with progress_view(eta, quiet=rows_on_screen) as view:
        watchers: list[Progress] = [view] if table is None else [view, table]
        try:
            result = job.run_job(
                options, progress=ProgressGroup(watchers), eta=eta, answer=_answer_on(nodes, shown=as_table)
            )
        except KeyboardInterrupt:
            view.say_last(interrupted_line(None, output=_file_of(options)), _command(options))
            return cli.INTERRUPTED
        for line, command in _last_lines(result, options):
            view.say_last(line, command)
    if table is not None:
        # Rows on stdout are read by programs, so the table goes to stderr.
        Console(stderr=options.output == STANDARD_OUTPUT).print(table.table())
    if result.first_error is not None:
        bad = f"{result.failed:,} of {result.total:,} lines were not served"
        _print(f"{bad}; the first is line {result.first_error.line}: {result.first_error.message}")
    if result.invalid or result.truncated:
        _print(_unstructured(result))
    for line in filter(None, (result.hint, *result.troubles)):
        _print(line)
    if result.state == INTERRUPTED:
        return cli.INTERRUPTED
    return cli.ERRORS if result.failed and result.state == DONE else 0


def _unstructured(result: JobResult) -> str:
    counts = [
        f"{result.invalid:,} do not have the structure asked for" if result.invalid else "",
        f"{result.truncated:,} end before it is complete (max_tokens or a stop)" if result.truncated else "",
    ]
    return f"of the structured answers, {' and '.join(filter(None, counts))}: error in their rows says where"


def _answer_on(nodes: ClusterOptions | None, *, shown: bool) -> job.Answer | None:
    if nodes is None:
        return None
    from moelight.integrations.ray.job import answer_on

    return answer_on(nodes, shown=shown)


def _plan_on(nodes: ClusterOptions | None) -> job.PlanEngines | None:
    if nodes is None:
        return None
    from moelight.integrations.ray.job import plan_on

    return plan_on(nodes)


def forecast_and_report(options: JobOptions, *, as_json: bool, nodes: ClusterOptions | None = None) -> int:
    """Read and plan the job, print the forecast and return the exit code of the program."""
    with progress_view(TimeLeft(), quiet=as_json) as view:
        forecast = job.forecast_job(options, progress=view, plan_engines=_plan_on(nodes))
    if as_json:
        print(json.dumps(forecast.as_dict()))
    else:
        print_forecast(Console(), forecast)
    return cli.ERRORS if forecast.summary.refused else 0


def _last_lines(result: JobResult, options: JobOptions) -> Iterator[tuple[str, Sequence[str]]]:
    """The last lines of a job, each with the arguments of the command that belongs to it, if any."""
    output = _file_of(options)
    if result.state == DONE_BEFORE:
        bad = f", {result.failed:,} failed" if result.failed else ""
        yield f"{output} is complete already: {result.completed:,} rows answered{bad}; --restart answers them anew", ()
        return
    if result.stats is not None and result.stats.passes:
        counted = {"completed": result.completed, "failed": result.failed}
        yield end_line(result.stats, **counted, output=output, generates=result.generates), ()
    if result.state == INTERRUPTED:
        counts = JobCounts(total=result.total, completed=result.completed, failed=result.failed, running=result.running)
        yield interrupted_line(counts, output=output), _command(options)


def _file_of(options: JobOptions) -> str:
    """Path of the output file; empty if rows are not kept in a file."""
    return "" if options.output is None or writes_directly(options.output) else str(options.output)


def _command(options: JobOptions) -> Sequence[str]:
    """The command line of this process without ``--restart``, so that it resumes the job; none if nothing is kept."""
    return ["moelight", *(word for word in sys.argv[1:] if word != "--restart")] if _file_of(options) else ()


def command_lines(command: Sequence[str], width: int) -> str:
    """Return ``command`` as a shell takes it, on lines of ``width`` characters where its arguments allow that."""
    lines, indent = [shlex.quote(command[0])], "    "
    for word in map(shlex.quote, command[1:]):
        if len(lines[-1]) + len(word) + 3 > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def progress_view(eta: TimeLeft, *, quiet: bool = False) -> View:
    """Return the view of a job on stderr, silent if ``quiet``; ``eta`` must receive the job's events before it."""
    if quiet:
        return View(eta)
    return Bar(Console(stderr=True), eta) if sys.stderr.isatty() else LogLines(eta)


class TableOfRows(Progress):
    """Progress watcher that collects the rows of a job as a table of prompts and completions."""

    def __init__(self) -> None:
        self._rows: list[ProgressFields] = []

    def row(self, shown: ProgressFields) -> None:
        self._rows.append(shown)

    def table(self) -> Table:
        """Return the rows in input order; a failed row shows its error."""
        table = Table(show_lines=True, header_style="bold", expand=False)
        table.add_column("prompt", overflow="fold", ratio=1)
        table.add_column("completion", overflow="fold", ratio=1)
        for shown in sorted(self._rows, key=lambda row: row.number):
            table.add_row(Text(printable(shown.prompt)), _answer(shown))
        return table


def _answer(shown: ProgressFields) -> Text:
    if shown.error is not None:
        return Text(f"error: {printable(shown.error)}", style="red")
    answer = Text(printable("\n\n".join(shown.texts)))
    if "length" in shown.finish_reasons:
        answer.append(" …", style="dim")
    return answer


class View(Progress):
    """State and events that all views share; by itself it prints nothing."""

    def __init__(self, eta: TimeLeft) -> None:
        self._eta = eta
        self._counts = JobCounts()
        self._binding: Binding | None = None
        self._start_plan = ""
        self._read = ""

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def say(self, line: str) -> None:
        """Print a permanent line."""

    def say_last(self, line: str, command: Sequence[str] = ()) -> None:
        """Print a line below all others, in place of live lines, and the ``command`` that it ends with."""

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        part = f", {share_text(min(1.0, read_bytes / total_bytes))}" if total_bytes else ""
        self._read = f"reading the input: {rows:,} rows{part}"

    def planning(self) -> None:
        self._read = "planning"

    def started(self, start: JobStart) -> None:
        self._start_plan, self._counts = start.plan, start.counts
        self.say(start_line(start))

    def planned(self, description: str) -> None:
        if description != self._start_plan:
            self.say(description)

    def adapted(self, reason: str) -> None:
        self.say(reason)

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:  # noqa: ARG002
        self._binding = binding or self._binding

    def counts(self, counts: JobCounts) -> None:
        self._counts = counts
        self._binding = counts.binding or self._binding

    def interrupting(self) -> None:
        self.say("ending after the pass that is running; Ctrl-C again ends at once")


class LogLines(View):
    """View for pipes and logs: a line on stderr every `LOG_EVERY_S` seconds, from a thread, since a pass may be long.

    Lines of the first `HELD_S` seconds are held back: a job that fails at once prints only the reason.
    """

    def __init__(self, eta: TimeLeft) -> None:
        super().__init__(eta)
        self._held: list[str] | None = []
        self._lock = threading.RLock()  # reentrant: the handler of Ctrl-C may print while the main thread prints
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moelight-log", daemon=True)

    def __enter__(self) -> LogLines:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            self.release()

    def say(self, line: str) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                _print(line)

    def say_last(self, line: str, command: Sequence[str] = ()) -> None:
        self.release()
        self.say(f"{line} {shlex.join(command)}" if command else line)

    def release(self) -> None:
        """Print the lines that were held back, and hold no more lines back."""
        with self._lock:
            held, self._held = self._held, None
            for line in held or ():
                _print(line)

    def tell(self) -> None:
        if self._counts.total:
            self.say(log_line(self._counts, self._eta.remaining_s, self._binding))
            for line in engine_lines(self._counts):
                self.say(f"  {line}")
        elif self._read:
            self.say(self._read)

    def _run(self) -> None:
        if self._over.wait(HELD_S):
            return
        self.release()
        while not self._over.wait(LOG_EVERY_S):
            self.tell()


def _print(line: str) -> None:
    # A closed log must not end a job, and neither must a line that the handler of Ctrl-C prints inside another one,
    # which Python refuses with a RuntimeError.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(printable(f"moelight: {line}"), file=sys.stderr, flush=True)


class Bar(View):
    """View on a terminal: two live lines at its bottom, permanent lines above them."""

    def __init__(self, console: Console, eta: TimeLeft) -> None:
        super().__init__(eta)
        self._console = console
        self._doing = "reading the input"
        self._began_s = time.monotonic()
        self._reached = 0.0
        self._tokens = (0.0, 0.0)
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.drawn, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        super().reading(rows, read_bytes, total_bytes)
        self._doing = self._read

    def planning(self) -> None:
        super().planning()
        self._doing = self._read

    def started(self, start: JobStart) -> None:
        super().started(start)
        self._doing = "loading the model"

    def planned(self, description: str) -> None:
        super().planned(description)
        self._doing = ""

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        super().tokens(done, expected, binding)
        likely = max(done, self._eta.expected_tokens or expected)
        self._tokens = (done, likely)
        run = done / likely if likely else 0.0
        before = self._counts.resumed / self._counts.total if self._counts.total else 0.0
        # The expected total grows and shrinks as lengths are learned; the bar must not move backwards.
        self._reached = max(self._reached, before + (1 - before) * run)

    def say(self, line: str) -> None:
        self._console.print(Text(printable(line), style="dim"))

    def say_last(self, line: str, command: Sequence[str] = ()) -> None:
        self._live.stop()
        self.say(line)
        if command:
            self._console.print(Text(printable(command_lines(command, self._console.width))), soft_wrap=True)

    def drawn(self) -> RenderableType:
        if self._doing:
            self._spinner.update(text=Text(printable(self._doing), style="dim"))
            return self._spinner
        counts, left = self._counts, self._eta.remaining_s
        finishing = counts.state == "finalizing"
        rows = f"{counts.done:,}/{counts.total:,} rows" if counts.total else ""
        ending = "finishing" if finishing else "" if left is None else f"{about_text(left)} left"
        reached = 1.0 if finishing else self._reached
        words = f"  {share_text(reached):>6}  {rows}  {ending}"
        first = bar(reached, max(6, min(_WIDEST_BAR, self._console.width - len(words) - 1))).append(words)
        done, likely = self._tokens
        elapsed = clock_text(max(counts.elapsed_s, time.monotonic() - self._began_s))
        tokens = f"{tokens_text(done)}/{tokens_text(likely)} tokens"
        parts = (tokens, *_speed_words(counts, self._binding), f"{elapsed} so far")
        second = Text("  ".join(filter(None, parts)), style="dim")
        if counts.failed:
            second.append(f"  {counts.failed:,} failed", style="red not dim")
        for line in (first, second):
            line.no_wrap, line.overflow = True, "ellipsis"
        engines = [Text(f"  {printable(line)}", style="dim") for line in engine_lines(counts)]
        return Group(first, second, *engines)


def print_forecast(console: Console, forecast: Forecast) -> None:
    """Print ``forecast``, on 80 columns or more."""
    show(console, *_parts(forecast, console.width))


def _parts(forecast: Forecast, width: int) -> Iterator[RenderableType]:
    summary, plan = forecast.summary, forecast.plan
    head = text((forecast.model, "bold")) if plan is None else title(forecast.model, plan.hardware)
    yield stacked(head, text((f"{forecast.input}: {forecast.detected}", "dim")))
    yield section("rows", _rows(summary))
    if summary.problems:
        yield section("problems", _problems(summary))
    if summary.notes:
        yield section("structured outputs", _notes(summary))
    if summary.prompts:
        yield section("prompts by tokens", _histogram(summary.histogram, width))
        yield section("work", _work(summary))
    if forecast.engines:
        yield section("engines", _engines(forecast))
        return
    if plan is None or forecast.predicted_s is None:
        yield text("not planned: a policy says how" if summary.served else "no row can be served")
        return
    yield section("memory", memory_view(plan, width))
    open_ended = summary.unlimited > 0
    length, others = ("expected", "later where they are longer") if open_ended else ("it may be", "")
    yield section(f"time, if every answer is as long as {length}", _time(forecast, width))
    yield text(
        (about_text(forecast.predicted_s), "bold green"),
        f" by the profile of {machine_words(plan.hardware)} ({rate_or_count(plan.estimate.tokens_per_s)} tokens/s end "
        f"to end), {', '.join(filter(None, ('sooner where answers end early', others)))}; the {plan.estimate.binding} "
        "lane binds",
        ("\n" + "\n".join(filter(None, (plan.why, forecast.given))), "dim"),
    )


def _rows(summary: ScanSummary) -> RenderableType:
    table = plain_table(">count", "kind", rows=[(text((f"{summary.rows:,}", "bold")), "rows")])
    table.show_header = False
    for kind, count in sorted(summary.kinds.items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", printable(kind))
    if summary.refused:
        table.add_row(text((f"{summary.refused:,}", "red")), "will be error rows")
    return table


def _problems(summary: ScanSummary) -> RenderableType:
    table = plain_table(">rows", "code", ">first line", "says")
    table.columns[3].no_wrap = False
    for code, problem in sorted(summary.problems.items(), key=lambda item: -item[1].count):
        count = text((f"{problem.count:,}", "red"))
        table.add_row(count, printable(code), f"{problem.first_line:,}", printable(problem.message))
    return table


def _notes(summary: ScanSummary) -> RenderableType:
    table = plain_table(">rows", ">first line", "says")
    table.columns[2].no_wrap = False
    for note, occurrence in summary.notes.items():
        table.add_row(f"{occurrence.count:,}", f"{occurrence.first_line:,}", printable(note))
    return table


def _histogram(counts: Sequence[int], width: int) -> RenderableType:
    table = plain_table(">tokens", ">prompts", "")
    buckets = [(1 << at, (2 << at) - 1, count) for at, count in enumerate(counts)]
    while buckets and not buckets[0][2]:
        del buckets[0]
    # Lengths may span many powers of two; the shortest buckets are joined because they cost least.
    while len(buckets) > _MOST_BUCKETS:
        (least, _, few), (_, last, more), *longer = buckets
        buckets = [(least, last, few + more), *longer]
    highest = max((count for _, _, count in buckets), default=0)
    room = max(12, min(_WIDEST_BAR, width - 36))
    for least, last, count in buckets:
        spoken = f"{least:,}" if least == last else f"{least:,} to {last:,}"
        table.add_row(spoken, f"{count:,}", bar(count / highest, room, ground="grey15"))
    return table


def _work(summary: ScanSummary) -> Text:
    average = summary.prompt_tokens / summary.prompts
    prompts, answers = (
        noun if count == 1 else f"{noun}s"
        for count, noun in ((summary.prompts, "prompt"), (summary.sequences, "answer"))
    )
    unlimited = f"\n{summary.limits_text}" if summary.limits_text else ""
    different = f"\n{summary.samplings:,} different sampling parameters" if summary.samplings > 1 else ""
    return text(
        f"{tokens_text(summary.prompt_tokens)} prompt tokens in {summary.prompts:,} {prompts}, "
        f"{average:,.0f} on average, {summary.max_prompt_len:,} at most\n"
        f"{_bound(summary.unlimited > 0)} {tokens_text(summary.generated_tokens)} tokens to generate in "
        f"{summary.sequences:,} {answers}, {max(summary.max_gen_len, summary.longest_answer):,} at most in one"
        f"{unlimited}{different}"
    )


def _time(forecast: Forecast, width: int) -> RenderableType:
    table = plain_table("", ">passes", ">time", "", "busiest")
    total = sum(phase.seconds for phase in forecast.phases) or 1.0
    room = max(10, min(_WIDEST_BAR, width - 52))
    for phase in forecast.phases:
        passes, drawn = f"{max(1, round(phase.passes)):,}", bar(phase.seconds / total, room, ground="grey15")
        table.add_row(phase.name, passes, seconds_text(phase.seconds), drawn, phase.binding)
    return table


def _engines(forecast: Forecast) -> Table:
    table = plain_table("engine", ">share", ">rows", ">tokens/s", "binding", ">time at most")
    for engine in forecast.engines:
        if engine.refused:
            table.add_row(engine.name, "–", "–", "–", printable(engine.refused), "–")
            continue
        seconds = "–" if engine.seconds is None else about_text(engine.seconds)
        table.add_row(
            engine.name,
            share_text(engine.share),
            f"{engine.rows:,}",
            rate_or_count(engine.tokens_per_s),
            engine.binding,
            seconds,
        )
    return table
