"""Experts that stay: what a policy costs, what it is worth on real routing, and whether it leaves the tokens alone.

    python benchmarks/experts.py [--sections value speed attach] [--scratch DIR] [--models demo many]

    value      tokens per second, hits and bytes of every policy, with room for a quarter of the experts, disk-bound
    speed      `ExpertCache` alone: 2,048 tokens x top-8 over 64 experts, and single accesses
    attach     transformers' own models under the pager: the same tokens, and how fast

--models are the bundled model and a trained one of 64 experts (`models/many`), both with their experts padded with
zeros to megabytes, so that routing is real and the disk binds. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from experts_sections import attach, speed, value
from runner.run import add_sections, run, run_sections

SECTIONS = {
    "value": value.run,
    "speed": lambda _: speed.measure(),
    "attach": lambda args: attach.figures(args.scratch),
}


def main() -> None:
    run("experts", __doc__, _options, _measure, rounds=3)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    args.scratch.mkdir(parents=True, exist_ok=True)
    return run_sections(SECTIONS, args.sections, args)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, SECTIONS)
    parser.add_argument("--models", nargs="+", choices=value.MODELS, default=list(value.MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--contestants", nargs="+", choices=value.contestants())


if __name__ == "__main__":
    main()
