"""Prediction against reality: the machine is profiled, then runs of different models, N, μ and budgets are predicted
and measured.

    python benchmarks/hrm_error.py [--rounds 3] [--runs N] [--out FILE.json]

Nothing is tuned to the runs: the machine is profiled right before each of them (one round of what moelight profile
does; a shared machine is another one some minutes later), through the same kernels, and the prediction is made before
the run. Each run is a process of its own: it loads a checkpoint with random weights, warms up, and generates from
prompts of random ids; sequences ignore their end, so the work is the workload's. Runs with less memory than the model
are truly limited to it and 384 MiB, so that pages come from the disk and not from the page cache.

All runs are made in several rounds, and each run's median counts. The table shows tokens per second predicted and
measured; the last line is JSON with the median and the worst error.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from limited import enter, forget, memory_limit
from make_checkpoint import make_checkpoint, make_shape, scaled_config

from moelight.core.units import parse_bytes

SPARE_BYTES = 384 << 20  # beside the plan: what torch keeps for each shape of product, and a little page cache


@dataclass(frozen=True, kw_only=True)
class Run:
    """One setting: which model, N and μ, how much host memory, and the work."""

    model: str
    batch_size: int
    micro_batch_size: int | None = None
    host_memory: str = "12GiB"
    requests: int = 64
    prompt_len: int = 128
    gen_len: int = 32
    schedule: str = "cgopipe"

    @property
    def label(self) -> str:
        """One line of the table."""
        mu = self.micro_batch_size or self.batch_size
        return (
            f"{self.model:8s} N {self.batch_size:3d} mu {mu:3d} {self.host_memory:>7s} "
            f"{self.requests:3d} x {self.prompt_len:4d} + {self.gen_len:3d} {self.schedule}"
        )


RUNS = (
    Run(model="mixtral", batch_size=64),
    Run(model="mixtral", batch_size=16, requests=32),
    Run(model="mixtral", batch_size=4, requests=8),
    Run(model="mixtral", batch_size=1, requests=3),
    Run(model="mixtral", batch_size=64, micro_batch_size=16),
    Run(model="mixtral", batch_size=128, requests=128, prompt_len=32, gen_len=64),
    Run(model="mixtral", batch_size=32, requests=32, prompt_len=512, gen_len=16),
    Run(model="mixtral", batch_size=64, host_memory="1GiB"),
    Run(model="mixtral", batch_size=32, requests=32, host_memory="1400MiB"),
    Run(model="mixtral", batch_size=64, host_memory="1GiB", schedule="serial"),
    Run(model="qwen", batch_size=64),
    Run(model="qwen", batch_size=16, requests=32),
    Run(model="qwen", batch_size=4, requests=8),
    Run(model="qwen", batch_size=64, micro_batch_size=32, host_memory="1GiB"),
    Run(model="olmoe", batch_size=64, prompt_len=256),
    Run(model="olmoe", batch_size=8, requests=16, gen_len=64),
)


def main() -> None:
    args = _arguments()
    if args.profile:
        _profile(args.profile)
        return
    if args.child:
        print(json.dumps(_measure(Path(args.child), Run(**json.loads(args.run)))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: _checkpoint(name, Path(scratch)) for name in {run.model for run in RUNS[: args.runs]}}
        rounds = [[_row(run, models[run.model]) for run in RUNS[: args.runs]] for _ in range(args.rounds)]
    rows = [_median(list(found)) for found in zip(*rounds, strict=True)]
    print("\n".join(map(_line, rows)))
    result = _result(rows)
    print(f"median error {result['median_error']:.1%}, worst {result['worst_error']:.1%} over {len(rows)} runs")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=len(RUNS))
    parser.add_argument("--rounds", type=int, default=3, help="how often every run is made; the median counts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hardware", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _profile(path: Path) -> None:
    """One round of a measurement into the file ``path``."""
    from moelight.profiles.hardware_text import write_hardware_profile
    from moelight.runtime.gauges.effort import FULL
    from moelight.runtime.gauges.machine import measure_machine
    from moelight.runtime.machine import find_machine

    effort = replace(FULL, quiet_rounds=1, host_s=20.0, figure_s=0.3, point_s=0.04)
    write_hardware_profile(measure_machine(find_machine("cpu"), effort, name="here", disk_dir=path.parent), path)


def _checkpoint(name: str, scratch: Path) -> Path:
    """Models of 0.9 billion parameters: few large experts, many small ones, and OLMoE's own proportions."""
    if name == "mixtral":
        return make_shape("mixtral-0p9b", scratch)
    sizes = {
        "qwen": ("qwen3-30b-a3b", {"layers": 12, "hidden": 1024, "intermediate": 384, "experts": 64}),
        "olmoe": ("olmoe-1b-7b", {"layers": 8, "hidden": 1024, "intermediate": 512, "experts": 64}),
    }
    model, changes = sizes[name]
    config = scaled_config(model, **changes, heads=16, kv_heads=4 if name == "qwen" else 16, head_dim=64, vocab=8192)
    make_checkpoint(scratch / name, config)
    return scratch / name


