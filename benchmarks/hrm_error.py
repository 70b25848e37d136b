"""Prediction against reality: tokens per second of whole runs as one kept profile of the machine predicts them, and as
they were.

    python benchmarks/hrm_error.py [--sets held-out fit] [--profile FILE.yaml] [--rounds 3] [--quick] [--out DIR]

The machine is measured once, before everything else, by `moelight profile`, as a user does it; or long ago, if its file
is given. Every run (`planner_sections/hrm_runs.py`) is a process of its own: it loads a checkpoint with random
weights, predicts, warms up, and generates from prompts of random ids; sequences ignore their end, so the work is the
workload's. Runs that have less memory than the model are truly limited to it and 384 MiB, where groups can be made.

Rounds are interleaved, every other one backwards; each run's median counts, beside a prediction that is the same in
every round. Errors are signed: +10 % is predicted faster than it was. The roof is the machine itself: how far a round
lies from the median of its run, which no prediction can do better than. Bytes read from the disk are predicted and
counted too, so that an error of rates can be told from one of amounts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner_sections.hrm_runs import SETS, Run, checkpoint
from runner.limits import enter, forget, memory_limit
from runner.run import in_rounds, run

from moelight.core.units import parse_bytes

SPARE_BYTES = 384 << 20  # beside the plan: what torch keeps for each shape of product, and a little page cache
# Figures of the profile that say which machine it was.
FIGURES = ("cpu_task", "disk_cached", "disk_direct", "cpu_under_disk", "disk_under_cpu", "busy_elsewhere")
Row = dict[str, Any]


def main() -> None:
    if "--child" in sys.argv:
        args = _child_arguments()
        print(json.dumps(_predict_and_measure(args.child, Run(**json.loads(args.run)), args.profile, args.group)))
    else:
        run("hrm_error", __doc__, _options, _measure, rounds=3)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    names = dict.fromkeys(args.sets)
    runs = [(name, item) for name in names for item in (quick(SETS[name]) if args.quick else SETS[name])]
    profile = args.profile or _profiled(args.temporary / "machine.yaml", args.scratch, quick=args.quick)
    models = {item.model: checkpoint(item.model, args.scratch) for _, item in runs}
    outcome: dict[int, list[Row]] = {index: [] for index in range(len(runs))}
    for _, order in in_rounds(outcome, 1 if args.quick else args.rounds):
        for index in order:
            name, item = runs[index]
            outcome[index].append(_run(name, item, models[item.model], profile))
    machine = machine_facts(profile, retained=args.profile is not None)
    rows = [combined(item) for item in outcome.values()]
    print("\n".join(map(_line, rows)))
    sets = {name: summary(rows, name) for name in names}
    for name in names:
        print(_said(name, sets[name]))
    return {"machine": machine, "sets": sets, "rows": rows}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["held-out"])
    parser.add_argument("--profile", type=Path, help="what moelight profile -o measured earlier; else it does so now")
    parser.add_argument("--quick", action="store_true", help="one run of each model, once, on a quick profile: a check")


def _child_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    for name in ("child", "profile", "group"):
        parser.add_argument(f"--{name}", type=Path)
    return parser.parse_args()


def quick(runs: Sequence[Run]) -> list[Run]:
    """The last run of each model: those have the least memory, where any has little."""
    return list({run.model: run for run in runs}.values())


def _profiled(path: Path, disk: Path, *, quick: bool) -> Path:
    """What a user has who once called ``moelight profile``."""
    command = [sys.executable, "-m", "moelight.cli.main", "profile", "--device", "cpu", "-o", str(path)]
    options = ["--disk-dir", str(disk), *(["--quick"] if quick else [])]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return path


def _run(name: str, run: Run, model: Path, profile: Path) -> Row:
    """One process; its files out of the page cache before."""
    forget(model)
    with memory_limit(parse_bytes(run.host_memory) + SPARE_BYTES) as group:
        command = [sys.executable, __file__, "--child", str(model), "--run", json.dumps(asdict(run))]
        command += ["--profile", str(profile), *([] if group is None else ["--group", str(group)])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    limited = group is not None
    row = {"set": name, "run": asdict(run), "label": run.label, "limited": limited, **json.loads(done.stdout)}
    print(_line(combined([row])), file=sys.stderr, flush=True)
    return row


def _predict_and_measure(model: Path, run: Run, profile: Path, group: Path | None) -> Row:
    """Predict, then run."""
    from moelight import Engine, SamplingParams, Workload
    from moelight.core.schedule import Lane
    from moelight.hrm.estimate import estimate
    from moelight.hrm.machine_model import speeds_of
    from moelight.profiles.hardware import load_hardware_profile
    from moelight.runtime.calibration.timing import Others

    if group is not None:
        enter(group)
    speeds = speeds_of(load_hardware_profile(str(profile)))
    work = Workload(
        num_requests=run.requests, prompt_len=run.prompt_len, max_prompt_len=run.prompt_len, gen_len=run.gen_len
    )
    draw = random.Random(0)
    with Engine.from_pretrained(
        model,
        hw=str(profile),
        host_memory=run.host_memory,
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        schedule=run.schedule,
        workload=work,
        prefix_caching=False,  # some prompts warm up, and then come again
    ) as engine:
        vocab = engine.profile.vocab_size
        predicted = estimate(engine.profile, engine.policy, work, speeds)
        prompts = [[draw.randrange(3, vocab) for _ in range(run.prompt_len)] for _ in range(run.requests)]
        sampling = SamplingParams(max_tokens=run.gen_len, ignore_eos=True)
        engine.generate(prompts[: max(2, run.requests // 8)], SamplingParams(max_tokens=2, ignore_eos=True))
        before, others = engine.stats, Others()
        engine.generate(prompts, sampling)
        after, busy = engine.stats, others.cores()
    read = after.lanes[Lane.DISK].bytes - before.lanes[Lane.DISK].bytes
    reading_s = sum(phase.passes * phase.lanes["disk"] for phase in predicted.phases)
    return {
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "measured_tokens_per_s": (after.completion_tokens - before.completion_tokens) / (after.wall_s - before.wall_s),
        "binding": predicted.binding,
        "measured_binding": max(after.lanes, key=lambda lane: after.lanes[lane].busy_s - before.lanes[lane].busy_s),
        "predicted_disk_bytes": reading_s * speeds.disk,
        "measured_disk_bytes": read,
        "resident": engine.policy.weights.host,
        "micro_batch_tokens": engine.policy.micro_batch_tokens,
        "others_busy": busy,
    }


def combined(result: Sequence[Row]) -> Row:
    """The rounds of one run as one row: medians, every round's rate, and how far rounds lie from their median."""
    rates = [row["measured_tokens_per_s"] for row in result]
    measured, predicted = (
        statistics.median(row[f"{label}_tokens_per_s"] for row in result) for label in ("measured", "predicted")
    )
    return {
        **result[0],
        "predicted_tokens_per_s": predicted,
        "measured_tokens_per_s": measured,
        "rounds_tokens_per_s": rates,
        "noise": statistics.median(abs(rate / measured - 1.0) for rate in rates) if len(rates) > 1 else 0.0,
        "error": predicted / measured - 1.0,
        "measured_disk_bytes": statistics.median(row["measured_disk_bytes"] for row in result),
        "others_busy": max(row["others_busy"] for row in result),
    }


