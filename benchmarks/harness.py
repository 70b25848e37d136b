"""lm-evaluation-harness: moelight's model class beside the harness's own for transformers models, on the same requests.

    python benchmarks/harness.py [--models DIR ...] [--questions 32] [--choices 4] [--generations 32] [--new-tokens 24]
        [--rounds 3] [--batch-sizes 1 4 16 64] [--experts eager grouped_mm] [--only scores texts] [--threads N]

Questions with several answers to choose from, each a request for the log-likelihood of an answer after its question
(``loglikelihood``), and texts to go on with (``generate_until``), of random words. The harness's own class gets the
best of the batch sizes and ways to compute experts, found on an eighth of the requests first, in bfloat16 like
moelight's. Each is a process of its own; both are warm when they take turns, every other round backwards. Loading and
planning are not counted, and said. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contestants import PAUSE_S
from kernel_cases.roofs import Roofs
from kernel_cases.threads import unbind
from make_checkpoint import make_shape

from moelight.runtime.measure import processor_name

WORKER = Path(__file__).parent / "generators" / "harness_generator.py"
MODELS = ("mixtral-0p9b", "qwen3moe-0p9b")
KINDS = ("scores", "texts")
OURS, THEIRS = "moelight", "hf"
ROOF_GIB = 0.5
TRIAL_SHARE = 8
Requests = list[list[Any]]


class Worker:
    """A process that holds one model class, loaded."""

    def __init__(self, task: dict[str, Any], scratch: Path) -> None:
        file = scratch / f"{task['who']}.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        self._log = (scratch / f"{task['who']}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, WORKER, file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=unbind,  # noqa: PLW1509 - it calls the system once and takes no lock
        )
        self.who, self._turns = task["who"], 0
        self.load_s = self._line()["load_s"]

    def answer(self, kind: str, count: int, batch_size: int = 0) -> dict[str, Any]:
        """The first ``count`` requests of that kind."""
        time.sleep(PAUSE_S)
        assert self._process.stdin is not None
        told = {"kind": kind, "turn": self._turns, "count": count, "batch_size": batch_size}
        self._turns += 1
        print(json.dumps(told), file=self._process.stdin, flush=True)
        return self._line()

    def close(self) -> None:
        """Its input ends, and so does it."""
        self._process.communicate()
        self._log.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.who} ended with {self._process.wait()}\n{self._log.read()[-2000:]}")
        return dict(json.loads(line))


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    asked = {"scores": questions(args.questions, args.choices), "texts": contexts(args.generations, args.new_tokens)}
    with tempfile.TemporaryDirectory() as scratch:
        models = args.models or [make_shape(name, Path(scratch)) for name in MODELS]
        result = [compare(model, asked, args, Path(scratch)) for model in models]
    print(json.dumps({"benchmark": "harness", "cpu": processor_name(), "models": result}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--generations", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def questions(many: int, choices: int) -> Requests:
    """``[context, continuation]`` each: as long as those of common multiple-choice tasks without examples."""
    draw = random.Random(0)
    asked = []
    for _ in range(many):
        context = _text(draw, 40, 120)
        asked += [[context, " " + _text(draw, 4, 16)] for _ in range(choices)]
    return asked


def contexts(many: int, new_tokens: int) -> Requests:
    """``[context, gen_kwargs]`` each."""
    draw = random.Random(1)
    return [[_text(draw, 40, 120), {"until": ["\n\n"], "max_gen_toks": new_tokens}] for _ in range(many)]


def _text(draw: random.Random, shortest: int, longest: int) -> str:
    """So many characters, which are tokens to the byte-level tokenizers of the models."""
    letters = "".join(draw.choice("abcdefghijklmnopqrst    ") for _ in range(draw.randint(shortest, longest)))
    return letters.strip() or "x"


def compare(model: Path, asked: dict[str, Requests], args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Both kinds of requests to one model, one after the other."""
    task = {"model": str(model), "threads": args.threads, **asked}
    best = {kind: ("", 0, float("inf")) for kind in args.only}
    for experts in args.experts:
        theirs = Worker({**task, "who": THEIRS, "experts": experts}, scratch)
        for kind in args.only:
            trial = _best_batch(theirs, kind, experts, asked[kind], args)
            best[kind] = min(best[kind], trial, key=lambda item: item[2])
        theirs.close()
    roofs = Roofs(ROOF_GIB, args.threads)
    result = {}
    for kind in args.only:
        experts, batch_size, _ = best[kind]
        pair = (
            Worker({**task, "who": OURS}, scratch),
            Worker({**task, "who": THEIRS, "experts": experts}, scratch),
        )
        roofs.read_seconds_per_byte()
        roofs.seconds_per_flop()
        turns = take_turns(pair, kind, len(asked[kind]), batch_size, args.rounds)
        roofs.read_seconds_per_byte()
        roofs.seconds_per_flop()
        for one in pair:
            one.close()
        result[kind] = _figures(turns, model, roofs) | {
            "hf_experts": experts,
            "hf_batch_size": batch_size,
            "load_s": {one.who: one.load_s for one in pair},
        }
        _print(model.name, kind, result[kind])
    return {"model": model.name, "threads": args.threads, "rounds": args.rounds, **result}


