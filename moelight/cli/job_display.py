"""What a person sees of a job: two lines on a terminal while it runs, a line every half minute elsewhere, a table of
rows where it is asked for, and a line at the end.

Knows rich and terminals. Refuses to know how a job is done.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from moelight.batch import job
from moelight.batch.options import DONE, DONE_BEFORE, INTERRUPTED, JobOptions, JobResult
from moelight.batch.output import STANDARD_OUTPUT, writes_directly
from moelight.batch.progress import JobCounts, JobStart, Progress, ProgressFields, ProgressGroup
from moelight.batch.time_left import TimeLeft
from moelight.cli.dry_run_view import print_forecast
from moelight.cli.job_text import (
    about_text,
    clock_text,
    end_line,
    interrupted_line,
    log_line,
    start_line,
    tokens_text,
)
from moelight.cli.tables import bar, printable
from moelight.observe.number_format import share_text
from moelight.observe.stats import Binding

LOG_EVERY_S = 30.0
HELD_S = 5.0
_BAR = 40
_REFRESHES_PER_S = 4
_INTERRUPTED = 130


def run_and_report(options: JobOptions, *, as_table: bool) -> int:
    """Run the job and return the program's exit code."""
    table = TableOfRows() if as_table else None
    rows_on_screen = options.output == STANDARD_OUTPUT and sys.stdout.isatty()
    with watching(quiet=rows_on_screen) as (eta, view):
        watchers = [each for each in (view, table) if each is not None]
        try:
            result = job.run_job(options, progress=ProgressGroup(watchers), eta=eta)
        except KeyboardInterrupt:
            if view is not None:
                view.say_last(interrupted_line(None, output=_file_of(options), command=_command()))
            return _INTERRUPTED
        if view is not None:
            for line in _last_lines(result, options):
                view.say_last(line)
    if table is not None:
        # Rows on stdout are for programs: the table keeps out of their way.
        Console(stderr=options.output == STANDARD_OUTPUT).print(table.table())
    if result.first_error is not None:
        bad = f"{result.failed:,} of {result.total:,} lines were not served"
        _print(f"{bad}; the first is line {result.first_error.line}: {result.first_error.message}")
    for trouble in result.troubles:
        _print(trouble)
    if result.state == INTERRUPTED:
        return _INTERRUPTED
    return 1 if result.failed and result.state == DONE else 0


def forecast_and_report(options: JobOptions, *, as_json: bool) -> int:
    """Read and plan the job, and say what it would be; return the program's exit code."""
    with watching(quiet=as_json) as (_, view):
        forecast = job.forecast_job(options, progress=view)
    if as_json:
        print(json.dumps(forecast.as_dict()))
    else:
        print_forecast(Console(), forecast)
    return 1 if forecast.summary.refused else 0


def _last_lines(result: JobResult, options: JobOptions) -> Iterator[str]:
    output = _file_of(options)
    if result.state == DONE_BEFORE:
        bad = f", {result.failed:,} failed" if result.failed else ""
        yield f"{output} is complete already: {result.completed:,} rows answered{bad}; --restart answers them anew"
        return
    if result.stats is not None and result.stats.passes:
        yield end_line(result.stats, completed=result.completed, failed=result.failed, output=output)
    if result.state == INTERRUPTED:
        counts = JobCounts(total=result.total, completed=result.completed, failed=result.failed)
        yield interrupted_line(counts, output=output, command=_command())


def _file_of(options: JobOptions) -> str:
    """The output, if it is a file, where rows are kept."""
    return "" if options.output is None or writes_directly(options.output) else str(options.output)


def _command() -> str:
    """What was typed, without what would forget what is done."""
    return shlex.join(["moelight", *(each for each in sys.argv[1:] if each != "--restart")])


@contextlib.contextmanager
def watching(*, quiet: bool = False) -> Iterator[tuple[TimeLeft, Bar | LogLines | None]]:
    """The time left, and whoever shows it on stderr: lines that move on a terminal, a log elsewhere, nobody if
    ``quiet``. Both must hear the job's events, the first one first."""
    eta = TimeLeft()
    if quiet:
        yield eta, None
        return
    view = Bar(Console(stderr=True), eta) if sys.stderr.isatty() else LogLines(eta)
    with view:
        yield eta, view


class TableOfRows(Progress):
    """Collects the rows of a job as a table of prompts beside completions."""

    def __init__(self) -> None:
        self._rows: list[ProgressFields] = []

    def row(self, shown: ProgressFields) -> None:
        """Keep it."""
        self._rows.append(shown)

    def table(self) -> Table:
        """The rows in the order of the input; a failed one shows its error."""
        table = Table(show_lines=True, header_style="bold", expand=False)
        table.add_column("prompt", overflow="fold", ratio=1)
        table.add_column("completion", overflow="fold", ratio=1)
        for shown in sorted(self._rows, key=lambda each: each.number):
            table.add_row(Text(printable(shown.prompt)), _answer(shown))
        return table


def _answer(shown: ProgressFields) -> Text:
    if shown.error is not None:
        return Text(f"error: {printable(shown.error)}", style="red")
    answer = Text(printable("\n\n".join(shown.texts)))
    if "length" in shown.finish_reasons:
        answer.append(" …", style="dim")
    return answer


