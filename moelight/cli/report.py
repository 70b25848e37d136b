"""``moelight report``: the figures of a trace on the terminal, and as one interactive HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.cli.options import argument, check_output, option, with_options, write_output
from moelight.cli.tables import machine_words, open_console, plain_table, print_json, show, stacked, text
from moelight.core.errors import InputError
from moelight.core.units import format_bytes
from moelight.observe.number_format import rate_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from moelight.observe.report import LaneReport, Report


@with_options()
def report(
    trace: Path = argument("TRACE", "Trace written by generate --trace or simulate --trace."),
    output: Path | None = option(
        "HTML file to write; defaults to TRACE with the suffix .html.", "--output", "-o", metavar="FILE.html"
    ),
    as_json: bool = option(
        "Print one JSON object, and write the HTML page only if -o is given.", "--json", default=False
    ),
) -> None:
    """Compare a trace with its prediction, lane by lane, and attribute the idle time of the busiest lane.

    Prints tables, and writes a page with the same figures and a Gantt chart that zooms and pans.
    """
    from moelight.batch.output import STANDARD_OUTPUT
    from moelight.observe.report import report_of
    from moelight.observe.report_page import page_text
    from moelight.observe.trace import read_trace

    page = output if output is not None or as_json else trace.parent / f"{trace.stem}.html"
    if page is not None and page.resolve() == trace.resolve():
        raise InputError(f"output {page}: is the same file as the trace", code="output_path")
    if trace.is_file():
        check_output(page, as_json=as_json)
    recording = read_trace(trace)
    analysis = report_of(recording)
    if page is not None:
        write_output(page, page_text(analysis, recording, title=trace.name))
    if as_json:
        print_json(analysis.as_dict())
    elif page is not None and page != STANDARD_OUTPUT:
        _print(analysis, page)


def _print(analysis: Report, page: Path) -> None:
    about = analysis.about
    name = str(about.policy.get("model", ""))
    where = f" on {machine_words(about.hardware)}" if about.hardware else ""
    passes = f"{len(analysis.passes):,} {'pass' if len(analysis.passes) == 1 else 'passes'}"
    head = (f"{name}{where} · " if name else "", "bold")
    says = f"The median pass took {seconds_text(analysis.pass_s)}"
    if analysis.predicted_pass_s is not None and analysis.error is not None:
        than = "longer" if analysis.error >= 0 else "less"
        says += (
            f", {share_text(abs(analysis.error))} {than} than the predicted {seconds_text(analysis.predicted_pass_s)}"
        )
    binding = analysis.binding
    says += f". {binding.lane} was the binding lane, at work for {share_text(binding.busy_share)} of the run."
    show(
        open_console(),
        stacked(text(head, f"{passes} {analysis.source}, {seconds_text(analysis.wall_s)}"), text(says)),
        _table(analysis),
        stacked(*_bubbles(analysis)),
        text((f"page: {page}", "dim")),
    )


def _table(analysis: Report) -> Table:
    figures = ("predicted", analysis.source, "off by", "bytes", "rate", "of roof", "busy")
    table, none = plain_table("lane", *(f">{figure}" for figure in figures)), text(("–", "dim"))
    for lane in analysis.lanes:
        error = lane.error
        table.add_row(
            text((lane.lane, "bold")),
            none if lane.predicted_s is None else seconds_text(lane.predicted_s),
            seconds_text(lane.busy_s),
            none if error is None else text((share_text(error, signed=True), "red" if lane.far_off else "")),
            format_bytes(round(lane.bytes)) if lane.bytes else none,
            none if lane.bytes_per_s is None else rate_text(lane.bytes_per_s),
            none if lane.share_of_roof is None else share_text(lane.share_of_roof),
            share_text(lane.busy_share),
        )
    return table


def _bubbles(analysis: Report) -> Iterator[RenderableType]:
    """Yield the idle time of the binding lane by cause, and the idle time of the other lanes."""

    def rest(lane: LaneReport) -> str:
        return f"{seconds_text(lane.idle_s)} ({share_text(1 - lane.busy_share)})"

    binding = analysis.binding
    if analysis.bubbles:
        yield text((f"{binding.lane} stood still for {rest(binding)}, because of", "bold"))
        table = plain_table("cause", ">seconds", ">of run", ">times", ">longest", ">before pass, layer")
        for cause, bubble in analysis.bubbles.items():
            share, longest = share_text(bubble.seconds / analysis.wall_s), seconds_text(bubble.longest_s)
            position = "the end" if bubble.pass_number < 0 else f"{bubble.pass_number}, {max(bubble.layer, 0)}"
            table.add_row(cause, seconds_text(bubble.seconds), share, f"{bubble.count:,}", longest, position)
        yield table
    else:
        yield text(f"{binding.lane} never stood still.")
    others = [f"{lane.lane} {rest(lane)}" for lane in analysis.lanes if lane is not binding]
    if others:
        yield text(f"The others stood still: {', '.join(others)}.")
