"""Published figures of MoE-Lightning beside what the simulator makes of them: orders of work, idle time, forty runs.

Runs anywhere in seconds: nothing is measured, only simulated, with published latencies and rates (`published.py` says
which and why). ``--plot`` draws two steady layers of S1 and S2. ``--markdown`` prints the forty rows as a table for
docs/concepts/published.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from moelight.core.schedule import Lane, TaskKind
from moelight.core.timeline import Timeline
from moelight.core.units import GiB
from moelight.observe.plots import excerpt, plot_timelines
from moelight.scheduler.simulate import SteadyPass
from planner_sections.published import (
    GENERATED,
    PADDED,
    RAGGED,
    SETTINGS,
    Row,
    Run,
    prompts_of,
    rank_correlation,
    rows,
    step,
    step_s,
)

# Table 5: Mixtral 8x7B on the T4, padded MTBench, 128 new tokens, 36 x 14.
T4 = SETTINGS["S1"]
TABLE_5 = Run(
    schedule="cgopipe",
    micro_batch_size=36,
    num_micro_batches=14,
    link=T4.pinned(ragged=False),
    context=PADDED + 64,
    device_s=T4.device_s,
)
MEASURED = {"S1": 30.12, "S4": 16.816}
ORDERS = {
    "S1": TABLE_5,
    "S2": replace(TABLE_5, schedule="fastdecode"),
    "S4": replace(TABLE_5, schedule="flexgen", attention="gpu"),
    "S3": replace(TABLE_5, schedule="flexgen-c"),
}
LOOP = replace(ORDERS["S4"], schedule="flexgen-loop", link=T4.unpinned)
STEPS_TO_REALITY = {
    "S4, ideal, on the link of S1": ORDERS["S4"],
    "not pinned": replace(ORDERS["S4"], link=T4.unpinned),
    "everything waits after each micro-batch": replace(LOOP, merged=True),
    "attention and experts as layers of their own": LOOP,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """One policy under S1 and S2: seconds of a step and share of it in which the lane that binds S1 is idle."""

    policy: str
    lane: Lane
    s1: SteadyPass
    s2: SteadyPass

    @property
    def removed(self) -> float:
        """The share of S2's idle seconds that S1 does not have."""
        return 1 - self.s1.idle_s(self.lane) / self.s2.idle_s(self.lane)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Four tables."""
    orders, ratios, idle = order_figures(), ratio_figures(), idle_figures()
    print("Orders at one policy (T4, 36 x 14, padded, 128 new tokens), one link rate: tokens/s, s/step")
    for name, (rate, seconds) in orders.items():
        print(f"  {name}   {rate:6.2f} {seconds:7.2f}")
    print(f"S1 over S4, measured {MEASURED['S1'] / MEASURED['S4']:.2f}: what each step from the ideal form adds")
    for name, ratio in ratios.items():
        print(f"  {ratio:5.2f}  {name}")
    print("Idle seconds of the binding lane in one decode step")
    for item in idle:
        left, full = item.s1.idle_s(item.lane), item.s2.idle_s(item.lane)
        print(f"  {item.policy:38} {item.lane:7} S2 {full:5.2f}  S1 {left:5.2f}  removed {item.removed:4.0%}")
    result = rows()
    print(markdown(result) if args.markdown else table(result))
    agreement = agreement_figures(result)
    print("Rank correlation (Spearman), median and worst error")
    for name, (rho, middle, worst) in agreement.items():
        print(f"  {rho:6.3f} {middle:5.0%} {worst:5.0%}  {name}")
    if args.plot:
        draw(args.plot)
    return as_json(orders, ratios, idle, result, agreement)


def order_figures() -> dict[str, tuple[float, float]]:
    """Tokens per second of the whole run and seconds per step of each order, fastest link and kernels for all."""
    return {name: (whole_run(run), step_s(run)) for name, run in ORDERS.items()}


def ratio_figures() -> dict[str, float]:
    """S1 over S4 as S4 goes, step by step, from its ideal form to what ran."""
    first = whole_run(TABLE_5)
    return {name: first / whole_run(run) for name, run in STEPS_TO_REALITY.items()}


def whole_run(run: Run, gen_len: int = 128) -> float:
    """Tokens per second of a padded batch on the T4, prompts included."""
    prompts_s = prompts_of("S1", run.batch_size, ragged=False)
    return run.batch_size * gen_len / (prompts_s + (gen_len - 1) * step_s(run))


def idle_figures() -> list[Idle]:
    """The paper's policies, on the links that were measured and on the 16 GiB/s that its optimizer assumed."""
    l4 = SETTINGS["S2"]
    policies = {
        "T4 36 x 14, padded, 6.9 GiB/s": TABLE_5,
        "T4 164 x 14, 6.0 GiB/s": replace(
            TABLE_5, micro_batch_size=164, link=T4.pinned(ragged=True), context=RAGGED + 64
        ),
        "L4 324 x 14, 9.3 GiB/s": replace(
            TABLE_5, micro_batch_size=324, link=l4.pinned(ragged=True), context=RAGGED + 16, device_s=l4.device_s
        ),
    }
    policies |= {f"{name.rsplit(', ', 1)[0]}, 16 GiB/s": replace(run, link=16 * GiB) for name, run in policies.items()}
    result = []
    for name, run in policies.items():
        first, second = step(run), step(replace(run, schedule="fastdecode"))
        result.append(Idle(policy=name, lane=first.binding, s1=first, s2=second))
    return result