class _View(Progress, ABC):
    """What both views know."""

    def __init__(self, eta: TimeLeft) -> None:
        self._eta = eta
        self._counts = JobCounts()
        self._binding: Binding | None = None
        self._told_plan = ""
        self._read = ""

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """Note how much is read."""
        part = f", {share_text(min(1.0, read_bytes / total_bytes))}" if total_bytes else ""
        self._read = f"reading the input: {rows:,} rows{part}"

    def started(self, start: JobStart) -> None:
        """The line at the start."""
        self._told_plan = start.plan
        self._counts = JobCounts(
            total=start.total, failed=start.refused, completed=start.resumed, resumed=start.resumed
        )
        self.say(start_line(start))

    def planned(self, why: str) -> None:
        """How the model will be run, if the line at the start has not said it."""
        if why != self._told_plan:
            self.say(why)

    def adapted(self, why: str) -> None:
        """One line."""
        self.say(why)

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:  # noqa: ARG002
        """Note the lane."""
        self._binding = binding or self._binding

    def counts(self, counts: JobCounts) -> None:
        """Note how far the job is."""
        self._counts = counts
        self._binding = counts.binding or self._binding

    def interrupting(self) -> None:
        """Say what Ctrl-C has begun."""
        self.say("ending after the pass that is running; Ctrl-C again ends at once")

    @abstractmethod
    def say(self, line: str) -> None:
        """A line that stays."""


class LogLines(_View):
    """Lines on stderr, for pipes and logs: one every half minute, from a thread of its own, since a pass may be long.

    For the first seconds what is said is held back, so that a job that is refused or breaks at once leaves the one line
    that says why.
    """

    def __init__(self, eta: TimeLeft) -> None:
        super().__init__(eta)
        self._held: list[str] | None = []
        self._lock = threading.RLock()  # Ctrl-C speaks within whatever the main thread was saying
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moelight-log", daemon=True)

    def __enter__(self) -> LogLines:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            self.release()

    def say(self, line: str) -> None:
        """Print it, or hold it back."""
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                _print(line)

    def say_last(self, line: str) -> None:
        """The line at the end."""
        self.release()
        self.say(line)

    def release(self) -> None:
        """Print what was held back, and hold no more."""
        with self._lock:
            held, self._held = self._held, None
            for line in held or ():
                _print(line)

    def tell(self) -> None:
        """The line on how far the job is."""
        if self._counts.total:
            self.say(log_line(self._counts, self._eta.remaining_s, self._binding))
        elif self._read:
            self.say(self._read)

    def _run(self) -> None:
        if self._over.wait(HELD_S):
            return
        self.release()
        while not self._over.wait(LOG_EVERY_S):
            self.tell()


def _print(line: str) -> None:
    # A log that nobody reads any more is no reason to end a job; nor is a line that Ctrl-C wants to put inside another,
    # which Python refuses as a RuntimeError.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(printable(f"moelight: {line}"), file=sys.stderr, flush=True)


class Bar(_View):
    """Two lines at the foot of a terminal."""

    def __init__(self, console: Console, eta: TimeLeft) -> None:
        super().__init__(eta)
        self._console = console
        self._doing = "reading the input"
        self._began_s = time.monotonic()
        self._reached = 0.0
        self._tokens = (0.0, 0.0)
        self._spinner = Spinner("dots")
        self._live = Live(
            console=console, get_renderable=self.drawn, refresh_per_second=_REFRESHES_PER_S, transient=True
        )

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def reading(self, rows: int, read_bytes: int, total_bytes: int | None = None) -> None:
        """Say how much is read."""
        super().reading(rows, read_bytes, total_bytes)
        self._doing = self._read

    def started(self, start: JobStart) -> None:
        """The line at the start, above."""
        super().started(start)
        self._doing = "loading the model"

    def planned(self, why: str) -> None:
        """Begin to count."""
        super().planned(why)
        self._doing = ""

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        """Move the bar."""
        super().tokens(done, expected, binding)
        likely = max(done, self._eta.expected_tokens or expected)
        self._tokens = (done, likely)
        run = done / likely if likely else 0.0
        before = self._counts.resumed / self._counts.total if self._counts.total else 0.0
        # What is expected grows and shrinks as lengths are learned; a bar that goes back looks broken.
        self._reached = max(self._reached, before + (1 - before) * run)

    def say(self, line: str) -> None:
        """Above the two lines."""
        self._console.print(Text(printable(line), style="dim"), soft_wrap=True)

    def say_last(self, line: str) -> None:
        """In their place."""
        self._live.stop()
        self.say(line)

    def drawn(self) -> RenderableType:
        """The two lines now."""
        if self._doing:
            self._spinner.update(text=Text(printable(self._doing), style="dim"))
            return self._spinner
        counts, left = self._counts, self._eta.remaining_s
        width = self._console.width
        rows = f"{counts.done:,}/{counts.total:,} rows" if counts.total else ""
        ending = "" if left is None else f"{about_text(left)} left"
        ending = "finishing" if counts.state == "finalizing" else ending
        reached = 1.0 if counts.state == "finalizing" else self._reached
        words = f"  {share_text(reached):>6}  {rows}  {ending}"
        first = bar(reached, max(6, min(_BAR, width - len(words) - 1))).append(words)
        elapsed = max(counts.elapsed_s, time.monotonic() - self._began_s)
        done, likely = self._tokens
        said = [f"{tokens_text(done)}/{tokens_text(likely)} tokens"]
        if counts.tokens_per_s:
            said.append(f"{counts.tokens_per_s:,.0f} tok/s")
        if self._binding is not None:
            said.append(f"{self._binding.lane} {share_text(self._binding.share)}")
        said.append(f"{clock_text(elapsed)} so far")
        second = Text("  ".join(said), style="dim")
        if counts.failed:
            second.append(f"  {counts.failed:,} failed", style="red not dim")
        for line in (first, second):
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(first, second)
