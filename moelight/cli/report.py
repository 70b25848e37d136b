"""``moelight report``: a trace in figures on the terminal, and as one page to look around in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moelight.observe.report import LaneReport, Report

_Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="What generate --trace or simulate --trace wrote.")]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="The page; TRACE with .html if not given.")
]
_FAR_OFF = 0.25


def report(trace: _Trace, output: _Output = None) -> None:
    """Hold a trace against its prediction, lane by lane.

    Prints a table, and writes a page with the same figures and a Gantt chart to look around in.
    """
    from moelight.batch.output import check_writable, whole_file
    from moelight.core.errors import InputError
    from moelight.observe.report import report_of
    from moelight.observe.report_page import page_text
    from moelight.observe.trace_reading import read_trace

    page = trace.with_suffix(".html") if output is None else output
    if page.resolve() == trace.resolve():
        raise InputError(f"output {page}: is the same file as the trace", code="output_path")
    if trace.is_file():
        check_writable(page, what="output")
    recording = read_trace(trace)
    found = report_of(recording)
    with whole_file(page, what="output") as write:
        for piece in page_text(found, recording, title=trace.name):
            write(piece.encode())
    if str(page) != "-":
        _print(found, page)


def _print(found: Report, page: Path) -> None:
    from moelight.cli.tables import open_console

    console = open_console()
    for part in _parts(found, page):
        console.print(part)


def _parts(found: Report, page: Path) -> list[RenderableType]:
    from rich.text import Text

    from moelight.cli.tables import machine_words, printable
    from moelight.observe.figures import seconds_text, share_text

    about = found.about
    name = str(about.policy.get("model", "")) if about is not None else ""
    where = f" on {machine_words(about.hardware)}" if about is not None and about.hardware else ""
    passes = f"{len(found.passes):,} {'pass' if len(found.passes) == 1 else 'passes'}"
    head = Text(f"{printable(name)}{where} · " if name else "", style="bold")
    head.append(f"{passes} {found.source}, {seconds_text(found.wall_s)}", style="not bold")
    says = f"The median pass took {seconds_text(found.pass_s)}"
    if found.predicted_pass_s is not None and found.error is not None:
        says += f"; {seconds_text(found.predicted_pass_s)} were predicted ({share_text(found.error, signed=True)})"
    busiest = found.busiest
    says += f". {busiest.lane} was the busiest lane, at work for {share_text(busiest.share_of_pass)} of it."
    return [head, Text(says), Text(), _table(found), Text(), Text(f"page: {printable(str(page))}", style="dim")]


def _table(found: Report) -> RenderableType:
    from moelight.cli.tables import plain_table

    heads = ("lane", "predicted", found.source, "off by", "of pass", "bytes", "rate", "of roof")
    table = plain_table(*heads, numbers=heads[1:])
    for lane in found.lanes:
        table.add_row(*_cells(lane))
    return table


def _cells(lane: LaneReport) -> list[RenderableType]:
    from rich.text import Text

    from moelight.core.units import format_bytes
    from moelight.observe.figures import rate_text, seconds_text, share_text

    none = Text("–", style="dim")
    error = lane.error
    far = error is not None and abs(error) > _FAR_OFF
    return [
        Text(lane.lane, style="bold"),
        none if lane.predicted_s is None else seconds_text(lane.predicted_s),
        seconds_text(lane.busy_s),
        none if error is None else Text(share_text(error, signed=True), style="red" if far else ""),
        share_text(lane.share_of_pass),
        format_bytes(round(lane.bytes)) if lane.bytes else none,
        none if lane.bytes_per_s is None else rate_text(lane.bytes_per_s),
        none if lane.share_of_roof is None else share_text(lane.share_of_roof),
    ]
