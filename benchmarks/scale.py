"""Jobs on clusters of 1 to 4,096 nodes on the virtual clock: efficiency, the driver's share, and the sizes of leases.

    python benchmarks/scale.py [--quick] [--plot docs/guides/ray.png]

The driver's seconds for an exchange and for a row are those that `ray_jobs.py --sections driver` measured. Tables:

    nodes    rows a node are the same: 10^6 to 10^9 rows in all, with failures and slow nodes
    ahead    efficiency by `LeaseSizes.ahead_s`, with the rows that a failure costs
    sync     the interval of commits that costs least, by failures of the driver (Young's formula)

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from moelight.integrations.ray.leases import LeaseSizes
from moelight.integrations.ray.simulation import ClusterSimulation, SimulatedCluster

NODE = SimulatedCluster(
    nodes=1, rows=1, batch_rows=512, row_s=128.0, row_tokens=256.0, slow_share=0.05, failures_per_hour=0.02, load_s=60.0
)  # four rows a second: a node with one GPU that streams a large model
ROWS_A_NODE = 250_000
COMMIT_S = 0.02


def by_nodes(nodes: list[int]) -> list[dict[str, Any]]:
    found = []
    for count in nodes:
        for each_rows in (ROWS_A_NODE, 1000):
            rows = max(count * each_rows, 1000)
            run = ClusterSimulation(replace(NODE, nodes=count, rows=rows)).run()
            found.append(
                {
                    "nodes": count,
                    "rows": rows,
                    "hours": round(run.seconds / 3600, 2),
                    "efficiency": round(run.efficiency, 3),
                    "driver_share": round(run.driver_share, 3),
                    "failures": run.failures,
                    "redone_rows": run.redone_rows,
                }
            )
            print(found[-1], flush=True)
    return found


def by_ahead(nodes: int) -> list[dict[str, Any]]:
    found = []
    for ahead_s in (0.5, 1.0, 2.0, 4.0, 16.0, 64.0, 256.0):
        cluster = replace(
            NODE, nodes=nodes, rows=nodes * 4000, batch_rows=32, row_s=8.0, sizes=LeaseSizes(ahead_s=ahead_s)
        )
        run = ClusterSimulation(cluster).run()
        found.append({"ahead_s": ahead_s, "efficiency": round(run.efficiency, 4), "redone_rows": run.redone_rows})
        print(found[-1], flush=True)
    return found


def by_failures() -> list[dict[str, Any]]:
    """The interval that costs least is sqrt(2 x seconds of a commit x seconds between failures)."""
    return [
        {"hours_between_failures": hours, "interval_s": round(math.sqrt(2 * COMMIT_S * hours * 3600), 1)}
        for hours in (0.1, 1, 24, 240)
    ]


def plot(path: Path, found: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for each_rows, what in ((ROWS_A_NODE, "250,000 rows a node"), (1000, "1,000 rows a node")):
        rows = [each for each in found if each["rows"] == max(each["nodes"] * each_rows, 1000)]
        axes.plot([each["nodes"] for each in rows], [each["efficiency"] for each in rows], "o-", label=what)
    long = [each for each in found if each["rows"] == max(each["nodes"] * ROWS_A_NODE, 1000)]
    driver = [each["driver_share"] for each in long]
    axes.plot([each["nodes"] for each in long], driver, "s--", color="grey", label="the driver at work")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("nodes of 4 rows a second")
    axes.set_ylabel("efficiency; share of the time")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="to 64 nodes")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    nodes = [1, 2, 4, 16, 64] if args.quick else [1, 2, 4, 16, 64, 256, 1024, 4096]
    found = {"nodes": by_nodes(nodes), "ahead": by_ahead(16), "sync": by_failures()}
    if args.plot is not None:
        plot(args.plot, found["nodes"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
