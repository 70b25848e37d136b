"""One checkpoint as it is and rounded, from the disk under one memory limit: what fewer bytes a number are worth.

    python benchmarks/quantised.py --model DIR [--experts int8 int4] [--memory 1GiB] [--planned 600MiB] [--prompts 64]
        [--prompt-len 16] [--new-tokens 8] [--rounds 2] [--scratch DIR]

`moelight convert` writes the rounded ones to the scratch directory, once. Contestants take turns, each a job, `moelight
generate`, in a process that really has no more memory than said (a control group, its page cache included), its files
out of the page cache before. The last line is JSON: of each contestant its bytes, tokens a second of generation, the
ratio to the checkpoint as it is within each round, and the busiest lanes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dense import plain_rate
from limited import limited_job

from moelight.core.units import parse_bytes
from moelight.runtime.measure import processor_name

AS_IT_IS = "as it is"


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.scratch) as temporary:
        position = Path(temporary)
        models = {AS_IT_IS: args.model} | {
            kind: rounded(args.model, kind, args.scratch or position) for kind in args.experts
        }
        prompts = _prompts(args, position / "prompts.jsonl")
        rounds = [_round(args, models, prompts, position, number) for number in range(args.rounds)]
    rows = [_row(name, model, rounds) for name, model in models.items()]
    result = {"benchmark": "quantised", "cpu": processor_name(), "plain_bytes_per_s": plain_rate(args.model)}
    print(json.dumps({**result, "model": args.model.name, "memory": args.memory, "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--experts", nargs="+", default=["int8", "int4"])
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--planned", default="600MiB")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="a directory on a disk, where rounded checkpoints stay")
    return parser.parse_args()


def rounded(model: Path, kind: str, position: Path) -> Path:
    """The checkpoint with ``kind`` experts, in ``position``: made unless it is there."""
    out = position / f"{model.name}-{kind}"
    command = [sys.executable, "-m", "moelight.cli.main", "convert", str(model), str(out), "--experts", kind]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def _prompts(args: argparse.Namespace, path: Path) -> Path:
    draw = random.Random(0)
    texts = ["".join(draw.choice("abcdefgh ") for _ in range(args.prompt_len)) for _ in range(args.prompts)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _round(
    args: argparse.Namespace, models: dict[str, Path], prompts: Path, position: Path, number: int
) -> dict[str, dict[str, Any]]:
    """All contestants once; every other round in the opposite order."""
    names = list(models)[:: -1 if number % 2 else 1]
    limits = {"memory": parse_bytes(args.memory), "planned": args.planned, "new_tokens": args.new_tokens}
    return {name: limited_job(models[name], prompts, position, **limits) for name in names}


def _row(name: str, model: Path, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    def rate(job: dict[str, Any]) -> float:
        return float(job["stats"]["tokens_per_s"])

    return {
        "experts": name,
        "bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
        "tokens_per_s": [rate(item[name]) for item in rounds],
        "over_as_it_is": statistics.median(rate(item[name]) / rate(item[AS_IT_IS]) for item in rounds),
        "peak_group_bytes": max(item[name]["peak_group_bytes"] or 0 for item in rounds),
        "lanes": rounds[-1][name]["stats"].get("lanes"),
    }


if __name__ == "__main__":
    main()
