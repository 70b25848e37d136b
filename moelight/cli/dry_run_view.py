"""Terminal view of a dry run: contents of the input, memory, predicted time, and the reason for the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from moelight.batch.forecast import Forecast
from moelight.batch.summary import ScanSummary
from moelight.cli.job_text import about_text, tokens_text
from moelight.cli.plan_view import memory_view
from moelight.cli.tables import bar, heading, indented, plain_table, printable, title
from moelight.observe.number_format import rate_or_count, seconds_text

_MOST_BUCKETS = 12
_WIDEST_BAR = 40


def print_forecast(console: Console, forecast: Forecast) -> None:
    """Print all of ``forecast``, on 80 columns or more."""
    for part in _parts(forecast, console.width):
        console.print(part)
        console.print()
    console.print(_ending(forecast))


def _parts(forecast: Forecast, width: int) -> Iterator[RenderableType]:
    summary, plan = forecast.summary, forecast.plan
    machine = "" if plan is None else plan.hardware
    head = title(forecast.model, machine) if machine else Text(printable(forecast.model), style="bold")
    yield Group(head, Text(printable(f"{forecast.input}: {forecast.detected}"), style="dim"))
    yield Group(heading("rows"), indented(_rows(forecast)))
    if summary.problems:
        yield Group(heading("problems"), indented(_problems(summary)))
    if summary.prompts:
        yield Group(heading("prompts by tokens"), indented(_histogram(summary.histogram, width)))
        yield Group(heading("work"), indented(_work(forecast)))
    if plan is not None:
        yield Group(heading("memory"), indented(memory_view(plan, width)))
        yield Group(heading("time, if every answer is as long as it may be"), indented(_time(forecast, width)))


def _rows(forecast: Forecast) -> RenderableType:
    summary = forecast.summary
    table = plain_table("count", "kind", numbers=("count",))
    table.show_header = False
    table.add_row(Text(f"{summary.rows:,}", style="bold"), "rows")
    for kind, count in sorted(summary.kinds.items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", printable(kind))
    if summary.refused:
        table.add_row(Text(f"{summary.refused:,}", style="red"), "will be error rows")
    return table


def _problems(summary: ScanSummary) -> RenderableType:
    table = plain_table("rows", "code", "first line", "says", numbers=("rows", "first line"))
    table.columns[3].no_wrap = False
    for code, found in sorted(summary.problems.items(), key=lambda item: -item[1].count):
        table.add_row(
            Text(f"{found.count:,}", style="red"), printable(code), f"{found.first_line:,}", printable(found.message)
        )
    return table


def _histogram(counts: Sequence[int], width: int) -> RenderableType:
    table = plain_table("tokens", "prompts", "", numbers=("tokens", "prompts"))
    buckets = [(1 << at, (2 << at) - 1, count) for at, count in enumerate(counts)]
    while buckets and not buckets[0][2]:
        del buckets[0]
    # Lengths may span many powers of two; the shortest buckets are joined because they cost least.
    if len(buckets) > _MOST_BUCKETS:
        joined = buckets[: len(buckets) - _MOST_BUCKETS + 1]
        first = (joined[0][0], joined[-1][1], sum(count for _, _, count in joined))
        buckets = [first, *buckets[len(joined) :]]
    most = max((count for _, _, count in buckets), default=0)
    room = max(12, min(_WIDEST_BAR, width - 36))
    for least, last, count in buckets:
        spoken = f"{least:,}" if least == last else f"{least:,} to {last:,}"
        table.add_row(spoken, f"{count:,}", bar(count / most, room, ground="grey15"))
    return table


def _work(forecast: Forecast) -> Text:
    summary = forecast.summary
    average = summary.prompt_tokens / summary.prompts
    lines = [
        f"{tokens_text(summary.prompt_tokens)} prompt tokens in {summary.prompts:,} prompts, "
        f"{average:,.0f} on average, {summary.max_prompt_len:,} at most",
        f"at most {tokens_text(summary.generated_tokens)} tokens to generate in {summary.sequences:,} answers, "
        f"{summary.max_gen_len:,} at most in one",
    ]
    if summary.samplings > 1:
        lines.append(f"{summary.samplings:,} different sampling parameters")
    return Text("\n".join(lines))


def _time(forecast: Forecast, width: int) -> RenderableType:
    table = plain_table("", "passes", "time", "", "busiest", numbers=("passes", "time"))
    total = sum(phase.seconds for phase in forecast.phases) or 1.0
    room = max(10, min(_WIDEST_BAR, width - 52))
    for phase in forecast.phases:
        table.add_row(
            phase.name,
            f"{max(1, round(phase.passes)):,}",
            seconds_text(phase.seconds),
            bar(phase.seconds / total, room, ground="grey15"),
            phase.binding,
        )
    return table


def _ending(forecast: Forecast) -> RenderableType:
    plan = forecast.plan
    if plan is None or forecast.predicted_s is None:
        return Text("not planned: a policy says how" if forecast.summary.served else "no row can be served")
    estimate = plan.estimate
    speed = f"{rate_or_count(estimate.tokens_per_s)} tokens/s"
    return Group(
        Text.assemble(
            (f"{about_text(forecast.predicted_s)} at most", "bold green"),
            f" ({speed} end to end), sooner where answers end early; the {estimate.binding} lane binds",
        ),
        Text(printable(plan.why), style="dim"),
        Text(printable(forecast.given), style="dim"),
    )