def _row(run: Run, model: Path) -> dict[str, Any]:
    this, hardware = [sys.executable, __file__], model.parent / "machine.yaml"
    forget(model)
    subprocess.run([*this, "--profile", str(hardware)], check=True)
    with memory_limit(parse_bytes(run.host_memory) + SPARE_BYTES) as group:
        command = [*this, "--child", str(model), "--run", json.dumps(asdict(run)), "--hardware", str(hardware)]
        command += [] if group is None else ["--group", str(group)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row = {"run": asdict(run), "label": run.label, "limited": group is not None, **json.loads(done.stdout)}
    print(_line(row), file=sys.stderr, flush=True)
    return row


def _median(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs, the one with the middle error; all errors beside it."""
    ordered = sorted(found, key=lambda row: row["error"])
    return {**ordered[len(ordered) // 2], "errors": [row["error"] for row in found]}


def _measure(model: Path, run: Run) -> dict[str, Any]:
    """Predict, then run."""
    from moelight import Engine, SamplingParams, Workload
    from moelight.hrm.estimate import estimate
    from moelight.hrm.speeds import speeds_of
    from moelight.profiles.hardware import load_hardware_profile

    args = _arguments()
    if args.group:
        enter(args.group)
    work = Workload(
        num_requests=run.requests, prompt_len=run.prompt_len, max_prompt_len=run.prompt_len, gen_len=run.gen_len
    )
    draw = random.Random(0)
    with Engine.from_pretrained(
        model,
        hw=str(args.hardware),
        host_memory=run.host_memory,
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        schedule=run.schedule,
        workload=work,
        prefix_caching=False,  # some prompts warm up, and then come again
    ) as engine:
        vocab = engine.profile.vocab_size
        predicted = estimate(engine.profile, engine.policy, work, speeds_of(load_hardware_profile(str(args.hardware))))
        prompts = [[draw.randrange(3, vocab) for _ in range(run.prompt_len)] for _ in range(run.requests)]
        sampling = SamplingParams(max_tokens=run.gen_len, ignore_eos=True)
        engine.generate(prompts[: max(2, run.requests // 8)], SamplingParams(max_tokens=2, ignore_eos=True))
        before = engine.stats
        engine.generate(prompts, sampling)
        after = engine.stats
    measured = (after.completion_tokens - before.completion_tokens) / (after.wall_s - before.wall_s)
    return {
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "measured_tokens_per_s": measured,
        "error": predicted.tokens_per_s / measured - 1.0,
        "binding": predicted.binding,
        "resident": engine.policy.weights.host,
        "micro_batch_tokens": engine.policy.micro_batch_tokens,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['label']:58s} resident {row['resident']:4.0%}  predicted {row['predicted_tokens_per_s']:8.1f}  "
        f"measured {row['measured_tokens_per_s']:8.1f} tok/s  {row['error']:+6.1%}  ({row['binding']} binds)"
    )


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "benchmark": "hrm_error",
        "machine": platform.processor() or platform.machine(),
        "runs": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
