"""Jobs on clusters of 1 to 4,096 nodes on the virtual clock: efficiency, the driver's share, and the sizes of leases.

The driver's seconds for an exchange and for a row are those that the driver of `cluster.py` measured. Tables:

    nodes    10^6 to 10^9 rows, as many for each node, with failures and slow nodes: efficiency, and the driver's share
    leases   fast nodes that fail every hour, by `LeaseSizes.ahead_s` and by `LeaseSizes.least_s`
    sync     the interval of commits that costs least, by failures of the driver (Young's formula)
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from moelight.integrations.ray.leases import LeaseSizes
from moelight.integrations.ray.simulation import ClusterSimulation, SimulatedCluster

NODE = SimulatedCluster(
    nodes=1, rows=1, batch_rows=512, row_s=128.0, row_tokens=256.0, slow_share=0.05, failures_per_hour=0.02, load_s=60.0
)  # four rows a second: a node with one GPU that streams a large model
JOBS = ((4, 250_000), (16, 250_000), (4, 1000))  # rows a second of a node, and rows for each
COMMIT_S = 0.02


def by_nodes(nodes: list[int]) -> list[dict[str, Any]]:
    result = []
    for count in nodes:
        for speed, item in JOBS:
            node = replace(NODE, row_s=NODE.batch_rows / speed)
            run = ClusterSimulation(replace(node, nodes=count, rows=count * item)).run()
            result.append(
                {
                    "nodes": count,
                    "rows_per_s": speed,
                    "rows_each": item,
                    "hours": round(run.seconds / 3600, 2),
                    "efficiency": round(run.efficiency, 3),
                    "driver_share": round(run.driver_share, 3),
                    "failures": run.failures,
                    "redone_rows": run.redone_rows,
                }
            )
            print(result[-1], flush=True)
    return result


def by_leases(nodes: int = 256) -> list[dict[str, Any]]:
    """32 rows a second of each node, in passes of 32: what an engine holds beyond its passes is what it does between
    two exchanges."""
    node = replace(NODE, nodes=nodes, rows=nodes * 4000, batch_rows=32, row_s=1.0, load_s=0.0)
    sizes = [LeaseSizes(ahead_s=ahead_s) for ahead_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)]
    sizes += [LeaseSizes(least_s=least_s) for least_s in (0.05, 0.2, 1.0, 2.0)]
    result = []
    for size in sizes:
        run = ClusterSimulation(replace(node, failures_per_hour=1.0, back_s=10.0, sizes=size)).run()
        result.append(
            {
                "ahead_s": size.ahead_s,
                "least_s": size.least_s,
                "efficiency": round(run.efficiency, 4),
                "driver_share": round(run.driver_share, 3),
                "redone_rows": run.redone_rows,
                "stolen_rows": run.stolen_rows,
            }
        )
        print(result[-1], flush=True)
    return result


def by_failures() -> list[dict[str, Any]]:
    """The interval that costs least is sqrt(2 x seconds of a commit x seconds between failures)."""
    return [
        {"hours_between_failures": hours, "interval_s": round(math.sqrt(2 * COMMIT_S * hours * 3600), 1)}
        for hours in (0.1, 1, 24, 240)
    ]


def plot(path: Path, result: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.5, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for (speed, rows_each), style in zip(JOBS, ("o-", "s-", "^:"), strict=True):
        job = [item for item in result if (item["rows_per_s"], item["rows_each"]) == (speed, rows_each)]
        nodes = [item["nodes"] for item in job]
        label = f"{speed} rows/s, {rows_each:,} rows a node"
        above.plot(nodes, [item["efficiency"] for item in job], style, label=label)
        below.plot(nodes, [item["driver_share"] for item in job], style, label=label)
    above.set_ylabel("efficiency")
    below.set_ylabel("time that the driver works")
    below.axhline(1.0, color="grey", linewidth=1)
    below.set_xscale("log", base=4)
    below.set_xticks(nodes, [f"{node:,}" for node in nodes])
    below.minorticks_off()
    below.set_xlabel("nodes")
    for axes in (above, below):
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    above.legend(loc="center left", bbox_to_anchor=(0.0, 0.6))
    figure.savefig(path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All three tables; ``quick``: to 64 nodes."""
    nodes = [1, 2, 4, 16, 64] if args.quick else [1, 2, 4, 16, 64, 256, 1024, 4096]
    result = {"nodes": by_nodes(nodes), "leases": by_leases(), "sync": by_failures()}
    if args.plot is not None:
        plot(args.plot, result["nodes"])
    return result
