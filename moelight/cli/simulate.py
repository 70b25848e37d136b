"""``moelight simulate``: the passes of a policy on a virtual clock, under one schedule or all possible ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.cli import planning_options as ask
from moelight.cli.options import option, with_options
from moelight.cli.tables import (
    machine_words,
    open_console,
    plain_table,
    print_json,
    section,
    show,
    stacked,
    text,
    title,
)
from moelight.core.schedule import Lane
from moelight.observe.number_format import rate_or_count, seconds_text, share_text

if TYPE_CHECKING:
    from rich.table import Table

    from moelight.core.policy import Policy
    from moelight.optimizer.simulation import PassRun, SimulatedRun, SimulationSetup

ALL = "all"
_MOST_BARS = 250


@dataclass(frozen=True, kw_only=True)
class NodeArguments:
    """The options of a job on a simulated Ray cluster."""

    nodes: int | None = option("Simulate a whole job on a cluster with this many nodes.", min=1)
    rows: int | None = option("Number of rows of the cluster job; defaults to the workload's requests.", min=1)
    failures: float = option("Failures per node and hour.", metavar="N", min=0.0, default=0.0)
    slow: float = option(
        "Fraction of the nodes that run at half speed.", metavar="SHARE", min=0.0, max=1.0, default=0.0
    )
    load: float = option("Seconds to load an engine.", metavar="SECONDS", min=0.0, default=60.0)


@with_options(without=("estimator", *ask.FORMATS))
def simulate_command(
    *,
    model: ask.OptionalModel = None,
    asked: ask.PlanningOptions,
    cluster: NodeArguments,
    policy: ask.PolicyFile = None,
    schedule: str | None = option("Schedule to simulate, or all; defaults to the policy's.", metavar="NAME|all"),
    passes: int = option("Number of consecutive decode passes.", min=1, max=1000, default=3),
    acceptance: ask.Acceptance = None,
    trace: Path | None = option("File to write a Perfetto trace of the best schedule to.", metavar="FILE.json"),
    plot: Path | None = option("File to draw the last pass to: .png, .svg or .pdf.", metavar="FILE"),
    as_json: ask.Json = False,
) -> None:
    """Run a policy's passes on a virtual clock.

    The policy is the planner's, or that of --policy. With --nodes: a job of --rows on a Ray cluster of such machines.
    """
    from moelight.batch.output import check_writable
    from moelight.optimizer.simulation import SimulationSetup
    from moelight.scheduler import SCHEDULES

    if schedule not in (None, ALL):
        SCHEDULES.get(schedule)
    for label, path in {"trace": trace, "plot": plot}.items():
        if path is not None:
            check_writable(path, label=label)
    if plot is not None:
        from moelight.observe.plots import check_suffix

        check_suffix(plot)
    question, chosen = ask.read_question_or_policy(policy, model, asked)
    if cluster.nodes is not None:
        _simulate_cluster(question, chosen, cluster, as_json=as_json)
        return
    stage = SimulationSetup(chosen or question.plan().policy, question.model, question.hardware, question.workload)
    names = stage.schedules() if schedule == ALL else (schedule or stage.policy.schedule,)
    runs = sorted((stage.simulated_run(name, passes=passes) for name in names), key=lambda run: -run.tokens_per_s)
    if plot is not None:
        _plot(plot, question, runs)
    if trace is not None:
        _write_trace(trace, stage, runs[0])
    gain = None if acceptance is None else stage.drafts(acceptance)
    if as_json:
        print_json(simulation_as_dict(stage, runs) | ({} if gain is None else {"drafts": asdict(gain)}))
    else:
        written = [f"{label}: {path}" for label, path in {"trace": trace, "figure": plot}.items() if path is not None]
        _print(stage, runs, "\n".join([*([] if gain is None else [ask.draft_text(gain)]), *written]))


def _simulate_cluster(question: ask.Question, chosen: Policy | None, nodes: NodeArguments, *, as_json: bool) -> None:
    """Print the simulated job on ``nodes.nodes`` engines, each with the plan of the question."""
    from moelight.integrations.ray.simulation import ClusterSimulation, SimulatedCluster
    from moelight.optimizer.plan import policy_as_dict
    from moelight.optimizer.simulation import SimulationSetup

    workload = question.workload
    stage = SimulationSetup(chosen or question.plan().policy, question.model, question.hardware, workload)
    run = stage.simulated_run(stage.policy.schedule)
    batch_rows = stage.policy.batch_size
    cluster = SimulatedCluster(
        nodes=nodes.nodes or 1,
        rows=nodes.rows or workload.num_requests,
        batch_rows=batch_rows,
        row_s=batch_rows * workload.gen_len / run.tokens_per_s,
        row_tokens=float(workload.gen_len),
        failures_per_hour=nodes.failures,
        slow_share=nodes.slow,
        load_s=nodes.load,
    )
    result = ClusterSimulation(cluster).run()
    figures = {
        "nodes": cluster.nodes,
        "rows": cluster.rows,
        "seconds": result.seconds,
        "efficiency": result.efficiency,
        "tokens_per_s": cluster.rows * workload.gen_len / result.seconds,
        "engine_tokens_per_s": run.tokens_per_s,
        "driver_share": result.driver_share,
        "failures": result.failures,
        "redone_rows": result.redone_rows,
        "stolen_rows": result.stolen_rows,
    }
    if as_json:
        print_json({"policy": policy_as_dict(stage.policy), "hardware": stage.hardware.name, "cluster": figures})
        return
    table = plain_table("nodes", ">rows", ">time", ">efficiency", ">tokens/s", ">driver", ">failures", ">redone rows")
    table.add_row(
        f"{cluster.nodes:,}",
        f"{cluster.rows:,}",
        seconds_text(result.seconds),
        share_text(result.efficiency),
        rate_or_count(figures["tokens_per_s"]),
        share_text(result.driver_share),
        f"{result.failures:,}",
        f"{result.redone_rows:,}",
    )
    how = f"N = {batch_rows:,} on each node, {rate_or_count(run.tokens_per_s)} tokens/s alone"
    show(
        open_console(),
        stacked(title(stage.model.name, stage.hardware.name), text((how, "dim"))),
        section("simulated job", table),
    )


def simulation_as_dict(stage: SimulationSetup, runs: Sequence[SimulatedRun]) -> dict[str, Any]:
    """Return the simulated runs as plain values (seconds, bytes, shares), best schedule first."""
    from moelight.optimizer.plan import policy_as_dict

    return {
        "policy": policy_as_dict(stage.policy),
        "hardware": stage.hardware.name,
        "schedules": [
            {
                "schedule": run.schedule,
                "estimate": {
                    "pass_s": run.estimate.pass_s,
                    "tokens_per_s": run.estimate.tokens_per_s,
                    "lanes": dict(run.estimate.lanes),
                },
                "tokens_per_s": run.tokens_per_s,
                "decode": _pass_as_dict(run.steady),
                "with_prompts": None if run.with_prompts is None else _pass_as_dict(run.with_prompts),
            }
            for run in runs
        ],
    }


def _pass_as_dict(run: PassRun) -> dict[str, Any]:
    return {
        "pass_s": run.seconds,
        "decode_tokens": run.decode_tokens,
        "prompt_tokens": run.prompt_tokens,
        "decode_tokens_per_s": run.tokens_per_s,
        "lanes": {
            str(lane): {"busy_s": busy, "share": busy / run.seconds, "bytes": run.lane_bytes.get(lane, 0)}
            for lane, busy in run.busy_s.items()
        },
        "binding": str(run.binding),
        "idle_share": run.idle_share,
    }


def _write_trace(path: Path, stage: SimulationSetup, run: SimulatedRun) -> None:
    from moelight.batch.output import whole_file
    from moelight.batch.trace_header import trace_header
    from moelight.observe.trace import write_trace

    header = trace_header(stage, run.schedule, source="simulated")
    with whole_file(path, label="trace") as write:
        write_trace(write, run.timelines, header)


def _plot(path: Path, question: ask.Question, runs: Sequence[SimulatedRun]) -> None:
    """Plot layers from the middle of the pass, as many as leave the bars legible."""
    from moelight.observe.plots import excerpt, plot_timelines
    from moelight.optimizer.simulation import layer_starts

    layers = question.model.num_layers
    crowd = max(len(run.steady.timeline.spans) for run in runs) / layers
    shown = min(layers, max(1, round(_MOST_BARS / crowd)))
    first = (layers - shown) // 2
    subject = "a decode pass" if shown == layers else f"{shown} of the {layers} layers of a decode pass"
    heading = f"{subject[0].upper()}{subject[1:]}: {question.model.name} on {machine_words(question.hardware.name)}"
    rows = []
    for run in runs:
        timeline, starts = run.steady.timeline, layer_starts(run.steady.timeline)
        if shown < layers:
            timeline = excerpt(timeline, starts[first], starts.get(first + shown, timeline.end_s))
        rows.append((run.schedule, timeline))
    plot_timelines(path, rows, title=heading)


def _print(stage: SimulationSetup, runs: Sequence[SimulatedRun], written: str) -> None:
    policy = stage.policy
    how = (
        f"N = {policy.batch_size:,} in micro-batches of {policy.micro_batch_size:,}; attention on the "
        f"{policy.attention_device}, experts on {policy.ffn_device}"
    )
    show(
        open_console(),
        stacked(title(stage.model.name, stage.hardware.name), text((how, "dim"))),
        section("simulated" if len(runs) == 1 else "simulated, best first", _speeds(runs)),
        section("lanes at work in a decode pass, %", _lanes(runs)),
        text((written, "dim")) if written else None,
    )


def _speeds(runs: Sequence[SimulatedRun]) -> Table:
    table = plain_table("order", ">decode pass", ">estimated", ">tokens/s", ">with prompts", ">end to end")
    for run in runs:
        first = "–" if run.with_prompts is None else seconds_text(run.with_prompts.seconds)
        steady = run.steady
        table.add_row(
            run.schedule,
            seconds_text(steady.seconds),
            seconds_text(run.estimate.pass_s),
            rate_or_count(steady.tokens_per_s),
            first,
            rate_or_count(run.tokens_per_s),
        )
    return table


def _lanes(runs: Sequence[SimulatedRun]) -> Table:
    used = [lane for lane in Lane if any(lane in run.steady.busy_s for run in runs)]
    table = plain_table("order", *(f">{lane}" for lane in used), ">binding lane idle")
    for run in runs:
        steady, cells = run.steady, []
        for lane in used:
            share = 100 * steady.busy_s.get(lane, 0.0) / steady.seconds
            number = f"{share:.0f}" if share >= 1 else f"{share:.1f}"
            cells.append(text((number, "bold yellow" if lane is steady.binding else "")))
        table.add_row(run.schedule, *cells, f"{steady.binding} {share_text(steady.idle_share)}")
    return table
