"""``moelight roofline``: roofs and turning points of a machine, and the work of a policy under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moelight.cli import planning_options as ask

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moelight.hrm.roofline import Roofline

_Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figure: .png, .svg or .pdf.")]


def roofline(
    model: ask.OptionalModel = None,
    hw: ask.Hw = ask.AUTO,
    workload: ask.WorkloadName = None,
    prompt_len: ask.PromptLen = None,
    max_prompt_len: ask.MaxPromptLen = None,
    gen_len: ask.GenLen = None,
    num_requests: ask.NumRequests = None,
    fix: ask.Fix = None,
    policy: ask.PolicyFile = None,
    plot: _Plot = None,
    as_json: ask.Json = False,
    no_cache: ask.NoCache = False,
) -> None:
    """Show roofs, turning points, and what binds a policy.

    The policy is the planner's, or that of --policy.
    """
    from moelight.hrm.roofline import roofline_of

    question, chosen = ask.read_question_or_policy(
        policy,
        hw=hw,
        model=model,
        workload=workload,
        prompt_len=prompt_len,
        max_prompt_len=max_prompt_len,
        gen_len=gen_len,
        num_requests=num_requests,
        fix=fix,
        no_cache=no_cache,
    )
    found = roofline_of(question.hardware, question.model, chosen or question.plan().policy, question.workload)
    if plot is not None:
        from moelight.batch.output import check_writable
        from moelight.observe.roofline_plot import write_roofline

        check_writable(plot, what="plot")
        write_roofline(plot, found)
    if as_json:
        typer.echo(json.dumps(roofline_as_dict(found), indent=2))
    else:
        _print(found, plot)


def roofline_as_dict(found: Roofline) -> dict[str, Any]:
    """Return ``found`` as plain values: flop/s, bytes/s, flop per byte."""
    return {
        "machine": found.machine,
        "model": found.model,
        "batch_size": found.batch_size,
        "micro_batch_size": found.micro_batch_size,
        "levels": [
            {
                "name": level.name,
                "processor": level.processor,
                "peak_flops": level.peak_flops,
                "bandwidth": level.bandwidth,
                "link_bandwidth": level.link_bandwidth,
            }
            for level in found.chain
        ],
        "work": [
            {
                "work": point.work,
                "level": point.level,
                "home": point.home,
                "intensity": point.intensity,
                "home_intensity": point.home_intensity,
                "flops": point.flops,
                "bound": point.bound,
            }
            for point in found.points
        ],
        "turning_points": [
            {
                "name": mark.name,
                "near": mark.near,
                "far": mark.far,
                "far_intensity": mark.far_intensity,
                "flops": mark.flops,
            }
            for mark in found.marks
        ],
    }


def _print(found: Roofline, plot: Path | None) -> None:
    from rich.text import Text

    from moelight.cli.tables import heading, indented, open_console, printable, title

    console = open_console()
    console.print(title(found.model, found.machine))
    sizes = f"N = {found.batch_size:,} sequences in micro-batches of μ = {found.micro_batch_size:,}"
    console.print(Text(sizes, style="dim"))
    blocks = {
        "roofs": _roofs(found),
        "decoding under the policy, in flop per byte": _work(found),
        "turning points": _marks(found),
    }
    for words, block in blocks.items():
        console.print()
        console.print(heading(words))
        console.print(indented(block))
    if plot is not None:
        console.print()
        console.print(Text(f"figure: {printable(str(plot))}", style="dim"))


def _roofs(found: Roofline) -> RenderableType:
    from moelight.cli.tables import plain_table
    from moelight.observe.number_format import flops_text, rate_text

    heads = ("level", "compute", "memory", "link from the next")
    table = plain_table(*heads, numbers=heads[1:])
    for level in found.chain:
        compute = f"{flops_text(level.peak_flops)} ({level.processor.upper()})" if level.peak_flops else "–"
        link = rate_text(level.link_bandwidth) if level.link_bandwidth else "–"
        table.add_row(level.name, compute, rate_text(level.bandwidth), link)
    return table


def _work(found: Roofline) -> RenderableType:
    from moelight.cli.tables import plain_table
    from moelight.observe.number_format import flops_text

    heads = ("work", "on", "from", "here", "at home", "attains", "bound by")
    table = plain_table(*heads, numbers=heads[3:6])
    for point in found.points:
        bound = {"link": f"link from {point.home}", "memory": f"{point.level} memory", "compute": "compute"}[
            point.bound
        ]
        here, home = f"{point.intensity:,.1f}", f"{point.home_intensity:,.1f}"
        table.add_row(point.work, point.level, point.home, here, home, flops_text(point.flops), bound)
    return table


def _marks(found: Roofline) -> RenderableType:
    from moelight.cli.tables import plain_table
    from moelight.observe.number_format import flops_text

    table = plain_table("", "flop/byte", "at", "", numbers=("flop/byte", "at"))
    for mark in found.marks:
        meaning = {
            "P1": f"below, {mark.far} computes rather than ships",
            "P2": f"below, the link from {mark.far} binds",
            "balance": "above, not N but μ must grow",
        }[mark.name]
        table.add_row(mark.name, f"{mark.far_intensity:,.1f}", flops_text(mark.flops), meaning)
    return table
