"""Experts that stay: what a policy costs, what it is worth on real routing, and whether it leaves the tokens alone.

    python benchmarks/experts.py [--sections value bound warm speed …] [--scratch DIR] [--models demo many]

    value      tokens per second, hits and bytes of every policy, with room for a quarter of the experts, disk-bound
    bound      of recorded routing, simulated: the default beside the best that there can be
    warm       a saved profile: hits of the first 64 tokens; what policies cost where all experts fit
    speed      `ExpertCache` alone: 2,048 tokens x top-8 over 64 experts, and single accesses
    language   reading and checking a `.moe` policy; the command's start
    attach     transformers' own models under the pager: the same tokens, and how fast

--models are the bundled model and a trained one of 64 experts (`models/many`), both with their experts padded with
zeros to megabytes, so that routing is real and the disk binds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from experts_sections import attach, bound, language, speed, value, warm

from moelight.runtime.measure import processor_name

SECTIONS = {
    "value": value.run,
    "bound": bound.run,
    "warm": warm.run,
    "speed": lambda _: speed.measure(),
    "language": lambda _: language.run(),
    "attach": lambda args: attach.figures(args.scratch),
}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as made:
        args.scratch = args.scratch or Path(made)
        args.scratch.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {name: SECTIONS[name](args) for name in args.sections}
    result = {"benchmark": "experts", "cpu": processor_name(), "threads": torch.get_num_threads(), **result}
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--scratch", type=Path, help="a directory on a disk, where padded models stay")
    parser.add_argument("--models", nargs="+", choices=value.MODELS, default=list(value.MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", nargs="+", choices=value.contestants())
    return parser.parse_args()


if __name__ == "__main__":
    main()
