"""What fewer bits cost: KL divergence of rounded forms, and tokens beside llama.cpp's on the same GGUF file.

    python benchmarks/quality.py --llamacpp DIR --llamacpp-source DIR [--sections kl tokens files] [--models DIR ...]
        [--forms int8 int4 Q8_0 Q4_K_M Q5_K_M Q6_K] [--kinds Q8_0 Q4_K_M] [--scratch DIR] [--hf-python PATH]

    kl        KL divergence of a checkpoint's rounded forms (--forms: what ``moelight convert --experts`` writes, in
              groups of 32, or types of GGUF files) from itself, activations as they are and in int8
    tokens    greedy tokens of moelight and llama.cpp on files of --kinds
    files     only makes those files, beside each of --models

The last line is JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quality_sections import kl, tokens
from runner.forms import add_llamacpp, llamacpp_of
from runner.run import add_sections, run, run_sections

from moelight.core.policy import ACTIVATIONS


def files(args: argparse.Namespace) -> dict[str, Any]:
    """GGUF files of llama.cpp's own making."""
    made = [str(llamacpp_of(args).gguf(model, kind)) for model in args.models or () for kind in args.kinds]
    print("\n".join(made))
    return {"files": made}


SECTIONS = {"kl": kl.run, "tokens": tokens.run, "files": files}


def main() -> None:
    run("quality", __doc__, _options, _measure)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return run_sections(SECTIONS, args.sections, args)


def _options(parser: argparse.ArgumentParser) -> None:
    add_sections(parser, SECTIONS, default=("kl", "tokens"))
    parser.add_argument("--models", type=Path, nargs="+")
    parser.add_argument("--forms", nargs="+", default=["int8", "int4", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
    parser.add_argument("--random-prompts", type=int, default=32, help="of random ids, for the KL divergence")
    parser.add_argument("--random-len", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["Q8_0", "Q4_K_M"], help="of GGUF files")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="what moelight computes in")
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS))
    parser.add_argument("--prompts", type=int, default=32, help="whose tokens are compared")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    add_llamacpp(parser)


if __name__ == "__main__":
    main()