def agreement_figures(result: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """Spearman's rho, median and worst error: of all rows, of each system's, of each machine's; and of all rows had
    every link the 16 GiB/s that the paper's optimizer assumed."""
    groups = {"all forty rows, measured links": list(result)}
    groups |= {
        system: [row for row in result if row.system == system] for system in dict.fromkeys(r.system for r in result)
    }
    groups |= {where.name: [row for row in result if row.setting == key] for key, where in SETTINGS.items()}
    groups["all forty rows, 16 GiB/s for everybody"] = rows(link=16 * GiB)
    figures = {}
    for name, group in groups.items():
        errors = [abs(row.error) for row in group]
        figures[name] = rank_correlation(group), median(errors), max(errors)
    return figures


def table(result: Sequence[Row]) -> str:
    """The forty rows for people."""
    lines = ["Published and predicted tokens/s, Mixtral 8x7B, MTBench"]
    for row in result:
        label = f"  {row.setting} {row.system:18}{row.gen_len:4}{row.published:8.1f}{row.predicted:8.1f}"
        lines.append(f"{label}{row.error:+7.0%}  prompts {row.prompts_share:4.0%}")
    return "\n".join(lines)


def markdown(result: Sequence[Row]) -> str:
    """The forty rows as a table of published → predicted (error)."""
    lines = ["| machine | system | " + " | ".join(f"n = {n}" for n in GENERATED) + " |"]
    lines.append("|---|---|" + "--:|" * len(GENERATED))
    for setting, system in dict.fromkeys((row.setting, row.system) for row in result):
        selected = [row for row in result if (row.setting, row.system) == (setting, system)]
        cells = [f"{row.published:.1f} → {row.predicted:.1f} ({row.error:+.0%})".replace("-", "−") for row in selected]
        lines.append(f"| {SETTINGS[setting].name} | {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Two steady layers of S1 and S2 under the policy of table 5."""
    panels = [("S1, CGOPipe", "S1"), ("S2, weights as one block", "S2")]
    drawn = [(name, two_layers(step(ORDERS[order]).timeline)) for name, order in panels]
    plot_timelines(path, drawn, title="Two layers of a decode step: Mixtral 8x7B on a T4, μ = 36, N = 504")


def two_layers(timeline: Timeline) -> Timeline:
    """From the first hidden states of one layer in the middle of a pass to those of the second after it."""
    begun = {
        span.task.layer: span.start_s
        for span in timeline.spans
        if span.task.kind is TaskKind.LOAD_HIDDEN and span.task.micro_batch == 0
    }
    middle = len(begun) // 2
    return excerpt(timeline, begun[middle], begun[middle + 2])


def as_json(
    orders: dict[str, tuple[float, float]],
    ratios: dict[str, float],
    idle: Sequence[Idle],
    result: Sequence[Row],
    agreement: dict[str, tuple[float, float, float]],
) -> dict[str, Any]:
    """What the last line says."""
    return {
        "orders_tokens_per_s": {name: rate for name, (rate, _) in orders.items()},
        "s1_over_s4": {"measured": MEASURED["S1"] / MEASURED["S4"], **ratios},
        "idle_removed": {item.policy: item.removed for item in idle},
        "rows": [
            {
                "machine": row.setting,
                "system": row.system,
                "new_tokens": row.gen_len,
                "published": row.published,
                "predicted": row.predicted,
            }
            for row in result
        ],
        "rank_correlation": {name: rho for name, (rho, _, _) in agreement.items()},
        "median_error": {name: middle for name, (_, middle, _) in agreement.items()},
    }
