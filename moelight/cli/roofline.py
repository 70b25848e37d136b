"""``moelight roofline``: roofs and turning points of a machine, and the work of a policy under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.cli import planning_options as ask
from moelight.cli.options import option, with_options
from moelight.cli.tables import open_console, plain_table, print_json, section, show, stacked, text, title
from moelight.observe.number_format import flops_text, rate_text

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.hrm.roofline import Roofline


@with_options(without=("estimator", *ask.LIMITS.values(), *ask.FORMATS))
def roofline(
    *,
    model: ask.OptionalModel = None,
    asked: ask.PlanningOptions,
    policy: ask.PolicyFile = None,
    plot: Path | None = option("File to draw the figure to: .png, .svg or .pdf.", metavar="FILE"),
    as_json: ask.Json = False,
) -> None:
    """Show roofs, turning points, and what binds a policy.

    The policy is the planner's, or that of --policy. Roofs are the speeds that the planner counts with: measured ones,
    or the shares of a data sheet's figures that long work sustains.
    """
    from moelight.hrm.roofline import roofline_of

    if plot is not None:
        from moelight.batch.output import check_writable
        from moelight.observe.plots import check_suffix, write_roofline

        check_suffix(plot)
        check_writable(plot, label="plot")
    question, chosen = ask.read_question_or_policy(policy, model, asked)
    roofs = roofline_of(question.hardware, question.model, chosen or question.plan().policy, question.workload)
    if plot is not None:
        write_roofline(plot, roofs)
    if as_json:
        print_json(roofline_as_dict(roofs))
        return
    sizes = f"N = {roofs.batch_size:,} sequences in micro-batches of μ = {roofs.micro_batch_size:,}"
    show(
        open_console(),
        stacked(title(roofs.model, roofs.machine), text((sizes, "dim"))),
        section("roofs, as far as they are sustained", _roofs(roofs)),
        section("decoding under the policy, in flop per byte", _work(roofs)),
        section("turning points", _marks(roofs)),
        None if plot is None else text((f"figure: {plot}", "dim")),
    )


def roofline_as_dict(roofs: Roofline) -> dict[str, Any]:
    """Return ``roofs`` as plain values: flop/s, bytes/s, flop per byte."""
    return {
        "machine": roofs.machine,
        "model": roofs.model,
        "batch_size": roofs.batch_size,
        "micro_batch_size": roofs.micro_batch_size,
        "levels": [asdict(level) for level in roofs.stated],
        "sustained": [asdict(level) for level in roofs.chain],
        "work": [asdict(point) for point in roofs.points],
        "turning_points": [asdict(mark) for mark in roofs.marks],
    }


def _roofs(roofs: Roofline) -> Table:
    table = plain_table("level", ">compute", ">memory", ">link from the next")
    for level, stated in zip(roofs.chain, roofs.stated, strict=True):
        unit = level.processor.upper()
        compute = f"{_of_stated(level.peak_flops, stated.peak_flops, flops_text)} ({unit})" if level.peak_flops else "–"
        memory = _of_stated(level.bandwidth, stated.bandwidth, rate_text)
        link = _of_stated(level.link_bandwidth, stated.link_bandwidth, rate_text) if level.link_bandwidth else "–"
        table.add_row(level.name, compute, memory, link)
    return table


def _of_stated(sustained: float, stated: float, words: Callable[[float], str]) -> str:
    """Return ``sustained``, and the figure that the profile states where they differ."""
    here, nominal = words(sustained), words(stated)
    if sustained == stated:
        return here
    amount, _, unit = here.partition(" ")
    return f"{amount if nominal.endswith(f' {unit}') else here} of {nominal}"


def _work(roofs: Roofline) -> Table:
    table = plain_table("work", "on", "from", ">here", ">at home", ">attains", "bound by")
    for point in roofs.points:
        bounds = {"link": f"link from {point.home}", "memory": f"{point.level} memory", "compute": "compute"}
        figures = (f"{point.intensity:,.1f}", f"{point.home_intensity:,.1f}", flops_text(point.flops))
        table.add_row(point.work, point.level, point.home, *figures, bounds[point.bound])
    return table


def _marks(roofs: Roofline) -> Table:
    table = plain_table("", ">flop/byte", ">at", "")
    for mark in roofs.marks:
        meanings = {
            "P1": f"below, {mark.far} computes rather than ships",
            "P2": f"below, the link from {mark.far} binds",
            "balance": "above, not N but μ must grow",
        }
        table.add_row(mark.name, f"{mark.far_intensity:,.1f}", flops_text(mark.flops), meanings[mark.name])
    return table
