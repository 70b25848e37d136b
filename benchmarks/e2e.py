"""End to end, resident: moelight beside transformers on the same checkpoint, prompts, cores and minutes.

    python benchmarks/e2e.py [--model DIR] [--prompts 64 --prompt-len 128 --new-tokens 32] [--rounds 3]

Without --model a 0.9-billion-parameter mixtral-shaped bf16 checkpoint is made. Every contestant is a process of its
own; contestants take turns, so drift of a shared machine falls on all alike. Within a process the first generation
warms up and is not counted. Figures are medians over rounds; compare ratios, not tokens per second of two runs.

Printed beside them: the machine's read bandwidth and matrix rate measured in the same run, the share of that roof
reached, and the interpreter's own share of a pass. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_checkpoint import make_mixtral_0p9b

CONTESTANTS = ("moelight", "transformers-eager", "transformers-grouped_mm")


def main() -> None:
    args = _arguments()
    if args.child:
        print(json.dumps(_child(args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            args.model = make_mixtral_0p9b(Path(scratch) / "mixtral-0p9b")
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
        roofs = []
        for number in range(args.rounds):
            roofs.append(_run_child(args, "roof"))
            for name in CONTESTANTS if number % 2 == 0 else CONTESTANTS[::-1]:
                rounds[name].append(_run_child(args, name))
                print(f"round {number + 1}: {name}: {rounds[name][-1]['tokens_per_s']:.1f} tok/s", file=sys.stderr)
        result = _result(args, rounds, roofs)
    _print_table(result)
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generations", type=int, default=1, help="counted generations in each process")
    parser.add_argument("--child", choices=(*CONTESTANTS, "roof"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_child(args: argparse.Namespace, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--model", str(args.model)]
    for option in ("prompts", "prompt_len", "new_tokens", "generations"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _child(args: argparse.Namespace) -> dict[str, Any]:
    if args.child == "roof":
        return _roof()
    if args.child == "moelight":
        return _moelight(args)
    return _transformers(args, args.child.removeprefix("transformers-"))


def _prompts(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(0).integers(3, vocab, (args.prompts, args.prompt_len)).tolist()  # type: ignore[no-any-return]


def _moelight(args: argparse.Namespace) -> dict[str, Any]:
    from moelight import Engine, SamplingParams, Workload

    workload = Workload(
        num_requests=args.prompts, prompt_len=args.prompt_len, max_prompt_len=args.prompt_len, gen_len=args.new_tokens
    )
    how = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    with Engine.from_pretrained(args.model, device="cpu", workload=workload) as engine:
        prompts = _prompts(args, engine.profile.vocab_size)
        engine.generate(prompts, how)
        before = engine.stats
        for _ in range(args.generations):
            engine.generate(prompts, how)
        after = engine.stats
    wall_s = after.wall_s - before.wall_s
    return {
        "tokens_per_s": args.generations * args.prompts * args.new_tokens / wall_s,
        "load_s": after.load_s,
        "peak_rss_bytes": after.peak_rss_bytes,
        "python_share": (after.python_s - before.python_s) / wall_s,
        "passes": after.passes - before.passes,
    }


def _transformers(args: argparse.Namespace, experts: str) -> dict[str, Any]:
    import resource

    import torch
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, experts_implementation=experts, attn_implementation="sdpa"
    ).eval()
    load_s = time.perf_counter() - began
    ids = torch.tensor(_prompts(args, model.config.vocab_size))
    how = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        began = time.perf_counter()
        for _ in range(args.generations):
            model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        wall_s = time.perf_counter() - began
    return {
        "tokens_per_s": args.generations * args.prompts * args.new_tokens / wall_s,
        "load_s": load_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _roof() -> dict[str, Any]:
    """Read bandwidth over 1 GiB, and the matrix rate of one large product in bf16 and float32; best of five each."""
    import torch

    block = torch.ones(1 << 28)
    report = {"read_bytes_per_s": block.numel() * 4 / _best(block.sum)}
    for name in ("bfloat16", "float32"):
        left, right = torch.ones(2, 2048, 2048, dtype=getattr(torch, name))
        report[f"{name}_flops"] = 2 * 2048**3 / _best(functools.partial(torch.mm, left, right))
    return report


def _best(work: Any) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _result(args: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]], roofs: list[Any]) -> dict[str, Any]:
    def median(name: str, key: str) -> float:
        return statistics.median(report[key] for report in rounds[name])

    table = {name: {key: median(name, key) for key in rounds[name][0] if key != "passes"} for name in CONTESTANTS}
    roof = {key: max(report[key] for report in roofs) for key in roofs[0]}
    bound_s = _bound_s(args, roof)
    best_peer = max(table[name]["tokens_per_s"] for name in CONTESTANTS[1:])
    # Ratios are taken within each round, so that a slow minute does not fall on one side only.
    ratios = [
        mine["tokens_per_s"] / max(rounds[name][number]["tokens_per_s"] for name in CONTESTANTS[1:])
        for number, mine in enumerate(rounds["moelight"])
    ]
    return {
        "benchmark": "e2e",
        "model": args.model.name,
        "prompts": args.prompts,
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "contestants": table,
        "roof": roof,
        "roof_share": table["moelight"]["tokens_per_s"] * bound_s / (args.prompts * args.new_tokens),
        "ratio_to_best_peer": statistics.median(ratios),
        "ratio_of_medians": table["moelight"]["tokens_per_s"] / best_peer,
        "python_share": table["moelight"]["python_share"],
    }


def _bound_s(args: argparse.Namespace, roof: dict[str, float]) -> float:
    """The least time the job could take: prompts at the faster matrix rate; each decode pass at the slower of that
    rate and one reading of all weights."""
    from moelight.core.dtypes import dtype_named
    from moelight.hrm import costs
    from moelight.hrm.estimate import flops_per_token
    from moelight.profiles.families import profile_from_dir
    from moelight.profiles.stored import pages

    model = profile_from_dir(args.model)
    dtype = dtype_named(model.dtype)
    flops = flops_per_token(model, dtype)
    weights = costs.dense_bytes(model, dtype) + len(pages(model)) * costs.page_bytes(model, dtype)
    rate = max(roof["bfloat16_flops"], roof["float32_flops"])
    prefill_s = args.prompts * args.prompt_len * flops / rate
    decode_s = max(args.prompts * flops / rate, weights / roof["read_bytes_per_s"])
    return prefill_s + (args.new_tokens - 1) * decode_s


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'':26}{'tok/s':>9}{'load s':>9}{'peak GiB':>10}")
    for name, figures in result["contestants"].items():
        peak = figures["peak_rss_bytes"] / 2**30
        print(f"{name:26}{figures['tokens_per_s']:>9.1f}{figures['load_s']:>9.1f}{peak:>10.2f}")
    roof = result["roof"]
    rates = f"{roof['bfloat16_flops'] / 1e9:.0f} Gflop/s in bf16, {roof['float32_flops'] / 1e9:.0f} in float32"
    print(
        f"roof: reads {roof['read_bytes_per_s'] / 1e9:.1f} GB/s, products {rates}; "
        f"moelight reaches {result['roof_share']:.0%} of it, {result['ratio_to_best_peer']:.2f} x the best peer; "
        f"Python's own share of a pass {result['python_share']:.1%}"
    )


if __name__ == "__main__":
    main()
