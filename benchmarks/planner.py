"""The planner: every shipped machine, model and workload, random questions, and published policies and figures.

    python benchmarks/planner.py [--sections plans attack published table] [--machines t4 l4 ...] [--models ...]
        [--workloads ...] [--samples N] [--processes 6] [--questions 2000] [--minutes 30] [--jobs 2] [--seed 0]
        [--plot FILE] [--markdown]

    plans       its time, how far its plan can be from the best, and whether any of 10,000 random policies is better
    attack      random questions, and 2,000 random policies over every key of a policy for each; it takes an hour
    published   the simulator beside published figures of five systems (--plot, --markdown); seconds on any machine
    table       the published policies, priced by the calibrated estimator: the table of docs/concepts/hrm.md

The last line is JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner_sections import ablation, plans, table
from runner.run import add_sections, run, run_sections

SECTIONS = {"plans": plans.run, "attack": plans.attack, "published": ablation.run, "table": table.run}


def main() -> None:
    run("planner", __doc__, _options, _measure, threads=False)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return run_sections(SECTIONS, args.sections, args)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, SECTIONS, default=("plans",))
    for kind, option in (("hardware", "--machines"), ("model", "--models"), ("workload", "--workloads")):
        names = sorted(path.stem for path in (plans.ROOT / f"{kind}_profiles").glob("*.yaml"))
        parser.add_argument(option, nargs="+", default=names)
    parser.add_argument("--samples", type=int, help="policies that fit, of each question [10000; of an attack 2000]")
    parser.add_argument("--processes", type=int, default=6, help="how many pairs to run as whole processes")
    parser.add_argument("--questions", type=int, default=2000, help="of an attack, at least")
    parser.add_argument("--minutes", type=float, default=30.0, help="of an attack, at least")
    parser.add_argument("--jobs", type=int, default=2, help="processes of an attack")
    parser.add_argument("--seed", type=int, default=0, help="of an attack")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw two layers of published orders to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the published rows as a table for the docs")


if __name__ == "__main__":
    main()
