"""What a person sees of a job: a bar on stderr while it runs, a table afterwards, one line on rows that failed.

Knows rich and terminals. Refuses to know how a job is done.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from moelight.batch import job, progress
from moelight.batch.options import DONE_BEFORE, INTERRUPTED, JobOptions, JobResult
from moelight.batch.output import STANDARD_OUTPUT
from moelight.batch.progress import Shown
from moelight.cli.tables import printable
from moelight.core.units import format_bytes
from moelight.observe.figures import share_text
from moelight.observe.stats import Binding

_SHORTEST_BAR, _LONGEST_BAR = 6, 30
_BESIDE_THE_BAR = 68  # columns that the words take in a run of ten thousand tokens


def run_and_report(options: JobOptions, *, as_table: bool) -> int:
    """Run the job and return the program's exit code."""
    table = TableOfRows() if as_table else None
    plain = table if table is not None else Plain()
    rows_on_screen = options.output == STANDARD_OUTPUT and sys.stdout.isatty()
    bar = Bar(Console(stderr=True), table) if sys.stderr.isatty() and not rows_on_screen else None
    with bar if bar is not None else contextlib.nullcontext():
        result = job.run_job(options, progress=bar or plain)
    if table is not None:
        # Rows on stdout are for programs: the table keeps out of their way.
        Console(stderr=options.output == STANDARD_OUTPUT).print(table.table())
    if bar is not None:
        bar.summarize(result, options.output)
    elif not rows_on_screen:
        for said in plain.said:
            _say(said)
    return _how_it_ended(result, options)


def _how_it_ended(result: JobResult, options: JobOptions) -> int:
    if result.state == DONE_BEFORE:
        _say(
            f"{options.output} is complete already: {result.completed} rows answered, {result.failed} failed; "
            "--restart answers them anew"
        )
        return 0
    if result.first_error is not None:
        first = result.first_error
        _say(
            f"{result.failed} of {result.total} lines were not served; the first is line {first.line}: {first.message}"
        )
    if result.state == INTERRUPTED:
        left = result.total - result.completed - result.failed
        _say(f"interrupted with {left} of {result.total} rows left; the same command goes on: {_command()}")
        return 130
    return 1 if result.failed else 0


def _command() -> str:
    """What was typed, without what would forget what is done."""
    return shlex.join(["moelight", *(each for each in sys.argv[1:] if each != "--restart")])


def _say(text: str) -> None:
    print(printable(f"moelight: {text}"), file=sys.stderr)


class Plain(progress.Progress):
    """Keeps how the model is run, for pipes and logs: there it is said once the job is done, so that a job that is
    refused, or breaks, leaves the one line that says why."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def planned(self, why: str) -> None:
        """Keep it."""
        self.said.append(why)

    def adapted(self, why: str) -> None:
        """Keep it."""
        self.said.append(why)


class TableOfRows(Plain):
    """Collects the rows of a job as a table of prompts beside completions."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Shown] = []

    def row(self, shown: Shown) -> None:
        """Keep it."""
        self._rows.append(shown)

    def table(self) -> Table:
        """The rows in the order of the input; a failed one shows its error."""
        table = Table(show_lines=True, header_style="bold", expand=False)
        table.add_column("prompt", overflow="fold", ratio=1)
        table.add_column("completion", overflow="fold", ratio=1)
        for shown in sorted(self._rows, key=lambda each: each.number):
            if shown.error is not None:
                answer = Text(f"error: {printable(shown.error)}", style="red")
            else:
                answer = Text(printable(shown.text))
                if shown.finish_reason == "length":
                    answer.append(" …", style="dim")
            table.add_row(Text(printable(shown.prompt)), answer)
        return table


class Bar(progress.Progress):
    """The progress bar. Rows are passed on to ``table``."""

    def __init__(self, console: Console, table: TableOfRows | None) -> None:
        self._table = table
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=max(_SHORTEST_BAR, min(_LONGEST_BAR, console.width - _BESIDE_THE_BAR))),
            _Tokens(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("loading", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def planned(self, why: str) -> None:
        """Say how the model will be run, and start counting."""
        self.adapted(why)
        self._progress.reset(self._task, description="generating")

    def adapted(self, why: str) -> None:
        """One line above the bar."""
        self._progress.console.print(Text(printable(why), style="dim"), soft_wrap=True)

    def tokens(self, done: int, expected: int, binding: Binding | None = None) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=max(done, expected), binding=binding)

    def row(self, shown: Shown) -> None:
        """Pass the row on."""
        if self._table is not None:
            self._table.row(shown)

    def interrupting(self) -> None:
        """One line above the bar."""
        self.adapted("ending after the pass that is running; Ctrl-C again ends at once")

    def summarize(self, result: JobResult, output: Path | None) -> None:
        """One line when all is done."""
        if (stats := result.stats) is None:
            return
        where = "" if output in (None, STANDARD_OUTPUT) else f" -> {output}"
        self._console.print(
            Text(
                printable(
                    f"{result.completed} completions, {stats.completion_tokens:,} tokens in {stats.wall_s:.1f} s "
                    f"({stats.tokens_per_s:,.0f} tok/s), load {stats.load_s:.1f} s, "
                    f"peak memory {format_bytes(stats.peak_rss_bytes)}{where}"
                ),
                style="dim",
            ),
            soft_wrap=True,
        )


class _Tokens(ProgressColumn):
    """``1,234/16,384 tokens  56 tok/s  disk 97 %``: the last is the busiest lane and its share of the last passes."""

    def render(self, task: Task) -> Text:
        """The column's text; empty until the first pass."""
        if task.total is None:
            return Text("")
        speed = "" if not task.speed else f"  {task.speed:,.0f} tok/s"
        binding: Binding | None = task.fields.get("binding")
        lane = "" if binding is None else f"  {binding.lane} {share_text(binding.share)}"
        return Text(f"{task.completed:,.0f}/{task.total:,.0f} tokens{speed}{lane}")
