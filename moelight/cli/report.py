"""``moelight report``: the figures of a trace on the terminal, and as one interactive HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moelight.observe.bubbles import Bubble
    from moelight.observe.report import LaneReport, Report

_Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="What generate --trace or simulate --trace wrote.")]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="The page; TRACE with .html if not given.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; the page only where -o names it.")]
_FAR_OFF = 0.25


def report(trace: _Trace, output: _Output = None, as_json: _Json = False) -> None:
    """Hold a trace against its prediction, lane by lane, and say what the busiest one waited for.

    Prints tables, and writes a page with the same figures and a Gantt chart to look around in.
    """
    from moelight.batch.output import STANDARD_OUTPUT, check_writable, whole_file
    from moelight.core.errors import InputError
    from moelight.observe.report import report_of
    from moelight.observe.report_page import page_text
    from moelight.observe.trace_reading import read_trace

    page = output if output is not None or as_json else trace.with_suffix(".html")
    if page is not None and page.resolve() == trace.resolve():
        raise InputError(f"output {page}: is the same file as the trace", code="output_path")
    if page == STANDARD_OUTPUT and as_json:
        raise InputError("--json and -o - contradict each other: both print", code="output_path")
    if page is not None and trace.is_file():
        check_writable(page, what="output")
    recording = read_trace(trace)
    found = report_of(recording)
    if page is not None:
        with whole_file(page, what="output") as write:
            for piece in page_text(found, recording, title=trace.name):
                write(piece.encode())
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    elif page is not None and page != STANDARD_OUTPUT:
        _print(found, page)


def _print(found: Report, page: Path) -> None:
    from moelight.cli.tables import open_console

    console = open_console()
    for part in _parts(found, page):
        console.print(part)


def _parts(found: Report, page: Path) -> list[RenderableType]:
    from rich.text import Text

    from moelight.cli.tables import machine_words, printable
    from moelight.observe.number_format import seconds_text, share_text

    about = found.about
    name = str(about.policy.get("model", "")) if about is not None else ""
    where = f" on {machine_words(about.hardware)}" if about is not None and about.hardware else ""
    passes = f"{len(found.passes):,} {'pass' if len(found.passes) == 1 else 'passes'}"
    head = Text(f"{printable(name)}{where} · " if name else "", style="bold")
    head.append(f"{passes} {found.source}, {seconds_text(found.wall_s)}", style="not bold")
    says = f"The median pass took {seconds_text(found.pass_s)}"
    if found.predicted_pass_s is not None and found.error is not None:
        says += f"; {seconds_text(found.predicted_pass_s)} were predicted ({share_text(found.error, signed=True)})"
    binding = found.binding
    says += f". {binding.lane} was the binding lane, at work for {share_text(binding.busy_share)} of the run."
    written = Text(f"page: {printable(str(page))}", style="dim")
    return [head, Text(says), Text(), _table(found), Text(), *_bubbles(found), Text(), written]


def _table(found: Report) -> RenderableType:
    from moelight.cli.tables import plain_table

    heads = ("lane", "predicted", found.source, "off by", "bytes", "rate", "of roof", "busy")
    table = plain_table(*heads, numbers=heads[1:])
    for lane in found.lanes:
        table.add_row(*_cells(lane))
    return table


def _cells(lane: LaneReport) -> list[RenderableType]:
    from rich.text import Text

    from moelight.core.units import format_bytes
    from moelight.observe.number_format import rate_text, seconds_text, share_text

    none = Text("–", style="dim")
    error = lane.error
    far = error is not None and abs(error) > _FAR_OFF
    return [
        Text(lane.lane, style="bold"),
        none if lane.predicted_s is None else seconds_text(lane.predicted_s),
        seconds_text(lane.busy_s),
        none if error is None else Text(share_text(error, signed=True), style="red" if far else ""),
        format_bytes(round(lane.bytes)) if lane.bytes else none,
        none if lane.bytes_per_s is None else rate_text(lane.bytes_per_s),
        none if lane.share_of_roof is None else share_text(lane.share_of_roof),
        share_text(lane.busy_share),
    ]


def _bubbles(found: Report) -> list[RenderableType]:
    """Idle time of the binding lane by cause, and idle time of the other lanes."""
    from rich.text import Text

    from moelight.cli.tables import plain_table
    from moelight.observe.number_format import seconds_text, share_text

    def rest(lane: LaneReport) -> str:
        return f"{seconds_text(lane.idle_s)} ({share_text(1 - lane.busy_share)})"

    parts: list[RenderableType] = []
    binding = found.binding
    if not found.bubbles:
        parts.append(Text(f"{binding.lane} never stood still."))
    else:
        parts.append(Text(f"{binding.lane} stood still for {rest(binding)}, because of", style="bold"))
        heads = ("cause", "seconds", "of run", "times", "longest", "before pass, layer")
        table = plain_table(*heads, numbers=heads[1:])
        for cause, bubble in found.bubbles.items():
            share = share_text(bubble.seconds / found.wall_s)
            longest = seconds_text(bubble.longest_s)
            table.add_row(cause, seconds_text(bubble.seconds), share, f"{bubble.count:,}", longest, _place(bubble))
        parts.append(table)
    others = [f"{lane.lane} {rest(lane)}" for lane in found.lanes if lane is not binding]
    if others:
        parts.append(Text(f"The others stood still: {', '.join(others)}."))
    return parts


def _place(bubble: Bubble) -> str:
    """Pass and layer of the task that follows the longest piece of ``bubble``."""
    return "the end" if bubble.pass_number < 0 else f"{bubble.pass_number}, {max(bubble.layer, 0)}"
