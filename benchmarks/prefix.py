"""What it is worth to compute a beginning that all prompts share once.

    python benchmarks/prefix.py --model DIR [--rows 16] [--shared 512] [--own 32] [--new-tokens 16] [--rounds 3]

``--rows`` prompts of random tokens begin with the same ``--shared`` ones and go on with ``--own`` ones each. In every
round an engine that shares blocks of the cache and one that does not are opened in turn, under the same plan, and
generate greedily. The tokens must be equal. ``ratio`` is the median over rounds of the seconds without over the seconds
with; ``row_ratio`` is the same for rows that went through the layers, which is all that there is to be saved. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from moelight import Engine, SamplingParams, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens = set()
    cached = 0
    for turn in range(2 * args.rounds):
        caching = turn % 2 == 0
        wall_s, result, hits = generate(args, caching=caching)
        seconds[caching].append(wall_s)
        tokens.add(result)
        cached = max(cached, hits)
        print(f"{'shared' if caching else 'whole':8}{wall_s:8.2f} s{hits:8} tokens found in the cache", flush=True)
    every = args.rows * (args.shared + args.own + args.new_tokens - 1)
    print(
        json.dumps(
            {
                "benchmark": "prefix",
                "model": args.model.name,
                **{name: getattr(args, name) for name in ("rows", "shared", "own", "new_tokens", "rounds")},
                "seconds": {"shared": statistics.median(seconds[True]), "whole": statistics.median(seconds[False])},
                "ratio": statistics.median(w / s for s, w in zip(seconds[True], seconds[False], strict=True)),
                "row_ratio": every / (every - cached),
                "cached_tokens": cached,
                "tokens_equal": len(tokens) == 1,
            }
        )
    )


def generate(args: argparse.Namespace, *, caching: bool) -> tuple[float, tuple[tuple[int, ...], ...], int]:
    """Seconds, tokens, and how many of the prompts' were found in the cache, by a fresh engine."""
    length = args.shared + args.own
    work = Workload(num_requests=args.rows, prompt_len=length, max_prompt_len=length, gen_len=args.new_tokens)
    with Engine.from_pretrained(
        args.model, device="cpu", workload=work, batch_size=args.rows, adapt=False, prefix_caching=caching
    ) as engine:
        draw = random.Random(0)
        first, *others = (
            [draw.randrange(3, engine.profile.vocab_size) for _ in range(count)]
            for count in (args.shared, *[args.own] * args.rows)
        )
        how = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
        result = engine.generate([first + other for other in others], how)
        stats = engine.stats
    return stats.wall_s, tuple(item.token_ids for item in result), stats.counts["prefix_cache_hits"]


if __name__ == "__main__":
    main()