def summary(rows: Sequence[Row], name: str) -> Row:
    """Errors over the set ``name``, and over its runs by the lane that was predicted to bind."""
    selected = [row for row in rows if row["set"] == name]
    by_lane = {
        lane: [row for row in selected if row["binding"] == lane] for lane in sorted({r["binding"] for r in selected})
    }
    return {**_errors(selected), "by_binding": {lane: _errors(some) for lane, some in by_lane.items()}}


def _errors(rows: Sequence[Row]) -> Row:
    errors = [row["error"] for row in rows]
    return {
        "runs": len(rows),
        "median_error": statistics.median(map(abs, errors)),
        "worst_error": max(errors, key=abs),
        "median_signed_error": statistics.median(errors),
        "roof_error": statistics.median(row["noise"] for row in rows),
    }


def machine_facts(path: Path, *, retained: bool) -> Mapping[str, Any]:
    """What the predictions rest on; ``retained``: from an earlier time."""
    from moelight.profiles.hardware import load_hardware_profile

    profile = load_hardware_profile(str(path))
    tiers = {tier.name: tier.bandwidth_bytes_per_s for tier in profile.tiers}
    return {
        "processor": platform.processor() or platform.machine(),
        "notes": profile.notes,
        "kept": retained,
        "age_s": round(time.time() - path.stat().st_mtime),
        "bytes_per_s": tiers,
        "peak_flops": {unit.name: unit.peak_flops for unit in profile.processors},
        **{name: profile.figure(name) for name in FIGURES if profile.figure(name) is not None},
    }


def _line(row: Row) -> str:
    predicted, measured = row["predicted_disk_bytes"], row["measured_disk_bytes"]
    read = f"  read {measured / predicted:.0%} of predicted" if predicted else ""
    return (
        f"{row['label']:58s} resident {row['resident']:4.0%}  predicted {row['predicted_tokens_per_s']:8.1f}  "
        f"measured {row['measured_tokens_per_s']:8.1f} tok/s  {row['error']:+6.1%}  ({row['binding']} binds)"
        f"{read}"
    )


def _share(predicted: float, measured: float) -> str:
    return f"{measured / predicted:.0%}"


def _said(name: str, result: Row) -> str:
    def described(errors: Row) -> str:
        return (
            f"median {errors['median_error']:.1%}, worst {errors['worst_error']:+.1%}, "
            f"half above {errors['median_signed_error']:+.1%}, over {errors['runs']} runs"
        )

    parts = "; ".join(f"{lane} binds: {described(errors)}" for lane, errors in result["by_binding"].items())
    return f"{name}: {described(result)} (roof: rounds lie {result['roof_error']:.1%} from their median); {parts}"


if __name__ == "__main__":
    main()