def _best_batch(
    theirs: Worker, kind: str, experts: str, asked: Requests, args: argparse.Namespace
) -> tuple[str, int, float]:
    """The batch size that answers an eighth of the requests, and no fewer than it, the fastest per request."""
    trials = []
    theirs.answer(kind, 4, 4)
    for batch_size in args.batch_sizes:
        count = min(len(asked), max(batch_size, len(asked) // TRIAL_SHARE))
        seconds = theirs.answer(kind, count, batch_size)["seconds"] / count
        print(f"{kind}: {experts}, batch size {batch_size}: {1 / seconds:.2f} requests/s", file=sys.stderr)
        trials.append((experts, batch_size, seconds))
    return min(trials, key=lambda item: item[2])


def take_turns(
    pair: Sequence[Worker], kind: str, count: int, batch_size: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Warm both, then one turn each a round, every other one backwards."""
    for one in pair:
        one.answer(kind, count if one.who == OURS else batch_size, batch_size)
    turns: dict[str, list[dict[str, Any]]] = {one.who: [] for one in pair}
    for number in range(rounds):
        for one in pair if number % 2 == 0 else reversed(pair):
            turns[one.who].append(one.answer(kind, count, batch_size))
            print(f"round {number + 1}: {kind}: {one.who}: {turns[one.who][-1]['seconds']:.2f} s", file=sys.stderr)
    return turns


def _figures(turns: dict[str, list[dict[str, Any]]], model: Path, roofs: Roofs) -> dict[str, Any]:
    ours, theirs = turns[OURS], turns[THEIRS]
    ratios = [slow["seconds"] / fast["seconds"] for slow, fast in zip(theirs, ours, strict=True)]
    seconds = statistics.median(turn["seconds"] for turn in ours)
    roof = {"read_bytes_per_s": statistics.median(roofs.reads), "bf16_flops": statistics.median(roofs.products)}
    answers = list(zip(ours[-1]["answers"], theirs[-1]["answers"], strict=True))
    scored = isinstance(answers[0][0], list)
    return {
        "requests": len(answers),
        **ours[-1]["tokens"],
        "seconds": {OURS: seconds, THEIRS: statistics.median(turn["seconds"] for turn in theirs)},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cores": {who: statistics.median(turn["cores"] for turn in turn) for who, turn in turns.items()},
        "roof": roof,
        "roof_share": bound_s(model, ours[-1]["tokens"], len(answers), roof) / seconds,
        # bfloat16: sums of another order, and the harness's class has its logits rounded.
        "equal": None if scored else sum(selected == other for selected, other in answers),
        "median_difference": statistics.median(abs(selected[0] - other[0]) for selected, other in answers)
        if scored
        else None,
    }


def bound_s(model: Path, tokens: dict[str, int], alive: int, roof: dict[str, float]) -> float:
    """The least time: every distinct beginning of a prompt computed once at the product rate; each decode pass of all
    sequences at the slower of that rate and one reading of the weights that they need."""
    from moelight.core.dtypes import dtype_named
    from moelight.hrm import costs
    from moelight.hrm.estimate import flops_per_token
    from moelight.profiles.families import profile_from_dir
    from moelight.profiles.tensor_list import pages

    profile = profile_from_dir(model)
    dtype, flops = dtype_named(profile.dtype), flops_per_token(profile)
    touched = 1 - (1 - profile.router.top_k / profile.experts.num_experts) ** alive
    weights = costs.dense_bytes(profile, dtype) + touched * len(pages(profile)) * costs.page_bytes(profile, dtype)
    passes = max(0, tokens["new"] / alive - 1)
    decode_s = max(alive * flops / roof["bf16_flops"], weights / roof["read_bytes_per_s"])
    return tokens["distinct"] * flops / roof["bf16_flops"] + passes * decode_s


def _print(model: str, kind: str, row: dict[str, Any]) -> None:
    seconds, tokens = row["seconds"], f"{row['prompts']} prompt tokens ({row['distinct']} distinct), {row['new']} new"
    print(f"{model}: {kind}: {row['requests']} requests, {tokens}")
    for who in (OURS, THEIRS):
        note = f"  batch size {row['hf_batch_size']}, {row['hf_experts']}" if who == THEIRS else ""
        print(f"  {who:10}{seconds[who]:>8.2f} s{row['requests'] / seconds[who]:>9.2f} requests/s{note}")
    print(f"  moelight is {row['ratio']:.2f} times as fast, at {row['roof_share']:.0%} of the roof")


if __name__ == "__main__":
    main()
